"""Options of an extension: how far, by which method, and for which engines."""

import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, get_origin

from pydantic import BeforeValidator, create_model, model_validator

from ropext import scaling
from ropext.base.errors import UsageError
from ropext.options.fields import (
    LONGEST_TARGET,
    Content,
    Divisors,
    DocumentsPlace,
    Files,
    Length,
    Link,
    LocalPath,
    MethodName,
    Neutral,
    Options,
    Panel,
    Positive,
    Role,
    Tokens,
    flag,
    list_schema,
    plain_type,
    shown_default,
    wanted,
)
from ropext.scaling import self_extend, tables
from ropext.scaling.longrope import parse_pair_factors

# Twelve doublings: beyond, no model was ever extended.
LARGEST_FACTOR = 4096.0
AUTO = "auto"


def _loader_names(value: object) -> object:
    """Read the option --for, and check the names of the engines in it."""
    from ropext.families import loaders  # late: no --help needs the table

    if isinstance(value, str):
        return loaders.parse_for(value)
    if not isinstance(value, list | tuple):
        return value
    for name in value:
        if isinstance(name, str):
            loaders.parse_for(name)
    return tuple(value)


Loaders = Annotated[tuple[str, ...], BeforeValidator(_loader_names), list_schema("string")]


class Reach(Options):
    """How far to extend, from which length, and for which engines."""

    factor: float | None = wanted(
        None,
        "how many times the context, e.g. 4 (or give the target)",
        panel=Panel.HOW_FAR,
        basic=True,
    )
    target: Length | None = wanted(
        None,
        "tokens wanted, e.g. 128k (or give the factor)",
        panel=Panel.HOW_FAR,
        basic=True,
    )
    context: Tokens | None = wanted(
        None,
        "tokens the model was trained on, if its config misstates them",
        panel=Panel.HOW_FAR,
    )
    original_context: Tokens | None = wanted(
        None,
        "length before the scaling in the config, if the config does not state it (linear)",
        panel=Panel.HOW_FAR,
    )
    from_original: bool = wanted(
        False,
        "scale a model that is scaled already from its original context",
        panel=Panel.HOW_FAR,
    )
    again: Neutral[bool] = wanted(
        False,
        "extend an extension of ropext again, although nothing was trained since",
        panel=Panel.HOW_FAR,
    )
    for_loaders: Loaders = wanted(
        (),
        "accept only settings that these engines compute exactly, e.g. vllm,llama.cpp",
        "LOADERS",
        panel=Panel.METHOD,
        basic=True,
    )
    # More than a consent: with --for it decides which rope dict is written. If no method is given,
    # it decides which one is used, and with --method auto which methods compete.
    even_so: bool = wanted(
        False,
        "extend even if scaling cannot help, or if an engine in --for was not measured",
        panel=Panel.METHOD,
    )

    @model_validator(mode="after")
    def _check_reach(self) -> Self:
        """Refuse --factor and --target together."""
        if self.factor is not None and self.target is not None:
            raise UsageError(
                f"--factor {self.factor:g} and --target {self.target} both say how far; give one"
            )
        return self


HOW = (
    f"how to scale: {', '.join(scaling.METHODS)}; without RoPE: "
    f"{', '.join(tables.METHODS)}; only in memory: {self_extend.NAME}; a function of yours: "
    "module:function"
)


