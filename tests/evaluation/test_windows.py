"""Windows as integers: every token scored once, with at least half a window before it."""

import pytest

from ropext.base.lengths import short_windows, strided_windows
from ropext.evaluation.reading import hf_stride


@pytest.mark.parametrize("count", [2, 63, 64, 65, 96, 97, 200, 1000])
@pytest.mark.parametrize(("size", "stride"), [(64, 32), (64, 64), (64, 1), (7, 3), (1000, 10)])
def test_each_token_is_scored_once_in_order(count, size, stride):
    windows = list(strided_windows(count, size, stride))
    scored = [t for window in windows for t in range(window.first, window.end)]
    assert scored == list(range(1, count))
    assert all(window.end - window.begin <= size for window in windows)


def test_short_window_shows_between_half_and_all_of_the_context():
    for window in list(short_windows(1000, 64))[1:]:
        assert window.first - window.begin == 32
        assert window.end - window.begin <= 64


def test_strided_windows_equal_those_worked_by_hand():
    found = [(w.begin, w.end, w.first) for w in strided_windows(20, 8, 4)]
    assert found == [(0, 8, 1), (4, 12, 8), (8, 16, 12), (12, 20, 16)]
    assert hf_stride(1024) == 512
    assert hf_stride(100) == 50
    with pytest.raises(ValueError, match="gaps"):
        list(strided_windows(10, 4, 5))
