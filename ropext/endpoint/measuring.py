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
from ropext.base.lengths import length_text
from ropext.base.narration import NOBODY, Call, Hooks, duration
from ropext.base.workdir import STORES, Workdir
from ropext.endpoint.answers import (
    Answer,
    TruncatedLengths,
    answer_of,
    item_score,
    lost_its_start,
    truncated_by_usage,
)
from ropext.endpoint.counting import Count
from ropext.endpoint.perplexity import Ids
from ropext.endpoint.plan import CUT, KINDS, SERVER, ServerPlan
from ropext.endpoint.questions import Question, build, counts_of, cut, truncate_together
from ropext.endpoint.remote_model import RemoteModel
from ropext.endpoint.shares import Scores, numbers_of_answers
from ropext.results import BASE, rundir
from ropext.results.measurement import MeasuredModel, Measurement, Store
from ropext.results.numbers import EvaluationFacts, ModelSource
from ropext.results.retrieval import REFUSED, TRUNCATED, ItemScore
from ropext.tasks.item import NOUNS, derived_rng

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


@contextmanager
def _answers_folder(output: Path | None) -> Iterator[Path]:
    """Yield the folder for a server's answers; without `output`, a temporary one."""
    if output is not None:
        yield output
        return
    with tempfile.TemporaryDirectory(prefix="ropext-", ignore_cleanup_errors=True) as room:
        yield Path(room) / "run"


def measure_server(
    plan: ServerPlan,
    output: Path | None = None,
    call: Call = NOBODY,
    report: Callable[[Measurement], None] = lambda run: None,
) -> Measurement:
    """Ask a server every question that has no answer yet, and return the measurement. With
    `output`, its files are written there."""
    with _answers_folder(output) as room:
        place = plan.workdir(room, call.command)
        if not call.force:
            _refuse_another_identity(plan, place)
        with place.claimed(call.force, say=call.hooks.say):
            counts = counts_of(plan.wanted, plan.counting)
            run = ServerRun(plan, counts, place.folder, call.hooks, output, call.force)
            done = replace(_measure_rows(run), path=output)
            if output is not None:
                report(done)
    return done


def _refuse_another_identity(plan: ServerPlan, place: Workdir) -> None:
    """Raise OutputExists if the answers in a folder are of a model that the same server described
    differently."""
    manifest = workdir.read(place.folder)
    if manifest is None or manifest["command"] != place.command:
        return
    for name, served in (("endpoint", plan.served), ("plain", plan.plain)):
        before = manifest["decides"].get(name)
        if served is None or not isinstance(before, dict) or before["url"] != served.server.root:
            continue
        now = served.identity
        for key in workdir.differences(before, now):
            said = f"{key} was {before.get(key)!r} and is {now.get(key)!r}"
            raise OutputExists(f"{served.server.root}: {ANOTHER} ({said})")


@dataclass(frozen=True)
class ServerRun:
    """An evaluation of a server that has begun: its plan, how its prompts are counted, the folder
    with its questions and answers, and the listener."""

    plan: ServerPlan
    counts: Mapping[str, Count]  # by task
    folder: Path
    hooks: Hooks
    output: Path | None
    force: bool = False  # answers of another model are replaced

    def store(self, label: str) -> Store:
        """Return the files for one row of the answers that `eval --endpoint` gets from a running
        server. Their folder is named by all that decides them."""
        return rundir.variant_store(self.folder, f"{label}-{digest(self.plan.decides)[:16]}")

    def stop_if_asked(self, done: int) -> None:
        """Raise if the user pressed Ctrl-C; `done` is 0 if no answer of the server is kept."""
        if not self.hooks.stop():
            return
        if self.output is None or not done:
            raise NothingKept(NOTHING_KEPT)
        raise Interrupted(
            f"interrupted; the answers so far are kept in {self.output}; the same command resumes"
        )


def _measure_rows(run: ServerRun) -> Measurement:
    """Return the measurement of a server: questions, answers, then the numbers of all rows."""
    plan = run.plan
    questions, remarks = _planned_questions(run)
    rows = _server_rows(run, questions)
    _refuse_another_model(run, rows)
    _say_dates_of_answers(run, rows)
    resumed = _ask_questions(run, rows) + _read_texts(run)
    items = dict[str, Scores]()
    for label, row in rows.items():
        truncated = truncated_by_usage(row.answers_by_length(), plan.counting, row.served.limit)
        if label == SERVER:
            truncated = _tested_by_first_words(run, row, truncated)
            remarks += [UNSEEN.format(length=length_text(length)) for length in truncated.unknown]
        items[label] = _scored_answers(row, truncated.reasons)
    _write_results(run, _measured_models(run, rows, items), remarks)
    return replace(rundir.read_unchecked_run(run.folder), resumed=resumed)


