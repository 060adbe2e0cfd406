"""Define the metrics of text in one table: name, computation, difference of two models, and the
sentence of a failed gate.

Results, gates and their early check follow the table. It needs no numpy, so that a gate is checked
before numpy is loaded.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ropext.results import FOUND, RULER_CONTEXT, STRIDED
from ropext.results.perplexity import Scoring, Span

if TYPE_CHECKING:
    from ropext.results.perplexity import LossStatistics, MeasuredDocuments, Reading
    from ropext.results.values import Value


@dataclass(frozen=True)
class ReadText:
    """A model's reading of the documents, and the base's reading to compare it with."""

    frame: "LossStatistics"
    reading: "Reading"
    base: "Reading | None" = None
    documents: "MeasuredDocuments | None" = None  # without them bytes are not known
    divergence: "Reading | None" = None  # per token, nats from the base's next token
    agreement: "Reading | None" = None  # 1 if the first choice equals the base's
    unrounded: "Reading | None" = None  # the same model, its KV cache as it is computed


TRAIN = "train it, or longer (`ropext finetune`), or try another method (`ropext eval --method`)"
SHORTER = "serve it no longer than that, or train it longer (`ropext finetune`)"
WITH_QUESTIONS = (
    "train it with questions (`ropext finetune --retrieval-share`), or take a smaller --factor"
)


# The sample of a number, over which its interval is computed.
DOCUMENTS = "documents"
HAYSTACKS = "haystacks"
QUESTIONS = "questions"


@dataclass(frozen=True)
class GateRules:
    """The rules by which gates judge a number. `meaning` explains the number for a model; it may
    hold {metric}, {task}, {model}, {value}, {size} (the value without its sign), {percent}, {side}
    (better or worse) and {length}."""

    meaning: str = "{metric} of {model} is {value:.4g}"
    remedy: str = TRAIN
    is_gain: bool = False  # a number above zero is better
    has_interval: bool = True  # without one, a gate must ask for its .value
    unit: str = DOCUMENTS
    is_perplexity: bool = False  # its interval is that of its logarithm


def _tail_span(frame: "LossStatistics", length: int) -> Span:
    """Return the span of the metrics over the last N tokens before a length."""
    return frame.tail_span(length)


def _span_before(frame: "LossStatistics", length: int) -> Span:
    """Return the span of the metrics over all tokens before a length."""
    return 1, length


def _span_inside(frame: "LossStatistics", length: int) -> Span:
    """Return the span of the short tax: the scored positions inside the trained context, whatever
    the length."""
    return frame.inside


@dataclass(frozen=True)
class Metric:
    """A number of results.json: one at each length, `NAME@LENGTH`, or one of all lengths, `NAME`.

    `method` names the method of LossStatistics that computes it. `of` names the fields of
    ReadText that the method takes; if one of them is None, the number does not exist. `span`
    returns the positions that the method takes, too; it is None if the method chooses them itself.
    """

    name: str
    method: str
    of: tuple[str, ...] = ("reading",)
    span: "Callable[[LossStatistics, int], Span] | None" = _tail_span
    # Two models have a difference over this span: of their mean losses, in nats per token. So only
    # a mean loss, or its exponential, can have one.
    compares: bool = False
    option: str = ""  # the option of an evaluation without which it is not there
    causal: bool = False  # not a number of masked language models, whose tail alone is scored
    gate_rules: GateRules = GateRules()

    @property
    def needs_base(self) -> bool:
        """Return whether results.json has the metric only beside a base: it is the base's own, or
        compares a model with the base."""
        return not {"base", "divergence", "agreement"}.isdisjoint(self.of)

    def value(self, text: ReadText, length: int) -> "Value | None":
        """Return the metric's value for a model at a length, or None if a reading or the documents
        that it needs do not exist."""
        taken = [getattr(text, name) for name in self.of]
        if None in taken:
            return None
        if self.span is not None:
            taken.append(self.span(text.frame, length))
        value: Value = getattr(text.frame, self.method)(*taken)
        return value


GAIN = GateRules(
    "{model} predicts the last tokens before {length} {size:.4g} nats per token {side} than the "
    "base does from truncated text",
    is_gain=True,
)
SHORT_TAX = GateRules(
    "{model} predicts text inside the trained context {size:.4g} nats per token {side} than the "
    "base",
    "take a smaller --factor, train it (`ropext finetune`), or serve short prompts with the base",
)
PERPLEXITY = GateRules(is_perplexity=True)
KV = "kv"  # the option by which caches are rounded
LARGER_TYPE = "store K in more bits (q8_0): the loss comes from rounding K"
KL = GateRules(
    "the next token of {model} is {value:.4g} nats from the base's over the last tokens before "
    "{length}"
)
AGREEMENT = GateRules(
    "the likeliest next token of {model} is the base's at {percent} of the last tokens before "
    "{length}"
)
ROUNDING = GateRules(
    "{model} predicts the last tokens before {length} {size:.4g} nats per token {side} than "
    "without rounding its KV cache",
    LARGER_TYPE,
)
KEPT = GateRules("{model} keeps its quality up to {value:,.0f} tokens", SHORTER)
# In the order in which results.json holds them.
TEXT_METRICS = (
    Metric("tail", "perplexity", compares=True, gate_rules=PERPLEXITY),
    Metric("tail_nll", "nll", compares=True),
    Metric(
        "cumulative",
        "perplexity",
        span=_span_before,
        compares=True,
        causal=True,
        gate_rules=PERPLEXITY,
    ),
    Metric("yarn", "yarn_perplexity", span=_span_before, causal=True, gate_rules=PERPLEXITY),
    Metric("bpb", "bits_per_byte", ("reading", "documents"), _span_before, causal=True),
    Metric("in_window", "perplexity", ("base",), gate_rules=PERPLEXITY),
    Metric("in_window_nll", "nll", ("base",)),
    Metric("gain", "difference", ("base", "reading"), gate_rules=GAIN),
    Metric("kl", "nll", ("divergence",), option="kl", causal=True, gate_rules=KL),
    Metric("agreement", "nll", ("agreement",), option="kl", causal=True, gate_rules=AGREEMENT),
    Metric(
        "rounding",
        "difference",
        ("reading", "unrounded"),
        option=KV,
        causal=True,
        gate_rules=ROUNDING,
    ),
)
WHOLE_METRICS = (  # one number for all lengths together
    Metric(
        "short_tax", "difference", ("reading", "base"), _span_inside, True, gate_rules=SHORT_TAX
    ),
    Metric("effective_context", "effective_context", ("reading", "base"), None, gate_rules=KEPT),
)

# The numbers of a task's answers: `TASK@LENGTH`, `TASK_nll@LENGTH`, and a length on the grid of
# the measured ones: `effective_context.TASK`, `ruler_context`.
SHARE_FOUND = GateRules(
    "{model} finds {percent} of what {task} asks for at {length}", WITH_QUESTIONS, unit=QUESTIONS
)
ANSWER_NLL = GateRules(remedy=WITH_QUESTIONS, unit=HAYSTACKS)
REACHED = GateRules(KEPT.meaning, SHORTER, has_interval=False)


def gate_rules_of(metric: str) -> GateRules:
    """Return the rules by which gates judge a number, by its name in results.json, such as
    tail@32768."""
    name = metric.partition("@")[0]
    for row in TEXT_METRICS + WHOLE_METRICS:
        if row.name == name:
            return row.gate_rules
    if name == STRIDED:
        return PERPLEXITY
    if name == RULER_CONTEXT or name.startswith("effective_context."):
        return REACHED
    if name.endswith("_nll"):
        return ANSWER_NLL
    return SHARE_FOUND


def is_other_number(name: str) -> bool:
    """Return whether results.json uses a name for a number that is no task's share of answers."""
    names = {row.name for row in TEXT_METRICS + WHOLE_METRICS}
    return name in names | {STRIDED, RULER_CONTEXT, FOUND} or name.endswith("_nll")


