"""Define the metrics of text in one table: name, computation, difference of two models, and the
sentence of a failed gate.

Results, gates and their early check follow the table. It needs no numpy, so that a gate is checked
before numpy is loaded.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ropext.results import STRIDED
from ropext.results.scoring import Scoring

if TYPE_CHECKING:
    from ropext.results.perplexity import Documents, EvaluationSettings, Reading
    from ropext.results.values import Value


@dataclass(frozen=True)
class ReadText:
    """A model's reading of the documents, and the base's reading to compare it with."""

    frame: "EvaluationSettings"
    reading: "Reading"
    base: "Reading | None" = None
    documents: "Documents | None" = None  # without them bytes are not known
    divergence: "Reading | None" = None  # per token, nats from the base's next token
    agreement: "Reading | None" = None  # 1 if the first choice equals the base's
    unrounded: "Reading | None" = None  # the same model, its KV cache as it is computed


@dataclass(frozen=True)
class TextPair:
    """Two readings of the same documents; their difference is the first minus the second."""

    frame: "EvaluationSettings"
    first: "Reading"
    second: "Reading"


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


@dataclass(frozen=True)
class Metric:
    """A number at each length, `NAME@LENGTH`.

    `take` returns a model's number, or None if it cannot be computed. `differ` returns the paired
    difference of two models in nats per token, or None if the metric compares no models.
    """

    name: str
    take: "Callable[[ReadText, int], Value | None]"
    differ: "Callable[[TextPair, int], Value] | None" = None
    needs_base: bool = False
    needs: str = ""  # the option of an evaluation without which it is not there
    causal: bool = False  # not a number of masked language models, whose tail alone is scored
    judged: GateRules = GateRules()


@dataclass(frozen=True)
class WholeMetric:
    """A number for all lengths together; it needs the base's reading."""

    name: str
    take: "Callable[[ReadText], Value | None]"
    differ: "Callable[[TextPair], Value] | None" = None
    judged: GateRules = GateRules()


def _tail(text: ReadText, length: int) -> "Value":
    return text.frame.perplexity(text.reading, text.frame.tail_span(length))


def _tail_nll(text: ReadText, length: int) -> "Value":
    return text.frame.nll(text.reading, text.frame.tail_span(length))


def _tail_difference(pair: TextPair, length: int) -> "Value":
    return pair.frame.difference(pair.first, pair.second, pair.frame.tail_span(length))


def _cumulative(text: ReadText, length: int) -> "Value":
    return text.frame.perplexity(text.reading, (1, length))


def _cumulative_difference(pair: TextPair, length: int) -> "Value":
    return pair.frame.difference(pair.first, pair.second, (1, length))


def _yarn(text: ReadText, length: int) -> "Value":
    return text.frame.yarn_perplexity(text.reading, length)


def _bits_per_byte(text: ReadText, length: int) -> "Value | None":
    if text.documents is None:
        return None
    return text.frame.bits_per_byte(text.reading, text.documents, length)


def _in_window(text: ReadText, length: int) -> "Value | None":
    if text.base is None:
        return None
    return text.frame.perplexity(text.base, text.frame.tail_span(length))


def _in_window_nll(text: ReadText, length: int) -> "Value | None":
    if text.base is None:
        return None
    return text.frame.nll(text.base, text.frame.tail_span(length))


def _gain(text: ReadText, length: int) -> "Value | None":
    if text.base is None:
        return None
    return text.frame.difference(text.base, text.reading, text.frame.tail_span(length))


def _divergence(text: ReadText, length: int) -> "Value | None":
    if text.divergence is None:
        return None
    return text.frame.nll(text.divergence, text.frame.tail_span(length))


def _agreement(text: ReadText, length: int) -> "Value | None":
    if text.agreement is None:
        return None
    return text.frame.nll(text.agreement, text.frame.tail_span(length))


def _rounding(text: ReadText, length: int) -> "Value | None":
    if text.unrounded is None:
        return None
    return text.frame.difference(text.reading, text.unrounded, text.frame.tail_span(length))


