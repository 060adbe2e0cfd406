"""The command that runs this very checkpoint in each loader, or the sentence why there is none.

The lines are templates in the loader table; what stands in them is worked out here.
"""

import json
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePath

from ropext.families.config import auto_class
from ropext.families.described import Facts
from ropext.forms import Params
from ropext.jsontext import JsonObject
from ropext.loaders.kinds import kinds_of
from ropext.loaders.lookup import LoaderReading, newest, readings
from ropext.loaders.table import ServeData, loader_table
from ropext.narration import pasted


@dataclass(frozen=True)
class Serving:
    """How to run the checkpoint in one loader; no command where it would compute something else."""

    loader: str
    command: str
    note: str = ""


@dataclass(frozen=True)
class OverrideLine(Serving):
    """How to run the base itself so: the command, and what it says as data."""

    argv: tuple[str, ...] = ()  # of a program; none of Python's line
    environment: Mapping[str, str] = field(default_factory=dict)  # what may stand for its options
    hf_overrides: JsonObject | None = None  # what takes the place of the config's keys


@dataclass(frozen=True)
class Override:
    """What a config of the base would have to say: `keys` at `path` inside a composite."""

    model: str
    model_type: str
    keys: JsonObject
    path: tuple[str, ...]
    target: int
    described: Facts = field(default_factory=dict)  # of types that the census lacks

    @property
    def nested(self) -> JsonObject:
        """The keys as the whole config holds them."""
        nested = dict(self.keys)
        for part in reversed(self.path):
            nested = {part: nested}
        return nested


@dataclass(frozen=True)
class ServedDirectory:
    """A directory that is to be run: its name, and what its config says that it is."""

    name: str
    family: str  # the text part's model type
    model_type: str | None = None
    masked_lm: bool = False
    on_hub: bool = False
    described: Facts = field(default_factory=dict)  # of types that the census lacks


# The pipelines of transformers that read text, by the class that loads the model.
PIPELINES = {
    "AutoModelForCausalLM": "text-generation",
    "AutoModelForMaskedLM": "fill-mask",
    "AutoModelForImageTextToText": "image-text-to-text",
}


def _in_python(directory: ServedDirectory) -> str:
    """Return the Python that loads a directory in transformers."""
    name = "AutoModelForMaskedLM"
    if not directory.masked_lm:
        kind = directory.model_type or directory.family
        name = auto_class(kind, directory.described) or "AutoModel"
    if name in PIPELINES:
        make = f"pipeline({PIPELINES[name]!r}, {directory.name!r})"
        return f"from transformers import pipeline; pipe = {make}"
    return f"from transformers import {name}; model = {name}.from_pretrained({directory.name!r})"


def serving_lines(
    directory: ServedDirectory, params: Params, *, context: int, target: int
) -> tuple[Serving, ...]:
    """Return the command lines for transformers, vLLM, SGLang, llama.cpp and lm-eval, in that
    order; a masked model runs in transformers alone."""
    known = readings(
        directory.family,
        params,
        model_type=directory.model_type,
        length=target,
        target=target,
    )
    latest = {reading.loader: reading for reading in newest(known)}
    words = _words_for(directory, target)
    family_of_gguf = directory.family
    if "longrope-standing" in kinds_of(params):
        family_of_gguf = ""  # what the converter makes of it is not measured
    lines = list[Serving]()
    for template in loader_table()["serve_directories"]:
        reading = latest[template["reading"]]
        if template["loader"] == "llama.cpp":
            lines.append(_llama_cpp(template, reading, words, family_of_gguf))
        else:
            note = _needed(template, reading, _announced(template, params, context, target))
            command = template["command"].format_map(words)
            lines.append(_line(template["loader"], reading, command, note))
        if directory.masked_lm:
            break
    return tuple(lines)


def _words_for(directory: ServedDirectory, target: int) -> dict[str, str]:
    """Return what stands in a template, by its name there, as a shell takes it."""
    name = directory.name
    stem = PurePath(name).name or "model"
    source = pasted(name)
    if directory.on_hub:
        source = f"--remote {source}"
    return {
        "target": str(target),
        "place": shlex.quote(name),
        "directory": pasted(name),
        "source": source,
        "python": pasted(_in_python(directory)),
        "harness": pasted(f"pretrained={name},max_length={target}"),
        "gguf": pasted(f"{stem}.gguf"),
        "long": pasted(f"{stem}-long.gguf"),
    }


def override_lines(
    override: Override, readings: Iterable[LoaderReading]
) -> tuple[OverrideLine, ...]:
    """Return how to run the base's own weights with the plan's numbers, in each loader that takes a
    config and reads these as planned."""
    latest = {reading.loader: reading for reading in newest(readings)}
    lines = list[OverrideLine]()
    for template in loader_table()["serve_directories"]:
        loader = template["loader"]
        if loader not in latest or latest[loader].verdict != "same":
            continue
        argv = tuple[str, ...]()
        if loader == "transformers":
            command = _from_pretrained(override)
        else:
            argv = _server_words(template, override)
            command = shlex.join(argv)
        if command:
            line = OverrideLine(loader, command, argv=argv, hf_overrides=override.nested)
            lines.append(line)
    return tuple(lines)


# Its class completes rope_parameters when it is made, not when an argument takes their place.
NOT_BY_ARGUMENT = ("dots3_note_text",)


