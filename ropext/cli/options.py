"""Options that several commands share, each declared once.

The recipe's options are made from its fields, so that no option exists in only one of the command
line and the recipe file.
"""

import inspect
from collections.abc import Callable
from dataclasses import Field, fields
from typing import Annotated, Any

import typer

from ropext.loaders import parse_for
from ropext.recipe import Recipe, flag

ModelArg = Annotated[
    str, typer.Argument(metavar="MODEL", help="a local directory or a Hugging Face hub id")
]
Revision = Annotated[
    str | None, typer.Option("--revision", help="branch, tag or commit of a hub model")
]
TrustRemoteCode = Annotated[
    bool,
    typer.Option("--trust-remote-code", help="run Python code that comes with the model (off)"),
]
Dtype = Annotated[
    str, typer.Option("--dtype", help="in which the model runs: auto, float32, bfloat16, float16")
]
Device = Annotated[str, typer.Option("--device", help="where the model runs, e.g. cpu or cuda:0")]
Json = Annotated[bool, typer.Option("--json", help="print the result as one JSON document")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="no narration on stderr")]

RECIPE = {f.name: f for f in fields(Recipe) if f.name != "short_pair_factors"}
_METAVARS = {
    "pair_factors": "FILE",
    "for_loaders": "LOADERS",
    "finetune": "DATA",
    "evaluate": "DATA",
}


def _option(wish: "Field[Any]") -> tuple[Any, Any]:
    """The annotation and default of one recipe field as an option."""
    names = [flag(wish.name)]
    if wish.type == (bool | None):
        names = [f"{names[0]}/--no-{names[0].removeprefix('--')}"]
    if wish.name == "method":
        names.append("-m")
    kind = str | None if wish.name in _METAVARS else wish.type
    default = False if wish.type is bool else None
    help_text = wish.metadata["help"]
    info = typer.Option(*names, metavar=_METAVARS.get(wish.name), help=help_text)
    return Annotated[kind, info], default


def recipe_parameters(names: tuple[str, ...] = tuple(RECIPE)) -> list[inspect.Parameter]:
    """One keyword parameter per recipe field."""
    kind = inspect.Parameter.KEYWORD_ONLY
    out = []
    for name in names:
        annotation, default = _option(RECIPE[name])
        out.append(inspect.Parameter(name, kind, default=default, annotation=annotation))
    return out


def takes_recipe(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command recipe options (all, by default); it gets those given as `wishes`."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True)
        added = recipe_parameters(names or tuple(RECIPE))

        def with_recipe(**values: Any) -> None:
            wishes = {p.name: values.pop(p.name) for p in added}
            command(wishes=wishes_given(wishes), **values)

        kept = [p for name, p in own.parameters.items() if name != "wishes"]
        kept = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in kept]
        # The model comes first, then how far and how, then where to and how loud.
        merged = [*kept[:1], *added, *kept[1:]]
        with_recipe.__signature__ = inspect.Signature(merged)  # type: ignore[attr-defined]
        with_recipe.__annotations__ = {p.name: p.annotation for p in merged}
        with_recipe.__doc__ = command.__doc__
        return with_recipe

    return decorate


def wishes_given(values: dict[str, Any]) -> dict[str, Any]:
    """What the user gave; a switch that was not turned counts as not given."""
    out = {key: value for key, value in values.items() if value is not None}
    for name, value in values.items():
        if value is False and RECIPE[name].type is bool:
            del out[name]
    if isinstance(out.get("for_loaders"), str):
        out["for_loaders"] = parse_for(out["for_loaders"])
    return out
