"""What can be said of a model from its small files alone: inspect it, plan for it, serve it.

Kept apart from the pipeline so that these commands start at once.
"""

from ropext.files.inspecting.model import (
    Inspection,
    inspect,
    naming_config,
    open_model,
    plan,
    plan_config,
    plan_of,
    planned,
    with_far_warning,
)
from ropext.files.inspecting.serving import Served, gate, read_again, read_unextended, serving

__all__ = [
    "Inspection",
    "Served",
    "gate",
    "inspect",
    "naming_config",
    "open_model",
    "plan",
    "plan_config",
    "plan_of",
    "planned",
    "read_again",
    "read_unextended",
    "serving",
    "with_far_warning",
]
