"""Run one evaluation of a server: ask the questions, keep the answers, write the results.

A stopped run resumes question by question.
"""

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ropext.base import workdir
from ropext.base.errors import Interrupted, NothingKept, OutputExists, UsageError
from ropext.base.jsontext import digest, read_values
from ropext.base.lengths import length_text, tail_tokens
from ropext.base.narration import NOBODY, Call, Hooks, duration
from ropext.base.workdir import STORES, Workdir
from ropext.endpoint.answers import (
    Answer,
    TruncatedLengths,
    answered,
    cuts_by_usage,
    lost_its_start,
    scored,
)
from ropext.endpoint.counting import Count
from ropext.endpoint.plan import CUT, PORT, PortPlan
from ropext.endpoint.port import Port
from ropext.endpoint.questions import Question, build, counts_of, cut, cut_alike
from ropext.endpoint.shares import Scores, port_numbers
from ropext.options.tasks.item import NOUNS, derived_rng
from ropext.results import BASE, EXTENDED, rundir
from ropext.results.measurement import MeasuredModel, Measurement, Store
from ropext.results.numbers import EvaluationFacts, ModelSource
from ropext.results.perplexity import EvaluationSettings, TokenNll
from ropext.results.retrieval import REFUSED, TRUNCATED, ItemScore
from ropext.results.values import Bootstrap

AGAIN = 3  # kept questions to ask again before using their answers
ANOTHER = "another model answers; give another -o, or --force"
WITNESS = 64  # tokens for the question about the first word
SHORT_TEXT = 4  # times shorter than the shortest length: a text whose first word is in reach
LOST_START = "it cannot repeat the first word of the text, and answers what comes later"
UNSEEN = (
    "{length}: it is not known whether the server truncated these prompts: no usage shows it, and "
    "the model did not repeat the first word of a text; the share counts every answer"
)
PROBE = 512  # tokens of a prompt whose speed gives an estimate
LEAST_ESTIMATED = 32_768  # tokens; fewer are soon read
NOTHING_KEPT = "interrupted; nothing was kept (-o RUN keeps what is answered)"


@dataclass(frozen=True)
class Kept:
    """The folder that stores questions and answers."""

    folder: Path

    def store(self, name: str, plan: PortPlan) -> Store:
        """Return the files of one row, with a name made from all that decides them."""
        return rundir.variant_store(self.folder, self.store_name(name, plan))

    def store_name(self, name: str, plan: PortPlan) -> str:
        return f"{name}-{digest(plan.decides)[:16]}"


@contextmanager
def _room(output: Path | None) -> Iterator[Path]:
    """Yield the folder of a run; without `output`, a temporary one."""
    if output is not None:
        yield output
        return
    with tempfile.TemporaryDirectory(prefix="ropext-", ignore_cleanup_errors=True) as room:
        yield Path(room) / "run"


def measure_port(
    plan: PortPlan,
    output: Path | None = None,
    call: Call = NOBODY,
    report: Callable[[Measurement], None] = lambda run: None,
) -> Measurement:
    """Ask every question that has no answer yet, and return the measurement. With `output`, its
    files are written there."""
    with _room(output) as room:
        place = plan.workdir(room, call.command)
        if not call.force:
            _check_told(plan, place)
        with place.claimed(call.force, say=call.hooks.say):
            asking = Asking(call.hooks, output, call.force)
            done = _measure(plan, Kept(place.folder), asking)
            if output is not None:
                done = replace(done, path=output)
                report(done)
    return done if output is not None else replace(done, path=None)


def _check_told(plan: PortPlan, place: Workdir) -> None:
    """Raise OutputExists if the answers in a folder are of a model that the same server described
    differently."""
    manifest = workdir.read(place.folder)
    if manifest is None or manifest["command"] != place.command:
        return
    for name, port in (("endpoint", plan.port), ("plain", plan.plain)):
        before = manifest["decides"].get(name)
        if port is None or not isinstance(before, dict) or before["url"] != port.server.root:
            continue
        now = port.identity
        for key in workdir.differences(before, now):
            said = f"{key} was {before.get(key)!r} and is {now.get(key)!r}"
            raise OutputExists(f"{port.server.root}: {ANOTHER} ({said})")


