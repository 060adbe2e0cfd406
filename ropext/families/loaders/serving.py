"""Build the command that runs this very checkpoint in each loader, or the sentence why there is
none.

The commands are templates in the loader table; this module fills them in.
"""

import json
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePath

from ropext.base.jsontext import JsonObject
from ropext.base.narration import join_for_shells
from ropext.families import Model
from ropext.families.config import auto_class
from ropext.families.loaders.lookup import LoaderReading, kinds_of, newest
from ropext.families.loaders.table import ServeData, loader_table
from ropext.scaling.forms import Params


@dataclass(frozen=True)
class Serving:
    """The command that runs the checkpoint in one loader; no command if it would compute something
    else."""

    loader: str
    command: str
    note: str = ""


@dataclass(frozen=True)
class OverrideLine(Serving):
    """The command that runs the base itself as planned, and its parts as data."""

    argv: tuple[str, ...] = ()  # the words of a program; none if the line is Python
    # variables that can replace its options
    environment: Mapping[str, str] = field(default_factory=dict)
    hf_overrides: JsonObject | None = None  # the values that replace the config's keys


@dataclass(frozen=True)
class ServedDirectory:
    """A checkpoint directory to run: the name under which other programs find it, and its
    model."""

    name: str
    model: Model
    on_hub: bool = False


# The pipelines of transformers that read text, by the class that loads the model.
PIPELINES = {
    "AutoModelForCausalLM": "text-generation",
    "AutoModelForMaskedLM": "fill-mask",
    "AutoModelForImageTextToText": "image-text-to-text",
}


def _in_python(directory: ServedDirectory) -> str:
    """Return the Python that loads a checkpoint directory in transformers, by the class that
    belongs to its config's model type."""
    model = directory.model
    name = "AutoModelForMaskedLM"
    if not model.masked_lm:
        name = auto_class(model.model_type, model.described) or "AutoModel"
    if name in PIPELINES:
        make = f"pipeline({PIPELINES[name]!r}, {directory.name!r})"
        return f"from transformers import pipeline; pipe = {make}"
    return f"from transformers import {name}; model = {name}.from_pretrained({directory.name!r})"


def serving_lines(
    directory: ServedDirectory,
    known: Iterable[LoaderReading],
    params: Params,
    *,
    context: int,
    target: int,
) -> tuple[Serving, ...]:
    """Return the loader table's command for each engine that reads a config: transformers, vLLM,
    SGLang, llama.cpp and lm-eval, in that order. A masked model runs only in transformers.

    `known` is how each loader reads the dict `params` with a stated length of `target`.
    """
    latest = {reading.loader: reading for reading in newest(known)}
    name = directory.name
    stem = PurePath(name).name or "model"
    source = join_for_shells(name)
    if directory.on_hub:
        source = f"--remote {source}"
    words = {  # values for the templates, as a shell takes them
        "target": str(target),
        "place": shlex.quote(name),
        "directory": join_for_shells(name),
        "source": source,
        "python": join_for_shells(_in_python(directory)),
        "harness": join_for_shells(f"pretrained={name},max_length={target}"),
        "gguf": join_for_shells(f"{stem}.gguf"),
        "long": join_for_shells(f"{stem}-long.gguf"),
    }
    family_of_gguf = directory.model.text_type
    if "longrope-standing" in kinds_of(params):
        family_of_gguf = ""  # the converter's result for it is not measured
    lines = list[Serving]()
    for template in loader_table()["serve_directories"]:
        reading = latest[template["reading"]]
        if template["loader"] == "llama.cpp":
            lines.append(_llama_cpp(template, reading, words, family_of_gguf))
        else:
            note = _note_on_needed_option(template, reading, params, context, target)
            command = template["command"].format_map(words)
            lines.append(_line_or_reason(template["loader"], reading, command, note))
        if directory.model.masked_lm:
            break
    return tuple(lines)


# Its class completes rope_parameters when it is made, not when an argument takes their place.
NOT_BY_ARGUMENT = ("dots3_note_text",)


def override_lines(
    base: ServedDirectory, keys: JsonObject, target: int, readings: Iterable[LoaderReading]
) -> tuple[OverrideLine, ...]:
    """Return, from the loader table, the command by which each engine reads other config keys in
    place of the base's. An engine has one if it accepts a config and reads these keys as
    planned."""
    latest = {reading.loader: reading for reading in newest(readings)}
    kind = base.model.model_type
    words = {
        "model": base.name,
        "overrides": json.dumps(keys, separators=(",", ":")),  # no blanks, so that no line breaks
        "target": str(target),
    }
    lines = list[OverrideLine]()
    for template in loader_table()["serve_directories"]:
        loader = template["loader"]
        if loader not in latest or latest[loader].verdict != "same":
            continue
        argv = tuple(word.format_map(words) for word in template.get("override", ()))
        command = shlex.join(argv)
        if loader == "transformers" and kind not in NOT_BY_ARGUMENT:
            name = auto_class(kind, base.model.described)  # "" if no class loads this type
            given = ", ".join(f"{key}={value!r}" for key, value in keys.items())
            command = f"{name}.from_pretrained({base.name!r}, {given})" if name else ""
        if command:
            lines.append(OverrideLine(loader, command, argv=argv, hf_overrides=keys))
    return tuple(lines)


