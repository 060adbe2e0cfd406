"""Define `ropext fit MODEL --data DATA -o OUT`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ropext.base.errors import UsageError
from ropext.base.jobs import counted
from ropext.base.narration import Call
from ropext.cli import options as shared
from ropext.cli import push
from ropext.cli.output import Out, call_of
from ropext.options.training import Fit

if TYPE_CHECKING:
    from ropext.training.objective import TrainingObjective
    from ropext.training.request import TrainingRequest
    from ropext.training.result import TrainingResult

NO_OUTPUT = "give -o OUT, the directory to write (or --dry-run to see the settings)"
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="show settings, sources, tokens, bytes; fit nothing",
        rich_help_panel=shared.BASIC_OUTPUT,
    ),
]


def train(
    out: Out,
    request: "TrainingRequest",
    output: Path | None,
    call: Call,
    dry_run: bool,
    wanted: push.Push | None,
) -> None:
    """Run the training of `ropext fit` or `finetune`, and print its result from the main
    process."""
    from ropext.models import processes

    with request.prepared(output, call) as prepared:
        job: TrainingObjective[Any] = prepared
        if output is None or dry_run:
            show_counted(out, job, output, call)
            return
        done = job.make(output, call)
    if done is None or not processes.is_main():
        return
    if done.is_from_before:
        show_done_before(out, job.command, done, wanted)
    else:
        push.result(out, job.result_text(done), done, done.output, wanted)


def show_counted(out: Out, job: "TrainingObjective[Any]", output: Path | None, call: Call) -> None:
    """Print the cost of a training for --dry-run, or that it was done before."""
    from ropext.models import processes
    from ropext.training import report

    before = None if output is None else job.done_before(output, call)
    planned = None
    if before is None:
        planned = counted(job, output, call)
    if not processes.is_main():
        return
    if before is not None:
        show_done_before(out, job.command, before, None)
    elif planned is not None:
        out.result(report.dry_run_text(planned), planned)


def show_done_before(
    out: Out, command: str, done: "TrainingResult", wanted: push.Push | None
) -> None:
    """Print as the command's result that a training was done before, and push its output if the
    user wants a push."""
    text = f"{done.output}: {command} was done before, skipped (--force does it again)"
    push.result(out, text, done.to_json() | {"done_before": True}, done.output, wanted)


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
    push_to_hub: push.PushToHub = None,
    public: push.Public = False,
) -> None:
    """Learn RoPE frequencies from text; the weights stay the same. config.json stores them."""
    wanted = push.check_push(push_to_hub, public)
    from ropext.pipeline.fitting import fit_request

    call = call_of(out, force=force)
    if output is None and not dry_run:
        raise UsageError(NO_OUTPUT)
    request = fit_request(model, data, Fit(**given), revision)
    train(out, request, output, call, dry_run, wanted)
