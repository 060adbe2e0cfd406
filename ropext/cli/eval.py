"""Define `ropext eval MODEL --data DATA`, and for a running server `ropext eval --endpoint URL`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ropext.base.errors import UsageError
from ropext.base.jobs import counted
from ropext.cli import options
from ropext.cli.output import Out, call_of, stoppable
from ropext.options.endpoint import EndpointOptions, is_port
from ropext.options.evaluate import Evaluate
from ropext.options.fields import flag

if TYPE_CHECKING:
    from ropext.base.table import Format, Table
    from ropext.results.measurement import Measurement

Model = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="a local directory, a .gguf file, ollama:NAME[:TAG], or a Hugging Face hub id; with "
        "--endpoint the model's name there [the first one]",
    ),
]
Output = Annotated[
    Path | None,
    options.output_option("RUN", "directory that keeps it all"),
]
FailIf = Annotated[
    list[str] | None,
    typer.Option(
        "--fail-if",
        metavar="GATE",
        help='exit 3 when it holds, e.g. "tail@32k > 8.5", "short_tax > 0.02", "tail@32k > vs RUN"',
        rich_help_panel=options.BASIC_COMPARED,
    ),
]
Losses = Annotated[
    Path | None,
    typer.Option(
        "--losses",
        metavar="FILE",
        help="write the loss of every token there too, as parquet",
        rich_help_panel=options.BASIC_OUTPUT,
    ),
]
Force = Annotated[
    bool,
    typer.Option(
        "--force",
        help="replace RUN if it holds another run",
        rich_help_panel=options.BASIC_OUTPUT,
    ),
]
Full = Annotated[
    bool,
    typer.Option(
        "--full", help="print every table of the report", rich_help_panel=options.BASIC_OUTPUT
    ),
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="count passes, tokens and bytes; run nothing",
        rich_help_panel=options.BASIC_OUTPUT,
    ),
]


def command(
    out: Out,
    model: Model = None,
    *,
    given: Annotated[options.Given, options.OptionsOf(EndpointOptions, Evaluate)],
    output: Output = None,
    fail_if: FailIf = None,
    losses: Losses = None,
    force: Force = False,
    full: Full = False,
    dry_run: DryRun = False,
    table_format: options.Format = None,
    revision: options.Revision = None,
    trust_remote_code: options.TrustRemoteCode = False,
) -> None:
    """Measure a model at long lengths. Perplexity and retrieval, compared with truncated text."""
    from ropext.results.gates import parse_gate

    out.check_format(table_format)
    if table_format is not None and dry_run:
        raise UsageError(
            "--format prints a measurement, and --dry-run measures nothing; give one of them"
        )
    gates = tuple(map(parse_gate, fail_if or ()))
    if is_port(given):
        of_a_model = {"revision": revision, "trust_remote_code": trust_remote_code}
        for name, value in (of_a_model | {"losses": losses}).items():
            if value:
                raise UsageError(
                    f"{flag(name)} is about a model that ropext loads, not about a server"
                )
        from ropext.endpoint.plan import plan_lines
        from ropext.pipeline import server_evaluation
        from ropext.results.rundir import judge_gates

        plan = server_evaluation.plan_server_evaluation(given, model, gates, output)
        if dry_run:
            lines = plan_lines(plan)
            out.result("\n".join(lines), {"plan": lines} | plan.decides)
            return
        with stoppable() as stop:
            done = server_evaluation.evaluate_server(
                plan, output, call_of(out, force=force, stop=stop)
            )
        done = replace(done, gates=judge_gates(done, gates))
        _print_measurement(out, done, _printed_server(done), table_format)
        return
    if model is None:
        raise UsageError("give MODEL, or a running server by --endpoint URL")
    from ropext.evaluation.request import EvaluationRequest
    from ropext.models.processes import is_main
    from ropext.results.report import text

    request = EvaluationRequest(model, Evaluate(**given), revision, gates, losses)
    if dry_run:
        call = call_of(out, force=force, trust_remote_code=trust_remote_code)
        with request.prepared(output, call) as job:
            costs = counted(job, output, call)
        out.result(text.evaluation_costs_text(costs), costs)
        return
    with stoppable() as stop:
        call = call_of(out, force=force, trust_remote_code=trust_remote_code, stop=stop)
        with request.prepared(output, call) as job:
            done = job.make(output, call)
    if is_main():
        printed = _printed_models(done, full, table_format)
        _print_measurement(out, done, printed, table_format)


@dataclass(frozen=True)
class PrintedMeasurement:
    """The parts of a measurement that `ropext eval` prints: sentences, the tables for a terminal,
    all tables, and the sentence about resumed work."""

    lines: Sequence[str]
    shown: "Sequence[Table]"
    every: "Sequence[Table]"
    resumed: str


def _printed_models(
    done: "Measurement", full: bool, table_format: "Format | None"
) -> PrintedMeasurement:
    """Return the verdicts and the tables of evaluated models; --full and --format choose the
    tables."""
    from ropext.results.report import tables

    every = tables.evaluation_tables(done)
    if full and table_format == "csv":
        shown = tables.table_of_every_number(done)
    elif full:
        shown = every
    elif table_format == "csv":
        shown = tables.tidy_tables(done)
    else:
        shown = tables.main_tables(done)
    lines = tables.verdict_lines(done)
    lines += done.facts.not_measurable.values()
    resumed = "{} finished pieces were found and not read again"
    return PrintedMeasurement(lines, shown, every, resumed)


def _printed_server(done: "Measurement") -> PrintedMeasurement:
    """Return the tables and warnings of the server that --endpoint names."""
    from ropext.endpoint import report as endpoint_report

    shown = endpoint_report.server_tables(done)
    lines = endpoint_report.server_lines(done)
    lines += done.facts.warnings
    resumed = "{} questions were answered before and not asked again"
    return PrintedMeasurement(lines, shown, shown, resumed)


def _print_measurement(
    out: Out,
    done: "Measurement",
    printed: PrintedMeasurement,
    table_format: "Format | None",
) -> None:
    """Print the verdict, the numbers and the gates on stdout, and the place of the report on
    stderr. Raise an error if a gate of --fail-if failed."""
    from ropext.base.table import as_markdown, escape, verdict_first, with_rows
    from ropext.results import rundir
    from ropext.results.report.gates import failed_gate_lines, gate_table

    judged = with_rows([gate_table(done.gates)])
    lines = failed_gate_lines(done.gates)
    lines += printed.lines
    if table_format is not None:
        out.tables(printed.shown, lines, table_format)
    else:
        data = done.results | {"gates": done.gates}
        out.result(verdict_first(lines, [*printed.shown, *judged]), data)
    if done.resumed:
        out.say(printed.resumed.format(done.resumed))
    if done.path is not None:
        out.say(f"report: {done.path / 'report.html'}")
    verdicts = "".join(f"- {escape(line)}\n" for line in lines)
    out.summarise(f"{verdicts}\n{as_markdown([*printed.every, *judged])}\n")
    rundir.raise_if_gates_failed(done.gates)
