"""`ropext conformance`."""

from pathlib import Path
from typing import Annotated

import typer

from ropext.cli.output import Out
from ropext.narration import told

Output = Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="directory to write")]
Family = Annotated[
    list[str] | None,
    typer.Option("--family", metavar="TYPE", help="a model type, again for more [all of the kit]"),
]
Force = Annotated[bool, typer.Option("--force", help="replace DIR if it is there")]


def command(
    out: Out,
    output: Output,
    family: Family = None,
    force: Force = False,
) -> None:
    """Write a kit for authors of loaders. Small checkpoints, and what a right reading gives."""
    from ropext import conformance

    show = told(out.say, amount=lambda done, total: f"{done} of {total} families")
    made = conformance.write_kit(output, family or (), force=force, show=show)
    forms = sum(len(own) for own in made["families"].values())
    text = (
        f"wrote {output}: {len(made['families'])} families, {forms} configs, "
        f"{made['bytes'] / 1e6:.1f} MB\n{output / 'README.md'} says how a loader is held against it"
    )
    out.result(text, made)
