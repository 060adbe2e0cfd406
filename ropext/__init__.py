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
    from ropext.inspecting import inspect, plan
    from ropext.patching import patch, save
    from ropext.pipeline.extending import evaluate, extend
    from ropext.pipeline.running import run
    from ropext.training import run_finetune as finetune
    from ropext.training import run_fit as fit
    from ropext.verifying import check_directory as verify

# Imported on first use: `import ropext` costs nothing, and planning never loads torch.
_PLACES = {
    "evaluate": "ropext.pipeline.extending:evaluate",
    "extend": "ropext.pipeline.extending:extend",
    "finetune": "ropext.training:run_finetune",
    "fit": "ropext.training:run_fit",
    "inspect": "ropext.inspecting:inspect",
    "patch": "ropext.patching:patch",
    "plan": "ropext.inspecting:plan",
    "run": "ropext.pipeline.running:run",
    "save": "ropext.patching:save",
    "verify": "ropext.verifying:check_directory",
}

__all__ = [
    "__version__",
    "evaluate",
    "extend",
    "finetune",
    "fit",
    "inspect",
    "patch",
    "plan",
    "run",
    "save",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        room, _, function = _PLACES[name].partition(":")
        return getattr(import_module(room), function)
    raise AttributeError(f"module 'ropext' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
