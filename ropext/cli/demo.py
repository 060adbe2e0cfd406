"""`ropext demo`."""

from pathlib import Path
from typing import Annotated

import typer

from ropext.cli.options import at_home
from ropext.cli.output import Bar, Out

Output = Annotated[
    Path,
    typer.Option(
        "--output", "-o", callback=at_home, metavar="DIR", help="directory that keeps it all"
    ),
]
NoFinetune = Annotated[bool, typer.Option("--no-finetune", help="leave out what is trained")]


def command(
    out: Out,
    output: Output = Path("ropext-demo"),
    no_finetune: NoFinetune = False,
) -> None:
    """Show it all on a small bundled model. Extend, prove, fit, fine-tune, measure; no network."""
    from ropext import demo

    shown = demo.run(output, not no_finetune, out.say, Bar(out).show)
    out.result(shown.to_text(), shown)
