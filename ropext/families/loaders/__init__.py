"""Look up how each loader and version reads a rope config, in a table kept as data."""

from ropext.families.loaders.lookup import (
    LoaderReading,
    kinds_of,
    loader_of,
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
from ropext.families.loaders.serving import (
    OverrideLine,
    ServedDirectory,
    Serving,
    file_lines,
    file_override_line,
    override_lines,
    serving_lines,
)
from ropext.families.loaders.table import WRONG, readers

__all__ = [
    "WRONG",
    "LoaderReading",
    "OverrideLine",
    "ServedDirectory",
    "Serving",
    "file_lines",
    "file_override_line",
    "kinds_of",
    "loader_of",
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
