"""Read a base model from the disk: its small files strictly, a list of the large ones, and a reason
for each file that an extension leaves behind."""

import glob
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, NamedTuple

from ropext import families
from ropext.base import bundled
from ropext.base.errors import InputError, UsageError
from ropext.base.inputs import check_link, is_plain_name, read_bytes
from ropext.base.jsontext import CONFIG_DEPTH_LIMIT, Json, parse_object, read_object
from ropext.families import Model, stock
from ropext.families.config import check_foreign_parts
from ropext.files.checkpoint.weights import read_header
from ropext.planning.carrier import Carrier
from ropext.scaling.rope import CONFIG

INDEX_LIMIT = 128 * 10**6  # bytes of an index of weight files

# Folders that no loader reads as part of this checkpoint. Exported graphs (onnx and the like) and
# other formats have the old rotary embedding built in.
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
    "control": "an adapter of the model before its extension",
    "fit": "a fit's record",
    "__pycache__": "compiled code",
}

# Suffixes of weight files in other formats, of pickles and of archives.
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

# ropext writes new ones, so it leaves the base's behind.
WRITTEN_ANEW = {
    "ropext.json": "the base's own record",
    "README.md": "replaced by the new card",
    "pair-factors.json": "the base's own fitted spectrum",
}

# From a subfolder ropext copies files that describe a model (code, chat templates, tokenizers,
# modules). It copies weights only from folders that sentence-transformers numbers (1_Pooling).
SMALL_SUFFIXES = (
    ".json", ".txt", ".jinja", ".model", ".md", ".py", ".tiktoken", ".spm", ".yaml", ".yml",
    ".vocab", ".bpe", ".codes",
)  # fmt: skip
MODULE_FOLDER = re.compile(r"[0-9]+_\w+")

FOLDER_DEPTH = 4
FROM_CHECKPOINT = "extend the Hugging Face checkpoint they were made from and convert the result"


class NoWeights(InputError):
    """The error for a checkpoint without weights in any format."""


class State(NamedTuple):
    """The state of a file. A write or a replacement alters one of the first five values; so does a
    new hard link, which also alters the last."""

    device: int
    inode: int
    size: int
    written: int  # nanoseconds, as is `changed`
    changed: int
    names: int

    def is_rewritten(self, before: "State") -> bool:
        """Return True if a file of an opened checkpoint was written or replaced since `before`. A
        new name or new rights change only the time of change."""
        return self[:4] != before[:4]

    def times(self) -> list[int | str]:
        """Return the size and the times by which digests.json in the user's cache knows an
        unchanged file of a checkpoint."""
        return [self.size, self.written, self.changed]

    def is_link_of(self, before: "State | None") -> bool:
        """Return True if a file of an opened checkpoint only got or lost a hard link since
        `before`. `extend --link hard` makes one, and the system then sets the time of change,
        too."""
        if before is None or self.is_rewritten(before):
            return False
        return self.names != before.names


def state_of(status: os.stat_result) -> State:
    """Return the state of a checkpoint's file on the disk, which shows whether it is written
    later."""
    return State(
        device=status.st_dev,
        inode=status.st_ino,
        size=status.st_size,
        written=status.st_mtime_ns,
        changed=status.st_ctime_ns,
        names=status.st_nlink,
    )


@dataclass(frozen=True)
class Inventory:
    """The files of one directory, by their names relative to it with `/` between the parts."""

    files: dict[str, int] = field(default_factory=dict)  # copied or linked: bytes
    left: dict[str, str] = field(default_factory=dict)  # left behind: reason
    refused: dict[str, str] = field(default_factory=dict)  # should be copied, but cannot: reason
    # The states of the files that are copied or linked, from before ropext read the first:
    # `check_unchanged` compares them.
    states: dict[str, State] = field(default_factory=dict, compare=False, repr=False)


def reason_to_leave(name: str) -> str | None:
    """Return why a checkpoint's file of this relative name stays behind, or None if an extension
    copies or links it."""
    *folders, leaf = name.split("/")
    for folder in folders:
        if reason := _folder_reason(folder):
            return reason
    if leaf.startswith("."):
        return "hidden"
    if name in WRITTEN_ANEW:
        return WRITTEN_ANEW[name]
    # The publisher's own format next to the Hugging Face one; params.json holds the old rotary
    # base.
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
    """Return why an extension leaves a checkpoint's folder of this name behind, or None."""
    if folder.startswith("."):
        return "hidden"
    if re.fullmatch(r"(checkpoint|global_step)[-_]?[0-9]+", folder):
        return "a training state"
    return FOLDERS_LEFT.get(folder.lower())


