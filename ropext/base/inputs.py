"""Open files from strangers and check their paths.

No link may lead out of its folder. A file must be a regular one with no more bytes than a limit.
Text may be in the encodings that programs write.
"""

import json
import os
import re
import stat
from pathlib import Path

from ropext.base.errors import InputError, UsageError, class_name
from ropext.base.systems import open_raw

# transformers fetches kernels of its own organisation by itself; a name of any other on the hub is
# code of a stranger, which it would fetch and run too.
TRUSTED_KERNEL = re.compile(r"(?:paged\|)?kernels-community/[\w.-]+(?:@[\w.-]+)?(?::\w+)?\Z")

# Bytes. Refused before parsing: parsed JSON takes up to thirty times the memory of its text.
CONFIG_LIMIT = 16 * 10**6
OPTION_FILE_LIMIT = 16 << 20  # bytes

# A file of the hub's cache; its name is the hash of its content.
_BLOB = re.compile(r"(models|datasets)--[^/\\]+[/\\]blobs[/\\][0-9a-f]{40,64}\Z")
LINKED = (".safetensors", ".gguf")  # weights, which are read as nothing else


def check_link(path: Path, home: Path) -> None:
    """Refuse a symbolic link that leads out of the directory `home` of a model, an adapter,
    documents or a run. git and tar keep links, so a stranger's link may name any file of this
    machine."""
    if not path.is_symlink() or not path.exists():
        return
    real = Path(os.path.realpath(path))
    is_weights = path.name.endswith(LINKED) and real.is_file()
    is_inside = real.is_relative_to(os.path.realpath(home))
    if is_weights or is_inside or _BLOB.search(str(real)):
        return
    raise InputError(
        f"{path} is a link to {real}, outside of {home}; put the file itself there if you want it "
        "read"
    )


def check_links(directory: Path) -> None:
    """Refuse every symbolic link in a directory that leads out of it."""
    for folder, folders, files in os.walk(directory):
        for name in folders + files:
            check_link(Path(folder, name), directory)


def open_regular(path: Path) -> int:
    """Open a descriptor of a regular file, perhaps a stranger's, through symbolic links or not;
    refuse a FIFO, a device or a directory.

    O_NONBLOCK: opening a FIFO without a writer would otherwise hang before it can be checked.
    """
    try:
        descriptor = open_raw(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise InputError(f"{path} is not a regular file (nor a link to one), so it is not read")
    return descriptor


def read_bytes(path: Path, limit: int) -> bytes:
    """Read a regular file, perhaps a stranger's, of at most `limit` bytes; raise InputError if it
    is longer."""
    with open(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        data = b""
        if size <= limit:
            data = file.read(limit + 1)  # it may have grown
    size = max(size, len(data))
    if size > limit:
        raise InputError(
            f"{path} has {size:,} bytes, more than the {limit // 10**6} MB that a file of its kind "
            "may have"
        )
    return data


def read_text(path: str) -> str:
    """Read the small text file that an option names, at most 16 MiB, in UTF-8, UTF-16 or
    UTF-32."""
    return as_text(read_bytes(Path(path), OPTION_FILE_LIMIT))


def as_text(data: bytes) -> str:
    """Decode the bytes of a user's text file: PowerShell 5.1's > writes UTF-16, other programs
    write a byte-order mark."""
    return data.decode(json.detect_encoding(data), errors="replace")


LONGEST_NAME = 255  # bytes, on the file systems of all three systems


def model_name(model: str | os.PathLike[str]) -> str:
    """Check the path or hub id that a user gives any command or Python call as MODEL, and return it
    as a text. Refuse an empty one, and anything that is no text or path, such as a model in
    memory."""
    if model == "":
        raise UsageError("the name of the model is empty; give its directory, file or hub id")
    if isinstance(model, str | os.PathLike):
        return os.fspath(model)
    inside = inner_model_argument(model) or "model"
    raise UsageError(
        f"name a model by its directory, its file or its hub id, not by {class_name(model)}; "
        f"to write a model in memory that `ropext.patch` extended, use `ropext.save({inside}, "
        f"DIR)`; for any other model {inside}.save_pretrained"
    )


def inner_model_argument(model: object) -> str:
    """Return the expression by which any error's sentence names the model inside torch's wrapper:
    `model._orig_mod` (torch.compile) or `model.module` (DataParallel). Return "" without a
    wrapper."""
    for name in ("_orig_mod", "module"):
        if hasattr(model, name):
            return f"model.{name}"
    return ""


def not_a_model(wanted: str, given: object) -> UsageError:
    """Build the UsageError of any Python call whose argument should be a model in memory. Its
    sentence names the inner model if torch wraps one."""
    sentence = f"{wanted}, not {class_name(given)}"
    inside = inner_model_argument(given)
    if inside:
        sentence += f" around one; pass {inside}"
    return UsageError(sentence)


def from_home(path: str | os.PathLike[str]) -> Path:
    """Return a path from a user with `~` replaced by the home folder; refuse a value that is no
    path."""
    if not isinstance(path, str | os.PathLike):
        raise UsageError(f"a path is a text or a pathlib.Path, not {class_name(path)}")
    place = Path(os.path.expanduser(path))
    check_names(place)
    return place


def check_names(place: Path, hint: str = "") -> None:
    """Refuse a path from a user with a part that no file system accepts as a file name."""
    for part in place.parts:
        if "\0" in part or len(os.fsencode(part)) > LONGEST_NAME:
            raise UsageError(
                f"{part[:40]!r}... is no name of a file: it is longer than {LONGEST_NAME} bytes, "
                f"or holds a null character{hint}"
            )


def is_path(text: str) -> bool:
    """Return whether a user's text can only be the path of a file. In ID:CONFIG no slash follows
    the colon."""
    return bool(re.match(r"[./~\\]|[A-Za-z]:[/\\]", text))


def is_plain_name(name: str) -> bool:
    """Return whether a file name that a stranger's file lists is short and printable, and cannot
    lead out of its directory."""
    if name in ("", ".", "..") or len(name) >= 256:
        return False
    return name.isprintable() and "/" not in name and "\\" not in name
