"""Gates for pipelines: `tail@32k > 8.5`, `short_tax > 0.02 vs RUN`, `passkey@32k < 0.9`.

    [VARIANT:]METRIC[@LENGTH][.value] OP NUMBER
    [VARIANT:]METRIC[@LENGTH][.value] OP [NUMBER] vs RUN

A gate is a failure condition. It looks at the worse end of the 95 % interval: the upper end for
`>`, the lower end for `<`. So a result that is merely too uncertain fails too; `.value` asks for
the point. `vs RUN` takes the paired difference to another run, or to another variant of this one.
It is in nats for a perplexity and in points for a share; without a number the limit is 0.
"""

import math
import operator
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ropext.base.errors import InputError, UsageError
from ropext.base.inputs import is_path
from ropext.base.jsontext import Json
from ropext.base.lengths import length_text, parse_length
from ropext.options.evaluate import Measuring
from ropext.results import BASE, EXTENDED, RULER_CONTEXT, STRIDED, UNTOUCHED
from ropext.results.metrics import (
    DOCUMENTS,
    HAYSTACKS,
    QUESTIONS,
    WHOLE_METRICS,
    gate_rules_of,
    is_of_rounding,
    is_other_number,
    metrics_of,
)
from ropext.results.perplexity import ALL_TOKENS, Scoring
from ropext.tasks import RULER, TASK_NAMES, THIRTEEN, OwnTask

if TYPE_CHECKING:
    from ropext.results.values import Value

