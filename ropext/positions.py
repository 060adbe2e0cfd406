"""What a model without a rotary embedding has: Rope's sisters. Values alone, no files.

A learned table holds one row per position: position p reads row `offset + p` (OPT and RoBERTa keep
two rows in front of the first). Every other scheme here is computed from a length or from the
distance of two tokens, and no weight holds it.
"""

from dataclasses import dataclass
from typing import Literal

Kind = Literal[
    "learned", "sinusoidal", "buckets", "disentangled", "mixed", "alibi", "transformer-xl"
]


@dataclass(frozen=True)
class Positions:
    """The position scheme of a model that rotates nothing, as its config describes it."""

    model_type: str
    text_type: str
    path: tuple[str, ...]  # where the text part stands inside the config
    kind: Kind
    context: int  # tokens it reads now; 0 = its config names no length
    key: str = ""  # the length key as the config spells it
    tensors: tuple[str, ...] = ()  # how the names of its tables end
    offset: int = 0  # the row that position 0 reads
    beyond: int = 0  # rows less what the length key says

    @property
    def rows(self) -> int:
        """Rows of a table that holds this context."""
        return self.offset + self.context
