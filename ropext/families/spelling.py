"""What is wrong with the spellings of a config that somebody else wrote."""

from typing import Any

from ropext.families.model import Problem


def check_spellings(config: dict[str, Any]) -> list[Problem]:
    return []
