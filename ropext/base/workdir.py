"""Manage the folder of a run: its owner, what decides its numbers, and who may resume in it.

For fit, finetune and run it is OUT.run, next to OUT; for eval it is the output itself.

    run.json             the command, everything that decides its numbers under "decides", and
                         other facts
    stages/STEP/run.json the same for one step of a run, which is done once

The same command with the same deciding values resumes. With other values it starts again if the
user asks for it (--force), or if nothing is lost. ropext never takes the folder of another command.
It never deletes a file whose name is not in `OURS`: a user put it there.

If the folder is the output itself, the manifest lists the files of a run under "files", each with
its digest. ropext keeps a file that was edited since, or a result that is not listed, and refuses
the command until --force. While a run writes its results ("writes_results", until it finishes), a
result that is not listed may be its own, from before a kill. A step lists its files wherever they
are, and lists nothing before it has finished.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ropext.base import guard
from ropext.base.atomic import HALF_WRITTEN, os_errors
from ropext.base.errors import InputError, NotWritten, OutputExists, Stopped
from ropext.base.inputs import check_links
from ropext.base.jsontext import read_json, write_json
from ropext.base.locks import locked, run_folder
from ropext.base.narration import Say, no_messages

MANIFEST = "run.json"
USED = guard.USED
STORES = "variants/"  # an evaluation's arrays of each model
UNITS = (STORES, "readings/", "steps/")
STEPS = "stages"  # a run's folder for its steps
BESIDE = ("fit", "finetune", "run")  # commands whose folder is OUT.run
PASSING = ("fit", "finetune")  # commands whose folder is of no use once OUT is there
ABSENT = object()
# Losses of a regime; --kl adds `states-KEY`, `kl-KEY-REGIME` and `agreement-KEY-REGIME`.
UNIT = r"([a-z]+(-[0-9a-f]{8})?(-pass)?(-\d+)?/[0-9a-f]+\.npy|" + (
    r"items/[^/]+-[0-9a-f]+\.json|lm-eval/[0-9a-f]+\.json)"
)
# Questions in words and their answers: TASK-LENGTH-HAYSTACK[-QUESTION], first-word-LENGTH.
WORDED = r"[a-z][\w-]*-\d+(-\d+(-[0-9a-f]{32})?)?\.json"
CHECKPOINT = re.compile(r"checkpoint-(\d+)")  # the folder of one, in a folder of OUT.run
# All names that ropext, transformers and accelerate give to files in the folder of a run.
OURS = re.compile(
    "|".join(
        (
            r"(run|documents|results|choice|outcome)\.json|used\.log",
            r"(items|choosing|verdict)\.jsonl|report\.(md|html)|documents/[0-9a-f]+\.npy",
            r"plots/(overview|nll-by-position|tail|gain|spectra|difference-by-position|retrieval-.+)\.png",
            rf"{STEPS}/[a-z]+/{re.escape(MANIFEST)}",
            rf"(variants|readings)/[^/]+/{UNIT}|variants/[^/]+/{WORDED}|steps/[^/]+/\d+/(knobs\.json|{UNIT})",
            rf"(tuned|control|fitted-[\w-]+)/(tmp-)?{CHECKPOINT.pattern}/(.+/)?"
            r"(complete|README\.md|(adapter|model|pytorch_model)[^/]*\.(safetensors|json|bin)"
            r"|(optimizer|scheduler|scaler|rng_state)[^/]*\.(pt|pth|bin)"
            r"|trainer_state\.json|training_args\.bin|__\d+_\d+\.distcp|\.metadata"
            r"|\.tmp\w{6})",  # safetensors' own file, when a kill comes in it
            HALF_WRITTEN.pattern,
        )
    )
)
SEAL = "ropext"  # in a manifest: the digest of the rest
RESULTS = "writes_results"  # in a manifest: a run has begun to write them
LEFT_OUT = (SEAL, guard.FILES, RESULTS)  # keys that reading a manifest leaves out
SCHEMA = "schema"  # in what decides: a number that goes up when the same values give something else

Flat = dict[str, Any]


@dataclass(frozen=True)
class Workdir:
    """The folder of one run."""

    output: Path  # as the user named it
    command: str  # eval, fit, finetune or run
    decides: Mapping[str, Any]  # with other values it is another run
    about: Mapping[str, Any] = field(default_factory=dict)  # in the manifest, too; decides nothing

    @property
    def folder(self) -> Path:
        """Return the path of the run's folder: OUT.run for fit, finetune and run, else OUT."""
        return run_folder(self.output) if self.command in BESIDE else self.output

    def begun_manifest(self) -> Flat | None:
        """Return the run.json of the folder if this very run wrote it, now or earlier; else
        None."""
        manifest = sealed(self.folder)
        if manifest is None or self._other(manifest):
            return None
        return manifest

    def _other(self, manifest: Mapping[str, Any]) -> list[str]:
        """Return the names of the values under "decides" that differ in the run.json of another
        run."""
        if manifest["command"] != self.command:
            return ["command"]
        return differences(manifest["decides"], self.decides)

    def check(self, force: bool | None) -> None:
        """Refuse a folder that this run may not take, as its run.json and its files show; change
        nothing. `force` is None if the command has no such flag."""
        folder = self.folder
        manifest = sealed(folder)
        guard.check({}, {"a run's folder": folder})
        if manifest is None:
            check_seal(folder)
            if folder.is_file() or not all(map(HALF_WRITTEN.fullmatch, guard.listing(folder))):
                raise OutputExists(
                    f"ropext {self.command} would keep its run in {folder}, which holds "
                    "something else; give another -o"
                )
        elif manifest["command"] != self.command:
            raise OutputExists(
                f"{folder} holds a run of ropext {manifest['command']}, and ropext "
                f"{self.command} does not overwrite it, not even with --force. Repeat that command "
                "to resume it, give another -o, or delete the folder"
            )
        elif (names := self._other(manifest)) and not force and has_work(folder):
            anew = "" if force is None else ", or --force to start over"
            if SCHEMA in names:
                raise OutputExists(
                    f"{folder} holds a run of another version of ropext {self.command}, whose "
                    f"results differ; give another -o{anew}"
                )
            raise OutputExists(
                f"{folder} holds another run of ropext {self.command} (it differs in "
                f"{first_of(names)}); repeat that command to resume it, give another -o{anew}"
            )
        if not force and (names := self._edited()):
            anew = "" if force is None else "; --force writes them again"
            raise OutputExists(
                f"{folder} holds files that were added or edited since ropext wrote its own: "
                f"{guard.shown(names)}; move them away first, or give another -o{anew}"
            )

    def _edited(self) -> list[str]:
        """Return the files in the run's folder that have names of ropext's but not the digest that
        run.json lists."""
        manifest = sealed(self.folder)
        if manifest is None or self.command in BESIDE:
            return []
        listed = manifest.get(guard.FILES, {})
        names = []
        for name in _results(self.folder):
            if name in listed:
                is_ours = guard.is_in_state(self.folder / name, listed[name])
            else:  # a unit gets its name at any time of a run
                is_ours = name.startswith(UNITS) or RESULTS in manifest
            if not is_ours:
                names.append(name)
        return names

    def write_results(self) -> None:
        """Note in run.json that the run now writes its results."""
        if self.command in BESIDE:
            return
        manifest = sealed(self.folder)
        assert manifest is not None
        self._write_manifest({guard.FILES: manifest.get(guard.FILES, {}), RESULTS: True})

    def _write_manifest(self, more: Mapping[str, Any]) -> None:
        """Write run.json with what decides the run, and more keys, such as the digests of its
        files."""
        manifest = {"command": self.command, "decides": self.decides, **self.about, **more}
        write_manifest(self.folder, manifest)

    @contextmanager
    def claimed(
        self, force: bool | None, rank: int = 0, world: int = 1, say: Say = no_messages
    ) -> Iterator[None]:
        """Hold the lock of the run's folder, which is new or as this run left it; only the first of
        several processes does this.

        If a run of one process fails before it has kept anything, remove the folder.
        """
        with self._stopped_if_kept():
            if rank != 0:
                yield
                return
            with locked(self.folder.resolve(), self.output):
                with os_errors(self.folder):
                    more = self._taken_over(force, say) if os.path.lexists(self.folder) else {}
                    self._write_manifest(more)
                try:
                    yield
                except BaseException:
                    if world == 1 and not has_work(self.folder):
                        remove(self.folder)
                    raise
                self._finish(say)

    @contextmanager
    def _stopped_if_kept(self) -> Iterator[None]:
        """Turn NotWritten, for example of a full disk, into Stopped if the run's folder holds
        finished work."""
        try:
            yield
        except NotWritten as error:
            if not has_work(self.folder):
                raise
            raise Stopped(
                f"{error}; what is finished is kept in {self.folder}; run the same command to "
                "resume"
            ) from error

    def _taken_over(self, force: bool | None, say: Say) -> Flat:
        """Refuse an existing folder that this run may not take, and delete the files that another
        run left in it. Return the keys of its run.json that stay: the digests of the files that
        are left, and whether the run writes its results."""
        self.check(force)
        folder = self.folder
        kept = sealed(folder) or {}
        if not kept or self._other(kept):  # the manifest stays: after a kill it says whose this is
            # The name of an array contains everything that decides it, so another run can use it.
            stores = STORES if self.command == "eval" else MANIFEST
            remove(folder, lambda name: name.startswith((MANIFEST, stores)), say=say)
        remove_damaged(folder, say)
        more: Flat = {}
        if guard.FILES in kept:
            there = guard.listing(folder)
            more[guard.FILES] = {k: v for k, v in kept[guard.FILES].items() if k in there}
        if RESULTS in kept:
            more[RESULTS] = True
        return more

    def _finish(self, say: Say) -> None:
        """Delete files of the run's folder that are no longer needed, and list the written ones in
        run.json."""
        if self.command in PASSING:
            with os_errors(self.folder):
                remove(self.folder, say=say)
            return
        with os_errors(self.folder):
            for name in filter(HALF_WRITTEN.fullmatch, guard.listing(self.folder)):
                (self.folder / name).unlink()
        if self.command not in BESIDE:
            written = {name: guard.state(self.folder / name) for name in _results(self.folder)}
            self._write_manifest({guard.FILES: written})


