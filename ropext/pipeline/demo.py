"""Run the demo: the recipe `demo`, methods in memory for comparison, and sentences about the
results.

`ropext://` names the folders `checkpoint` and `data`. `keys@C` is the share of correct answers
among all questions of length C, over both tasks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ropext.base.narration import (
    Call,
    Say,
    Show,
    join_for_shells,
    kept_after_interrupt,
    no_messages,
    no_progress,
)
from ropext.base.narration import Hooks as Hooks
from ropext.base.table import Table, verdict_first, with_rows
from ropext.base.workdir import Workdir
from ropext.options.evaluate import Measuring
from ropext.options.fields import EVALUATE, flag
from ropext.results import BASE, CONTROL, UNTOUCHED, rundir
from ropext.results.gates import Outcome, parse_gate
from ropext.results.measurement import MeasuredModel, Measurement
from ropext.results.report import evaluation, html, plots
from ropext.results.report.cells import (
    Column,
    nats_cell,
    share_cell,
    table_of_values,
    two_digit_point_cell,
    value_cell,
)
from ropext.results.report.gates import failed_gate_lines, gate_table, percent_text
from ropext.results.report.html import Page
from ropext.results.report.plots import Curve, LinePlot
from ropext.results.retrieval import group_answers, share_of_answers
from ropext.results.values import Value

RECIPE = "demo"
REPORT = "report.html"
MODEL = "ropext://demo"
EVALUATION = "out.run/evaluation"
CONTEXT = 256
TARGET = 1024
FACTOR = 4.0
# Methods that are evaluated in memory: by the demo, and by `--full`.
METHODS: tuple[str, ...] = ("self-extend",)
MORE_METHODS = ("pi", "ntk", "self-extend")
# The overrides of the recipe with `--full`.
MORE_WORDS = (
    "fit.data=ropext://tuning",
    "fit.steps=40",
    "finetune.steps=60",
    "finetune.warmup=12",
    "finetune.control=true",
)
EXTENDED = "yarn-4x"
FOLDED = "self-extend-4x"
FITTED = "fitted-4x"
TUNED = "tuned-4x"
# label in the recipe's evaluation -> label here
LABELS = {"extended": EXTENDED, "fitted": FITTED, "tuned": TUNED}
# The row of each model, in this order; `{steps}` is the number of LoRA steps.
ROWS = {
    BASE: f"base, text truncated to its {CONTEXT} tokens",
    UNTOUCHED: "untouched (no scaling): the base beyond its context",
    "pi-4x": "PI, untrained",
    "ntk-4x": "NTK-aware scaling, untrained",
    EXTENDED: "YaRN, untrained",
    FOLDED: "Self-Extend, in memory, untrained",
    FITTED: "fitted RoPE frequencies, weights unchanged",
    TUNED: "{start} and {steps} steps of LoRA",
    CONTROL: f"control: the same steps without extension, text truncated to {CONTEXT} tokens",
}
COLUMNS = (
    Column(f"perplexity at {TARGET}", f"tail@{TARGET}", value_cell),
    Column("gain over truncation, nats", f"gain@{TARGET}", nats_cell),
    Column("short tax, nats", "short_tax", nats_cell),
    Column(f"needles at {CONTEXT}", f"keys@{CONTEXT}", share_cell),
    Column(f"needles at {TARGET}", f"keys@{TARGET}", share_cell),
)
SHORT_COLUMNS = (
    Column(f"perplexity at {TARGET:,} tokens", f"tail@{TARGET}", two_digit_point_cell),
    Column("needles found", f"keys@{TARGET}", two_digit_point_cell),
)
TITLE = "The bundled model at 4× its context"
NOTE = (
    "perplexity: of the last 64 tokens before 1024, the same tokens in every row; base: the model "
    "before extension, on its last 256 tokens (texts and questions); control: the base trained on "
    "the same tokens; gain: how much better than the base, in nats per token (0.03 nats: about 3 % "
    "of perplexity); short tax: loss increase on the first 256 tokens; needles: share of questions "
    "answered exactly (of the tuned model's training rows a fifth asked others)"
)
NEAR = 0.02  # nats per token: the goal for a fitted spectrum alone, never reached

Numbers = Mapping[str, Mapping[str, Value]]  # label -> the model's numbers by name

# Every recorded run passes these gates on the recipe's evaluation.
GATES = (
    "tuned:gain@1024.value < 0",
    "tuned:tail@1024.value > 0 vs control",
    "tuned:passkey@1024.value < 0.9",
    "tuned:mkey@1024.value < 0.9",
)
UNLIKE = (
    "Every recorded run passes these gates, so this machine computes something else: compare "
    "`ropext --version --verbose` with constraints.txt, and please report it with report.html."
)


@dataclass(frozen=True)
class Demo:
    """The complete result of a demo."""

    output: Path
    models: Numbers
    gates: Sequence[Outcome]
    commands: tuple[str, ...]
    report: Path
    sentences: Sequence[str]
    measured: Measurement = field(metadata={"json": None})
    table: Table = field(metadata={"json": None})  # a short one, for the terminal

    def to_text(self) -> str:
        """Return the text for the terminal."""
        tables = with_rows([self.table, gate_table(self.gates)])
        lines = ["The commands behind it; with a model and texts of your own they are the same:"]
        for command in self.commands:
            lines.append(f"  {command}")
        lines += ["", f"report: {self.report}"]
        return "\n\n".join([verdict_first(self.sentences, tables), "\n".join(lines)])


def run(folder: Path, full: bool = False, say: Say = no_messages, show: Show = no_progress) -> Demo:
    """Do the unfinished steps of `ropext demo`, judge its gates, and write its report."""
    from ropext.pipeline import running
    from ropext.pipeline.checked_recipe import open_recipe
    from ropext.pipeline.public import evaluate

    words: tuple[str, ...] = ()
    methods = METHODS
    if full:
        words = MORE_WORDS
        methods = MORE_METHODS
    recipe = open_recipe(RECIPE, words)
    reading = {"method": methods, "factor": (FACTOR,)} | recipe.options(EVALUATE, Measuring)
    calls = (
        _words("run", RECIPE, folder / "out", {}, words),
        _words("eval", MODEL, folder / "methods", reading),
    )
    commands = tuple(join_for_shells(*call) for call in calls)
    after = f"finished work is kept in {folder}; run the same command to resume"
    place = Workdir(folder, "demo", {})
    with place.claimed(None):
        with kept_after_interrupt(after):
            say("[1/2] Extend with YaRN and verify it, fine-tune it, evaluate it next to the base.")
            running.run(recipe, folder / "out", Call(Hooks(say, show), tuple(calls[0])))
            say(f"[2/2] Evaluate {', '.join(methods)} in memory, on the same tokens.")
            evaluate(MODEL, folder / "methods", say=say, show=show, **reading)
        measured, numbers = read_models(folder)
        gates = judge(folder)
        steps = recipe.finetune_options().steps
        assert steps is not None  # the recipe says how many
        rows = rows_of(numbers, steps)
        demo = Demo(
            output=folder,
            models=numbers,
            gates=gates,
            commands=commands,
            report=folder / REPORT,
            sentences=sentences(numbers, rows, gates),
            measured=measured,
            table=short_table(numbers, rows),
        )
        place.write_results()
        _write(demo)
    return demo


def _words(
    command: str, subject: str, output: Path, options: Mapping[str, Any], words: Sequence[str] = ()
) -> list[str]:
    """Return the command line of a call as a list of words."""
    line = ["ropext", command, subject]
    for name, value in options.items():
        items = value if isinstance(value, tuple) else (value,)
        line += [flag(name), ",".join(map(_word, items))]
    line += words
    line += ["-o", str(output)]
    return line


def _word(item: object) -> str:
    """Return the value of an option as a word of a command that `ropext demo` shows."""
    return f"{item:g}" if isinstance(item, float) else str(item)


def judge(folder: Path) -> Sequence[Outcome]:
    """Judge the demo's gates on its recipe's evaluation. Leave out a gate that compares with a
    model not in it."""
    done = rundir.read_run(folder / EVALUATION)
    gates = [parse_gate(text) for text in GATES]
    there = [gate for gate in gates if gate.run is None or gate.run in done.models]
    return rundir.judge_gates(done, there)


def read_models(folder: Path) -> tuple[Measurement, Numbers]:
    """Read both evaluations of the demo. Return the whole measurement, and the numbers of each
    model by label."""
    of_recipe = rundir.read_run(folder / EVALUATION)
    in_memory = rundir.read_run(folder / "methods")
    everything = dict(in_memory.models)
    for name, model in of_recipe.models.items():
        everything[LABELS.get(name, name)] = model
    models = dict[str, MeasuredModel]()
    numbers = dict[str, Mapping[str, Value]]()
    for label in ROWS:
        if label in everything:
            models[label] = everything[label]
            numbers[label] = _values(everything[label])
    return replace(of_recipe, models=models), numbers


def _values(model: MeasuredModel) -> dict[str, Value]:
    """Return the numbers of a model that the demo evaluated, and `keys@C`."""
    assert model.numbers is not None  # it was read back
    values = dict(model.numbers.metrics)
    for length, answers in group_answers(model.items, "length").items():
        values[f"keys@{length}"] = share_of_answers(answers)
    return values


Rows = Mapping[str, str]  # label -> description of the model


def rows_of(models: Numbers, steps: int) -> Rows:
    """Return the name of each model's row in the table of `ropext demo`."""
    start = "fitted RoPE frequencies" if FITTED in models else "YaRN"
    return {label: ROWS[label].format(start=start, steps=steps) for label in models}