class _Extension(Reach):
    """Options that every method takes."""

    method: MethodName | None = wanted(
        None,
        f"{HOW} [what plan recommends]",
        panel=Panel.METHOD,
        basic=True,
    )
    attention_factor: Positive | None = wanted(
        None,
        "factor on cos and sin, in place of the method's own (logits scale by its square)",
        panel=Panel.KNOBS,
    )
    temperature: Positive | None = wanted(
        None,
        "softmax temperature instead: attention factor = 1/sqrt(temperature)",
        panel=Panel.KNOBS,
    )

    length_only: bool = wanted(
        False,
        "raise only the length that the config states; the RoPE frequencies stay the same",
        panel=Panel.METHOD,
    )

    untrained: Neutral[bool] = wanted(
        False,
        "allow 64× or more without training",
        panel=Panel.METHOD,
    )

    @model_validator(mode="after")
    def _check_method(self) -> Self:
        """Refuse an unknown --method, --attention-factor with --temperature, and options that
        change the spectrum with --length-only."""
        if self.length_only:
            refused = "--length-only changes no spectrum;"
            for name in ("method", "attention_factor", "temperature", "like", *KNOBS):
                if getattr(self, name, None) is not None:  # not every class has all of them
                    raise UsageError(f"{refused} {flag(name)} asks for one")
            if self.from_original:
                raise UsageError(f"{refused} --from-original asks for one")
        if self.method not in (None, AUTO):
            scaling.check_known(self.method)
        if self.attention_factor is not None and self.temperature is not None:
            raise UsageError("--attention-factor and --temperature say the same thing; give one")
        return self

    @property
    def attention(self) -> float | None:
        """Return the attention factor that the option --attention-factor or --temperature gives."""
        if self.temperature is not None:
            return 1 / math.sqrt(self.temperature)
        return self.attention_factor


def _methods_by_knob() -> dict[str, list[scaling.Method]]:
    """Return, for each knob (an option of some methods), the methods that have it."""
    owners = dict[str, list[scaling.Method]]()
    for method in scaling.METHODS.values():
        for name in method.knob_names():
            owners.setdefault(name, []).append(method)
    return owners


OWNERS = _methods_by_knob()
KNOBS = tuple(OWNERS)


def _knob_fields() -> dict[str, tuple[Any, Any]]:
    """Make each knob of a method an option whose help names its methods and its effect."""
    made = dict[str, tuple[Any, Any]]()
    for method in scaling.METHODS.values():
        for knob in fields(method.knobs):
            if knob.name in made:
                continue
            names = ", ".join(owner.name for owner in OWNERS[knob.name])
            help_text = f"{names}: {knob.metadata['help']}{shown_default(knob.default)}"
            kind: Any = knob.type
            metavar = None
            if "file" in knob.metadata:
                kind = Annotated[Divisors, Role.PATH]
                metavar = "FILE"
            elif get_origin(plain_type(kind)) is tuple:
                kind = Divisors
            made[knob.name] = (kind | None, wanted(None, help_text, metavar, panel=Panel.KNOBS))
    return made


if TYPE_CHECKING:

    class Extension(_Extension):
        """How far, by which method, for whom, with which knobs."""

        def __init__(self, **values: Any) -> None:
            """Tell type checkers that an extension takes its options by name, and the knobs of all
            methods."""
            ...

else:
    # The knobs come from the list of methods, so that a new one needs no second mention here.
    Extension = create_model(
        "Extension", __base__=_Extension, __module__=__name__, **_knob_fields()
    )


class ServedExtension(Extension):
    """The extension, if any, of a model in memory that ropext serves."""

    method: MethodName | None = wanted(
        None,
        f"{HOW} [the model is served as it is]",
        panel=Panel.METHOD,
        basic=True,
    )


class Extend(Extension):
    """One extension by one method."""

    if TYPE_CHECKING:

        def __init__(self, **values: Any) -> None:
            """Tell type checkers that `extend` takes its options by name, and the knobs of all
            methods."""
            ...

    like: LocalPath | None = wanted(
        None,
        "GGUF: take the RoPE frequencies of this extended or fitted directory",
        "DIR",
        panel=Panel.METHOD,
        basic=True,
    )
    finetune: Annotated[str, Role.DOCUMENTS] | None = wanted(
        None,
        "data to fine-tune on afterwards",
        "DATA",
        panel=Panel.FOLLOWS,
        basic=True,
    )

    @model_validator(mode="after")
    def _refuse_auto(self) -> Self:
        """Refuse `--method auto` for a command that extends by one method."""
        if self.method == AUTO:
            raise UsageError(
                "--method auto is for `ropext extend`, recipes and ropext.run, and chooses by "
                "--data TEXTS; `ropext plan --measure TEXTS` ranks the methods"
            )
        return self


