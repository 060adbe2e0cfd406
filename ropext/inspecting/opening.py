"""Open a model by its small files: a checkpoint or a GGUF file."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ropext import bundled, families
from ropext.checkpoint import Snapshot, open_snapshot
from ropext.errors import InputError, UsageError
from ropext.rope import Positions


def open_model(model: str | Path, *, revision: str | None = None) -> Snapshot:
    """A checkpoint or a GGUF file, whichever the name is of."""
    model = str(model)
    if bundled.find_gguf(model) is not None:
        from ropext.gguf import open_gguf  # late: a directory needs none of it

        return open_gguf(model, revision=revision)
    return open_snapshot(model, revision=revision)


@contextmanager
def said_of(snapshot: Snapshot) -> Iterator[None]:
    """Let errors about a config that was made of a GGUF's metadata speak of that."""
    try:
        yield
    except (InputError, UsageError) as error:
        if not snapshot.container:
            raise
        said = str(error).replace("config.json", f"{snapshot.name}, its metadata as a config")
        raise type(error)(said) from None


def positions_of(snapshot: Snapshot) -> Positions | None:
    """The scheme of a model that rotates nothing; None where it rotates."""
    return None if snapshot.container else families.read_positions(snapshot.config)
