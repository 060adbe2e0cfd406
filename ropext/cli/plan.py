"""`ropext plan MODEL`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ropext.cli import options
from ropext.cli.output import Out

if TYPE_CHECKING:
    from ropext.planning import Plan

NAME = "plan"

Plot = Annotated[
    Path | None, typer.Option("--plot", metavar="FILE.png", help="draw the spectra of all methods")
]


@options.takes_recipe()
def command(
    model: options.ModelArg,
    wishes: dict[str, Any],
    plot: Plot = None,
    revision: options.Revision = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Show what an extension would do. On an extended directory: how to serve it."""
    from ropext import looking

    out = Out(as_json, quiet)
    if not wishes and plot is None:
        served = looking.serving(model, revision=revision)
        if served is not None:
            from ropext.report import text

            out.result(text.served(served), served.to_json())
            return
    show(out, looking.plan(model, revision=revision, **wishes), plot)


def show(out: Out, plan: "Plan", plot: Path | None = None) -> None:
    """Print a plan; `extend --dry-run` prints the same."""
    from ropext.report import text

    if plot is not None:
        out.picture(plot, plan.main.rope, plan.spectra(), plan.target, plan.name)
    out.result(text.plan(plan), plan.to_json())
