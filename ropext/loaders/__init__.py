"""What each loader and version makes of a rope config: a table, as data, and its lookups."""

from ropext.loaders.serving import Serving, file_lines, override_lines, serving_lines
from ropext.loaders.table import (
    KINDS,
    LoaderReading,
    exact_in,
    kind_of,
    kinds_of,
    nearest_exact,
    parse_for,
    readers,
    readings,
    select,
)

__all__ = [
    "KINDS",
    "LoaderReading",
    "Serving",
    "exact_in",
    "file_lines",
    "kind_of",
    "kinds_of",
    "nearest_exact",
    "override_lines",
    "parse_for",
    "readers",
    "readings",
    "select",
    "serving_lines",
]
