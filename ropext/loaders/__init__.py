"""What each loader and version makes of a rope config: a table, as data, and its lookups."""

from ropext.loaders.kinds import kind_of, kinds_of
from ropext.loaders.lookup import (
    LoaderReading,
    exact_in,
    loader_of,
    misread,
    nearest_exact,
    newest,
    parse_for,
    readers_for,
    readings,
    reads_exactly,
    select,
    select_file,
    unmeasured,
)
from ropext.loaders.serving import (
    OverrideLine,
    ServedDirectory,
    Serving,
    file_lines,
    file_override_line,
    override_lines,
    serving_lines,
)
from ropext.loaders.table import WRONG, readers

__all__ = [
    "WRONG",
    "LoaderReading",
    "OverrideLine",
    "ServedDirectory",
    "Serving",
    "exact_in",
    "file_lines",
    "file_override_line",
    "kind_of",
    "kinds_of",
    "loader_of",
    "misread",
    "nearest_exact",
    "newest",
    "override_lines",
    "parse_for",
    "readers",
    "readers_for",
    "readings",
    "reads_exactly",
    "select",
    "select_file",
    "serving_lines",
    "unmeasured",
]
