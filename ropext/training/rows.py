"""Turn documents into the rows that a model reads, in a fine-tuning and in a fit.

The seed and a row's number alone decide the row. So a run that resumes after an interrupt, or uses
more processes, reads the same rows in the same order.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

from ropext.base.errors import InputError, UsageError
from ropext.evaluation.corpus import Document, DocumentEncoder
from ropext.evaluation.corpus.encoding import Flags, Ids
from ropext.options.evaluate import DEPTHS
from ropext.options.training import TrainingOptions
from ropext.tasks import Haystack, Item, find_task, mkey, noise, repetition, running_text
from ropext.tasks.item import (
    ATTEMPTS,
    ambiguous_haystack_error,
    derived_rng,
    holds_tokens,
    with_needles,
)


@dataclass(frozen=True)
class TrainingRow:
    """One training row: ids at positions, and which ids the loss is taken on."""

    ids: Ids
    positions: Ids
    scored: Flags
    weight: float = 1.0  # weight of its mean loss, if rows count and not tokens (a fit)
    labels: Ids | None = None  # of masked tokens


@dataclass(frozen=True)
class FullRows:
    """Rows of `length` tokens, one after another in a document."""

    length: int

    def row(self, document: Document, start: int, rng: np.random.Generator) -> TrainingRow:
        """Cut the training row that begins at a token of a document."""
        piece = slice(start, start + self.length)
        return TrainingRow(document.ids[piece], np.arange(self.length), document.mask()[piece])


@dataclass(frozen=True)
class PoseRows:
    """Positional skip-wise training (Zhu et al. 2023, section 3). A row of `length` tokens has two
    chunks; the positions of the second are moved by a gap drawn from 0 to target - length.

    The first chunk has at most half of the row, as in the paper's code. Deviation: if the document
    reaches that far, the second chunk's text comes from the place of its positions, so that the
    distance is true. Otherwise the place is drawn at random, as in the paper.
    """

    length: int
    target: int
    # Positions must pass this. Otherwise a longrope with two sets of factors would be trained in
    # the short set, and the set could vary from batch to batch.
    beyond: int = 0

    def row(self, document: Document, start: int, rng: np.random.Generator) -> TrainingRow:
        """Cut a training row of two chunks from a document, with a jump in the positions between
        them."""
        first = int(rng.integers(1, self.length // 2 + 1))
        least = max(0, self.beyond + 1 - self.length)
        gap = int(rng.integers(least, self.target - self.length + 1))
        room = len(document) - self.length
        skipped = gap if gap <= room else int(rng.integers(0, room + 1))
        start = int(rng.integers(0, room - skipped + 1))
        jump = start + first
        second = slice(jump + skipped, jump + skipped + self.length - first)
        mask = document.mask()
        ids, scored = (
            np.concatenate([array[start:jump], array[second]]) for array in (document.ids, mask)
        )
        scored[first] = False  # nothing before the jump predicts the token after it
        positions = np.arange(self.length)
        positions[first:] += gap
        return TrainingRow(ids, positions, scored)


def row_strategy(
    options: TrainingOptions, length: int, target: int, beyond: int
) -> FullRows | PoseRows:
    """Return the --strategy that cuts training rows of so many tokens."""
    return FullRows(length) if options.strategy == "full" else PoseRows(length, target, beyond)


def count_rows(documents: Sequence[Document], strategy: FullRows | PoseRows) -> int:
    """Count the whole training rows of one pass over the documents."""
    return sum(len(document) // strategy.length for document in documents)


SPACE = 64
MOST = 16  # in a row that asks: tokens for each key, and the most keys


class KeyRows:
    """A share of a fine-tuning's rows, each of which states keys and asks for all of them. The seed
    and a row's number alone decide the row."""

    def __init__(
        self,
        encoder: DocumentEncoder,
        documents: Sequence[Document],
        share: float,
        seed: int,
    ) -> None:
        """Make a `share` of the training rows ask for keys, in haystacks of words or of the
        documents' text."""
        self.encoder = encoder
        self.documents = documents
        self.share = share
        self.seed = seed
        self.words = noise(encoder)

    def asks_in_row(self, number: int) -> bool:
        """Return whether the training row of this number asks for keys."""
        return int((number + 1) * self.share) > int(number * self.share)

    def row(
        self, number: int, strategy: FullRows | PoseRows, rng: np.random.Generator
    ) -> TrainingRow | None:
        """Return the training row of this number if it asks for keys, else None."""
        if not self.asks_in_row(number):
            return None
        return strategy.row(self.question_document(number, strategy.length), 0, rng)

    def question_document(self, number: int, length: int) -> Document:
        """Return a training document of exactly `length` tokens: keys in a haystack, then every
        question with its answer."""
        rng = derived_rng("questions", self.seed, length, number)
        ids = [] if self.encoder.bos is None else [self.encoder.bos]
        count = max(1, min(MOST, length // SPACE))
        needles, filler = self._drawn_keys(length - len(ids), count, rng)
        depths = sorted(rng.random() for _ in needles)
        ids += with_needles(filler, [stated for stated, _, _ in needles], depths)
        scored = [False] * len(ids)
        for _, question, answer in rng.sample(needles, len(needles)):
            ids += question
            ids += answer
            scored += [False] * len(question) + [True] * len(answer)
        return Document(np.asarray(ids, np.int32), np.asarray(scored))

    def _drawn_keys(
        self, length: int, count: int, rng: random.Random
    ) -> tuple[list[mkey.Needle], list[int]]:
        """Draw the keys of a training row and a haystack that contains none of their answers."""
        for _ in range(ATTEMPTS):
            needles = mkey.draw_needles(self.encoder, count, rng)
            fixed = sum(len(part) for needle in needles for part in needle)
            if length < fixed:
                raise UsageError(
                    f"--retrieval-share: a row of questions takes {fixed} tokens of this "
                    f"tokenizer, and rows have {length}; leave the option out, or give a larger "
                    "--window or target"
                )
            filler = self._haystack(rng)(length - fixed, rng)
            if not any(holds_tokens(filler, answer) for _, _, answer in needles):
                return needles, filler
        raise ambiguous_haystack_error(mkey.NAME)

    def _haystack(self, rng: random.Random) -> Haystack:
        """Return a haystack of words, or of the text of a training document."""
        if rng.random() < 0.5:
            return self.words
        return running_text(rng.choice(self.documents).ids.tolist())


class TrainingRows(Sequence[TrainingRow]):
    """A sequence of `count` rows, which reads the documents again and again in a new order each
    time.

    Each pass cuts every document into as many whole rows as fit, from a random offset on. The loss
    is taken on the whole row or on its far half alone (a fit).
    """

    def __init__(
        self,
        documents: Sequence[Document],
        strategy: FullRows | PoseRows,
        count: int,
        seed: int,
        questions: "KeyRows | FitQuestions | None" = None,
        far_half: bool = False,
    ) -> None:
        """Cut `count` training rows from the documents; raise InputError if they give no row or no
        loss."""
        self.documents = [d for d in documents if len(d) >= strategy.length]
        self.too_short = len(documents) - len(self.documents)
        self.strategy = strategy
        self.size = count
        self.seed = seed
        self.questions = questions
        self.far_half = far_half
        self.per_pass = count_rows(documents, strategy)
        self.per_row = 1  # pieces that a row is read in
        if not self.per_pass:
            raise InputError(_no_rows_text(documents, strategy))
        if not any(document.mask().any() for document in self.documents):
            raise InputError(
                f"none of the {len(documents)} documents is long enough and has an assistant's "
                "turn (a conversation is trained on those alone); give others, or plain text"
            )
        self._order = lru_cache(maxsize=2)(self._rows_of_pass)

    @property
    def passes_over_data(self) -> float:
        """Return how often a training goes through its documents."""
        return self.size / self.per_pass

    def __len__(self) -> int:
        """Return the number of training rows of the whole run."""
        return self.size

    def _rows_of_pass(self, number: int) -> npt.NDArray[np.int64]:
        """Return (document, start) of each training row of a pass, in its order."""
        rng = np.random.default_rng((self.seed, 0, number))
        places = []
        for index, document in enumerate(self.documents):
            rows, spare = divmod(len(document), self.strategy.length)
            offset = int(rng.integers(0, spare + 1))
            places += [(index, offset + i * self.strategy.length) for i in range(rows)]
        return rng.permutation(np.array(places))

    def __getitem__(self, number: int) -> TrainingRow:  # type: ignore[override]
        """Return the training row of this number, which the seed and the number alone decide."""
        if not 0 <= number < self.size:
            raise IndexError(number)
        rng = np.random.default_rng((self.seed, 1, number))
        if self.questions and (asking := self.questions.row(number, self.strategy, rng)):
            return asking
        turn, at = divmod(number, self.per_pass)
        index, start = self._order(turn)[at]
        row = self.strategy.row(self.documents[index], int(start), rng)
        if self.far_half:
            row = replace(row, scored=row.scored & (np.arange(len(row.ids)) >= len(row.ids) // 2))
        return row


@dataclass(frozen=True)
class ControlRows(Sequence[TrainingRow]):
    """The rows of the control: the same tokens, in windows of the base's own context.

    A question cut off from its key would teach the control to guess. The control gets as many
    tokens of questions that fit its windows.
    """

    rows: TrainingRows
    context: int

    @property
    def per_row(self) -> int:
        """Return the number of windows that each training row is read in."""
        return -(-self.rows.strategy.length // self.context)

    def __len__(self) -> int:
        """Return the number of windows in which the control reads all training rows."""
        return len(self.rows) * self.per_row

    def __getitem__(self, number: int) -> TrainingRow:  # type: ignore[override]
        """Return a window of the base's context: a piece of the tuned model's training row, or
        questions with their keys if that row asks."""
        index, at = divmod(number, self.per_row)
        piece = slice(at * self.context, (at + 1) * self.context)
        length = len(range(self.rows.strategy.length)[piece])
        asking = self.rows.questions
        if isinstance(asking, KeyRows) and asking.asks_in_row(index):
            document = asking.question_document(number, length)
            return TrainingRow(document.ids, np.arange(length), document.mask())
        row = self.rows[index]
        return TrainingRow(row.ids[piece], np.arange(length), row.scored[piece])


def join_documents(
    documents: Sequence[Document], separator: int | None, seed: int
) -> list[Document]:
    """Join all training documents into one (--packing glued), in a drawn order; attention crosses
    from each into the next."""
    order = np.random.default_rng((seed, 2)).permutation(len(documents))
    ids: list[Ids] = []
    scored: list[Flags] = []
    for index in order:
        ids.append(documents[index].ids)
        scored.append(documents[index].mask())
        if separator is not None:
            ids.append(np.array([separator]))
            scored.append(np.array([True]))
    return [Document(np.concatenate(ids), np.concatenate(scored))] if ids else []


def _no_rows_text(documents: Sequence[Document], strategy: FullRows | PoseRows) -> str:
    """Return why no document is long enough for a training row."""
    count = len(documents)
    longest = max(map(len, documents), default=0)
    if isinstance(strategy, PoseRows):
        return (
            f"--window {strategy.length}: the longest of {count} documents has {longest} tokens; "
            f"give a --window of at most {longest}, or longer documents"
        )
    return (
        f"--strategy full needs documents of at least {strategy.length} tokens, and the longest "
        f"of {count} has {longest}; --strategy pose reaches the target from documents of its "
        "--window, --packing glued joins documents, and a checkpoint extended to a smaller target "
        "needs shorter ones"
    )


TASKS = ("passkey", "mkey")  # tasks of the questions that a fit uses
FIT_TASK = "passkey"
# Weight of a question's mean loss, relative to a window's. With a whole row's weight, its few
# tokens
# make the gradient too noisy; pooled by tokens, it would be drowned (docs/fitting.md).
QUESTION_WEIGHT = 0.25
# Seeds of draws that must differ.
FITTED = 1
SHORT = 2
MASKED = 3


class FitQuestions:
    """Retrieval items by their number, for the training rows and for the measurements; the two
    share nothing."""

    def __init__(
        self,
        encoder: DocumentEncoder,
        documents: Sequence[Document],
        strategy: FullRows | PoseRows,
        seed: int,
        share: float = 0.0,
    ) -> None:
        """Make a `share` of a fit's training rows ask, with haystacks of the documents' text or of
        words."""
        self.encoder = encoder
        self.strategy = strategy
        self.seed = seed
        self.share = share
        stream = np.concatenate([document.ids for document in documents])
        self.around: tuple[Haystack, ...] = (running_text(stream.tolist()), noise(encoder))
        self.before = [] if encoder.bos is None else [encoder.bos]

    def row(self, number: int, *_: object) -> TrainingRow | None:
        """Return the next question as a training row of a fit, if the row of this number asks,
        else None; questions are evenly among the rows."""
        item = int((number + 1) * self.share)
        return self.question_row(item) if item > int(number * self.share) else None

    def question_row(self, number: int) -> TrainingRow:
        """Return one retrieval question as a training row of a fit, with the loss on its answer
        alone."""
        rng = np.random.default_rng((self.seed, FITTED, number))
        around = self.around[number // len(TASKS) % len(self.around)]
        room = self.strategy.length - len(self.before)
        depths = (float(rng.random()),)
        task = find_task(TASKS[number % len(TASKS)])
        (item,) = task.build(
            self.encoder,
            around,
            length=room,
            depths=depths,
            index=number,
            seed=self.seed + FITTED,
        )
        ids = np.asarray([*self.before, *item.prompt, *item.answer], np.int32)
        scored = np.zeros(len(ids), bool)
        scored[-len(item.answer) :] = True
        at = np.random.default_rng((self.seed, FITTED, number))
        row = self.strategy.row(Document(ids, scored), 0, at)
        return replace(row, weight=QUESTION_WEIGHT)

    def measured_questions(self, length: int, count: int) -> list[Item]:
        """Return the questions that measure a fit, with keys among repeated sentences, which no
        question in the training rows has around it."""
        around = repetition(self.encoder)
        room = length - len(self.before)
        task = find_task(FIT_TASK)
        items = list[Item]()
        for index in range(-(-count // len(DEPTHS))):
            items += task.build(
                self.encoder,
                around,
                length=room,
                depths=DEPTHS,
                index=index,
                seed=self.encoder.seed,
            )
        return items[:count]

    def why_no_questions(self, length: int) -> str | None:
        """Return why a fit can make no questions of this length, or None."""
        try:
            self.measured_questions(length, 1)
            for number in range(len(TASKS)):
                self.question_row(number)
        except UsageError as error:
            return str(error)
        return None


class RowsWithShortWindows(Sequence[TrainingRow]):
    """The rows of all steps; each step has windows of the original length (--keep-short), then
    `per_step` of the `rows`."""

    def __init__(
        self,
        rows: Sequence[TrainingRow],
        per_step: int,
        documents: Sequence[Document],
        context: int,
        options: TrainingOptions,
    ) -> None:
        """Put the windows of --keep-short next to the long rows of each optimiser step in
        training."""
        self.rows = rows
        self.long = per_step
        self.short = options.keep_short
        self.per_step = self.long + self.short
        steps = len(rows) // per_step
        if self.short:
            seed = options.seed + SHORT
            self.windows = TrainingRows(documents, FullRows(context), self.short * steps, seed)

    def __len__(self) -> int:
        """Return the number of training rows of all steps, long and short."""
        return len(self.rows) // self.long * self.per_step

    def __getitem__(self, number: int) -> TrainingRow:  # type: ignore[override]
        """Return the training row of this number: in each step first the short windows, then the
        long rows."""
        step, at = divmod(number, self.per_step)
        if at < self.short:
            return self.windows[step * self.short + at]
        return self.rows[step * self.long + at - self.short]


IGNORED = -100  # the label that stock losses leave out


@dataclass(frozen=True)
class RowCollator:
    """A collator that stacks rows and pads shorter rows at their end.

    It always gives the attention mask, even if nothing is padded and the mask is all ones. Without
    a mask, transformers takes positions that jump for the border of a packed document, and the
    second chunk of a pose row sees nothing of the first.
    """

    padding: int  # the token that fills up rows

    def __call__(self, rows: Sequence[TrainingRow]) -> dict[str, torch.Tensor]:
        """Return a training batch of these rows, as transformers' Trainer reads it."""
        length = max(len(row.ids) for row in rows)

        def padded(parts: Sequence[npt.NDArray[np.generic]], filler: int) -> torch.Tensor:
            """Stack a part of each row, with `filler` behind shorter ones."""
            out = torch.full((len(rows), length), filler)
            for at, part in enumerate(parts):
                out[at, : len(part)] = torch.from_numpy(part.astype("int64"))
            return out

        labels = [
            np.where(row.scored, row.ids, IGNORED) if row.labels is None else row.labels
            for row in rows
        ]
        weights = [row.weight for row in rows]
        more = {"row_weights": torch.tensor(weights)} if any(w != 1 for w in weights) else {}
        if rows[0].labels is None:  # RoBERTa counts its positions behind its padding
            more["position_ids"] = padded([row.positions for row in rows], 0)
        return {
            "input_ids": padded([row.ids for row in rows], self.padding),
            "labels": padded(labels, IGNORED),
            "attention_mask": padded([np.ones(len(row.ids)) for row in rows], 0),
            **more,
        }
