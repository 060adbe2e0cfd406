"""Find models, documents and recipes by short names: those that come with ropext, and the models of
other programs.

    ropext://demo       the bundled checkpoint, as a MODEL
    ropext://held-out   documents that the checkpoint was not trained on, as DATA
    ropext://tuning     documents to tune on, as DATA

    ollama:NAME[:TAG]   a GGUF that Ollama has pulled, as a MODEL
    NAME.gguf           a file in LM Studio's folder, if there is no such file here

    smoke-test          a recipe, as RECIPE (`ropext recipes ls`)

A command or recipe with these names runs from any directory and records no path of this machine.
"""

import glob
import os
import re
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ropext.base.errors import InputError, did_you_mean
from ropext.base.inputs import read_bytes
from ropext.base.jsontext import read_object

SCHEME = "ropext://"
_DEMO = Path(__file__).parents[1] / "demo"

MODELS = {f"{SCHEME}demo": _DEMO / "checkpoint"}
DATA = {
    f"{SCHEME}held-out": _DEMO / "data" / "held-out.jsonl",
    f"{SCHEME}tuning": _DEMO / "data" / "tuning.jsonl",
}

BUNDLED = {"model": MODELS, "data": DATA}

OLLAMA = "ollama:"
LISTED = 8  # names shown of a longer list
OLLAMA_SERVICE = Path("/usr/share/ollama/.ollama/models")  # if it runs as a service on Linux
_BESIDE = re.compile(r"mmproj|.*-(?!00001)\d{5}-of-\d{5}\.gguf")  # no model's first file
# [HOST/][NAMESPACE/]MODEL[:TAG], each part as Ollama allows it.
_PULLED = re.compile(r"(?:[A-Za-z0-9][\w.-]*/){0,2}[A-Za-z0-9][\w.-]*(?::\w[\w.-]*)?", re.ASCII)


def recipes() -> dict[str, Path]:
    """Return the recipes that come with ropext, by name: from the package, or from the root of a
    checkout."""
    inside = Path(__file__).parents[1] / "recipes"
    folder = inside if inside.is_dir() else Path(__file__).parents[2] / "recipes"
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def find_recipe(name: str) -> Path:
    """Return the file of a bundled recipe by its short name; refuse an unknown name and suggest
    similar ones."""
    known = recipes()
    wanted = name.removesuffix(".yaml")
    if wanted in known:
        return known[wanted]
    hint = did_you_mean(wanted, known, "`ropext recipes ls` lists them")
    if wanted != name:
        raise InputError(f"{name[:80]} is neither a file nor a bundled recipe; {hint}")
    raise InputError(f"there is no bundled recipe {name[:80]}; {hint}")


def find_bundled(name: str, kind: Literal["model", "data"]) -> Path | None:
    """Return the directory of a bundled checkpoint, or the file of bundled documents, for a name
    such as ropext://demo. Return None if the name does not begin with ropext://. Refuse an unknown
    name, and a name of the other kind."""
    if not name.startswith(SCHEME):
        return None
    known = BUNDLED[kind]
    if name in known:
        return known[name]
    for other, names in BUNDLED.items():
        if name in names:
            said = f"{name} is bundled {other}, not {kind}"
            raise InputError(f"{said}; bundled {kind}: {_list(known)}")
    ask = did_you_mean(name, known, f"known are {_list(known)}")
    raise InputError(f"{name[:80]} is not among ropext's bundled {kind}; {ask}")


def _list(names: Collection[object]) -> str:
    """Return the first of some known names or paths, and how many more there are, for an error's
    sentence."""
    shown = [str(name) for name in names][:LISTED]
    if len(names) > LISTED:
        shown.append(f"{len(names) - LISTED} more")
    return ", ".join(shown)


def find_gguf(name: str) -> Path | None:
    """Return the GGUF that the short name of another program's model means in any command:
    ollama:NAME, or NAME.gguf in LM Studio's folder. A path of a GGUF means itself, and a directory
    its one GGUF. The first bytes tell if a path has no suffix. Return None if the name means
    something else."""
    if name.startswith(OLLAMA):
        return _in_ollama(name, "model")
    path = Path(os.path.expanduser(name))
    try:
        is_file = path.is_file()
    except OSError as error:  # a name that is too long, for one
        raise InputError(f"{name[:80]} cannot be read: {error.strerror}") from error
    if is_file:
        return path if name.lower().endswith(".gguf") or _begins_as_gguf(path) else None
    if path.is_dir():  # one model alone, as `extend -o DIR` writes it, in parts or not
        files = [file for file in path.glob("*.gguf") if not _BESIDE.match(file.name)]
        other = any((path / name).exists() for name in ("config.json", "adapter_config.json"))
        return files[0] if len(files) == 1 and not other else None
    if not name.lower().endswith(".gguf"):  # of LM Studio's folder too: others are ids of the hub
        return None
    if path.is_absolute() or ".." in path.parts:
        raise InputError(f"there is no file {name}")
    folder = _lm_studio()
    escaped = glob.escape(name)  # USER/REPO/FILE, or the last part alone
    paths = sorted({*folder.glob(escaped), *folder.glob(f"*/*/{escaped}")})
    if len(paths) > 1:
        said = f"{name} is in LM Studio's folder {len(paths)} times: {_list(paths)}"
        raise InputError(f"{said}; name one by its path")
    if not paths:
        there = [path.name for path in sorted(folder.glob("*/*/*.gguf"))]
        models = [file for file in there if not _BESIDE.match(file)]
        holds = f", which holds {_list(models)}" if models else ""
        raise InputError(f"there is no file {name}, here or in LM Studio's folder {folder}{holds}")
    return paths[0]


