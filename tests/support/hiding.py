"""Model types as ropext will meet them that are released after it: taken out of all its tables."""

from collections.abc import Iterator
from contextlib import contextmanager

from ropext.families import config, table
from ropext.families.described import forget


@contextmanager
def hidden(*kinds: str) -> Iterator[None]:
    """Let the census, its defaults and the table of families lack these types."""
    defaults = config.packaged_facts("defaults.json")
    tables = (config.census(), defaults["types"], defaults["composites"], table.FAMILIES)
    taken = [{kind: held.pop(kind) for kind in kinds if kind in held} for held in tables]
    three_axes = table.MROPE
    table.MROPE = three_axes - set(kinds)
    forget()
    try:
        yield
    finally:
        for held, entries in zip(tables, taken, strict=True):
            held.update(entries)
        table.MROPE = three_axes
        forget()
