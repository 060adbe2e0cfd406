"""Write a plan on one screen: the answers to a user's first questions. `--details` shows the
rest."""

import math
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ropext.base.table import WIDTH, wrapped_line
from ropext.families.loaders import WRONG, loader_of, newest
from ropext.planning import ExtensionPlan
from ropext.results.report.text import (
    fact_lines,
    kv_cache_text,
    model_placeholder_note,
    plan_headlines,
    served_headline,
    serving_text,
    usual_serving_lines,
)

if TYPE_CHECKING:
    from ropext.families.loaders import LoaderReading, Serving
    from ropext.files.inspecting import Served

LINES = 26  # rows of a small terminal
# Programs that can serve the base's own weights with other keys.
FROM_THE_BASE = ("vllm", "sglang", "transformers", "llama.cpp")
SERVING_ROWS = 13  # rows of commands with their headings, at most; fewer if other parts need room
REMARK_ROWS = 6  # that commands leave to warnings and notes
DETAILS = (
    "--details shows all methods, new keys, verdicts and commands; --memory 12GB shows which "
    "context fits"
)
SERVED_DETAILS = "--details shows the verdict for each engine and version, and why"


def plan_screen(made: ExtensionPlan) -> str:
    """Write the one-screen report of `ropext plan`, at most 26 lines."""
    facts = made.facts(briefly=True)
    if made.kv_cache_bytes is not None:
        facts.append(("KV cache", kv_cache_text(made.kv_cache_bytes, made.target)))
    facts += _engine_facts(made.readings)
    above = plan_headlines(made)
    above.append(fact_lines(facts))
    below = [DETAILS]
    if made.refusal is None:
        below.insert(0, wrapped_line(f"to write it: {made.command}"))
        if made.log:
            below.insert(0, wrapped_line(f"to check it: {made.log}"))
    room = LINES - _row_count(above) - _row_count(below)
    wanted = min(_row_count(map(wrapped_line, made.remarks())), REMARK_ROWS)
    serving = _serving_rows(made, min(SERVING_ROWS, room - wanted))
    room -= _row_count(serving)
    return "\n".join(above + _remark_rows(made, room) + serving + below)


def served_screen(read: "Served", verdict: str = "") -> str:
    """Write the one-screen report of a model that is extended already, in at most 26 lines. `ropext
    plan` shows the verdict of its gate, who reads it, and how to run it."""
    parts = [served_headline(read)]
    if verdict:
        parts.append(wrapped_line(verdict))
    parts.append(fact_lines(_engine_facts(read.readings)))
    room = LINES - _row_count(parts) - 2
    if lines := _fitting_commands(read.serving, room):
        parts += ["to serve it:", lines]
    parts.append(SERVED_DETAILS)
    return "\n".join(parts)


def _engine_facts(readings: Iterable["LoaderReading"]) -> list[tuple[str, str]]:
    """Lay out the engines that compute the plan for a one-screen report. Engines that do not, and
    engines that were not measured, have their own rows."""
    same = list[str]()
    wrong = list[str]()
    unknown = list[str]()
    for reading in newest(readings):
        if reading.verdict == "same":
            same.append(reading.loader)
        elif reading.verdict in WRONG:
            wrong.append(reading.loader)
        else:
            unknown.append(reading.loader)
    facts = list[tuple[str, str]]()
    for what, names in (("exact in", same), ("wrong in", wrong), ("not measured", unknown)):
        if names:
            facts.append((what, ", ".join(names)))
    return facts


def _serving_rows(made: ExtensionPlan, room: int) -> list[str]:
    """Lay out the commands in a plan's one-screen report in at most `room` rows. They serve the
    base itself with other keys if an engine allows that, and the result."""
    parts = list[str]()
    overrides = {line.loader: line for line in made.overrides() if line.command}
    names = [name for name in FROM_THE_BASE if name in overrides and _is_asked_engine(made, name)]
    known = [overrides[name] for name in names]
    if lines := _fitting_commands(known, room - 3):
        heading = "to serve the original weights with these settings, without a copy"
        heading += f"{model_placeholder_note(known)}:"
        parts += [heading, lines]
    words = made.words
    results = made.serving(words.name)
    if not results:
        return parts
    usual = usual_serving_lines(results, words)
    if made.recipe.for_loaders:
        by_loader = {line.loader: line for line in (*results, *usual)}
        usual = [line for name, line in by_loader.items() if _is_asked_engine(made, name)] or usual
    if lines := _fitting_commands(usual, room - _row_count(parts) - 1):
        parts += [f"to serve the result (OUT = the {words.output} you write):", lines]
    return parts


def _is_asked_engine(made: ExtensionPlan, loader: str) -> bool:
    """Return whether a one-screen report may show an engine's command. It may if --for names the
    engine, or names none."""
    names = made.recipe.for_loaders
    return not names or loader in names or loader in map(loader_of, names)


def _fitting_commands(lines: Sequence["Serving"], room: int) -> str:
    """Lay out the commands that fit into `room` rows of a one-screen report. A command with a
    factor for every pair may not fit."""
    shown = list["Serving"]()
    for line in lines:
        if _row_count([serving_text([*shown, line])]) <= room:
            shown.append(line)
    return serving_text(shown)


def _remark_rows(made: ExtensionPlan, room: int) -> list[str]:
    """Lay out a plan's warnings, then its notes, as far as they fit into a one-screen report. Count
    the others in a last row."""
    shown = list[str]()
    remarks = made.remarks(warnings_first=True)
    for number, remark in enumerate(remarks):
        text = wrapped_line(remark)
        is_last = number == len(remarks) - 1
        rest = 0 if is_last else 1  # the row that names those without room
        if _row_count([text]) + rest > room:
            shown.append(_remarks_left_out(remarks[number:]))
            break
        shown.append(text)
        room -= _row_count([text])
    return shown


def _remarks_left_out(remarks: Sequence[str]) -> str:
    """Write how many remarks a one-screen report leaves out, with their names in brackets."""
    names = list[str]()
    for remark in remarks:
        if name := re.search(r"\[[\w-]+\]", remark):
            names.append(name[0])
    more = f"and {len(remarks)} more"
    if names:
        more += f" ({', '.join(names)})"
    return f"{more}: --details"


def _row_count(parts: Iterable[str]) -> int:
    """Return how many rows of a terminal these texts take in a one-screen report, one below the
    other."""
    rows = 0
    for part in parts:
        for line in part.split("\n"):
            rows += max(1, math.ceil(len(line) / WIDTH))
    return rows
