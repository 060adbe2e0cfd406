"""Turn an engine's answers into a file; this imports nothing of ropext.

    python read_ENGINE.py IDS.npy OUT.npz CHECKPOINT ...

Readers run by their path, in the environment of their engine, and find this file in their folder.
"""

import sys
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

LAST = 2048  # positions told


def of_tokens(rows: Iterable[Any], tokens: Any) -> np.ndarray:
    """Return the log-probability of each token by the row of logits before it: the softmax in
    float64."""
    found = []
    for row, token in zip(rows, tokens, strict=True):
        own = np.array(row).astype(np.float64)
        own -= own.max()
        found.append(own[token] - np.log(np.exp(own).sum()))
    return np.array(found)


def axes_of(rotary: Any) -> np.ndarray | None:
    """Return the axes of a loader's rotary module, from the attributes that vLLM and SGLang
    share."""
    sections = getattr(rotary, "mrope_section", None)
    mixed = bool(getattr(rotary, "mrope_interleaved", False))
    return np.array([*sections, mixed]) if sections else None


def main(version: str, read: Callable[[str, np.ndarray], dict[str, Any]]) -> None:
    """Write checkpoint -> log-probabilities (the "" of the answer), checkpoint/KEY -> its other
    values, checkpoint/error -> the engine's message, and its version."""
    ids, output, *checkpoints = sys.argv[1:]
    tokens = np.load(ids)
    found: dict[str, Any] = {"version": np.array(version)}
    np.savez(output, **found)
    for place in checkpoints:
        try:
            told = read(place, tokens)
            found |= {
                f"{place}/{key}" if key else place: np.array(own) for key, own in told.items()
            }
        except Exception as error:  # an engine fails in its own ways: its message is kept
            found[f"{place}/error"] = np.array(f"{type(error).__name__}: {error}"[:2000])
        np.savez(output, **found)
