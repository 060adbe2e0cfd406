"""Find the rotary embeddings in a config dict, and write new ones back.

Pure: dict in, dict out. `table` has one row per family that is not flat, types.json the census of
model types, defaults.json the meaning of absent keys, published.json the authors' recommendations.
"""

from ropext.families.config import text_part
from ropext.families.model import LENGTH_KEYS, Model, diff
from ropext.families.params import keep_query_scales
from ropext.families.published import recipe_of
from ropext.families.reading import as_read, read
from ropext.families.respelling import check_spellings, respell, with_spelling_in_force
from ropext.families.writing import FREE_KEYS, as_written, unexpected_changes, write

__all__ = [
    "FREE_KEYS",
    "LENGTH_KEYS",
    "Model",
    "as_read",
    "as_written",
    "check_spellings",
    "diff",
    "keep_query_scales",
    "read",
    "recipe_of",
    "respell",
    "text_part",
    "unexpected_changes",
    "with_spelling_in_force",
    "write",
]
