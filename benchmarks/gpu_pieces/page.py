"""The lines of a day as text: on the terminal as they come, and as the page of results."""

from collections.abc import Iterator, Sequence
from datetime import date
from typing import Any

from gpu_pieces import PIECES, Day

Line = dict[str, Any]
NO_GPU = """**No GPU has run this yet.** What stands here is the dry run: every piece on a CPU,
with tiny shapes in the place of the published ones. It shows that the command goes through, and
says nothing about speed, memory or quality. What a CPU cannot execute (CUDA's kernels, flash,
bitsandbytes, FSDP) is left out.

    python benchmarks/gpu_day.py --dry-run -o OUT
"""


def shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return "not known" if value is None else str(value)


def as_text(line: Line) -> str:
    """Return the lines of a case as it comes."""
    if line["case"] is None:
        return "  done"
    rows = [f"  {line['case']}" + (f" ({line['seconds']} s)" if "seconds" in line else "")]
    if "error" in line:
        rows[0] += f": FAILED: {line['error'].strip().splitlines()[-1]}"
    if "left_out" in line:
        rows[0] += f": left out: {line['left_out']}"
    for name, figure in line.get("figures", {}).items():
        goal = f" (goal {figure['goal']}: {_met(line, figure)})" if isinstance(figure, dict) else ""
        rows.append(f"    {name}: {shown(figure['value'] if goal else figure)}{goal}")
    return "\n".join(rows)


def _met(line: Line, figure: dict[str, Any]) -> str:
    if line["dry"]:
        return "not judged"
    return "met" if figure["met"] else "MISSED"


def page(days: Sequence[Day]) -> str:
    """Return one page of the lines of several folders: each of one machine with one set of
    versions."""
    runs = [[line for line in day.read() if line["case"] is not None] for day in days]
    parts = [f"# All that needs a GPU, by one command ({date.today()})\n"]
    parts.append("    python benchmarks/gpu_day.py --minutes 9 -o OUT\n")
    if all(line["dry"] for lines in runs for line in lines):
        parts.append(NO_GPU)
    return "\n".join([*parts, *(row for lines in runs for row in _run(lines))]).rstrip() + "\n"


def _run(lines: Sequence[Line]) -> Iterator[str]:
    """Yield the machine, a table for each piece, and the failures."""
    here: Line = next((line for line in reversed(lines) if "versions" in line), {})
    if not here:
        yield "Nothing was run.\n"
        return
    versions = ", ".join(f"{name} {version}" for name, version in here["versions"].items())
    driver = f", driver {here['driver']}" if here["driver"] else ""
    seconds = sum(line.get("seconds", 0) for line in lines)
    yield f"## {here['device']}{driver}, {here['date']}\n"
    yield f"{versions}. {len(lines)} cases in {seconds / 60:.0f} minutes.\n"
    for piece in PIECES:
        if cases := [line for line in lines if line["piece"] == piece.name]:
            head = "| case | on a CPU |\n|---|---|"
            if not here["dry"]:
                head = "| case | figure | | goal | |\n|---|---|---|---|---|"
            yield f"### {piece.title}\n\n{head}"
            for line in cases:
                yield from _rows(line)
            yield ""
    for line in lines:
        if "error" in line:
            yield f"Failed: {line['piece']}, {line['case']}\n\n```\n{line['error'].strip()}\n```\n"


def _rows(line: Line) -> Iterator[str]:
    case, figures = line["case"], line.get("figures", {})
    if not figures or line["dry"]:
        outcome = "goes through" if figures else f"left out: {line.get('left_out')}"
        outcome = "**failed** (below)" if "error" in line else outcome
        yield f"| {case} | {outcome} |{'' if line['dry'] else ' | | |'}"
        return
    for name, figure in figures.items():
        cells = (figure, "", "")
        if isinstance(figure, dict):
            cells = figure["value"], figure["goal"], _met(line, figure)
        shown_cells = (shown(cell).replace("\n", "<br>").replace("|", "\\|") for cell in cells)
        yield f"| {case} | {name} | {' | '.join(shown_cells)} |"
