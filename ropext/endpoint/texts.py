"""Compute the perplexity of a server over the user's texts, and of an unscaled server through the
short window. Readings are kept document by document."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ropext.base.jsontext import JsonObject
from ropext.endpoint.losses import Ids, TokenLosses
from ropext.results import BASE
from ropext.results.measurement import Store, loss_file_name
from ropext.results.metrics import ReadText, text_values
from ropext.results.numbers import ModelNumbers
from ropext.results.perplexity import (
    SHORT_WINDOW,
    Documents,
    EvaluationSettings,
    Reading,
    TokenNll,
    loss_by_position,
    truncation_verdicts,
)

WHOLE, SHORT = "pass", "short"  # folders of readings


@dataclass(frozen=True)
class PortTexts:
    """The texts as tokens: the same ones that an evaluation of a directory takes from this data."""

    documents: Documents
    ids: tuple[Ids, ...]
    bos: int | None  # the first token of each
    counts: JsonObject  # of documents, for results


@dataclass(frozen=True)
class TextPlan:
    """The servers that read the texts; `base` is a server of the unscaled model."""

    frame: EvaluationSettings
    texts: PortTexts
    losses: TokenLosses
    base: TokenLosses | None = None

    @property
    def hashes(self) -> list[str]:
        """Return the hashes that identify the texts that a server reads."""
        return [one[self.frame.longest] for one in self.texts.documents.prefix_hashes]

    @property
    def decides(self) -> JsonObject:
        """Return the values that decide the losses that a server returns for texts."""
        bos = self.texts.bos
        return {"documents": self.hashes, "bos": bos, "short_window": SHORT_WINDOW}

    def regimes(self, label: str) -> dict[str, int]:
        """Return the pass length of each folder of a server's losses."""
        longest = self.frame.longest
        if label == BASE:
            return {SHORT: longest}
        return {f"{WHOLE}-{longest}": longest}

    def units(self, label: str) -> Iterator[tuple[str, Ids]]:
        """Yield the file of a server's losses for each text, and the text as tokens."""
        (regime,) = self.regimes(label)
        for ids, name in zip(self.texts.ids, self.hashes, strict=True):
            yield loss_file_name(regime, name), ids

    def read(self, label: str, ids: Ids) -> TokenNll:
        """Return the losses that the server of a row gives one text."""
        if label == BASE and self.base is not None:
            return self.base.read_short(ids, self.frame.context, self.texts.bos)
        return self.losses.read(ids)

    def numbers(self, stores: Mapping[str, Store]) -> dict[str, ModelNumbers]:
        """Return the perplexities that follow from the servers' losses, by row."""
        readings = dict[str, Reading]()
        for label, store in stores.items():
            readings[label] = store.reading(label, self.regimes(label), self.hashes)
        numbers = dict[str, ModelNumbers]()
        for label, reading in readings.items():
            base: Reading | None = None
            if label != BASE:
                base = readings.get(BASE)
            text = ReadText(self.frame, reading, base, self.texts.documents)
            values = text_values(text)
            says = list[str]()
            if base is not None:
                says = truncation_verdicts(self.frame, values, self.losses.port.model)
            positions = tuple(loss_by_position(self.frame, reading, base))
            numbers[label] = ModelNumbers(values, positions, verdicts=tuple(says))
        return numbers
