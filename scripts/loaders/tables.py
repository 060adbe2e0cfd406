"""Compute stock transformers' tables of a config, layer by layer, and a loader's differences.

LAYER/cos and LAYER/sin hold every position and pair, the attention factor included. LAYER/softmax
is the factor of the logits. LAYER/queries scales the queries by position, if anything does.
LAYER/axes is how many pairs turn by each axis of an image, if by several, and whether they
interleave.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
# Relative, in the frequencies and in what scales; as in the kit, it is what float32 costs.
SAME = 4e-6

Tables = dict[str, np.ndarray]


def halved(table: torch.Tensor) -> np.ndarray:
    """Return one column a pair: models keep two, side by side or in two halves."""
    values = table.reshape(-1, table.shape[-1]).double().numpy()
    half = values.shape[1] // 2
    if np.array_equal(values[:, :half], values[:, half:]):
        return values[:, :half]
    if np.array_equal(values[:, ::2], values[:, 1::2]):
        return values[:, ::2]
    return values


def stock(directory: Path, length: int, config: dict[str, Any] | None = None) -> Tables:
    """Return the tables of stock transformers, by another config if one is given."""
    read = (
        transformers.AutoConfig.from_pretrained(directory)
        if config is None
        else transformers.AutoConfig.for_model(**config)
    )
    classes = (transformers.AutoModelForImageTextToText, transformers.AutoModelForCausalLM)
    kind = next(own for own in classes if type(read) in own._model_mapping)
    model = kind.from_config(read, attn_implementation="eager").eval()
    read = read.get_text_config()
    positions = torch.arange(length)
    found: Tables = {}

    def note(module: Any, _: Any, given: dict[str, Any]) -> None:
        layer = module.layer_idx
        found[f"{layer}/softmax"] = np.array(module.scaling)
        turned = given.get("position_embeddings")
        kind, full = type(module).__name__, getattr(module, "sliding_window", None) is None
        full = full if "Exaone4" not in kind else not (full or module.is_sliding)
        if (
            "Cohere2" in kind or "Exaone4" in kind
        ) and full:  # they rotate in windowed layers alone
            return
        if turned is None or not getattr(module, "use_rope", True):
            return
        if isinstance(turned, torch.Tensor):  # DeepSeek-V2 turns complex numbers
            turned = (turned.real, turned.imag)
        found[f"{layer}/cos"], found[f"{layer}/sin"] = map(halved, turned)
        if sections := getattr(read, "rope_parameters", {}).get("mrope_section"):
            mixed = read.rope_parameters.get("mrope_interleaved", False)
            found[f"{layer}/axes"] = np.array([*sections, mixed])
        scale = getattr(sys.modules[type(module).__module__], "get_llama_4_attn_scale", None)
        if scale is not None:
            keys = ("llama_4_scaling_beta", "original_max_position_embeddings")
            own = scale(positions[None], *(read.rope_parameters[key] for key in keys))
            found[f"{layer}/queries"] = own.flatten().numpy()

    for module in model.modules():
        if hasattr(module, "layer_idx") and hasattr(module, "scaling"):
            module.register_forward_pre_hook(note, with_kwargs=True)
    with torch.inference_mode():
        model(positions[None] % read.vocab_size)
    return found


def difference(ours: Tables, theirs: Tables) -> str:
    """Return how a loader's tables (ours) differ from stock's, "" if they are the same."""
    layers = sorted({name.partition("/")[0] for name in theirs}, key=int)
    found: dict[str, list[str]] = {}
    for layer in layers:
        for what in _differences(ours, theirs, layer):
            found.setdefault(what, []).append(layer)
    some = f" (layers {{}} of 0 to {len(layers) - 1})"
    return "; ".join(
        what + ("" if len(own) == len(layers) else some.format(", ".join(own)))
        for what, own in found.items()
    )


def _differences(ours: Tables, theirs: Tables, layer: str) -> list[str]:
    scale, wanted = float(ours[f"{layer}/softmax"]), float(theirs[f"{layer}/softmax"])
    told = [] if near(scale, wanted) else [f"a softmax scale {scale / wanted:.4g} times stock's"]
    known = [f"{layer}/cos" in own for own in (ours, theirs)]
    if not any(known):
        return told
    if not all(known):
        return [*told, "rotates where stock does not" if known[0] else "does not rotate"]
    mine, stocks = (own[f"{layer}/cos"] + 1j * own[f"{layer}/sin"] for own in (ours, theirs))
    if mine.shape != stocks.shape:
        return [*told, f"rotates {mine.shape[1]} pairs, stock {stocks.shape[1]}"]
    size, wanted = np.abs(mine[0]).mean(), np.abs(stocks[0]).mean()
    if not near(size, wanted):
        told.append(f"an attention factor of {size:.6g}, not {wanted:.6g}")
    angle = np.angle(mine / size / (stocks / wanted))
    # No angle turns faster than one a token.
    bound = SAME * (1 + np.arange(len(mine))[:, None] * np.angle(stocks[1]))
    if (np.abs(angle) > bound).any():
        speeds = np.angle(mine[1]) / np.angle(stocks[1])
        told.append(f"frequencies {speeds.min():.3g} to {speeds.max():.3g} times stock's")
    axes = [list(own.get(f"{layer}/axes", ())) for own in (ours, theirs)]
    if axes[0] != axes[1]:
        told.append("images are turned as if they were text")
    return told + _queries(ours, theirs, layer)


def _queries(ours: Tables, theirs: Tables, layer: str) -> list[str]:
    mine, stocks = (own.get(f"{layer}/queries", np.ones(1)) for own in (ours, theirs))
    alike = np.allclose(mine, stocks, rtol=SAME, atol=0)
    return [] if alike else ["another scaling of the queries by position"]


def near(a: float, b: float) -> bool:
    return abs(a - b) <= SAME * abs(b)
