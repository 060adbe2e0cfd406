"""Options that several commands share, each declared once.

The recipe's options are made from its fields, so that no option exists in only one of the command
line and the recipe file.
"""

import inspect
from collections.abc import Callable
from dataclasses import Field, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from ropext.cli.signatures import Command, takes
from ropext.loaders import parse_for
from ropext.recipe import Recipe
from ropext.wishes import flag

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
Data = Annotated[
    str,
    typer.Option("--data", metavar="DATA", help="txt, jsonl, parquet, a folder, or a datasets id"),
]
Output = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="OUT", help="directory to write")
]
BeginAnew = Annotated[
    bool, typer.Option("--force", help="replace OUT, and what another run left unfinished")
]
Json = Annotated[bool, typer.Option("--json", help="print the result as one JSON document")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="no narration on stderr")]

RECIPE = {f.name: f for f in fields(Recipe) if f.name != "short_pair_factors"}
_METAVARS = {
    "pair_factors": "FILE",
    "for_loaders": "LOADERS",
    "finetune": "DATA",
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


def takes_recipe(*names: str) -> Callable[[Command], Command]:
    """Give a command recipe options (all, by default); it gets those given as `wishes`."""
    return takes("wishes", recipe_parameters(names or tuple(RECIPE)), read=with_loaders)


def with_loaders(given: dict[str, Any]) -> dict[str, Any]:
    """The list of --for as a list."""
    if "for_loaders" in given:
        given["for_loaders"] = parse_for(given["for_loaders"])
    return given
