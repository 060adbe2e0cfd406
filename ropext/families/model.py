"""Build the Model from the position settings of a config, with the facts printed about it."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ropext.base.errors import ConfigError, InputError
from ropext.families.config import shown
from ropext.families.described import Facts
from ropext.families.geometry import (
    CacheLayer,
    Sizes,
    TextConfig,
    attends,
    is_windowed,
)
from ropext.families.table import LOGIT_SCALES, Family
from ropext.scaling import forms
from ropext.scaling.forms import NAMED, ORIGINAL, Params
from ropext.scaling.rope import ABSENT, Edit, Rope, RopeSite

STRETCHED = ("linear", "proportional")

# Keys that cap a loader's length if they keep an old value; raised if they hold the old context.
LENGTH_KEYS = (
    "max_position_embeddings",
    "max_sequence_length",
    "max_seq_len",
    "max_seq_length",
    "seq_length",
    "n_positions",
    "n_ctx",
    "model_max_length",
)

PREDICTS = (
    "[mtp] its layers that predict further tokens (multi-token prediction) follow the same rope "
    "keys and are extended with it"
)


@dataclass(frozen=True)
class Problem:
    """An error in a config that somebody else wrote."""

    key: str
    sentence: str
    fixable: bool = True  # by rewriting the spellings from the values that stock transformers reads
    dropped: bool = False  # missed only by loaders that do not know rope_parameters
    disputed: bool = False  # two spellings disagree, and the config alone cannot say which is right


@dataclass(frozen=True)
class Model:
    """The position scheme that a config describes."""

    model_type: str
    text_type: str
    path: tuple[str, ...]  # the path of the text part inside the config
    sites: tuple[RopeSite, ...]
    # As stock has them, if it is known to differ from the authors.
    stock_sites: tuple[RopeSite, ...]
    context: int  # tokens it reads now
    stated_context: int  # the value of its max_position_embeddings
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
    kv_layers: tuple[CacheLayer, ...] | None  # the layers that keep anything
    notes: tuple[str, ...]
    obstacles: tuple[str, ...]  # why scaling cannot help here
    asks_context: str = ""  # a sentence if the config does not state how many tokens it reads ...
    asks_original: str = ""  # ... or read before the scaling that it declares
    conflicts: tuple[Problem, ...] = ()  # spellings that contradict the ones that stock reads
    described: Facts = field(default_factory=dict, repr=False)  # of types that the census lacks

    @property
    def scaled_sites(self) -> tuple[RopeSite, ...]:
        """Return the rotary embeddings of the model's config that an extension scales."""
        return tuple(s for s in self.sites if s.scaled)

    def kv_bytes(
        self, tokens: int, bytes_per_value: int = 2, *, step: int = 1, beside: int = 0
    ) -> int | None:
        """Return the bytes of the KV cache that a config's sizes mean for a sequence of `tokens`;
        None if they are not known.

        Windowed layers keep only their window (CacheLayer explains `step` and `beside`). A masked
        language model reads all tokens at once and has no cache.
        """
        if self.kv_layers is None or self.masked_lm:
            return None
        return bytes_per_value * sum(layer.kept(tokens, step, beside) for layer in self.kv_layers)

    @property
    def kv_bytes_per_token(self) -> int | None:
        """Return the bytes of the KV cache that a config's sizes mean for one token at 2 bytes per
        value, while the sequence is inside the window."""
        return self.kv_bytes(1)


def diff(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Edit]:
    """Return every changed config key by dotted path, with both values. 1 and 1.0 differ, for vLLM
    tests types. A list counts as one value. So does a dict if the other config has none there."""
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


@dataclass(frozen=True)
class Lengths:
    """The tokens that an embedding reads now, and the tokens before the scaling that its config
    declares. For each that nothing states, a sentence requests it.

    A dict of type linear, or proportional with a factor, states neither. In some releases
    max_position_embeddings is the length before the scaling (Vicuna-16k), in others the length
    after it (DeepSeek-Coder).
    """

    now: int
    original: int
    note: str = ""
    asks_context: str = ""
    asks_original: str = ""


