"""Values out of a config dict that somebody else wrote: the right type and range, or one sentence.

A config.json may hold any JSON value at any key. Every number that a spectrum is computed from
comes through here, so that a wrong one is told by its key and never becomes a traceback.
"""

import math
from collections.abc import Mapping
from typing import Any

from ropext.errors import InputError

LONGEST_LIST = 1 << 16  # pairs of a head, or layers of a model: far above any real one
LARGEST = 1 << 40
MOST = 1e12  # above it a sum with 1 loses the 1 (no factor or length is near)
SMALLEST = 1e-12  # below it a logarithm or a quotient leaves the range of a float


def shown(value: object) -> str:
    """A value as it may stand in a sentence."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def named(key: str) -> str:
    """A key as it may stand in a sentence: as it is, unless it is long or would not print."""
    return key if len(key) <= 60 and key.isprintable() else shown(key)


class Dict:
    """One JSON object of a config, with its path for messages. null counts as absent."""

    def __init__(self, values: Mapping[str, Any], where: str = "") -> None:
        self.values = values
        self.where = where

    def name(self, key: str) -> str:
        return f"{self.where}.{named(key)}" if self.where else named(key)

    def _wrong(self, key: str, wanted: str) -> InputError:
        found = shown(self.values[key])
        return InputError(f"config.json: {self.name(key)} must be {wanted}, was {found}")

    def at(self, path: str) -> "tuple[Dict, str]":
        """The object that a dotted path leads to (empty where it is missing), and its key."""
        here: Dict = self
        *parents, key = path.split(".")
        for parent in parents:
            here = here.object(parent) or Dict({}, here.name(parent))
        return here, key

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def integer(self, key: str, low: int = 1, high: int = LARGEST) -> int | None:
        value = self.values.get(key)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self._wrong(key, f"a whole number of {low} to {high}")
        return value

    def number(
        self,
        key: str,
        low: float = 0.0,
        *,
        zero: bool = False,
        smallest: float = SMALLEST,
        most: float = MOST,
    ) -> float | None:
        """A number above `low` by `smallest` (or equal to it with `zero`), and below `most`."""
        value = self.values.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(key, "a number")
        # An integer of hundreds of digits does not fit a float (so no isfinite before the bound);
        # 1e300 does, and breaks powers. NaN fails every comparison.
        good = -most < value < most and float(value) < most  # 10**30 < 1e30 rounds up to it
        good = good and (value >= low + smallest or (zero and value == low))
        if not good:
            since = "from" if zero else "above"
            raise self._wrong(key, f"a number {since} {low:g} and below {most:g}")
        return float(value)

    def text(self, key: str) -> str | None:
        value = self.values.get(key)
        if value is not None and not isinstance(value, str):
            raise self._wrong(key, "a string")
        return value

    def flag(self, key: str) -> bool | None:
        value = self.values.get(key)
        if value is not None and not isinstance(value, bool):
            raise self._wrong(key, "true or false")
        return value

    def object(self, key: str) -> "Dict | None":
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self._wrong(key, "an object")
        return Dict(value, self.name(key))

    def _list(self, key: str, of: str) -> list[Any] | None:
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) > LONGEST_LIST:
            raise self._wrong(key, f"a list of at most {LONGEST_LIST} {of}")
        return value

    def numbers(self, key: str, *, zero: bool = False, most: float = MOST) -> list[float] | None:
        """A list of numbers; transformers' {"__float__": "Infinity"} counts as one."""
        found = self._list(key, "numbers")
        if found is None:
            return None
        out = []
        for i, value in enumerate(found):
            if isinstance(value, dict) and value.get("__float__") == "Infinity":
                value = math.inf
            if value == math.inf and not isinstance(value, bool):
                out.append(math.inf)
                continue
            item = Dict({f"{key}[{i}]": value}, self.where)
            number = item.number(f"{key}[{i}]", zero=zero, most=most)
            if number is None:
                raise self._wrong(key, "a list of numbers without null")
            out.append(number)
        return out

    def strings(self, key: str) -> list[str] | None:
        found = self._list(key, "strings")
        if found is not None and not all(isinstance(v, str) for v in found):
            raise self._wrong(key, "a list of strings")
        return found
