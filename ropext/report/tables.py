"""What was measured, as tables and sentences: of an evaluation, a comparison, a ranking."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from ropext.lengths import length_text
from ropext.report.text import extend_command
from ropext.results import BASE, UNTOUCHED
from ropext.results.gates import metric_text
from ropext.results.measurement import Discordance
from ropext.results.overlap import mark_of, marked
from ropext.results.retrieval import FOUND, RULERS
from ropext.results.rules import Comparison, Ranked, Ranking, in_memory
from ropext.results.values import Value, values_of
from ropext.table import Table, as_text, with_rows
from ropext.tasks import RULER, THIRTEEN, find_task

if TYPE_CHECKING:
    from ropext.planning import Plan

Results = Mapping[str, Any]
BLANK = "-"
SKEWED = 0.2  # an interval whose ends differ by more in their distance is printed by its ends
HALF = "±: half of the 95 % interval over documents; [low, high]: a skewed one; (low…high): a range"


def number(value: float, digits: int = 3) -> str:
    """Plain where it fits, with an exponent where a perplexity exploded."""
    if math.isnan(value):
        return "?"
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    text = f"{value:.{digits}f}" if abs(value) < 10000 else f"{value:.2e}"
    return text if float(text) else text.removeprefix("-")


def shown(value: Value | None, digits: int = 3, sign: bool = False) -> str:
    """`8.412 ±0.103` with an interval, `8.412 [8.1, 8.9]` where that is skewed, `8.412 (8.1…8.9)`
    with a range only."""
    if value is None or value.n == 0:
        return BLANK
    text = number(value.value, digits)
    if sign and value.value > 0 and float(text):
        text = f"+{text}"
    if value.ci95 is not None:
        below = value.value - value.ci95[0]
        above = value.ci95[1] - value.value
        half = (below + above) / 2
        ends = [number(end, digits) for end in value.ci95]
        even = [number(value.value + side * half, digits) for side in (-1, 1)]
        if abs(above - below) > SKEWED * min(below, above) and ends != even:
            return f"{text} [{', '.join(ends)}]"
        return f"{text} ±{number(half, digits)}"
    if value.range is not None and value.n > 1:
        low, high = (number(end, digits) for end in value.range)
        return f"{text} ({low}…{high})"
    return text


def point(value: Value | None, digits: int = 3) -> str:
    """Write a number without its interval."""
    return BLANK if value is None else number(value.value, digits)


def length_of(value: Value | None) -> str:
    """Write a length that was reached."""
    return BLANK if value is None else length_text(int(value.value))


def share(value: Value | None) -> str:
    """Write a share of answers with its interval."""
    if value is None or value.ci95 is None:
        return BLANK
    return f"{value.value:.2f} [{value.ci95[0]:.2f}, {value.ci95[1]:.2f}]"


nats = partial(shown, digits=4, sign=True)
Values = Mapping[str, Value | None]
# The head of a column, the name of its value, and how that is written.
Column = tuple[str, str, Callable[[Value | None], str]]


def table_of(
    title: str, note: str, rows: Iterable[tuple[str, Values]], columns: Sequence[Column]
) -> Table:
    """Lay models side by side: a row for each one that has any of the columns' values."""
    cells = [
        (label, *(written(values.get(name)) for _, name, written in columns))
        for label, values in rows
        if any(name in values for _, name, _ in columns)
    ]
    return Table(title, note, ("", *(head for head, _, _ in columns)), tuple(cells))


def _at(name: str, lengths: Iterable[int], written: Callable[[Value | None], str]) -> list[Column]:
    """A column per length."""
    return [(length_text(length), f"{name}@{length}", written) for length in lengths]


def _variants(results: Results, *, questions: bool = False) -> list[tuple[str, dict[str, Value]]]:
    """The numbers of each variant by its name, with the mark of numbers over documents that it was
    trained on."""
    return [
        (marked(label, mark_of(variant, questions=questions)), values_of(variant["metrics"]))
        for label, variant in results["variants"].items()
    ]


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
    titles = {
        "tail": f"Tail {kind}: {tail}",
        "yarn": "Perplexity, protocol yarn (mean over documents of one truncated window)",
        "hf_stride": "Perplexity, protocol hf-stride (windows of the length, over whole documents)",
    }
    name = results["headline"]
    note = "base = the model before extension through its short window, on the same tokens"
    if UNTOUCHED in results["variants"]:
        note += "; untouched = that model, read beyond its window"
    note += f"; {HALF}"
    if name != "tail":
        note = results["protocol_text"]
    return table_of(titles[name], note, _variants(results), _at(name, results["lengths"], shown))


