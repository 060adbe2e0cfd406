"""How many tokens an embedding reads now, and how many before the scaling that its config declares.

A dict of type linear, or proportional with a factor, names neither: max_position_embeddings is the
length before the scaling in some releases (Vicuna-16k) and after it in others (DeepSeek-Coder).
"""

from dataclasses import dataclass

from ropext.errors import InputError
from ropext.families.config import Dict
from ropext.families.table import Family
from ropext.forms import Params

NAMED = ("yarn", "longrope", "llama3")  # types whose dict says the original length
STRETCHED = ("linear", "proportional")

# Keys that cap a loader's length when they stay behind; raised where they hold the old context.
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


@dataclass(frozen=True)
class Told:
    """What the user says where a config misstates its lengths, or does not say them."""

    context: int | None = None
    original: int | None = None


@dataclass(frozen=True)
class Lengths:
    """One embedding's two lengths; a sentence that asks for each of them that nothing says."""

    now: int
    original: int
    note: str = ""
    asks_context: str = ""
    asks_original: str = ""


def lengths(
    text: Dict, row: Family, params: Params, stated: int, original: int, told: Told
) -> Lengths:
    """What holds for a rope dict; `stated` is max_position_embeddings, `original` what it names."""
    kind, factor = params["rope_type"], params.get("factor") or 1.0
    if kind in STRETCHED and factor != 1:
        return _stretched(text, row, params, stated, told)
    if kind == "dynamic" and params.get("alpha"):
        return _alpha(stated, told)
    if kind in NAMED:
        found = _named(kind, factor, stated, original, told)
    else:
        found = _plain(kind, stated, told)
    if told.original not in (None, found.original):
        raise InputError(
            f"--original-context {told.original}: config.json says itself that the original context"
            f" is {found.original}; the flag is for configs that do not (linear scaling), --context"
            " for a trained length that is misstated"
        )
    return found


def _plain(kind: str, stated: int, told: Told) -> Lengths:
    now = told.context or stated
    if kind != "dynamic":
        return Lengths(now, now)
    if now > stated:
        raise InputError(
            f"--context {now}: dynamic scaling leaves RoPE plain up to max_position_embeddings"
            f" {stated} alone, and an extension starts from there; leave --context out"
        )
    note = (
        "dynamic scaling keeps state between calls; up to max_position_embeddings it is plain RoPE,"
        " which is what an extension starts from"
    )
    return Lengths(now, now, note)


def _named(kind: str, factor: float, stated: int, original: int, told: Told) -> Lengths:
    extended = round(original * factor)
    # Llama 3.1 itself says 8 * 8192 beside 131072; Qwen3's card has a yarn of 4 * 32768 put beside
    # 40960.
    beyond = stated == original if kind != "yarn" else stated < extended
    if told.context is not None or not beyond or factor <= 1:
        return Lengths(told.context or stated, original)
    note = (
        f"max_position_embeddings is {stated}; with its {kind} factor {factor:g} of {original} the"
        f" model reads {extended} tokens"
    )
    return Lengths(extended, original, note)


def _stretched(text: Dict, row: Family, params: Params, stated: int, told: Told) -> Lengths:
    factor = params["factor"]
    after, before = round(stated * factor), max(1, round(stated / factor))
    named = params.get("original_max_position_embeddings")
    named = told.original or named or text.integer("original_max_position_embeddings")
    if named is None and row.original and stated >= row.original:
        named = row.original
    others = [text.values.get(key) for key in LENGTH_KEYS[1:]]
    if named is None and (after in others or told.context == after):
        named = stated
    if named is None and told.context == stated:
        named = before
    if named is not None:
        return Lengths(told.context or (after if named == stated else stated), named)
    asks = (
        f"config.json: {params['rope_type']} scaling by {factor:g} leaves open whether"
        f" max_position_embeddings {stated} is the length after it (--original-context {before}) or"
        f" before it (--original-context {stated}); say which (--context {stated} or --context"
        f" {after} says the same)"
    )
    return Lengths(told.context or stated, before, asks, asks, asks)


def _alpha(stated: int, told: Told) -> Lengths:
    now = told.context or stated
    note = "HunYuan's alpha is a fixed change of theta and is read as one"
    asks = (
        "config.json: alpha changes theta for good, and nothing says for which length the model was"
        " trained before that; --from-original needs --original-context N"
    )
    return Lengths(now, told.original or now, note, "", "" if told.original else asks)
