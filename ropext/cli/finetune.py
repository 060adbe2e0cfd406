"""Define `ropext finetune DIR --data DATA -o OUT`."""

from typing import Annotated

import typer

from ropext.base.errors import UsageError
from ropext.cli import options as shared
from ropext.cli.output import Out, call_of
from ropext.cli.push import requested_push
from ropext.cli.training import NO_OUTPUT, run_training
from ropext.options.push import PushOptions
from ropext.options.training import Finetune

Directory = Annotated[
    str, typer.Argument(metavar="DIR", help="an extended checkpoint: a directory or a hub id")
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="show settings, sources, tokens, bytes; train nothing",
        rich_help_panel=shared.BASIC_OUTPUT,
    ),
]


def command(
    out: Out,
    directory: Directory,
    data: shared.Data,
    *,
    output: shared.Output = None,
    given: Annotated[shared.Given, shared.OptionsOf(Finetune)],
    force: shared.BeginAnew = False,
    dry_run: DryRun = False,
    pushing: Annotated[shared.Given, shared.OptionsOf(PushOptions)],
) -> None:
    """Train an extended checkpoint briefly. A LoRA, merged at the end."""
    push = None
    if pushing:
        push = requested_push(pushing)
    from ropext.training.request import TrainingRequest

    call = call_of(out, force=force)
    if output is None and not dry_run:
        raise UsageError(NO_OUTPUT)
    request = TrainingRequest(directory, data, Finetune(**given))
    run_training(out, request, output, call, dry_run, push)