def take_inventory(directory: Path) -> Inventory:
    """List a checkpoint's directory without opening a file. Raise if a link leads out of it."""
    inventory = Inventory()
    for name, entry in _walk(directory, "", 0, inventory):
        try:
            name.encode()
        except UnicodeEncodeError:
            inventory.refused[name.encode(errors="replace").decode()] = "its name is not UTF-8"
            continue
        reason = reason_to_leave(name)
        if reason is None or name in WRITTEN_ANEW:
            check_link(Path(entry.path), directory)
        if reason is not None:
            inventory.left[name] = reason
            continue
        try:
            status = os.stat(entry.path)  # the status of a directory entry has no inode on Windows
        except OSError as error:
            inventory.refused[name] = f"it cannot be read: {error.strerror}"
            continue
        if stat.S_ISREG(status.st_mode):
            inventory.files[name] = status.st_size
            inventory.states[name] = state_of(status)
        else:
            inventory.refused[name] = "it is neither a regular file nor a link to one"
    return inventory


def _walk(
    directory: Path, prefix: str, depth: int, into: Inventory
) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Yield (relative name, entry) for each file of a checkpoint's directory, and note the folders
    that stay behind."""
    with os.scandir(directory) as entries:
        ordered = sorted(entries, key=lambda entry: entry.name)
    for entry in ordered:
        name = prefix + entry.name
        if not entry.is_dir(follow_symlinks=False):
            yield name, entry  # or a link to a directory: refused, or left behind by its name
        elif reason := _folder_reason(entry.name):
            into.left[name + "/"] = reason
        elif depth == FOLDER_DEPTH:
            into.left[name + "/"] = f"more than {FOLDER_DEPTH} folders deep"
        else:
            yield from _walk(Path(entry.path), name + "/", depth + 1, into)


INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# Why a weight file stays behind if its tensors have the same names as the tensors that stock loads.
OTHER_SET = "another set of the same weights, which transformers does not load"
VARIANT = "a variant of the weights, which only who names it loads"
VARIANT_NAME = re.compile(r"model\.(?!safetensors)[\w]+(-\d{5}-of-\d{5})?\.safetensors")
ADAPTER_CONFIG = "adapter_config.json"

# An index is flat: two objects. The largest known one lists a tenth of INDEX_TENSORS.
INDEX_CONTAINERS = 1_000
INDEX_TENSORS = 1_000_000

# JSON files with limits that an extension may have to raise.
TOKENIZER_CONFIG = "tokenizer_config.json"
GENERATION_CONFIG = "generation_config.json"
SENTENCE_CONFIG = "sentence_bert_config.json"

CACHED = re.compile(r"models--(?P<repo>[^/]+)/snapshots/(?P<commit>[0-9a-f]{40})")


@dataclass(frozen=True, kw_only=True)
class Snapshot(Inventory):
    """A checkpoint as ropext found it: its files, and the content of the small ones. Its weights
    are not read."""

    name: str  # as given by the user: a directory or a hub id
    directory: Path
    config: dict[str, Json]
    hub_id: str | None = None
    revision: str | None = None  # as requested; None = the default branch, or not from the hub
    commit: str | None = None
    length_files: Mapping[str, dict[str, Json]] = field(default_factory=dict)  # by name
    index: dict[str, Json] | None = None  # model.safetensors.index.json
    shards: Mapping[str, str] = field(default_factory=dict)  # its weight_map, by tensor
    # The carrier of its spectrum, and the name of its config in an error.
    carries: Callable[[Model], Carrier] = field(default=Carrier, compare=False)
    config_name: str = CONFIG
    kept_record: dict[str, Json] | None = None  # the record inside a GGUF file
    # The SHA-256 of the files that were hashed since; `check_unchanged` compares them, too.
    hashed: dict[str, str] = field(default_factory=dict, compare=False, repr=False)

    is_gguf: ClassVar[bool] = False

    @property
    def weight_files(self) -> tuple[str, ...]:
        """Return the names of the safetensors files next to config.json, sorted."""
        return tuple(
            name for name in self.files if "/" not in name and name.endswith(".safetensors")
        )

    @property
    def weight_paths(self) -> dict[str, Path]:
        """Return the paths of the checkpoint's weight files, by name."""
        return {name: self.path(name) for name in self.weight_files}

    @property
    def unloaded(self) -> list[str]:
        """Return the safetensors files next to config.json that transformers does not load."""
        loaded = set(self.shards.values()) or {SINGLE}
        return [name for name in self.weight_files if name not in loaded]

    @property
    def quantisation(self) -> str | None:
        """Return the quantiser that packed the checkpoint's weights ("awq", "gptq", "fp8", "mxfp4"
        ...), or None."""
        for config in (self.config, self.config.get("text_config")):
            method = config.get("quantization_config") if isinstance(config, dict) else None
            if isinstance(method, dict):
                return str(method.get("quant_method", "unnamed"))
        return None

    @property
    def kind(self) -> str:
        """Return the kind of the model's source on the disk, in words."""
        return "a directory"

    @property
    def weight_bytes(self) -> int | None:
        """Return the bytes of the checkpoint's tensors. Return None if neither the tensors nor
        their index is here."""
        here = self.weight_files
        if here and set(self.shards.values()) <= set(here):
            return sum(self.files[name] for name in here)
        about = self.index and self.index.get("metadata")
        stated = about.get("total_size") if isinstance(about, dict) else None
        if isinstance(stated, int | float) and 0 < stated < 1 << 60 and self.shards:
            return int(stated)
        return None

    @property
    def is_on_hub(self) -> bool:
        """Return True if the checkpoint's name is its id on the hub, and not a local path."""
        return self.hub_id == self.name

    @property
    def place(self) -> str:
        """Return the path or hub id by which another program finds the checkpoint: only ropext
        knows the names of bundled models."""
        return str(self.directory) if self.name in bundled.MODELS else self.name

    def path(self, name: str) -> Path:
        """Return the path of a file of the checkpoint."""
        return self.directory / name

    def remarks(self) -> tuple[str, ...]:
        """Return warnings for a plan that follow from the checkpoint's files."""
        return ()

    def read(self, context: int | None = None, original: int | None = None) -> Model:
        """Return the checkpoint's model, whose spellings have to agree. `context` replaces a
        trained length that the config misstates. `original` is the length before its scaling, if
        the config does not state it."""
        return families.read(self.config, context, original, self.config_name)

    def as_read(self) -> Model:
        """Return the checkpoint's model as stock transformers 5 reads it, even if other loaders
        read it differently."""
        return families.as_read(self.config, source=self.config_name)

    def require_weights(self) -> None:
        """Raise unless every file of the checkpoint that is copied is readable and every shard of
        its index exists."""
        for name, reason in self.refused.items():
            raise InputError(f"{name} in {self.name} cannot be carried over: {reason}")
        shards = set(self.shards.values())
        missing = sorted(shards - set(self.files))
        if missing:
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            raise InputError(
                f"{self.name} lacks {len(missing)} of the {len(shards)} "
                f"shards that {INDEX} names: {', '.join(missing[:3])}{more}; fetch it again"
            )
        if not self.weight_files:
            raise no_weights_error(self.name, self.left)

    def misplaced(self) -> Iterator[str]:
        """Yield a sentence for each tensor that is in two safetensors shards, or not in the shard
        that the index names."""
        places = dict[str, str]()
        for shard in sorted(set(self.shards.values())):
            for name in read_header(self.path(shard)).tensors:
                if name in places:
                    yield f"{places[name]} and {shard} both hold {name[:80]}"
                elif self.shards.get(name, shard) != shard:
                    yield f"{shard} holds {name[:80]}, but {INDEX} says {self.shards[name]}"
                places[name] = shard

    def changed(self, file: str, during: str) -> InputError:
        """Return the error for a checkpoint that changed while ropext used it."""
        return InputError(
            f"{self.name} was changed while it was {during} ({file} is not as it was); "
            "run the command again when no other program writes to it"
        )

    def stands_for(self, directory: "Snapshot") -> "Snapshot":
        """Return the snapshot of a directory made of this checkpoint, under this checkpoint's
        name."""
        return replace(
            directory,
            name=self.name,
            hub_id=None,
            carries=self.carries,
            config_name=self.config_name,
        )


