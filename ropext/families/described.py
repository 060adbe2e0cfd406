"""Keep the facts that stock transformers showed about model types that the census lacks.

The code that opens a config queries stock (stock.py) and stores the answer here. It is kept under
that config, and under the config without the keys that an extension writes, so that this process
finds it for results made from it.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from ropext.base.jsontext import Json, JsonObject, digest

# Keys that an extension writes: rope dicts, theta, the partial factor and lengths. They change no
# fact of a type, for the child sets them itself.
WRITTEN = re.compile(
    r"theta|rotary_emb_base|rope_\w*base|^rope_(scaling|parameters)$|^partial_rotary_factor$"
    r"|^rotary_pct$|max_position_embeddings$"
    r"|^(max_)?seq(uence)?_len(gth)?$|^n_(positions|ctx)$|^model_max_length$"
)


@dataclass(frozen=True)
class Numbers:
    """The numbers that one rotary module of a config computes."""

    label: str
    inv_freq: tuple[float, ...]
    attention_factor: float


@dataclass(frozen=True)
class Described:
    """The facts that stock transformers shows about one model type."""

    transformers: str  # the version that answered
    scheme: str  # "rotary", "composite" or a key of config.REFUSALS
    path: tuple[str, ...]  # composite: the path of its text part
    text: str  # composite: the type of that part
    auto_class: str  # the class that loads it; "" if none does
    added: JsonObject  # composite: the keys that it adds to a text part that omits them
    defaults: JsonObject  # the meaning of absent keys, as the entries of families/defaults.json
    row: JsonObject  # how its keys are read, as the fields of a family's row
    rotates: tuple[bool | None, ...]  # whether each of the first layers of a small copy rotates
    unseen: str  # why there is no small copy of it
    widths: tuple[int | None, ...]  # numbers that each layer's projections make keys and values of
    asked: str  # the digest of the queried config ...
    numbers: tuple[Numbers, ...]  # ... and the numbers that stock computes from it

    def numbers_of(self, config: JsonObject) -> tuple[Numbers, ...]:
        """Return the RoPE numbers that stock transformers computes for a config; none if it was
        queried about another config."""
        return self.numbers if digest(config) == self.asked else ()


Facts = Mapping[str, Described]  # by model type
NO_FACTS: Facts = {}
_BY_CONFIG: dict[str, Facts] = {}
_BY_SHAPE: dict[str, Facts] = {}


def remember_facts(config: JsonObject, facts: Facts) -> None:
    """Keep the facts about the model types of a config, for later reads of it."""
    _BY_CONFIG.setdefault(digest(config), facts)
    _BY_SHAPE[_shape_of_config(config)] = facts


def remembered_facts(config: JsonObject) -> Facts:
    """Return the facts about the model types of a config, or of a config that differs from it only
    in keys that an extension writes."""
    facts = _BY_CONFIG.get(digest(config))
    if facts is None:
        return _BY_SHAPE.get(_shape_of_config(config), NO_FACTS)
    return facts


def is_remembered(config: JsonObject) -> bool:
    """Return whether facts about the model types of this very config are kept."""
    return digest(config) in _BY_CONFIG


def forget() -> None:
    """Drop all kept facts, which transformers showed about model types that the census lacks."""
    _BY_CONFIG.clear()
    _BY_SHAPE.clear()


def _shape_of_config(config: JsonObject) -> str:
    """Return a digest of a config. The keys that an extension writes do not count, for they change
    no fact about a model type."""
    return digest(_without_written(config))


def _without_written(value: Json) -> Json:
    """Return a config without the keys that change no fact about its model type. They are, at any
    depth, rope dicts, theta, lengths and the others that an extension writes. A rope key that may
    stop layers stays."""
    if isinstance(value, list):
        return [_without_written(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    kept = {}
    for key, item in value.items():
        if not WRITTEN.search(key) or _may_stop_layers(item):
            kept[key] = _without_written(item)
    return kept


def _may_stop_layers(item: Json) -> bool:
    """Return whether a rope key of a config may state which layers rotate: by a list, or by a null
    in its dict."""
    return isinstance(item, list) or (isinstance(item, Mapping) and None in item.values())
