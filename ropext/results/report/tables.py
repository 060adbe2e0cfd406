"""Lay out the results of an evaluation as tables and sentences."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ropext.base.lengths import length_text
from ropext.base.table import BLANK, Number, Table, with_rows
from ropext.results import BASE, EXTENDED, FOUND, RULER_CONTEXT, UNTOUCHED
from ropext.results.measurement import MeasuredModel, Measurement
from ropext.results.overlap import marked_name
from ropext.results.perplexity import LossStatistics, OctaveLoss
from ropext.results.report.cells import (
    HALF,
    Column,
    Written,
    columns_at_lengths,
    fixed_digits,
    length_cell,
    nats_cell,
    point_cell,
    share_cell,
    table_of_values,
    two_digit_point_cell,
    value_cell,
)
from ropext.results.retrieval import RULERS
from ropext.results.values import Value
from ropext.tasks import RULER, THIRTEEN, is_in_words

NO_SCALING = "untouched (no scaling): the model before extension, beyond its context"
MOST_RULER_COLUMNS = 3  # more of RULER's tasks share the column of their mean


@dataclass(frozen=True)
class MainColumn:
    """A column of the main table in a terminal: its head, the metric of its values, the function
    that writes a value, and an explanation for the reader."""

    head: str
    metric: str  # "" is the metric of the protocol
    written: Written
    meaning: str = ""  # `{context}` is the trained context
    by_factor: bool = True  # whether the table by factor has it too
    whole: bool = False  # one number for all lengths

    def name(self, run: Measurement, length: int) -> str:
        """Return the name in results.json of the number at a length. A number for all lengths has a
        name at one length only: the trained context, or the shortest length if the context was not
        measured. It is "" at all others."""
        if not self.whole:
            return f"{self.metric or run.facts.headline}@{length}"
        lengths = run.frame.lengths
        inside = lengths[0]
        if run.frame.context in lengths:
            inside = run.frame.context
        return self.metric if length == inside else ""


# The tasks' columns come before the columns that the table by factor leaves out.
MAIN_COLUMNS = (
    MainColumn("perplexity", "", point_cell),
    MainColumn(
        "gain",
        "gain",
        nats_cell,
        "how much better a model predicts these tokens than base (the model before extension, on "
        "text truncated to {context} tokens), in nats per token: 0.03 nats is about 3 % of "
        "perplexity; below 0, truncating the text is better",
    ),
    MainColumn(
        "short tax",
        "short_tax",
        nats_cell,
        "loss increase inside the trained context of {context} tokens, in nats per token",
        by_factor=False,
        whole=True,
    ),
    MainColumn(
        "rounding",
        "rounding",
        nats_cell,
        "loss increase because the KV cache is rounded, in nats per token",
        by_factor=False,
    ),
    MainColumn(
        "KL",
        "kl",
        point_cell,
        "KL divergence from the base's next-token distribution to this model's, in nats per token",
        by_factor=False,
    ),
    MainColumn(
        "same choice",
        "agreement",
        two_digit_point_cell,
        "share of tokens whose likeliest next token is the base's",
        by_factor=False,
    ),
)


def _model_rows(run: Measurement, *, questions: bool = False) -> list[tuple[str, dict[str, Value]]]:
    """Return the rows of an evaluation's table: the numbers of each model by its name, with the
    mark of numbers over documents that it was trained on."""
    rows = list[tuple[str, dict[str, Value]]]()
    for label, model in run.models.items():
        name = marked_name(label, model.mark(questions=questions))
        rows.append((name, run.values(label)))
    return rows


def tail_description(frame: LossStatistics) -> str:
    """Say in a table's title which tokens are in the tail before each length."""
    return frame.scoring.tail_text(frame.tail, frame.lengths)


def headline_table(run: Measurement) -> Table:
    """Return the report's table of the protocol's main number."""
    titles = {
        "tail": f"Tail {run.frame.scoring.perplexity}: {tail_description(run.frame)}",
        "yarn": "Perplexity, protocol yarn (mean over documents of one truncated window)",
        "hf_stride": "Perplexity, protocol hf-stride (windows of the length, over whole documents)",
    }
    name = run.facts.headline
    note = "base: the model before extension, on text truncated to its context; the same tokens"
    if UNTOUCHED in run.models:
        note += f"; {NO_SCALING}"
    note += f"; {HALF}"
    if name != "tail":
        note = run.facts.protocol_text
    return _metric_table(run, titles[name], note, name)


