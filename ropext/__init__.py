"""ropext extends the context window of pretrained Hugging Face models, and proves that it works.

From Python:

    plan = ropext.plan("model", method="yarn", factor=4)
    ropext.extend("model", "model-4x", method="yarn", factor=4)
    ropext.patch(loaded_model, method="yarn", factor=4)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ropext.version import __version__

if TYPE_CHECKING:
    from ropext.evaluation.session import evaluate
    from ropext.looking import inspect, plan
    from ropext.memory import patch, save
    from ropext.pipeline import extend, verify

# Imported on first use: `import ropext` costs nothing, and planning never loads torch.
_ROOMS = {
    "evaluate": "ropext.evaluation.session",
    "inspect": "ropext.looking",
    "plan": "ropext.looking",
    "extend": "ropext.pipeline",
    "verify": "ropext.pipeline",
    "patch": "ropext.memory",
    "save": "ropext.memory",
}

__all__ = ["__version__", "evaluate", "extend", "inspect", "patch", "plan", "save", "verify"]


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return getattr(import_module(_ROOMS[name]), name)
    raise AttributeError(f"module 'ropext' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
