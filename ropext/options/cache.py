"""Types of KV cache by name: `plan --memory` counts their bytes, and `eval --kv` rounds by them."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import AfterValidator

from ropext.base.errors import UsageError
from ropext.options.fields import Words

UNROUNDED = "f16"
CACHE_NAMES = (UNROUNDED, "q8_0", "q4_0", "fp8")
SHORT_NAMES = {"q8": "q8_0", "q4": "q4_0"}  # what most people type
APART = "/"  # separates the type of the keys from the type of the values


@dataclass(frozen=True)
class StoredCache:
    """How an engine stores keys and values; `f16` leaves them as they are computed."""

    keys: str
    values: str

    @property
    def name(self) -> str:
        """Return the value of the option --kv as a row's label: `q8_0-q4_0`. It also names a
        folder."""
        return self.keys if self.keys == self.values else f"{self.keys}-{self.values}"


def full_cache_name(name: str) -> str:
    """Return the full spelling of a value that the option --kv takes: `q8_0` for the short `q8`."""
    return SHORT_NAMES.get(name, name)


def stored_cache(name: str) -> StoredCache:
    """Check and read one value of the option --kv: `q8_0`, or `q8_0/q4_0` for keys and values
    apart."""
    keys, separator, values = name.partition(APART)
    if not separator:
        values = keys
    keys, values = full_cache_name(keys), full_cache_name(values)
    for kind in (keys, values):
        if kind not in CACHE_NAMES:
            raise UsageError(
                f"--kv {name[:60]!r}: {kind[:60]!r} is not a type of KV cache; known are "
                f"{', '.join(CACHE_NAMES)}, or two of them as KEYS/VALUES, such as q8_0/q4_0"
            )
    return StoredCache(keys, values)


def _rounded_caches(names: tuple[str, ...]) -> tuple[str, ...]:
    """Check the option --kv of `eval`: each cache differs from the others, and each rounds keys or
    values."""
    for name in names:
        if stored_cache(name) == StoredCache(UNROUNDED, UNROUNDED):
            raise UsageError(
                f"--kv {name}: the row without a rounded cache is read anyway; leave it out"
            )
        if [stored_cache(other) for other in names].count(stored_cache(name)) > 1:
            raise UsageError(f"--kv names {name} twice")
    return names


RoundedCaches = Annotated[Words, AfterValidator(_rounded_caches)]
