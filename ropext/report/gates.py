"""Gates in words: all of them in a table, and of each failed one what it means and what to do."""

from collections.abc import Iterable, Sequence

from ropext.lengths import length_text
from ropext.results import STRIDED
from ropext.results.gates import Gate, Outcome, metric_text, parse_gate
from ropext.results.metrics import TEXT_METRICS
from ropext.table import Table

TEXT = frozenset([STRIDED]).union(metric.name for metric in TEXT_METRICS)
TRAIN = "train it, or longer (`ropext finetune`), or try another method (`ropext eval --method`)"
REACH = "serve it no longer than that, or train it longer (`ropext finetune`)"
QUESTIONS = (
    "train it with questions (`ropext finetune --retrieval-share`), or take a smaller --factor"
)
REMEDIES = dict.fromkeys(TEXT, TRAIN) | {
    "short_tax": "take a smaller --factor, train it (`ropext finetune`), or serve short prompts "
    "with the base",
    "effective_context": REACH,
    "ruler_context": REACH,
}
MEASURE_MORE = "measure more (--max-docs documents, --items questions)"


def gate_table(outcomes: Iterable[Outcome]) -> Table:
    """Lay out every gate with what became of it."""
    rows = list[tuple[str, ...]]()
    for outcome in outcomes:
        state = "passed" if outcome.passed else "FAILED"
        reason = outcome.reason.removeprefix(f"{outcome.variant}: ")
        rows.append((state, outcome.gate, outcome.variant, reason))
    note = "a gate names what must not be; it looks at the worse end of an interval, or the point"
    return Table("Gates", note, ("", "gate", "model", "what was looked at"), tuple(rows))


def failures(outcomes: Sequence[Outcome]) -> list[str]:
    """Say of each failed gate what it means and what to do."""
    return [_failure(outcome) for outcome in outcomes if not outcome.passed]


def _failure(outcome: Outcome) -> str:
    gate = parse_gate(outcome.gate)
    head = f"FAILED {outcome.gate}: "
    if outcome.value is None or outcome.looked_at is None:
        return f"{head}nothing could be looked at, so it counts as failed: {outcome.reason}."
    meaning = _meaning(gate, outcome.variant, outcome.value)
    if outcome.is_uncertain:
        end = f"the end of its 95 % interval, {outcome.looked_at:.4g}, does not"
        return f"{head}{meaning}, which passes, but {end}. To do: {MEASURE_MORE}."
    remedy = REMEDIES.get(_name(gate).partition(".")[0], QUESTIONS)
    return f"{head}{meaning}. To do: {remedy}."


def _name(gate: Gate) -> str:
    """The metric without its length, of a loss the perplexity's."""
    return gate.metric.partition("@")[0].removesuffix("_nll")


def _meaning(gate: Gate, variant: str, value: float) -> str:
    """What a number says of a model."""
    name = _name(gate)
    length = gate.metric.partition("@")[2]
    at = length_text(int(length)) if length else ""
    if gate.run is not None:
        return f"{metric_text(gate.metric)} of {variant} is {value:+.4g} from that of {gate.run}"
    side = "better" if (value > 0) is (name == "gain") else "worse"
    if name == "gain":
        return (
            f"{variant} predicts the last tokens before {at} {abs(value):.4g} nats a token {side} "
            "than the base does from truncated text"
        )
    if name == "short_tax":
        return (
            f"{variant} predicts text inside the trained context {abs(value):.4g} nats a token "
            f"{side} than the base"
        )
    if name.startswith("effective_context") or name == "ruler_context":
        return f"{variant} keeps its quality up to {value:,.0f} tokens"
    if name in TEXT:
        return f"{metric_text(gate.metric)} of {variant} is {value:.4g}"
    return f"{variant} finds {percent(value)} of what {name} asks for at {at}"


def percent(share: float) -> str:
    """Write a share as a sentence does."""
    return f"{100 * share:.0f} %"