def _short_tax(text: ReadText) -> "Value | None":
    if text.base is None:
        return None
    return text.frame.difference(text.reading, text.base, text.frame.inside)


def _short_tax_difference(pair: TextPair) -> "Value":
    return pair.frame.difference(pair.first, pair.second, pair.frame.inside)


def _effective_context(text: ReadText) -> "Value | None":
    if text.base is None:
        return None
    return text.frame.effective_context(text.reading, text.base)


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
    Metric("tail", _tail, _tail_difference),
    Metric("tail_nll", _tail_nll, _tail_difference),
    Metric("cumulative", _cumulative, _cumulative_difference, causal=True),
    Metric("yarn", _yarn, causal=True),
    Metric("bpb", _bits_per_byte, causal=True),
    Metric("in_window", _in_window, needs_base=True),
    Metric("in_window_nll", _in_window_nll, needs_base=True),
    Metric("gain", _gain, needs_base=True, judged=GAIN),
    Metric("kl", _divergence, needs_base=True, needs="kl", causal=True, judged=KL),
    Metric("agreement", _agreement, needs_base=True, needs="kl", causal=True, judged=AGREEMENT),
    Metric("rounding", _rounding, needs=KV, causal=True, judged=ROUNDING),
)
WHOLE_METRICS = (
    WholeMetric("short_tax", _short_tax, _short_tax_difference, SHORT_TAX),
    WholeMetric("effective_context", _effective_context, judged=KEPT),
)

# The numbers of a task's answers: `TASK@LENGTH`, `TASK_nll@LENGTH`, and a length on the grid of
# the measured ones: `effective_context.TASK`, `ruler_context`.
FOUND = GateRules(
    "{model} finds {percent} of what {task} asks for at {length}", WITH_QUESTIONS, unit=QUESTIONS
)
ANSWER_NLL = GateRules(remedy=WITH_QUESTIONS, unit=HAYSTACKS)
REACHED = GateRules(KEPT.meaning, SHORTER, has_interval=False)


def gate_rules_of(metric: str) -> GateRules:
    """Return how gates judge a number, by its name in results, such as tail@32768."""
    name = metric.partition("@")[0]
    for row in (*TEXT_METRICS, *WHOLE_METRICS):
        if row.name == name:
            return row.judged
    if name == STRIDED:
        return GateRules()
    if name == "ruler_context" or name.startswith("effective_context."):
        return REACHED
    if name.endswith("_nll"):
        return ANSWER_NLL
    return FOUND


def is_of_rounding(metric: str) -> bool:
    """Return whether a number, by its name in results, exists only for a model with a rounded KV
    cache."""
    name = metric.partition("@")[0]
    return any(row.name == name and row.needs == KV for row in TEXT_METRICS)


def metrics_of(scoring: Scoring, *, with_base: bool, between: bool) -> Iterator[Metric]:
    """Yield the metrics at each length of a model, or of the difference between two models."""
    for metric in TEXT_METRICS:
        if metric.causal and not scoring.scores_all:
            continue
        if metric.needs_base and not with_base:
            continue
        if between and metric.differ is None:
            continue
        yield metric


def text_values(text: ReadText) -> "dict[str, Value]":
    """Return every number of one model on text, by its name."""
    values: dict[str, Value] = {}
    with_base = text.base is not None
    for length in text.frame.lengths:
        for metric in metrics_of(text.frame.scoring, with_base=with_base, between=False):
            value = metric.take(text, length)
            if value is not None:
                values[f"{metric.name}@{length}"] = value
    for whole in WHOLE_METRICS:
        value = whole.take(text)
        if value is not None:
            values[whole.name] = value
    return values


def text_differences(pair: TextPair) -> "dict[str, Value]":
    """Return every paired difference of two models on text, by the metric's name."""
    values: dict[str, Value] = {}
    for length in pair.frame.lengths:
        for metric in metrics_of(pair.frame.scoring, with_base=False, between=True):
            if metric.differ is not None:
                values[f"{metric.name}@{length}"] = metric.differ(pair, length)
    for whole in WHOLE_METRICS:
        if whole.differ is not None:
            values[whole.name] = whole.differ(pair)
    return values