def _results(folder: Path) -> list[str]:
    """Return the files in a run's folder that have names of ropext's, except run.json and
    used.log."""
    names = [name for name in guard.listing(folder) if OURS.fullmatch(name)]
    return [n for n in names if n not in (MANIFEST, USED) and not HALF_WRITTEN.fullmatch(n)]


def remove_damaged(folder: Path, say: Say) -> None:
    """Delete the finished pieces of a run that were edited or damaged since ropext wrote them, and
    name them: the run computes them again. After a power cut a piece may be empty. A piece of an
    earlier version has no digest, so it is deleted, too."""
    pieces = [name for name in _results(folder) if name.startswith(UNITS)]
    damaged = [name for name in pieces if not guard.is_piece(folder / name)]
    for name in damaged:
        (folder / name).unlink()
    if damaged:
        say(
            f"{folder}: pieces that are not as this version wrote them are computed again: "
            f"{guard.shown(damaged)}"
        )


def remove(
    folder: Path,
    stays: Callable[[str], bool] = lambda name: False,
    below: str = ".",
    say: Say = no_messages,
) -> None:
    """Delete the files that ropext wrote into a run's folder, or into its part `below`, run.json
    last; delete the folder if it is then empty. Name the user's files, which stay."""
    part = folder / below
    names = [(part / name).relative_to(folder).as_posix() for name in guard.listing(part)]
    for name in sorted(names, key=MANIFEST.__eq__):
        if OURS.fullmatch(name) and not stays(name):
            (folder / name).unlink(missing_ok=True)
    for place, _, _ in os.walk(part, topdown=False):
        with suppress(OSError):  # it holds something
            os.rmdir(place)
    kept = [name for name in guard.listing(folder) if not OURS.fullmatch(name)]
    if kept:
        say(f"{folder} keeps {guard.shown(kept)}, which ropext did not write")


