"""The demo: a recipe with gates, and the words around it.

recipe.yaml says what is done, judged and shown; the pipeline does its steps. The numbers have the
names of the evaluation, and `keys@C` is the share of all questions of length C that were answered.
`checkpoint` and `data` are what `ropext://` names.
"""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ropext.pipeline.series import TRAINED, Done, Spent, Step
from ropext.report import evaluation, html, plots, tables
from ropext.report.plots import Curve
from ropext.results import rundir
from ropext.results.comparison import Contender, pair
from ropext.results.gates import check_gate, parse_gate
from ropext.results.overlap import marked
from ropext.results.retrieval import share_of
from ropext.results.values import Value, values_json
from ropext.table import Table, as_text

RECIPE, REPORT = "recipe.yaml", "report.html"
FAR = "far"  # what needs it is no part of the budget
FOUR_DIGITS, SIGNED = ("tail_nll", "gain", "short_tax"), ("gain", "short_tax")

Spec = Mapping[str, Any]


@dataclass(frozen=True)
class DemoRecipe:
    """The part of the recipe that was asked for."""

    steps: tuple[Step, ...]
    gates: tuple[Spec, ...]
    tables: tuple[Spec, ...]
    drawn: tuple[str, ...]  # labels of the models in the pictures


def read_recipe(finetune: bool, far: bool) -> DemoRecipe:
    """Read the recipe; leave out what is not asked for."""
    import yaml

    asked = {"finetune" if finetune else "no-finetune"} | ({FAR} if far else set())
    data = yaml.safe_load((Path(__file__).parent / RECIPE).read_text("utf-8"))
    steps, gates, tables = (
        [own for own in data[part] if asked.issuperset(own.get("needs", ()))]
        for part in ("steps", "gates", "tables")
    )
    for own in steps:
        own["needs"] = tuple(own.get("needs", ()))
        options = own.get("options", {}).items()
        own["options"] = {k: tuple(v) if isinstance(v, list) else v for k, v in options}
    steps = [Step(**own) for own in steps]
    return DemoRecipe(tuple(steps), tuple(gates), tuple(tables), tuple(data["drawn"]))


@dataclass(frozen=True)
class DemoModel:
    """One model that was read: its numbers by name, and where they came from."""

    metrics: Mapping[str, Value]
    contender: Contender | None = None  # the control was read inside its fine-tuning
    inv_freq: Sequence[float] | None = None

    @cached_property
    def values(self) -> Mapping[str, Value]:
        """Its numbers, and what it answered at each length, the questions of all tasks together."""
        items = self.contender.items if self.contender else ()
        lengths = dict.fromkeys(item.length for item in items)
        asked = {at: [item for item in items if item.length == at] for at in lengths}
        return {**self.metrics, **{f"keys@{at}": share_of(own) for at, own in asked.items()}}


@dataclass(frozen=True)
class Target:
    """Something that was to be reached, with what was found."""

    what: str
    found: float
    bound: float
    reached: bool
    sentence: str


@dataclass(frozen=True)
class Shown:
    """Everything that a demo gives."""

    folder: Path
    done: Mapping[str, Done]
    read: Mapping[str, DemoModel]
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
                label: values_json(own.metrics)
                for label, own in self.read.items()
                if not label.startswith(f"{FAR}/")
            },
            "targets": [vars(target) for target in self.targets],
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
            *self.about,
            "",
            "Each step by itself; with a model, texts and directories of yours it is the same:",
            *(f"  {command}" for command in self.commands),
            "",
            f"report: {self.folder / REPORT}",
        ]
        return as_text(self.tables, lines)

    @property
    def about(self) -> list[str]:
        """What the demo cost, and what a step had to say of itself."""
        spent = self.spent
        lines = [
            f"Cost: {spent.equivalents:,} forward-token equivalents ({spent.forward:,} tokens "
            f"read, {spent.trained:,} trained on, which count {TRAINED} each)."
        ]
        fit = self.done.get("fit")
        if fit is not None and fit.result["kept"] == "start":
            lines.append(
                f"The fit kept its start ({fit.result['start']}): no step beat it by more than its "
                "interval."
            )
        return lines


def show(recipe: DemoRecipe, done: Mapping[str, Done], folder: Path) -> Shown:
    """Judge, draw and write what was found."""
    read = read_models(done, folder)
    spent = sum((own.spent for own in done.values() if FAR not in own.step.needs), Spent())
    laid_out = tuple(table(spec, read) for spec in recipe.tables)
    targets = judge(recipe.gates, read, spent.equivalents)
    shown = Shown(folder, done, read, tuple(targets), laid_out, spent)
    drawn = draw({label: read[label] for label in recipe.drawn if label in read})
    far = {label.partition("/")[2]: m.contender for label, m in read.items() if "/" in label}
    asked = {label: own for label, own in far.items() if own}
    for name, (caption, data) in evaluation.heat_pictures(asked).items():
        drawn[f"far-{name}"] = f"Far beyond: {caption}", data
    subtitle = (
        "A small Llama that comes with ropext, trained on 256 tokens, extended to 1024: every "
        "number was measured in this run."
    )
    verdicts = [*(target.sentence for target in targets), *shown.about]
    pictures, details = evaluation.write_pictures(folder, drawn), "\n".join(shown.commands)
    html.write(folder, "ropext demo", subtitle, verdicts, [], laid_out, pictures, details)
    return shown


