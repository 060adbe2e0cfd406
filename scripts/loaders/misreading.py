"""What readers that have one thing wrong make of a config, as configs that say so."""

from collections.abc import Callable
from typing import Any

from ropext import families

Config = dict[str, Any]

ATTENTION = {"attention_factor", "attn_factor", "short_mscale", "long_mscale"}
BETAS = {"beta_fast", "beta_slow"}
PAIRS = {"short_factor", "long_factor"}


def misreadings(config: Config, plain: Config) -> dict[str, Config]:
    """Return the misread configs by their mistake, in words that follow "reads it"."""
    params = families.read(config).scaled_sites[0].params
    found = {
        "without its scaling": plain,
        "with theta 10,000": with_theta(config, 10000.0),
    }
    if (slid := _everywhere(config, _slid)) != config:
        found["with its sliding layers scaled"] = slid
    if (PAIRS | {"factor"}) & params.keys():
        found["with its factor applied twice"] = _everywhere(config, _twice)
    for what, keys in (("attention factor", ATTENTION), ("betas", BETAS)):
        if keys & params.keys():
            found[f"without its {what}"] = _without(config, keys)
    if ATTENTION & params.keys() and BETAS & params.keys():
        found["without its attention factor and betas"] = _without(config, ATTENTION | BETAS)
    if params["rope_type"] == "yarn" and not (ATTENTION | {"mscale"}) & params.keys():
        found["with an attention factor of 1"] = _unmoved(config)
    if "mscale_all_dim" in params:
        found["without mscale_all_dim"] = _without(config, {"mscale_all_dim"})
        unmoved = _unmoved(found["without mscale_all_dim"])
        found["without mscale_all_dim in its softmax"] = unmoved
    if params.get("partial_rotary_factor", 1.0) != 1 and "long_factor" not in params:
        found["with all channels rotated"] = _with(
            config, partial_rotary_factor=1.0, rotary_pct=1.0
        )
    if "low_freq_factor" in params:
        low, high = params["low_freq_factor"], params["high_freq_factor"]
        swapped = _with(config, low_freq_factor=high, high_freq_factor=low)
        found["with low_freq_factor and high_freq_factor swapped"] = swapped
    if "llama_4_scaling_beta" in params:
        found["without the scaling of its queries"] = _with(config, llama_4_scaling_beta=0.0)
    if params.get("long_factor") != params.get("short_factor"):
        long, short = params["long_factor"], params["short_factor"]
        found["with its long factors for short inputs"] = _with(config, short_factor=long)
        found["with its short factors for long inputs"] = _with(config, long_factor=short)
    return found


def with_theta(config: Config, theta: float) -> Config:
    """Return the config with another theta, under each of its names."""
    return _with(config, rope_theta=theta, rotary_emb_base=theta)


def _everywhere(config: Config, change: Callable[[Config], Config]) -> Config:
    """Return a config with every dict in it changed, itself too."""
    items = config.items()
    return change({k: _everywhere(v, change) if isinstance(v, dict) else v for k, v in items})


def _with(config: Config, **values: Any) -> Config:
    """Return the config with other values under its present keys."""
    kept = values.keys()
    return _everywhere(config, lambda own: own | {k: values[k] for k in kept & own.keys()})


def _without(config: Config, keys: set[str]) -> Config:
    return _everywhere(config, lambda own: {k: v for k, v in own.items() if k not in keys})


def _unmoved(config: Config) -> Config:
    """Return the config with an attention factor of 1 in every dict that scales."""
    return _everywhere(config, lambda d: d | {"attention_factor": 1.0} if "factor" in d else d)


def _slid(own: Config) -> Config:
    by_layer = own.get("rope_parameters") or {}
    if "sliding_attention" not in by_layer:
        return own
    full = {k: v for k, v in by_layer["full_attention"].items() if k != "rope_theta"}
    both = by_layer | {"sliding_attention": by_layer["sliding_attention"] | full}
    return {k: v for k, v in own.items() if k != "rope_scaling"} | {"rope_parameters": both}


def _twice(own: Config) -> Config:
    squared = {key: own[key] ** 2 for key in {"factor"} & own.keys()}
    pairs = {key: [p**2 for p in own[key]] for key in PAIRS & own.keys()}
    return own | squared | pairs
