"""What `python -m tests.NAME` can import: the folders that pytest's `pythonpath` names."""

import sys
import tomllib
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_SETTINGS = tomllib.loads((_ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["pytest"]
for _folder in reversed(_SETTINGS["ini_options"]["pythonpath"]):
    sys.path.insert(0, str(_ROOT / _folder))
