"""Write gates: a table of all, and for each failed gate its meaning and remedy."""

from collections.abc import Iterable, Sequence

from ropext.base.lengths import length_text
from ropext.base.table import Table
from ropext.results.gates import Gate, Outcome, metric_text, parse_gate
from ropext.results.metrics import gate_rules_of

MEASURE_MORE = "measure more (--max-docs documents, --items questions)"


def gate_table(outcomes: Iterable[Outcome]) -> Table:
    """Return the table of a report with all gates of --fail-if and their outcomes."""
    rows = list[tuple[str, ...]]()
    for outcome in outcomes:
        state = "passed" if outcome.passed else "FAILED"
        if not outcome.is_measured:
            state = "not known"
        rows.append((state, outcome.gate, outcome.variant, outcome.reason))
    note = "a gate is a failure condition; it fails if any value in the interval meets it"
    return Table("Gates", note, ("", "gate", "model", "measured"), tuple(rows))


def failed_gate_lines(outcomes: Sequence[Outcome]) -> list[str]:
    """Write for each gate of --fail-if that failed or is not known its meaning and its remedy."""
    return [_failed_gate_line(outcome) for outcome in outcomes if not outcome.passed]


def _failed_gate_line(outcome: Outcome) -> str:
    """Write the meaning and the remedy of one gate that failed, or why it is not known."""
    gate = parse_gate(outcome.gate)
    if not outcome.is_measured:
        return f"NOT KNOWN {outcome.gate}: not measured: {outcome.sentence}."
    head = f"FAILED {outcome.gate}: "
    if outcome.value is None or outcome.looked_at is None:
        return f"{head}there is no value to compare, so it counts as failed: {outcome.sentence}."
    meaning = _gate_meaning(gate, outcome.variant, outcome.value)
    if outcome.is_uncertain:
        end = f"the end of its 95 % interval, {outcome.looked_at:.4g}, does not"
        return f"{head}{meaning}, which passes, but {end}. To do: {MEASURE_MORE}."
    return f"{head}{meaning}. To do: {gate_rules_of(gate.metric).remedy}."


def _gate_meaning(gate: Gate, variant: str, value: float) -> str:
    """Write the meaning of a gate's value in words."""
    if gate.run is not None:
        return f"{metric_text(gate.metric)} of {variant} is {value:+.4g} from that of {gate.run}"
    rules = gate_rules_of(gate.metric)
    task, _, length = gate.metric.partition("@")
    is_better = (value > 0) is rules.is_gain
    return rules.meaning.format(
        metric=metric_text(gate.metric),
        task=task,
        model=variant,
        value=value,
        size=abs(value),
        percent=percent_text(value),
        side="better" if is_better else "worse",
        length=length_text(int(length)) if length else "",
    )


def percent_text(share: float) -> str:
    """Write a share in a sentence of a report: 42 %."""
    return f"{100 * share:.0f} %"
