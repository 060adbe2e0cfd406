"""Log-probabilities by one transformers: read_transformers.py IDS.npy OUT.npz DIRECTORY ...

Runs by its path, in the environment of that transformers; imports nothing of ropext.
"""

import inspect
import sys
from typing import Any

import numpy as np
import torch
import transformers

LAST = 2048  # positions told
QUADRATIC = 4096  # tokens up to which the whole matrix of scores is made


def log_probabilities(directory: str, ids: np.ndarray) -> np.ndarray:
    """Of the last tokens, each after those before it."""
    # Exact in every family: other implementations leave out what some of them add to the scores.
    attention = "eager" if len(ids) <= QUADRATIC else None
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory,
        torch_dtype=torch.float32,
        attn_implementation=attention,
        trust_remote_code=False,
        use_safetensors=True,
    ).eval()
    # The logits of a whole long text would not fit.
    keeps = "logits_to_keep" in inspect.signature(model.forward).parameters
    some = {"logits_to_keep": LAST + 1} if keeps else {}
    tokens = torch.as_tensor(ids)
    with torch.inference_mode():
        logits = model(tokens[None], use_cache=False, **some).logits[0, -LAST - 1 : -1]
        found = [
            row.double().log_softmax(-1)[token].item()
            for row, token in zip(logits, tokens[-len(logits) :], strict=True)
        ]
    return np.array(found)


def main(ids: str, output: str, directories: list[str]) -> None:
    """Write name -> log-probabilities, name/error -> what was said, and the version."""
    transformers.utils.logging.set_verbosity_error()
    tokens = np.load(ids)
    found: dict[str, Any] = {"version": np.array(transformers.__version__)}
    for directory in directories:
        try:
            found[directory] = log_probabilities(directory, tokens)
        except Exception as error:  # a version fails in its own ways: what it says is kept
            found[f"{directory}/error"] = np.array(f"{type(error).__name__}: {error}"[:2000])
    np.savez(output, **found)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
