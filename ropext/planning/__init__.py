"""Options + config dict -> Plan: all that `extend` would do, and by which method where none is
named, computed without touching a file.

The plan is the prediction; the proof compares it with what stock transformers builds.
"""

from ropext.planning.plan import ExtensionPlan, Plan
from ropext.planning.rotary import make_plan
from ropext.planning.tables import TablePlan, make_table_plan, plan_config
from ropext.planning.warnings import reached

__all__ = [
    "ExtensionPlan",
    "Plan",
    "TablePlan",
    "make_plan",
    "make_table_plan",
    "plan_config",
    "reached",
]