def lengths_of(text: TextConfig, site: RopeSite, source: str) -> Lengths:
    """Return the lengths that config keys mean for one rotary embedding. Its rope dict states the
    original one, or max_position_embeddings does. Raise InputError if an option of the user
    contradicts them. `source` is the config's name in sentences."""
    params = site.params
    kind = params["rope_type"]
    factor = params.get("factor") or 1.0
    # A value of the wrong type is refused, also if this rope type does not need it.
    named = text.integer(ORIGINAL) if kind in STRETCHED else None
    longer = text.integer(text.row.length) if text.row.length else None
    stated = text.sizes.context
    original = site.rope.original_context
    if not site.scaled:
        now = text.context or stated
        return Lengths(now, original if kind in NAMED else now)
    if kind in STRETCHED and factor != 1:
        return _stretched(text, params, text.original or params.get(ORIGINAL) or named, source)
    if kind == "dynamic" and params.get("alpha"):
        return _alpha(text, source)
    if kind in NAMED:
        read = _named(text, kind, factor, original)
    elif kind == "dynamic":
        read = _dynamic(text)
    else:
        now = text.context or max(stated, longer or 0)
        read = Lengths(now, now)
    if text.original not in (None, read.original):
        raise InputError(
            f"--original-context {text.original} contradicts {source}, which states"
            f" {read.original}; leave the option out, or correct the trained length with --context"
        )
    return read


def _dynamic(text: TextConfig) -> Lengths:
    """Return the lengths of a config under dynamic scaling, which starts from
    max_position_embeddings."""
    stated = text.sizes.context
    now = text.context or stated
    if now > stated:
        raise InputError(
            f"--context {now}: under dynamic scaling an extension starts from"
            f" max_position_embeddings {stated}, up to which RoPE is plain; leave --context out"
        )
    note = (
        "dynamic scaling keeps state between calls; up to max_position_embeddings it is plain RoPE,"
        " and an extension starts from there"
    )
    return Lengths(now, now, note)


def _named(text: TextConfig, kind: str, factor: float, original: int) -> Lengths:
    """Return the lengths of a config whose rope dict states its original one."""
    stated = text.sizes.context
    extended = round(original * factor)
    # Llama 3.1 itself has 8 * 8192 with 131072; Qwen3's card adds a yarn of 4 * 32768 to a config
    # with 40960.
    beyond = stated == original if kind != "yarn" else stated < extended
    if text.context is not None or not beyond or factor <= 1:
        return Lengths(text.context or stated, original)
    note = (
        f"max_position_embeddings is {stated}; with its {kind} factor {factor:g} of {original} the"
        f" model reads {extended} tokens"
    )
    return Lengths(extended, original, note)


def _stretched(text: TextConfig, params: Params, named: int | None, source: str) -> Lengths:
    """Return the lengths of a rope dict of type linear, or proportional with a factor. `named` is
    the original length that the user, the dict or another key states."""
    stated = text.sizes.context
    factor = params["factor"]
    trained = text.row.original
    after = round(stated * factor)
    before = max(1, round(stated / factor))
    if named is None and trained and stated >= trained:
        named = trained
    if named is None and (after in _other_lengths(text).values() or text.context == after):
        named = stated
    if named is None and text.context == stated:
        named = before
    if named is not None:
        return Lengths(text.context or (after if named == stated else stated), named)
    asks = (
        f"{source}: no key says whether max_position_embeddings {stated} is the length after"
        f" the {params['rope_type']} scaling by {factor:g} or before it; give --original-context"
        f" {before} if after, --original-context {stated} if before (or --context {stated},"
        f" --context {after})"
    )
    return Lengths(text.context or stated, before, asks, asks, asks)


def _other_lengths(text: TextConfig) -> dict[str, object]:
    """Return the values of the length keys of config.json besides max_position_embeddings."""
    return {key: text.values[key] for key in LENGTH_KEYS[1:] if key in text.values}


