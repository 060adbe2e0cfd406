"""SHA-256 of whole files and of checkpoints. ropext remembers the digests of large files in the
user's cache, so that it reads weights once. It identifies a file by device, inode, size and times,
never by its name. It trusts the cache only if a write is certain to change the times
(`guard.is_settled`). It hashes any other file each time."""

import hashlib
import json
import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from ropext.base import guard
from ropext.base.errors import InputError
from ropext.base.jsontext import Json, digest, read_object, write_json
from ropext.base.narration import Show, no_progress
from ropext.base.systems import sync, user_cache
from ropext.families.config import shown
from ropext.files.checkpoint.snapshot import INDEX, Snapshot, state_of, take_inventory
from ropext.files.checkpoint.weights import content_digest
from ropext.scaling.rope import CONFIG

LARGE = 16 << 20  # bytes of a file that is remembered; smaller ones take milliseconds
MOST = 10_000  # files remembered, the newest ones
SHA256 = re.compile("[0-9a-f]{64}")

# "device:inode" -> size, time of modification, time of change, SHA-256. Only the system sets the
# time of change (`cp -p`, `touch` and archives set the other one); Windows has the time of
# creation in its place.
Known = dict[str, list[int | str]]


class Digests:
    """The digests of files; `place` is the cache file."""

    def __init__(self, show: Show = no_progress, place: Path | None = None) -> None:
        """Read the SHA-256 of large files that earlier commands kept in `place`: by default
        digests.json, in the user's cache."""
        self.show = show
        folder = user_cache()
        self.place = place or (folder and folder / "digests.json")
        self.known = self._read()

    def of(self, file: Path) -> str:
        """Return the SHA-256 of a checkpoint's file, from the cache if the file is large and
        unchanged. Raise InputError if the file changes meanwhile."""
        status = os.stat(file)
        before = state_of(status)
        key = f"{before.device}:{before.inode}"
        entry = self.known.get(key)
        is_kept = before.size >= LARGE and guard.is_settled(file, status)
        if is_kept and entry is not None and entry[:-1] == before.times():
            return str(entry[-1])
        if is_kept:
            sync(file)  # a page that waits to be written takes further writes at the same times
        sha256 = content_digest(file, self.show)
        after = state_of(os.stat(file))
        if after.is_rewritten(before):
            raise InputError(f"{file} was changed while it was read; try again when it is whole")
        if is_kept and after.times() == before.times():
            self._keep(key, [*before.times(), sha256])
        return sha256

    def of_files(self, snapshot: Snapshot, names: Iterable[str]) -> str:
        """Return one digest of files of a checkpoint, over their names and contents. Raise if a
        file differs from the content hashed before."""
        found = dict[str, Json]()
        for name in names:
            content = self.of(snapshot.path(name))
            if snapshot.hashed.setdefault(name, content) != content:
                raise snapshot.changed(name, "read")
            found[name] = content
        return digest(found)

    def of_checkpoint(self, snapshot: Snapshot, trust_remote_code: bool = False) -> dict[str, Json]:
        """Return hashes that identify a checkpoint on the disk: of its config and of every byte of
        its weight files. If ropext may run its Python files, hash them too."""
        code = list[str]()
        if trust_remote_code:
            check_code(snapshot)
            code = [name for name in snapshot.files if name.endswith(".py")]
        named: dict[str, Json] = {
            "hub_id": snapshot.hub_id,
            "commit": snapshot.commit,
            "config_sha256": digest(snapshot.config),
            "weights_sha256": self.of_files(snapshot, snapshot.weight_files),
        }
        if code:
            named["code_sha256"] = self.of_files(snapshot, code)
        return named

    def of_taken(self, snapshot: Snapshot) -> dict[str, Json]:
        """Return the SHA-256 of each file that an output takes unchanged from its base checkpoint,
        weights aside."""
        names = snapshot.files.keys() - {CONFIG, *snapshot.weight_files}
        return {name: self.of(snapshot.path(name)) for name in sorted(names)}

    def _read(self) -> Known:
        """Return the entries of the cache file of SHA-256 digests, or none if it is damaged."""
        try:
            content = json.loads(self.place.read_text("utf-8")) if self.place else {}
            entries = content.items()
            return {key: entry for key, entry in entries if SHA256.fullmatch(entry[3])}
        except (OSError, ValueError, AttributeError, TypeError, LookupError):
            return {}

    def _keep(self, key: str, entry: list[int | str]) -> None:
        """Add a large file's SHA-256 to the cache file, and keep the entries that other commands
        wrote since."""
        known = self._read()
        known.pop(key, None)
        known[key] = entry
        self.known = dict(list(known.items())[-MOST:])
        if self.place is not None:
            with suppress(InputError):  # the home cannot be written: hash the file again next time
                write_json(self.place, self.known)


def check_code(snapshot: Snapshot) -> None:
    """Refuse a checkpoint whose config runs code of another repository: no hash of its own files
    covers that code."""
    references = snapshot.config.get("auto_map")
    for reference in references.values() if isinstance(references, dict) else ():
        for one in reference if isinstance(reference, list) else [reference]:
            repository, separator, _ = str(one).partition("--")
            if separator:
                raise InputError(
                    f"auto_map in {snapshot.name} runs code of another repository "
                    f"({shown(repository)}); that code may change between two commands, so ropext "
                    "keeps no result of it. Copy its .py files beside config.json, and name in "
                    "auto_map the module alone, without the repository and --"
                )


def check_unchanged(snapshot: Snapshot, during: str) -> None:
    """Raise InputError if the checkpoint's content changed since it was opened. If nothing of it
    was hashed, any written or replaced file is a change, and a new hard link is none."""
    if not snapshot.directory.is_dir():
        raise snapshot.changed(CONFIG, during)
    before = snapshot.states
    now = take_inventory(snapshot.directory).states
    for name in before | now:
        old = before.get(name)
        new = now.get(name)
        if old == new:
            continue
        if not snapshot.hashed and new is not None and new.is_link_of(old):
            continue
        if new is None or not _has_same_content(snapshot, name):
            raise snapshot.changed(name, during)
    before.update(now)


def _has_same_content(snapshot: Snapshot, name: str) -> bool:
    """Return True if a checkpoint's file has the content that was hashed or read. Files that can
    decide no number may change."""
    if not snapshot.hashed:
        return False
    if name in snapshot.hashed:
        return Digests().of(snapshot.path(name)) == snapshot.hashed[name]
    if name == CONFIG:
        return read_object(snapshot.path(name)) == snapshot.config
    return name != INDEX and not name.endswith(".safetensors")


def adapter_digest(adapter: str) -> str:
    """Open the safetensors and JSON files in an adapter's folder on the disk, and return one
    SHA-256 of their names and contents."""
    hashed = hashlib.sha256()
    for name in sorted(os.listdir(adapter)) if os.path.isdir(adapter) else ():
        if name.endswith((".safetensors", ".json")):
            hashed.update(name.encode())
            hashed.update(Path(adapter, name).read_bytes())
    return hashed.hexdigest()
