"""What was measured, as tables and sentences: of an evaluation, a comparison, a ranking."""

import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ropext.lengths import length_text
from ropext.options.extend import Extend
from ropext.options.fields import flag
from ropext.results.gates import metric_text
from ropext.results.overlap import mark_of, marked
from ropext.results.retrieval import RULERS
from ropext.results.rules import Comparison, Ranked, Ranking
from ropext.results.values import Value, values_of
from ropext.table import Table, as_text, with_rows
from ropext.tasks import RULER, THIRTEEN, find_task

if TYPE_CHECKING:
    from ropext.planning import Plan

Results = Mapping[str, Any]
NOTHING = "-"


def number(value: float, digits: int = 3) -> str:
    """Plain where it fits, with an exponent where a perplexity exploded."""
    if math.isnan(value):
        return "?"
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    text = f"{value:.{digits}f}" if abs(value) < 10000 else f"{value:.2e}"
    return text if float(text) else text.removeprefix("-")


def shown(value: Value | None, digits: int = 3, sign: bool = False) -> str:
    """`8.412 ±0.103` with an interval, `8.412 (8.1–8.9)` with a range only."""
    if value is None or value.n == 0:
        return NOTHING
    text = number(value.value, digits)
    if sign and value.value > 0 and float(text):
        text = f"+{text}"
    if value.ci95 is not None:
        half = (value.ci95[1] - value.ci95[0]) / 2
        return f"{text} ±{number(half, digits)}"
    if value.range is not None and value.n > 1:
        low, high = (number(end, digits) for end in value.range)
        return f"{text} ({low}…{high})"
    return text


def _row_name(results: Results, label: str, *, questions: bool = False) -> str:
    """A variant with the mark of numbers over documents that it was trained on."""
    return marked(label, mark_of(results["variants"][label], questions=questions))


def _per_length(
    results: Results, name: str, title: str, note: str, digits: int = 3, sign: bool = False
) -> Table:
    """A row per variant, a column per length."""
    lengths, rows = results["lengths"], []
    for label in results["variants"]:
        values = values_of(results["variants"][label])
        if any(f"{name}@{length}" in values for length in lengths):
            cells = [shown(values.get(f"{name}@{length}"), digits, sign) for length in lengths]
            rows.append((_row_name(results, label), *cells))
    return Table(title, note, ("", *(length_text(length) for length in lengths)), tuple(rows))


def tail_text(tail: int, lengths: Sequence[int], stride: int = 0) -> str:
    """Which tokens a tail has; a length shorter than it has no more than its own."""
    if stride:
        return f"the last {tail} tokens of each document, every {stride}th masked in one pass"
    short = [length_text(length) for length in lengths if length < tail]
    fewer = f" (before {', '.join(short)} all there are)" if short else ""
    return f"the last {tail} tokens before each length{fewer}"


def _measured(results: Results) -> tuple[str, str]:
    """What the numbers of a tail are, and of which tokens."""
    stride = results.get("mask_stride", 0)
    tail = tail_text(results["tail_tokens"], results["lengths"], stride)
    return "pseudo-perplexity" if stride else "perplexity", tail


def headline(results: Results) -> Table:
    """The number that the protocol is about."""
    kind, tail = _measured(results)
    names = {
        "tail": f"Tail {kind}: {tail}",
        "yarn": "Perplexity, protocol yarn (mean over documents of one truncated window)",
        "hf_stride": "Perplexity, protocol hf-stride (windows of the length, over whole documents)",
    }
    name = results["headline"]
    note = "base = the model before extension through its short window, on the same tokens"
    if "untouched" in results["variants"]:
        note += "; untouched = that model, read beyond its window"
    note += "; after ± half the 95 % interval"
    if name != "tail":
        note = results["protocol_text"]
    return _per_length(results, name, names[name], note)


def text_tables(results: Results) -> list[Table]:
    """Everything about text, the headline first."""
    return [
        headline(results),
        _per_length(
            results,
            "gain",
            "Context gain (nats per token)",
            "NLL of the base through its short window minus NLL of this model, on the same tokens; "
            "below zero, truncating the text beats the long context",
            digits=4,
            sign=True,
        ),
        summary(results),
        _per_length(
            results,
            "cumulative",
            "Cumulative perplexity (over all tokens before each length)",
            "what most papers print; it averages early tokens in and hides failures at the end",
        ),
        _per_length(results, "bpb", "Bits per byte", "comparable across tokenizers", digits=4),
        _positions(results),
    ]


def main_tables(results: Results) -> list[Table]:
    """What a terminal shows of an evaluation: perplexity with the gain over truncation, retrieval.
    The rest is in `evaluation_tables`."""
    return with_rows([_by_length(results), _by_task(results), harness_table(results)])


