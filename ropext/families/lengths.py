"""How many tokens an embedding reads now, and how many before the scaling that its config declares.

A dict of type linear, or proportional with a factor, names neither: max_position_embeddings is the
length before the scaling in some releases (Vicuna-16k) and after it in others (DeepSeek-Coder).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from ropext.errors import InputError
from ropext.forms import Params
from ropext.rope import RopeSite

ORIGINAL = "original_max_position_embeddings"
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
class Lengths:
    """One embedding's two lengths, and a sentence that asks for each that nothing says."""

    now: int
    original: int
    note: str = ""
    asks_context: str = ""
    asks_original: str = ""


@dataclass(frozen=True)
class StatedLengths:
    """The lengths that stand beside the rope dicts, and those that the user states."""

    stated: int  # max_position_embeddings
    context: int | None  # of the user: what it reads now ...
    original: int | None  # ... and what it read before the scaling that it declares
    trained: int  # what its family was trained on before a linear scaling; 0 = not known
    named: int | None  # an original_max_position_embeddings beside the rope dict
    # What other keys of a length hold, and the one of them that this family is released with.
    others: Mapping[str, object]
    longer: int | None
    source: str  # what a sentence calls that which states them


def lengths(beside: StatedLengths, site: RopeSite) -> Lengths:
    """The lengths of one embedding, which names its original one or max_position_embeddings."""
    params = site.params
    stated = beside.stated
    original = site.rope.original_context
    kind = params["rope_type"]
    factor = params.get("factor") or 1.0
    if not site.scaled:
        now = beside.context or stated
        return Lengths(now, original if kind in NAMED else now)
    if kind in STRETCHED and factor != 1:
        return _stretched(beside, params, stated)
    if kind == "dynamic" and params.get("alpha"):
        return _alpha(beside, stated)
    if kind in NAMED:
        read = _named(beside, kind, factor, stated, original)
    else:
        read = _plain(beside, kind, stated)
    if beside.original not in (None, read.original):
        raise InputError(
            f"--original-context {beside.original} contradicts {beside.source}, which states"
            f" {read.original}; leave the option out, or correct the trained length with --context"
        )
    return read


def _plain(beside: StatedLengths, kind: str, stated: int) -> Lengths:
    if kind != "dynamic":
        now = beside.context or max(stated, beside.longer or 0)
        return Lengths(now, now)
    now = beside.context or stated
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


def _named(beside: StatedLengths, kind: str, factor: float, stated: int, original: int) -> Lengths:
    extended = round(original * factor)
    # Llama 3.1 itself says 8 * 8192 beside 131072; Qwen3's card has a yarn of 4 * 32768 put beside
    # 40960.
    beyond = stated == original if kind != "yarn" else stated < extended
    if beside.context is not None or not beyond or factor <= 1:
        return Lengths(beside.context or stated, original)
    note = (
        f"max_position_embeddings is {stated}; with its {kind} factor {factor:g} of {original} the"
        f" model reads {extended} tokens"
    )
    return Lengths(extended, original, note)


def _stretched(beside: StatedLengths, params: Params, stated: int) -> Lengths:
    factor = params["factor"]
    trained = beside.trained
    after = round(stated * factor)
    before = max(1, round(stated / factor))
    named = params.get(ORIGINAL)
    named = beside.original or named or beside.named
    if named is None and trained and stated >= trained:
        named = trained
    if named is None and (after in beside.others.values() or beside.context == after):
        named = stated
    if named is None and beside.context == stated:
        named = before
    if named is not None:
        return Lengths(beside.context or (after if named == stated else stated), named)
    asks = (
        f"{beside.source}: no key says whether max_position_embeddings {stated} is the length after"
        f" the {params['rope_type']} scaling by {factor:g} or before it; give --original-context"
        f" {before} if after, --original-context {stated} if before (or --context {stated},"
        f" --context {after})"
    )
    return Lengths(beside.context or stated, before, asks, asks, asks)


def _alpha(beside: StatedLengths, stated: int) -> Lengths:
    now = beside.context or stated
    note = "HunYuan's alpha is a fixed change of theta and is read as one"
    asks = (
        f"{beside.source}: alpha has changed theta, and the length that the model was trained on"
        " before that is not stated; --from-original needs --original-context N"
    )
    return Lengths(now, beside.original or now, note, "", "" if beside.original else asks)


def disagreeing(beside: StatedLengths, now: int) -> str:
    """Name the keys of a length that contradict max_position_embeddings; "" if none does."""
    others = {
        key: value
        for key, value in beside.others.items()
        if type(value) is int and value > 0 and value != beside.stated
    }
    if not others:
        return ""
    listed = " and ".join(f"{key} is {value:,}" for key, value in others.items())
    return (
        f"max_position_embeddings is {beside.stated:,}, but {listed}: ropext counts from {now:,}"
        " tokens (--context N corrects it). vLLM takes model_max_length if it is there, else the"
        " smallest"
    )
