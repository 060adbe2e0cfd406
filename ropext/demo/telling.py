"""The end of a demo: its tables, its pictures, one HTML file, and the words for the terminal."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ropext.demo import pictures
from ropext.demo.counting import TRAINED, Spent
from ropext.demo.running import Done
from ropext.demo.steps import (
    CONTEXT,
    FACTOR,
    FAR_LENGTHS,
    LENGTHS,
    MODEL,
    TASKS,
    TRAIN,
    WIDER,
)
from ropext.demo.targets import (
    BASE,
    CONTROL,
    EXTENDED,
    TARGET,
    TUNED,
    TUNED_WIDER,
    UNTOUCHED,
    WIDER_TARGET,
    Model,
    Target,
    models,
    targets,
)
from ropext.files import write_bytes, write_text
from ropext.report import html
from ropext.report.tables import NOTHING
from ropext.report.tables import shown as shown_value
from ropext.results import rundir
from ropext.results.overlap import marked
from ropext.results.values import Value
from ropext.table import Table, as_text

REPORT = "report.html"


@dataclass(frozen=True)
class Shown:
    """Everything that a demo gives."""

    folder: Path
    done: Mapping[str, Done]
    read: Mapping[str, Model]
    targets: tuple[Target, ...]
    tables: tuple[Table, ...]
    spent: Spent

    @property
    def commands(self) -> tuple[str, ...]:
        return tuple(shlex.join(own.words) for own in self.done.values())

    def to_json(self) -> dict[str, Any]:
        return {
            "output": str(self.folder),
            "models": {
                label: {name: value.to_json() for name, value in own.metrics.items()}
                for label, own in self.read.items()
            },
            "targets": [target.to_json() for target in self.targets],
            "tokens": self.spent.to_json(),
            "steps": [
                {
                    "name": name,
                    "command": command,
                    "tokens": own.spent.to_json(),
                    "result": dict(own.result),
                }
                for (name, own), command in zip(self.done.items(), self.commands, strict=True)
            ],
            "report": str(self.folder / REPORT),
        }

    def to_text(self) -> str:
        """For the terminal."""
        lines = [
            *(target.sentence for target in self.targets),
            "",
            *_told(self),
            "",
            "Each step by itself; with a model, texts and directories of yours it is the same:",
            *(f"  {command}" for command in self.commands),
            "",
            f"report: {self.folder / REPORT}",
        ]
        return as_text(self.tables, lines)


def show(done: Mapping[str, Done], folder: Path) -> Shown:
    """Judge, draw and write what was found."""
    read = models(done, folder)
    spent = sum((own.spent for own in done.values() if not own.step.beyond), Spent())
    far = _far_models(done, folder)
    tables = [*_side_by_side(read), _methods(read), *_wider(read), *_far(far)]
    shown = Shown(folder, done, read, tuple(targets(read, spent.equivalents)), tuple(tables), spent)
    drawn = pictures.draw(read) | pictures.draw_far(far)
    for name, (_, data) in drawn.items():
        write_bytes(folder / "plots" / f"{name}.png", data)
    write_text(folder / REPORT, _html(shown, dict(drawn.values())))
    return shown


def _cell(value: Value | None, digits: int = 3, sign: bool = False) -> str:
    return NOTHING if value is None else shown_value(value, digits, sign)


def _share(value: Value | None) -> str:
    if value is None or value.ci95 is None:
        return NOTHING
    return f"{value.value:.2f} [{value.ci95[0]:.2f}, {value.ci95[1]:.2f}]"


def _far_models(done: Mapping[str, Done], folder: Path) -> dict[str, Model]:
    """What `--far` asked for keys, by label; the base is asked nothing beyond its window."""
    found = {}
    for own in done.values():
        if own.step.beyond and own.step.command == "eval":
            run = rundir.read_run(folder / str(own.step.output))
            tuned = own.step.subject if own.step.subject != MODEL else None
            for label, contender in run.contenders.items():
                if run.results["variants"][label]["kind"] != "base":
                    found[tuned or label] = Model({}, contender)
    return found


def _side_by_side(read: Mapping[str, Model]) -> list[Table]:
    """Base, control, extended, extended and tuned."""
    if TUNED not in read:
        return []
    columns = [read[label] for label in (BASE, CONTROL, EXTENDED, TUNED)]

    def row(title: str, name: str, digits: int, sign: bool = False) -> tuple[str, ...]:
        return (title, *(_cell(own.metrics.get(name), digits, sign) for own in columns))

    asked = [read[UNTOUCHED], None, read[EXTENDED], read[TUNED]]
    rows = [
        row(f"perplexity at {TARGET}", f"tail@{TARGET}", 3),
        row(f"loss at {TARGET}, nats", f"tail_nll@{TARGET}", 4),
        row("gain over the base, nats", f"gain@{TARGET}", 4, sign=True),
        row("short tax, nats", "short_tax", 4, sign=True),
        *(
            (
                f"keys found at {length}",
                *(
                    _share(own.retrieval(length))
                    if own is not None and (at > 0 or length <= CONTEXT)
                    else NOTHING
                    for at, own in enumerate(asked)
                ),
            )
            for length in LENGTHS
        ),
    ]
    note = (
        f"the last {CONTEXT // 4} tokens before {TARGET}, the same tokens in every column; base "
        f"and control (trained on the same tokens without extension) read them through windows of "
        f"{CONTEXT}; gains are paired over documents; keys: {' and '.join(TASKS)} together (of the "
        f"rows that it was tuned on, {TRAIN['retrieval_share']:.0%} asked for others)"
    )
    header = ("", "base", "control", f"extended (YaRN {FACTOR}x)", "extended + tuned")
    return [Table("Side by side", note, header, tuple(rows))]


def _methods(read: Mapping[str, Model]) -> Table:
    """Everything at the first factor, by length."""
    rows = []
    for label, own in read.items():
        if label in (CONTROL, TUNED_WIDER):
            continue
        tails = [_cell(own.metrics.get(f"tail@{length}")) for length in LENGTHS]
        keys = [_share(own.retrieval(length)) for length in LENGTHS]
        mark = own.contender.mark if own.contender else ""
        rows.append((marked(label, mark), *tails, *keys))
    header = (
        "",
        *(f"perplexity at {length}" for length in LENGTHS),
        *(f"keys at {length}" for length in LENGTHS),
    )
    note = (
        "perplexity over the last tokens before each length; base = through its short window; keys "
        "= share of questions answered exactly, with its 95 % Wilson interval"
    )
    return Table(f"Methods at {FACTOR} times the context", note, header, tuple(rows))


def _wider(read: Mapping[str, Model]) -> list[Table]:
    if TUNED_WIDER not in read:
        return []
    own = read[TUNED_WIDER]
    row = (
        TUNED_WIDER,
        _cell(own.metrics[f"tail@{WIDER_TARGET}"]),
        _cell(own.metrics[f"in_window@{WIDER_TARGET}"]),
        _cell(own.metrics["short_tax"], 4, sign=True),
        _share(own.retrieval(WIDER_TARGET)),
    )
    header = ("", f"perplexity at {WIDER_TARGET}", "base, in its window", "short tax", "keys found")
    note = "a checkpoint of its own, extended and tuned for this length"
    return [Table(f"At {WIDER} times the context", note, header, (row,))]


def _far(far: Mapping[str, Model]) -> list[Table]:
    if not far:
        return []
    rows = [
        (label, *(_share(own.retrieval(length)) for length in FAR_LENGTHS))
        for label, own in far.items()
    ]
    header = ("", *(f"keys at {length}" for length in FAR_LENGTHS))
    note = "share of passkeys found; no bundled document is long enough for a loss out there"
    return [Table("Far beyond", note, header, tuple(rows))]


def _html(shown: Shown, drawn: Mapping[str, bytes]) -> str:
    verdicts = [*(target.sentence for target in shown.targets), *_told(shown)]
    return html.page(
        "ropext demo",
        f"A small Llama that comes with ropext, trained on {CONTEXT} tokens, extended to "
        f"{TARGET}: every number was measured in this run.",
        verdicts,
        [],
        shown.tables,
        drawn,
        "\n".join(shown.commands),
    )


def _told(shown: Shown) -> list[str]:
    """What the demo cost, and what a step had to say of itself."""
    spent = shown.spent
    lines = [
        f"Cost: {spent.equivalents:,} forward-token equivalents ({spent.forward:,} tokens read, "
        f"{spent.trained:,} trained on, which count {TRAINED} each)."
    ]
    fit = shown.done.get("fit")
    if fit is not None and fit.result["kept"] == "start":
        lines.append(
            f"The fit kept its start ({fit.result['start']}): no step beat it by more than its "
            "interval."
        )
    return lines