ENVIRONMENT = {
    "--rope-scaling": "LLAMA_ARG_ROPE_SCALING_TYPE",
    "--rope-scale": "LLAMA_ARG_ROPE_SCALE",
    "--yarn-orig-ctx": "LLAMA_ARG_YARN_ORIG_CTX",
}


def file_override_line(file: str, flags: str, target: int) -> OverrideLine:
    """Return the command by which the engine llama.cpp runs a GGUF of the base. `flags` express the
    plan. If they are a YaRN's, the line has the environment variables too, which exist only for
    YaRN."""
    if not flags:
        note = "no flags express this: extend the file (ropext extend MODEL.gguf)"
        return OverrideLine("llama.cpp", "", note)
    length = str(target)
    words = flags.split()
    argv = ("llama-server", "-m", file, *words, "-c", length, "-np", "1")
    command = f"llama-server -m {join_for_shells(file)} {flags} -c {length} -np 1"
    names = dict(zip(words[::2], words[1::2], strict=False))
    variables = dict[str, str]()
    if names.keys() == ENVIRONMENT.keys():
        variables = {ENVIRONMENT[name]: value for name, value in names.items()}
        variables["LLAMA_ARG_CTX_SIZE"] = length
    return OverrideLine("llama.cpp", command, argv=argv, environment=variables)


def ollama_name(file: str) -> str:
    """Return the name of a GGUF in the spelling that Ollama accepts, which is one of the engines
    (loaders)."""
    stem = re.sub(r"\.gguf$", "", PurePath(file).name, flags=re.IGNORECASE)
    allowed = re.sub(r"[^A-Za-z0-9_.-]+|\.\.+", "-", stem).strip(".-")
    return allowed[:80] or "model"


def file_lines(
    file: str, target: int, readings: Iterable[LoaderReading], params: Params
) -> tuple[Serving, ...]:
    """Return the command that runs a GGUF in each engine. Every program has a length of its own,
    not the file's."""
    from ropext.families.loaders.gguf import environment  # late: no directory needs it

    words = {
        "file": join_for_shells(file),
        "name": PurePath(file).name,
        "named": join_for_shells(PurePath(file).name),
        "model": ollama_name(file),
        "target": str(target),
        "modelfile": join_for_shells(f"{file}.Modelfile"),
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
        lines.append(_line_or_reason(reading.loader, reading, command, note))
    return tuple(lines)


def _note_on_needed_option(
    template: ServeData, reading: LoaderReading, params: Params, context: int, target: int
) -> str:
    """Return a note on the option that an engine (vLLM) needs if it would read another length from
    the config; else ""."""
    announced = 0
    match template.get("announces", {}).get(kinds_of(params)[0]):
        case "target times factor":
            announced = round(target * params["factor"])
        case "original length":
            announced = int(params.get("original_max_position_embeddings", context))
    if not announced or (reading.verdict == "same" and not reading.flag):
        return ""
    return template["needed"].format_map({"announced": announced})


def _llama_cpp(
    template: ServeData, reading: LoaderReading, words: Mapping[str, str], family: str
) -> Serving:
    """Return the command by which the engine llama.cpp converts and runs a directory. Its reading
    of the config decides which command is exact. `family` is its model type as a GGUF's, "" if that
    is not known."""
    command = template["command"].format_map(words)
    if reading.verdict == "different" and reading.flag:
        note = "exact with these flags alone: " + reading.why
        return Serving(reading.loader, f"{command} {reading.flag}", note)
    if reading.verdict in ("ignored", "different"):
        from ropext.families.loaders.gguf import takes_divisors  # late: few forms need it

        if takes_divisors(family):
            rewritten = template["rewritten"].format_map(words)
            note = "its converter loses this scaling; ropext writes it into the GGUF, exactly"
            return Serving(reading.loader, rewritten, note)
    return _line_or_reason(reading.loader, reading, command)


def _line_or_reason(loader: str, reading: LoaderReading, command: str, note: str = "") -> Serving:
    """Return the command that runs a checkpoint in an engine such as vLLM. If the engine misreads
    its config by the loader table, return the reason why there is none."""
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
