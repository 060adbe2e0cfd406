"""`ropext push DIR ORG/NAME`."""

from pathlib import Path
from typing import Annotated

import typer

from ropext.cli import options, pushing
from ropext.cli.output import Out

NAME = "push"

Directory = Annotated[Path, typer.Argument(metavar="DIR", help="a finished output of ropext")]
Repository = Annotated[
    str, typer.Argument(metavar="ORG/NAME", help="the repository; made where it does not exist")
]
Results = Annotated[
    list[str] | None,
    typer.Option(
        "--results", metavar="RUN", help="figures for the card: a run of ropext eval on DIR"
    ),
]
Force = Annotated[bool, typer.Option("--force", help="replace what else the repository holds")]


def command(
    directory: Directory,
    repository: Repository,
    results: Results = None,
    public: pushing.Public = False,
    force: Force = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Upload an output to the hub. With its card; private unless --public is given."""
    out = Out(as_json, quiet)
    wanted = pushing.Push(repository, not public, tuple(dict.fromkeys(results or ())), force)
    done = pushing.upload(out, directory, wanted)
    out.result(pushing.sentence(done), done.to_json())
