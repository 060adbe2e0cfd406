"""The proof of a grown position table: an input as long as the table, through the first layer.

Loaded by child.py, by path: it imports nothing of ropext.
"""

import copy
from typing import Any

LONGEST = 1 << 15  # tokens; attention that is not fused would want gigabytes
LAYERS = ("num_hidden_layers", "encoder_layers", "decoder_layers", "text_layers")


def shallow(config: Any, path: list[str]) -> Any:
    """The config with one layer where its class can be built so."""
    cut = copy.deepcopy(config)
    part = cut
    for key in path:
        part = getattr(part, key)
    for key in LAYERS:
        if isinstance(getattr(part, key, None), int):
            setattr(part, key, 1)
    return cut


def load(
    cls: Any, config: Any, directory: str, path: list[str], trust_remote_code: bool
) -> tuple[Any, str]:
    """The model with its weights: one layer of it, or all where it has settings for each layer."""
    import torch

    def built(own: Any) -> Any:
        return cls.from_pretrained(
            directory,
            config=own,
            dtype=torch.float32,
            use_safetensors=True,
            trust_remote_code=trust_remote_code,
        ).eval()

    try:
        return built(shallow(config, path)), "its first layer"
    except Exception:  # a list for each layer, a pattern of layers: the whole model then
        return built(config), "the whole model"


def read_last(
    cls: Any, config: Any, directory: str, entry: dict[str, Any], trust_remote_code: bool
) -> dict[str, Any]:
    """Whether stock reads so many tokens, and all that it gives for them is finite."""
    import torch

    length, path = entry["last"], entry["text_path"]
    if length > LONGEST:
        return {"failed": None, "said": f"forward not run: more than {LONGEST} tokens"}
    model, said = load(cls, config, directory, path, trust_remote_code)
    part = getattr(model, "text_model", model) if path else model
    vocab = part.config.get_text_config().vocab_size
    first = min(16, vocab // 2)  # below stand the special tokens; padding would take no position
    ids = first + torch.arange(length)[None] % (vocab - first)
    try:
        with torch.no_grad():
            out = part(input_ids=ids)
    except (IndexError, RuntimeError) as error:
        return {"failed": str(error).splitlines()[0], "said": ""}
    except (TypeError, ValueError) as error:  # another input is wanted beside the tokens
        return {"failed": None, "said": f"forward not run: {str(error).splitlines()[0]}"}
    tensors = [value for value in out.values() if isinstance(value, torch.Tensor)]
    if not all(bool(torch.isfinite(value).all()) for value in tensors):
        return {"failed": "not all it gives is finite", "said": ""}
    return {"failed": None, "said": f"{said} reads {length} tokens, and all it gives is finite"}
