"""`ropext demo`."""

from pathlib import Path
from typing import Annotated

import typer

from ropext.cli.options import at_home
from ropext.cli.output import Bar, Out

Output = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        callback=at_home,
        metavar="DIR",
        help="directory that keeps it all [ropext-demo; with --full ropext-demo-full]",
    ),
]
Full = Annotated[
    bool,
    typer.Option("--full", help="also PI, NTK, a fitted spectrum, a longer LoRA and its control"),
]


def command(out: Out, output: Output = None, full: Full = False) -> None:
    """Show it all on a small bundled model. Extend, prove, fine-tune, measure; no network."""
    from ropext import demo
    from ropext.results import rundir

    folder = output or Path("ropext-demo-full" if full else "ropext-demo")
    shown = demo.run(folder, full, out.say, Bar(out).show)
    out.result(shown.to_text(), shown)
    rundir.raise_if_failed(shown.gates)
