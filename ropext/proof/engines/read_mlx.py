"""Log-probabilities by MLX-LM: read_mlx.py IDS.npy OUT.npz DIRECTORY ...

Runs by its path, in an environment with mlx-lm; imports nothing of ropext.
"""

import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.utils import load_model

LAST = 2048  # positions told


def log_probabilities(directory: str, ids: np.ndarray) -> np.ndarray:
    """Of the last tokens, each after those before it."""
    model, _ = load_model(Path(directory))
    # The softmax on this side: in MLX it is float32.
    model.set_dtype(mx.float32)
    logits = model(mx.array(ids)[None])[0, -LAST - 1 : -1].astype(mx.float32)
    found = []
    for row, token in zip(logits, ids[-len(logits) :], strict=True):
        own = np.array(row).astype(np.float64)
        own -= own.max()
        found.append(own[token] - np.log(np.exp(own).sum()))
    return np.array(found)


def main(ids: str, output: str, directories: list[str]) -> None:
    """Write name -> log-probabilities, name/error -> what was said, and the version."""
    tokens = np.load(ids)
    found: dict[str, Any] = {"version": np.array(version("mlx-lm"))}
    for directory in directories:
        try:
            found[directory] = log_probabilities(directory, tokens)
        except Exception as error:  # an engine fails in its own ways: what it says is kept
            found[f"{directory}/error"] = np.array(f"{type(error).__name__}: {error}"[:2000])
    np.savez(output, **found)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