def _by_length(results: Results) -> Table:
    """A row per length and variant."""
    rows, name = [], results["headline"]
    for length in results["lengths"]:
        first = length_text(length)
        for label in results["variants"]:
            values = values_of(results["variants"][label])
            if (own := values.get(f"{name}@{length}")) is not None:
                gain = shown(values.get(f"gain@{length}"), 4, sign=True)
                rows.append((first, _row_name(results, label), number(own.value), gain))
                first = ""
    kind, tail = _measured(results)
    what = {"tail": f"{kind.capitalize()} of {tail}"}
    return Table(
        what.get(name, f"Perplexity, protocol {results['protocol']}"),
        f"gain: nats a token over the base that sees its last {length_text(results['context'])} "
        "tokens alone, paired by document, ± half the 95 % interval; below zero cutting the text "
        "off is better",
        ("length", "model", "perplexity", "gain"),
        tuple(rows),
    )


def _by_task(results: Results) -> Table:
    """A row per task and variant, a column per length."""
    rows, asked = [], set[int]()
    tasks = [task for own in results["variants"].values() for task in own["retrieval"]]
    for task in dict.fromkeys(tasks):
        first = task
        for label, own in results["variants"].items():
            if task in own["retrieval"]:
                values = values_of(results["variants"][label])
                found = [values.get(f"{task}@{length}") for length in results["lengths"]]
                asked |= {value.n for value in found if value}
                cells = [NOTHING if value is None else f"{value.value:.2f}" for value in found]
                reach = length_text(int(values[f"effective_context.{task}"].value))
                rows.append((first, _row_name(results, label, questions=True), *cells, reach))
                first = ""
    return Table(
        "Retrieval",
        f"{' or '.join(map(str, sorted(asked)))} questions each; {score_text(dict.fromkeys(tasks))}"
        "; effective: longest length at 85 % of the short score",
        ("task", "model", *map(length_text, results["lengths"]), "effective"),
        tuple(rows),
    )


def evaluation_tables(results: Results) -> list[Table]:
    """Everything that an evaluation measured."""
    found = [*text_tables(results), *retrieval_tables(results), harness_table(results)]
    return with_rows(found)


def summary(results: Results) -> Table:
    rows = []
    for label in results["variants"]:
        values = values_of(results["variants"][label])
        if "short_tax" in values:
            reach = values["effective_context"]
            sure = "" if reach.ci95 else " (point)"
            rows.append(
                (
                    _row_name(results, label),
                    shown(values["short_tax"], 4, sign=True),
                    length_text(int(reach.value)) + sure,
                )
            )
    return Table(
        "Inside and outside the trained context",
        "short tax: NLL change inside the trained context, nats per token; effective context: the "
        "longest length up to which the tail stays within 0.02 nats of the base's (95 %, "
        f"one-sided), from the first length of at least {results['tail_tokens']} tokens on; 0: not "
        "even that one",
        ("", "short tax", "effective context"),
        tuple(rows),
    )


def _positions(results: Results) -> Table:
    rows, header = [], tuple[str, ...]()
    for label, variant in results["variants"].items():
        if variant["positions"]:
            header = ("", *(f"{row['start']}…{row['stop']}" for row in variant["positions"]))
            cells = [number(Value.from_json(row["nll"]).value) for row in variant["positions"]]
            rows.append((_row_name(results, label), *cells))
    note = "nats per token at positions [start, stop); octaves split at the trained context"
    return Table("NLL by position", note, header, tuple(rows))


def retrieval_tables(results: Results) -> list[Table]:
    """Per task the share of questions answered, by length; and the mean of RULER's."""
    tasks = dict.fromkeys(
        task for variant in results["variants"].values() for task in variant["retrieval"]
    )
    tables = [_task_table(results, task) for task in tasks]
    if (ruler := results.get("ruler")) is None:
        return tables
    without = f" (not of {', '.join(ruler['left_out'])})" if ruler["left_out"] else ""
    note = (
        f"mean of the {len(ruler['tasks'])} of RULER's thirteen tasks asked at every length"
        f"{without}; {RULERS}; effective: longest length at 85 % of the short score; by RULER's "
        "rule: longest with 85.6 % in all thirteen"
    )
    return [_task_table(results, RULER, "RULER", note), *tables]


def score_text(tasks: Iterable[str]) -> str:
    """What a score of these tasks is."""
    own = list(tasks)
    named = [task for task in own if task == RULER or find_task(task).in_words]
    if not named:
        return "share of questions answered exactly"
    exact = ", ".join(task for task in own if task not in named)
    return (
        "mean share of what a question asks for that the answer names"
        + (f" ({exact}: share of questions answered exactly)" if exact else "")
        + (f"; {RULERS}" if {RULER, *THIRTEEN} & {*named} else "")
    )


