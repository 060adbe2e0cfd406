"""Key tokens: those that a reference run predicts far better than the base's short window does.

After LongPPL (Fang et al. 2024), without its outside evaluator. A token beyond the trained context
is a key if the base, through its short window, loses at least two nats more on it than the
reference does, which reads all before it. The base reads nothing beyond its window, so a run that
does has to say where far text helps. Three things follow, and are told with every number:

- The reference's own loss on the keys is low by selection; it is no score.
- What the reference does not find is no key: a model that finds more gets no credit for it.
- Chance makes keys too. Tokens on which the reference is worse by as much (`mirrored`) say how many
  there would be if long context helped and hurt alike.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ropext.errors import UsageError
from ropext.results.comparison import Contender, pair
from ropext.results.gates import BASE
from ropext.results.values import Value, values_json

MARGIN = 2.0  # nats, as LongPPL's


@dataclass(frozen=True)
class Keys:
    """How many there are, and each one's nats per token on them and on all tokens there."""

    reference: str
    span: tuple[int, int]
    keys: int
    mirrored: int
    tokens: int
    losses: Mapping[str, Mapping[str, Value]]  # `keys` and `whole`, by label

    def to_json(self) -> dict[str, Any]:
        """As `ropext compare --keys --json` prints it."""
        found: dict[str, Any] = values_json(self)
        return found


def key_tokens(contenders: Mapping[str, Contender], reference: str) -> Keys:
    """The keys of a reference, and what every contender loses on them."""
    readers = [own for own in contenders.values() if own.reading is not None]
    names = [own.label for own in readers]
    base = next((name for name in names if name.rpartition(":")[2] == BASE), None)
    if base is None:
        raise UsageError("--keys needs the base's short window, and none of these runs has read it")
    if reference == base or reference not in names:
        others = ", ".join(name for name in names if name != base)
        raise UsageError(f"--keys names one of what is compared ({others}), was {reference!r}")
    frame, readings, _ = pair(readers)
    start = frame.longest - frame.tail if frame.mask_stride else frame.context
    span = (start, frame.longest)
    if frame.longest <= frame.context:
        raise UsageError("--keys is about tokens beyond the trained context, and none was measured")
    falls = [
        short - long
        for short, long in zip(
            readings[base].tokens(*span), readings[reference].tokens(*span), strict=True
        )
    ]

    def loss(label: str, masks: Sequence["np.ndarray[Any, Any]"]) -> Value:
        parts = [own[mask] for own, mask in zip(readings[label].tokens(*span), masks, strict=True)]
        return frame.bootstrap.ratio([own.sum() for own in parts], [len(own) for own in parts])

    keys, whole = [own >= MARGIN for own in falls], [np.isfinite(own) for own in falls]
    return Keys(
        reference,
        span,
        keys=sum(int(mask.sum()) for mask in keys),
        mirrored=sum(int((own <= -MARGIN).sum()) for own in falls),
        tokens=sum(map(len, falls)),
        losses={
            label: {"keys": loss(label, keys), "whole": loss(label, whole)} for label in readings
        },
    )