def text_tables(run: Measurement) -> list[Table]:
    """Return all tables of an evaluation's report about text, the headline first."""
    return [
        headline_table(run),
        factor_table(run),
        _metric_table(
            run,
            "Gain over truncation (nats per token)",
            "loss of the base on truncated text minus loss of this model, on the same tokens; "
            "below 0, truncating the text is better",
            "gain",
            nats_cell,
        ),
        summary_table(run),
        _metric_table(
            run,
            "Cumulative perplexity (over all tokens before each length)",
            "most papers print this; it includes early tokens and hides failures at the end",
            "cumulative",
        ),
        _metric_table(
            run, "Bits per byte", "comparable across tokenizers", "bpb", _four_digit_cell
        ),
        _metric_table(
            run,
            "Loss increase because the KV cache is rounded (nats per token)",
            "loss of the model with its K and V rounded as an engine stores them, minus the loss "
            "of the same model without rounding, on the same tokens",
            "rounding",
            nats_cell,
        ),
        _metric_table(
            run,
            "Divergence from the base (nats per token)",
            "KL(base || model) of the next token, the base on truncated text, over the last "
            f"{run.frame.tail} tokens before each length; beyond its context the base sees less "
            "text",
            "kl",
            _four_digit_cell,
        ),
        _metric_table(
            run,
            "Same choice of the next token as the base (share of tokens)",
            "over the same tokens",
            "agreement",
        ),
        _position_table(run),
    ]


def _metric_table(
    run: Measurement, title: str, note: str, metric: str, written: Written = value_cell
) -> Table:
    """Return the report's table of one metric of text: a row for each model, a column for each
    length."""
    columns = columns_at_lengths(metric, run.frame.lengths, written)
    return table_of_values(title, note, _model_rows(run), columns)


def _four_digit_cell(value: Value | None) -> str:
    """Write a value with four digits as a table's cell."""
    return value_cell(value, digits=4)


def summary_table(run: Measurement) -> Table:
    """Return the report's table of an extension's costs inside the trained context and of its
    effective context."""
    return table_of_values(
        "Inside and outside the trained context",
        "short tax: loss increase inside the trained context, in nats per token; effective "
        f"context: the tail loss stays within 0.02 nats of the base's (95 %, one-sided) at every "
        f"length from {run.frame.tail} tokens up to this one; 0: at no length",
        _model_rows(run),
        [
            Column("short tax", "short_tax", nats_cell),
            Column("effective context", "effective_context", _effective_context_cell),
        ],
    )


def _effective_context_cell(value: Value | None) -> str:
    """Write an effective context as a table's cell, with a remark if it has no interval."""
    text = length_cell(value)
    if value is not None and value.ci95 is None:
        text += " (point)"
    return text


def main_tables(run: Measurement) -> list[Table]:
    """Return the tables for a terminal: one, and the scores of lm-evaluation-harness if there are
    any. `evaluation_tables` has the rest."""
    main = factor_table(run)
    if not main.rows:
        main = _length_table(run)
    return with_rows([main, harness_table(run)])


def tidy_tables(run: Measurement) -> list[Table]:
    """Return the tables of an evaluation for programs: always a row for each length and model."""
    return with_rows([_length_table(run), harness_table(run)])


def table_of_every_number(run: Measurement) -> list[Table]:
    """Return all measured numbers for programs. A row holds one number of one model, by the name
    that gates use, or one score of lm-evaluation-harness."""
    rows = list[tuple[str, ...]]()
    for label, model in run.models.items():
        name = marked_name(label, model.mark())
        for metric, value in run.values(label).items():
            kind, _, length = metric.partition("@")
            end = Number(length, int(length)) if length else BLANK
            rows.append((kind, BLANK, end, name, _number_cell(value)))
        for octave in _octave_losses(model):
            begin = Number(str(octave.start), octave.start)
            end = Number(str(octave.stop), octave.stop)
            rows.append(("nll", begin, end, name, _number_cell(octave.nll)))
    for label, task, score_name, score in _harness_scores(run):
        metric = f"lm_eval.{task}.{score_name}"
        rows.append((metric, BLANK, BLANK, label, Number(fixed_digits(score), score)))
    header = ("metric", "from", "length", "model", "value")
    return with_rows([Table("Every number", "", header, tuple(rows))])


def _number_cell(value: Value) -> str:
    """Return a value as a cell that keeps the number and its interval."""
    if value.n == 0:
        return BLANK
    return Number(fixed_digits(value.value), value.value, value.ci95)


