"""What can be said of a model from its small files alone: inspect it, plan for it, serve it.

Kept apart from the pipeline so that these commands start at once.
"""

from ropext.files.inspecting.model import (
    Inspection,
    inspect,
    open_model,
    plan,
    plan_config,
    plan_of,
    planned,
    said_of,
    told_far,
)
from ropext.files.inspecting.serving import Served, as_it_stands, gate, read_again, serving

__all__ = [
    "Inspection",
    "Served",
    "as_it_stands",
    "gate",
    "inspect",
    "open_model",
    "plan",
    "plan_config",
    "plan_of",
    "planned",
    "read_again",
    "said_of",
    "serving",
    "told_far",
]
