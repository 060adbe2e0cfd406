"""Convert the header of a GGUF into the config that transformers would have.

The Model is read from this config, as from a directory's. Plans and records show it before and
after the extension, and dequantised weights need it to load in transformers.
"""

from ropext.base.jsontext import Json
from ropext.families.config import defaults_of
from ropext.families.described import NO_FACTS
from ropext.families.table import Label, family
from ropext.files.gguf.geometry import FULL, WINDOWED, Geometry, WindowedLayers, share_of
from ropext.scaling.forms import ORIGINAL


def config_of(geometry: Geometry) -> dict[str, Json]:
    """Return the config that transformers would have, as far as positions need it."""
    row = geometry.row
    theta = family(row.type, NO_FACTS).theta[0]
    kinds: list[str] | None = None
    if geometry.kinds is not None:
        kinds = list(geometry.kinds)
    uses_windows = None  # the class's default
    if not geometry.window:
        uses_windows = False
    config: dict[str, Json] = {
        "model_type": row.type,
        "hidden_size": geometry.hidden,
        "num_hidden_layers": geometry.layers,
        "num_attention_heads": geometry.heads,
        "num_key_value_heads": geometry.kv_heads,
        "head_dim": geometry.head_dim,
        "max_position_embeddings": geometry.context,
        "vocab_size": geometry.vocab,
        theta: geometry.rope.freq_base,
        "rope_scaling": dict(geometry.scaling),
        "sliding_window": geometry.window,
        "layer_types": kinds,
        "max_window_layers": geometry.layers,
        "use_sliding_window": uses_windows,
        "full_attention_interval": geometry.interval or None,
        "num_nextn_predict_layers": geometry.drafting or None,
        "num_kv_shared_layers": geometry.shared_layers,
    }
    if row.partial:
        config[row.partial] = share_of(geometry.dim, geometry.head_dim)
    if row.name == "deepseek2":
        config["qk_rope_head_dim"] = geometry.dim
        config["kv_lora_rank"] = geometry.latent
        config["head_dim"] = None
    default = defaults_of(row.type, NO_FACTS).get(ORIGINAL)
    original = geometry.scaling.get(ORIGINAL, default)
    if default not in (None, original):
        config[ORIGINAL] = original  # without it, the class's default would override the dict's
    labels = family(row.type, NO_FACTS).labels
    if geometry.windowed is not None:
        config |= _by_layer_type(geometry, geometry.windowed, labels)
    return {name: value for name, value in config.items() if value is not None}


def _by_layer_type(
    geometry: Geometry, windowed: WindowedLayers, labels: tuple[Label, ...]
) -> dict[str, Json]:
    """Return the rope dicts of windowed and other layers, and the sizes of their heads. The caller
    leaves keys with the value None out of the config."""
    partial = geometry.row.partial
    of_full: dict[str, Json] = {"rope_theta": geometry.rope.freq_base}
    of_windowed: dict[str, Json] = {"rope_type": "default", "rope_theta": windowed.theta}
    if partial:
        of_full[partial] = share_of(geometry.dim, geometry.head_dim)
        of_windowed[partial] = share_of(windowed.turning, windowed.head_dim)
    of_full |= geometry.scaling
    rows = dict[str, Json]()
    for label in labels:
        if label.windowed:
            rows[label.name] = of_windowed
        else:
            rows[label.name] = of_full
    by_kind = geometry.kv_heads_by_kind
    changed: dict[str, Json] = {
        "num_key_value_heads": by_kind.get(WINDOWED, geometry.kv_heads),
        "num_global_key_value_heads": by_kind.get(FULL),
    }
    if by_kind:
        changed["attention_k_eq_v"] = True  # without it, stock ignores the heads by layer type
    changed["head_dim"] = windowed.head_dim
    changed["global_head_dim"] = geometry.head_dim
    changed["rope_parameters"] = rows
    of_full_layers = {"num_key_value_heads": by_kind.get(FULL), "head_dim": geometry.head_dim}
    own = dict[str, Json]()  # sizes for which the model type has no key
    for key, size in of_full_layers.items():
        if size not in (None, changed[key]) and not any(key in label.sizes for label in labels):
            own[key] = size
    if own:
        kinds = enumerate(geometry.kinds or ())
        changed["per_layer_config"] = {str(i): own for i, kind in kinds if kind == FULL}
    for moved in ("rope_theta", "rope_scaling", partial):
        changed[moved] = None
    return changed
