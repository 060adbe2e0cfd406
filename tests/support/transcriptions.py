"""The papers and their published code, transcribed literally in float64. Nothing here is ropext's.

Variable names and the order of operations follow the sources, not ropext, so that one mistake can
hardly be made twice. Every function returns (inverse frequencies, factor on cos and sin).
"""

import math
from typing import Any

Result = tuple[list[float], float]


def rope(d: int, b: float) -> list[float]:
    """Compute RoFormer (arXiv 2104.09864), eq. 15: theta_i = 10000^(-2(i-1)/d), i = 1 .. d/2."""
    return [1.0 / b ** (2.0 * (i - 1) / d) for i in range(1, d // 2 + 1)]


def position_interpolation(d: int, b: float, L: int, L_new: int) -> Result:
    """Compute Chen et al. (arXiv 2306.15595), eq. 4: f'(x, m) = f(x, m L/L')."""
    return [theta * L / L_new for theta in rope(d, b)], 1.0


def ntk_aware(d: int, b: float, L: int, L_new: int) -> Result:
    """Compute bloc97's `base = base * a ** (dim / (dim - 2))`."""
    a = L_new / L
    base = b * a ** (d / (d - 2))
    return [1.0 / (base ** (k / d)) for k in range(0, d, 2)], 1.0


def dynamic_ntk(d: int, b: float, L: int, L_new: int) -> Result:
    """Compute emozilla's LlamaDynamicScaledRotaryEmbedding (ntk=True) at a sequence of L'
    tokens."""
    scaling_factor = L_new / L
    seq_len = L_new
    base = b * ((scaling_factor * seq_len / L) - (scaling_factor - 1)) ** (d / (d - 2))
    return [1.0 / (base ** (k / d)) for k in range(0, d, 2)], 1.0


def abf(d: int, b: float, b_new: float) -> Result:
    """Compute Xiong et al. (arXiv 2309.16039), section 4.1: another base."""
    return rope(d, b_new), 1.0


def ntk_by_parts(d: int, b: float, L: int, L_new: int, alpha: float, beta: float) -> Result:
    """Compute YaRN (arXiv 2309.00071), eq. 17 to 20, case by case as they are printed."""
    s = L_new / L
    out = []
    for k in range(d // 2):
        theta = b ** (-2.0 * k / d)
        wavelength = 2 * math.pi / theta
        r = L / wavelength
        if r < alpha:
            gamma = 0.0
        elif r > beta:
            gamma = 1.0
        else:
            gamma = (r - alpha) / (beta - alpha)
        out.append((1 - gamma) * theta / s + gamma * theta)
    return out, 1.0


def llama3(d: int, b: float, L: int, L_new: int, low_freq: float, high_freq: float) -> Result:
    """Compute Meta's `apply_scaling` as released with Llama 3.1."""
    scale_factor = L_new / L
    low_freq_wavelen = L / low_freq
    high_freq_wavelen = L / high_freq
    new_freqs = []
    for k in range(0, d, 2):
        freq = 1.0 / (b ** (k / d))
        wavelen = 2 * math.pi / freq
        if wavelen < high_freq_wavelen:
            new_freqs.append(freq)
        elif wavelen > low_freq_wavelen:
            new_freqs.append(freq / scale_factor)
        else:
            smooth = (L / wavelen - low_freq) / (high_freq - low_freq)
            new_freqs.append((1 - smooth) * freq / scale_factor + smooth * freq)
    return new_freqs, 1.0


def _find_correction_dim(num_rotations, dim, base, max_position_embeddings):
    return (dim * math.log(max_position_embeddings / (num_rotations * 2 * math.pi))) / (
        2 * math.log(base)
    )


def yarn(
    d: int,
    b: float,
    L: int,
    L_new: int,
    beta_fast: float = 32,
    beta_slow: float = 1,
    truncate: bool = True,
) -> Result:
    """Compute jquesnelle/yarn's LlamaYaRNScaledRotaryEmbedding; `truncate` as gpt-oss added it."""
    scale = L_new / L
    low = _find_correction_dim(beta_fast, d, b, L)
    high = _find_correction_dim(beta_slow, d, b, L)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, d - 1)
    if low == high:
        high += 0.001
    out = []
    for k in range(d // 2):
        pos_freq = b ** (2 * k / d)
        ramp = max(0.0, min(1.0, (k - low) / (high - low)))
        inv_freq_mask = 1 - ramp
        out.append(1.0 / (scale * pos_freq) * (1 - inv_freq_mask) + 1.0 / pos_freq * inv_freq_mask)
    mscale = 1.0 if scale <= 1 else 0.1 * math.log(scale) + 1.0
    return out, mscale


def longrope(d: int, b: float, L: int, L_new: int, ext_factors: list[float]) -> Result:
    """Compute microsoft/LongRoPE: 1 / (ext_factor * base^(k/d)), scaled by sqrt(1 + ln s / ln
    L)."""
    out = [1.0 / (ext * b ** (k / d)) for ext, k in zip(ext_factors, range(0, d, 2), strict=True)]
    scale = L_new / L
    return out, 1.0 if scale <= 1.0 else math.sqrt(1 + math.log(scale) / math.log(L))


def hunyuan_alpha(d: int, b: float, alpha: float) -> Result:
    """Compute HunYuan's released code: base * alpha ** (dim / (dim - 2)), a static NTK."""
    return rope(d, b * alpha ** (d / (d - 2))), 1.0


def proportional(d: int, b: float, share: float, factor: float) -> Result:
    """Compute Gemma 4's p-RoPE: the first share of the pairs turns, counted over the whole head."""
    turning = int(share * d // 2)
    return [theta / factor if i < turning else 0.0 for i, theta in enumerate(rope(d, b))], 1.0


def deepseek_softmax(factor: float, mscale_all_dim: float) -> float:
    """Compute DeepSeek-V2's yarn_get_mscale(factor, mscale_all_dim), squared as its attention
    does."""
    mscale = 1.0 if factor <= 1 else 0.1 * mscale_all_dim * math.log(factor) + 1.0
    return mscale * mscale


def deepseek_attention(factor: float, mscale: float, mscale_all_dim: float) -> float:
    """Compute the ratio of the two, which DeepSeek multiplies into cos and sin."""

    def get(m: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * m * math.log(factor) + 1.0

    return get(mscale) / get(mscale_all_dim)


def _stock(rope_dict: dict[str, Any], theta: float, dim: int) -> Result:
    kind = rope_dict.get("rope_type", rope_dict.get("type", "default"))
    if kind == "default":
        return rope(dim, theta), 1.0
    if kind == "linear":
        return [f / rope_dict["factor"] for f in rope(dim, theta)], 1.0
    original = rope_dict["original_max_position_embeddings"]
    if kind == "longrope":
        target = round(original * rope_dict["factor"])
        inv_freq, default = longrope(dim, theta, original, target, rope_dict["long_factor"])
        return inv_freq, rope_dict.get("attention_factor", default)
    if kind == "yarn":
        return yarn(dim, theta, original, round(original * rope_dict["factor"]))
    raise KeyError(kind)


def seen_by_transformers_4(config: dict[str, Any], names: dict[str, str], share: float) -> Result:
    """Read a config as 4.57's modeling_rope_utils: three keys at top level, and the class default
    for the share."""
    theta = config.get(names["theta"], 10_000.0)
    turning = config.get(names["share"], share)
    head = config["hidden_size"] // config["num_attention_heads"]
    return _stock(config.get("rope_scaling") or {}, theta, int(head * turning))


def seen_by_transformers_5(config: dict[str, Any], names: dict[str, str], share: float) -> Result:
    """Read a config as 5.23's convert_rope_params_to_dict: the legacy dict first, then top level,
    then the class."""
    rope_dict = config.get("rope_scaling") or config.get("rope_parameters") or {}
    theta = rope_dict.get("rope_theta", config.get(names["theta"], 10_000.0))
    turning = rope_dict.get("partial_rotary_factor", config.get(names["share"], share))
    head = config["hidden_size"] // config["num_attention_heads"]
    return _stock(rope_dict, theta, int(head * turning))
