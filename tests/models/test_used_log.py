"""The log of what the first unit of a long piece of work took."""

import pytest

from ropext.errors import InputError
from ropext.models.memory import tell_used


def test_a_log_that_cannot_be_written_is_one_sentence(tmp_path):
    (tmp_path / "used.log").mkdir()
    with pytest.raises(InputError, match=r"used\.log cannot be written: Is a directory"):
        tell_used(tmp_path / "used.log", lambda sentence: None, "cpu", "the first pass", 1.0)