def _task_table(results: Results, task: str, title: str = "", note: str = "") -> Table:
    rows, theirs = [], task == RULER
    for label, variant in results["variants"].items():
        values = values_of(results["variants"][label])
        if task in variant["retrieval"] or (theirs and f"effective_context.{task}" in values):
            cells = [share(values.get(f"{task}@{length}")) for length in results["lengths"]]
            cells.append(length_text(int(values[f"effective_context.{task}"].value)))
            rule = values.get("ruler_context")
            cells += [NOTHING if rule is None else length_text(int(rule.value))] if theirs else []
            rows.append((_row_name(results, label, questions=True), *cells))
    header = ["", *(length_text(length) for length in results["lengths"]), "effective"]
    named = task != RULER and find_task(task).in_words
    right = (
        "share of what the questions ask for that greedy decoding names"
        if named
        else "share of questions whose every answer token is the model's first choice"
    )
    note = note or (
        f"{right}, with its 95 % Wilson interval (questions over one "
        "haystack count for fewer where haystacks differ); effective: longest length at 85 % of "
        "the short score" + (f"; {RULERS}" if task in THIRTEEN else "")
    )
    header += ["by RULER's rule"] if theirs else []
    return Table(title or f"Retrieval: {task}", note, tuple(header), tuple(rows))


def share(value: Value | None) -> str:
    """Write a share of answers with its interval."""
    if value is None or value.ci95 is None:
        return NOTHING
    return f"{value.value:.2f} [{value.ci95[0]:.2f}, {value.ci95[1]:.2f}]"


def harness_table(results: Results) -> Table:
    """What lm-evaluation-harness said, as it said it."""
    rows = [
        (label, task, name, number(float(score), 4))
        for label, tasks in results.get("lm_eval", {}).items()
        for task, scores in tasks.items()
        for name, score in scores.items()
        if isinstance(score, int | float) and not isinstance(score, bool)
    ]
    note = "scores of lm-evaluation-harness on the same loaded model"
    return Table("lm-eval", note, ("", "task", "metric", "value"), tuple(rows))


def comparison_tables(compared: Comparison) -> list[Table]:
    """Tails with their winner, and paired differences to the first run."""
    rows = compared.lengths
    labels, lengths = list(rows[0].tail), tuple(length_text(row.length) for row in rows)
    others = [label for label in labels if label != compared.reference]
    names = {label: marked(label, compared.marks.get(label, "")) for label in labels}
    tails = [(names[label], *(shown(row.tail[label]) for row in rows)) for label in labels]
    tails.append(("winner", *(row.winner or NOTHING for row in rows)))
    deltas = [
        (names[label], *(shown(row.difference[label], 4, sign=True) for row in rows))
        for label in others
    ]
    short = [(names[label], shown(compared.short[label], 4, sign=True)) for label in others]
    stride, inside = compared.measured.frame.mask_stride, compared.measured.frame.context
    return [
        Table(
            f"Tail {'pseudo-' if stride else ''}perplexity, {compared.documents} paired documents",
            f"{tail_text(compared.measured.frame.tail, (), stride)}; a winner only where it is "
            "surely below every other one, paired, all comparisons allowed for",
            ("", *lengths),
            tuple(tails),
        ),
        Table(
            f"NLL difference to {compared.reference} (nats per token, paired)",
            "below zero is better than the reference",
            ("", *lengths),
            tuple(deltas),
        ),
        Table(
            f"NLL difference to {compared.reference} inside the trained context",
            f"the tail in windows of {inside}" if stride else f"positions before {inside}",
            ("", "difference"),
            tuple(short),
        ),
    ]


def item_table(runs: Mapping[str, Mapping[str, Value]], reference: str) -> Table:
    """Retrieval differences by task and length, from `item_differences` per label."""
    names = list(dict.fromkeys(name for values in runs.values() for name in values))
    names = [name for name in names if "_nll@" not in name]
    rows = [
        (label, *(shown(values.get(name), 3, sign=True) for name in names))
        for label, values in runs.items()
        if values
    ]
    header = tuple(map(metric_text, names))
    scores = score_text(dict.fromkeys(name.partition("@")[0] for name in names))
    note = f"difference over the same questions; {scores}"
    return Table(f"Retrieval, difference to {reference}", note, ("", *header), tuple(rows))


def verdict_lines(results: Results, label: str = "") -> list[str]:
    """What the numbers say of one variant, or of each that was made to read further."""
    own = results["variants"]
    made = [name for name in own if own[name]["kind"] == "extended"]
    wanted = [label] if label else made or [*own]
    return [line for name in wanted for line in own[name]["verdicts"]]


