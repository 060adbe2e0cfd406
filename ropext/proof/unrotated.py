"""The proof where nothing rotates: an input as long as the table, through the first layer, and what
its attention is told of the distances of two tokens.

Loaded by child.py, by path: it imports nothing of ropext.
"""

import copy
import inspect
from typing import Any

LONGEST = 1 << 15  # tokens; attention that is not fused would want gigabytes
SQUARE = 1 << 11  # tokens, where every layer holds its whole square of distances
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

    def built(config: Any) -> Any:
        return cls.from_pretrained(
            directory,
            config=config,
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

    length, path, changes = entry["last"], entry["text_path"], dict[str, list[int]]()
    length = min(length, SQUARE) if entry["listen"] else length
    if length > LONGEST:
        return {"failed": None, "said": f"forward not run: more than {LONGEST} tokens"}
    model, said = load(cls, config, directory, path, trust_remote_code)
    names = ("text_model", "language_model", "decoder") if path else ()
    part = next((getattr(model, name) for name in names if hasattr(model, name)), model)
    vocab = part.config.get_text_config().vocab_size
    first = min(16, vocab // 2)  # below stand the special tokens; padding would take no position
    ids = first + torch.arange(length)[None] % (vocab - first)
    inputs = {"input_ids": ids}
    if entry["listen"]:
        listen(part, length, changes)
        if "decoder_input_ids" in inspect.signature(part.forward).parameters:
            inputs["decoder_input_ids"] = ids
    try:
        with torch.no_grad():
            out = part(**inputs)
    except (IndexError, RuntimeError) as error:
        return {"failed": str(error).splitlines()[0], "said": ""}
    except (TypeError, ValueError) as error:  # another input is wanted beside the tokens
        return {
            "failed": None,
            "said": f"forward not run: {str(error).splitlines()[0]}",
            "told": {},
        }
    tensors = [value for value in out.values() if isinstance(value, torch.Tensor)]
    if not all(bool(torch.isfinite(value).all()) for value in tensors):
        return {"failed": "not all it gives is finite", "said": ""}
    said = f"{said} reads {length} tokens, and all it gives is finite"
    return {"failed": None, "said": said, "told": changes, "read": length}


def listen(model: Any, length: int, heard: dict[str, list[int]]) -> None:
    """Note the distances at which each module is told something new: T5's buckets where its bias is
    looked up, DeBERTa's and XLNet's as their layers are given them."""
    names = {module: name for name, module in model.named_modules()}

    def hear(module: Any, args: Any, kwargs: Any) -> None:
        given = kwargs.get("relative_pos", kwargs.get("r"))
        given = args[0] if names[module].endswith("relative_attention_bias") else given
        if given is None or (len(given) != 2 * length and given.shape[-2:] != (length, length)):
            return
        ring = len(given) == 2 * length  # of all tokens before and behind; else one row for each
        line = given[: length + 1, 0] if ring else given.reshape(-1, length)[-1, :, None]
        changes = (line[1:] != line[:-1]).any(1).flip(0).nonzero()[:, 0] + 1
        heard[names[module]] = [0, *(change for change in changes.tolist() if change < length - 1)]

    for module in names:
        module.register_forward_pre_hook(hear, with_kwargs=True)
