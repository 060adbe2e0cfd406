"""How to extend, checked. One model for the command line, recipe files and the Python API.

A field's name is its flag (`beta_fast` is `--beta-fast`); its help text is written once, here.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields, make_dataclass
from types import NoneType
from typing import TYPE_CHECKING, Any, get_args, get_origin

from ropext import scaling
from ropext.errors import InputError, UsageError
from ropext.wishes import check_positive, flag

# Positions are 32-bit integers in most engines.
LONGEST_TARGET = 2**31 - 1
LARGEST_FACTOR = 4096.0


def _field(default: Any, help_text: str) -> Any:
    return field(default=default, metadata={"help": help_text})


@dataclass(frozen=True)
class _Wishes:
    """What every method takes: how far, by which method, for whom."""

    method: str | None = _field(None, "how to scale: " + ", ".join(scaling.METHODS) + " [yarn]")
    factor: float | None = _field(None, "how many times the context, e.g. 4 (or give the target)")
    target: int | None = _field(None, "tokens wanted, e.g. 131072 (or give the factor)")
    context: int | None = _field(
        None, "tokens the model was trained on, where its config misstates it"
    )
    original_context: int | None = _field(
        None, "tokens before the scaling that a config declares, where it does not say (linear)"
    )
    attention_factor: float | None = _field(
        None, "what multiplies cos and sin, in place of the method's own (logits get its square)"
    )
    temperature: float | None = _field(
        None, "softmax temperature instead: attention factor = 1/sqrt(temperature)"
    )
    from_original: bool = _field(
        False, "extend an already scaled model from its original spectrum and context"
    )
    for_loaders: tuple[str, ...] = _field(
        (), "accept only what these loaders read exactly, e.g. vllm,llama.cpp"
    )
    even_so: bool = _field(
        False, "go on where scaling cannot help, or where a named loader was not measured"
    )
    finetune: str | None = _field(None, "data to fine-tune on afterwards")

    def __post_init__(self) -> None:
        if self.method is not None:
            scaling.find(self.method)
        if self.for_loaders:
            from ropext import loaders  # late: no --help needs the table

            for loader in self.for_loaders:
                loaders.select(loader)
        if self.factor is not None and self.target is not None:
            raise UsageError(
                f"--factor {self.factor:g} and --target {self.target} both say how far; give one"
            )
        if self.attention_factor is not None and self.temperature is not None:
            raise UsageError("--attention-factor and --temperature say the same thing; give one")
        for name in ("attention_factor", "temperature"):
            check_positive(self, name)
        for name in ("context", "original_context"):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= LONGEST_TARGET:
                raise UsageError(
                    f"{flag(name)} must be 1 to {LONGEST_TARGET} tokens, was {value:.6g}"
                )

    @property
    def attention(self) -> float | None:
        """The attention factor that was asked for, under either of its names."""
        if self.temperature is not None:
            return 1 / math.sqrt(self.temperature)
        return self.attention_factor


def shown_default(value: Any) -> str:
    """A knob's default as help texts show it."""
    if value is None:
        return ""
    return f" [{('no', 'yes')[value] if isinstance(value, bool) else format(value, 'g')}]"


def _knobs() -> list[tuple[str, Any, Any]]:
    """The knobs of all methods, each as a field that says whose it is and what it does there."""
    owners: dict[str, list[str]] = {}
    knobs: dict[str, Field[Any]] = {}
    for method in scaling.METHODS.values():
        for knob in fields(method.knobs):
            owners.setdefault(knob.name, []).append(method.name)
            knobs.setdefault(knob.name, knob)
    out = []
    for name, knob in knobs.items():
        help_text = (
            f"{', '.join(owners[name])}: {knob.metadata['help']}{shown_default(knob.default)}"
        )
        out.append((name, knob.type | None, _field(None, help_text)))  # type: ignore[operator]
    return out


if TYPE_CHECKING:

    class Recipe(_Wishes):
        """One extension: how far, by which method, for whom, with which knobs."""

        def __init__(self, **values: Any) -> None: ...

else:
    # The knobs come from the list of methods, so that a new one needs no second mention here.
    Recipe = make_dataclass("Recipe", _knobs(), bases=(_Wishes,), frozen=True)
    Recipe.__module__ = __name__


def _kind(declared: Any) -> Any:
    """The type of a field without its None."""
    return next((k for k in get_args(declared) if k is not NoneType), declared)


KINDS: dict[str, Any] = {
    f.name: f.type if get_origin(f.type) is tuple else _kind(f.type) for f in fields(Recipe)
}


KNOBS = tuple(
    dict.fromkeys(name for method in scaling.METHODS.values() for name in method.knob_names())
)


def knobs_for(recipe: Recipe, method: str) -> object:
    """The knobs of a method, from the recipe; one that belongs to another method is refused."""
    kind = scaling.find(method)
    given = {name: getattr(recipe, name) for name in KNOBS if getattr(recipe, name) is not None}
    for name in given:
        if name not in kind.knob_names():
            owners = [m.name for m in scaling.METHODS.values() if name in m.knob_names()]
            raise UsageError(
                f"{flag(name)} is a knob of {' and '.join(owners)}, not of --method {method}"
            )
    return kind.knobs(**given)


