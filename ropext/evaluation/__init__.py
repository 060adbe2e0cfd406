"""Perplexity in one pass, retrieval by teacher forcing: measured against the right baselines.

The names are imported on first use: the options alone, which the command line shows, need neither
numpy nor torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ropext.evaluation.estimating import estimate_evaluation
    from ropext.evaluation.session import Evaluation, Hooks, evaluate
    from ropext.options.evaluate import Evaluate

_HOMES = {
    "Evaluate": "ropext.options.evaluate",
    "Evaluation": "ropext.evaluation.session",
    "Hooks": "ropext.evaluation.session",
    "estimate_evaluation": "ropext.evaluation.estimating",
    "evaluate": "ropext.evaluation.session",
}

__all__ = ["Evaluate", "Evaluation", "Hooks", "estimate_evaluation", "evaluate"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'ropext.evaluation' has no attribute {name!r}")
