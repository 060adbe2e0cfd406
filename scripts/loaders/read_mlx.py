"""Log-probabilities by MLX-LM, in an environment that has it."""

from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import telling
from mlx_lm.utils import load_model


def read(directory: str, ids: np.ndarray) -> dict[str, Any]:
    """Return the log-probabilities of the last tokens, each after those before it."""
    model, _ = load_model(Path(directory))
    # The softmax on the other side: in MLX it is float32.
    model.set_dtype(mx.float32)
    logits = model(mx.array(ids)[None])[0, -telling.LAST - 1 : -1].astype(mx.float32)
    return {"": telling.of_tokens(logits, ids[-len(logits) :])}


if __name__ == "__main__":
    telling.main(version("mlx-lm"), read)