def is_of_rounding(metric: str) -> bool:
    """Return whether a number, by its name in results.json, exists only for a model with a rounded
    KV cache."""
    name = metric.partition("@")[0]
    return any(row.name == name and row.option == KV for row in TEXT_METRICS)


def metrics_of(scoring: Scoring, *, with_base: bool, between: bool) -> Iterator[Metric]:
    """Yield the metrics at each length that results.json has of a model, or of the difference
    between two models."""
    for metric in TEXT_METRICS:
        if metric.causal and not scoring.scores_all:
            continue
        if metric.needs_base and not with_base:
            continue
        if between and not metric.compares:
            continue
        yield metric


def text_values(text: ReadText) -> "dict[str, Value]":
    """Return every number of a model on text, by its name in results.json."""
    values: dict[str, Value] = {}
    with_base = text.base is not None
    for name, metric, length in _named_metrics(text.frame, with_base=with_base, between=False):
        value = metric.value(text, length)
        if value is not None:
            values[name] = value
    return values


def text_differences(
    frame: "LossStatistics", first: "Reading", second: "Reading"
) -> "dict[str, Value]":
    """Return every paired difference of two models' token losses, the first minus the second, by
    the metric's name in results.json."""
    values: dict[str, Value] = {}
    for name, metric, length in _named_metrics(frame, with_base=False, between=True):
        if metric.span is not None:
            values[name] = frame.difference(first, second, metric.span(frame, length))
    return values


def _named_metrics(
    frame: "LossStatistics", *, with_base: bool, between: bool
) -> Iterator[tuple[str, Metric, int]]:
    """Yield each metric that an evaluation may have with its name in results.json and its
    length."""
    for length in frame.lengths:
        for metric in metrics_of(frame.scoring, with_base=with_base, between=between):
            yield f"{metric.name}@{length}", metric, length
    for whole in WHOLE_METRICS:
        if whole.compares or not between:
            yield whole.name, whole, frame.longest
