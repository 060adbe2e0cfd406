"""Compute perplexities from the NLL of every token: named protocols, readings, and the numbers in
results.

An array holds one float32 per token: the NLL of token t given all tokens before it; position 0 is
not-a-number, for nothing precedes it. Sums are float64. For a masked language model only the tail
is scored, the same tokens in windows of each length. Numbers of different protocols do not compare.

The names of the numbers in results are in `metrics.py`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ropext.base.jsontext import IF_ANY
from ropext.base.lengths import length_at_least, length_text, lengths_text, octaves
from ropext.results import STRIDED
from ropext.results.values import FEWEST_DOCUMENTS, Bootstrap, Floats, Value

TokenNll = npt.NDArray[np.float32]
# The version of the short window's definition: 2 has a BOS in front of every window if the
# tokenizer puts one before a text.
SHORT_WINDOW = 2
MASK_STRIDE = 8  # every so many tokens of a tail are masked in one pass
Span = tuple[int, int] | tuple[int, int, int]  # positions [start, stop), read at a length [stop]


@dataclass(frozen=True)
class Scoring:
    """The scored tokens of a document, as results.json records them.

    Without masks every token is scored, given all before it: one pass over a text serves all its
    lengths. With masks only the tail is scored, each token masked once. Each length is then a
    window of its own that ends with the document, and all of them score the same tokens.
    """

    # One pass masks one of so many tokens; 0: without masks.
    mask_stride: int = field(default=0, metadata=IF_ANY)

    @property
    def scores_all(self) -> bool:
        """Return whether every token is scored for the perplexities in results.json, not only the
        masked tokens of a tail."""
        return not self.mask_stride

    @property
    def perplexity(self) -> str:
        """Return the name of exp of a mean loss in tables: perplexity or pseudo-perplexity."""
        if self.scores_all:
            return "perplexity"
        return "pseudo-perplexity"

    @property
    def passes(self) -> int:
        """Return the number of forward passes over one window that a perplexity's losses take."""
        return self.mask_stride or 1

    def tail_text(self, tail: int, lengths: Sequence[int]) -> str:
        """Say in the title of a table which tokens a tail has; a length shorter than it has no more
        than its own."""
        if not self.scores_all:
            every = f"every {self.mask_stride}th masked in one pass"
            return f"the last {tail} tokens of each document, {every}"
        text = f"the last {tail} tokens before each length"
        short = [length_text(length) for length in lengths if length < tail]
        if short:
            text += f" (before {', '.join(short)} all there are)"
        return text

    def inside_text(self, context: int) -> str:
        """Say in the note of a table which tokens are scored inside the trained context."""
        if self.scores_all:
            return f"positions before {context}"
        return f"the tail in windows of {context}"


ALL_TOKENS = Scoring()


@dataclass(frozen=True)
class Reading:
    """One model's losses on all documents, in their order.

    `passes` maps a pass length to one array per document. With static frequencies one pass at the
    longest length serves every length. Frequencies that depend on the length need their own pass
    for each regime; a length then uses the shortest pass that reaches it.
    """

    label: str
    passes: Mapping[int, Sequence[TokenNll]]

    def sums(self, start: int, stop: int, length: int | None = None) -> tuple[Floats, Floats]:
        """Return for each measured document the sum of the losses and the number of scored tokens
        at positions [start, stop). `length` chooses the pass (default: `stop`)."""
        parts = self.tokens(start, stop, length)
        return np.array([part.sum() for part in parts]), np.array([float(len(p)) for p in parts])

    def tokens(self, start: int, stop: int, length: int | None = None) -> list[Floats]:
        """Return for each measured document the loss of each scored token at positions [start,
        stop)."""
        arrays = self.passes[length_at_least(tuple(self.passes), length or stop)]
        return [np.asarray(array[max(start, 1) : stop], np.float64) for array in arrays]

    def subset(self, order: Sequence[int]) -> "Reading":
        """Return a model's token losses on the documents that a comparison of runs has in common,
        in the given order."""
        picked = {at: [arrays[k] for k in order] for at, arrays in self.passes.items()}
        return Reading(self.label, picked)


@dataclass(frozen=True)
class MeasuredDocuments:
    """The documents behind the numbers of results.json, as documents.json holds them: their hashes,
    and the bytes of text under each token."""

    names: tuple[str, ...]
    # Per document: SHA-256 of its first C tokens, for every measured length C.
    prefix_hashes: tuple[Mapping[int, str], ...]
    token_bytes: tuple[npt.NDArray[np.int64], ...]

    def __len__(self) -> int:
        """Return the number of documents in documents.json."""
        return len(self.names)

    def subset(self, order: Sequence[int]) -> "MeasuredDocuments":
        """Return the documents of documents.json that a comparison of runs has in common, in the
        given order."""
        return MeasuredDocuments(
            names=tuple(self.names[k] for k in order),
            prefix_hashes=tuple(self.prefix_hashes[k] for k in order),
            token_bytes=tuple(self.token_bytes[k] for k in order),
        )


