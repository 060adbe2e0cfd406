"""The Model that follows from the position settings of a config, and the facts printed about it."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ropext import forms
from ropext.errors import ConfigError
from ropext.families.config import shown
from ropext.families.described import Facts
from ropext.families.geometry import (
    CacheLayer,
    Sizes,
    TextConfig,
    attends,
    is_windowed,
    kv_layers,
    partial_factor,
)
from ropext.families.lengths import NAMED, Lengths
from ropext.families.table import LOGIT_SCALES, Family
from ropext.forms import Params
from ropext.rope import ABSENT, Edit, Rope, RopeSite

PREDICTS = (
    "[mtp] its layers that predict further tokens (multi-token prediction) follow the same rope "
    "keys and are extended with it"
)


@dataclass(frozen=True)
class Model:
    """The position scheme that a config describes."""

    model_type: str
    text_type: str
    path: tuple[str, ...]  # where the text part stands inside the config
    sites: tuple[RopeSite, ...]
    # As stock has them, where it is known to differ from the authors.
    stock_sites: tuple[RopeSite, ...]
    context: int  # tokens it reads now
    stated_context: int  # what its max_position_embeddings says
    layers: int | None
    hidden_size: int | None
    heads: int | None
    kv_heads: int | None
    head_dim: int | None
    vocab_size: int | None
    layer_types: tuple[str, ...]
    sliding_window: int | None
    nope_layers: int  # attention layers that rotate nothing
    interleaved: bool
    masked_lm: bool
    mrope: bool  # images turn by three axes, which engines keep with a theta or a yarn alone
    forms: tuple[str, ...]  # stock rope types that this family computes correctly
    temperature: str  # "whole", "rotated channels" or "cancelled" (a norm after the rotation)
    reach: int | None  # tokens that a model of windows alone can see; None = unlimited
    kv_layers: tuple[CacheLayer, ...] | None  # of the layers that keep anything
    notes: tuple[str, ...]
    obstacles: tuple[str, ...]  # why scaling cannot help here
    asks_context: str = ""  # a sentence where the config leaves open how many tokens it reads ...
    asks_original: str = ""  # ... or read before the scaling that it declares
    described: Facts = field(default_factory=dict, repr=False)  # of types that the census lacks

    @property
    def scaled_sites(self) -> tuple[RopeSite, ...]:
        return tuple(s for s in self.sites if s.scaled)

    def site(self, label: str) -> RopeSite:
        return next(s for s in self.sites if s.label == label)

    def kv_bytes(
        self, tokens: int, bytes_per_value: int = 2, *, step: int = 1, beside: int = 0
    ) -> int | None:
        """Return the KV cache of one sequence of `tokens`, if it is known. Windowed layers keep
        their window only (for step and beside see CacheLayer); a masked language model reads all at
        once and has none."""
        if self.kv_layers is None or self.masked_lm:
            return None
        return bytes_per_value * sum(layer.kept(tokens, step, beside) for layer in self.kv_layers)

    @property
    def kv_bytes_per_token(self) -> int | None:
        """The cache of one token at 2 bytes per value, while the sequence is inside the window."""
        return self.kv_bytes(1)


@dataclass(frozen=True)
class Problem:
    """Something wrong in a config that was written by somebody else."""

    key: str
    sentence: str
    fixable: bool = True  # by writing the spellings anew from what stock transformers reads
    dropped: bool = False  # missed by those alone who do not know rope_parameters
    disputed: bool = False  # two spellings disagree, and the config alone cannot say which is right


def diff(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Edit]:
    """Every value that changed, by path; lists and rope dicts of other types count as one value."""
    edits: list[Edit] = []
    for key in dict.fromkeys(old) | dict.fromkeys(new):
        before = old.get(key, ABSENT)
        after = new.get(key, ABSENT)
        if isinstance(before, dict) and isinstance(after, dict):
            for edit in diff(before, after):
                edits.append(replace(edit, key=f"{key}.{edit.key}"))
        elif before != after or type(before) is not type(after):
            edits.append(Edit(key, before, after))
    return edits


@dataclass(frozen=True, kw_only=True)
class Stated:
    """A text config whose rope dicts were read and checked."""

    model_type: str
    text: TextConfig
    path: tuple[str, ...]  # to the text part inside the config
    sites: tuple[RopeSite, ...]
    # As stock has them, where it is known to differ from the authors, and what is said of that.
    stock_sites: tuple[RopeSite, ...]
    departures: tuple[str, ...]
    lengths: tuple[Lengths, ...]  # of each site
    mrope: bool
    notes: tuple[str, ...]


def model_of(stated: Stated) -> Model:
    """The model of these embeddings, with what is to be said about it."""
    text = stated.text
    row = text.row
    sizes = text.sizes
    sites = stated.sites
    context = max(site.rope.context for site in sites if site.scaled)
    more, obstacles, reach = _observe(stated, context)
    notes = [*stated.notes, *more, *stated.departures, *_logit_scales(stated)]
    allowed = _forms(row, sites, notes)
    whole = all(partial_factor(row, s.params) == 1 for s in sites) and row.dim == "head_dim"
    temperature = row.temperature
    if temperature == "rotated channels" and whole:
        temperature = "whole"
    rotating = sum(site.layers or 0 for site in sites)
    spans = stated.lengths
    return Model(
        model_type=stated.model_type,
        text_type=text.type,
        path=stated.path,
        sites=sites,
        stock_sites=stated.stock_sites,
        context=context,
        stated_context=sizes.context,
        layers=sizes.layers,
        hidden_size=sizes.hidden,
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        vocab_size=sizes.vocab,
        layer_types=sizes.layer_types,
        sliding_window=sizes.window,
        nope_layers=max(0, sum(map(attends, sizes.layer_types)) - rotating),
        interleaved=row.interleaved,
        masked_lm=row.masked_lm,
        mrope=stated.mrope,
        forms=allowed,
        temperature=temperature,
        reach=reach,
        kv_layers=kv_layers(text),
        notes=tuple(dict.fromkeys(notes)),
        obstacles=tuple(obstacles),
        asks_context=next((span.asks_context for span in spans if span.asks_context), ""),
        asks_original=next((span.asks_original for span in spans if span.asks_original), ""),
        described=text.facts,
    )


def _observe(stated: Stated, context: int) -> tuple[list[str], list[str], int | None]:
    """Say what windows mean for an extension: notes, obstacles, and the reach that they leave."""
    row = stated.text.row
    sizes = stated.text.sizes
    notes = [f"[family] {row.remark}"] if row.remark else []
    obstacles: list[str] = []
    kinds = [kind for kind in sizes.layer_types if attends(kind)]
    windowed = sum(is_windowed(kind) for kind in kinds)
    everywhere = row.every_layer_windowed or (bool(kinds) and windowed == len(kinds))
    reach = None
    if sizes.window and everywhere:
        layers = len(kinds) or sizes.layers or 1
        reach = layers * (sizes.window - 1) + 1
        sentence = (
            f"[windowed] every layer sees a window of {sizes.window} tokens, so the model reaches"
            f" {reach} tokens at most"
        )
        if sizes.window <= context:
            obstacles.append(
                f"{sentence}, and no distance beyond the window is ever rotated; scaling cannot"
                " help unless sliding_window is lifted"
            )
        else:
            notes.append(sentence)
    elif sizes.window and windowed:
        few = f"{windowed} of {len(kinds)} attention layers"
        sentence = f"[windowed] {few} see {sizes.window} tokens only"
        if not row.labels and not row.rotates_only_windows:
            sentence += "; they share one rotary embedding with the others and are scaled with them"
        notes.append(sentence)
    if _rotates_windows_alone(stated, windowed < len(kinds)):
        obstacles.append(
            f"[windowed] {stated.text.type} rotates in its windowed layers only and its "
            "full-attention layers have no positions; scaling would move trained local layers and "
            "lengthen nothing"
        )
    return notes, obstacles, reach


def _rotates_windows_alone(stated: Stated, some_see_all: bool) -> bool:
    """Whether no layer that sees all tokens rotates."""
    row = stated.text.row
    sizes = stated.text.sizes
    if sizes.rotates and stated.text.has("layer_rope_theta"):
        layers = zip(sizes.layer_types, sizes.rotates, strict=False)
        turning = [is_windowed(kind) for kind, turns in layers if turns]
        return bool(turning) and all(turning) and some_see_all
    return bool(row.rotates_only_windows and (sizes.window or row.labels))


def _logit_scales(stated: Stated) -> list[str]:
    """Note every key beside the spectrum that scales queries, logits or the softmax."""
    ropes: list[Mapping[str, Any]] = [site.params for site in stated.sites if site.scaled]
    named = []
    for scale in LOGIT_SCALES:
        if scale.key == "mscale_all_dim" and not stated.text.row.softmax_mscale:
            continue  # other families read the pair as a part of the attention factor
        holders = ropes if scale.in_rope else [stated.text.values]
        values = next((held for held in holders if held.get(scale.key)), None)
        if values is not None:
            keys = [k for k in (scale.key, *scale.beside) if values.get(k) is not None]
            settings = ", ".join(f"{key} {shown(values[key])}" for key in keys)
            named.append(f"{settings} ({scale.does})")
    kept = f"[kept-keys] kept as it stands, beside the spectrum: {'; '.join(named)}"
    return [kept] if named else []


def _forms(row: Family, sites: tuple[RopeSite, ...], notes: list[str]) -> tuple[str, ...]:
    """The rope types that this model may be written with."""
    for site in sites:
        factor = site.params.get("partial_rotary_factor", 1.0)
        if not (row.partial or row.labels) and factor != 1:
            notes.append(
                f"[partial] partial_rotary_factor {factor:g} is ignored by this family in plain "
                "RoPE, but not in scaled types, so only theta can change"
            )
            return ("default",)
    return row.forms


def with_lengths(sites: tuple[RopeSite, ...], spans: tuple[Lengths, ...]) -> tuple[RopeSite, ...]:
    """The sites with the two lengths that each reads and was made for."""
    out = list[RopeSite]()
    for site, span in zip(sites, spans, strict=True):
        rope = replace(site.rope, context=span.now, original_context=span.original)
        out.append(site.of(rope))
    return tuple(out)


def length_notes(spans: tuple[Lengths, ...], disagreeing: str = "") -> list[str]:
    """What is to be said of each length, and of keys that contradict one another."""
    notes = [span.note for span in spans] + [disagreeing]
    return [f"[length] {note}" for note in notes if note]


def rope_from(row: Family, params: Params, dim: int, context: int, *, nested: bool) -> Rope:
    """The embedding that a complete rope dict says, of so many rotating channels."""
    _check_form(params, dim)
    kind = params["rope_type"]
    factors = forms.read_pair_factors(params, dim, context, nested=nested)
    attention = forms.read_attention_factor(params, context)
    if row.mscale_keys and kind != "default" and "long_mscale" in params:
        attention = params["long_mscale"]
    keeps_mscale = kind == "yarn" or row.softmax_mscale
    # Stock PhiMoE reads the short set at every length: an extension must write one set, the long.
    short = () if row.mscale_keys else forms.read_short_pair_factors(params, dim)
    return Rope(
        dim=dim,
        theta=params["rope_theta"],
        context=context,
        original_context=params["original_max_position_embeddings"] if kind in NAMED else context,
        pair_factors=() if kind == "default" else factors,
        short_pair_factors=short,
        attention_factor=attention,
        mscale=params.get("mscale", 0.0) if keeps_mscale else 0.0,
        mscale_all_dim=params.get("mscale_all_dim", 0.0) if keeps_mscale else 0.0,
        softmax_mscale=row.softmax_mscale,
        softmax_factor=forms.softmax_factor(params) if row.softmax_mscale else 1.0,
        nested=nested,
    )


def _check_form(params: Params, dim: int) -> None:
    """Refuse what would divide by zero in the form's arithmetic."""
    kind = params["rope_type"]
    if params["rope_theta"] <= 1:
        raise ConfigError(f"rope_theta must be above 1, was {params['rope_theta']:g}")
    if kind == "longrope" and params["original_max_position_embeddings"] < 2:
        raise ConfigError(
            "original_max_position_embeddings of a longrope must be at least 2 (its"
            " logarithm divides)"
        )
    if kind == "dynamic" and params.get("alpha") and dim == 2:
        raise ConfigError("alpha changes theta, which a rotary dim of 2 does not have")


def rotating_layers(row: Family, sizes: Sizes) -> int | None:
    """How many layers rotate, of a model with one embedding for all."""
    if not sizes.layer_types:
        return sizes.layers and sizes.layers - sizes.rotates.count(False)
    kinds = [kind for kind in sizes.layer_types if attends(kind)]
    if row.rotates_only_windows and sizes.window and not sizes.rotates:
        return sum(map(is_windowed, kinds))
    return len(kinds) - min(sizes.rotates.count(False), len(kinds))


def scaled_alone(sites: list[RopeSite], windowed: Mapping[str, bool]) -> tuple[RopeSite, ...]:
    """The sites with those scaled whose layers see all tokens; where all see windows, with all."""
    marked = [replace(site, scaled=not windowed[site.label]) for site in sites]
    if marked and not any(site.scaled for site in marked):
        return tuple(replace(site, scaled=True) for site in marked)
    return tuple(marked)
