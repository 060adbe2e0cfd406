"""The small checkpoint that every test of this room starts from."""

from pathlib import Path

import pytest
from sample_checkpoint import make_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "base")