def resolve_target(recipe: Recipe, context: int) -> int:
    """How many tokens are wanted; a factor that gives no whole number is rounded up."""
    if recipe.factor is None and recipe.target is None:
        raise UsageError(
            f"say how far: --factor 4, or --target {4 * context} (the model's context is {context})"
        )
    if recipe.target is not None:
        if recipe.target <= context:
            raise UsageError(
                f"--target {recipe.target} is not above the context of {context} tokens that the "
                "model has already (--context N where its config misstates it)"
            )
        target = recipe.target
    else:
        factor = recipe.factor
        if factor is None or not 1 < factor <= LARGEST_FACTOR:
            raise UsageError(
                f"--factor must be above 1 and at most {LARGEST_FACTOR:g}, was {factor}"
            )
        # The tolerance keeps 1.1 * 1000 = 1100.0000000000002 from becoming 1101.
        target = math.ceil(context * factor * (1 - 1e-12))
    if target > LONGEST_TARGET or target / context > LARGEST_FACTOR:
        raise UsageError(
            f"a target of {target} tokens is out of range: at most {LARGEST_FACTOR:g} times the "
            f"context of {context}, and at most {LONGEST_TARGET}"
        )
    return target


PairFactors = tuple[tuple[float, ...], tuple[float, ...] | None]


def parse_pair_factors(text: str, name: str) -> PairFactors:
    """The long set and, where the file has one that differs, the short set.

    Read are: a JSON list; a JSON object with `pair_factors` or `long_factor` and `short_factor`
    (also inside `rope_scaling` or `rope_parameters`); CSV, one row or one column, or the released
    LongRoPE files, which repeat the row for every layer.
    """
    stripped = text.strip()
    if stripped[:1] in ("[", "{"):
        return _json_factors(stripped, name)
    rows = [row for row in stripped.splitlines() if row.strip()]
    values = [_numbers(row.strip().strip(",").split(","), name) for row in rows]
    if not values:
        raise InputError(f"--pair-factors {name}: the file is empty")
    if len(values) > 1 and all(len(row) == 1 for row in values):
        return tuple(row[0] for row in values), None
    if any(row != values[0] for row in values):
        raise InputError(
            f"--pair-factors {name}: its {len(values)} rows differ, but a stock config has one set "
            "of factors for all layers"
        )
    return values[0], None


def _numbers(items: object, name: str) -> tuple[float, ...]:
    if not isinstance(items, list):
        raise InputError(f"--pair-factors {name}: expected a list of numbers")
    try:
        if any(isinstance(item, bool) for item in items):
            raise TypeError("true and false are not numbers")
        return tuple(float(item) for item in items)
    except (TypeError, ValueError, OverflowError) as error:
        raise InputError(f"--pair-factors {name}: not a number: {str(error)[:80]}") from None


def _json_factors(text: str, name: str) -> PairFactors:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"--pair-factors {name} is not valid JSON: {error}") from None
    if isinstance(data, list):
        return _numbers(data, name), None
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(data.get(key), Mapping):
            data = data[key]
            break
    for key in ("pair_factors", "long_factor", "rescale_factors"):
        if key in data:
            long = _numbers(data[key], name)
            short = _numbers(data["short_factor"], name) if "short_factor" in data else None
            return long, None if short == long else short
    raise InputError(
        f"--pair-factors {name}: found none of the keys pair_factors, long_factor, rescale_factors"
    )


def build(options: Mapping[str, Any], read_file: Callable[[str], str] | None = None) -> Recipe:
    """A Recipe from option values; `pair_factors` given as a path is read with `read_file`."""
    known = {f.name for f in fields(Recipe)}
    values = {key: value for key, value in options.items() if value is not None}
    unknown = sorted(set(values) - known)
    if unknown:
        raise UsageError(f"unknown option {unknown[0]!r}; known are {', '.join(sorted(known))}")
    pairs = values.get("pair_factors")
    if isinstance(pairs, str):
        if read_file is None:
            raise UsageError("pair_factors: expected numbers, was a path")
        long, short = parse_pair_factors(read_file(pairs), pairs)
        values["pair_factors"] = long
        values.setdefault("short_pair_factors", short)
    return Recipe(**{key: _typed(key, value) for key, value in values.items()})


_WANTED = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}


def _typed(key: str, value: Any) -> Any:
    """The value as the field's type says; a recipe file or a script may hold anything."""
    if value is None:
        return None
    kind = KINDS[key]
    if get_origin(kind) is tuple:
        item = get_args(kind)[0]
        if not isinstance(value, list | tuple):
            raise UsageError(f"{flag(key)} must be a list, was {repr(value)[:60]}")
        return tuple(_single(key, one, item) for one in value)
    return _single(key, value, kind)


def _single(key: str, value: Any, kind: type) -> Any:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if number and kind is float:
        return _float(value)
    if number and kind is int and _float(value).is_integer():
        return int(value)
    if kind is int or kind is float or not isinstance(value, kind):
        raise UsageError(f"{flag(key)} must be {_WANTED[kind]}, was {repr(value)[:60]}")
    return value


def _float(value: float) -> float:
    """An integer of hundreds of digits does not fit a float; no option wants one."""
    try:
        return float(value)
    except OverflowError:
        return math.inf
