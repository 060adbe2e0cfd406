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
    "ProofFailed",
    "RopextError",
    "Stopped",
    "UnsupportedModel",
    "UsageError",
]
