"""`ropext eval MODEL --data DATA`."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ropext.cli import options
from ropext.cli.output import Bar, Out, stoppable
from ropext.options.evaluate import Evaluate

if TYPE_CHECKING:
    from ropext.evaluation.session import Evaluation
    from ropext.results.gates import Gate

Output = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="RUN", help="directory that keeps it all")
]
FailIf = Annotated[
    list[str] | None,
    typer.Option(
        "--fail-if",
        metavar="GATE",
        help='exit 3 when it holds, e.g. "tail@32k > 8.5", "short_tax > 0.02", "tail@32k > vs RUN"',
    ),
]
Losses = Annotated[
    Path | None,
    typer.Option(
        "--losses", metavar="FILE", help="write the loss of every token there too, as parquet"
    ),
]
Force = Annotated[bool, typer.Option("--force", help="replace RUN if it holds another run")]
Full = Annotated[bool, typer.Option("--full", help="print every table of the report")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="passes, FLOPs, peak memory; runs nothing")]


@options.takes("given", Evaluate)
def command(
    out: Out,
    model: options.ModelArg,
    given: dict[str, Any],
    output: Output = None,
    fail_if: FailIf = None,
    losses: Losses = None,
    force: Force = False,
    full: Full = False,
    dry_run: DryRun = False,
    time: options.Time = False,
    revision: options.Revision = None,
    trust_remote_code: options.TrustRemoteCode = False,
) -> None:
    """Measure a model at its long lengths. By perplexity and retrieval, beside the base."""
    from ropext.evaluation.costs import estimate_evaluation
    from ropext.evaluation.work import processes
    from ropext.narration import Hooks
    from ropext.pipeline.extending import check_evaluation, evaluate
    from ropext.results.gates import parse_gate

    options.check_time(time, dry_run)
    gates = tuple(parse_gate(text) for text in fail_if or ())
    common: dict[str, Any] = {
        "revision": revision,
        "trust_remote_code": trust_remote_code,
        "gates": gates,
    }
    if dry_run:
        check_evaluation(model, output, common | given | {"losses": losses})
        from ropext.evaluation.timing import timed_reading
        from ropext.proof.dequantising import directory_of

        common["timed"] = timed_reading if time else None
        with directory_of(model, out.say) as place:
            settled, estimate = estimate_evaluation(
                place, **common, output=output, force=force, **given
            )
        for warning in settled.warnings:
            out.say(f"warning: {warning}")
        out.result(_estimate_text(estimate), estimate.to_json())
        return
    with stoppable() as stop:
        hooks = Hooks(say=out.say, show=Bar(out).show, stop=stop)
        done = evaluate(
            model,
            output,
            **common,
            losses=losses,
            force=force,
            command=sys.argv,
            hooks=hooks,
            **given,
        )
    if processes()[0] == 0:
        _tell(out, done, gates, full)


def _tell(out: Out, done: "Evaluation", gates: "tuple[Gate, ...]", full: bool) -> None:
    """The result on stdout, the gates, and the exit code that follows from them."""
    from ropext.report import tables
    from ropext.results import rundir
    from ropext.table import as_markdown, as_text

    assert done.run is not None  # the first process always has it
    outcomes = rundir.judge(done.run, gates)
    every = tables.evaluation_tables(done.results)
    shown = every if full else tables.main_tables(done.results)
    lines = tables.verdict_lines(done.results)
    lines += [outcome.sentence for outcome in outcomes]
    out.result(
        as_text(shown, lines),
        dict(done.results) | {"gates": [vars(outcome) for outcome in outcomes]},
    )
    if done.resumed:
        out.say(f"{done.resumed} finished pieces were found and not read again")
    if done.path is not None:
        out.say(f"report: {done.path / 'report.html'}")
    out.summarise(as_markdown(every) + "\n\n" + "".join(f"- {line}\n" for line in lines))
    rundir.raise_if_failed(outcomes)


def _estimate_text(estimate: Any) -> str:
    from ropext.report.text import size
    from ropext.table import columns

    manner = f"in chunks of {estimate.chunk}" if estimate.chunk else "each document in one piece"
    if estimate.columns is None:
        manner += f", logits in slices of {estimate.slice_tokens} tokens"
    else:
        manner += f", logits in tiles {estimate.columns} entries of the vocabulary wide"
    rows = [(part.what, str(part.passes), str(part.tokens)) for part in estimate.work]
    return "\n".join(
        [
            columns(("work", "passes", "tokens each"), rows),
            "",
            f"passes       {estimate.passes}",
            f"tokens       {estimate.tokens:,}",
            f"FLOPs        {estimate.flops:.3g}",
            f"weights      {size(estimate.weight_bytes)}",
            f"peak memory  {size(estimate.peak_bytes)} above the weights, read {manner}",
            *([f"time         {estimate.time.sentence}"] if estimate.time else []),
        ]
    )
