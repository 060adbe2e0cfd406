"""Express a spectrum of llama.cpp's keys as a stock rope dict."""

import math
from collections.abc import Sequence

from ropext.base.errors import NotExpressible
from ropext.base.jsontext import Json
from ropext.families.loaders.gguf import STORED, GgufRope
from ropext.families.loaders.gguf import read as ggml_read
from ropext.scaling import forms
from ropext.scaling.forms import ORIGINAL
from ropext.scaling.rope import Rope, plain_inv_freq


def stock_form(
    rope: GgufRope, allowed: Sequence[str], dim: int, context: int, original: int | None
) -> dict[str, Json]:
    """Convert the rope keys in a GGUF's header to a stock rope dict with the same spectrum, without
    its theta. Raise NotExpressible if no allowed rope type gives it."""
    has_no_divisors = not rope.divisors or set(rope.divisors + rope.short) == {1.0}
    is_scaled = rope.scaling != "none" and rope.factor != 1
    if has_no_divisors and rope.attn_factor == 1 and not is_scaled:
        return {"rope_type": "default"}
    is_linear = rope.scaling == "linear" and rope.attn_factor == 1
    if has_no_divisors and is_linear and "linear" in allowed:
        linear: dict[str, Json] = {"rope_type": "linear", "factor": rope.factor}
        if original:
            linear[ORIGINAL] = original
        return linear
    if has_no_divisors and rope.scaling == "yarn" and "yarn" in allowed:
        return _yarn(rope, dim)
    if rope.scaling == "none" and rope.attn_factor == 1 and "llama3" in allowed:
        llama3 = _llama3(rope, dim)
        if llama3 is not None:
            return llama3
    plain_rope = Rope(dim, rope.freq_base, context, original or context)
    for params in forms.candidates(plain_rope, ggml_read(rope, dim), context):
        if params["rope_type"] in ("proportional", "longrope"):
            return params
    raise NotExpressible("no rope type that is allowed here stores these frequencies exactly")


def _yarn(rope: GgufRope, dim: int) -> dict[str, Json]:
    """Return the rope dict of transformers that computes a GGUF's YaRN."""
    out: dict[str, Json] = {"rope_type": "yarn", "factor": rope.factor}
    out[ORIGINAL] = rope.original
    if (rope.beta_fast, rope.beta_slow) != (forms.BETA_FAST, forms.BETA_SLOW):
        out |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow}
    if rope.log_multiplier:
        out |= {"mscale": 1.0, "mscale_all_dim": rope.log_multiplier}
    if rope.attn_factor != 1:
        out["attention_factor"] = ggml_read(rope, dim).attention_factor
    return out


def _llama3(rope: GgufRope, dim: int) -> dict[str, Json] | None:
    """Convert the rope factors read from a GGUF file to Llama 3.1's rope dict, or return None if
    they do not fit it.

    Its slowest pair is divided by the whole factor. A pair in its ramp gives the original length,
    with low 1 and high 4 as all releases have.
    """
    plain = plain_inv_freq(dim, rope.freq_base)
    factor = round(rope.divisors[-1], 4)
    ramp = list[tuple[float, float]]()  # a divisor, and the frequency that it divides
    for divisor, frequency in zip(rope.divisors, plain, strict=True):
        if 1.01 < divisor < factor * 0.99:
            ramp.append((divisor, frequency))
    if not ramp or factor <= 1:
        return None
    divisor, frequency = ramp[len(ramp) // 2]
    gamma = (1 / divisor - 1 / factor) / (1 - 1 / factor)
    original = round((1 + 3 * gamma) * 2 * math.pi / frequency)
    wanted = forms.llama3_pair_factors(plain, original, factor, 1.0, 4.0)
    # The ramp divides by nearly nothing in float32; a wrong length is off by more than this.
    if any(abs(a / b - 1) > 64 * STORED for a, b in zip(wanted, rope.divisors, strict=True)):
        return None
    out = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return out | {"original_max_position_embeddings": original}
