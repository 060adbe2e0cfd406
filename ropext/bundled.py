"""The paths of the model and the documents that come with ropext."""

from ropext.base.bundled import (
    DATA,
    MODELS,
)

__all__ = [
    "DATA",
    "MODELS",
]
