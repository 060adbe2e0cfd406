"""DATA -> windows to fit on, questions to fit on, and documents that judge the fit."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ropext import corpus
from ropext.errors import InputError, UsageError
from ropext.results.lengths import length_text
from ropext.results.values import FEWEST_DOCUMENTS
from ropext.tasks import Haystack, Item, Text, find_task, noise, repetition
from ropext.training.data import HELD_OUT, NO_LIMIT, scored_tokens
from ropext.training.fit_options import FitOptions
from ropext.training.sequences import Document, Full, Row, Rows, glue

# At most one long document in so many judges where DATA has few.
LARGEST_SHARE = 3
TASKS = ("passkey", "mkey")  # of the questions that are fitted on
MEASURED = "passkey"
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
# Of a question's mean loss beside a window's: as a whole row its few tokens make the gradient too
# noisy, pooled by tokens it would be drowned (docs/fitting.md).
QUESTION_WEIGHT = 0.25
# Seeds of what is drawn, apart from one another.
FITTED, SHORT = 1, 2


@dataclass(frozen=True)
class Documents:
    """The two parts of DATA; no document is in both."""

    fitted: tuple[Document, ...]
    judging: tuple[corpus.Document, ...]  # cut to the target
    read: int
    too_short: int


@dataclass(frozen=True)
class _Read:
    """One document, as the evaluator and as the training want it."""

    coded: corpus.Document
    fitted: Document
    drawn: bool  # to judge

    def __len__(self) -> int:
        return len(self.coded)


def read(
    raw: Iterable[corpus.RawDocument],
    encoder: corpus.DocumentEncoder,
    options: FitOptions,
    target: int,
    wanted_tokens: int,
) -> Documents:
    """Every tenth document by its content judges, and all that come after there is enough to fit
    on, up to --held-out; where that is less than a sixth of those that reach the target, a sixth
    of them, and where it is fewer than eight, more still, up to a third."""
    glued = options.packing == "glued"
    found, count, tokens, held = list[_Read](), 0, 0, 0
    seen: set[str] = set()
    for own in raw:
        count += 1
        text = encoder.text_of(own)
        coded = encoder.document(own.name, text, NO_LIMIT)
        if coded.key in seen:
            continue
        seen.add(coded.key)
        enough = tokens >= wanted_tokens
        drawn = enough or int(coded.key[:8], 16) % HELD_OUT == 0
        fitted = Document(coded.ids, scored_tokens(own, text, coded, encoder))
        found.append(_Read(coded, fitted, drawn))
        usable = len(coded) if glued or len(coded) >= target else 0
        tokens += 0 if drawn else usable
        held += (usable if glued else min(usable, target)) if drawn else 0
        # Enough text is enough: a stream of the whole web is not read to its end.
        if tokens >= wanted_tokens and held >= options.held_out * target:
            break
    if not count:
        raise InputError("--data holds no document")
    return (_glued if glued else _divided)(found, encoder, options, target, count)


def _divided(
    found: Sequence[_Read],
    encoder: corpus.DocumentEncoder,
    options: FitOptions,
    target: int,
    count: int,
) -> Documents:
    long = [own for own in found if len(own) >= target]
    if len(long) < 2:
        raise _too_short([own.coded for own in found], len(long), target)
    ordered = sorted(long, key=lambda own: (not own.drawn, own.coded.key))
    fewest = min(FEWEST_DOCUMENTS, max(1, len(long) // LARGEST_SHARE))
    # More than eight, a sixth, where there is text enough for both parts.
    wanted = max(sum(own.drawn for own in long), fewest, len(long) // (2 * LARGEST_SHARE))
    held = ordered[: min(options.held_out, wanted, len(long) - 1)]
    keys = {own.coded.key for own in held}
    fitted = tuple(own.fitted for own in found if own.coded.key not in keys)
    judging = tuple(own.coded.cut(target) for own in held)
    return Documents(fitted, judging, count, len(found) - len(long))


def _glued(
    found: Sequence[_Read],
    encoder: corpus.DocumentEncoder,
    options: FitOptions,
    target: int,
    count: int,
) -> Documents:
    """Documents joined after the division: no window holds text of both parts, and no document is
    in two windows of those that judge."""
    separator = separator_of(encoder)
    drawn = sorted((own.coded for own in found if own.drawn), key=lambda own: own.key)
    windows = corpus.glue_documents(drawn, target, options.held_out, separator)
    rest = [own.fitted for own in found if not own.drawn]
    if not windows or sum(map(len, rest)) < target:
        raise InputError(
            f"--packing glued: the {count} documents have {sum(map(len, found))} tokens together, "
            f"and a tenth of them, held out, must reach {length_text(target)}: more text, or a "
            "smaller --factor"
        )
    return Documents(tuple(glue(rest, separator, options.seed)), windows, count, 0)


def separator_of(encoder: corpus.DocumentEncoder) -> int | None:
    """Between joined documents: nothing where each begins with its BOS."""
    return encoder.tokenizer.eos_token_id if encoder.bos is None else None


def _too_short(documents: Sequence[corpus.Document], long: int, target: int) -> InputError:
    longest = max((len(own) for own in documents), default=0)
    reach = "none of" if not long else "only one of"
    return InputError(
        f"{reach} the {len(documents)} documents reaches {length_text(target)} tokens (the longest "
        f"has {longest}), and a fit needs two at least, one of them to judge it: longer documents, "
        "a smaller --factor, or --packing glued to join them"
    )


class Questions:
    """Retrieval items by their number, to fit on and to measure with; the two share nothing."""

    def __init__(
        self,
        encoder: corpus.DocumentEncoder,
        documents: Sequence[Document],
        target: int,
        seed: int,
    ) -> None:
        self.encoder, self.target, self.seed = encoder, target, seed
        stream = np.concatenate([own.ids for own in documents])
        self.around: tuple[Haystack, ...] = (Text(stream.tolist()), noise(encoder))

    def fitted(self, number: int) -> Row:
        """One item as a row: the loss on its answer alone."""
        rng = np.random.default_rng((self.seed, FITTED, number))
        task = TASKS[number % len(TASKS)]
        around = self.around[number // len(TASKS) % len(self.around)]
        (item,) = find_task(task).build(
            self.encoder,
            around,
            length=self._room(self.target),
            depths=(float(rng.random()),),
            index=number,
            seed=self.seed + FITTED,
        )
        bos = [] if self.encoder.bos is None else [self.encoder.bos]
        ids = np.asarray([*bos, *item.prompt, *item.answer], np.int32)
        scored = np.zeros(len(ids), bool)
        scored[-len(item.answer) :] = True
        return Row(ids, np.arange(len(ids)), scored, QUESTION_WEIGHT)

    def measured(self, length: int, count: int) -> list[Item]:
        """Keys among repeated sentences, which no fitted item has around it."""
        around = repetition(self.encoder)
        build = find_task(MEASURED).build
        items: list[Item] = []
        for index in range(-(-count // len(DEPTHS))):
            items += build(
                self.encoder,
                around,
                length=self._room(length),
                depths=DEPTHS,
                index=index,
                seed=self.seed,
            )
        return items[:count]

    def _room(self, length: int) -> int:
        return length - (0 if self.encoder.bos is None else 1)

    def why_none(self, length: int) -> str | None:
        """Why no item of this length can be made."""
        try:
            self.measured(length, 1)
            for number in range(len(TASKS)):
                self.fitted(number)
        except UsageError as error:
            return str(error)
        return None


class FitRows(Sequence[Row]):
    """Every step: --keep-short windows of the original length, then windows of the target's length
    (the loss on their second half) with questions evenly among them."""

    def __init__(
        self,
        documents: Sequence[Document],
        questions: Questions | None,
        options: FitOptions,
        context: int,
        target: int,
    ) -> None:
        self.long = max(1, round(options.batch_tokens / target))
        self.short = options.keep_short
        self.per_step = self.long + self.short
        self.steps, self.share, self.questions = options.steps, options.retrieval_share, questions
        self.texts = Rows(documents, Full(target), self.long * self.steps, options.seed)
        self.shorts = (
            Rows(documents, Full(context), self.short * self.steps, options.seed + SHORT)
            if self.short
            else None
        )
        self.tokens = (self.long * target + self.short * context) * self.steps

    def __len__(self) -> int:
        return self.per_step * self.steps

    def __getitem__(self, number: int) -> Row:  # type: ignore[override]
        step, at = divmod(number, self.per_step)
        if self.shorts is not None and at < self.short:
            return self.shorts[step * self.short + at]
        place = step * self.long + at - self.short
        asked = int((place + 1) * self.share)
        if self.questions is not None and asked > int(place * self.share):
            return self.questions.fitted(asked)
        row = self.texts[place]
        scored = row.scored.copy()
        scored[: len(row.ids) // 2] = False
        return Row(row.ids, row.positions, scored)