def sentences(models: Numbers, rows: Rows, gates: Sequence[Outcome] = ()) -> list[str]:
    """Return the sentences that `ropext demo` prints about its numbers: the verdict first, then the
    meaning of a failed gate."""
    truncated = models[BASE]
    perplexity = truncated[f"tail@{TARGET}"].value
    found = percent_text(truncated[f"keys@{TARGET}"].value)
    tuned = rows[TUNED]
    if FITTED in models:
        tuned = f"the {tuned}"  # "after the fitted RoPE frequencies and ..."
    lines = [_verdict(models[TUNED], truncated, tuned)]
    if failed := failed_gate_lines(gates):
        lines += failed
        lines.append(UNLIKE)
    lines.append(
        f"truncated text, the base on its last {CONTEXT} tokens: perplexity {perplexity:.2f}, and "
        f"it finds {found} of the needles, which are in these tokens."
    )
    for label, name in rows.items():
        if label not in (BASE, TUNED, CONTROL):
            lines.append(f"{name}: {_reading(models[label])}.")
    if FITTED in models:
        lines.append(_goal(models[FITTED]))
    return [line[0].upper() + line[1:] for line in lines]


SIDES = {1: "better than", 0: "not clearly different from", -1: "worse than"}  # by a gain's sign


def _verdict(tuned: Mapping[str, Value], truncated: Mapping[str, Value], name: str) -> str:
    """Return the demo's sentence that compares the tuned model with truncated text."""
    side = SIDES[tuned[f"gain@{TARGET}"].sign]
    perplexities = [f"{each[f'tail@{TARGET}'].value:.2f}" for each in (tuned, truncated)]
    shares = [percent_text(each[f"keys@{TARGET}"].value) for each in (tuned, truncated)]
    return (
        f"after {name} the model reads {TARGET:,} tokens {side} truncated text: perplexity "
        f"{' against '.join(perplexities)}; it finds {' against '.join(shares)} of the needles."
    )