def knobs_for(options: Extend, method: str) -> object:
    """Return the given flags that are knobs of this --method; refuse a flag that is a knob of
    another method."""
    kind = scaling.find(method)
    given = dict[str, object]()
    for name in KNOBS:
        value = getattr(options, name)
        if value is None:
            continue
        if name not in kind.knob_names():
            owners = " and ".join(owner.name for owner in OWNERS[name])
            raise UsageError(f"{flag(name)} is a knob of {owners}, not of --method {method}")
        given[name] = value
    return kind.knobs(**given)


def resolve_target(options: Extend, context: int) -> int:
    """Check the option --target or --factor, and return the tokens it asks for. Round up if a
    factor gives no whole number."""
    if options.target is not None:
        target = options.target
        if target <= context:
            raise UsageError(
                f"--target {target} is not above the context of {context} tokens that the "
                "model has already (--context N if its config misstates it)"
            )
    elif options.factor is not None:
        factor = options.factor
        if not 1 < factor <= LARGEST_FACTOR:
            raise UsageError(
                f"--factor must be above 1 and at most {LARGEST_FACTOR:g}, was {factor}"
            )
        # The tolerance keeps 1.1 * 1000 = 1100.0000000000002 from becoming 1101.
        target = math.ceil(context * factor * (1 - 1e-12))
    else:
        raise _no_target_error(options, context)
    if target > LONGEST_TARGET or target / context > LARGEST_FACTOR:
        raise UsageError(
            f"a target of {target} tokens is out of range: at most {LARGEST_FACTOR:g} times the "
            f"context of {context}, and at most {LONGEST_TARGET}"
        )
    return target


def _no_target_error(options: Extend, context: int) -> UsageError:
    """Return the error for a missing option: neither of the flags --factor and --target is
    given."""
    advice = f"give --factor 4, or --target {4 * context} (the model's context is {context})"
    if options.context is not None:
        advice += f"; --context N is what it was trained on, --target {context} what it is to read"
    return UsageError(advice)


def with_pair_factors(
    values: Mapping[str, Any], read_file: Callable[[str], str] | None = None
) -> dict[str, Any]:
    """Return the options, with the numbers from the file that the option --pair-factors may
    name."""
    values = dict(values)
    pairs = values.get("pair_factors")
    if not isinstance(pairs, str):
        return values
    if read_file is None:
        raise UsageError("pair_factors: expected numbers, was a path")
    long, short, attention = parse_pair_factors(read_file(pairs), pairs)
    values["pair_factors"] = long
    if values.get("short_pair_factors") is None:
        values["short_pair_factors"] = short
    if values.get("attention_factor") is None and values.get("temperature") is None:
        values["attention_factor"] = attention
    return values


def parse_extend(
    values: Mapping[str, Any], read_file: Callable[[str], str] | None = None
) -> Extend:
    """Check the options of an extension; `read_file` reads --pair-factors if it is given as a
    path."""
    return Extend(**with_pair_factors(values, read_file))


class Writing(Options):
    """Options that say how an extension is written."""

    link: Files[Link] = wanted(
        "copy",
        "how the weights get into OUT; hard and symlink share the files with the base, so an edit "
        "in place changes both",
        panel=Panel.OUTPUT,
    )
    no_verify: Files[bool] = wanted(
        False,
        "skip the verification with transformers",
        panel=Panel.OUTPUT,
    )
    hash: Files[bool] = wanted(
        False,
        "record a SHA-256 of every weight file",
        panel=Panel.OUTPUT,
    )


class Choosing(Options):
    """Options that say which documents choose a method."""

    data: Content[DocumentsPlace | None] = wanted(
        None,
        "--method auto: documents to choose by; some are held out for the verdict",
        "DATA",
        panel=Panel.DATA,
        basic=True,
    )
    within: Literal["longrope", "yarn", "ntk"] | None = wanted(
        None,
        "--method auto: what its fit may change [the most that --for reads exactly]",
        panel=Panel.METHOD,
    )


def is_run(options: Mapping[str, Any], *later: object) -> bool:
    """Return whether the flags or Python arguments of `extend` make a recipe: --method auto, an
    option of it, or later steps."""
    is_choice = options.get("method") == AUTO
    has_choosing = any(name in options for name in Choosing.model_fields)
    return is_choice or has_choosing or any(later)
