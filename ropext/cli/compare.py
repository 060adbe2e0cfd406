"""`ropext compare RUN…`: no model, no torch; the arrays of finished runs, paired."""

from pathlib import Path
from typing import Annotated, Any

import typer

from ropext.cli import options
from ropext.cli.output import Out

NAME = "compare"

Runs = Annotated[
    list[str],
    typer.Argument(metavar="RUN...", help="run directories of ropext eval; RUN:VARIANT names one"),
]
Output = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="DIR", help="write a report there too")
]
FailIf = Annotated[
    list[str] | None,
    typer.Option("--fail-if", metavar="GATE", help='e.g. "tail@32k > 0.01 vs OTHER" (exit 3)'),
]


def command(
    runs: Runs,
    output: Output = None,
    fail_if: FailIf = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Compare evaluations on the same tokens. Finished runs, with paired intervals."""
    from ropext.report import evaluated, measured
    from ropext.results import comparison, contest, gates

    out = Out(as_json, quiet)
    wanted = [gates.parse_gate(text) for text in fail_if or ()]
    opened, contenders = contest.gather(runs)
    readers = [own for own in contenders.values() if own.reading is not None]
    compared = comparison.compare_text(readers) if len(readers) > 1 else None
    first = next(iter(contenders.values()))
    boot = first.frame.bootstrap
    items = {
        label: comparison.item_differences(own.items, first.items, boot)
        for label, own in contenders.items()
        if own is not first
    }
    tables = measured.comparison_tables(compared) if compared else []
    retrieval = measured.item_table({label: own for label, own in items.items() if own})
    tables += [retrieval] if retrieval else []
    for label, count in (compared.left_out if compared else {}).items():
        if count:
            out.say(f"{label}: {count} documents are not in all runs and are left out")
    outcomes = [own for run in opened for own in contest.judge(run, wanted)]
    data: dict[str, Any] = {
        "text": comparison.to_json(compared) if compared else None,
        "retrieval": {
            label: {name: value.to_json() for name, value in own.items()}
            for label, own in items.items()
        },
        "gates": [vars(outcome) for outcome in outcomes],
    }
    if output is not None:
        details = "\n".join(f"{run.path}: run key {run.manifest['run_key']}" for run in opened)
        spectra = {
            label: inv_freq
            for run in opened
            for label, own in run.results["variants"].items()
            if (inv_freq := own.get("inv_freq"))
        }
        evaluated.write_comparison(output, compared, tables, contenders, spectra, details)
        out.say(f"report: {output / 'report.html'}")
    out.result(measured.as_text(tables), data)
    contest.raise_if_failed(outcomes)