def short_name(name: str, hub_id: str | None) -> str:
    """Return the name of a checkpoint's directory or a GGUF file without its place on the disk, or
    its hub id. A model card or a report shows it."""
    if hub_id or name in bundled.MODELS or name.startswith(bundled.OLLAMA):
        return hub_id or name
    path = Path(os.path.expanduser(name))
    if path.is_dir():  # "." and a link have another name
        path = path.resolve()
    return path.name


def open_snapshot(
    model: str | Path, *, revision: str | None = None, weights: bool = False
) -> Snapshot:
    """Read a checkpoint from a local directory or, by its hub id, through huggingface_hub.

    With `weights`, require the weight files (fetch them from the hub) and check them against the
    index.
    """
    name = str(model)
    states = dict[str, State]()
    length_files = dict[str, dict[str, Json]]()
    try:
        directory, hub_id, commit = _locate(name, revision, weights)
        with suppress(FileNotFoundError):  # `_config` reports it
            states[CONFIG] = state_of(os.stat(directory / CONFIG))
        config = _config(directory, name)
        stock.describe_unknown_types(config)
        inventory = take_inventory(directory)
        inventory.states.update(states)  # from before the config was read
        index = _leave_other_sets(directory, inventory, _index(directory / INDEX))
        for file in (TOKENIZER_CONFIG, GENERATION_CONFIG, SENTENCE_CONFIG):
            if os.path.lexists(directory / file):
                length_files[file] = read_object(directory / file, CONFIG_DEPTH_LIMIT)
    except OSError as error:  # a directory without permission, a name that is too long
        raise InputError(f"{name[:200]} cannot be read: {error.strerror}") from error
    snapshot = Snapshot(
        name=name,
        directory=directory,
        config=config,
        **vars(inventory),
        hub_id=hub_id,
        revision=revision,
        commit=commit,
        length_files=length_files,
        index=index,
        shards=index["weight_map"] if index else {},
    )
    if weights:
        snapshot.require_weights()
    return snapshot


