"""The order of things: plan, extend, prove, fit, fine-tune, evaluate, report. The only room that
knows it.

The parts: extending (one checkpoint, planned, written and proved), sections (what a recipe may say:
one table for the file, the options and the schema), job (a recipe, checked, and its cells), stages
(what was done with what: the skip rule), steps (the stages themselves),
outcome (the finished checkpoint and the report), comparing (the end of a grid), ran (what was asked
and what became of it), estimating (what it would take), running (all of it in order); series (steps
of any command, several of one kind) and counting (what they cost).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ropext.pipeline.extending import Extended, extend, plan_extend
    from ropext.pipeline.ran import Ran
    from ropext.pipeline.running import run

_HOMES = {
    "Extended": "ropext.pipeline.extending",
    "extend": "ropext.pipeline.extending",
    "plan_extend": "ropext.pipeline.extending",
    "Ran": "ropext.pipeline.ran",
    "run": "ropext.pipeline.running",
}

__all__ = ["Extended", "Ran", "extend", "plan_extend", "run"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'ropext.pipeline' has no attribute {name!r}")
