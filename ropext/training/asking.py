"""Rows that ask, mixed among the rows of text: `--retrieval-share`.

A row of text hardly ever asks for what stands far behind it, so that a short training on text alone
leaves much of the retrieval unrecovered. A row of questions states many keys in a haystack and then
asks for each of them, the loss on the answers alone. With one question to a row the answers would
drown: the loss is a mean over tokens, and a row of text has hundreds of times as many.

Keys, names and haystacks are drawn here, in the wording of the task mkey; `ropext eval` draws
others, and the repeated sentences that it has around its keys are left out.
"""

import random
from collections.abc import Sequence

import numpy as np

from ropext.corpus import DocumentEncoder
from ropext.errors import UsageError
from ropext.tasks import Haystack, Text, mkey, noise
from ropext.tasks.item import derived_rng, occurs, until_unambiguous
from ropext.training.sequences import Document

SPACE = 64  # tokens of a row for each key
MOST = 16  # keys of a row


class Questions:
    """Every so many rows one that asks; each follows from the seed and its number alone."""

    def __init__(
        self, encoder: DocumentEncoder, documents: Sequence[Document], share: float, seed: int
    ) -> None:
        self.encoder, self.documents, self.share, self.seed = encoder, documents, share, seed
        self.words = noise(encoder)

    def falls_on(self, number: int) -> bool:
        """Whether the row of this number asks."""
        return int((number + 1) * self.share) > int(number * self.share)

    def document(self, number: int, length: int) -> Document:
        """Exactly `length` tokens: keys in a haystack, then every question with its answer."""
        rng = derived_rng("questions", self.seed, length, number)
        ids = [] if self.encoder.bos is None else [self.encoder.bos]
        count = max(1, min(MOST, length // SPACE))
        needles, filler = self._drawn(length - len(ids), count, rng)
        depths = sorted(rng.random() for _ in needles)
        ids += mkey.shared_prefix(filler, [stated for stated, _, _ in needles], depths)
        scored = [False] * len(ids)
        for _, question, answer in rng.sample(needles, len(needles)):
            ids += [*question, *answer]
            scored += [False] * len(question) + [True] * len(answer)
        return Document(np.asarray(ids, np.int32), np.asarray(scored))

    def _drawn(
        self, length: int, count: int, rng: random.Random
    ) -> tuple[list[mkey.Needle], list[int]]:
        def draw() -> tuple[list[mkey.Needle], list[int]]:
            needles = mkey.draw_needles(self.encoder, mkey.PLAIN, count, rng)
            fixed = sum(len(part) for needle in needles for part in needle)
            return needles, self._haystack(rng).tokens(_room(length, fixed), rng)

        def clear(drawn: tuple[list[mkey.Needle], list[int]]) -> bool:
            needles, filler = drawn
            return not any(occurs(answer, filler) for _, _, answer in needles)

        return until_unambiguous(mkey.NAME, draw, clear)

    def _haystack(self, rng: random.Random) -> Haystack:
        """Words, or text of a document that is trained on."""
        return self.words if rng.random() < 0.5 else Text(rng.choice(self.documents).ids.tolist())


def _room(length: int, fixed: int) -> int:
    if length < fixed:
        raise UsageError(
            f"--retrieval-share: a row of questions takes {fixed} tokens of this tokenizer, and "
            f"rows have {length}; leave the option out, or give a larger --window or target"
        )
    return length - fixed
