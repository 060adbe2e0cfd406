"""Compute whether a model fits into a memory, and the longest text that fits with it."""

from pathlib import Path

from ropext.base.errors import UsageError
from ropext.files.inspecting.model import naming_config, open_model
from ropext.files.schemes import read_positions
from ropext.options.memory import MemoryOptions, memory_bytes
from ropext.planning.memory import MemoryFit, fit_memory


def memory_fit(
    model: str | Path, options: MemoryOptions, *, length: int | None = None, revision: str | None
) -> MemoryFit:
    """Return which lengths of a model fit into a memory; `length` is checked, or the model's
    context."""
    if options.memory is None:
        raise UsageError("--memory SIZE is needed, e.g. --memory 12G")
    snapshot = open_model(model, revision=revision)
    if read_positions(snapshot.config) is not None:
        raise UsageError(f"--memory knows models that rotate, and {model} does not")
    with naming_config(snapshot):
        read = snapshot.as_read()
    return fit_memory(
        snapshot.carries(read),
        length or read.context,
        memory_bytes(options.memory),
        snapshot.weight_bytes,
        options.kv,
        options.parallel,
    )
