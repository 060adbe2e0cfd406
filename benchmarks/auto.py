"""The choice of `--method auto`, compared with an exhaustive search on the same documents.

Claims: the tail loss of its output is within 1 % (in nats) of the lowest of all closed forms, the
model untouched, and fits from three starts. Its verdict equals the base's short window's on
documents that took no part. The share of the search's tokens leaves out the training tokens of the
choice's own fit (the pages of 23 and 24 November 2026 count them).

    python benchmarks/auto.py [--model DIR --data FILE] [--factor 2 4 8] [--steps 40]
    python benchmarks/auto.py --cells pays reads-on harms changes harms-stretched repeats
        [--factor 2 4]

Without --model, it uses the bundled checkpoint and its documents. With --cells it uses the model
for which the effect of extending is known (counting_model.py): a model that gains, a model that
reads further than its config states, and models that lose, also by every way to stretch. The cell
"repeats" is the bundled model on documents whose end already occurred in them, beyond its window.
The truth is the output's gain on a sample of its own.

A training token counts as three tokens that are read. Losses of both are over all documents,
`auto`'s choosing documents and the documents that it keeps for its verdict; gain and verdict are
its own.
"""

import argparse
import json
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

import counting_model
import numpy as np
import torch
import transformers

import ropext
from ropext.base.bundled import DATA, MODELS
from ropext.base.jsontext import read_values
from ropext.base.narration import NOBODY
from ropext.options.training import Fit
from ropext.pipeline.auto_plan import plan_choice
from ropext.pipeline.checked_recipe import open_recipe
from ropext.results import UNTOUCHED
from ropext.results.values import MARGIN, Value
from ropext.training.request import TrainingRequest

STARTS = ("yarn", "llama3", "dynamic")
# A token that is trained on costs its forward pass and two more backward.
TRAINED_COST = 3
CLOSED = "pi,ntk,dynamic,by-parts,llama3,yarn"
# For the counting model: how far it looks, and how many tokens at the end come from another
# mixture.
CELLS = {"pays": ("window", 0), "reads-on": ("any", 0), "harms": ("any", 48)}
CELLS |= {"changes": ("window", 48), "harms-stretched": ("window", 24)}
DOCUMENTS, SAMPLE = 72, 1000
WINDOW = 256  # window of the bundled model
PASSAGE = 112  # tokens that occur again at a document's end; the tail's 64 are among them


def told(sentence: str) -> None:
    sys.stderr.write(sentence + "\n")


def chosen(model: str, data: str, factor: float, steps: int, folder: Path) -> dict[str, Any]:
    """Return the outcome of a choice: its record with the evaluation's numbers."""
    recipe = {
        "model": model,
        "extend": {"method": "auto", "factor": factor, "data": data},
        "fit": {"steps": steps},
    }
    ropext.run(recipe, folder / "out", say=told).raise_if_failed()
    run = json.loads((folder / "out/ropext.json").read_text(encoding="utf-8"))["run"]
    verdict = plan_choice(open_recipe(recipe), NOBODY).verdict_tokens
    return {
        **run["choice"],
        "variants": run["evaluation"]["variants"],
        "spent": run["choice"]["forward_tokens"] + verdict,
    }


def losses(model: str, data: str, target: int, **options: Any) -> dict[str, float]:
    """Tail loss at the target by variant, nats a token."""
    done = ropext.evaluate(model, data=data, lengths=str(target), **options)
    found = done.results["variants"].items()
    # The base through its short window is truncation: the verdict's baseline, not a candidate.
    return {
        label: own["metrics"][f"tail_nll@{target}"]["value"]
        for label, own in found
        if label != "base"
    }


def searched(
    model: str, data: str, factor: float, steps: int, folder: Path, choice: dict[str, Any]
) -> tuple[dict[str, float], int, dict[str, dict[int, float]]]:
    """Loss of everything that could be taken, the tokens it took to know, and how each fit was
    judged on its way."""
    target, choosing = int(choice["target"]), folder / "out.run/choice/choosing.jsonl"
    found = losses(model, data, target, method=CLOSED, factor=str(factor))
    documents = choice["documents"] + choice["verdict_documents"]
    spent = documents * len(found) * target
    judged = {}
    for start in STARTS:
        output = folder / f"fit-{start}"
        asked: dict[str, Any] = {"factor": factor, "start": start, "steps": steps}
        with TrainingRequest(model, str(choosing), Fit(**asked)).prepared(None, NOBODY) as job:
            spent += TRAINED_COST * job.tokens + job.forward_tokens
        done = ropext.fit(model, str(choosing), output, say=told, **asked)
        assert done is not None  # the first process, and the only one
        judged[start] = done.judgements
        own = losses(str(output), data, target)
        found |= {f"fit from {start}": own[label] for label in own if label != UNTOUCHED}
    return found, spent, judged


def written(folder: Path, name: str, texts: list[str]) -> str:
    """Write a file of documents."""
    lines = [json.dumps({"text": text}) for text in texts]
    (folder / name).write_text("\n".join(lines), encoding="utf-8")
    return str(folder / name)