def _planned_questions(run: ServerRun) -> tuple[list[Question], list[str]]:
    """Return all questions to a server, and the reasons why some cannot be built."""
    questions = list[Question]()
    remarks = list[str]()
    wanted = run.plan.wanted
    for group in build(wanted, run.counts, run.store("questions")):
        if isinstance(group, str):
            remarks.append(group)
        else:
            questions += group
        run.stop_if_asked(0)
    if wanted.tasks and not questions:
        raise UsageError(remarks[0])
    return questions, remarks


@dataclass(frozen=True)
class AskedQuestion:
    """A question to a server, and the place of its answer."""

    question: Question  # as it is identified
    put: Question  # as the server gets it: its text may be truncated
    served: RemoteModel
    store: Store

    @property
    def name(self) -> str:
        """Return the name of the file that holds the server's answer."""
        return f"{self.question.name}.json"

    @property
    def file(self) -> Path:
        """Return the path of the file that holds the server's answer; two rows may share it."""
        return self.store.file(self.name)

    @property
    def is_answered(self) -> bool:
        """Return whether an earlier call kept the server's answer."""
        return self.store.has(self.name)

    def kept_answer(self) -> Answer:
        """Return the kept answer of the server."""
        return read_values(Answer, self.store.get(self.name), self.file)

    def ask(self) -> Answer:
        """Send the question to the server, and return its answer."""
        return answer_of(self.served, self.put)

    def keep(self, answer: Answer) -> None:
        """Write an answer of the server."""
        self.store.put(self.name, asdict(answer))


@dataclass(frozen=True)
class ServerRow:
    """One row of the result: a server, its questions and the place of the answers."""

    served: RemoteModel
    store: Store
    asked: Sequence[AskedQuestion]

    def answers_by_length(self) -> dict[int, list[Answer]]:
        """Return the server's answers to all questions of each length."""
        by_length = dict[int, list[Answer]]()
        for one in self.asked:
            by_length.setdefault(one.question.length, []).append(one.kept_answer())
        return by_length

    def is_of_another_model(self) -> bool:
        """Return True if the server now gives other answers than the kept ones.

        It gets up to three answered questions of the greatest length again, and all answers must
        differ. One may differ, because rounding in kernels depends on the rest of their batch.
        """
        kept = [one for one in self.asked if one.is_answered and one.kept_answer().said]
        longest = max((one.put.length for one in kept), default=0)
        again = [one for one in kept if one.put.length == longest][:AGAIN]
        return bool(again) and all(one.ask().said != one.kept_answer().said for one in again)


def _server_rows(run: ServerRun, questions: Sequence[Question]) -> dict[str, ServerRow]:
    """Return the server's row, and a row with the same questions truncated to the trained
    window. If one server gets both, a question that is not truncated has one answer."""
    plan = run.plan
    store = run.store(SERVER)
    asked = [AskedQuestion(question, question, plan.served, store) for question in questions]
    rows = {SERVER: ServerRow(plan.served, store, asked)}
    if plan.window is None or not questions:
        return rows
    served = plan.plain or plan.served
    cut_store = run.store(CUT)
    shorter = list[AskedQuestion]()
    for question, put in truncate_together(questions, run.counts, plan.window[0], plan.wanted.api):
        is_shared = plan.plain is None and put is question
        shorter.append(AskedQuestion(question, put, served, store if is_shared else cut_store))
    rows[CUT] = ServerRow(served, cut_store, shorter)
    return rows


def _refuse_another_model(run: ServerRun, rows: Mapping[str, ServerRow]) -> None:
    """Raise OutputExists if a server gives other answers than the kept ones; with --force, remove
    the kept ones."""
    for label, row in rows.items():
        is_asked_already = label == CUT and run.plan.plain is None
        if is_asked_already or not row.is_of_another_model():
            continue
        if not run.force:
            raise OutputExists(f"{row.served.server.root}: {ANOTHER} (no kept answer is its own)")
        workdir.remove(run.folder, lambda name: not name.startswith(STORES))


def _say_dates_of_answers(run: ServerRun, rows: Mapping[str, ServerRow]) -> None:
    """Say the dates of a server's kept answers, which are used again."""
    dates = set[str]()
    for row in rows.values():
        dates |= {one.kept_answer().date for one in row.asked if one.is_answered}
    if dates:
        run.hooks.say(f"answers of {' to '.join(sorted({min(dates), max(dates)}))} are reused")


