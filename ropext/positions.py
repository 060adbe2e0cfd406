"""What a model without a rotary embedding has: Rope's sisters. Values alone, no files.

A learned table holds one row per position: position p reads row `offset + p` (OPT and RoBERTa keep
two rows in front of the first). Every other scheme here is computed from a length or from the
distance of two tokens, and no weight holds it.
"""

import re
from dataclasses import dataclass

SCHEMES = {
    "learned": "a learned table of absolute positions",
    "sinusoidal": "sinusoids added to the embeddings",
    "buckets": "T5's relative buckets",
    "disentangled": "DeBERTa's relative positions",
    "mixed": "absolute and relative positions",
    "alibi": "ALiBi, a slope per head",
    "transformer-xl": "Transformer-XL's relative positions",
}

# Towers of other modalities in a composite, whose tables count patches or frames.
NOT_TEXT = re.compile(r"vision|visual|image|audio|qformer")


@dataclass(frozen=True)
class Positions:
    """The position scheme of a model that rotates nothing, as its config describes it."""

    model_type: str
    text_type: str
    path: tuple[str, ...]  # where the text part stands inside the config
    kind: str  # of SCHEMES
    context: int  # tokens it reads, or tells apart, now; 0 = its config names no length
    key: str = ""  # the key that an extension raises, as the config spells it; none = no extension
    tensors: tuple[str, ...] = ()  # how the names of its tables end
    offset: int = 0  # the row that position 0 reads
    beyond: int = 0  # rows less what the length key says
    causal: bool = False  # whether the family predicts the next token
    buckets: int = 0  # into which relative distances fall

    @property
    def carried(self) -> bool:
        """Whether a stock checkpoint can say of its scheme that it was extended."""
        return bool(self.key) and self.kind != "alibi"

    @property
    def rows(self) -> int:
        """Rows of a table that holds this context."""
        return self.offset + self.context

    def is_table(self, name: str) -> bool:
        """Whether a tensor of this name is one of its tables."""
        ends = "|".join(map(re.escape, self.tensors))
        other = self.path and NOT_TEXT.search(name)
        return bool(ends and re.search(rf"(^|\.)({ends})$", name)) and not other