def text_tables(results: Results) -> list[Table]:
    """Everything about text, the headline first."""
    lengths = results["lengths"]
    variants = _variants(results)
    gain = table_of(
        "Context gain (nats per token)",
        "NLL of the base through its short window minus NLL of this model, on the same tokens; "
        "below zero, truncating the text beats the long context",
        variants,
        _at("gain", lengths, nats),
    )
    cumulative = table_of(
        "Cumulative perplexity (over all tokens before each length)",
        "what most papers print; it averages early tokens in and hides failures at the end",
        variants,
        _at("cumulative", lengths, shown),
    )
    columns = _at("bpb", lengths, partial(shown, digits=4))
    per_byte = table_of("Bits per byte", "comparable across tokenizers", variants, columns)
    whole = [gain, summary(results), cumulative, per_byte, _positions(results)]
    return [headline(results), by_factor(results), *whole]


def summary(results: Results) -> Table:
    """What an extension costs inside the trained context, and how far it reaches."""
    return table_of(
        "Inside and outside the trained context",
        "short tax: NLL change inside the trained context, nats per token; effective context: the "
        "longest length up to which the tail stays within 0.02 nats of the base's (95 %, "
        f"one-sided), from the first length of at least {results['tail_tokens']} tokens on; 0: not "
        "even that one",
        _variants(results),
        [("short tax", "short_tax", nats), ("effective context", "effective_context", _reach)],
    )


def _reach(value: Value | None) -> str:
    return length_of(value) + ("" if value is None or value.ci95 else " (point)")


def main_tables(results: Results) -> list[Table]:
    """What a terminal shows of an evaluation: one table. The rest is in `evaluation_tables`."""
    grid = by_factor(results)
    return with_rows([grid if grid.rows else _by_length(results), harness_table(results)])


def by_factor(results: Results) -> Table:
    """Methods by factors, each at its own target, where several factors were read."""
    variants = results["variants"].values()
    rows = dict[str, dict[str, Value]]()
    columns = list[Column]()
    made = sorted((v["factor"], v["target"]) for v in variants if v.get("factor"))
    for factor, target in dict(made).items() if made and made[0] < made[-1] else ():
        (_, tail, written), *others = _at_length(results, target)
        at_target = [(f"{factor:g}x ({length_text(target)})", tail, written), *others]
        for variant, (label, values) in zip(variants, _variants(results), strict=True):
            if variant.get("factor") in (None, factor):
                row = rows.setdefault(marked(variant.get("method") or label, mark_of(variant)), {})
                row |= {name: values[name] for _, name, _ in at_target if name in values}
        columns += at_target
    title = f"{_measured(results)[0].capitalize()} by method and factor, each at its own target"
    return table_of(
        title, _explained(results, [head for head, _, _ in columns]), rows.items(), columns
    )


def _by_length(results: Results) -> Table:
    """A row per length and variant."""
    rows = list[tuple[str, ...]]()
    lengths = results["lengths"]
    inside = results["context"] if results["context"] in lengths else lengths[0]
    for length in lengths:
        tax: Column = ("short tax", "short_tax" if length == inside else "", nats)
        columns = [*_at_length(results, length), tax]
        group = table_of("", "", _variants(results), columns).rows
        # The first row alone names it.
        rows += [("" if place else length_text(length), *row) for place, row in enumerate(group)]
    header = ("length", "model", *(head for head, _, _ in columns))
    kept = [place for place, cells in enumerate(zip(*rows, strict=True)) if {*cells} != {BLANK}]
    head, *body = (tuple(row[place] for place in kept) for row in (header, *rows))
    kind, tail = _measured(results)
    title = f"Perplexity, protocol {results['protocol']}"
    if results["headline"] == "tail":
        title = f"{kind.capitalize()} of {tail}" if "perplexity" in head else "Retrieval"
    return Table(title, _explained(results, head), head, tuple(body))


def _at_length(results: Results, length: int) -> list[Column]:
    """The columns of a length: perplexity, gain, and each task."""
    name = results["headline"]
    columns: list[Column] = [
        ("perplexity", f"{name}@{length}", point),
        ("gain", f"gain@{length}", nats),
    ]
    score = partial(point, digits=2)
    return [*columns, *((task, f"{task}@{length}", score) for task in _asked(results))]


def _asked(results: Results) -> list[str]:
    """The tasks that have a column: more than three of RULER's share that of their mean."""
    tasks = _tasks(results)
    others = [task for task in tasks if task not in THIRTEEN]
    return [*others, RULER] if len(tasks) - len(others) > 3 and "ruler" in results else tasks