def has_work(folder: Path) -> bool:
    """Return whether a run's folder holds more than run.json and used.log. A mistake in an option
    that is found late leaves nothing else."""
    return any(path.is_file() for path in folder.rglob("*") if path.name not in (MANIFEST, USED))


def write_manifest(folder: Path, manifest: Flat) -> None:
    """Write run.json into a run's folder, with the digest that shows that ropext wrote it."""
    plain = _plain(manifest)
    write_json(folder / MANIFEST, {SEAL: _seal_of(plain), **plain})


def _seal_of(manifest: Flat) -> str:
    """Return the digest of a run's manifest, which run.json itself holds."""
    text = json.dumps(manifest, sort_keys=True)
    return hashlib.sha256(f"written by ropext {text}".encode()).hexdigest()


def read(folder: Path) -> dict[str, Any] | None:
    """Return the manifest (run.json) of any command's folder without its list of files. Return None
    if ropext wrote none."""
    manifest = sealed(folder)
    return manifest and {k: v for k, v in manifest.items() if k not in LEFT_OUT}


def sealed(folder: Path) -> dict[str, Any] | None:
    """Return the whole manifest (run.json) of any command's folder. Return None if ropext wrote
    none, or if it was edited."""
    if not (folder / MANIFEST).is_file():
        return None
    check_links(folder)
    manifest = read_json(folder / MANIFEST)
    if not isinstance(manifest, dict):
        return None
    bare = {key: value for key, value in manifest.items() if key != SEAL}
    return manifest if manifest.get(SEAL) == _seal_of(bare) else None


def check_seal(folder: Path) -> None:
    """Raise InputError if a run's folder holds a run.json that is not as ropext wrote it."""
    if (folder / MANIFEST).is_file() and sealed(folder) is None:
        raise InputError(
            f"{folder / MANIFEST} is not as ropext wrote it: it was edited or damaged, or another "
            "program wrote it; restore it, or give another folder"
        )


def differences(before: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """Return the keys whose values differ between two manifests of runs, dotted if they are
    nested."""
    old = _flat(before)
    new = _flat(_plain(wanted))
    return [key for key in {**new, **old} if old.get(key, ABSENT) != new.get(key, ABSENT)]


def _flat(value: Mapping[str, Any], prefix: str = "") -> Flat:
    """Return a nested JSON object of a run's manifest as one level of dotted keys."""
    flat: Flat = {}
    for key, item in value.items():
        if isinstance(item, dict) and item:
            flat |= _flat(item, f"{prefix}{key}.")
        else:
            flat[prefix + key] = item
    return flat


def _plain(value: Mapping[str, Any]) -> Flat:
    """Convert a manifest, whatever the command, to the values that its JSON text gives back. Tuples
    become lists."""
    plain: Flat = json.loads(json.dumps(value, default=str))
    return plain


def first_of(names: list[str]) -> str:
    """Return the first five of some differing keys of a manifest, for an error's sentence."""
    more = " …" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more