def repeating(target: int) -> list[str]:
    """Pieces of the bundled held-out documents that end with a passage of their own first half,
    further back than the model's window."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODELS["ropext://demo"])
    lines = Path(DATA["ropext://held-out"]).read_text(encoding="utf-8").splitlines()
    random = np.random.default_rng(0)
    found = []
    for line in lines:
        text = json.loads(line)["text"]
        begins = [at for at, _ in tokenizer(text, return_offsets_mapping=True)["offset_mapping"]]
        new = target + 4 - PASSAGE  # the seams can take tokens away
        for at in range(0, len(begins) - new, new):
            start = at + int(random.integers(0, new - WINDOW - 1))
            again = text[begins[start] : begins[start + PASSAGE + 8]]
            found.append(text[begins[at] : begins[at + new]] + again)
    return [found[at] for at in random.permutation(len(found))]


def drawn(cell: str, target: int, folder: Path) -> tuple[str, list[str], list[str]]:
    """Return a cell's model, the documents that choose and judge, and the sample."""
    if cell == "repeats":
        texts = repeating(target)
        return "ropext://demo", texts[:DOCUMENTS], texts[DOCUMENTS:]
    reach, last = CELLS[cell]
    counting_model.write_model(folder / "counts", reach)
    sizes = [(DOCUMENTS, 1), (SAMPLE, 2)]
    ours, sample = (counting_model.documents(n, target, seed, last) for n, seed in sizes)
    return str(folder / "counts"), ours, sample


def verdict_row(cell: str, factor: float, steps: int) -> str:
    """Return one line of the table of verdicts: the verdict, and a large sample's."""
    target = int((WINDOW if cell == "repeats" else counting_model.CONTEXT) * factor)
    with tempfile.TemporaryDirectory() as room:
        folder = Path(room)
        model, ours, sample = drawn(cell, target, folder)
        choice = chosen(model, written(folder, "data.jsonl", ours), factor, steps, folder)
        data = written(folder, "sample.jsonl", sample)
        done = ropext.evaluate(str(folder / "out"), data=data, lengths=str(target), max_docs=SAMPLE)
    own, final = list(done.results["variants"].values())[-1], list(choice["variants"])[-1]
    said, true = choice["verdict"]["gain"], own["metrics"][f"gain@{target}"]
    told(json.dumps({"said": said, "true": true, "choice": choice}, indent=1))
    judged, truth = (read_values(Value, gain, "a verdict").gains for gain in (said, true))
    if judged is False and true["ci95"][1] < MARGIN:  # a gain of less counts as none
        truth = False
    cells = [
        cell, f"{factor:g}", f"{choice['taken']}, {final}",
        *(f"{g['value']:+.3f} [{g['ci95'][0]:+.3f}, {g['ci95'][1]:+.3f}]" for g in (said, true)),
        choice["verdict"]["sentence"].partition(";")[0].partition(":")[0],
        "not known" if judged is None else "right" if judged == truth else "WRONG",
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def row(model: str, data: str, factor: float, steps: int) -> str:
    """Return one line of the table."""
    with tempfile.TemporaryDirectory() as room:
        folder = Path(room)
        choice = chosen(model, data, factor, steps, folder)
        found, spent, judged = searched(model, data, factor, steps, folder, choice)
        own = list(losses(str(folder / "out"), data, int(choice["target"])).values())[-1]
    final = list(choice["variants"])[-1]
    best = min(found, key=lambda name: found[name])
    gain = choice["verdict"]["gain"]
    share = choice["spent"] / spent
    taken = choice["taken"] if choice["taken"] == UNTOUCHED else f"{choice['taken']}, {final}"
    told(json.dumps({"losses": found, "own": own, "judged": judged, "choice": choice}, indent=1))
    cells = [
        Path(model).name or model, f"{factor:g}", taken, f"{own:.4f}", f"{best}: {found[best]:.4f}",
        f"{100 * (own / found[best] - 1):+.2f} %", f"{100 * share:.0f} %",
        f"{gain['value']:+.3f} [{gain['ci95'][0]:+.3f}, {gain['ci95'][1]:+.3f}]",
        choice["verdict"]["sentence"].partition(";")[0].partition(":")[0],
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="ropext://demo")
    parser.add_argument("--data", default="ropext://held-out")
    parser.add_argument("--factor", type=float, nargs="+", default=[2.0, 4.0, 8.0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--cells", nargs="+", choices=[*CELLS, "repeats"], default=())
    args = parser.parse_args()
    print(f"{platform.processor() or platform.machine()}, torch {torch.__version__}, transformers")
    print(f"{transformers.__version__}; {' '.join(sys.argv)}\n")
    if args.cells:
        names = "cell, factor, taken, gain by the verdict, gain by the sample, verdict"
        print(f"| {' | '.join(names.split(', '))} | is |\n|{'---|' * 7}")
        for cell in args.cells:
            for factor in args.factor:
                print(verdict_row(cell, factor, args.steps), flush=True)
        return
    names = (
        "model, factor, taken, loss, lowest of the search, above it, tokens, gain over truncation"
    )
    print(f"| {' | '.join(names.split(', '))} | verdict |\n|{'---|' * 9}")
    for factor in args.factor:
        print(row(args.model, args.data, factor, args.steps), flush=True)


if __name__ == "__main__":
    main()
