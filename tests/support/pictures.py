"""Pictures of one pixel, for tests that look at none: matplotlib's layout takes as long as all
other work with a tiny model.

The files below get whole pictures, and the commands of tests/golden draw each kind of picture.
"""

import base64

from ropext.results.report import plots

# Test files that look at pictures.
LOOKING = (
    "test_drawn_values",
    "test_names_in_pictures",
    "test_eval_commands",
    "test_docs",
    "test_demo",
    "test_spectra",
)
PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
whole = plots.png_bytes


def blank(figure: object) -> bytes:
    """Return one pixel, signed as every picture of ropext's is."""
    return plots._signed_png(PIXEL)


def draw(wholly: bool) -> None:
    """Let every later picture of this process be whole, or one pixel."""
    plots.png_bytes = whole if wholly else blank
