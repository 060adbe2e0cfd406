"""Inspect a model, plan for it and find how to serve it, all from its small files alone.

This is separate from the pipeline so that these commands start at once.
"""

from ropext.files.inspecting.model import (
    Inspection,
    inspect,
    memory_fit,
    naming_config,
    open_model,
    plan,
    plan_config,
    plan_of,
    planned,
    with_untrained_results,
)
from ropext.files.inspecting.serving import Served, gate, read_unchanged

__all__ = [
    "Inspection",
    "Served",
    "gate",
    "inspect",
    "memory_fit",
    "naming_config",
    "open_model",
    "plan",
    "plan_config",
    "plan_of",
    "planned",
    "read_unchanged",
    "with_untrained_results",
]