def _explained(results: Results, columns: Iterable[str]) -> str:
    """What the columns of the one table are, a line for each."""
    tasks = _asked(results)
    context = length_text(results["context"])
    gain = (
        f"gain: nats per token by which a model predicts these tokens better than base, the model "
        f"before its extension, does from the last {context} tokens; below 0, truncating is better"
    )
    tax = f"short tax: nats per token that a model loses inside the trained context of {context}"
    lines = [gain] * ("gain" in columns) + [tax] * ("short tax" in columns)
    lines += [HALF] if lines else []
    if tasks:
        metrics = chain(*(values.items() for _, values in _variants(results)))
        counts = {value.n for name, value in metrics if name.partition("@")[0] in tasks}
        of = " or ".join(map(str, sorted(counts)))
        lines.append(f"{', '.join(tasks)}: {score_text(tasks)}, of {of} questions")
    return "\n".join(lines)


def _tasks(results: Results) -> list[str]:
    variants = results["variants"].values()
    return [*dict.fromkeys(task for variant in variants for task in variant["retrieval"])]


def evaluation_tables(results: Results) -> list[Table]:
    """Everything that an evaluation measured."""
    every = [*text_tables(results), *retrieval_tables(results), harness_table(results)]
    return with_rows(every)


def _positions(results: Results) -> Table:
    rows = []
    columns = dict[str, Column]()
    for label, variant in results["variants"].items():
        values = {f"{at['start']}…{at['stop']}": at["nll"] for at in variant["positions"]}
        columns |= {name: (name, name, point) for name in values}
        named = {name: Value.from_json(value) for name, value in values.items()}
        rows.append((marked(label, mark_of(variant)), named))
    note = "nats per token at positions [start, stop); octaves split at the trained context"
    return table_of("NLL by position", note, rows, [*columns.values()])


def retrieval_tables(results: Results) -> list[Table]:
    """Per task the share of questions answered, by length; and the mean of RULER's."""
    tables = [_task_table(results, task) for task in _tasks(results)]
    if (ruler := results.get("ruler")) is None:
        return tables
    without = f" (not of {', '.join(ruler['left_out'])})" if ruler["left_out"] else ""
    note = (
        f"mean of the {len(ruler['tasks'])} of RULER's thirteen tasks asked at every length"
        f"{without}; {RULERS}; effective: longest length at 85 % of the short score; by RULER's "
        "rule: longest with 85.6 % in all thirteen"
    )
    columns = [*_retrieved(results, RULER), ("by RULER's rule", "ruler_context", length_of)]
    return [table_of("RULER", note, _variants(results, questions=True), columns), *tables]


def score_text(tasks: Iterable[str]) -> str:
    """What a score of these tasks is."""
    names = list(tasks)
    if FOUND in names:  # a server was asked, in words
        return "mean share of what a question asks for that the answer names"
    named = [task for task in names if task == RULER or find_task(task).in_words]
    if not named:
        return "share of questions answered exactly"
    exact = ", ".join(task for task in names if task not in named)
    return (
        "mean share of what a question asks for that the answer names"
        + (f" ({exact}: share of questions answered exactly)" if exact else "")
        + (f"; {RULERS}" if {RULER, *THIRTEEN} & {*named} else "")
    )


def _retrieved(results: Results, task: str) -> list[Column]:
    effective: Column = ("effective", f"effective_context.{task}", length_of)
    return [*_at(task, results["lengths"], share), effective]


def _task_table(results: Results, task: str) -> Table:
    right = "share of questions whose every answer token is the model's first choice"
    if find_task(task).in_words:
        right = "share of what the questions ask for that greedy decoding names"
    note = (
        f"{right}, with its 95 % Wilson interval (questions over one "
        "haystack count for fewer, by how alike they are); effective: longest length at 85 % of "
        "the short score" + (f"; {RULERS}" if task in THIRTEEN else "")
    )
    variants = _variants(results, questions=True)
    return table_of(f"Retrieval: {task}", note, variants, _retrieved(results, task))


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
    stride = compared.measured.frame.mask_stride
    values: dict[str, dict[str, Value]] = {
        label: {f"tail@{row.length}": row.tail[label] for row in rows} for label in rows[0].tail
    }
    for label, short in compared.short.items():
        values[label] |= {f"behind@{row.length}": row.difference[label] for row in rows}
        values[label]["short"] = short
    models = [(marked(label, compared.marks.get(label, "")), v) for label, v in values.items()]
    lengths = [row.length for row in rows]
    tails = table_of(
        f"Tail {'pseudo-' if stride else ''}perplexity, {compared.documents} paired documents",
        f"{tail_text(compared.measured.frame.tail, (), stride)}; a winner only where it is "
        "surely below every other one, paired, all comparisons allowed for",
        models,
        _at("tail", lengths, shown),
    )
    winners = ("winner", *(row.winner or BLANK for row in rows))
    inside = compared.measured.frame.context
    return [
        replace(tails, rows=(*tails.rows, winners)),
        table_of(
            f"NLL difference to {compared.reference} (nats per token, paired)",
            "below zero is better than the reference",
            models,
            _at("behind", lengths, nats),
        ),
        table_of(
            f"NLL difference to {compared.reference} inside the trained context",
            f"the tail in windows of {inside}" if stride else f"positions before {inside}",
            models,
            [("difference", "short", nats)],
        ),
    ]


