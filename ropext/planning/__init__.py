"""Plan an extension from options and a config dict, without touching a file: the method, all that
`extend` would write, warnings, and the memory that a context needs.

The plan is the prediction; the proof compares it with the model that stock transformers builds.
"""

from ropext.planning.plan import CONFIG_ALONE, ExtensionPlan, InMemory, Plan
from ropext.planning.rotary import make_folded_plan, make_plan
from ropext.planning.warnings import far, reached, untrained_results

__all__ = [
    "CONFIG_ALONE",
    "ExtensionPlan",
    "InMemory",
    "Plan",
    "far",
    "make_folded_plan",
    "make_plan",
    "reached",
    "untrained_results",
]