@dataclass(frozen=True)
class Asking:
    """The listener of an evaluation, and the place for its answers."""

    hooks: Hooks
    output: Path | None
    force: bool = False  # answers of another model are replaced

    def stop_if_asked(self, done: int) -> None:
        """Raise if the user pressed Ctrl-C; `done` pieces are finished."""
        if not self.hooks.stop():
            return
        if self.output is None or not done:
            raise NothingKept(NOTHING_KEPT)
        raise Interrupted(
            f"interrupted; the answers so far are kept in {self.output}; the same command resumes"
        )


def _measure(plan: PortPlan, kept: Kept, asking: Asking) -> Measurement:
    counts = counts_of(plan.wish, plan.counting)
    questions, remarks = _questions(plan, counts, kept, asking)
    rows = _rows(plan, questions, counts, kept)
    for row in rows.values():
        if row.same is None and row.is_of_another_model():
            if not asking.force:
                raise OutputExists(f"{row.port.server.root}: {ANOTHER} (no kept answer is its own)")
            workdir.remove(kept.folder, lambda name: not name.startswith(STORES))
    _say_when(rows, asking)
    resumed = _ask(plan, rows, counts, asking)
    resumed += _read(plan, kept, asking)
    items = dict[str, Scores]()
    for label, row in rows.items():
        cuts = row.cuts(plan)
        if label == PORT:
            cuts = FirstWords(plan, row, counts, asking).tested(cuts)
            remarks += [UNSEEN.format(length=length_text(length)) for length in cuts.unknown]
        items[label] = _scored(row, cuts.reasons)
    _write(plan, kept, rows, items, remarks)
    return replace(rundir.read_finished_run(kept.folder), resumed=resumed)


def _questions(
    plan: PortPlan, counts: Mapping[str, Count], kept: Kept, asking: Asking
) -> tuple[list[Question], list[str]]:
    """Return all questions, and the reasons why some cannot be built."""
    store = kept.store("questions", plan)
    questions = list[Question]()
    remarks = list[str]()
    for group in build(plan.wish, dict(counts), store):
        if isinstance(group, str):
            remarks.append(group)
        else:
            questions += group
        asking.stop_if_asked(0)
    if plan.wish.tasks and not questions:
        raise UsageError(remarks[0])
    return questions, remarks


@dataclass(frozen=True)
class PortRow:
    """One row of the result: a server, its questions and the place of the answers. `same` is the
    row whose answers count here too, for questions that are identical in both."""

    port: Port
    asked: Sequence[tuple[Question, Question]]  # as it is identified, and as the server gets it
    store: Store
    same: Store | None = None

    def store_of(self, question: Question, put: Question) -> Store:
        """Return the place of the answer to a question."""
        return self.same if self.same is not None and put is question else self.store

    def answers(self) -> list[tuple[Question, Answer]]:
        """Return every question with its answer."""
        pairs = list[tuple[Question, Answer]]()
        for question, put in self.asked:
            pairs.append((question, self._answer(question, put)))
        return pairs

    def _answer(self, question: Question, put: Question) -> Answer:
        """Return the kept answer to a question."""
        store = self.store_of(question, put)
        name = f"{question.name}.json"
        return read_values(Answer, store.get(name), store.file(name))

    def kept(self) -> list[tuple[Question, Answer]]:
        """Return every question that was answered before, in the wording that the server got, with
        its answer."""
        pairs = list[tuple[Question, Answer]]()
        for question, put in self.asked:
            if self.store_of(question, put).has(f"{question.name}.json"):
                pairs.append((put, self._answer(question, put)))
        return pairs

    def is_of_another_model(self) -> bool:
        """Return True if the server now gives other answers than the kept ones.

        It gets up to three answered questions of the greatest length again, and all answers must
        differ. One may differ, because rounding in kernels depends on the rest of their batch.
        """
        replies = [(put, answer) for put, answer in self.kept() if answer.said]
        longest = max((put.length for put, _ in replies), default=0)
        again = [(put, answer) for put, answer in replies if put.length == longest][:AGAIN]
        return bool(again) and all(
            answered(self.port, put).said != answer.said for put, answer in again
        )

    def cuts(self, plan: PortPlan) -> TruncatedLengths:
        """Return the lengths whose prompts the server cut, as far as its usage shows it."""
        by_length = dict[int, list[Answer]]()
        for question, answer in self.answers():
            by_length.setdefault(question.length, []).append(answer)
        return cuts_by_usage(by_length, plan.counting, self.port.limit)


