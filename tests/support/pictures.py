"""Pictures of one pixel, for tests that look at none: what matplotlib lays out and fills takes as
long as all else that is done with a tiny model.

Drawn whole are those of the files below, and each kind of picture by the commands of tests/golden.
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
whole = plots.png


def blank(figure: object) -> bytes:
    """One pixel, signed as every picture of ropext's is."""
    return plots._signed(PIXEL)


def draw(wholly: bool) -> None:
    """What every picture of this process is from now on."""
    plots.png = whole if wholly else blank
