"""What an engine makes of a published model at one and a half windows: real_model.py LOADER

    python scripts/real_model.py MODEL
    python scripts/loaders/real_model.py LOADER --model MODEL --text BOOK.txt --work DIR
    (vllm, llama.cpp)

MODEL is extended to twice its context, without training; each token of the last 2,048 of 12,288
of the book is held against stock transformers' of the same checkpoint and of the base, in
float32 throughout (llama.cpp reads what its own converter makes of both). Printed are the engine's
mean loss, and how far its log-probabilities lie from either.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
from measure import ENGINES, HERE, environment, llama_cpp_source, run
from transformers import AutoTokenizer

import ropext

LENGTH, METHODS = 12_288, ("yarn", "ntk", "pi")


def made(model: Path, work: Path) -> dict[str, Path]:
    """name -> checkpoint: the base, and what each method writes."""
    for method in METHODS:
        if not (work / method).exists():
            ropext.extend(str(model), str(work / method), method=method, factor=2)
    return {"base": model} | {method: work / method for method in METHODS}


def converted(places: dict[str, Path], converter: Path, python: Path, work: Path) -> list[Path]:
    """A GGUF of each, in float32."""
    out = []
    for name, place in places.items():
        out.append(work / f"{name}.gguf")
        if not out[-1].exists():
            run(python, HERE / "convert_gguf.py", converter, place, out[-1])
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("loader", choices=("vllm", "llama.cpp"))
    parser.add_argument(
        "--model", type=Path, required=True, help="what scripts/real_model.py wrote"
    )
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    given = parser.parse_args()
    work = given.work / "real-model"
    work.mkdir(parents=True, exist_ok=True)
    engine = next(own for own in ENGINES if own.loader == given.loader and own.pins)
    python, places = environment(engine, given.work), made(given.model, work)
    ids = AutoTokenizer.from_pretrained(given.model)(given.text.read_text("utf-8")).input_ids
    np.save(work / "ids.npy", ids[:LENGTH])
    stock, output = work / "stock.npz", work / f"{given.loader}.npz"
    if not stock.exists():
        run(
            sys.executable, HERE / "read_transformers.py", work / "ids.npy", stock, *places.values()
        )
    read = list(places.values())
    if given.loader == "llama.cpp":
        read = converted(
            places, llama_cpp_source(given.work) / "convert_hf_to_gguf.py", python, work
        )
    run(python, HERE / engine.reader, work / "ids.npy", output, *read)
    truth, found = np.load(stock), np.load(output)
    base = truth[str(given.model)]
    print(
        f"| {given.loader} {found['version']} | loss | stock's | from stock's | from the base's |"
    )
    print("|---|---|---|---|---|")
    for (name, place), path in zip(places.items(), read, strict=True):
        if f"{path}/error" in found:
            print(f"| {name} | {found[f'{path}/error']} | | | |")
            continue
        said, right = found[str(path)], truth[str(place)]
        apart = [np.abs(said - other).mean() for other in (right, base)]
        print(
            f"| {name} | {-said.mean():.4f} | {-right.mean():.4f} | "
            f"{apart[0]:.1e} | {apart[1]:.1e} |"
        )


if __name__ == "__main__":
    main()
