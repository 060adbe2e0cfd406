"""Options + config dict -> Plan: all that `extend` would do, and by which method where none is
named, computed without touching a file.

The plan is the prediction; the proof compares it with what stock transformers builds.
"""

from ropext.planning.making import make_plan, reached, require_help
from ropext.planning.plan import Plan, PlannedSite, readings_of
from ropext.planning.tables import TablePlan, make_table_plan, plan_config

__all__ = [
    "Plan",
    "PlannedSite",
    "TablePlan",
    "make_plan",
    "make_table_plan",
    "plan_config",
    "reached",
    "readings_of",
    "require_help",
]
