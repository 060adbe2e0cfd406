"""A fit whose steps are too large, with and without going back to its start.

Claim: on a Llama of context 128 that reads characters (six pairs), at 8 times its context, the
default goes back to its start after half of the steps and ends lower than all steps at one rate,
on as many tokens; and no default ends at its start where its rate, or a third of it, gains.

    python benchmarks/fit_back.py --data BOOKS --work DIR [--factor 8]
    python benchmarks/fit_back.py --model MODEL --data FILE [--factor 4 8]

BOOKS is a folder of .txt files: the first third (by name) trains the model, which this script
makes; of the others 80 documents of 5,000 characters are fitted on, eight of them held out.
With --model it is that model, fitted on that file; both rates are then run only where the default
ends at its start.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import transformers as hf
from finetune_steps import JUDGING, make_llama, passages

from ropext.narration import Call, Hooks
from ropext.results import rules
from ropext.training import count_training, defaults, train

CONTEXT, WIDTH, STEPS, DOCUMENTS = 128, 48, 400, 80


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True)
    parser.add_argument("--work", type=Path, help="where the characters' model is kept")
    parser.add_argument("--model")
    parser.add_argument("--factor", type=float, nargs="+", default=[8.0])
    given = parser.parse_args()
    model, data = (given.model, given.data) if given.model else characters(given.data, given.work)
    for factor in given.factor:
        if given.model:
            if fitted(model, data, factor, "default", rules.is_lower):
                continue
            rate = count_training("fit", model, data, factor=factor).settings.learning_rate.value
            rates = {"its rate throughout": rate, "a third throughout": rate / defaults.SLOWER}
            for name, rate in rates.items():
                fitted(model, data, factor, name, never_back, learning_rate=rate)
        else:
            for name, lower in (("one rate", never_back), ("default", rules.is_lower)):
                fitted(model, data, factor, name, lower, retrieval_share=0.0, retrieval_items=0)


def never_back(*_: Any) -> bool:
    """Stand for the rule `is_lower`: after half of the steps no fit returns to its start."""
    return True


def characters(books: str, work: Path) -> tuple[str, str]:
    """Make the model of characters and the file of documents, where they are not there yet."""
    work.mkdir(parents=True, exist_ok=True)
    texts = [file.read_text(encoding="utf-8") for file in sorted(Path(books).glob("*.txt"))]
    third, model = len(texts) // 3, work / "characters"
    if not model.exists():
        make_llama(texts[:third], model, CONTEXT, WIDTH, STEPS)
    documents = passages(texts[third:], hf.AutoTokenizer.from_pretrained(model))[JUDGING:]
    data = work / "fitted.jsonl"
    lines = [json.dumps({"text": text}) for text in documents[:DOCUMENTS]]
    data.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(model), str(data)


def fitted(model: str, data: str, factor: float, name: str, lower: Any, **options: Any) -> int:
    """Run one fit and print how it was judged; return the step that it keeps."""
    with tempfile.TemporaryDirectory() as room, mock.patch.object(rules, "is_lower", lower):
        done = train(
            "fit", model, data, Path(room) / "out", factor=factor, call=Call(Hooks(told)), **options
        )
    assert done is not None  # the first process, and the only one
    losses = {step: round(loss, 4) for step, loss in done.judgements.items()}
    print(f"{factor:g} times, {name}: step {done.step}, {done.tokens:,} tokens. {done.reason}.")
    print(f"Far half by step: {losses}.", flush=True)
    step: int = done.step
    return step


def told(sentence: str) -> None:
    sys.stderr.write(sentence + "\n")


if __name__ == "__main__":
    main()
