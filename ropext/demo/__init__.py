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
from ropext.results import rundir
from ropext.results.measurement import MeasuredModel, Measurement
from ropext.results.retrieval import grouped, share_of
from ropext.results.values import Value, values_of
from ropext.table import Table, as_text
from ropext.workdir import Workdir

RECIPE, REPORT, MODEL = "demo", "report.html", "ropext://demo"
CONTEXT, TARGET = 256, 1024
METHODS = {"method": ("pi", "ntk", "self-extend"), "factor": (4.0,)}
EXTENDED, FITTED, TUNED = "yarn-4x", "fitted-4x", "tuned-4x"
LABELS = {"extended": EXTENDED, "fitted": FITTED, "tuned": TUNED}  # of the recipe's evaluation
ORDER = (
    *("base", "control", "untouched", "pi-4x", "ntk-4x", EXTENDED, "self-extend-4x"),
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


@dataclass(frozen=True)
class Bound:
    """Something that is to be reached: a number of one model, beside a share of another one."""

    what: str
    model: str
    name: str
    share: float
    of: tuple[str, str]
    least: bool = False  # at least so much, in the place of at most
    limit: str = ""  # the bound in words


BOUNDS = (
    Bound(
        "loss at 1024 with the fitted spectrum alone", FITTED, "tail_nll@1024", 1.01,
        ("base", "tail_nll@1024"), limit="1 % above the base's in its window of 256",
    ),
    Bound(
        "loss at 1024 after the fine-tuning", TUNED, "tail_nll@1024", 1,
        ("base", "tail_nll@1024"), limit="the base's in its window of 256",
    ),
    Bound(
        "loss at 1024 after the fine-tuning", TUNED, "tail_nll@1024", 1,
        ("control", "tail_nll@1024"), limit="the control's in its window of 256",
    ),
    Bound(
        "keys found at 1024 after the fine-tuning", TUNED, "keys@1024", 0.95,
        ("untouched", "keys@256"), least=True, limit="95 % of the untouched model's at 256",
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Target:
    """A bound, with what was found."""

    what: str
    found: float
    bound: float
    reached: bool
    sentence: str


@dataclass(frozen=True)
class Demo:
    """Everything that a demo gives."""

    output: Path
    models: Numbers
    targets: tuple[Target, ...]
    commands: tuple[str, ...]
    report: Path
    measured: Measurement = field(metadata={"json": None})
    table: Table = field(metadata={"json": None})

    def to_text(self) -> str:
        """For the terminal."""
        lines = [
            *(target.sentence for target in self.targets),
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
    after = f"what is finished is kept in {folder}, and the same command goes on"
    with Workdir(folder, "demo", {}).claimed(None):
        with kept_after_interrupt(after):
            say("[1/2] Measure PI, NTK-aware scaling and Self-Extend, beside the base.")
            ropext.evaluate(MODEL, folder / "methods", hooks=Hooks(say, show), **reading)
            tune = ", fine-tune" if finetune else ""
            say(f"[2/2] Extend by YaRN, fit a spectrum{tune}; measure all on the same tokens.")
            ropext.run(recipe, folder / "out", command=calls[1], say=say, show=show)
        measured, numbers = read_models(folder)
        targets, report = judge(numbers), folder / REPORT
        demo = Demo(folder, numbers, targets, commands, report, measured, table(numbers))
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
    runs = [rundir.read_run(folder / place) for place in ("out.run/evaluation", "methods")]
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


def judge(models: Numbers) -> tuple[Target, ...]:
    """Judge each bound in words; those of models that were left out are left out too."""
    targets = []
    for wanted in BOUNDS:
        if wanted.model not in models:
            continue
        value = models[wanted.model][wanted.name].value
        bound = wanted.share * models[wanted.of[0]][wanted.of[1]].value
        reached = value >= bound if wanted.least else value <= bound
        sentence = (
            f"{'Reached' if reached else 'MISSED'}: {wanted.what}: {value:.4f} against at "
            f"{'least' if wanted.least else 'most'} {bound:.4f} ({wanted.limit})."
        )
        targets.append(Target(wanted.what, value, bound, reached, sentence))
    return tuple(targets)


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
    verdicts = [target.sentence for target in demo.targets]
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
