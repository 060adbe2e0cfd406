"""Documents -> training rows. A row follows from the seed and its number alone, so that a run
that goes on after an interrupt, or on more processes, reads the same rows in the same order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from ropext.errors import InputError

if TYPE_CHECKING:
    from ropext.training.data import QuestionRows

Ids = npt.NDArray[np.signedinteger[Any]]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class TrainingDocument:
    """Token ids, and which of them the loss is taken on (None = all)."""

    ids: Ids
    scored: Flags | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def mask(self) -> Flags:
        return np.ones(len(self.ids), bool) if self.scored is None else self.scored


@dataclass(frozen=True)
class Row:
    """What the model reads: ids at positions, and which ids the loss is taken on."""

    ids: Ids
    positions: Ids
    scored: Flags
    weight: float = 1.0  # of its mean loss, where rows count and not tokens (a fit)


@dataclass(frozen=True)
class Full:
    """Rows of `length` tokens that follow one another in a document."""

    length: int

    def row(self, document: TrainingDocument, start: int, rng: np.random.Generator) -> Row:
        piece = slice(start, start + self.length)
        return Row(document.ids[piece], np.arange(self.length), document.mask()[piece])


@dataclass(frozen=True)
class Pose:
    """Positional skip-wise training (Zhu et al. 2023, section 3): a row of `length` tokens in two
    chunks, the positions of the second moved on by a gap drawn from 0 to target - length.

    The first chunk has at most half of the row, as in the paper's code. Deviation: the second
    chunk's text comes from where its positions say, where the document reaches that far, so that
    the distance is a true one; else from a place drawn at random, as in the paper.
    """

    length: int
    target: int
    # Positions must pass this: a longrope with two sets of factors would otherwise be trained in
    # the short set, and in which one would vary from batch to batch.
    beyond: int = 0

    def row(self, document: TrainingDocument, start: int, rng: np.random.Generator) -> Row:
        first = int(rng.integers(1, self.length // 2 + 1))
        least = max(0, self.beyond + 1 - self.length)
        gap = int(rng.integers(least, self.target - self.length + 1))
        room = len(document) - self.length
        skipped = gap if gap <= room else int(rng.integers(0, room + 1))
        start = int(rng.integers(0, room - skipped + 1))
        jump = start + first
        second = slice(jump + skipped, jump + skipped + self.length - first)
        ids = np.concatenate([document.ids[start:jump], document.ids[second]])
        mask = document.mask()
        scored = np.concatenate([mask[start:jump], mask[second]])
        scored[first] = False  # nothing before the jump tells what follows it
        positions = np.arange(self.length)
        positions[first:] += gap
        return Row(ids, positions, scored)


def rows_in(documents: Sequence[TrainingDocument], strategy: Full | Pose) -> int:
    """Whole rows of one pass."""
    return sum(len(document) // strategy.length for document in documents)


class Rows(Sequence[Row]):
    """`count` rows, going through the documents again and again in a new order each time.

    Each pass cuts every document into as many whole rows as fit, from a random offset on.
    """

    def __init__(
        self,
        documents: Sequence[TrainingDocument],
        strategy: Full | Pose,
        count: int,
        seed: int,
        questions: "QuestionRows | None" = None,
    ) -> None:
        self.documents = [d for d in documents if len(d) >= strategy.length]
        self.too_short = len(documents) - len(self.documents)
        self.strategy, self.size, self.seed = strategy, count, seed
        self.questions = questions
        self.per_pass = rows_in(documents, strategy)
        if not self.per_pass:
            longest = max((len(d) for d in documents), default=0)
            raise InputError(_too_short(len(documents), longest, strategy))
        if not any(document.mask().any() for document in self.documents):
            raise InputError(
                f"of {len(documents)} documents none that is long enough has an assistant's turn, "
                "on which alone the loss of a conversation is taken; give other conversations, or "
                "plain text"
            )
        self._order = lru_cache(maxsize=2)(self._pass_order)

    @property
    def passes(self) -> float:
        """How often the run goes through its documents."""
        return self.size / self.per_pass

    def __len__(self) -> int:
        return self.size

    def _pass_order(self, number: int) -> npt.NDArray[np.int64]:
        """(document, start) of each row of a pass."""
        rng = np.random.default_rng((self.seed, 0, number))
        places = []
        for index, document in enumerate(self.documents):
            rows, spare = divmod(len(document), self.strategy.length)
            offset = int(rng.integers(0, spare + 1))
            places += [(index, offset + i * self.strategy.length) for i in range(rows)]
        return rng.permutation(np.array(places))

    def __getitem__(self, number: int) -> Row:  # type: ignore[override]
        if not 0 <= number < self.size:
            raise IndexError(number)
        rng = np.random.default_rng((self.seed, 1, number))
        if self.asks(number):
            return self.strategy.row(self.question(number, self.strategy.length), 0, rng)
        turn, at = divmod(number, self.per_pass)
        index, start = self._order(turn)[at]
        return self.strategy.row(self.documents[index], int(start), rng)

    def asks(self, number: int) -> bool:
        """Whether a row holds questions in the place of text."""
        return self.questions is not None and self.questions.falls_on(number)

    def question(self, number: int, length: int) -> TrainingDocument:
        """The questions of a row, in so many tokens."""
        assert self.questions is not None, number  # only where `asks` says so
        return self.questions.document(number, length)


class Pieces(Sequence[Row]):
    """The rows of the control: the same tokens, in windows of the base's own context.

    Questions cut from what they ask for would teach it to guess: it gets as many tokens of
    questions that fit its windows.
    """

    def __init__(self, rows: Rows, context: int) -> None:
        self.rows, self.context = rows, context
        self.per_row = -(-rows.strategy.length // context)

    def __len__(self) -> int:
        return len(self.rows) * self.per_row

    def __getitem__(self, number: int) -> Row:  # type: ignore[override]
        index, at = divmod(number, self.per_row)
        piece = slice(at * self.context, (at + 1) * self.context)
        if self.rows.asks(index):
            length = len(range(self.rows.strategy.length)[piece])
            document = self.rows.question(number, length)
            return Row(document.ids, np.arange(length), document.mask())
        row = self.rows[index]
        ids = row.ids[piece]
        return Row(ids, np.arange(len(ids)), row.scored[piece])


def glue(
    documents: Sequence[TrainingDocument], separator: int | None, seed: int
) -> list[TrainingDocument]:
    """All documents as one, in a drawn order; attention will cross from one into the next."""
    order = np.random.default_rng((seed, 2)).permutation(len(documents))
    ids: list[Ids] = []
    scored: list[Flags] = []
    for index in order:
        ids.append(documents[index].ids)
        scored.append(documents[index].mask())
        if separator is not None:
            ids.append(np.array([separator]))
            scored.append(np.array([True]))
    return [TrainingDocument(np.concatenate(ids), np.concatenate(scored))] if ids else []


def _too_short(count: int, longest: int, strategy: Full | Pose) -> str:
    if isinstance(strategy, Pose):
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


IGNORED = -100  # the label that stock losses leave out


class Collator:
    """Stacks rows; shorter ones are padded at their end.

    The attention mask is always given, all ones, also where nothing is padded: without one
    transformers takes positions that jump for the border of a packed document, and lets the second
    chunk of a pose row see nothing of the first.
    """

    def __init__(self, padding: int) -> None:
        self.padding = padding

    def __call__(self, rows: Sequence[Row]) -> dict[str, torch.Tensor]:
        length = max(len(row.ids) for row in rows)
        shape = (len(rows), length)
        ids = torch.full(shape, self.padding)
        labels = torch.full(shape, IGNORED)
        mask = torch.zeros(shape, dtype=torch.long)
        positions = torch.zeros(shape, dtype=torch.long)
        for at, row in enumerate(rows):
            size = len(row.ids)
            read = torch.from_numpy(row.ids.astype("int64"))
            ids[at, :size] = read
            scored = torch.from_numpy(row.scored)
            labels[at, :size] = torch.where(scored, read, IGNORED)
            mask[at, :size] = 1
            positions[at, :size] = torch.from_numpy(row.positions)
        weights = [row.weight for row in rows]
        weighed = {"row_weights": torch.tensor(weights)} if any(w != 1 for w in weights) else {}
        return {
            "input_ids": ids,
            "labels": labels,
            "attention_mask": mask,
            "position_ids": positions,
            **weighed,
        }
