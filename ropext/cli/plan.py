"""Define `ropext plan MODEL`."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ropext.base.errors import UsageError
from ropext.base.inputs import read_text
from ropext.cli import options
from ropext.cli.output import Out, call_of, stoppable
from ropext.options.evaluate import DocumentOptions, SelfExtend
from ropext.options.extend import Extend, parse_extend
from ropext.options.fields import flag, places_read
from ropext.options.memory import MemoryOptions

if TYPE_CHECKING:
    from ropext.base.table import Format
    from ropext.evaluation.measured_plan import Measured
    from ropext.files.inspecting import Served
    from ropext.planning import ExtensionPlan, Plan

Plot = Annotated[
    Path | None,
    typer.Option("--plot", metavar="FILE.png", help="draw the RoPE frequencies of all methods"),
]
Details = Annotated[
    bool,
    typer.Option(
        "--details",
        rich_help_panel=options.BASIC_OUTPUT,
        help="show the whole plan: all methods, the new config keys, the verdict for each engine "
        "and why, every command",
    ),
]
Measure = Annotated[
    str | None,
    typer.Option(
        "--measure",
        metavar="DATA",
        rich_help_panel=options.BASIC_DATA,
        help="rank the methods by tail perplexity at the target on documents: txt, jsonl, "
        "parquet, a folder, or a datasets id (needs torch; loads the model)",
    ),
]


def command(
    out: Out,
    model: options.ModelArg,
    given: Annotated[options.Given, options.OptionsOf(Extend)],
    reading: Annotated[options.Given, options.OptionsOf(DocumentOptions)],
    folding: Annotated[options.Given, options.OptionsOf(SelfExtend)],
    room: Annotated[options.Given, options.OptionsOf(MemoryOptions)],
    measure: Measure = None,
    plot: Plot = None,
    details: Details = False,
    table_format: options.Format = None,
    revision: options.Revision = None,
    trust_remote_code: options.TrustRemoteCode = False,
) -> None:
    """Show what an extension of a model or GGUF would do. For an extended model it shows how to
    serve it; with only --for it checks these engines (exit code 0, 3 or 6)."""
    from ropext.files import inspecting

    options.check_plot(plot, {"MODEL": model, "--measure": measure, **places_read(given, Extend)})
    out.check_format(table_format)
    if room and "memory" not in room:
        raise UsageError(f"{flag(next(iter(room)))} belongs to --memory; add --memory SIZE")
    if measure is not None:
        if room:
            raise UsageError("--memory and --measure do not go together; give one of them")
        from ropext.evaluation.measured_plan import RankingRequest
        from ropext.evaluation.measured_plan import measure as rank

        request = RankingRequest(
            model,
            measure,
            parse_extend(given, read_text),
            revision=revision,
            reading=DocumentOptions(**reading),
            folding=SelfExtend(**folding).fold if folding else None,
        )
        with stoppable() as stop:
            call = call_of(out, trust_remote_code=trust_remote_code, stop=stop)
            ranked = rank(request, call)
        made = ranked.plans[given["method"]] if "method" in given else ranked.taken
        if plot is not None:
            out.picture(plot, made)
        if table_format is not None:
            _print_ranking_table(out, ranked, table_format)
            return
        _print_ranking(out, ranked, made, details=details)
        return
    if table_format is not None:
        raise UsageError("--format prints a measurement; add --measure DATA")
    if reading or trust_remote_code:
        name = flag(next(iter(reading), "trust_remote_code"))
        raise UsageError(f"{name} is about documents; add --measure DATA")
    if folding:
        raise UsageError(f"{flag(next(iter(folding)))} belongs to self-extend; add --measure DATA")
    if room:
        if plot is not None:
            raise UsageError("--memory and --plot do not go together; give one of them")
        _print_memory_fit(out, model, MemoryOptions(**room), given, revision, details=details)
        return
    if not given and plot is None:
        served = inspecting.read_unchanged(inspecting.open_model(model, revision=revision))
        if served is not None and served.is_extended:
            out.result(_unextended_text(served, details=details), served)
            return
    if plot is None and given.keys() == {"for_loaders"}:
        names = Extend(**given).for_loaders
        served = inspecting.read_unchanged(inspecting.open_model(model, revision=revision))
        if served is not None:
            _print_engine_gate(out, served, names, details=details)
            return
    show(out, inspecting.plan(model, revision=revision, **given), plot, details=details)


def _print_memory_fit(
    out: Out,
    model: str,
    room: MemoryOptions,
    given: dict[str, Any],
    revision: str | None,
    *,
    details: bool,
) -> None:
    """Print which length fits into the memory of `ropext plan --memory`, after the plan if one was
    requested."""
    from ropext.files import inspecting
    from ropext.results.report.memory import memory_text

    if not given:
        fit = inspecting.memory_fit(model, room, revision=revision)
        out.result(memory_text(fit), {"model": model} | fit.to_json())
        return
    made = inspecting.plan(model, revision=revision, **given)
    fit = inspecting.memory_fit(model, room, length=made.target, revision=revision)
    body = f"{_printed_plan(made, details)}\n\n{memory_text(fit)}"
    out.result(body, made.to_json() | {"memory": fit.to_json()})


def _unextended_text(served: "Served", verdict: str = "", *, details: bool) -> str:
    """Return the text that the command `ropext plan` prints in the terminal if a model is served
    unchanged. It is one screen, or all details."""
    from ropext.results.report import text
    from ropext.results.report.screen import served_screen

    if details:
        return text.served_details(served, verdict)
    return served_screen(served, verdict)


def _print_engine_gate(out: Out, served: "Served", names: Sequence[str], *, details: bool) -> None:
    """Print how each engine reads a model, for `ropext plan --for`. Raise if one of these engines
    reads it differently, or if that was not measured; then the reasons are printed, too."""
    from ropext.files import inspecting

    judged = inspecting.gate(served, names)
    data = served.to_json() | {"gate": judged}
    if judged.passed:
        shown = _unextended_text(served, judged.sentence, details=details)
    else:
        shown = _unextended_text(served, details=True)
    out.result(shown, data)
    judged.raise_if_failed()


def show(out: Out, plan: "ExtensionPlan", plot: Path | None = None, *, details: bool) -> None:
    """Print a plan as the result of a command, and draw it for --plot."""
    if plot is not None:
        out.picture(plot, plan)
    out.result(_printed_plan(plan, details), plan)


def _printed_plan(plan: "ExtensionPlan", details: bool) -> str:
    """Return the text that the commands `ropext plan` and `extend --dry-run` print. It fills one
    screen; with --details it is the whole plan."""
    from ropext.results.report import text
    from ropext.results.report.screen import plan_screen

    if details:
        return text.plan_details(plan)
    return plan_screen(plan)


def _print_ranking(out: Out, ranked: "Measured", plan: "Plan", *, details: bool) -> None:
    """Print for `ropext plan --measure` the plan of the method that the user gave, else of the
    recommended one, and then the ranking."""
    from ropext.planning.methods import Recommendation
    from ropext.results.report.ranking import ranking_text

    chosen = Recommendation(ranked.ranking.taken, False, "by the measurement below")
    plan = replace(plan, advised=chosen)
    mark = ranked.overlap.mark if ranked.overlap else ""
    body = ranking_text(ranked.ranking, ranked.plans, ranked.left_out, mark)
    out.result(f"{_printed_plan(plan, details)}\n\n{body}", plan.to_json() | {"measured": ranked})


def _print_ranking_table(out: Out, ranked: "Measured", table_format: "Format") -> None:
    """Print the table of `ropext plan --measure --format`, and its remarks on stderr."""
    from ropext.results.report.ranking import ranking_lines, ranking_table

    mark = ranked.overlap.mark if ranked.overlap else ""
    lines = ranking_lines(ranked.ranking, ranked.left_out)
    starred = table_format != "csv"  # in CSV a program looks for the method's name
    out.tables([ranking_table(ranked.ranking, mark, starred=starred)], lines, table_format)
