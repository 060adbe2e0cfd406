"""Options + config dict -> Plan: all that `extend` would do, and by which method where none is
named, computed without touching a file.

The plan is the prediction; the proof compares it with what stock transformers builds.
"""

from ropext.planning.plan import CONFIG_ALONE, ExtensionPlan, InMemory, Plan
from ropext.planning.rotary import make_folded_plan, make_plan
from ropext.planning.warnings import far, reached

__all__ = [
    "CONFIG_ALONE",
    "ExtensionPlan",
    "InMemory",
    "Plan",
    "far",
    "make_folded_plan",
    "make_plan",
    "reached",
]