def _alpha(text: TextConfig, source: str) -> Lengths:
    """Return the lengths of a config with HunYuan's alpha, which has changed theta."""
    now = text.context or text.sizes.context
    note = "HunYuan's alpha is a fixed change of theta and is read as one"
    asks = (
        f"{source}: alpha has changed theta, and the length that the model was trained on"
        " before that is not stated; --from-original needs --original-context N"
    )
    return Lengths(now, text.original or now, note, "", "" if text.original else asks)


def with_lengths(
    text: TextConfig, sites: tuple[RopeSite, ...], source: str
) -> tuple[tuple[RopeSite, ...], tuple[Lengths, ...], list[str]]:
    """Return the rotary embeddings with the length and the original length that config keys mean
    for each, these lengths, and notes about them. `source` is the config's name in sentences."""
    stated = text.sizes.context
    spans = tuple(lengths_of(text, site, source) for site in sites)
    out = list[RopeSite]()
    for site, span in zip(sites, spans, strict=True):
        out.append(site.of(replace(site.rope, context=span.now, original_context=span.original)))
    notes = [span.note for span in spans if span.note]
    others = list[str]()
    for key, value in _other_lengths(text).items():
        if type(value) is int and value > 0 and value != stated:
            others.append(f"{key} is {value:,}")
    if others:
        notes.append(
            f"max_position_embeddings is {stated:,}, but {' and '.join(others)}: ropext"
            f" counts from {max(span.now for span in spans):,} tokens (--context N corrects it)."
            " vLLM takes model_max_length if it is there, else the smallest"
        )
    return tuple(out), spans, [f"[length] {note}" for note in notes]


