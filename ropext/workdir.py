"""The folder of a run: whose it is, what decides its numbers, and who goes on in it.

It is OUT.run beside the output OUT of fit, finetune and run; of eval and demo the output itself.

    run.json     the command, by name under "decides" what its numbers follow from, and what else is
                 good to know
    PIECE.json   in a folder of records (`Ledger`): what became of one piece of the work

The same command with the same deciding values goes on in it. With other values it begins anew where
that is asked for (--force), or where nothing is lost. The folder of another command is never taken.
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ropext.errors import InputError, OutputExists
from ropext.files import is_empty, locked, read_json, sweep, write_json

MANIFEST = "run.json"
EARLIER = ("manifest.json", "demo.json")  # what eval's and the demo's had been called before
BESIDE = ("fit", "finetune", "run")  # commands whose folder is OUT.run
PASSING = ("fit", "finetune")  # commands whose folder is of no use once OUT is there
ABSENT = object()

Flat = dict[str, Any]


@dataclass(frozen=True)
class Workdir:
    """The folder of one run."""

    output: Path  # as the user named it
    command: str  # eval, fit, finetune, run or demo
    decides: Mapping[str, Any]  # with other values it is another run
    about: Mapping[str, Any] = field(default_factory=dict)  # of the manifest too; decides nothing
    owns: tuple[str, ...] = ("*",)  # globs in the folder; what --force deletes for another run

    @property
    def folder(self) -> Path:
        """Where it works."""
        return beside(self.output) if self.command in BESIDE else self.output

    def has_begun(self) -> bool:
        """Whether this very run has claimed the folder, now or earlier."""
        found = read(self.folder)
        return found is not None and not self._other(found)

    def _other(self, found: Mapping[str, Any]) -> list[str]:
        """What another run's manifest differs in."""
        if found["command"] != self.command:
            return ["command"]
        return differences(found["decides"], self.decides)

    def check(self, force: bool | None) -> None:
        """Refuse a folder that this run may not take, and change nothing. `force` is None where the
        command has no such flag."""
        folder, found = self.folder, read(self.folder)
        if found is None:
            if not is_empty(folder):
                raise OutputExists(
                    f"{folder} is where ropext {self.command} would keep its run, and holds "
                    "something else; give another -o"
                )
        elif found["command"] != self.command:
            raise OutputExists(
                f"{folder} holds a run of ropext {found['command']}, which ropext {self.command} "
                "does not touch, with --force neither: repeat that command to go on with it, give "
                "another -o, or delete the folder"
            )
        elif (names := self._other(found)) and not force and _has_work(folder):
            anew = "" if force is None else ", or --force to begin anew"
            raise OutputExists(
                f"{folder} holds another run of ropext {self.command} (it differs in "
                f"{_named(names)}); repeat that command to go on with it, give another -o{anew}"
            )

    @contextmanager
    def claimed(self, force: bool | None, rank: int = 0, world: int = 1) -> Iterator[None]:
        """Hold the folder, new or as this run left it; of several processes the first one does. A
        run that fails before it has kept anything leaves no folder."""
        if rank != 0:
            yield
            return
        with locked(self.folder.resolve(), self.output):
            self.check(force)
            if not self.has_begun():
                self._clear()
            manifest = {"command": self.command, "decides": self.decides, **self.about}
            write_json(self.folder / MANIFEST, manifest)
            for name in EARLIER:
                (self.folder / name).unlink(missing_ok=True)
            try:
                yield
            except BaseException:
                if world == 1 and not _has_work(self.folder):
                    remove(self.folder)
                raise
            if self.command in PASSING:
                remove(self.folder)
            else:
                sweep(self.folder)

    def _clear(self) -> None:
        """Delete what another run kept, but for its manifest: after a kill on the way it is still
        known whose folder this is."""
        for pattern in self.owns:
            for path in self.folder.glob(pattern):
                if path.name not in (MANIFEST, *EARLIER):
                    _delete(path)


def beside(output: Path) -> Path:
    """OUT.run."""
    return output.parent / f"{output.name}.run"


