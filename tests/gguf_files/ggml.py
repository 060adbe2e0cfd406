"""What llama.cpp computes from a GGUF, in its own float32, read by the gguf package: the judge.

Line by line from llama-context.cpp (the constructor), ggml.c (ggml_rope_yarn_corr_dims) and
ggml-cpu/ops.cpp (ggml_rope_cache_init, rope_yarn) of 0c1e57098.
"""

import numpy as np
from gguf_files.making import gguf

F = np.float32


def keys(path):
    fields = gguf.GGUFReader(path).fields
    return {key: own.contents() for key, own in fields.items() if not key.startswith("GGUF.")}


def tensors(path):
    return {own.name: np.array(own.data) for own in gguf.GGUFReader(path).tensors}


def rope(path, dim, freqs=("rope_freqs.weight",), log_multiplier=0.0, betas=(32.0, 1.0)):
    """Return the angle of each pair at position 1, and the factor of cos and sin."""
    kept, held = keys(path), tensors(path)
    arch = kept["general.architecture"]

    def at(key, default):
        return kept.get(f"{arch}.rope.{key}", default)

    scaling = at("scaling.type", "linear")
    factor = F(at("scaling.factor", 0.0))
    freq_scale = F(1) if factor == 0 or scaling == "none" else F(1) / factor
    base = F(at("freq_base", 10000.0))
    n_ctx_orig = at("scaling.original_context_length", kept[f"{arch}.context_length"])
    ext_factor = F(scaling == "yarn")
    attn = F(1)
    if ext_factor:
        scale = F(1) / freq_scale
        attn = F(1) if scale <= 1 else F(0.1) * np.log(scale) + F(1)
        if log_multiplier:
            attn /= F(1) if scale <= 1 else F(0.1) * F(log_multiplier) * np.log(scale) + F(1)
        attn *= F(1) / (F(1) + F(0.1) * np.log(scale))
    attn *= F(at("scaling.attn_factor", 1.0))

    def correction(turns):
        return F(dim) * np.log(F(n_ctx_orig) / (F(turns) * F(2) * F(np.pi))) / (F(2) * np.log(base))

    low = max(F(0), np.floor(correction(betas[0])))
    high = min(F(dim - 1), np.ceil(correction(betas[1])))
    factors = next((held[name] for name in freqs if name in held), np.ones(dim // 2, F))
    theta_scale, theta, angles = base ** F(-2.0 / dim), F(1), []
    for i0 in range(0, dim, 2):
        extrap = theta / F(factors[i0 // 2])
        angle = interp = freq_scale * extrap
        if ext_factor:
            y = (i0 // 2 - low) / max(F(0.001), high - low)
            mix = (F(1) - min(F(1), max(F(0), y))) * ext_factor
            angle = interp * (F(1) - mix) + extrap * mix
        angles.append(float(angle))
        theta = theta * theta_scale
    if ext_factor:
        attn *= F(1) + F(0.1) * np.log(F(1) / freq_scale)
    return np.array(angles), float(attn)
