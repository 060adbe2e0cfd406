"""Write ropext/planning/measured.json: the effect of untrained scaling on the README's model.

    python scripts/make_measured.py [FILE]

It reads the cells that benchmarks/real_model.py and real_model_keys.py wrote. `worse` is the loss
in nats per token above the loss on truncated text, on the same tokens, over the far half of the
texts. `inside` is the same over the tokens inside the context. `found` is the share of the needles
found that truncation cuts off.
"""

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
CELLS = ROOT / "benchmarks/results/real-model"
PLACE = ROOT / "ropext/planning/measured.json"
# The shape that the checkpoint of scripts/real_model.py has.
MODEL = {
    "name": "SmolLM2-135M-Instruct",
    "context": 8192,
    "theta": 100000.0,
    "layers": 30,
    "heads": 9,
    "kv_heads": 3,
    "head_dim": 64,
}
PART = 256  # tokens of a sum, as in benchmarks/real_model.py
LENGTHS = {2: "16384-bfloat16", 4: "32768-bfloat16", 8: "65536-bfloat16"}
METHODS = ("yarn", "llama3", "ntk", "dynamic", "pi")
KINDS = {"novels": CELLS, "code": CELLS / "code", "manuals": CELLS / "manuals"}
FEWEST = 6  # texts, below which a mean is not printed


def cells(path: Path) -> dict[str, Any]:
    """Return the measurements of each text; nothing if the file is not there."""
    return json.loads(path.read_text("utf-8")) if path.is_file() else {}


def losses(folder: Path, method: str, length: int) -> tuple[float, float] | None:
    """Return nats per token above truncated text, over the far half and inside the context."""
    own, base = cells(folder / f"{method}.json"), cells(folder / "short.json")
    texts = [text for text in own if text in base]
    if len(texts) < FEWEST:
        return None
    gaps = []
    for text in texts:
        parts = zip(own[text]["nll"], base[text]["nll"], strict=True)
        gaps.append([scaled - short for scaled, short in parts])
    half = length // 2
    inside = MODEL["context"]
    far = sum(sum(parts[half // PART :]) for parts in gaps)
    near = sum(sum(parts[: inside // PART]) for parts in gaps)
    scored = inside - 1  # nothing predicts the first token
    return far / (half * len(texts)), near / (scored * len(texts))


def found(folder: Path, method: str, factor: int) -> float | None:
    """Return the share of the needles found that truncation cuts off."""
    right = [item["right"] for item in cells(folder / f"{method}.json").values()]
    cut = [depths[at] for depths in right for at in depths if float(at) < 1 - 1 / factor]
    return sum(cut) / len(cut) if cut else None


def measured() -> dict[str, Any]:
    """Return the content of the file."""
    factors: dict[str, Any] = {}
    for factor, name in LENGTHS.items():
        methods: dict[str, Any] = {}
        for method in METHODS:
            entry: dict[str, Any] = {"worse": {}, "inside": {}}
            for kind, folder in KINDS.items():
                gaps = losses(folder / name, method, factor * MODEL["context"])
                if gaps is not None:
                    entry["worse"][kind], entry["inside"][kind] = (round(gap, 4) for gap in gaps)
            share = found(CELLS / "keys" / name, method, factor)
            if share is not None:
                entry["found"] = round(share, 4)
            if entry["worse"]:
                methods[method] = entry
        factors[str(factor)] = methods
    return {"model": MODEL, "factors": factors}


if __name__ == "__main__":
    place = Path(sys.argv[1]) if sys.argv[1:] else PLACE
    place.write_text(json.dumps(measured(), indent=1) + "\n", "utf-8")