def with_weights(snapshot: Snapshot) -> Snapshot:
    """Return the same checkpoint with its weight files. Fetch those on the hub from the commit
    whose config was read. Check local ones."""
    if not snapshot.is_on_hub:
        snapshot.require_weights()
        return snapshot
    whole = open_snapshot(snapshot.name, revision=snapshot.commit, weights=True)
    if whole.config != snapshot.config:
        raise snapshot.changed(CONFIG, "fetched")
    states = whole.states | snapshot.states
    return replace(whole, revision=snapshot.revision, states=states, hashed=snapshot.hashed)


def _leave_other_sets(
    directory: Path, inventory: Inventory, index: dict[str, Json] | None
) -> dict[str, Json] | None:
    """Leave safetensors files behind that repeat tensors of the files that stock loads. Return the
    index, or None if stock does not load it.

    Stock prefers the single file to an index and its shards.
    """
    files = inventory.files
    weights = [name for name in files if "/" not in name and name.endswith(".safetensors")]
    shards = set(index["weight_map"].values()) if index else set()
    chosen = {SINGLE} if SINGLE in weights else shards
    others = [name for name in weights if name not in chosen]
    if not chosen or not others or not chosen <= set(weights):
        # nothing to compare with, or missing files, for which `require_weights` raises
        return index
    stored: set[str] = set()
    for name in chosen:
        stored |= set(read_header(directory / name).tensors)
    for name in others:
        if stored & set(read_header(directory / name).tensors):
            del files[name]
            inventory.left[name] = VARIANT if VARIANT_NAME.fullmatch(name) else OTHER_SET
    if chosen == shards or index is None or shards <= chosen:
        return index
    files.pop(INDEX, None)
    inventory.left[INDEX] = OTHER_SET
    return None


def _locate(model: str, revision: str | None, weights: bool) -> tuple[Path, str | None, str | None]:
    """Return (directory, hub id, commit) of a checkpoint. A directory of that name takes precedence
    over a hub id."""
    if not model or "\0" in model:
        reason = "not a name" if model else "empty"
        raise InputError(f"MODEL is {reason}; name a local directory or a hub id")
    path = bundled.find_bundled(model, "model") or bundled.find_gguf(model)
    path = path or Path(os.path.expanduser(model))
    if path.is_dir():
        if revision is not None:
            raise UsageError(
                f"--revision {revision} is for hub ids, but {model} is a local directory"
            )
        cached = CACHED.search(Path(os.path.abspath(path)).as_posix())
        if cached:
            return path, cached["repo"].replace("--", "/", 1), cached["commit"]
        return path, None, None
    if path.exists():
        raise InputError(_a_file(path))
    from ropext.files.checkpoint import hub  # late: only hub ids need it

    if not hub.is_id(model):
        raise InputError(_missing(path))
    patterns = [f"*{suffix}" for suffix in SMALL_SUFFIXES]
    if weights:
        patterns.append("*.safetensors")
    ignored = [f"{folder}/*" for folder in FOLDERS_LEFT]
    ignored += ["consolidated*", "params.json"]
    directory, commit = hub.fetch(model, revision, patterns, ignored)
    # Pickles and GGUF are never fetched, only listed.
    if not (directory / "config.json").exists():
        raise InputError(no_config_message(model, hub.names(model, revision)))
    if weights and not any(directory.glob("*.safetensors")):
        raise no_weights_error(model, hub.names(model, revision))
    return directory, model, commit


