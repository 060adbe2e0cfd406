"""Log-probabilities by one transformers: read_transformers.py CHECKPOINTS OUT.npz [FAMILY ...]

Runs in an environment of its own, which measure.py makes.
"""

import sys
from pathlib import Path

import numpy as np
import torch
import transformers


def log_probabilities(directory: Path, ids: np.ndarray) -> np.ndarray:
    """Of each token after the first."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, torch_dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.inference_mode():
        logits = model(torch.as_tensor(ids)[None]).logits[0].double()
    return logits[:-1].log_softmax(-1).gather(1, torch.as_tensor(ids)[1:, None])[:, 0].numpy()


def main(folder: Path, output: Path, families: list[str]) -> None:
    transformers.utils.logging.set_verbosity_error()
    ids = np.load(folder / "ids.npy")
    found = {"version": np.array(transformers.__version__)}
    for place in sorted(folder.glob("*/*/config.json")):
        name = "/".join(place.parts[-3:-1])
        if families and place.parts[-3] not in families:
            continue
        try:
            found[name] = log_probabilities(place.parent, ids)
        except Exception as error:  # a version fails in its own ways: what it says is kept
            found[f"{name}/error"] = np.array(f"{type(error).__name__}: {error}"[:2000])
    np.savez(output, **found)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
