"""The demo: the recipe `demo`, three methods beside it, and the words around what they measure.

`checkpoint` and `data` are what `ropext://` names. `keys@C` is the share of all questions of length
C that were answered, those of both tasks together.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ropext.narration import Hooks, Say, Show, kept_after_interrupt, pasted, silent, unseen
from ropext.options.fields import flag
from ropext.report import evaluation, html, plots, tables
from ropext.report.plots import Curve
from ropext.results import BASE, CONTROL, UNTOUCHED, rundir
from ropext.results.gates import Outcome, parse_gate
from ropext.results.measurement import MeasuredModel, Measurement
from ropext.results.retrieval import grouped, share_of
from ropext.results.values import Value, values_of
from ropext.table import Table, as_text
from ropext.workdir import Workdir

RECIPE, REPORT, MODEL = "demo", "report.html", "ropext://demo"
EVALUATION = "out.run/evaluation"
CONTEXT, TARGET = 256, 1024
METHODS = {"method": ("pi", "ntk", "self-extend"), "factor": (4.0,)}
EXTENDED, FITTED, TUNED = "yarn-4x", "fitted-4x", "tuned-4x"
LABELS = {"extended": EXTENDED, "fitted": FITTED, "tuned": TUNED}  # of the recipe's evaluation
ORDER = (
    *(BASE, CONTROL, UNTOUCHED, "pi-4x", "ntk-4x", EXTENDED, "self-extend-4x"),
    *(FITTED, TUNED),
)
COLUMNS: tuple[tables.Column, ...] = (
    (f"perplexity at {TARGET}", f"tail@{TARGET}", tables.shown),
    ("gain over the base, nats", f"gain@{TARGET}", tables.nats),
    ("short tax, nats", "short_tax", tables.nats),
    (f"keys at {CONTEXT}", f"keys@{CONTEXT}", tables.share),
    (f"keys at {TARGET}", f"keys@{TARGET}", tables.share),
)
NOTE = (
    "perplexity: of the last 64 tokens before 1024, the same tokens in every row; base: the model "
    "before extension, which reads its last 256 tokens; control: the base trained on the same "
    "tokens; gain: nats a token over the base; short tax: how much worse the first 256 tokens are "
    "predicted; keys: share of questions answered exactly (of the tuned model's training rows a "
    "fifth asked others)"
)


Numbers = Mapping[str, Mapping[str, Value]]  # of each model, by its label


# What is to be reached; of the recipe's evaluation. Both tasks together: 76 of 80 keys.
GATES = (
    "fitted:gain@1024.value < -0.02",
    "tuned:gain@1024.value < 0",
    "tuned:tail@1024.value > 0 vs control",
    "tuned:passkey@1024.value < 0.975",
    "tuned:mkey@1024.value < 0.925",
)


@dataclass(frozen=True)
class Demo:
    """Everything that a demo gives."""

    output: Path
    models: Numbers
    gates: Sequence[Outcome]
    commands: tuple[str, ...]
    report: Path
    measured: Measurement = field(metadata={"json": None})
    table: Table = field(metadata={"json": None})

    def to_text(self) -> str:
        """For the terminal."""
        lines = [
            *(gate.sentence for gate in self.gates),
            "",
            "The commands behind it; with a model and texts of your own they are the same:",
            *(f"  {command}" for command in self.commands),
            "",
            f"report: {self.report}",
        ]
        return as_text([self.table], lines)


def run(folder: Path, finetune: bool = True, say: Say = silent, show: Show = unseen) -> Demo:
    """Do what is not done yet, judge, draw and write what was found."""
    import ropext
    from ropext.pipeline import job

    words = [] if finetune else ["finetune=null"]
    recipe = job.read(RECIPE, words)
    reading = METHODS | recipe.evaluation
    calls = (
        _words("eval", MODEL, folder / "methods", reading),
        _words("run", RECIPE, folder / "out", {}, words),
    )
    commands = tuple(pasted(*call) for call in calls)
    after = f"what is finished is kept in {folder}; run the same command to resume"
    place = Workdir(folder, "demo", {})
    with place.claimed(None):
        with kept_after_interrupt(after):
            say("[1/2] Measure PI, NTK-aware scaling and Self-Extend, beside the base.")
            ropext.evaluate(MODEL, folder / "methods", hooks=Hooks(say, show), **reading)
            tune = ", fine-tune" if finetune else ""
            say(f"[2/2] Extend by YaRN, fit a spectrum{tune}; measure all on the same tokens.")
            ropext.run(recipe, folder / "out", command=calls[1], say=say, show=show)
        measured, numbers = read_models(folder)
        done = rundir.read_run(folder / EVALUATION)
        asked = [gate for gate in map(parse_gate, GATES) if gate.variant in done.models]
        gates, report = rundir.judge(done, asked), folder / REPORT
        demo = Demo(folder, numbers, gates, commands, report, measured, table(numbers))
        place.write_results()
        _write(demo)
    return demo


def _words(
    command: str, subject: str, output: Path, options: Mapping[str, Any], words: Sequence[str] = ()
) -> list[str]:
    """The command line of a call, word by word."""
    line = ["ropext", command, subject]
    for name, value in options.items():
        items = value if isinstance(value, tuple) else (value,)
        shown = (f"{item:g}" if isinstance(item, float) else str(item) for item in items)
        line += [flag(name), ",".join(shown)]
    return [*line, *words, "-o", str(output)]


def read_models(folder: Path) -> tuple[Measurement, Numbers]:
    """Read back every model that was measured, and its numbers, by label."""
    runs = [rundir.read_run(folder / place) for place in (EVALUATION, "methods")]
    numbers, models = dict[str, Mapping[str, Value]](), dict[str, MeasuredModel]()
    for run_ in runs:
        for name, model in run_.models.items():
            by_length = grouped(model.items, "length").items()
            keys = {f"keys@{at}": share_of(answers) for at, answers in by_length}
            label = LABELS.get(name, name)
            models.setdefault(label, model)
            numbers.setdefault(label, values_of(run_.results["variants"][name]["metrics"]) | keys)
    labels = [label for label in ORDER if label in models]
    measured = replace(runs[0], models={label: models[label] for label in labels})
    return measured, {label: numbers[label] for label in labels}


def table(models: Numbers) -> Table:
    """Lay the models side by side."""
    title = "The bundled model, at four times its context"
    return tables.table_of(title, NOTE, models.items(), COLUMNS)


def _write(demo: Demo) -> None:
    """Write report.html, report.md and the pictures, an overview first."""
    details = evaluation.draw(demo.measured)
    del details["nll-by-position"]  # the overview has it
    curves = list[Curve]()
    for label, values in demo.models.items():
        shares = {name: value for name, value in values.items() if name.startswith("keys@")}
        if shares:
            lengths = tuple(float(name.removeprefix("keys@")) for name in shares)
            curves.append(Curve(label, lengths, tuple(shares.values())))
    panels = {
        "Loss by position (nats per token)": evaluation.losses(demo.measured),
        "Share of questions answered": curves,
    }
    picture = plots.side_by_side(panels, CONTEXT, TARGET, plots.styles(demo.models))
    overview = {"overview": ("Loss and retrieval up to 4 times the trained context", picture)}
    drawn = evaluation.write_pictures(demo.output, overview | details)
    subtitle = (
        "A small Llama that comes with ropext, trained on 256 tokens, extended to 1024: every "
        "number was measured in this run."
    )
    verdicts = [gate.sentence for gate in demo.gates]
    html.write(
        demo.output,
        "ropext demo",
        subtitle,
        verdicts,
        [],
        [demo.table],
        drawn,
        "\n".join(demo.commands),
    )
