"""Compare vLLM with stock transformers on a published model at one and a half windows.

    python scripts/real_model.py MODEL
    python scripts/loaders/real_model.py --model MODEL --text BOOK.txt --work DIR

MODEL is extended to twice its context by YaRN, without training. The last 2,048 of 12,288 tokens of
the book are compared with stock transformers' log-probabilities of the same checkpoint and of the
base, in float32 throughout. The script prints both losses, and how far apart the tokens are.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
from measure import ENGINES, HERE, environment, run
from transformers import AutoTokenizer

import ropext

LENGTH = 12_288


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--model", type=Path, required=True, help="what scripts/real_model.py wrote"
    )
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    given = parser.parse_args()
    work = given.work / "real-model"
    work.mkdir(parents=True, exist_ok=True)
    engine = next(own for own in ENGINES if own.loader == "vllm" and own.pins)
    places = {"base": given.model, "yarn": work / "yarn"}
    if not places["yarn"].exists():
        ropext.extend(str(given.model), str(places["yarn"]), method="yarn", factor=2)
    ids = AutoTokenizer.from_pretrained(given.model)(given.text.read_text("utf-8")).input_ids
    np.save(work / "ids.npy", ids[:LENGTH])
    outputs = work / "stock.npz", work / "vllm.npz"
    stock, vllm = (
        (Path(sys.executable), "read_transformers.py"),
        (environment(engine, given.work), engine.reader),
    )
    for (python, reader), output in zip((stock, vllm), outputs, strict=True):
        if not output.exists():
            run(python, HERE / reader, work / "ids.npy", output, *places.values())
    truth, found = map(np.load, outputs)
    print(f"| vllm {found['version']} | loss | stock's | from stock's | from the base's |")
    print("|---|---|---|---|---|")
    for name, place in places.items():
        right, said = truth[str(place)], found.get(str(place))
        if said is None:
            print(f"| {name} | {found[f'{place}/error']} | {-right.mean():.4f} | | |")
            continue
        gaps, lost = np.abs(said - right), np.abs(said - truth[str(given.model)])
        apart = f"{gaps.mean():.1e} (at most {gaps.max():.1e})"
        losses = f"{-said.mean():.4f} | {-right.mean():.4f}"
        print(f"| {name} | {losses} | {apart} | {lost.mean():.2f} |")


if __name__ == "__main__":
    main()
