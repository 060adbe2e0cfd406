"""The errors that ropext raises for a user's mistake, each with its exit code."""

from ropext.base.errors import (
    ConfigError,
    FilledTwice,
    GateFailed,
    InputError,
    Interrupted,
    NoServer,
    NotExpressible,
    NothingKept,
    NotMeasured,
    OutputExists,
    OutputLocked,
    ProofFailed,
    RopextError,
    Stopped,
    UnsupportedModel,
    UsageError,
)

__all__ = [
    "ConfigError",
    "FilledTwice",
    "GateFailed",
    "InputError",
    "Interrupted",
    "NoServer",
    "NotExpressible",
    "NotMeasured",
    "NothingKept",
    "OutputExists",
    "OutputLocked",
    "ProofFailed",
    "RopextError",
    "Stopped",
    "UnsupportedModel",
    "UsageError",
]