@dataclass(frozen=True)
class Protocol:
    """A protocol of perplexity: its name, the key of its headline, and its description."""

    name: str
    headline: str
    text: str


PROTOCOLS = {
    p.name: p
    for p in (
        Protocol(
            "ropext",
            "tail",
            "token-weighted perplexity of the last N tokens before each length; one document is "
            "one sequence with BOS once; error bars over documents",
        ),
        Protocol(
            "yarn",
            "yarn",
            "as the YaRN repository's eval/perplexity.py --truncate: one window per document cut "
            "at the length, exp of the mean over documents of each one's mean NLL",
        ),
        Protocol(
            "hf-stride",
            "hf_stride",
            "as the loop in the transformers documentation: windows of the length, stride 512 (or "
            "half a shorter window), new tokens scored, its token weights; each document by itself",
        ),
        Protocol(
            "pseudo-perplexity",
            "tail",
            f"each of a document's last N tokens is masked once, every {MASK_STRIDE}th in one pass;"
            " windows of all lengths end with the document, between the special tokens that the "
            "tokenizer puts around a text; token-weighted, error bars over documents",
        ),
    )
}


# A length counts as effective while the tail is at most this many nats above the in-window value.
EFFECTIVE_MARGIN = 0.02


@dataclass(frozen=True)
class LossStatistics:
    """The numbers of results.json that follow from the losses of tokens: perplexities, differences
    and their intervals, at the lengths and over the spans of one evaluation."""

    context: int
    lengths: tuple[int, ...]
    tail: int
    bootstrap: Bootstrap
    scoring: Scoring = ALL_TOKENS

    @property
    def longest(self) -> int:
        """Return the longest length of results.json: so many tokens of each document have a
        loss."""
        return self.lengths[-1]

    @property
    def read_lengths(self) -> tuple[int, ...]:
        """Return the lengths of results.json at which losses are needed: the measured ones, and the
        trained context for the short tax."""
        lengths = set(self.lengths)
        if self.context < self.longest:
            lengths.add(self.context)
        return tuple(sorted(lengths))

    def tail_span(self, length: int) -> Span:
        """Return the span of the losses behind `tail@LENGTH`: the last N tokens before a length;
        with masks, a document's tail, read in a window of that length."""
        if self.scoring.scores_all:
            return max(1, length - self.tail), length
        return self.longest - self.tail, self.longest, length

    @property
    def inside(self) -> Span:
        """Return the span of the losses behind `short_tax` in results.json: the scored positions
        inside the trained context; with masks, the tail in a window of that context."""
        stop = min(self.context, self.longest)
        if self.scoring.scores_all:
            return 1, stop
        return self.tail_span(stop)

    @property
    def far_half(self) -> Span:
        """Return the positions of a fit's loss, which also stops a fine-tuning: the second half of
        the longest length; with masks, the tail in the longest window."""
        if self.scoring.scores_all:
            return self.longest // 2, self.longest
        return self.tail_span(self.longest)

    @property
    def scored_tokens(self) -> object:
        """Return a key that is equal for two evaluations if they score the same tokens of a
        document at the lengths that they share."""
        if self.scoring.scores_all:
            return None
        return self.scoring.mask_stride, self.tail, self.longest

    def mean(self, reading: Reading, span: Span) -> float:
        """Return the mean of a reading's token losses over a span, in nats, without an
        interval."""
        sums, counts = reading.sums(*span)
        return float(sums.sum() / counts.sum())

    def nll(self, reading: Reading, span: Span) -> Value:
        """Return a loss of results.json, such as `tail_nll`: the mean of a reading's token losses
        over a span, in nats, with its interval over documents."""
        sums, counts = reading.sums(*span)
        return self.bootstrap.ratio(sums, counts)

    def perplexity(self, reading: Reading, span: Span) -> Value:
        """Return a perplexity of results.json, such as `tail`: exp of the mean token loss over a
        span, with its interval over documents."""
        sums, counts = reading.sums(*span)
        return self.bootstrap.ratio(sums, counts, np.exp)

    def difference(self, left: Reading, right: Reading, span: Span) -> Value:
        """Return a difference of results.json, such as `gain`: the token losses of `left` minus
        those of `right` over a span, in nats per token, with its paired interval."""
        sums, counts = left.sums(*span)
        return self.bootstrap.ratio(sums - right.sums(*span)[0], counts)

    def yarn_perplexity(self, reading: Reading, span: Span) -> Value:
        """Return `yarn@LENGTH` of results.json: exp of the mean over documents of each one's mean
        token loss, as the protocol "yarn" computes a perplexity."""
        sums, counts = reading.sums(*span)
        return self.bootstrap.ratio(sums / counts, np.ones(len(sums)), np.exp)

    def bits_per_byte(self, reading: Reading, documents: MeasuredDocuments, span: Span) -> Value:
        """Return `bpb@LENGTH` of results.json: the token losses of a span in bits, per byte of the
        text under these tokens."""
        sums, _ = reading.sums(*span)
        num_bytes = []
        for counts in documents.token_bytes:
            num_bytes.append(float(counts[span[0] : span[1]].sum()))
        return self.bootstrap.ratio(sums / math.log(2), num_bytes)

    def effective_context(self, reading: Reading, base: Reading) -> Value:
        """Return the longest length up to which the tail stays within 0.02 nats of the in-window
        value; 0 if not even the first length does.

        The first length is the first one of at least the tail. With eight documents or more the
        one-sided 95 % upper end of the paired difference must stay below; the answer is then
        certain to that degree and is its own interval.
        """
        reached = 0
        long_enough = [length for length in self.lengths if length >= self.tail]
        for length in long_enough or self.lengths:
            span = self.tail_span(length)
            sums, counts = reading.sums(*span)
            excess = sums - base.sums(*span)[0]
            worst = self.bootstrap.upper(excess, counts)
            if worst is None:
                worst = float(excess.sum() / counts.sum())
            # `not <=` so that a not-a-number ends the climb.
            if not worst <= EFFECTIVE_MARGIN:
                break
            reached = length
        num_documents = len(reading.sums(1, 2)[0])
        interval = None
        if num_documents >= FEWEST_DOCUMENTS:
            interval = (float(reached), float(reached))
        return Value(float(reached), None, interval, num_documents)

    def octaves(self, parts: int = 1) -> tuple[tuple[int, int], ...]:
        """Return the ranges of positions in tables and plots of loss by position; none if only a
        tail is scored."""
        if not self.scoring.scores_all:
            return ()
        return octaves(self.context, self.longest, parts)


