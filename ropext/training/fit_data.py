"""DATA -> windows to fit on, questions to fit on, and documents that judge the fit."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ropext import corpus
from ropext.corpus.selection import REMEDY
from ropext.errors import InputError, UsageError
from ropext.lengths import length_text
from ropext.options.training import Fit
from ropext.results.overlap import Trained
from ropext.tasks import Haystack, Item, Text, find_task, noise, repetition
from ropext.training import data as training_data
from ropext.training.data import LARGEST_SHARE, TrainingData
from ropext.training.sequences import Full, Row, Rows, TrainingDocument, glue

TASKS = ("passkey", "mkey")  # of the questions that are fitted on
MEASURED = "passkey"
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
# Of a question's mean loss beside a window's: as a whole row its few tokens make the gradient too
# noisy, pooled by tokens it would be drowned (docs/fitting.md).
QUESTION_WEIGHT = 0.25
# Seeds of what is drawn, apart from one another.
FITTED, SHORT = 1, 2


@dataclass(frozen=True)
class FitDocuments:
    """The two parts of DATA; no document is in both."""

    fitted: tuple[TrainingDocument, ...]
    judging: tuple[corpus.Document, ...]  # cut to the target
    read: int
    too_short: int
    trained: Trained  # what the record will keep of those fitted on


def read(
    raw: Iterable[corpus.RawDocument],
    encoder: corpus.DocumentEncoder,
    options: Fit,
    target: int,
    wanted_tokens: int,
    *,
    streamed: bool = False,
) -> FitDocuments:
    """The documents as `finetune` divides them; of those held out --held-out judge at most."""
    glued = options.packing == "glued"
    data = training_data.read(
        raw,
        encoder,
        wanted_tokens=wanted_tokens,
        row=1 if glued else target,
        target=target,
        judging=options.held_out,
        joined=glued,
        streamed=streamed,
    )
    if glued:
        return _glued(data, encoder, options, target)
    short = sum(len(own) < target for own in data.documents)
    if not data.held_out:
        raise _too_few(data, len(data.documents) - short, target)
    judging = tuple(own.cut(target) for own in data.held_out[: options.held_out])
    return FitDocuments(data.documents, judging, data.read, short, data.trained)


def _glued(
    data: TrainingData, encoder: corpus.DocumentEncoder, options: Fit, target: int
) -> FitDocuments:
    """Documents joined after the division: no window holds text of both parts, and no document is
    in two windows of those that judge."""
    separator = separator_of(encoder)
    windows = corpus.glue_documents(data.held_out, target, options.held_out, separator)
    if not windows or data.tokens < target:
        held = sum(map(len, data.held_out))
        ways = "more text, or a smaller --factor" if data.read >= LARGEST_SHARE else REMEDY
        raise InputError(
            f"--packing glued: of {data.tokens + held} tokens in {data.read} documents {held} are "
            f"held out to judge the fit, and each part must reach {length_text(target)}: {ways}"
        )
    fitted = glue(data.documents, separator, options.seed)
    return FitDocuments(tuple(fitted), windows, data.read, 0, data.trained)


def separator_of(encoder: corpus.DocumentEncoder) -> int | None:
    """Between joined documents: nothing where each begins with its BOS."""
    return encoder.tokenizer.eos_token_id if encoder.bos is None else None


def _too_few(data: TrainingData, long: int, target: int) -> InputError:
    ways = "longer documents, a smaller --factor, or --packing glued to join them"
    if data.read < LARGEST_SHARE:
        ways = f"more documents, or {REMEDY}"
    return InputError(
        f"{long or 'none'} of the {data.read} documents reaches {length_text(target)} tokens (the "
        f"longest has {data.longest}), and a fit needs {LARGEST_SHARE} at least, one of them to "
        f"judge it: {ways}"
    )


class FitQuestions:
    """Retrieval items by their number, to fit on and to measure with; the two share nothing."""

    def __init__(
        self,
        encoder: corpus.DocumentEncoder,
        documents: Sequence[TrainingDocument],
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


def rows_per_step(options: Fit, target: int) -> int:
    """Windows of the target's length, at least one, and those of --keep-short."""
    return max(1, round(options.batch_tokens / target)) + options.keep_short


class FitRows(Sequence[Row]):
    """Every step: --keep-short windows of the original length, then windows of the target's length
    (the loss on their second half) with questions evenly among them."""

    def __init__(
        self,
        documents: Sequence[TrainingDocument],
        questions: FitQuestions | None,
        options: Fit,
        context: int,
        target: int,
    ) -> None:
        self.per_step, self.short = rows_per_step(options, target), options.keep_short
        self.long = self.per_step - self.short
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
