"""ropext extends the context window of pretrained Hugging Face models, and proves that it works.

From Python:

    plan = ropext.plan("model", method="yarn", factor=4)
    ropext.extend("model", "model-4x", method="yarn", factor=4)
    ropext.patch(loaded_model, method="yarn", factor=4)
"""

from importlib import import_module
from typing import Any

from ropext.version import __version__

# Imported on first use: `import ropext` costs nothing, and planning never loads torch. Editors read
# __init__.pyi, which scripts/make_signatures.py writes.
_PLACES = {
    "compare": "ropext.pipeline.public:compare",
    "evaluate": "ropext.pipeline.public:evaluate",
    "extend": "ropext.pipeline.public:extend",
    "finetune": "ropext.pipeline.public:finetune",
    "fit": "ropext.pipeline.public:fit",
    "inspect": "ropext.files.inspecting:inspect",
    "open": "ropext.pipeline.opening:open",
    "patch": "ropext.models.patching:patch",
    "plan": "ropext.files.inspecting:plan",
    "push": "ropext.pipeline.public:push",
    "run": "ropext.pipeline.public:run",
    "save": "ropext.pipeline.saving:save",
    "verify": "ropext.verifying.verification:verify",
}
# The modules with public addresses.
_MODULES = ("bundled", "errors", "patching", "rope")

__all__ = ["__version__", *_PLACES]


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        from ropext.options.door import worded_for_python

        room, _, function = _PLACES[name].partition(":")
        globals()[name] = worded_for_python(getattr(import_module(room), function))
        return globals()[name]
    if name in _MODULES:
        return import_module(f"ropext.{name}")
    raise AttributeError(f"module 'ropext' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__ + list(_MODULES))
