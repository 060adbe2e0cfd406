"""What a config says about positions, and what is said about a config."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from ropext.families.described import Facts
from ropext.rope import ABSENT, Edit, RopeSite


class CacheLayer(NamedTuple):
    """What one layer keeps in the KV cache."""

    values: int  # numbers per token
    window: int | None  # only of so many last tokens
    rate: int | None = None  # and one entry for every so many tokens, beside the window
    is_latent: bool = False  # one vector for all heads, from which keys and values are made

    def kept(self, tokens: int) -> int:
        entries = min(tokens, self.window or tokens) + (tokens // self.rate if self.rate else 0)
        return self.values * entries


@dataclass(frozen=True)
class Model:
    """The position scheme that a config describes."""

    model_type: str
    text_type: str
    path: tuple[str, ...]  # where the text part stands inside the config
    sites: tuple[RopeSite, ...]
    # As stock has them, where it is known to differ from the authors.
    stock_sites: tuple[RopeSite, ...]
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
    described: Facts = field(default_factory=dict, repr=False)  # of types that the census lacks

    @property
    def scaled_sites(self) -> tuple[RopeSite, ...]:
        return tuple(s for s in self.sites if s.scaled)

    def site(self, label: str) -> RopeSite:
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
    for key in dict.fromkeys(old) | dict.fromkeys(new):
        before = old.get(key, ABSENT)
        after = new.get(key, ABSENT)
        if isinstance(before, dict) and isinstance(after, dict):
            for edit in diff(before, after):
                edits.append(replace(edit, key=f"{key}.{edit.key}"))
        elif before != after or type(before) is not type(after):
            edits.append(Edit(key, before, after))
    return edits