def _estimated_time(run: ServerRun, waiting: Sequence[AskedQuestion]) -> str:
    """Return an estimate of the time that a running server will take to answer the questions, from
    its replies to short prompts. Return "" if the questions are few or a reply is an error.

    The server need not read a text again for its other questions, so the estimate is a range.
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
    api = run.plan.wanted.api
    took = list[float]()
    counted = 1
    # The first prompt may load the model. The last is the second again, with its whole answer.
    for tokens, room in ((PROBE // 2, 1), (PROBE, 1), (PROBE, put.room)):
        shorter = cut(put, run.counts[put.task], tokens + put.room, api)
        begun = time.monotonic()
        reply = first.served.ask(shorter.prompt(api), room)
        took.append(time.monotonic() - begun)
        counted = max(shorter.counted, 1)
        if reply.error:
            return ""
    answers = took[2] * len(waiting)
    least = duration(answers + took[1] * sum(longest.values()) / counted)
    most = duration(answers + took[1] * total / counted)
    return f", about {least} to {most} by the speed of short prompts"


def _ask_questions(run: ServerRun, rows: Mapping[str, ServerRow]) -> int:
    """Ask a server every question that no file answers yet. Return how many were answered before.

    A question that the server refused while others ran is sent once more alone: the slots of
    llama-server share one cache, which may have room for each prompt but not for several together.
    """
    parallel = run.plan.options.parallel
    unanswered = dict[Path, AskedQuestion]()
    there = 0
    for row in rows.values():
        for one in row.asked:
            if one.is_answered:
                there += 1
            else:
                unanswered[one.file] = one
    waiting = list(unanswered.values())
    refused = list[AskedQuestion]()

    def ask(one: AskedQuestion, is_alone: bool) -> int:
        """Ask the server one question, and keep its answer; if the server refuses it while others
        run, keep it for later."""
        answer = one.ask()
        if answer.outcome == REFUSED and not is_alone:
            refused.append(one)
        else:
            one.keep(answer)
        return one.put.counted

    work = [partial(ask, one, parallel == 1) for one in waiting]
    total = sum(one.put.counted for one in waiting)
    estimate = _estimated_time(run, waiting)
    _send_requests(run, Requests("questions", work, total, there, estimate), parallel)
    if refused:
        again = [partial(ask, one, True) for one in refused]
        total = sum(one.put.counted for one in refused)
        _send_requests(run, Requests("questions, one by one", again, total, there), 1)
    return there


def _read_texts(run: ServerRun) -> int:
    """Ask a server for the losses of texts that no file holds yet. Return how many were there."""
    reads = run.plan.reads
    if reads is None:
        return 0
    longest = reads.frame.longest
    work = list[Callable[[], int]]()
    there = 0

    def keep_losses(store: Store, label: str, name: str, ids: Ids) -> int:
        """Ask the server for the losses of a text, and keep them."""
        store.put(name, reads.read(label, ids))
        return longest

    for label in run.plan.text_labels:
        store = run.store(label)
        for name, ids in reads.units(label):
            if store.has(name):
                there += 1
            else:
                work.append(partial(keep_losses, store, label, name, ids))
    requests = Requests("texts", work, longest * len(work), there)
    _send_requests(run, requests, run.plan.options.parallel)
    return there


@dataclass(frozen=True)
class Requests:
    """The requests to a server; each returns the number of tokens that it took."""

    what: str
    pieces: Sequence[Callable[[], int]]
    total: int  # tokens
    there: int = 0  # pieces that were done before
    estimate: str = ""  # of the time


def _send_requests(run: ServerRun, work: Requests, parallel: int) -> None:
    """Send `parallel` requests to a server at a time; Ctrl-C ends the work after the running
    ones."""
    hooks = run.hooks
    if work.pieces:
        amount = f"{len(work.pieces)} {work.what}: {work.total:,} tokens"
        hooks.say(f"the server is asked {amount}{work.estimate}")
    hooks.show(0, work.total, work.what)
    done = 0
    ended = 0

    def unless_stopped(piece: Callable[[], int]) -> int:
        """Send one request to the server, unless the user pressed Ctrl-C."""
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
    run.stop_if_asked(done + work.there)


def _tested_by_first_words(
    run: ServerRun, row: ServerRow, truncated: TruncatedLengths
) -> TruncatedLengths:
    """Return the truncated lengths, after a test of each length whose usage does not show whether
    the server truncated it.

    The server truncated a length if it answers the deeper questions, repeats the first word of a
    short text, and cannot repeat the first word of a text of that length.
    """
    first = dict[int, Question]()
    scores = dict[int, list[ItemScore]]()
    for one in row.asked:
        length = one.question.length
        first.setdefault(length, one.question)
        scores.setdefault(length, []).append(item_score(one.question, one.kept_answer()))
    reasons = dict(truncated.reasons)
    unknown = list[int]()
    for length in truncated.unknown:
        short = first[min(first)]
        if not _repeats_first_word(run, row, short, short.length // SHORT_TEXT):
            unknown.append(length)
        elif _repeats_first_word(run, row, first[length], length):
            continue
        elif lost_its_start(scores[length]):
            reasons[length] = LOST_START
        else:
            unknown.append(length)
    return TruncatedLengths(reasons, unknown)


def _repeats_first_word(run: ServerRun, row: ServerRow, question: Question, length: int) -> bool:
    """Return True if the server repeats the first word of a text of this length."""
    name = f"first-word-{length}.json"
    if not row.store.has(name):
        row.store.put(name, _answer_about_first_word(run, question, length))
        run.stop_if_asked(1)
    return bool(row.store.get(name)["repeated"])


def _answer_about_first_word(run: ServerRun, question: Question, length: int) -> dict[str, Any]:
    """Ask a server for the first word of a text of this length. Return the word, the answer, and
    whether it has the word."""
    wanted = run.plan.wanted
    rng = derived_rng(wanted.seed, "first word", length)
    word = "-".join(rng.sample(NOUNS, 2))
    shorter = cut(question, run.counts[question.task], length - WITNESS, wanted.api)
    text = (
        f"{word} is the first word of this message.\n\n"
        f"{shorter.asked.instruction}{shorter.asked.text}\n\n"
        "What is the first word of this message?"
    )
    reply = run.plan.served.ask(text, question.room)
    return {"word": word, "said": reply.said, "repeated": word in reply.said.lower()}


def _scored_answers(row: ServerRow, reasons: Mapping[int, str]) -> list[tuple[ItemScore, Answer]]:
    """Return the score of a server's answer to every question. If it truncated a length, it
    truncated all its prompts, except refused ones."""
    out = list[tuple[ItemScore, Answer]]()
    for one in row.asked:
        answer = one.kept_answer()
        if one.question.length in reasons and answer.outcome != REFUSED:
            reason = reasons[one.question.length]
            answer = replace(answer, outcome=TRUNCATED, score=0.0, reason=reason)
        out.append((item_score(one.question, answer), answer))
    return out


def _measured_models(
    run: ServerRun, rows: Mapping[str, ServerRow], items: Mapping[str, Scores]
) -> dict[str, MeasuredModel]:
    """Return the numbers of a server's answers, and of its losses of texts, by row."""
    plan = run.plan
    sources = {label: row.served for label, row in rows.items()}
    if plan.plain is not None:
        sources[BASE] = plan.plain
    numbers = {label: numbers_of_answers(scores) for label, scores in items.items()}
    passes = dict[str, dict[str, int]]()
    if plan.reads is not None:
        stores = {label: run.store(label) for label in plan.text_labels}
        for label, read in plan.reads.numbers(stores).items():
            passes[label] = plan.reads.regimes(label)
            own = numbers.get(label) or numbers_of_answers(())
            metrics = {**own.metrics, **read.metrics}
            numbers[label] = replace(
                own, metrics=metrics, positions=read.positions, verdicts=read.verdicts
            )
    models = dict[str, MeasuredModel]()
    for label, of_row in numbers.items():
        source = ModelSource(
            model=sources[label].model,
            target=sources[label].limit,
            store=run.store(label).file().name,
            passes=passes.get(label, {}),
        )
        asked = tuple(item for item, _ in items.get(label, ()))
        models[label] = MeasuredModel(KINDS[label], items=asked, source=source, numbers=of_row)
    return models


def _write_results(
    run: ServerRun, models: Mapping[str, MeasuredModel], remarks: Sequence[str]
) -> None:
    """Write the answers that `eval --endpoint` got from a running server, its documents and its
    results, with the server's URL, model and limit. The files are named as in every evaluation."""
    plan = run.plan
    endpoint = {
        "url": plan.served.server.root,
        "model": plan.served.model,
        "limit": plan.served.limit,
        "api": plan.served.api,
        "counted_by": plan.counting.how,
        "window": plan.window and plan.window[0],
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
    documents = None if plan.reads is None else plan.reads.texts.documents
    rundir.save_run(run.folder, Measurement(plan.frame, models, documents, facts))
