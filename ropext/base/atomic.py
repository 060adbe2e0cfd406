"""Write files that exist whole or not at all: ropext writes each under another name, flushes it and
renames it."""

import os
import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from ropext.base.errors import NotWritten, RopextError
from ropext.base.systems import copy_owner, move

HALF_WRITTEN = re.compile(r"(.*/)?\.[^/]+\.[0-9a-f]{16}\.ropext-tmp")
Write = Callable[[BinaryIO], object]


@contextmanager
def os_errors(output: Path) -> Iterator[None]:
    """Turn an error of the file system into NotWritten, with one sentence: the output cannot be
    written, and why."""
    try:
        yield
    except OSError as error:
        where = f" ({os.fsdecode(error.filename)})" if error.filename else ""
        reason = error.strerror or type(error).__name__
        raise NotWritten(f"{output} cannot be written: {reason}{where}") from error


def reason_of(error: Exception) -> str | None:
    """Return why the file system refused a write, also if safetensors or tokenizers (Rust) or
    torch.save (C++) put the system's error into a text. Return None for any other error."""
    if isinstance(error, RopextError):
        return None
    if isinstance(error, OSError):  # without a number it is transformers' own, about a model
        return None if error.errno is None else error.strerror or type(error).__name__
    cause = re.search(r"[^:]*\(os error \d+\)", str(error))
    if cause is not None:
        return cause[0].strip()
    if any(known in str(error) for known in ("file write failed", "unexpected pos")):
        return "a file could not be written whole"
    return None


@contextmanager
def library_errors(output: Path) -> Iterator[None]:
    """Turn an error of the file system into NotWritten, as `os_errors` does, if another library
    raised it while it wrote the output."""
    try:
        yield
    except Exception as error:
        reason = reason_of(error)
        if reason is None:
            raise
        raise NotWritten(f"{output} cannot be written: {reason}") from error


def temporary_of(path: Path) -> Path:
    """Return a path next to a file for its unfinished content, `.NAME.TOKEN.ropext-tmp`; no helper
    of an output has a longer name."""
    return path.parent / f".{path.name}.{secrets.token_hex(8)}.ropext-tmp"


def replace_whole(path: Path, write: Write, *, keep: bool = False) -> None:
    """Write a file under a temporary name in the same folder, flush it to the disk, and rename it.
    `keep` gives it the owner and the mode of the file that it replaces."""
    temporary = temporary_of(path)
    try:
        with temporary.open("xb") as stream:
            if keep and path.exists():
                copy_owner(path, temporary)
            write(stream)
            stream.flush()
            os.fsync(stream.fileno())
        move(temporary.replace, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def file_errors(path: Path) -> Iterator[None]:
    """Turn an error of the file system at one file into NotWritten, with one sentence that names no
    other file. In the folder of a run, `workdir` adds what is kept."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise NotWritten(f"{path} cannot be written: {reason}") from error


def write_whole(path: Path, write: Write) -> None:
    """Write a file by way of a temporary file; make its folder if it is missing."""
    with file_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_whole(path, write)


def write_bytes(path: Path, data: bytes) -> None:
    """Write a binary file by way of a temporary file, so that it exists whole or not at all."""
    write_whole(path, lambda stream: stream.write(data))


def write_text(path: Path, text: str) -> None:
    """Write a text file by way of a temporary file, so that it exists whole or not at all."""
    write_bytes(path, text.encode())
