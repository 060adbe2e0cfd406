"""Log-probabilities by one transformers, in its environment."""

import inspect
from typing import Any

import numpy as np
import telling
import torch
import transformers

QUADRATIC = 4096  # tokens up to which the whole matrix of scores is made


def read(directory: str, ids: np.ndarray) -> dict[str, Any]:
    """Return the log-probabilities of the last tokens, each after those before it."""
    # Exact in every family: other implementations leave out terms that some families add to the
    # scores.
    attention = "eager" if len(ids) <= QUADRATIC else None
    config = transformers.AutoConfig.from_pretrained(directory, trust_remote_code=False)
    classes = (transformers.AutoModelForImageTextToText, transformers.AutoModelForCausalLM)
    known = [own for own in classes if type(config) in own._model_mapping]
    model = (
        (known or classes)[0]
        .from_pretrained(
            directory,
            torch_dtype=torch.float32,
            attn_implementation=attention,
            trust_remote_code=False,
            use_safetensors=True,
        )
        .eval()
    )
    # The logits of a whole long text would not fit.
    keeps = "logits_to_keep" in inspect.signature(model.forward).parameters
    some = {"logits_to_keep": telling.LAST + 1} if keeps else {}
    with torch.inference_mode():
        tokens = torch.as_tensor(ids)[None]
        logits = model(tokens, use_cache=False, **some).logits[0, -telling.LAST - 1 : -1]
    return {"": telling.of_tokens(logits, ids[-len(logits) :])}


if __name__ == "__main__":
    transformers.utils.logging.set_verbosity_error()
    telling.main(transformers.__version__, read)
