"""Which files of a checkpoint an extension carries over, and why the others stay behind."""

import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

# Folders that are never part of what a loader reads as this checkpoint. Exported graphs (onnx and
# the like) and other formats have the old rotary embedding baked in.
FOLDERS_LEFT = {
    "original": "the publisher's own format, not extended",
    "metal": "another format, not extended",
    "onnx": "an exported graph, not extended",
    "openvino": "an exported graph, not extended",
    "coreml": "an exported graph, not extended",
    "gguf": "another format, not extended",
    "runs": "training logs",
    "training": "a training's record",
    "adapter": "an adapter of this very checkpoint, not extended",
    "base": "the checkpoint before its training",
    "fit": "a fit's record",
    "__pycache__": "compiled code",
}

# What a weight file of another format, a pickle or an archive is called.
SUFFIXES_LEFT = {
    ".gguf": "a GGUF file holds the old context; convert the extended directory",
    **dict.fromkeys(
        (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib", ".npy", ".npz"),
        "may hold a pickle, which is never opened",
    ),
    **dict.fromkeys(
        (".h5", ".msgpack", ".ot", ".onnx", ".onnx_data", ".tflite", ".mlmodel", ".ggml", ".tar",
         ".gz", ".zip", ".7z"),
        "another format, not extended",
    ),
}  # fmt: skip

PICKLED = re.compile(
    r"(pytorch_model|model|adapter_model|flax_model|tf_model).*\.(bin|pt|pth|ckpt)"
)

# Written anew, so the base's is not carried as it is.
WRITTEN_ANEW = {
    "ropext.json": "the base's own record",
    "README.md": "replaced by the new card",
    "pair-factors.json": "the base's own fitted spectrum",
}

# Subfolders carry what describes a model (code, chat templates, tokenizers, modules); weights only
# in the folders that sentence-transformers numbers (1_Pooling, 2_Dense).
SMALL_SUFFIXES = (
    ".json", ".txt", ".jinja", ".model", ".md", ".py", ".tiktoken", ".spm", ".yaml", ".yml",
    ".vocab", ".bpe", ".codes",
)  # fmt: skip
MODULE_FOLDER = re.compile(r"[0-9]+_\w+")

FOLDER_DEPTH = 4


@dataclass(frozen=True)
class Inventory:
    """The files of one directory, by their names relative to it with `/` between the parts."""

    sizes: dict[str, int] = field(default_factory=dict)  # carried: bytes
    left: dict[str, str] = field(default_factory=dict)  # left behind: reason
    refused: dict[str, str] = field(default_factory=dict)  # would be carried, but cannot: reason


def reason_to_leave(name: str) -> str | None:
    """Why a file of this relative name stays behind, or None when it is carried."""
    *folders, leaf = name.split("/")
    for folder in folders:
        if reason := _folder_reason(folder):
            return reason
    if leaf.startswith("."):
        return "hidden"
    if name in WRITTEN_ANEW:
        return WRITTEN_ANEW[name]
    # The publisher's own format beside the Hugging Face one; params.json holds the old rotary base.
    if leaf.startswith("consolidated") or leaf == "params.json":
        return FOLDERS_LEFT["original"]
    suffix = os.path.splitext(leaf)[1].lower()
    if leaf.endswith((".bin.index.json", ".h5.index.json", ".msgpack.index.json")):
        return "the index of pickled weights"
    if suffix in SUFFIXES_LEFT:
        return SUFFIXES_LEFT[suffix]
    if folders and suffix not in SMALL_SUFFIXES and not MODULE_FOLDER.fullmatch(folders[0]):
        return "a file in a subfolder that is neither code nor text"
    return None


def _folder_reason(folder: str) -> str | None:
    if folder.startswith("."):
        return "hidden"
    if re.fullmatch(r"(checkpoint|global_step)[-_]?[0-9]+", folder):
        return "a training state"
    return FOLDERS_LEFT.get(folder.lower())


def take_inventory(directory: Path) -> Inventory:
    """List a checkpoint's directory. Links to regular files count as files; nothing is opened."""
    found = Inventory()
    for name, entry in _walk(directory, "", 0, found):
        try:
            name.encode()
        except UnicodeEncodeError:
            found.refused[name.encode(errors="replace").decode()] = "its name is not UTF-8"
            continue
        if reason := reason_to_leave(name):
            found.left[name] = reason
            continue
        try:
            status = entry.stat()
        except OSError as error:
            found.refused[name] = f"it cannot be read: {error.strerror}"
            continue
        if stat.S_ISREG(status.st_mode):
            found.sizes[name] = status.st_size
        else:
            found.refused[name] = "it is neither a regular file nor a link to one"
    return found


def _walk(
    directory: Path, prefix: str, depth: int, found: Inventory
) -> Iterator[tuple[str, os.DirEntry[str]]]:
    with os.scandir(directory) as entries:
        ordered = sorted(entries, key=lambda entry: entry.name)
    for entry in ordered:
        name = prefix + entry.name
        if not entry.is_dir(follow_symlinks=False):
            yield name, entry  # a link to a directory too: refused, or left behind by its name
        elif reason := _folder_reason(entry.name):
            found.left[name + "/"] = reason
        elif depth == FOLDER_DEPTH:
            found.left[name + "/"] = f"more than {FOLDER_DEPTH} folders deep"
        else:
            yield from _walk(Path(entry.path), name + "/", depth + 1, found)
