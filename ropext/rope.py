"""The geometry of one rotary embedding, and its frequencies."""

from ropext.scaling.rope import (
    Rope,
    Spectrum,
)

__all__ = [
    "Rope",
    "Spectrum",
]