def _reading(values: Mapping[str, Value]) -> str:
    """Return the demo's words about a model: its perplexity, and its share of needles found."""
    sign = values[f"gain@{TARGET}"].sign
    keys = values[f"keys@{TARGET}"].value
    turn = "but" if (sign < 0) is (keys > 0.5) else "and"
    return (
        f"perplexity {values[f'tail@{TARGET}'].value:.2f}, {SIDES[sign]} truncated text for the "
        f"next word, {turn} it finds {percent_text(keys)} of the needles"
    )


def _goal(fitted: Mapping[str, Value]) -> str:
    """State the demo's goal that no recorded run has reached; it is no gate."""
    behind = -fitted[f"gain@{TARGET}"].value
    reached = "and miss it, as in every recorded run" if behind > NEAR else "and do"
    return (
        f"a goal, not a gate: the fitted RoPE frequencies alone should come within {NEAR} nats per "
        f"token of truncated text, {reached} ({behind:+.3f})."
    )


def short_table(models: Numbers, rows: Rows) -> Table:
    """Return the table that `ropext demo` prints. It has two numbers of each model, as the README
    shows them."""
    note = "needles found: the share of planted facts that the model repeats when asked"
    named = [(rows[label], values) for label, values in models.items()]
    return table_of_values(TITLE, note, named, SHORT_COLUMNS)


def table(models: Numbers) -> Table:
    """Return the table of all models in the report of `ropext demo`, with error bars."""
    return table_of_values(TITLE, NOTE, models.items(), COLUMNS)


def _write(demo: Demo) -> None:
    """Write the report.html, report.md and pictures of `ropext demo`, an overview first."""
    details = evaluation.draw_evaluation(demo.measured)
    del details["nll-by-position"]  # the overview has it
    losses = LinePlot("Loss by position (nats per token)", "", CONTEXT, TARGET)
    answered = LinePlot("Share of questions answered", "", CONTEXT, TARGET)
    picture = plots.line_plots_side_by_side(
        [(losses, evaluation.loss_curves(demo.measured)), (answered, _shares(demo.models))]
    )
    overview = {"overview": ("Loss and retrieval up to 4× the trained context", picture)}
    page = Page(
        title="ropext demo",
        subtitle="A small Llama that comes with ropext, trained on 256 tokens, extended to 1024. "
        "This run measured every number.",
        verdicts=demo.sentences,
        tables=with_rows([table(demo.models), gate_table(demo.gates)]),
        details="\n".join(demo.commands),
    )
    html.write_page(demo.output, page, evaluation.write_pictures(demo.output, overview | details))


def _shares(models: Numbers) -> list[Curve]:
    """Return curves for the demo's overview: the share of questions that each model answered, by
    length."""
    curves = list[Curve]()
    for label, values in models.items():
        lengths = list[float]()
        shares = list[Value]()
        for name, value in values.items():
            metric, _, length = name.partition("@")
            if metric == "keys":
                lengths.append(float(length))
                shares.append(value)
        if shares:
            curves.append(Curve(label, tuple(lengths), tuple(shares)))
    return curves