def notes_on_windows(text: TextConfig, context: int) -> tuple[list[str], list[str], int | None]:
    """Return how far a model family's layers see by the sliding windows of its config. The answer
    is notes with the family's remark, obstacles to an extension, and the tokens that the model can
    reach (None unless every layer sees a window)."""
    row = text.row
    sizes = text.sizes
    notes = [f"[family] {row.remark}"] if row.remark else []
    obstacles: list[str] = []
    kinds = [kind for kind in sizes.layer_types if attends(kind)]
    windowed = sum(is_windowed(kind) for kind in kinds)
    everywhere = row.every_layer_windowed or (bool(kinds) and windowed == len(kinds))
    reach = None
    # A window looks back and holds the token itself, or it looks to both sides, and does not.
    side = " to each side" if row.masked_lm else ""
    if sizes.window and everywhere:
        layers = len(kinds) or sizes.layers or 1
        reach = layers * sizes.window if row.masked_lm else layers * (sizes.window - 1) + 1
        sentence = (
            f"[windowed] every layer sees a window of {sizes.window} tokens{side}, so the model"
            f" reaches {reach} tokens{side} at most"
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
        sentence = f"[windowed] {few} see {sizes.window} tokens{side} only"
        if not row.labels and not row.rotates_only_windows:
            sentence += "; they share one rotary embedding with the others and are scaled with them"
        notes.append(sentence)
    windows_alone = bool(row.rotates_only_windows and (sizes.window or row.labels))
    if sizes.rotates and text.has("layer_rope_theta"):
        layers_that_turn = zip(sizes.layer_types, sizes.rotates, strict=False)
        turning = [is_windowed(kind) for kind, turns in layers_that_turn if turns]
        windows_alone = bool(turning) and all(turning) and windowed < len(kinds)
    if windows_alone:
        obstacles.append(
            f"[windowed] {text.type} rotates in its windowed layers only and its "
            "full-attention layers have no positions; scaling would move trained local layers and "
            "lengthen nothing"
        )
    return notes, obstacles, reach


def notes_on_logit_scales(text: TextConfig, sites: tuple[RopeSite, ...]) -> list[str]:
    """Return a note with every config key by which this model family scales queries, logits or the
    softmax. These keys stay as they are."""
    ropes: list[Mapping[str, Any]] = [site.params for site in sites if site.scaled]
    named = []
    for scale in LOGIT_SCALES:
        if scale.key == "mscale_all_dim" and not text.row.softmax_mscale:
            continue  # other families use the two keys as a part of the attention factor
        holders = ropes if scale.in_rope else [text.values]
        values = next((held for held in holders if held.get(scale.key)), None)
        if values is not None:
            keys = [k for k in (scale.key, *scale.beside) if values.get(k) is not None]
            settings = ", ".join(f"{key} {shown(values[key])}" for key in keys)
            named.append(f"{settings} ({scale.does})")
    kept = f"[kept-keys] kept as it stands, beside the spectrum: {'; '.join(named)}"
    return [kept] if named else []


def allowed_forms(row: Family, sites: tuple[RopeSite, ...], notes: list[str]) -> tuple[str, ...]:
    """Return the rope types that a config of this model family may hold. Add a note if the family's
    reading of its partial factor allows only a theta."""
    for site in sites:
        factor = site.params.get("partial_rotary_factor", 1.0)
        if not (row.partial or row.labels) and factor != 1:
            notes.append(
                f"[partial] partial_rotary_factor {factor:g} is ignored by this family in plain "
                "RoPE, but not in scaled types, so only theta can change"
            )
            return ("default",)
    return row.forms


def rope_from(row: Family, params: Params, dim: int, context: int, *, nested: bool) -> Rope:
    """Return the rotary embedding that a config's complete rope dict describes, with so many
    rotating channels. Raise ConfigError for values that would divide by zero in the form's
    arithmetic."""
    kind = params["rope_type"]
    if params["rope_theta"] <= 1:
        raise ConfigError(f"rope_theta must be above 1, was {params['rope_theta']:g}")
    if kind == "longrope" and params[ORIGINAL] < 2:
        raise ConfigError(
            "original_max_position_embeddings of a longrope must be at least 2 (its"
            " logarithm divides)"
        )
    if kind == "dynamic" and params.get("alpha") and dim == 2:
        raise ConfigError("alpha changes theta, which a rotary dim of 2 does not have")
    keeps_mscale = kind == "yarn" or row.softmax_mscale
    plain = Rope(
        dim=dim,
        theta=params["rope_theta"],
        context=context,
        mscale=params.get("mscale", 0.0) if keeps_mscale else 0.0,
        mscale_all_dim=params.get("mscale_all_dim", 0.0) if keeps_mscale else 0.0,
        softmax_mscale=row.softmax_mscale,
        nested=nested,
    )
    rope = forms.read(params, plain)
    if row.mscale_keys and kind != "default":
        # Stock PhiMoE reads the short set at every length: an extension must write one set, the
        # long.
        attention = params.get("long_mscale", rope.attention_factor)
        return replace(rope, short_pair_factors=(), attention_factor=attention)
    return rope


def rotating_layers(row: Family, sizes: Sizes) -> int | None:
    """Return the number of layers that rotate by their config, for a model with one rotary
    embedding for all."""
    if not sizes.layer_types:
        return sizes.layers and sizes.layers - sizes.rotates.count(False)
    kinds = [kind for kind in sizes.layer_types if attends(kind)]
    if row.rotates_only_windows and sizes.window and not sizes.rotates:
        return sum(map(is_windowed, kinds))
    return len(kinds) - min(sizes.rotates.count(False), len(kinds))


def scaled_alone(sites: list[RopeSite], windowed: Mapping[str, bool]) -> tuple[RopeSite, ...]:
    """Return the rotary embeddings of a nested rope dict with those marked as scaled whose layers
    see all tokens. Mark all of them if every layer sees a window."""
    marked = [replace(site, scaled=not windowed[site.label]) for site in sites]
    if marked and not any(site.scaled for site in marked):
        return tuple(replace(site, scaled=True) for site in marked)
    return tuple(marked)