def read_models(done: Mapping[str, Done], folder: Path) -> dict[str, DemoModel]:
    """Read back every model that the finished steps have measured, by label."""
    read = dict[str, DemoModel]()
    for step, result in ((own.step, own.result) for own in done.values()):
        if step.command == "finetune" and step.label:
            numbers = result["numbers"][step.label].items()
            read[step.label] = DemoModel({name: Value.from_json(v) for name, v in numbers})
        if step.command != "eval":
            continue
        run = rundir.read_run(folder / str(step.output))
        for name, own in run.results["variants"].items():
            if (own["kind"] == "base" and step.prefix) or (
                own["kind"] != "extended" and step.label
            ):
                continue  # the same everywhere; and it is asked nothing beyond its window
            metrics = {key: Value.from_json(data) for key, data in own["metrics"].items()}
            label = step.label or step.prefix + name
            read[label] = DemoModel(metrics, run.contenders[name], own.get("inv_freq"))
    return read


def judge(gates: Sequence[Spec], read: Mapping[str, DemoModel], spent: int) -> list[Target]:
    """Judge each gate in words; `spent` counts forward-token equivalents."""
    known = {label: own.values for label, own in read.items()}
    known["demo"] = {"cost": Value(spent, None, None, 1)}
    targets = []
    for own in gates:
        gate, of = parse_gate(own["gate"]), 1.0
        if "times" in own:
            label, _, name = own["times"].partition(":")
            of = known[label][name].value
        bound, variant = gate.limit * of, str(gate.variant)
        reached = check_gate(replace(gate, limit=bound), variant, known[variant]).passed
        found, at = known[variant][gate.metric].value, "most" if gate.op == ">" else "least"
        sentence = (
            f"{'Reached' if reached else 'MISSED'}: {own['about']}: {found:,.{own['digits']}f} "
            f"against at {at} {bound:,.{own['digits']}f} ({own['bound'].format(of)})."
        )
        targets.append(Target(own["about"], found, bound, reached, sentence))
    return targets


def table(spec: Spec, read: Mapping[str, DemoModel]) -> Table:
    """Lay out one table: a row for each number, or for each model."""

    def cell(label: str, name: str) -> str:
        address = spec.get("instead", {}).get(f"{label}:{name}", f"{label}:{name}")
        label, _, name = address.partition(":")
        value, kind = read[label].values.get(name), name.partition("@")[0]
        if kind == "keys":
            return tables.share(value)
        return tables.shown(value, 4 if kind in FOUR_DIGITS else 3, kind in SIGNED)

    numbers, columns = spec["numbers"], spec.get("columns")
    if columns is not None:
        rows = [(t, *(cell(own, name) for own in columns.values())) for t, name in numbers.items()]
        return Table(spec["title"], spec["note"], ("", *columns), tuple(rows))
    rows = []
    for label in (own for own in spec["rows"] if own in read):
        contender, short = read[label].contender, label.rpartition("/")[2]
        title = marked(short, contender.mark if contender else "")
        rows.append((title, *(cell(label, name) for name in numbers.values())))
    return Table(spec["title"], spec["note"], ("", *numbers), tuple(rows))


def draw(read: Mapping[str, DemoModel]) -> evaluation.Pictures:
    """Draw the models side by side, an overview first."""
    own = [replace(m.contender, label=label) for label, m in read.items() if m.contender]
    frame, readings, _ = pair(own)
    paired = {o.label: replace(o, frame=frame, reading=readings[o.label]) for o in own}
    spectra = {label: m.inv_freq for label, m in read.items() if m.inv_freq}
    details = evaluation.draw(paired, spectra, frame.context)
    del details["tail"]  # the overview has its numbers

    found = list[Curve]()
    for label, model in read.items():
        asked = {name: v for name, v in model.values.items() if name.startswith("keys@")}
        if asked:
            lengths = tuple(float(name.removeprefix("keys@")) for name in asked)
            found.append(Curve(label, lengths, tuple(asked.values())))
    panels = {
        "Loss by position (nats per token)": evaluation.losses(list(paired.values())),
        "Share of questions answered": found,
    }
    overview = plots.side_by_side(panels, frame.context, frame.longest, plots.styles(read))
    return {
        "overview": ("Loss and retrieval up to 4 times the trained context", overview)
    } | details
