"""Define `ropext fit MODEL --data DATA -o OUT`."""

from typing import Annotated

import typer

from ropext.base.errors import UsageError
from ropext.cli import options as shared
from ropext.cli.output import Out, call_of
from ropext.cli.push import requested_push
from ropext.cli.training import NO_OUTPUT, run_training
from ropext.options.push import PushOptions
from ropext.options.training import Fit

DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="show settings, sources, tokens, bytes; fit nothing",
        rich_help_panel=shared.BASIC_OUTPUT,
    ),
]


def command(
    out: Out,
    model: shared.ModelArg,
    data: shared.Data,
    *,
    output: shared.Output = None,
    given: Annotated[shared.Given, shared.OptionsOf(Fit)],
    force: shared.BeginAnew = False,
    dry_run: DryRun = False,
    revision: shared.Revision = None,
    pushing: Annotated[shared.Given, shared.OptionsOf(PushOptions)],
) -> None:
    """Learn RoPE frequencies from text; the weights stay the same. config.json stores them."""
    push = None
    if pushing:
        push = requested_push(pushing)
    from ropext.pipeline.gguf_outputs import fit_request

    call = call_of(out, force=force)
    if output is None and not dry_run:
        raise UsageError(NO_OUTPUT)
    request = fit_request(model, data, Fit(**given), revision)
    run_training(out, request, output, call, dry_run, push)