def item_table(runs: Mapping[str, Mapping[str, Value]], reference: str) -> Table:
    """Retrieval differences by task and length, from `item_differences` per label."""
    names = [name for name in dict.fromkeys(chain(*runs.values())) if "_nll@" not in name]
    scores = score_text(dict.fromkeys(name.partition("@")[0] for name in names))
    note = f"difference over the same questions; {scores}"
    columns: list[Column] = [(metric_text(name), name, partial(shown, sign=True)) for name in names]
    return table_of(f"Retrieval, difference to {reference}", note, runs.items(), columns)


def discordance_table(
    runs: Mapping[str, Mapping[tuple[str, int], Discordance]], reference: str
) -> Table:
    """How many texts one of two servers reads better, and how likely so uneven a split is."""
    rows = list[tuple[str, ...]]()
    for label, places in runs.items():
        for (task, length), one in places.items():
            counts = [str(one.more), str(one.fewer), str(one.alike)]
            rows.append((label, task, length_text(length), *counts, f"{one.p:.3f}"))
    header = ("", "task", "length", "found more", "found fewer", "as many", "p")
    note = (
        "texts, each with its questions together; p: exact sign test (McNemar's, where a text has "
        "one question)"
    )
    return Table(f"Text by text, against {reference}", note, header, tuple(rows))


def verdict_lines(results: Results, label: str = "") -> list[str]:
    """What the numbers say of one variant, or of each that was made to read further."""
    variants = results["variants"]
    made = [name for name in variants if variants[name]["kind"] == "extended"]
    wanted = [label] if label else made or [*variants]
    return [line for name in wanted for line in variants[name]["verdicts"]]


def ranking_text(
    ranking: Ranking, plans: Mapping[str, "Plan"], left_out: Mapping[str, str], mark: str = ""
) -> str:
    """`ropext plan --measure` as text; `mark` says how many of the documents were trained on."""
    lines = [ranking_verdict(ranking), *_against_base(ranking)]
    lowest = ranking.best.method
    lines += [in_memory(one.method, one.behind, lowest) for one in ranking.beside]
    lines += [f"not measured: {method}: {why}" for method, why in left_out.items()]
    command = extend_command(plans[ranking.taken])
    return f"{as_text([ranking_table(ranking, mark)], lines)}\n\nto extend with it\n  {command}"


def ranking_table(ranking: Ranking, mark: str = "") -> Table:
    """A row per method, the lowest tail first, the base's short window at the end."""
    rows: list[tuple[str, Values]] = []
    for ranked in ranking.rows:
        behind = None if ranked is ranking.best else ranked.behind
        star = "*" if ranked.method == ranking.taken else ""
        rows.append((ranked.method + star, vars(ranked) | {"behind": behind}))
    rows += [(ranked.method, vars(ranked)) for ranked in ranking.beside]
    if ranking.in_window is not None:
        rows.append((BASE, {"tail": ranking.in_window}))
    table = table_of(
        f"Tail perplexity at {length_text(ranking.frame.longest)}: the last {ranking.frame.tail} "
        f"tokens, {marked(f'{ranking.standing.documents} documents', mark)}",
        "behind = nats a token above the lowest, paired by document, each interval for itself; "
        "gain = against the base through its short window",
        rows,
        RANKED,
    )
    return replace(table, header=("method", *table.header[1:]))


RANKED: tuple[Column, ...] = (
    ("tail", "tail", shown),
    ("behind", "behind", nats),
    ("context gain", "gain", nats),
    ("short tax", "short_tax", nats),
)


def ranking_verdict(ranking: Ranking) -> str:
    """Which one to take, and how sure that is."""
    best = ranking.best
    others = ranking.rows[1:]
    if not others:
        return f"{best.method} is the only method that can be written as asked"
    second = min(
        others, key=lambda r: -math.inf if r.behind_at_least is None else r.behind_at_least
    )
    if best.behind.ci95 is None:
        return (
            f"take {best.method}, the lowest by {number(second.behind.value, 4)} nats a token; "
            f"{ranking.standing.documents} documents are too few to say how sure that is"
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
    behind = next(ranked.behind for ranked in others if ranked.method == ranking.taken)
    value, low, high = (
        number(end, 4) for end in (behind.value, *(behind.ci95 or (behind.value,) * 2))
    )
    return (
        f"take {ranking.taken}: {alike} cannot be told apart here ({value} nats a token ({low} to "
        f"{high}) between it and the lowest), and more loaders read it, or its form is plainer"
    )


def _least(ranked: Ranked) -> str:
    least = math.nan if ranked.behind_at_least is None else ranked.behind_at_least
    return f"{number(ranked.behind.value, 4)} nats a token ({number(least, 4)} at least)"


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