def _begins_as_gguf(path: Path) -> bool:
    """Return whether a name that any command takes for a model means a GGUF: it is the path of a
    file with the first bytes of one."""
    try:
        with path.open("rb") as file:
            return file.read(4) == b"GGUF"
    except OSError:
        return False


def find_projector(name: str, path: Path) -> Path | None:
    """Return the path that the short name of another program's model means for its encoder of
    images or sound. It is among Ollama's blobs, or in the folder of the GGUF."""
    if name.startswith(OLLAMA):
        return _in_ollama(name, "projector")
    return min(path.parent.glob("mmproj*.gguf"), default=None)


@dataclass(frozen=True)
class OllamaLayer:
    """An entry of Ollama's manifest of a model."""

    kind: str  # model, projector, template, params, ...
    digest: str
    blob: Path | None  # None if Ollama has no such file


@dataclass(frozen=True)
class KeptByOllama:
    """The files that Ollama keeps of one model."""

    layers: tuple[OllamaLayer, ...]  # in their order
    config: dict[str, Any]


def kept_by_ollama(name: str) -> KeptByOllama | None:
    """Return the layers and the config that Ollama keeps of a model ollama:NAME. Return None for
    any other name."""
    if not name.startswith(OLLAMA):
        return None
    home, manifest = _manifest(name)
    stored = read_object(manifest)
    config = dict[str, Any]()
    blob = _layer(home, stored.get("config")).blob
    if blob is not None:
        with suppress(InputError):
            config = read_object(blob)
    return KeptByOllama(_layers(home, stored.get("layers")), config)


def _layers(home: Path, listed: object) -> tuple[OllamaLayer, ...]:
    """Return the layers that one of Ollama's manifests lists."""
    return tuple(_layer(home, layer) for layer in listed) if isinstance(listed, list) else ()


def _layer(home: Path, layer: object) -> OllamaLayer:
    """Return the layer of a model that an entry of one of Ollama's manifests names."""
    if not isinstance(layer, dict):
        return OllamaLayer(str(layer), "", None)
    kind = str(layer.get("mediaType")).removeprefix("application/vnd.ollama.image.")
    digest = str(layer.get("digest"))
    path = home / "blobs" / digest.replace(":", "-")
    is_there = re.fullmatch(r"sha256:[0-9a-f]{64}", digest) and path.is_file()
    return OllamaLayer(kind, digest, path if is_there else None)


def _in_ollama(name: str, kind: str) -> Path | None:
    """Return the blob that Ollama's manifest of a name lists as its model or projector."""
    home, manifest = _manifest(name)
    for layer in _layers(home, read_object(manifest).get("layers")):
        if layer.kind != kind:
            continue
        if layer.blob is None:
            raise InputError(
                f"{manifest} names the {kind} {layer.digest[:80]}, which is not in {home}/blobs"
            )
        return layer.blob
    if kind == "projector":
        return None
    raise InputError(f"{name} has no GGUF file in Ollama: {manifest} lists none")


def _manifest(name: str) -> tuple[Path, Path]:
    """Return Ollama's folder, and the path of its manifest for a model ollama:NAME."""
    wanted = name.removeprefix(OLLAMA)
    if not _PULLED.fullmatch(wanted):
        raise InputError(f"{name[:80]} is not a model name of Ollama, such as ollama:qwen3:8b")
    model, _, tag = wanted.partition(":")
    default = ["registry.ollama.ai", "library"]
    parts = model.split("/")
    place = [*default[: 3 - len(parts)], *parts, tag or "latest"]
    configured = os.environ.get("OLLAMA_MODELS")
    homes = [Path(configured)] if configured else [Path.home() / ".ollama/models", OLLAMA_SERVICE]
    for home in homes:
        manifest = home.joinpath("manifests", *place)
        if manifest.is_file():
            return home, manifest
    pulled = [path for home in homes for path in sorted(home.glob("manifests/*/*/*/*"))]
    known = ["/".join(path.parts[-4:-1]) + f":{path.name}" for path in pulled]
    known = [name.removeprefix("registry.ollama.ai/").removeprefix("library/") for name in known]
    raise InputError(
        f"{name} was not pulled into {homes[0]} (OLLAMA_MODELS names another folder); there "
        + (f"are {_list(known)}" if known else "is none")
    )


def _lm_studio() -> Path:
    """Return LM Studio's folder of models, to find them by short names: the one in its settings,
    else the default in its home. A pointer file names the home if it is not ~/.lmstudio."""
    home = Path.home() / ".lmstudio"
    chosen = None
    with suppress(InputError):
        pointer = Path.home() / ".lmstudio-home-pointer"
        home = Path(read_bytes(pointer, 4096).decode(errors="replace").strip() or home)
    with suppress(InputError):
        chosen = read_object(home / "settings.json").get("downloadsFolder")
    return Path(chosen) if isinstance(chosen, str) and chosen else home / "models"
