"""Options made from dataclass fields, merged into the signature that typer reads."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field
from typing import Annotated, Any

import typer

from ropext.wishes import flag

Command = Callable[..., None]


def option(wish: "Field[Any]") -> inspect.Parameter:
    """One field as an option; the field's own type checks what text cannot say."""
    default = wish.default if wish.default is not MISSING else None
    kind: Any = str | None
    if wish.type is bool:
        kind = bool
    elif wish.type in (int, int | None):
        kind = int | None
    names = [flag(wish.name), *(["-m"] if wish.name == "method" else [])]
    words = wish.metadata["help"]
    if isinstance(default, str | int) and not isinstance(default, bool):
        words = f"{words} [{default}]"
    info = typer.Option(*names, metavar=wish.metadata["metavar"], help=words)
    return inspect.Parameter(
        wish.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=False if kind is bool else None,
        annotation=Annotated[kind, info],
    )


def typed_option(
    wish: "Field[Any]", metavars: Mapping[str, str], lists: Sequence[str] = ()
) -> inspect.Parameter:
    """One field as an option of the field's own type; the `lists` are given as one text."""
    is_list = wish.name in lists
    kind: Any = str | None if is_list else wish.type
    info = typer.Option(
        flag(wish.name), metavar=metavars.get(wish.name), help=wish.metadata["help"]
    )
    return inspect.Parameter(
        wish.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None if is_list else wish.default,
        annotation=Annotated[kind, info],
    )


def takes(
    into: str,
    added: Sequence[inspect.Parameter],
    *,
    after: int = 1,
    read: Callable[[dict[str, Any]], dict[str, Any]] = dict,
) -> Callable[[Command], Command]:
    """Give a command more options, after so many of its own; it gets those that were given as one
    dict, named `into`, through `read`."""

    def decorate(command: Command) -> Command:
        own = inspect.signature(command, eval_str=True)

        def with_options(**values: Any) -> None:
            asked = [(p, values.pop(p.name)) for p in added]
            chosen = {p.name: value for p, value in asked if _given(p, value)}
            command(**values | {into: read(chosen)})

        kept = [p for name, p in own.parameters.items() if name != into]
        kept = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in kept]
        merged = [*kept[:after], *added, *kept[after:]]
        with_options.__signature__ = inspect.Signature(merged)  # type: ignore[attr-defined]
        with_options.__annotations__ = {p.name: p.annotation for p in merged}
        with_options.__doc__ = command.__doc__
        return with_options

    return decorate


def _given(parameter: inspect.Parameter, value: Any) -> bool:
    """Whether the user gave it; a switch that was not turned counts as not given."""
    return value is not None and not (value is False and parameter.default is False)
