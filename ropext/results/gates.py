"""Gates for pipelines: `tail@32k > 8.5`, `short_tax > 0.02 vs RUN`, `passkey@32k < 0.9`.

    [VARIANT:]METRIC[@LENGTH][.value] OP NUMBER
    [VARIANT:]METRIC[@LENGTH][.value] OP [NUMBER] vs RUN

A gate names what must not be. It looks at the worse end of the 95 % interval (the upper one for
`>`, the lower one for `<`), so a result that is merely too uncertain fails too; `.value` asks for
the point. `vs RUN` takes the paired difference to another run, or to another variant of this one:
nats for a perplexity, points for a share; without a number the limit is 0.
"""

import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ropext.errors import UsageError
from ropext.lengths import length_text, parse_length

if TYPE_CHECKING:
    from ropext.results.values import Value

GRAMMAR = "METRIC[@LENGTH][.value] OP NUMBER, or METRIC[@LENGTH] OP [NUMBER] vs RUN"
OPERATORS: dict[str, Callable[[float, float], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}
_GATE = re.compile(
    r"\s*(?:(?P<variant>[^\s:<>=]+):)?"
    r"(?P<metric>[A-Za-z_][\w-]*(?:\.(?!value\b)[A-Za-z_][\w-]*)?)"
    r"(?:@(?P<length>\d+(?:\.\d+)?[kKmM]?))?"
    r"(?P<point>\.value)?\s*(?P<op>>=|<=|>|<)\s*"
    r"(?P<number>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?(?P<unit>[kKmM]?))?"
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


@dataclass(frozen=True)
class Outcome:
    """What became of a gate, with the sentence that says why."""

    gate: str
    variant: str
    passed: bool
    looked_at: float | None
    reason: str

    @property
    def sentence(self) -> str:
        """The line of a report."""
        return f"gate {'passed' if self.passed else 'FAILED'}: {self.reason}"


def parse_gate(text: str) -> Gate:
    """Read one gate; what it does not understand is refused with the grammar."""
    match = _GATE.fullmatch(text)
    if match is None or (match["number"] is None and match["run"] is None):
        raise UsageError(f"--fail-if {text!r} is not a gate; write {GRAMMAR}")
    number, unit = match["number"] or "0", match["unit"] or ""
    limit = float(number.removesuffix(unit)) if unit else float(number)
    limit *= {"": 1, "k": 1024, "m": 1024**2}[unit.lower()]
    metric = match["metric"]
    if match["length"]:
        metric += f"@{parse_length(match['length'], '--fail-if')}"
    return Gate(
        text.strip(),
        metric,
        match["op"],
        limit,
        bool(match["point"]),
        match["variant"],
        match["run"],
    )


def split_spec(spec: str) -> tuple[Path, str | None]:
    """`RUN` or `RUN:VARIANT`; a directory whose name holds a colon comes first."""
    if Path(spec).is_dir():
        return Path(spec), None
    path, colon, variant = spec.rpartition(":")
    return (Path(path), variant) if colon and path else (Path(spec), None)


def check_gate(gate: Gate, variant: str, values: "Mapping[str, Value]") -> Outcome:
    """Judge one gate on one variant's values (differences already, for `vs RUN`)."""
    if gate.metric not in values:
        raise UsageError(f"--fail-if {gate.text!r}: no such metric; there are {_names(values)}")
    value = values[gate.metric]
    looked_at: float | None
    if gate.point:
        looked_at, what = value.value, "the point"
    elif value.ci95 is None:
        return Outcome(
            gate.text,
            variant,
            False,
            None,
            f"{variant}: {_label(gate.metric)} has no interval (n = {value.n}); "
            "measure 8 documents or more, or ask for .value",
        )
    else:
        upper = gate.op in (">", ">=")
        looked_at = value.ci95[1] if upper else value.ci95[0]
        what = f"the {'upper' if upper else 'lower'} end of the 95 % interval"
    # A number that is not finite has not passed anything.
    failed = not math.isfinite(looked_at) or OPERATORS[gate.op](looked_at, gate.limit)
    against = f" against {gate.run}" if gate.run else ""
    return Outcome(
        gate.text,
        variant,
        not failed,
        looked_at,
        f"{variant}: {what} of {_label(gate.metric)}{against} is {looked_at:.6g}, "
        f"the gate fails at {gate.op} {gate.limit:g}",
    )


def _label(metric: str) -> str:
    name, _, length = metric.partition("@")
    return f"{name}@{length_text(int(length))}" if length.isdigit() else metric


def _names(values: "Mapping[str, Value]") -> str:
    return ", ".join(dict.fromkeys(_label(name) for name in values)) or "none"
