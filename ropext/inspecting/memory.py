"""Does a model fit into a memory, and how long a text beside it?"""

from dataclasses import replace
from pathlib import Path

from ropext import families
from ropext.checkpoint import Snapshot
from ropext.checkpoint.snapshot import INDEX, INDEX_CONTAINERS, INDEX_LIMIT
from ropext.errors import UsageError
from ropext.inputs import read_bytes
from ropext.inspecting.inspection import open_model, positions_of, said_of
from ropext.jsontext import parse_object
from ropext.options.memory import MemoryOptions, bytes_of
from ropext.planning.memory import MemoryFit, fit_memory


def memory_fit(
    model: str | Path, options: MemoryOptions, *, length: int | None = None, revision: str | None
) -> MemoryFit:
    """What of a model fits into a memory, at `length` tokens, or at what the model reads now."""
    if options.memory is None:
        raise UsageError("--memory SIZE is needed, e.g. --memory 12G")
    snapshot = open_model(model, revision=revision)
    if positions_of(snapshot) is not None:
        raise UsageError(f"--memory knows models that rotate, and {model} does not")
    with said_of(snapshot):
        read = families.as_read(snapshot.config)
    read = replace(read, container=snapshot.container)
    return fit_memory(
        read,
        length or read.context,
        bytes_of(options.memory),
        _weight_bytes(snapshot),
        options.kv,
        options.parallel,
    )


def _weight_bytes(snapshot: Snapshot) -> int | None:
    """The bytes of all tensors; None where neither they nor their index is here."""
    if snapshot.container:
        from ropext.gguf import GgufFile  # late: a directory needs none of it

        if isinstance(snapshot, GgufFile):
            return sum(tensor.size for part in snapshot.parts for tensor in part.tensors)
    shards = set((snapshot.index or {}).values())
    here = snapshot.weight_files
    if here and shards <= set(here):
        return sum(snapshot.files[name] for name in here)
    return _stated_bytes(snapshot) if shards else None


def _stated_bytes(snapshot: Snapshot) -> int | None:
    """The bytes that the index of the shards states."""
    path = snapshot.path(INDEX)
    index = parse_object(read_bytes(path, INDEX_LIMIT), str(path), containers=INDEX_CONTAINERS)
    about = index.get("metadata")
    stated = about.get("total_size") if isinstance(about, dict) else None
    return int(stated) if isinstance(stated, int | float) and 0 < stated < 1 << 60 else None
