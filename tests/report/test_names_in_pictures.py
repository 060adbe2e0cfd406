"""Names that a directory may have, in the legends and titles of pictures."""

import warnings

import pytest

from ropext.report import plots
from ropext.report.plots import Curve
from ropext.results.values import Value
from ropext.rope import Rope

NAMES = (r"a$\frac$b", "$x$", r"\$x$", "_hidden", "x" * 250, "中文 é", "bell\x07\n", "a_b")
VALUES = (Value(1.0, None, None, 1), Value(2.0, None, None, 1))


@pytest.mark.parametrize("name", NAMES)
def test_any_name_is_drawn_without_a_word(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        line = Curve(name, (16.0, 128.0), VALUES)
        drawn = [
            plots.lines(f"difference to {name}", "y", [line], 64, 128),
            plots.spectra("T", {name: [1.0, 0.5], "base": [1.0, 0.4]}),
            plots.heat_maps(
                "T", "share", {name: [{"length": 64, "depth": 0.5, "exact": VALUES[0]}]}
            ),
        ]
        drawn.append(plots.plot(Rope(8, 1e4, 64), {}, 128, name))
    for picture in drawn:
        assert picture.startswith(b"\x89PNG")


def test_a_name_is_shown_letter_by_letter():
    assert plots.axes("a$b$_c", "y").get_title(loc="left") == r"a\$b\$_c"
    assert plots.plain("_a_b") == " _a_b"
    assert len(plots.plain("x" * 250)) == 40