def factor_table(run: Measurement) -> Table:
    """Return a table of methods by factors, each at its own target. It is empty if
    `_factor_targets` finds no two factors to show."""
    rows = dict[str, dict[str, Value]]()
    columns = list[Column]()
    for factor, target in _factor_targets(run).items():
        at_target = _main_columns(run, target, by_factor=True)
        head = f"{factor:g}x ({length_text(target)})"
        at_target[0] = Column(head, at_target[0].name, at_target[0].written)
        for label, model in run.models.items():
            if model.source.factor in (None, factor):
                name = marked_name(model.source.method or label, model.mark())
                row = rows.setdefault(name, {})
                values = run.values(label)
                for column in at_target:
                    if column.name in values:
                        row[column.name] = values[column.name]
        columns += at_target
    kind = run.frame.scoring.perplexity.capitalize()
    title = f"{kind} by method and factor, each at its own target"
    heads = [column.head for column in columns]
    return table_of_values(title, _column_notes(run, heads), rows.items(), columns)


def _factor_targets(run: Measurement) -> dict[float, int]:
    """Return the target of each factor. Return nothing if all extended models have one factor and
    target, or if a target is not among the measured lengths."""
    extended = list[tuple[float, int]]()
    for model in run.models.values():
        source = model.source
        if source.factor and source.target is not None:
            extended.append((source.factor, source.target))
    extended.sort()
    is_one = not extended or extended[0] == extended[-1]
    if is_one or any(target not in run.frame.lengths for _, target in extended):
        return {}
    return dict(extended)


def _length_table(run: Measurement) -> Table:
    """Return a table with a row for each length and model; leave out empty columns."""
    rows = list[tuple[str, ...]]()
    header = list[str]()
    for length in run.frame.lengths:
        columns = _main_columns(run, length)
        header = ["length", "model"]
        header += [column.head for column in columns]
        name = length_text(length)
        for cells in table_of_values("", "", _model_rows(run), columns).rows:
            rows.append((Number(name, length), *cells))
            name = ""  # the first row alone shows the length
    kept = list[int]()
    for place in range(len(header)):
        if any(row[place] != BLANK for row in rows):
            kept.append(place)
    head = tuple(header[place] for place in kept)
    body = tuple(tuple(row[place] for place in kept) for row in rows)
    title = f"Perplexity, protocol {run.facts.protocol}"
    if run.facts.headline == "tail":
        title = "Retrieval"
        if "perplexity" in head:
            title = f"{run.frame.scoring.perplexity.capitalize()} of {tail_description(run.frame)}"
    return Table(title, _column_notes(run, head), head, body)


def _main_columns(run: Measurement, length: int, *, by_factor: bool = False) -> list[Column]:
    """Return the columns of a length: perplexity, gain, each task, the short tax."""
    columns = list[Column]()
    last = list[Column]()
    for main in MAIN_COLUMNS:
        column = Column(main.head, main.name(run, length), main.written)
        if main.by_factor:
            columns.append(column)
        elif not by_factor:
            last.append(column)
    for task in _asked_tasks(run):
        columns.append(Column(task, f"{task}@{length}", two_digit_point_cell))
    return columns + last


def _asked_tasks(run: Measurement) -> list[str]:
    """Return the retrieval tasks that have a column in the main table."""
    tasks = run.tasks
    others = [task for task in tasks if task not in THIRTEEN]
    of_ruler = len(tasks) - len(others)
    if of_ruler > MOST_RULER_COLUMNS and run.facts.ruler is not None:
        others.append(RULER)
        return others
    return tasks


def _column_notes(run: Measurement, columns: Sequence[str]) -> str:
    """Explain the columns of the main table, a line for each."""
    tasks = _asked_tasks(run)
    context = length_text(run.frame.context)
    lines = list[str]()
    for main in MAIN_COLUMNS:
        if main.meaning and main.head in columns:
            lines.append(f"{main.head}: {main.meaning.format(context=context)}")
    if lines:
        lines.append(HALF)
    if UNTOUCHED in run.models:
        lines.insert(0, NO_SCALING)
    if tasks:
        counts = " or ".join(map(str, _question_counts(run, tasks)))
        line = f"{', '.join(tasks)}: {score_text(tasks)}, of {counts} questions"
        if _is_asked_truncated(run):
            line += f"; base: the same questions, their text truncated to {context} tokens"
        lines.append(line)
    return "\n".join(lines)


def _is_asked_truncated(run: Measurement) -> bool:
    """Return whether items.jsonl has answers of the base; runs until November 2026 did not ask
    it."""
    return any(run.models[label].items for label in run.labels(BASE))


def _question_counts(run: Measurement, tasks: Sequence[str]) -> list[int]:
    """Return the numbers of questions of these tasks' shares, each once, the fewest first, for the
    note of the main table."""
    counts = set[int]()
    for label in run.models:
        for name, value in run.values(label).items():
            if name.partition("@")[0] in tasks:
                counts.add(value.n)
    return sorted(counts)


def evaluation_tables(run: Measurement) -> list[Table]:
    """Return all tables of an evaluation's report."""
    every = text_tables(run) + retrieval_tables(run)
    every.append(harness_table(run))
    return with_rows(every)


