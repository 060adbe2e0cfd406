"""The Model of a GGUF, straight from its header."""

from dataclasses import replace

from ropext.families import Model
from ropext.families.config import Dict, defaults_of
from ropext.families.described import NO_FACTS
from ropext.families.geometry import (
    CacheLayer,
    Sizes,
    attends,
    check_rotary_dim,
    derived_head_dim,
    is_windowed,
    layers_of_class,
    rotation_of_class,
)
from ropext.families.lengths import NAMED, ORIGINAL, StatedLengths, lengths
from ropext.families.model import (
    PREDICTS,
    Stated,
    length_notes,
    model_of,
    rope_from,
    rotating_layers,
    scaled_alone,
    with_lengths,
)
from ropext.families.params import normalised
from ropext.families.table import Family, family, is_mrope
from ropext.forms import Params
from ropext.gguf.geometry import WINDOWED, Geometry, share_of
from ropext.jsontext import Json
from ropext.rope import RopeSite

PARTIAL = "partial_rotary_factor"


def read_model(geometry: Geometry, source: str, context: int | None, original: int | None) -> Model:
    """The model that a header states, which sentences call `source`; `context` replaces a trained
    length that it misstates, `original` is the one before its scaling, where it does not say that.
    """
    kind = geometry.row.type
    row = family(kind, NO_FACTS)
    sizes = _sizes(geometry)
    sites = _sites(geometry, row, sizes)
    beside = StatedLengths(geometry.context, context, original, row.original, source=source)
    spans = tuple(lengths(beside, site) for site in sites)
    sites = with_lengths(sites, spans)
    notes = length_notes(spans)
    if geometry.drafting:
        notes.append(PREDICTS)
    stated = Stated(
        model_type=kind,
        text_type=kind,
        facts=NO_FACTS,
        sizes=sizes,
        sites=sites,
        stock_sites=sites,
        lengths=spans,
        cache=_cache(geometry, sizes),
        mrope=is_mrope(kind, NO_FACTS),
        beside={},
        notes=tuple(notes),
    )
    return model_of(stated)


def _sizes(geometry: Geometry) -> Sizes:
    kind = geometry.row.type
    kinds = geometry.kinds
    if kinds is None:
        stated = dict[str, int]()
        if geometry.interval:
            stated["full_attention_interval"] = geometry.interval
        kinds = layers_of_class(kind, geometry.layers, stated, NO_FACTS)
    head_dim: int | None = geometry.head_dim
    if geometry.windowed is not None:
        head_dim = geometry.windowed.head_dim
    elif geometry.latent:  # a head has two parts, and this key says the length of one
        head_dim = derived_head_dim(geometry.hidden, geometry.heads)
    return Sizes(
        context=geometry.context,
        layers=geometry.layers,
        hidden=geometry.hidden,
        heads=geometry.heads,
        kv_heads=geometry.kv_heads_by_kind.get(WINDOWED, geometry.kv_heads),
        head_dim=head_dim,
        vocab=geometry.vocab,
        layer_types=kinds,
        window=geometry.window,
        layer_thetas=(),
        rotates=tuple(rotation_of_class(kind, geometry.layers, NO_FACTS)),
    )


def _sites(geometry: Geometry, row: Family, sizes: Sizes) -> tuple[RopeSite, ...]:
    """The rotary embedding of all layers, or that of each type of layer that is there."""
    windowed = geometry.windowed
    if windowed is None:
        params = normalised(Dict(geometry.scaling, "rope_scaling"), row) | _unscaled(geometry)
        site = _site("", row, params, geometry.dim, geometry.context)
        return (replace(site, layers=rotating_layers(row, sizes)),)
    sites = list[RopeSite]()
    for label in row.labels:
        layers = sum(kind in label.kinds for kind in sizes.layer_types)
        if not layers:
            continue
        said = _unscaled(geometry) | dict(geometry.scaling)
        dim = geometry.dim
        head = geometry.head_dim
        if label.windowed:
            said = {"rope_type": "default", "rope_theta": windowed.theta}
            head = windowed.head_dim
            dim = head
            if geometry.row.partial:
                said[PARTIAL] = share_of(windowed.turning, head)
                dim = windowed.turning
        elif geometry.scaling["rope_type"] == "proportional":
            dim = head  # its pairs count over the whole head
        check_rotary_dim(dim, head)
        params = normalised(Dict(said, f"rope_parameters.{label.name}"), row)
        site = _site(label.name, row, params, dim, geometry.context)
        sites.append(replace(site, layers=layers))
    return scaled_alone(sites, {label.name: label.windowed for label in row.labels})


def _unscaled(geometry: Geometry) -> dict[str, Json]:
    """What a rope dict says beside its scaling, in layers that see all tokens."""
    said: dict[str, Json] = {"rope_theta": geometry.rope.freq_base}
    if geometry.row.partial:
        said[PARTIAL] = share_of(geometry.dim, geometry.head_dim)
    return said


def _site(label: str, row: Family, params: Params, dim: int, context: int) -> RopeSite:
    """A site whose dict says its original length, where its form has one."""
    if params["rope_type"] in NAMED:
        params = params | {ORIGINAL: params.get(ORIGINAL) or context}
        params.setdefault("factor", context / params[ORIGINAL])
    rope = rope_from(row, params, dim, context, nested=bool(label))
    return RopeSite(label, rope.spectrum, params, rope=rope)


def _cache(geometry: Geometry, sizes: Sizes) -> tuple[CacheLayer, ...] | None:
    """What every layer keeps of a token."""
    kept = list[CacheLayer]()
    shared = geometry.shared_layers
    if shared is None:
        defaults = defaults_of(geometry.row.type, NO_FACTS)
        shared = defaults.get("num_kv_shared_layers", 0)
    storing = max(0, geometry.layers - shared)
    for kind in (sizes.layer_types or ("",) * geometry.layers)[:storing]:
        if not attends(kind):
            continue
        window = geometry.window if is_windowed(kind) else None
        if geometry.latent:
            kept.append(CacheLayer(geometry.latent + geometry.dim, window, is_latent=True))
            continue
        head_dim = geometry.head_dim
        if geometry.windowed is not None and kind == WINDOWED:
            head_dim = geometry.windowed.head_dim
        heads = geometry.kv_heads_by_kind.get(kind, geometry.kv_heads)
        kept.append(CacheLayer(2 * heads * head_dim, window))
    return tuple(kept) or None
