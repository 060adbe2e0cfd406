"""`ropext fit MODEL --data DATA -o OUT`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ropext.cli import options as shared
from ropext.cli import push
from ropext.cli.output import Out, call_of
from ropext.errors import UsageError
from ropext.jobs import counted
from ropext.narration import Call
from ropext.options.training import Fit

if TYPE_CHECKING:
    from ropext.training.objective import Objective

NO_OUTPUT = "give -o OUT, the directory to write (or --dry-run to see the settings)"
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="show settings, sources, tokens, bytes; fit nothing",
        rich_help_panel=shared.BASIC_OUTPUT,
    ),
]


def told_before(
    out: Out, job: "Objective[Any]", output: Path, call: Call, wanted: push.Push | None
) -> bool:
    """Whether this very training was done before; then it says so, and pushes what is there."""
    record = job.done_before(output, call)
    if record is None:
        return False
    from ropext.models.processes import is_main

    if is_main():
        text = f"{output}: {job.command} was done before, skipped (--force does it again)"
        data = {"output": str(output), "done_before": True, job.command: record.more[job.command]}
        push.result(out, text, data, output, wanted)
    return True


@shared.takes("given", Fit, after=4)
def command(
    out: Out,
    model: shared.ModelArg,
    data: shared.Data,
    given: dict[str, Any],
    output: shared.Output = None,
    force: shared.BeginAnew = False,
    dry_run: DryRun = False,
    revision: shared.Revision = None,
    push_to_hub: push.PushToHub = None,
    public: push.Public = False,
) -> None:
    """Learn a spectrum from text, weights untouched. config.json says what was found."""
    wanted = push.asked_push(push_to_hub, public)
    from ropext.models import processes
    from ropext.pipeline.fitting import fit_request
    from ropext.training import fit_report, report

    call = call_of(out, force=force)
    if output is None and not dry_run:
        raise UsageError(NO_OUTPUT)
    request = fit_request(model, data, Fit(**given), revision)
    if output is None or dry_run:
        with request.prepared(output, call) as job:
            planned = counted(job, output, call)
        if processes.is_main():
            out.result(report.plan_text(planned), planned)
        return
    with request.prepared(output, call) as job:
        if told_before(out, job, output, call, wanted):
            return
        done = job.make(output, call)
    if done is not None and processes.is_main():
        push.result(out, fit_report.fit_result(done), done, done.output, wanted)