def _position_table(run: Measurement) -> Table:
    """Return the report's table of loss by position."""
    rows = list[tuple[str, Mapping[str, Value]]]()
    columns = dict[str, Column]()
    for label, model in run.models.items():
        values = dict[str, Value]()
        for octave in _octave_losses(model):
            name = f"{octave.start}…{octave.stop}"
            values[name] = octave.nll
            columns[name] = Column(name, name, point_cell)
        rows.append((marked_name(label, model.mark()), values))
    note = "nats per token at positions [start, stop); octaves, split at the trained context"
    return table_of_values("Loss by position", note, rows, list(columns.values()))


def _octave_losses(model: MeasuredModel) -> Sequence[OctaveLoss]:
    """Return the losses of a model by position, as results.json holds them."""
    return () if model.numbers is None else model.numbers.positions


def retrieval_tables(run: Measurement) -> list[Table]:
    """Return the report's tables of the share of questions answered, per task and by length; and of
    the mean of RULER's tasks."""
    tables = [_task_table(run, task) for task in run.tasks]
    ruler = run.facts.ruler
    if ruler is None:
        return tables
    without = ""
    if ruler.left_out:
        without = f" (without {', '.join(ruler.left_out)})"
    note = (
        f"mean of the {len(ruler.tasks)} of RULER's thirteen tasks that ran at every "
        f"length{without}; {RULERS}; effective: the longest length with 85 % of the score inside "
        "the context; by RULER's rule: the longest with 85.6 % over all thirteen"
    )
    columns = _task_columns(run, RULER)
    columns.append(Column("by RULER's rule", RULER_CONTEXT, length_cell))
    mean = table_of_values("RULER", note, _model_rows(run, questions=True), columns)
    tables.insert(0, mean)
    return tables


def score_text(tasks: Iterable[str]) -> str:
    """Write for a table's note in a report how it scores these retrieval tasks."""
    names = list(tasks)
    share_named = "mean share of the asked items that the answer names"
    if FOUND in names:  # a server's answers, in words
        return share_named
    in_words = [task for task in names if task == RULER or is_in_words(task)]
    if not in_words:
        return "share of questions answered exactly"
    text = share_named
    exact = [task for task in names if task not in in_words]
    if exact:
        text += f" ({', '.join(exact)}: share of questions answered exactly)"
    if any(task == RULER or task in THIRTEEN for task in in_words):
        text += f"; {RULERS}"
    return text


def _task_columns(run: Measurement, task: str) -> list[Column]:
    """Return the columns of a retrieval task: its share at each length, and its effective
    context."""
    columns = columns_at_lengths(task, run.frame.lengths, share_cell)
    columns.append(Column("effective", f"effective_context.{task}", length_cell))
    return columns


def _task_table(run: Measurement, task: str) -> Table:
    """Return the report's table of one retrieval task."""
    right = "share of questions for which every answer token is the model's first choice"
    if is_in_words(task):
        right = "share of the asked items that greedy decoding names"
    note = (
        f"{right}, with its 95 % Wilson interval (questions over one "
        "haystack count less, by how similar they are); effective: the longest length with 85 % of "
        "the score inside the context"
    )
    if _is_asked_truncated(run):
        note += "; base: the same questions, their text truncated to its context"
    if task in THIRTEEN:
        note += f"; {RULERS}"
    rows = _model_rows(run, questions=True)
    return table_of_values(f"Retrieval: {task}", note, rows, _task_columns(run, task))


def harness_table(run: Measurement) -> Table:
    """Return the table of lm-evaluation-harness's scores under its own names."""
    rows = list[tuple[str, ...]]()
    for label, task, name, score in _harness_scores(run):
        rows.append((label, task, name, fixed_digits(score, 4)))
    note = "scores of lm-evaluation-harness on the same loaded model"
    return Table("lm-eval", note, ("", "task", "metric", "value"), tuple(rows))


def _harness_scores(run: Measurement) -> Iterator[tuple[str, str, str, float]]:
    """Yield the scores of lm-evaluation-harness, each with its model, task and name."""
    for label, tasks in (run.facts.lm_eval or {}).items():
        for task, scores in tasks.items():
            for name, score in scores.items():
                if isinstance(score, int | float) and not isinstance(score, bool):
                    yield label, task, name, float(score)


def verdict_lines(run: Measurement, label: str = "") -> list[str]:
    """Return the verdicts in results.json about one model, or about each extended model."""
    labels = [label]
    if not label:
        labels = run.labels(EXTENDED) or list(run.models)
    lines = list[str]()
    for name in labels:
        numbers = run.models[name].numbers
        if numbers is not None:
            lines += numbers.verdicts
    return lines
