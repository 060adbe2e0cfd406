"""Do two checkouts compute the same, bit for bit, on this machine?

    python tests/same_answers.py OLD NEW [--only STORY ...]

It runs nine short stories with the code of each, on one process and on two. It compares every
tensor that they write, the positions of each written config, every token's loss, every answer and
every metric. The golden transcripts compare printed words; here only numbers count. A row says
"same", or the largest difference. Exit code 1 if one differs.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as parquet
from safetensors.numpy import load_file

DATA = "--data ropext://held-out --max-docs 3 --lengths 256,512"
TUNE = "--data ropext://tuning --batch-tokens 1024 --steps 3"
RECIPE = """
model: ropext://demo
extend: {factor: 2, method: yarn}
fit: {data: ropext://tuning, steps: 2, batch_tokens: 1024, held_out: 8, retrieval_items: 2}
finetune: {data: ropext://tuning, steps: 2, batch_tokens: 1024, eval_documents: 2}
evaluate: {data: ropext://held-out, max_docs: 3, lengths: "256,512", tasks: passkey, items: 2}
"""
AUTO = """
model: ropext://demo
extend: {factor: 2, method: auto, data: ropext://tuning}
fit: {steps: 2, batch_tokens: 1024}
"""
# Story, processes, command. Later ones read what earlier ones wrote.
STORIES = (
    ("extend", 1, "extend ropext://demo --factor 2 --no-verify -o extend"),
    ("fit", 1, f"fit ropext://demo --factor 2 {TUNE} --held-out 8 --retrieval-items 2 -o fit"),
    ("finetune", 1, f"finetune extend {TUNE} --control --eval-documents 2 -o finetune"),
    ("finetune-two", 2, f"finetune extend {TUNE} --eval-documents 2 -o finetune-two"),
    (
        "eval",
        1,
        f"eval finetune {DATA} --tasks passkey,mkey --items 2 --losses eval.parquet -o eval",
    ),
    ("eval-two", 2, f"eval extend {DATA} --losses eval-two.parquet -o eval-two"),
    (
        "methods",
        1,
        f"eval ropext://demo --method pi,yarn --factor 2 {DATA} --losses methods.parquet "
        "-o methods",
    ),
    ("auto", 1, "run auto.yaml -o auto"),
    ("run", 1, "run recipe.yaml -o run"),
)


def tell(story: str, processes: int, line: str, code: Path, folder: Path) -> None:
    """Run one command with a checkout's code."""
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    start = [sys.executable, *(launch if processes > 1 else []), "-m", "ropext"]
    environment = {**os.environ, "PYTHONPATH": str(code), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [*start, *line.split()],
        cwd=folder,
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{story} of {code}: exit {done.returncode}\n{done.stderr[-3000:]}")
    (folder / f"{story}.stdout").write_text(done.stdout, "utf-8")


def numbers(folder: Path, story: str) -> Iterator[tuple[str, Any]]:
    """Yield a story's results, by name."""
    place = folder / story
    for path in sorted(place.rglob("*.safetensors")):
        for name, tensor in load_file(path).items():
            yield f"{path.relative_to(place)}: {name}", tensor
    for path in sorted(place.rglob("config.json")):
        config = json.loads(path.read_text("utf-8"))
        yield f"{path.relative_to(place)}: positions", config.get("rope_parameters")
    losses = folder / f"{story}.parquet"
    if losses.exists():
        for name, column in parquet.read_table(losses).to_pydict().items():
            yield f"losses: {name}", np.array(column)
    for path in sorted(place.rglob("results.json")):
        yield from metrics(json.loads(path.read_text("utf-8")), str(path.relative_to(place)))
    for path in sorted(place.glob("ropext.json")):
        run = json.loads(path.read_text("utf-8")).get("run", {})
        yield from metrics(run.get("evaluation") or {}, "run")
    for path in sorted(place.rglob("items.jsonl")):
        yield str(path.relative_to(place)), path.read_text("utf-8").splitlines()


def metrics(content: dict[str, Any], name: str) -> Iterator[tuple[str, Any]]:
    for label, variant in content.get("variants", {}).items():
        for metric, value in variant["metrics"].items():
            yield f"{name}: {label} {metric}", value


def difference(one: Any, other: Any) -> str:
    """Return the difference of two values; "" if they are the same."""
    if one is None or other is None:
        return "" if one is other else "is in one of them alone"
    if isinstance(one, np.ndarray):
        if one.shape != other.shape or one.dtype != other.dtype:
            return f"{one.dtype} {one.shape}, {other.dtype} {other.shape}"
        if np.array_equal(one, other, equal_nan=one.dtype.kind == "f"):
            return ""
        if one.dtype.kind != "f":
            return f"{int((one != other).sum())} of {one.size} differ"
        apart = np.abs(one.astype(np.float64) - other.astype(np.float64))
        return f"up to {np.nanmax(apart):.3g} apart"
    return "" if one == other else f"{str(one)[:100]} and {str(other)[:100]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkouts", nargs=2, type=Path, metavar="CHECKOUT")
    parser.add_argument("--only", nargs="+", choices=[own[0] for own in STORIES])
    given = parser.parse_args()
    needed = {"extend", *(given.only or [])} | (
        {"finetune"} if "eval" in (given.only or []) else set()
    )
    wrong = 0
    with tempfile.TemporaryDirectory() as place:
        folders = [Path(place, name) for name in ("old", "new")]
        for folder in folders:
            folder.mkdir()
            (folder / "recipe.yaml").write_text(RECIPE, "utf-8")
            (folder / "auto.yaml").write_text(AUTO, "utf-8")
        for story, processes, line in STORIES:
            if given.only and story not in needed:
                continue
            for code, folder in zip(given.checkouts, folders, strict=True):
                tell(story, processes, line, code.resolve(), folder)
            old, new = (dict(numbers(folder, story)) for folder in folders)
            names = [*old, *(name for name in new if name not in old)]
            told = {name: difference(old.get(name), new.get(name)) for name in names}
            apart = {name: text for name, text in told.items() if text}
            wrong += len(apart)
            print(f"{story}: {len(names)} values, {len(apart)} differ", flush=True)
            for name, text in list(apart.items())[:20]:
                print(f"  {name}: {text}", flush=True)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
