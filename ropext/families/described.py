"""What stock transformers showed of model types that the census lacks.

Whoever opens a config asks (stock.py) and hands the answer over; it is kept by that config, and by
the config without the keys that an extension writes, for what is made of it in this process.
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
    """What one rotary module of a config computes."""

    label: str
    inv_freq: tuple[float, ...]
    attention_factor: float


@dataclass(frozen=True)
class Described:
    """What stock transformers shows of one model type."""

    transformers: str  # the version that was asked
    scheme: str  # "rotary", "composite" or a key of config.REFUSALS
    path: tuple[str, ...]  # composite: where its text part stands
    text: str  # composite: the type of that part
    auto_class: str  # the class by which it is loaded; "" where none does
    added: JsonObject  # composite: what it adds to a text part that leaves keys out
    defaults: JsonObject  # what absent keys mean, as the entries of families/defaults.json
    row: JsonObject  # how its keys are read, as the fields of a family's row
    rotates: tuple[bool | None, ...]  # of a small copy, whether each of its first layers turns
    unseen: str  # why there is no small copy of it
    widths: tuple[int | None, ...]  # numbers that each layer's projections make keys and values of
    asked: str  # the digest of the config that was asked about ...
    numbers: tuple[Numbers, ...]  # ... and what stock computes of it

    def numbers_of(self, config: JsonObject) -> tuple[Numbers, ...]:
        """What stock computes of a config; nothing where it was asked about another one."""
        return self.numbers if digest(config) == self.asked else ()


Facts = Mapping[str, Described]  # by model type
NO_FACTS: Facts = {}
_BY_CONFIG: dict[str, Facts] = {}
_BY_SHAPE: dict[str, Facts] = {}


def remember_facts(config: JsonObject, facts: Facts) -> None:
    """Keep what was found out about the types of a config, for whoever reads it again."""
    _BY_CONFIG.setdefault(digest(config), facts)
    _BY_SHAPE[_shape(config)] = facts


def remembered_facts(config: JsonObject) -> Facts:
    """What was found out about the types of a config, or of one that differs from it in the keys
    that an extension writes."""
    facts = _BY_CONFIG.get(digest(config))
    if facts is None:
        return _BY_SHAPE.get(_shape(config), NO_FACTS)
    return facts


def is_remembered(config: JsonObject) -> bool:
    """Whether this very config was asked about, or was written here."""
    return digest(config) in _BY_CONFIG


def forget() -> None:
    """Ask anew about every config."""
    _BY_CONFIG.clear()
    _BY_SHAPE.clear()


def _shape(config: JsonObject) -> str:
    return digest(_without_written(config))


def _without_written(value: Json) -> Json:
    """A config without the keys that an extension writes, in its parts either."""
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
    """Whether a rope key may say which layers rotate: by a list, or by a null in its dict."""
    return isinstance(item, list) or (isinstance(item, Mapping) and None in item.values())