def release(folder: Path, output: Path) -> None:
    """Delete the lock that a killed run left; refuse while another one runs."""
    real = folder.resolve()
    if (real.parent / f".{real.name}.lock").exists():
        with locked(real, output):
            pass


def remove(folder: Path) -> None:
    """Delete a run's folder, its manifest last."""
    if not folder.is_dir():
        return
    for path in folder.iterdir():
        if path.name != MANIFEST:
            _delete(path)
    _delete(folder)


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _has_work(folder: Path) -> bool:
    """Whether there is more than a manifest. An option's mistake that is found late leaves none."""
    known = (MANIFEST, *EARLIER)
    return any(path.is_file() and path.name not in known for path in folder.rglob("*"))


def read(folder: Path) -> dict[str, Any] | None:
    """The manifest of a folder; None where there is none, or none of a run."""
    for name in (MANIFEST, *EARLIER):
        if (folder / name).is_file():
            found = read_json(folder / name)
            return _as_written_now(found) if isinstance(found, dict) else None
    return None


def _as_written_now(found: dict[str, Any]) -> dict[str, Any] | None:
    """A manifest; those of before, which named no command, are known by their keys."""
    if isinstance(found.get("command"), str) and isinstance(found.get("decides"), dict):
        return found
    if "run_key" in found:
        own = {"words": found.get("command"), "names": found.get("names")}
        return {"command": "eval", "decides": found.get("run") or {}, **own}
    if "resolved" in found:
        return {"command": "run", "decides": {}}
    if "steps" in found and "unfinished" in found:
        return {"command": "demo", "decides": {k: found.get(k) for k in ("schema", "versions")}}
    for key, command in (("fitted", "fit"), ("settings", "finetune")):
        if key in found:
            return {"command": command, "decides": found}
    return None


def differences(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """The names under which two mappings differ, dotted where they are nested."""
    old, new = _flat(found), _flat(_plain(wanted))
    return [key for key in {**new, **old} if old.get(key, ABSENT) != new.get(key, ABSENT)]


def _flat(value: Mapping[str, Any], prefix: str = "") -> Flat:
    flat: Flat = {}
    for key, item in value.items():
        if isinstance(item, dict) and item:
            flat |= _flat(item, f"{prefix}{key}.")
        else:
            flat[prefix + key] = item
    return flat


def _plain(value: Mapping[str, Any]) -> Flat:
    """As JSON gives it back: tuples are lists."""
    plain: Flat = json.loads(json.dumps(value, default=str))
    return plain


def _named(names: list[str]) -> str:
    return ", ".join(names[:5]) + (" …" if len(names) > 5 else "")


@dataclass(frozen=True)
class Piece:
    """What became of one piece of work."""

    schema: int  # goes up when what is done with the same inputs changes
    inputs: Flat
    outputs: Flat | None  # None: begun, not finished
    about: Flat

    def why_again(self, schema: int, inputs: Flat) -> str | None:
        """Why it is not of this very work, by the names of what changed; None where it is."""
        if self.schema != schema:
            return "this ropext does it in another way"
        names = differences(self.inputs, inputs)
        return f"changed: {_named(names)}" if names else None


class Ledger:
    """The records of a run, one file each; none holds a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def read(self, piece: str) -> Piece | None:
        """None where there is none, or one that cannot be read: then the piece is done again."""
        try:
            found = read_json(self.folder / f"{piece}.json")
            schema, inputs, outputs = (found.pop(name) for name in ("schema", "inputs", "outputs"))
            return Piece(schema, inputs, outputs, found)
        except (InputError, AttributeError, KeyError, TypeError):
            return None

    def write(
        self, piece: str, schema: int, inputs: Flat, outputs: Flat | None, **about: Any
    ) -> None:
        """Begin a record (outputs None) or finish it."""
        content = {"schema": schema, "inputs": inputs, "outputs": outputs, **about}
        write_json(self.folder / f"{piece}.json", content)

    def forget(self, piece: str) -> None:
        """So that it is done again."""
        (self.folder / f"{piece}.json").unlink(missing_ok=True)
