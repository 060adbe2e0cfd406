"""Options of `ropext plan` that ask which context fits into a memory."""

import re
from typing import Annotated

from pydantic import AfterValidator

from ropext.base.errors import UsageError
from ropext.options.cache import CACHE_NAMES, full_cache_name
from ropext.options.fields import Count, Neutral, Options, Panel, Words, wanted

_MEMORY = re.compile(r"(\d{1,12}(?:\.\d{1,6})?)\s*(|[kmgt])(|i?b)", re.IGNORECASE)
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def _memory_option(text: str) -> str:
    """Check the option --memory: an amount that `memory_bytes` can read, of at least 1 MiB."""
    if memory_bytes(text) < _UNITS["m"]:
        raise UsageError(f"--memory {text[:60]!r} is below 1 MiB; 12 gigabytes are 12G")
    return text


def memory_bytes(text: str) -> int:
    """Return the value of --memory in bytes: a unit of `12G` is a power of 1,024, as vendors of
    memory count."""
    match = _MEMORY.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"--memory {text[:60]!r} is not an amount of memory; write 12G or 12GiB")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def _known_caches(names: tuple[str, ...]) -> tuple[str, ...]:
    """Check the option --kv of `plan`: return the full names of the types of cache, and refuse an
    unknown one."""
    full = tuple(map(full_cache_name, names))
    for name in full:
        if name not in CACHE_NAMES:
            known = ", ".join(CACHE_NAMES)
            raise UsageError(f"--kv {name[:60]!r} is not a type of KV cache; known are {known}")
    return full


CacheNames = Annotated[Words, AfterValidator(_known_caches)]
Memory = Annotated[str, AfterValidator(_memory_option)]


class MemoryOptions(Options):
    """How much memory there is, and how it is used."""

    memory: Neutral[Memory | None] = wanted(
        None,
        "say which context fits into so much memory, weights and KV cache together, e.g. 12G",
        "SIZE",
        panel=Panel.HOW_FAR,
        basic=True,
    )
    kv: Neutral[CacheNames] = wanted(
        (),
        f"--memory: types of KV cache, of {', '.join(CACHE_NAMES)} [all; fp8 not of a GGUF]",
        "LIST",
        panel=Panel.HOW_FAR,
    )
    parallel: Neutral[Count] = wanted(
        1,
        "--memory: whole sequences that are read at the same time",
        panel=Panel.HOW_FAR,
    )