def _from_pretrained(override: Override) -> str:
    """Return the line of Python, by the class that loads this type; "" where no class does."""
    if override.model_type in NOT_BY_ARGUMENT:
        return ""
    name = auto_class(override.model_type, override.described)
    if not name:
        return ""
    given = ", ".join(f"{key}={value!r}" for key, value in override.nested.items())
    return f"{name}.from_pretrained({override.model!r}, {given})"


def _server_words(template: ServeData, override: Override) -> tuple[str, ...]:
    """Return the command of a server, word by word; none of a loader that takes no such option. Its
    JSON has no blanks, so that no line breaks it."""
    words = {
        "model": override.model,
        "overrides": json.dumps(override.nested, separators=(",", ":")),
        "target": str(override.target),
    }
    return tuple(word.format_map(words) for word in template.get("override", ()))


def file_override_line(file: str, flags: str, target: int) -> OverrideLine:
    """Return how llama-server runs a GGUF of the base; `flags` are those that say the plan, if any
    do."""
    if not flags:
        note = "no flags express this: extend the file (ropext extend MODEL.gguf)"
        return OverrideLine("llama.cpp", "", note)
    length = str(target)
    argv = ("llama-server", "-m", file, *flags.split(), "-c", length, "-np", "1")
    command = f"llama-server -m {pasted(file)} {flags} -c {length} -np 1"
    return OverrideLine("llama.cpp", command, argv=argv, environment=_environment_of(flags, length))


ENVIRONMENT = {
    "--rope-scaling": "LLAMA_ARG_ROPE_SCALING_TYPE",
    "--rope-scale": "LLAMA_ARG_ROPE_SCALE",
    "--yarn-orig-ctx": "LLAMA_ARG_YARN_ORIG_CTX",
}


def _environment_of(flags: str, length: str) -> dict[str, str]:
    """Return the variables that llama-server reads for the options of a YaRN; no others have
    all."""
    words = flags.split()
    names = dict(zip(words[::2], words[1::2], strict=False))
    if names.keys() != ENVIRONMENT.keys():
        return {}
    variables = {ENVIRONMENT[name]: value for name, value in names.items()}
    variables["LLAMA_ARG_CTX_SIZE"] = length
    return variables


def file_lines(
    file: str, target: int, readings: Iterable[LoaderReading], params: Params
) -> tuple[Serving, ...]:
    """Return how to run a GGUF file: every program has a length of its own, not the file's."""
    from ropext.loaders.gguf import environment  # late: no directory needs it

    words = {
        "file": pasted(file),
        "name": PurePath(file).name,
        "named": pasted(PurePath(file).name),
        "target": str(target),
        "modelfile": pasted(f"{file}.Modelfile"),
    }
    templates = {template["loader"]: template for template in loader_table()["serve_files"]}
    lines = list[Serving]()
    for reading in readings:
        template = templates.get(reading.loader)
        if template is None:
            continue
        note = template.get("note", "").format_map(words)
        if template.get("environment", False):
            note += environment(params, target)
        command = template["command"].format_map(words)
        lines.append(_line(reading.loader, reading, command, note))
    return tuple(lines)


def _announced(template: ServeData, params: Params, context: int, target: int) -> int:
    """Return the length that a server takes for itself where it is not the target, else 0."""
    match template.get("announces", {}).get(kinds_of(params)[0]):
        case "target times factor":
            factor: float = params["factor"]
            return round(target * factor)
        case "original length":
            return int(params.get("original_max_position_embeddings", context))
    return 0


def _needed(template: ServeData, reading: LoaderReading, announced: int) -> str:
    """Return which option a server cannot do without, where it takes another length."""
    if not announced or (reading.verdict == "same" and not reading.flag):
        return ""
    return template["needed"].format_map({"announced": announced})


def _llama_cpp(
    template: ServeData, reading: LoaderReading, words: Mapping[str, str], family: str
) -> Serving:
    """Return the line that converts and runs a directory, by the way that is exact there; `family`
    is what it is as a GGUF, "" where that is not known."""
    command = template["command"].format_map(words)
    if reading.verdict == "different" and reading.flag:
        note = "exact with these flags alone: " + reading.why
        return Serving(reading.loader, f"{command} {reading.flag}", note)
    if reading.verdict in ("ignored", "different"):
        from ropext.loaders.gguf import takes_divisors  # late: few forms need it

        if takes_divisors(family):
            rewritten = template["rewritten"].format_map(words)
            note = "its converter loses this scaling; ropext writes it into the GGUF, exactly"
            return Serving(reading.loader, rewritten, note)
    return _line(reading.loader, reading, command)


def _line(loader: str, reading: LoaderReading, command: str, note: str = "") -> Serving:
    """Return the line of a loader; why there is none, where it reads something else."""
    if reading.verdict == "same":
        return Serving(loader, command, note)
    if reading.verdict == "not measured":
        doubt = "not measured for this model; "
        if reading.loader == "transformers":
            doubt += "extend proves it with the one that is installed"
        else:
            doubt += "ropext verify --endpoint URL compares a running server"
        if note:
            doubt = f"{note}; {doubt}"
        return Serving(loader, command, doubt)
    does = {"different": "computes something else", "ignored": "ignores the scaling"}
    verb = does.get(reading.verdict, "fails")
    return Serving(loader, "", f"{loader} {verb}: {reading.why}")
