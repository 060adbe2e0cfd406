"""The methods, one list: choices of `--method`, its checks, docs and shared tests follow it."""

import re
from dataclasses import replace

from ropext.base.errors import UsageError, did_you_mean
from ropext.scaling import by_parts, forms, longrope, ntk, pi, self_extend, tables, yarn
from ropext.scaling.method import Method, Scaling
from ropext.scaling.rope import Rope, Spectrum, divided

METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        pi.METHOD,
        *ntk.METHODS,
        *by_parts.METHODS,
        yarn.METHOD,
        longrope.METHOD,
    )
}

__all__ = [
    "METHODS",
    "Method",
    "Scaling",
    "beside",
    "check_known",
    "compose",
    "find",
    "is_function",
    "native",
    "scale",
    "source_of",
    "well_known",
]


def find(name: str, flag: str = "--method") -> Method:
    """Return the scaling method of a name (--method); raise UsageError with similar names if there
    is none."""
    if name in METHODS:
        return METHODS[name]
    if is_function(name) and flag == "--method":
        from ropext.scaling import custom  # late: few name a function of their own

        return custom.method(name)
    if name in tables.METHODS:
        raise UsageError(
            f"{flag} {name} is for models without a rotary embedding; name a method that scales one"
        )
    if name == self_extend.NAME:
        raise UsageError(self_extend.UNCARRIED)
    known = f"known are {', '.join(METHODS)}, and functions of your own as module:function"
    hint = did_you_mean(name, METHODS, known)
    raise UsageError(f"{flag} {name[:60]!r} is not a method; {hint}")


def is_function(name: str) -> bool:
    r"""Return whether a method's name is a user's function as module:function; C:\scale and
    scale.py:f are paths."""
    return bool(re.fullmatch(r"[^\W\d][\w.]*:[^\W\d]\w*", name)) and ".py:" not in name


def source_of(method: str) -> str | None:
    """Return the source of a scaling method that is a user's function.

    Return None for any other method, and if Python does not know the source.
    """
    if not is_function(method):
        return None
    from ropext.scaling import custom  # late: few name a function of their own

    return custom.source_of(method)


def beside(method: str | None) -> tuple[str, ...]:
    """Return the names of all scaling methods, and the name of the user's own method if `method` is
    one."""
    names = tuple(METHODS)
    if method and is_function(method):
        return (*names, method)
    return names


def check_known(name: str) -> None:
    """Raise UsageError if a name is no method of scaling. It may be for rotary embeddings or
    position tables, or self-extend."""
    if name not in tables.METHODS and name != self_extend.NAME:
        find(name)


def compose(rope: Rope, scaling: Scaling, target: int) -> Spectrum:
    """Return a rotary embedding's spectrum after a scaling: pair factors and attention factors
    multiply.

    The second set of a longrope stays: its inputs are within the original context, which does not
    grow. DeepSeek's softmax factor follows the whole factor from the original context, as in its
    own yarn.
    """
    now = rope.spectrum
    short = now.short_inv_freq
    short_context = now.short_context
    if scaling.short_pair_factors:
        if short:
            raise UsageError(
                "--pair-factors brings a set for short inputs, but the model has one already; give "
                "one set, or start from the original spectrum with --from-original"
            )
        short = divided(now.inv_freq, scaling.short_pair_factors)
        short_context = rope.context
    softmax = 1.0
    if rope.softmax_mscale and rope.mscale_all_dim:
        softmax = forms.mscale(target / rope.original_context, rope.mscale_all_dim) ** 2
    return Spectrum(
        divided(now.inv_freq, scaling.pair_factors),
        rope.attention_factor * scaling.attention_factor,
        softmax,
        short,
        short_context,
    )


def native(rope: Rope, scaling: Scaling) -> forms.Params | None:
    """Return a scaling method's own stock rope dict, which only a plain embedding can use; else
    None."""
    if rope.is_scaled or rope.has_non_rotating_pairs or rope.softmax_factor != 1:
        return None
    return scaling.native


def scale(rope: Rope, method: str, target: int, knobs: object, attention: float | None) -> Scaling:
    """Scale a rotary embedding by a method; an attention factor that the user gives replaces the
    method's own."""
    scaling = find(method).scale(rope, target, knobs)
    if attention is None:
        return scaling
    return replace(scaling, attention_factor=attention)


def well_known(rope: Rope, target: int) -> dict[str, Scaling]:
    """Return the scalings of a rotary embedding by PI, NTK-aware and YaRN, to compare others with
    them."""
    scalings = dict[str, Scaling]()
    for method in ("pi", "ntk", "yarn"):
        try:
            scalings[method] = scale(rope, method, target, find(method).knobs(), None)
        except UsageError:
            continue  # a single pair has no NTK
    return scalings
