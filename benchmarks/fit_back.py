"""A fit whose steps are too large, with and without going back to its start.

Claim: on a Llama of context 128 that reads characters (six pairs), at 8 times its context, the
default goes back to its start after half of the steps and ends lower than all steps at one rate,
on as many tokens.

    python benchmarks/fit_back.py --data BOOKS --work DIR [--factor 8]

BOOKS is a folder of .txt files: the first third (by name) trains the model, which this script
makes; of the others 80 documents of 5,000 characters are fitted on, eight of them held out.
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

from ropext.training import judge, run_fit

CONTEXT, WIDTH, STEPS, DOCUMENTS = 128, 48, 400, 80


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--factor", type=float, nargs="+", default=[8.0])
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    books = [own.read_text(encoding="utf-8") for own in sorted(given.data.glob("*.txt"))]
    third, model = len(books) // 3, given.work / "characters"
    if not model.exists():
        make_llama(books[:third], model, CONTEXT, WIDTH, STEPS)
    texts = passages(books[third:], hf.AutoTokenizer.from_pretrained(model))[JUDGING:]
    data = given.work / "fitted.jsonl"
    lines = [json.dumps({"text": text}) for text in texts[:DOCUMENTS]]
    data.write_text("\n".join(lines) + "\n", encoding="utf-8")
    options: dict[str, Any] = {"retrieval_share": 0.0, "retrieval_items": 0}
    for factor in given.factor:
        for name, lower in (("one rate", lambda *_: True), ("default", judge.Judge.lower)):
            with (
                tempfile.TemporaryDirectory() as room,
                mock.patch.object(judge.Judge, "lower", lower),
            ):
                output = Path(room) / "out"
                done = run_fit(model, str(data), output, factor=factor, say=told, **options)
            assert done is not None
            losses = {step: round(loss, 4) for step, loss in done.judgements.items()}
            print(f"{factor:g} times, {name}: {done.kept}, {done.tokens:,} tokens. {done.reason}.")
            print(f"Far half by step: {losses}.", flush=True)


def told(sentence: str) -> None:
    sys.stderr.write(sentence + "\n")


if __name__ == "__main__":
    main()
