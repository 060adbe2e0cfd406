"""Check that transformers still has the parts of its server that ropext uses.

ropext uses the streamer and the response templates, and replaces the handlers. Those do not keep a
seed until a question's turn comes, and they leave stop words in the text. They drop images and the
text next to a tool call, and they load any model that a request names.
"""

from importlib import import_module
from importlib.util import find_spec

from ropext.base.errors import InputError

OLDEST = "5.16.1"  # of transformers, with which the tests were run
NEWEST = "5.24.0"
MODULE = "transformers.cli.serving.utils"
PARTS = (
    "DirectStreamer",
    "ReasoningText",
    "ToolCall",
    "_GenerationCancelled",
    "_StreamError",
    "get_response_template",
)
PACKAGES = ("starlette", "uvicorn")


def check_transformers_parts() -> None:
    """Refuse to serve without starlette and uvicorn, or with a transformers that has moved the
    parts of its server."""
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        raise InputError(
            f"ropext serve needs {' and '.join(missing)}, not installed here: "
            "pip install 'transformers[serving]'"
        )
    try:
        module = import_module(MODULE)
        moved = [name for name in PARTS if not hasattr(module, name)]
    except ImportError:
        moved = [MODULE]
    if moved:
        from transformers import __version__

        raise InputError(
            f"transformers {__version__} has no {moved[0]} where ropext serve takes it from; "
            f"install one of {OLDEST} to {NEWEST}"
        )
