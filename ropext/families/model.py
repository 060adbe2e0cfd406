"""What a config says about positions, and what is said about a config."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ropext.forms import Params
from ropext.rope import Rope


@dataclass(frozen=True)
class Site:
    """One rotary embedding of the model."""

    label: str  # "" where there is one, else its key inside the nested rope dict
    rope: Rope  # geometry, current scaling and contexts
    params: Params  # the current dict in transformers-5 names, complete
    layers: int | None  # how many layers use it, where the config says so
    scaled: bool  # whether an extension scales it (full attention) or leaves it alone


class CacheLayer(NamedTuple):
    """What one layer keeps in the KV cache."""

    values: int  # numbers per token
    window: int | None  # only of so many last tokens
    rate: int | None = None  # and one entry for every so many tokens, beside the window

    def kept(self, tokens: int) -> int:
        entries = min(tokens, self.window or tokens) + (tokens // self.rate if self.rate else 0)
        return self.values * entries


@dataclass(frozen=True)
class Model:
    """The position scheme that a config describes."""

    model_type: str
    text_type: str
    path: tuple[str, ...]  # where the text part stands inside the config
    sites: tuple[Site, ...]
    stock_sites: tuple[Site, ...]  # as stock has them, where it is known to differ from the authors
    context: int  # tokens it reads now
    stated_context: int  # what its max_position_embeddings says
    layers: int | None
    hidden_size: int | None
    heads: int | None
    kv_heads: int | None
    head_dim: int | None
    vocab_size: int | None
    layer_types: tuple[str, ...]
    sliding_window: int | None
    nope_layers: int  # attention layers that rotate nothing
    interleaved: bool
    masked_lm: bool
    mrope: bool  # images turn by three axes, which engines keep with a theta or a yarn alone
    forms: tuple[str, ...]  # stock rope types that this family computes correctly
    temperature: str  # "whole", "rotated channels" or "cancelled" (a norm after the rotation)
    reach: int | None  # tokens that a model of windows alone can see; None = unlimited
    kv_layers: tuple[CacheLayer, ...] | None  # of the layers that keep anything
    notes: tuple[str, ...]
    obstacles: tuple[str, ...]  # why scaling cannot help here
    asks_context: str = ""  # a sentence where the config leaves open how many tokens it reads ...
    asks_original: str = ""  # ... or read before the scaling that it declares
    container: str = ""  # the GGUF architecture that carries it; "" is a config.json

    @property
    def scaled_sites(self) -> tuple[Site, ...]:
        return tuple(s for s in self.sites if s.scaled)

    def site(self, label: str) -> Site:
        return next(s for s in self.sites if s.label == label)

    def kv_bytes(self, tokens: int, bytes_per_value: int = 2) -> int | None:
        """The KV cache of one sequence of `tokens`; windowed layers keep their window only. A
        masked language model reads all at once and has none."""
        if self.kv_layers is None or self.masked_lm:
            return None
        return bytes_per_value * sum(layer.kept(tokens) for layer in self.kv_layers)

    @property
    def kv_bytes_per_token(self) -> int | None:
        """The cache of one token at 2 bytes per value, while the sequence is inside the window."""
        return self.kv_bytes(1)


@dataclass(frozen=True)
class Edit:
    """One change of a config."""

    path: tuple[str, ...]
    before: Any  # ABSENT where the key is new
    after: Any  # ABSENT where the key is removed

    def to_json(self) -> dict[str, Any]:
        """Leave `before` out where the key is new, and `after` where it is removed."""
        sides = {"before": self.before, "after": self.after}
        present = {side: value for side, value in sides.items() if value is not ABSENT}
        return {"key": ".".join(self.path)} | present


class Absent:
    """Stands where a key is missing, which null does not."""

    def __repr__(self) -> str:
        return "absent"


ABSENT = Absent()


@dataclass(frozen=True)
class Problem:
    """Something wrong in a config that was written by somebody else."""

    key: str
    sentence: str
    fixable: bool = True  # by writing the spellings anew from what stock transformers reads
    dropped: bool = False  # missed by those alone who do not know rope_parameters
    disputed: bool = False  # two spellings disagree, and the config alone cannot say which is right


def diff(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Edit]:
    """Every value that changed, by path; lists and rope dicts of other types count as one value."""
    edits: list[Edit] = []
    for key in [*old, *(k for k in new if k not in old)]:
        before = old.get(key, ABSENT)
        after = new.get(key, ABSENT)
        if isinstance(before, dict) and isinstance(after, dict):
            edits += [Edit((key, *e.path), e.before, e.after) for e in diff(before, after)]
        elif before != after or type(before) is not type(after):
            edits.append(Edit((key,), before, after))
    return edits
