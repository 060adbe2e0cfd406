"""Define `ropext compare RUN…`: it pairs the arrays of finished runs, with no model and no
torch."""

from glob import glob
from pathlib import Path
from typing import Annotated

import typer

from ropext.cli.options import Format, output_option
from ropext.cli.output import Out

Runs = Annotated[
    list[str],
    typer.Argument(metavar="RUN...", help="run directories of ropext eval; RUN:VARIANT names one"),
]
Output = Annotated[
    Path | None,
    output_option("DIR", "write a report there too", panel=None),
]
FailIf = Annotated[
    list[str] | None,
    typer.Option("--fail-if", metavar="GATE", help='e.g. "tail@32k > 0.01 vs OTHER" (exit 3)'),
]


def _runs_of_patterns(runs: list[str]) -> list[str]:
    """Return the runs on the command line of `ropext compare` with each pattern replaced by its
    matches, because Windows shells expand none."""
    paths = list[str]()
    for run in runs:
        matches = sorted(glob(run)) if "*" in run else []
        paths += matches or [run]
    return paths


def command(
    out: Out,
    runs: Runs,
    output: Output = None,
    fail_if: FailIf = None,
    table_format: Format = None,
) -> None:
    """Compare evaluations on the same tokens. Finished runs, with paired intervals."""
    from ropext.base.table import as_text
    from ropext.results import gates, rundir
    from ropext.results.report.compared import compare_runs

    out.check_format(table_format)
    wanted = [gates.parse_gate(text) for text in fail_if or ()]
    opened, compared = compare_runs(_runs_of_patterns(runs), output, gates=wanted)
    places = [run.path for run in opened.runs if run.path is not None]
    places += filter(Path.is_dir, gates.other_runs(wanted, opened.variants))
    for path in dict.fromkeys(places):
        for remark in rundir.no_digest_warnings(path):
            out.say(f"warning: {remark}")
    if compared.text is not None:
        for label, count in compared.text.left_out.items():
            if count:
                out.say(f"{label}: {count} documents are not in all runs and are left out")
    if output is not None:
        out.say(f"report: {output / 'report.html'}")
    if table_format == "csv":
        out.tables(compared.tidy, (), table_format)
    elif table_format is not None:
        out.tables(compared.tables, (), table_format)
    else:
        out.result(as_text(compared.tables), compared.to_json() | {"gates": compared.gates})
    rundir.raise_if_gates_failed(compared.gates)
