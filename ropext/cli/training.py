"""Run the training of `ropext fit` or `ropext finetune`, and print its result."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ropext.base.jobs import counted
from ropext.base.narration import Call
from ropext.cli.output import Out
from ropext.cli.push import Push, print_pushed_result

if TYPE_CHECKING:
    from ropext.training.objective import TrainingObjective
    from ropext.training.request import TrainingRequest
    from ropext.training.result import TrainingResult

NO_OUTPUT = "give -o OUT, the directory to write (or --dry-run to see the settings)"


def run_training(
    out: Out,
    request: "TrainingRequest",
    output: Path | None,
    call: Call,
    dry_run: bool,
    wanted: Push | None,
) -> None:
    """Run the training of `ropext fit` or `finetune`, and print its result from the main
    process."""
    from ropext.models import processes

    with request.prepared(output, call) as prepared:
        job: TrainingObjective[Any] = prepared
        if output is None or dry_run:
            _print_counts(out, job, output, call)
            return
        done = job.make(output, call)
    if done is None or not processes.is_main():
        return
    if done.is_from_before:
        _print_done_before(out, job.command, done, wanted)
    else:
        print_pushed_result(out, job.result_text(done), done, done.output, wanted)


def _print_counts(out: Out, job: "TrainingObjective[Any]", output: Path | None, call: Call) -> None:
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
        _print_done_before(out, job.command, before, None)
    elif planned is not None:
        out.result(report.dry_run_text(planned), planned)


def _print_done_before(out: Out, command: str, done: "TrainingResult", wanted: Push | None) -> None:
    """Print as the command's result that a training was done before, and push its output if the
    user wants a push."""
    text = f"{done.output}: {command} was done before, skipped (--force does it again)"
    print_pushed_result(out, text, done.to_json() | {"done_before": True}, done.output, wanted)
