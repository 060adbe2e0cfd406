"""Directories as ropext marks its own, made without running it."""

import hashlib
import json
import os
from pathlib import Path


def mark(directory: Path) -> None:
    """Write into the record that all present files are ropext's, unchanged."""
    files = [path for path in directory.rglob("*") if path.is_symlink() or not path.is_dir()]
    states = {
        path.relative_to(directory).as_posix(): _leads(path)
        if path.is_symlink()
        else hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
        if path != directory / "ropext.json"
    }
    record = directory / "ropext.json"
    known = json.loads(record.read_text()) if record.is_file() else {}
    record.unlink(missing_ok=True)  # it may be a hard link
    record.write_text(json.dumps(known | {"files": states}))


def _leads(link: Path) -> str:
    return f"link to {hashlib.sha256(os.fsencode(os.readlink(link))).hexdigest()}"


def checkpoint(directory: Path, text: str = "{}") -> Path:
    """Write an output whose config holds a text."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(text)
    mark(directory)
    return directory


def at_work(output: Path, token: str = "0123456789abcdef") -> Path:
    """Make the folder that a killed run left next to its output."""
    work = output.parent / f".{output.name}.ropext-{token}"
    work.mkdir(parents=True)
    (work / work.name).touch()
    return work


def manifest(folder: Path, command: str, decides: dict | None = None, **about: object) -> None:
    """Write the manifest of a run, as documented: it bears the digest of its other values."""
    folder.mkdir(parents=True, exist_ok=True)
    rest = {"command": command, "decides": decides or {}, **about}
    text = "written by ropext " + json.dumps(rest, sort_keys=True)
    seal = hashlib.sha256(text.encode()).hexdigest()
    (folder / "run.json").write_text(json.dumps({"ropext": seal, **rest}))
