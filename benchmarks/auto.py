"""What `--method auto` takes, beside an exhaustive search on the same documents.

Claims: the tail loss of what it writes is within 1 % (in nats) of the lowest of all closed forms,
the model untouched, and fits from three starts; for at most 40 % of the tokens that the search
reads; and its verdict is that of the base's short window on documents that took no part.

    python benchmarks/auto.py [--model DIR --data FILE] [--factor 2 4 8] [--steps 40]

Without --model, the bundled checkpoint and its documents. Tokens that are trained on count as three
that are read. Losses of both are over all documents, those that `auto` chooses by and those that it
keeps for its verdict; gain and verdict are its own.
"""

import argparse
import json
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

import ropext
from ropext.options.extend import TRAINED
from ropext.results.rounds import UNTOUCHED
from ropext.training import plan_fit

STARTS = ("yarn", "llama3", "dynamic")
CLOSED = "pi,ntk,dynamic,by-parts,llama3,yarn"


def told(sentence: str) -> None:
    sys.stderr.write(sentence + "\n")


def chosen(model: str, data: str, factor: float, steps: int, folder: Path) -> dict[str, Any]:
    """What came of a choice: its record with the evaluation's numbers."""
    recipe = {
        "model": model,
        "extend": {"method": "auto", "factor": factor, "data": data},
        "fit": {"steps": steps},
    }
    ropext.run(recipe, folder / "out", say=told).raise_if_failed()
    run = json.loads((folder / "out/ropext.json").read_text(encoding="utf-8"))["run"]
    return {**run["choice"], "variants": run["evaluation"]["variants"]}


def losses(model: str, data: str, target: int, **options: Any) -> dict[str, float]:
    """Tail loss at the target by variant, nats a token."""
    done = ropext.evaluate(model, data=data, lengths=str(target), **options)
    found = done.results["variants"].items()
    # The base through its short window is truncation: what the verdict is against, not to be taken.
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
        plan = plan_fit(model, str(choosing), **asked)
        spent += TRAINED * plan.tokens + plan.forward_tokens
        done = ropext.fit(model, str(choosing), output, say=told, **asked)
        assert done is not None  # the first process, and the only one
        judged[start] = done.judgements
        own = losses(str(output), data, target)
        found |= {f"fit from {start}": own[label] for label in own if label != UNTOUCHED}
    return found, spent, judged


def row(model: str, data: str, factor: float, steps: int) -> str:
    """One line of the table."""
    with tempfile.TemporaryDirectory() as room:
        folder = Path(room)
        choice = chosen(model, data, factor, steps, folder)
        found, spent, judged = searched(model, data, factor, steps, folder, choice)
        own = list(losses(str(folder / "out"), data, int(choice["target"])).values())[-1]
    final = list(choice["variants"])[-1]
    best = min(found, key=lambda name: found[name])
    gain = choice["verdict"]["gain"]
    share = choice["forward_tokens"] / spent
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
    args = parser.parse_args()
    print(f"{platform.processor() or platform.machine()}, torch {torch.__version__}, transformers")
    print(f"{transformers.__version__}; {' '.join(sys.argv)}\n")
    names = (
        "model, factor, taken, loss, lowest of the search, above it, tokens, gain over truncation"
    )
    print(f"| {' | '.join(names.split(', '))} | verdict |\n|{'---|' * 9}")
    for factor in args.factor:
        print(row(args.model, args.data, factor, args.steps), flush=True)


if __name__ == "__main__":
    main()