def ranking_text(
    ranking: Ranking, plans: Mapping[str, "Plan"], left_out: Mapping[str, str], mark: str = ""
) -> str:
    """`ropext plan --measure` as text; `mark` says how many of the documents were trained on."""
    lines = [ranking_verdict(ranking), *_against_base(ranking)]
    lines += [f"not measured: {method}: {why}" for method, why in left_out.items()]
    command = extend_command(plans[ranking.taken])
    return f"{as_text([ranking_table(ranking, mark)], lines)}\n\nto extend with it\n  {command}"


def ranking_table(ranking: Ranking, mark: str = "") -> Table:
    """A row per method, the lowest tail first, the base's short window at the end."""
    rows = [
        (
            own.method + ("*" if own.method == ranking.taken else ""),
            shown(own.tail),
            NOTHING if own is ranking.best else shown(own.behind, 4, sign=True),
            shown(own.gain, 4, sign=True),
            shown(own.short_tax, 4, sign=True),
        )
        for own in ranking.rows
    ]
    if ranking.in_window is not None:
        rows.append(("base", shown(ranking.in_window), *(NOTHING,) * 3))
    return Table(
        f"Tail perplexity at {length_text(ranking.frame.longest)}: the last {ranking.frame.tail} "
        f"tokens, {marked(f'{ranking.standing.documents} documents', mark)}",
        "behind = nats a token above the lowest, paired by document, each interval for itself; "
        "gain = against the base through its short window",
        ("method", "tail", "behind", "context gain", "short tax"),
        tuple(rows),
    )


def ranking_verdict(ranking: Ranking) -> str:
    """Which one to take, and how sure that is."""
    best, others = ranking.best, ranking.rows[1:]
    if not others:
        return f"{best.method} is the only method that can be written as asked"
    second = min(
        others, key=lambda own: -math.inf if own.behind_at_least is None else own.behind_at_least
    )
    if best.behind.ci95 is None:
        return (
            f"take {best.method}, the lowest by {number(second.behind.value, 4)} nats a token: how "
            f"sure that is cannot be said of {ranking.standing.documents} documents"
        )
    if ranking.standing.is_sure:
        return (
            f"take {best.method}: surely the lowest, {_least(second)} below {second.method}"
            f"{_allowed_for(ranking)}"
        )
    if len(ranking.standing.tied) == 1:
        return (
            f"take {best.method}: the lowest, below each other one by more than its interval, but "
            f"not surely below {second.method}: {_least(second)}{_allowed_for(ranking)}"
        )
    alike = ", ".join(ranking.standing.tied)
    if ranking.taken == best.method:
        return (
            f"take {best.method}: the lowest, and of those that cannot be told apart here ({alike})"
            " the one that most loaders read, in the plainest form"
        )
    taken = next(own for own in others if own.method == ranking.taken)
    return (
        f"take {taken.method}: {alike} cannot be told apart here ({_distance(taken)} between it and"
        f" the lowest), and more loaders read it, or its form is plainer"
    )


def _distance(own: Ranked) -> str:
    low, high = own.behind.ci95 or (own.behind.value,) * 2
    return f"{number(own.behind.value, 4)} nats a token ({number(low, 4)} to {number(high, 4)})"


def _least(own: Ranked) -> str:
    least = math.nan if own.behind_at_least is None else own.behind_at_least
    return f"{number(own.behind.value, 4)} nats a token ({number(least, 4)} at least)"


def _allowed_for(ranking: Ranking) -> str:
    count = len(ranking.rows) - 1
    return f", {count} comparisons allowed for" if count > 1 else ""


def _against_base(ranking: Ranking) -> list[str]:
    """Truncation that beats even the best method is said."""
    gain = ranking.best.gain
    if gain is None or gain.ci95 is None or gain.ci95[1] >= 0:
        return []
    return [
        f"truncating beats it untrained: the base that sees only its last "
        f"{length_text(ranking.frame.context)} tokens is {number(-gain.value, 4)} nats a token "
        "lower; fine-tune it (`ropext finetune`) before relying on the long context"
    ]


def extend_command(made: "Plan") -> str:
    """The command line that writes this plan."""
    words = ["ropext", "extend", made.name, "--method", made.method]
    for name, info in Extend.model_fields.items():
        value = getattr(made.recipe, name)
        if name in ("method", "short_pair_factors") or value in (None, False, ()):
            if value is False and info.default is None:
                words.append(f"--no-{flag(name).removeprefix('--')}")
            continue
        words.append(flag(name))
        if name == "pair_factors":
            words.append("FILE")
        elif isinstance(value, tuple):
            words.append(",".join(map(str, value)))
        elif value is not True:
            words.append(f"{value:.15g}" if isinstance(value, float) else str(value))
    return shlex.join([*words, "-o", "OUT"])
