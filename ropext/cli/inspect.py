"""Define `ropext inspect MODEL`."""

from pathlib import Path
from typing import Annotated

import typer

from ropext.cli import options
from ropext.cli.output import Out
from ropext.options.extend import Reach

Plot = Annotated[
    Path | None,
    typer.Option(
        "--plot",
        metavar="FILE.png",
        help="draw the RoPE frequencies, or the similarity of a position table's rows",
    ),
]

Pairs = Annotated[
    bool,
    typer.Option(
        "--pairs",
        help="list every rotary pair: wavelength, rotations, and whether the target exceeds them",
    ),
]


def command(
    out: Out,
    model: options.ModelArg,
    given: Annotated[
        options.Given,
        options.OptionsOf(Reach, only=("factor", "target", "context", "original_context")),
    ],
    plot: Plot = None,
    pairs: Pairs = False,
    revision: options.Revision = None,
) -> None:
    """Show the position settings of a model or GGUF. Reads only config files and headers."""
    from ropext.files import inspecting
    from ropext.results.report import text

    options.check_plot(plot, {"MODEL": model})
    seen = inspecting.inspect(model, revision=revision, **given)
    if plot is not None:
        out.picture(plot, seen)
    out.result(text.inspection_text(seen, pairs), seen)