def _a_file(path: Path) -> str:
    """Return the message for a MODEL that is a GGUF or another file, not a checkpoint's
    directory."""
    if bundled.find_gguf(str(path)) is not None:
        return (
            f"{path} is a GGUF file, which inspect, plan, extend, verify, eval and fit read; "
            "finetune, run, push and --method auto take Hugging Face checkpoints"
        )
    return f"{path} is a file; name the directory of a Hugging Face checkpoint or a hub id"


def _missing(path: Path) -> str:
    """Return the message for a checkpoint's path that does not exist. It names the old copy that an
    interrupted --force left, if there is one."""
    for old in path.parent.glob(f".{glob.escape(path.name)}.ropext-*/old"):
        return (
            f"{path} is missing, but {old} is there: an interrupted --force left it; run that "
            "command again, or rename it back"
        )
    return f"{path} does not exist (and is no hub id, which reads name or organisation/name)"


def _config(directory: Path, model: str) -> dict[str, Json]:
    """Return the content of a checkpoint's config.json. Raise InputError if it is missing, next to
    an adapter, or loads foreign code or files."""
    path = directory / "config.json"
    if not os.path.lexists(path):
        raise InputError(no_config_message(model, os.listdir(directory)))
    if os.path.lexists(directory / ADAPTER_CONFIG):
        raise InputError(
            f"{model} holds both a model and an adapter ({ADAPTER_CONFIG}); transformers would "
            "load the adapter's base in place of the model. Move one of the two into another "
            "directory"
        )
    check_link(path, directory)
    config = read_object(path, CONFIG_DEPTH_LIMIT)
    check_foreign_parts(config, str(path))
    return config


def no_config_message(model: str, names: Iterable[str]) -> str:
    """Return the message for a directory or hub repository without config.json, by its other
    files."""
    names = set(names)
    if ADAPTER_CONFIG in names:
        return (
            f"{model} is an adapter without its model; merge it into its base (peft's "
            "merge_and_unload) and name the merged directory"
        )
    if any(name.lower().endswith(".gguf") for name in names):
        return f"{model} holds only GGUF files; {FROM_CHECKPOINT}"
    return f"{model} is not a model directory: it has no config.json"


def _index(path: Path) -> dict[str, Json] | None:
    """Return the content of a checkpoint's model.safetensors.index.json, whose weight_map is
    checked. Return None if there is no such file."""
    if not os.path.lexists(path):
        return None
    data = read_bytes(path, INDEX_LIMIT)
    if data.count(b'"') > 4 * INDEX_TENSORS:
        raise InputError(f"{path} lists more than {INDEX_TENSORS:,} tensors")
    index = parse_object(data, str(path), containers=INDEX_CONTAINERS)
    shards = index.get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(s, str) for s in shards.values()):
        raise InputError(f"{path} has no weight_map from tensor names to shard names")
    for shard in set(shards.values()):
        if not is_plain_name(shard):
            raise InputError(
                f"{path} names the shard {shard[:80]!r}, which is not a plain file name"
            )
    return index


def no_weights_error(model: str, names: Iterable[str]) -> InputError:
    """Return the error for a checkpoint without safetensors, by its other files."""
    names = sorted(names)
    pickled = [name for name in names if PICKLED.fullmatch(name)]
    if pickled:
        return InputError(
            f"{model} holds only pickled weights ({pickled[0]}), which ropext never opens; if "
            "you trust them, convert them with transformers: "
            "AutoModelForCausalLM.from_pretrained(MODEL).save_pretrained(DIRECTORY) writes "
            "safetensors"
        )
    if any(name.lower().endswith(".gguf") for name in names):
        return InputError(f"{model} holds its weights only as GGUF; {FROM_CHECKPOINT}")
    return NoWeights(
        f"{model} has no weights: there is no .safetensors file beside config.json; "
        "`ropext plan` prints the lines that serve the base's own weights without a copy"
    )