GRAMMAR = "METRIC[@LENGTH][.value] OP NUMBER, or METRIC[@LENGTH] OP [NUMBER] vs RUN"
OPERATORS: dict[str, Callable[[float, float], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}
UNITS = {"": 1, "k": 1024, "m": 1024**2}  # the units of a limit
_GATE = re.compile(
    r"\s*(?:(?P<variant>[^\s:<>=](?:[^:<>=]*[^\s:<>=])?):)?"
    r"(?P<metric>[A-Za-z_][\w-]*(?:\.(?!value\b)[A-Za-z_][\w-]*)?)"
    r"(?:@(?P<length>[0-9]+(?:\.[0-9]+)?[kKmM]?))?"
    r"(?P<point>\.value)?\s*(?P<op>>=|<=|>|<)\s*"
    r"(?P<number>[-+]?(?P<digits>[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?(?P<unit>[kKmM]?))?"
    r"(?:\s*\bvs\s+(?P<run>\S.*?))?\s*"
)


@dataclass(frozen=True)
class Gate:
    """One condition under which a run fails."""

    text: str
    metric: str  # the name in results, e.g. tail@32768
    op: str
    limit: float
    point: bool = False
    variant: str | None = None
    run: str | None = None

    @property
    def task(self) -> str:
        """Return the retrieval task of a gate's metric, such as passkey of `passkey_nll@32768` or
        `effective_context.passkey`; for a gate on text, the metric's name without `_nll`."""
        return self.metric.partition("@")[0].removeprefix("effective_context.").removesuffix("_nll")

    def unanswered(self, variant: str, reason: str, *, is_measured: bool = True) -> "Outcome":
        """Return the outcome of a gate without a value: the gate failed. If `is_measured` is False,
        nobody knows: exit code 6."""
        return Outcome(self.text, variant, False, None, reason, is_measured=is_measured)


@dataclass(frozen=True)
class Outcome:
    """The result of one gate and its reason."""

    gate: str
    variant: str
    passed: bool
    looked_at: float | None
    reason: str  # the value that the gate checked
    value: float | None = None  # the value itself, if the gate checked an end of its interval
    is_uncertain: bool = False  # the value alone would pass
    is_measured: bool = True  # False: the value was not measured, so nobody knows

    @property
    def sentence(self) -> str:
        """Return the sentence with the model and the value that the gate checked."""
        return f"{self.variant}: {self.reason}"

    def recorded(self) -> dict[str, Json]:
        """Return the outcome of a gate as the record of a run (run.json) holds it."""
        recorded = vars(self) | {"reason": self.sentence}
        if self.is_measured:
            del recorded["is_measured"]
        return recorded

    def to_json(self) -> dict[str, Json]:
        """Return the outcome of a gate as --json prints it; it has no value if nothing was
        measured."""
        printed = self.recorded()
        if self.value is None:
            del printed["value"]
        return printed


def read_gates(given: object) -> list[Gate]:
    """Return gates from a list whose entries are texts of --fail-if or gates already."""
    if not isinstance(given, list | tuple):
        raise UsageError(f"gates are a list of texts, was {repr(given)[:60]}; write {GRAMMAR}")
    gates = list[Gate]()
    for one in given:
        if isinstance(one, Gate):
            gates.append(one)
        else:
            gates.append(parse_gate(str(one)))
    return gates


def parse_gate(text: str) -> Gate:
    """Return the gate in a text of --fail-if; raise UsageError with the grammar for any other
    text."""
    match = _GATE.fullmatch(text)
    if match is None or (match["number"] is None and match["run"] is None):
        raise UsageError(f"--fail-if {text!r} is not a gate; write {GRAMMAR}")
    number = match["number"] or "0"
    unit = match["unit"] or ""
    limit = float(number.removesuffix(unit)) * UNITS[unit.lower()]
    is_zero = not (match["digits"] or "").strip("0.")
    if math.isinf(limit) or (limit == 0) is not is_zero:
        raise UsageError(
            f"--fail-if {text!r}: {number} is too large or too small for a computer's numbers; "
            "write 0, or a number between 1e-300 and 1e300"
        )
    metric = match["metric"]
    if match["length"]:
        metric += f"@{parse_length(match['length'], '--fail-if')}"
    return Gate(
        text=text.strip(),
        metric=metric,
        op=match["op"],
        limit=limit,
        point=bool(match["point"]),
        variant=match["variant"],
        run=match["run"],
    )


def split_run_spec(spec: str) -> tuple[Path, str | None]:
    """Return the path and the variant of `RUN` or `RUN:VARIANT`, as gates and comparisons name
    runs; a directory whose name holds a colon comes first."""
    try:
        is_whole = Path(spec).is_dir()
    except OSError as error:  # a name that is too long, for one
        raise InputError(f"{spec[:80]} cannot be read: {error.strerror}") from error
    if is_whole:
        return Path(spec), None
    path, _, variant = spec.rpartition(":")
    if path and not is_path(variant):
        return Path(path), variant
    return Path(spec), None


class Gated(Protocol):
    """A model of an evaluation, measured or to be measured, as far as it decides which gates judge
    it."""

    @property
    def kind(self) -> str:
        """Return whether it is a base, a control, untouched or extended."""

    @property
    def unrounded(self) -> str:
        """Return the label of the same model without rounding, if this one rounds its KV cache."""


def other_runs(gates: Sequence[Gate], labels: Collection[str]) -> list[Path]:
    """Return the directories of other runs that gates name by `vs RUN`. If a variant has the name
    of a directory, `vs` means the variant."""
    names = [gate.run for gate in gates if gate.run is not None]
    return [split_run_spec(name)[0] for name in names if name not in labels]


def concerned_labels(gate: Gate, models: Mapping[str, Gated]) -> list[str]:
    """Return the labels of the models that a gate is about: the named variant, else the models with
    a rounded cache for a metric of rounding, else the extended or untouched models."""
    if gate.variant is not None:
        return [gate.variant] if gate.variant in models else []
    # A rounding is of the rows whose cache is rounded, and they have no gates but that.
    rounded = [label for label, model in models.items() if model.unrounded]
    if is_of_rounding(gate.metric):
        return rounded
    for kind in (EXTENDED, UNTOUCHED):
        labels = [label for label, model in models.items() if model.kind == kind]
        if left := [label for label in labels if label not in rounded]:
            return left
    return []


def why_no_model(gate: Gate, concerned: Collection[str], there: Collection[str]) -> str:
    """Say why a gate judges no model: it compares models only with themselves, or is about none of
    the models that are there."""
    names = ", ".join(there)
    if concerned:
        folder = f", or ./{gate.run} for the folder of that name" if gate.run in concerned else ""
        itself = "itself" if len(concerned) == 1 else "themselves"
        return (
            f"it compares {' and '.join(concerned)} only with {itself}; name another model after "
            f"vs{folder}"
        )
    if gate.variant is not None:
        return f"no variant {gate.variant!r}; there are {names}"
    return f"it is about none of {names}; name one of them, as in VARIANT:{gate.metric}"


def check_gate(gate: Gate, variant: str, values: "Mapping[str, Value]") -> Outcome:
    """Return the outcome of one gate on one variant's values (differences already, for `vs
    RUN`)."""
    name = metric_text(gate.metric)
    if gate.metric not in values:
        there = ", ".join(map(metric_text, values)) or "none"
        return gate.unanswered(variant, f"{name} was not measured; there are {there}")
    value = values[gate.metric]
    unit = gate_rules_of(gate.metric).unit
    looked_at = value.value
    what = "the point"
    if not gate.point:
        if value.ci95 is None:
            drawn = DOCUMENTS if unit == DOCUMENTS else HAYSTACKS
            why = f"measure 8 {drawn} or more, or ask for .value"
            return gate.unanswered(variant, f"{name} has no interval (n = {value.n}); {why}")
        low, high = value.ci95
        looked_at = low
        what = "the lower end of the 95 % interval"
        if gate.op in (">", ">="):
            looked_at = high
            what = "the upper end of the 95 % interval"
    holds = OPERATORS[gate.op]
    # A number that is not finite has not passed anything.
    failed = not math.isfinite(looked_at) or holds(looked_at, gate.limit)
    against = f" against {gate.run}" if gate.run else ""
    reason = (
        f"{what} of {name}{against} is {looked_at:.6g}, the gate fails at {gate.op} {gate.limit:g}"
    )
    is_uncertain = math.isfinite(looked_at) and failed and not holds(value.value, gate.limit)
    if is_uncertain and math.isfinite(value.value) and value.value != gate.limit:
        count = _deciding_count_text(gate, value)
        reason += (
            f"; the value itself, {value.value:.6g}, does not: about {count} "
            f"{unit} would decide, instead of {value.n}"
        )
    return Outcome(gate.text, variant, not failed, looked_at, reason, value.value, is_uncertain)


def _deciding_count_text(gate: Gate, value: "Value") -> str:
    """Say in a gate's reason how many documents or questions would let an interval pass whose value
    passes."""
    side = int(gate.op in (">", ">="))
    rules = gate_rules_of(gate.metric)
    is_share = value.apart is not None or gate.run is None
    if is_share and rules.unit == QUESTIONS:

        def passes(asked: "Value") -> bool:
            """Return whether the interval of a share over so many answers passes the gate."""
            assert asked.ci95 is not None
            return not OPERATORS[gate.op](asked.ci95[side], gate.limit)

        return value.deciding_questions(passes)
    assert value.ci95 is not None
    end = value.ci95[side]
    if rules.is_perplexity and gate.run is None:
        reach = math.log(end / value.value)
        return value.deciding(reach, math.log(gate.limit / value.value))
    return value.deciding(end - value.value, gate.limit - value.value)


def metric_text(metric: str) -> str:
    """Write a metric as a user does in a gate: `tail@32k`."""
    name, _, length = metric.partition("@")
    return f"{name}@{length_text(int(length))}" if length.isdigit() else metric


@dataclass(frozen=True)
class GateMetrics:
    """The metrics of results.json that gates (--fail-if) can name, as far as they are known before
    anything is measured."""

    options: Measuring
    models: Mapping[str, Gated]  # by label, without numbers
    lengths: Sequence[int]
    scoring: Scoring = ALL_TOKENS

    def check(self, gates: Sequence[Gate]) -> None:
        """Raise UsageError for a task of own questions that has the name of another metric, and for
        a gate of --fail-if about a metric that results.json will not have, before hours of work."""
        for task in self.options.tasks:
            if isinstance(task, OwnTask) and is_other_number(task):
                raise task.taken_name("another number")
        for gate in gates:
            reason = self._missing_model(gate) or self._missing_metric(gate) or self._unsure(gate)
            if reason is not None:
                raise UsageError(f"--fail-if {gate.text!r}: {reason}")

    def _missing_model(self, gate: Gate) -> str | None:
        """Return the reason if a gate will judge no model of this evaluation, or `vs RUN` names
        neither a variant nor a directory."""
        concerned = concerned_labels(gate, self.models)
        if all(label == gate.run for label in concerned):
            return why_no_model(gate, concerned, self.models)
        if all(path.is_dir() for path in other_runs([gate], self.models)):
            return None
        there = ", ".join(self.models)
        return f"{gate.run} is neither the directory of an evaluation nor a variant ({there})"

    def _missing_metric(self, gate: Gate) -> str | None:
        """Return the reason if a gate names a metric or a length that this evaluation will not
        have."""
        at, whole = self.metrics(gate.variant, gate.run)
        name, _, length = gate.metric.partition("@")
        if name in at and length:
            if int(length) in self.lengths:
                return None
            there = ", ".join(map(length_text, self.lengths))
            return f"{length_text(int(length))} is none of the lengths that are measured ({there})"
        if gate.metric in whole:
            return None
        if gate.task in TASK_NAMES and gate.task not in self.options.tasks:
            return f"{gate.task} is asked only where --tasks names it: add --tasks {gate.task}"
        there = ", ".join([f"{name}@LENGTH" for name in at] + whole) or "none"
        if gate.run is not None:
            at_alone, whole_alone = self.metrics(gate.variant)
            if (name in at_alone and name not in at) or gate.metric in whole_alone:
                return f"{name} has no difference to another model; with `vs` there are {there}"
        return f"no such metric; there are {there}"

    def _unsure(self, gate: Gate) -> str | None:
        """Return the reason if the gate would find no interval."""
        from ropext.results.values import FEWEST_DOCUMENTS  # late: it loads numpy

        count = self.options.max_docs
        if gate.point:
            return None
        if not gate_rules_of(gate.metric).has_interval:
            return "a step of the grid of lengths has no interval: ask for its .value"
        if count >= FEWEST_DOCUMENTS or gate.task == RULER or gate.task in self.options.tasks:
            return None
        return (
            f"{count} documents give no interval: --max-docs {FEWEST_DOCUMENTS} or more, or ask "
            "for .value"
        )

    def metrics(self, variant: str | None, run: str | None = None) -> tuple[list[str], list[str]]:
        """Name the metrics at each length and the metrics for all lengths, for a variant or for its
        differences to another run."""
        at = list[str]()
        whole = list[str]()
        if self.options.data is not None:
            self._text_metrics(variant, run, at, whole)
        self._task_metrics(run, at, whole)
        return at, whole

    def _text_metrics(
        self, variant: str | None, run: str | None, at: list[str], whole: list[str]
    ) -> None:
        """Add the metrics of text that a gate can name."""
        between = run is not None
        beside_base = BASE in self.models and variant != BASE
        with_base = beside_base and not between
        for metric in metrics_of(self.scoring, with_base=with_base, between=between):
            if not metric.option or getattr(self.options, metric.option, False):
                at.append(metric.name)
        if self.options.protocol == "hf-stride" and variant != BASE and not between:
            at.append(STRIDED)
        for metric in WHOLE_METRICS:
            if with_base or (between and metric.compares):
                whole.append(metric.name)

    def _task_metrics(self, run: str | None, at: list[str], whole: list[str]) -> None:
        """Add the metrics of retrieval tasks that a gate can name. The length that a model reaches
        is not compared between two models."""
        alone = run is None
        tasks = self.options.tasks
        for task in tasks:
            at += [task, f"{task}_nll"]
            if alone:
                whole.append(f"effective_context.{task}")
        of_ruler = len(set(tasks) & set(THIRTEEN))
        if of_ruler > 1:
            at.append(RULER)
            if alone:
                whole.append(f"effective_context.{RULER}")
            if alone and of_ruler == len(THIRTEEN):
                whole.append(RULER_CONTEXT)
