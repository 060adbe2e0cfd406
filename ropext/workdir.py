"""The folder of a run: whose it is, what decides its numbers, and who goes on in it.

It is OUT.run beside the output OUT of fit, finetune and run; of eval the output itself.

    run.json     the command, by name under "decides" what its numbers follow from, and what else is
                 good to know
    PIECE.json   in a folder of records (`Ledger`): what became of one piece of the work

The same command with the same deciding values goes on in it. With other values it begins anew where
that is asked for (--force), or where nothing is lost. The folder of another command is never taken,
and a file whose name is none of `OURS` never deleted: a user put it there.
"""

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ropext import guard
from ropext.errors import InputError, OutputExists
from ropext.files import HALF_WRITTEN, check_links, lock_of, locked, read_json, write_json
from ropext.narration import Say, silent

MANIFEST = "run.json"
USED = "used.log"  # what first steps took
STORES = "variants/"  # of an evaluation: what each model read
BESIDE = ("fit", "finetune", "run")  # commands whose folder is OUT.run
PASSING = ("fit", "finetune")  # commands whose folder is of no use once OUT is there
ABSENT = object()
# All names that ropext, transformers and accelerate give to files in the folder of a run.
OURS = re.compile(
    "|".join(
        (
            r"(run|documents|results|choice|budget)\.json|used\.log",
            r"(items|choosing|verdict)\.jsonl|report\.(md|html)|documents/[0-9a-f]+\.npy",
            r"plots/(overview|nll-by-position|tail|gain|spectra|difference-by-position|retrieval-.+)\.png",
            r"(variants|readings|steps)/.+\.(npy|json)",
            r"[\w-]+/(tmp-)?checkpoint-\d+/(.+/)?"
            r"(complete|README\.md|[^/]+\.(safetensors|json|pt|pth|bin|distcp|metadata))",
            HALF_WRITTEN.pattern,
        )
    )
)

Flat = dict[str, Any]


@dataclass(frozen=True)
class Workdir:
    """The folder of one run."""

    output: Path  # as the user named it
    command: str  # eval, fit, finetune or run
    decides: Mapping[str, Any]  # with other values it is another run
    about: Mapping[str, Any] = field(default_factory=dict)  # of the manifest too; decides nothing

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
        guard.check({}, {"a run's folder": folder})
        if found is None:
            if folder.is_file() or not all(map(HALF_WRITTEN.fullmatch, guard.listing(folder))):
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
    def claimed(
        self, force: bool | None, rank: int = 0, world: int = 1, say: Say = silent
    ) -> Iterator[None]:
        """Hold the folder, new or as this run left it; of several processes the first one does. A
        run that fails before it has kept anything leaves no folder."""
        if rank != 0:
            yield
            return
        with locked(self.folder.resolve(), self.output):
            self.check(force)
            if not self.has_begun():  # the manifest stays: after a kill it says whose this is
                self._say_left(remove(self.folder, self._stays), say)
            manifest = {"command": self.command, "decides": self.decides, **self.about}
            write_json(self.folder / MANIFEST, guard.seal(_plain(manifest)))
            try:
                yield
            except BaseException:
                if world == 1 and not _has_work(self.folder):
                    remove(self.folder)
                raise
            if self.command not in PASSING:
                for name in filter(HALF_WRITTEN.fullmatch, guard.listing(self.folder)):
                    (self.folder / name).unlink()
            else:
                self._say_left(remove(self.folder), say)

    def _stays(self, name: str) -> bool:
        """Whether a file is as good for another run: what models read is named by all that decides
        it."""
        return name == MANIFEST or (self.command == "eval" and name.startswith(STORES))

    def _say_left(self, names: list[str], say: Say) -> None:
        if names:
            said = "which ropext did not write"
            say(f"{self.folder} keeps {guard.shown(names)}, {said}")


def beside(output: Path) -> Path:
    """OUT.run."""
    return output.parent / f"{output.name}.run"


def release(folder: Path, output: Path) -> None:
    """Delete the lock that a killed run left; refuse while another one runs."""
    real = folder.resolve()
    if lock_of(real).exists():
        with locked(real, output):
            pass


def strangers(folder: Path) -> list[str]:
    """The files in a run's folder that a user put there."""
    return [name for name in guard.listing(folder) if not OURS.fullmatch(name)]


def remove(folder: Path, stays: Callable[[str], bool] = lambda name: False) -> list[str]:
    """Delete what ropext wrote into a run's folder, its manifest last, and the folder where that
    was all; the names of what a user put there."""
    names = guard.listing(folder)
    for name in sorted(names, key=MANIFEST.__eq__):
        if OURS.fullmatch(name) and not stays(name):
            (folder / name).unlink(missing_ok=True)
    for place, _, _ in os.walk(folder, topdown=False):
        with suppress(OSError):  # it holds something
            os.rmdir(place)
    return strangers(folder)


def _has_work(folder: Path) -> bool:
    """Whether there is more than a manifest. An option's mistake that is found late leaves none."""
    return any(path.is_file() for path in folder.rglob("*") if path.name not in (MANIFEST, USED))


def read(folder: Path) -> dict[str, Any] | None:
    """The manifest of a folder; None where there is none, or none that ropext wrote."""
    if not (folder / MANIFEST).is_file():
        return None
    check_links(folder)
    found = read_json(folder / MANIFEST)
    return found if guard.is_sealed(found) else None


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