@dataclass(frozen=True)
class OctaveLoss:
    """The NLL of the tokens at positions [start, stop), and the base's through its short window on
    the same tokens."""

    start: int
    stop: int
    nll: Value
    base: Value | None = None
    gain: Value | None = None


def loss_by_position(
    frame: LossStatistics, reading: Reading, base: Reading | None
) -> list[OctaveLoss]:
    """Return the loss in each octave of positions, as results.json holds it."""
    octave_losses = list[OctaveLoss]()
    for start, stop in frame.octaves():
        span = (start, stop)
        loss = OctaveLoss(start, stop, frame.nll(reading, span))
        if base is not None:
            base_nll = frame.nll(base, span)
            gain = frame.difference(base, reading, span)
            loss = replace(loss, base=base_nll, gain=gain)
        octave_losses.append(loss)
    return octave_losses


def strided_values(
    frame: LossStatistics, windows: Mapping[int, Sequence[npt.NDArray[Any]]]
) -> dict[str, Value]:
    """Return `hf_stride@C` from each document's weighted sum and weight under the strided loop."""
    values = dict[str, Value]()
    for length, documents in windows.items():
        sums, weights = np.transpose(documents)
        values[f"{STRIDED}@{length}"] = frame.bootstrap.ratio(sums, weights, np.exp)
    return values


def truncation_verdicts(
    frame: LossStatistics, values: Mapping[str, Value], label: str
) -> list[str]:
    """Return the numbers' meaning in sentences; the first one says if truncation beats the
    extension. Below eight documents there is none."""
    losing = dict[int, Value]()
    winning = list[int]()
    for length in frame.lengths:
        gain = values.get(f"gain@{length}")
        if gain is None or length <= frame.context:
            continue
        if gain.sign < 0:
            losing[length] = gain
        elif gain.sign > 0:
            winning.append(length)
    lines = list[str]()
    if losing:
        worst = min(losing, key=lambda length: losing[length].value)
        lines.append(
            f"Truncation beats {label} at {lengths_text(list(losing))}: the base on its last "
            f"{length_text(frame.context)} tokens predicts the same tokens better, by "
            f"{-losing[worst].value:.3f} nats per token at {length_text(worst)}."
        )
    if winning:
        lines.append(f"The longer context helps {label} at {lengths_text(winning)}.")
    tax = values.get("short_tax")
    if tax is not None and tax.sign > 0 and tax.value > 0.001:
        lines.append(
            f"Inside the trained context {label} pays a short tax of {tax.value:.4f} nats per "
            "token."
        )
    return lines
