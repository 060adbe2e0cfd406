"""Name the library that computes with quantised weights if an error is inside it."""

from importlib import metadata
from traceback import walk_tb
from types import TracebackType

from ropext.base.errors import UnsupportedModel, first_line

LIBRARIES = (
    "bitsandbytes",
    "torchao",
    "gptqmodel",
    "auto_gptq",
    "awq",
    "hqq",
    "compressed_tensors",
    "optimum",
    "transformers.quantizers",
)


def raise_quantisation_error(error: Exception) -> None:
    """Raise one sentence that names the quantisation library of a model in memory, if the error
    was raised inside such a library."""
    library = _quantisation_library(error.__traceback__)
    if library is not None:
        reason = first_line(error).rstrip(".")
        raise UnsupportedModel(
            f"{library} fails with these quantised weights: {reason}; use the weights before "
            "quantisation, or try another version of the library or another device"
        ) from error


def _quantisation_library(trace: TracebackType | None) -> str | None:
    """Return the quantisation library whose code raised with a model in memory; an error in torch
    belongs to its caller."""
    modules = list[str]()
    for frame, _ in walk_tb(trace):
        module = str(frame.f_globals.get("__name__", ""))
        if module.split(".")[0] != "torch":
            modules.append(module)
    if not modules:
        return None
    for library in LIBRARIES:
        if f"{modules[-1]}.".startswith(f"{library}."):
            return _with_version(library.split(".")[0])
    return None


def _with_version(library: str) -> str:
    """Return the name of a model's quantisation library, with its version if it is an installed
    package."""
    try:
        return f"{library} {metadata.version(library)}"
    except metadata.PackageNotFoundError:
        return library
