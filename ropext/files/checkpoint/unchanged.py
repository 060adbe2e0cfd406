"""Check that a checkpoint still has the content that was planned with, hashed or loaded.

ropext hashes a checkpoint first and loads it later, by its path. It compares each file by its
state, and hashes it again if the state differs: only another content is a change.
"""

from ropext.base.jsontext import read_object
from ropext.files.checkpoint.digests import Digests
from ropext.files.checkpoint.snapshot import INDEX, Snapshot, take_inventory
from ropext.scaling.rope import CONFIG


def check_unchanged(snapshot: Snapshot, during: str) -> None:
    """Raise InputError if the checkpoint's content changed since it was opened. If nothing of it
    was hashed, any written or replaced file is a change."""
    if not snapshot.directory.is_dir():
        raise snapshot.changed(CONFIG, during)
    before = snapshot.states
    now = take_inventory(snapshot.directory).states
    for name in before | now:
        if before.get(name) == now.get(name):
            continue
        if name not in now or not _has_same_content(snapshot, name):
            raise snapshot.changed(name, during)
    before.update(now)


def _has_same_content(snapshot: Snapshot, name: str) -> bool:
    """Return True if a file has the content that was hashed or read. Files that can decide no
    number may change."""
    if not snapshot.hashed:
        return False
    if name in snapshot.hashed:
        return Digests().of(snapshot.path(name)) == snapshot.hashed[name]
    if name == CONFIG:
        return read_object(snapshot.path(name)) == snapshot.config
    return name != INDEX and not name.endswith(".safetensors")
