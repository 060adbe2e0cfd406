"""Log-probabilities by MLX-LM: python read_mlx.py CHECKPOINTS OUT.npz [FAMILY ...]

Runs in an environment of its own (measure.py makes it): mlx-cpu 0.32.4 and mlx-lm 0.32.2.
"""

import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx_lm.utils import load_model


def log_probabilities(directory: Path, ids: np.ndarray) -> np.ndarray:
    """Of each token after the first."""
    model, _ = load_model(directory)
    logits = np.array(model(mx.array(ids)[None])[0].astype(mx.float32)).astype(np.float64)
    logits -= logits.max(-1, keepdims=True)
    rows = logits[:-1] - np.log(np.exp(logits[:-1]).sum(-1, keepdims=True))
    return np.take_along_axis(rows, ids[1:, None], 1)[:, 0]


def main(folder: Path, output: Path, families: list[str]) -> None:
    ids = np.load(folder / "ids.npy")
    found = {}
    for place in sorted(folder.glob("*/*/config.json")):
        family, form = place.parts[-3:-1]
        if families and family not in families:
            continue
        name = f"{family}/{form}"
        try:
            found[name] = log_probabilities(place.parent, ids)
        except Exception as error:  # an engine fails in its own ways: what it says is kept
            found[f"{name}/error"] = np.array(f"{type(error).__name__}: {error}"[:2000])
        print(name, found.get(f"{name}/error", "read"), flush=True)
    np.savez(output, **found)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