def _rows(
    plan: PortPlan, questions: Sequence[Question], counts: Mapping[str, Count], kept: Kept
) -> dict[str, PortRow]:
    """Return the server's row, and a row with the same questions truncated to the trained
    window."""
    answers = kept.store(PORT, plan)
    own = PortRow(plan.port, [(q, q) for q in questions], answers)
    if plan.window is None or not questions:
        return {PORT: own}
    window = plan.window[0]
    cuts = cut_alike(questions, counts, window, plan.wish.api)
    store = kept.store(CUT, plan)
    if plan.plain is not None:
        return {PORT: own, CUT: PortRow(plan.plain, cuts, store)}
    return {PORT: own, CUT: PortRow(plan.port, cuts, store, answers)}


@dataclass(frozen=True)
class Unanswered:
    """A question of a row in the wording for the server, and the place for its answer."""

    row: PortRow
    question: Question
    put: Question
    store: Store

    @property
    def file(self) -> Path:
        """The file of its answer; two rows may share it."""
        return self.store.file(f"{self.question.name}.json")

    def ask(self) -> Answer:
        """Return the server's answer to the question."""
        return answered(self.row.port, self.put)

    def keep(self, answer: Answer) -> None:
        """Write an answer."""
        self.store.put(f"{self.question.name}.json", asdict(answer))


def _unanswered(rows: Mapping[str, PortRow]) -> tuple[list[Unanswered], int]:
    """Return every question that no file answers yet, once, and the number of answered ones over
    all rows."""
    waiting = dict[Path, Unanswered]()
    there = 0
    for row in rows.values():
        for question, put in row.asked:
            one = Unanswered(row, question, put, row.store_of(question, put))
            if one.store.has(f"{question.name}.json"):
                there += 1
            else:
                waiting[one.file] = one
    return list(waiting.values()), there


def _say_when(rows: Mapping[str, PortRow], asking: Asking) -> None:
    """Print the dates of the answers that are used again."""
    dates = set[str]()
    for row in rows.values():
        dates |= {answer.date for _, answer in row.kept()}
    if dates:
        asking.hooks.say(f"answers of {' to '.join(sorted({min(dates), max(dates)}))} are reused")


def _estimate(plan: PortPlan, waiting: Sequence[Unanswered], counts: Mapping[str, Count]) -> str:
    """Return an estimate of the time for the questions from short prompts; "" if they are few.

    A server need not read a text again for its other questions, so the estimate is a range.
    """
    total = 0
    longest = dict[str, int]()
    for one in waiting:
        text = one.put.asked.text
        total += one.put.counted
        longest[text] = max(longest.get(text, 0), one.put.counted)
    if total < LEAST_ESTIMATED:
        return ""
    first = waiting[0]
    put = first.put
    took = list[float]()
    counted = 1
    # The first prompt may load the model. The last is the second again, with its whole answer.
    for tokens, room in ((PROBE // 2, 1), (PROBE, 1), (PROBE, put.room)):
        shorter = cut(put, counts[put.task], tokens + put.room, plan.wish.api)
        begun = time.monotonic()
        reply = first.row.port.ask(shorter.prompt(plan.wish.api), room)
        took.append(time.monotonic() - begun)
        counted = max(shorter.counted, 1)
        if reply.error:
            return ""
    answers = took[2] * len(waiting)
    least = duration(answers + took[1] * sum(longest.values()) / counted)
    most = duration(answers + took[1] * total / counted)
    return f", about {least} to {most} by the speed of short prompts"


def _ask(
    plan: PortPlan, rows: Mapping[str, PortRow], counts: Mapping[str, Count], asking: Asking
) -> int:
    """Ask every question that no file answers yet; return how many were answered before.

    A question that the server refused while others ran is sent once more alone: the slots of
    llama-server share one cache, which may have room for each prompt but not for several together.
    """
    parallel = plan.options.parallel
    waiting, there = _unanswered(rows)
    refused = list[Unanswered]()

    def ask(one: Unanswered, is_alone: bool) -> int:
        answer = one.ask()
        if answer.outcome == REFUSED and not is_alone:
            refused.append(one)
        else:
            one.keep(answer)
        return one.put.counted

    work = [partial(ask, one, parallel == 1) for one in waiting]
    total = sum(one.put.counted for one in waiting)
    estimate = _estimate(plan, waiting, counts)
    _do(Requests("questions", work, total, there, estimate), parallel, asking)
    if refused:
        again = [partial(ask, one, True) for one in refused]
        total = sum(one.put.counted for one in refused)
        _do(Requests("questions, one by one", again, total, there), 1, asking)
    return there


def _read(plan: PortPlan, kept: Kept, asking: Asking) -> int:
    """Read the losses that no file holds yet; return how many were there."""
    if plan.reads is None:
        return 0
    longest = plan.reads.frame.longest
    work = list[Callable[[], int]]()
    there = 0

    def one(store: Store, name: str, read: Callable[[], TokenNll]) -> int:
        store.put(name, read())
        return longest

    for label in plan.text_labels:
        store = kept.store(label, plan)
        for name, read in plan.reads.units(label):
            if store.has(name):
                there += 1
            else:
                work.append(partial(one, store, name, read))
    _do(Requests("texts", work, longest * len(work), there), plan.options.parallel, asking)
    return there


@dataclass(frozen=True)
class Requests:
    """The requests to a server; each returns the number of tokens that it took."""

    what: str
    pieces: Sequence[Callable[[], int]]
    total: int  # tokens
    there: int = 0  # pieces that were done before
    estimate: str = ""  # of the time


def _do(work: Requests, parallel: int, asking: Asking) -> None:
    """Do `parallel` pieces at a time; Ctrl-C ends the work after the running ones."""
    hooks = asking.hooks
    if work.pieces:
        amount = f"{len(work.pieces)} {work.what}: {work.total:,} tokens"
        hooks.say(f"the server is asked {amount}{work.estimate}")
    hooks.show(0, work.total, work.what)
    done = 0
    ended = 0

    def unless_stopped(piece: Callable[[], int]) -> int:
        return 0 if hooks.stop() else piece()

    with ThreadPoolExecutor(parallel) as pool:
        pending: set[Future[int]] = {pool.submit(unless_stopped, each) for each in work.pieces}
        try:
            while pending and not hooks.stop():
                finished, pending = wait(pending, 0.5, FIRST_COMPLETED)
                done += sum(future.result() for future in finished)
                ended += len(finished)
                # Every running question ends once before the first estimate of the remaining time.
                if finished and ended >= min(parallel, len(work.pieces)):
                    hooks.show(done, work.total, work.what)
        finally:
            for future in pending:
                future.cancel()
    # The answers to the running requests are kept too.
    done += sum(future.result() for future in pending if not future.cancelled())
    asking.stop_if_asked(done + work.there)


@dataclass(frozen=True)
class FirstWords:
    """A test with the first word of a text, which a server that cut the start cannot repeat."""

    plan: PortPlan
    row: PortRow
    counts: Mapping[str, Count]
    asking: Asking

    def tested(self, cuts: TruncatedLengths) -> TruncatedLengths:
        """Return the cuts, after a test of each length whose usage does not show whether the server
        cut it.

        The server cut a length if it answers the deeper questions, repeats the first word of a
        short text, and cannot repeat the first word of a text of that length.
        """
        first = dict[int, Question]()
        scores = dict[int, list[ItemScore]]()
        for question, answer in self.row.answers():
            first.setdefault(question.length, question)
            scores.setdefault(question.length, []).append(scored(question, answer))
        reasons = dict(cuts.reasons)
        unknown = list[int]()
        for length in cuts.unknown:
            short = first[min(first)]
            if not self._repeats(short, short.length // SHORT_TEXT):
                unknown.append(length)
            elif self._repeats(first[length], length):
                continue
            elif lost_its_start(scores[length]):
                reasons[length] = LOST_START
            else:
                unknown.append(length)
        return TruncatedLengths(reasons, unknown)

    def _repeats(self, question: Question, length: int) -> bool:
        """Return True if the server repeats the first word of a text of this length."""
        store = self.row.store
        name = f"first-word-{length}.json"
        if not store.has(name):
            count = self.counts[question.task]
            store.put(name, _first_word(self.plan, question, length, count))
            self.asking.stop_if_asked(1)
        return bool(store.get(name)["repeated"])


def _first_word(plan: PortPlan, question: Question, length: int, count: Count) -> dict[str, Any]:
    """Ask for the first word of a text of this length; return the word, the answer, and whether it
    has the word."""
    rng = derived_rng(plan.wish.seed, "first word", length)
    word = "-".join(rng.sample(NOUNS, 2))
    shorter = cut(question, count, length - WITNESS, plan.wish.api)
    text = (
        f"{word} is the first word of this message.\n\n"
        f"{shorter.asked.instruction}{shorter.asked.text}\n\n"
        "What is the first word of this message?"
    )
    reply = plan.port.ask(text, question.room)
    return {"word": word, "said": reply.said, "repeated": word in reply.said.lower()}


def _scored(row: PortRow, reasons: Mapping[int, str]) -> list[tuple[ItemScore, Answer]]:
    """Return the score of every question. If a length was cut, all its prompts were, except refused
    ones."""
    out = list[tuple[ItemScore, Answer]]()
    for question, answer in row.answers():
        if question.length in reasons and answer.outcome != REFUSED:
            reason = reasons[question.length]
            answer = replace(answer, outcome=TRUNCATED, score=0.0, reason=reason)
        out.append((scored(question, answer), answer))
    return out


def _write(
    plan: PortPlan,
    kept: Kept,
    rows: Mapping[str, PortRow],
    items: Mapping[str, Scores],
    remarks: Sequence[str],
) -> None:
    """Write documents, answers and results, as every evaluation does."""
    kinds = {PORT: EXTENDED, CUT: CUT}
    models = dict[str, MeasuredModel]()
    for label, row in rows.items():
        models[label] = MeasuredModel(
            kind=kinds[label],
            items=tuple(item for item, _ in items[label]),
            source=_source(row.port, kept.store_name(label, plan)),
            numbers=port_numbers(items[label]),
        )
    _add_texts(plan, kept, models)
    window = plan.window and plan.window[0]
    endpoint = {
        "url": plan.port.server.root,
        "model": plan.port.model,
        "limit": plan.port.limit,
        "api": plan.port.api,
        "counted_by": plan.counting.how,
        "window": window,
        "window_from": plan.window and plan.window[1],
        "plain": plan.plain and {"url": plan.plain.server.root, "model": plan.plain.model},
        "remarks": list(plan.remarks),
    }
    facts = EvaluationFacts(
        protocol="questions",
        protocol_text="questions in words, answered greedily",
        headline="found",
        documents=None if plan.reads is None else plan.reads.texts.counts,
        warnings=tuple(remarks),
        endpoint=endpoint,
    )
    bootstrap = Bootstrap(plan.options.seed)
    frame = EvaluationSettings(
        plan.context, tuple(plan.wish.lengths), tail_tokens(plan.context), bootstrap
    )
    documents = None if plan.reads is None else plan.reads.texts.documents
    rundir.save_run(kept.folder, Measurement(frame, models, documents, facts))


def _source(port: Port, store: str) -> ModelSource:
    """Return the server that gave a row's answers, and the store that keeps them."""
    return ModelSource(model=port.model, target=port.limit, store=store)


def _add_texts(plan: PortPlan, kept: Kept, models: dict[str, MeasuredModel]) -> None:
    """Add the numbers of the texts to their rows."""
    if plan.reads is None:
        return
    stores = {label: kept.store(label, plan) for label in plan.text_labels}
    for label, read in plan.reads.numbers(stores).items():
        model = models.get(label)
        if model is None:  # the plain server's reading
            assert plan.plain is not None
            source = _source(plan.plain, kept.store_name(label, plan))
            model = MeasuredModel(kind=BASE, source=source, numbers=port_numbers(()))
        assert model.numbers is not None  # every row has the numbers of its answers
        models[label] = replace(
            model,
            source=replace(model.source, passes=plan.reads.regimes(label)),
            numbers=replace(
                model.numbers,
                metrics={**model.numbers.metrics, **read.metrics},
                positions=read.positions,
                verdicts=read.verdicts,
            ),
        )
