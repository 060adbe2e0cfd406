"""The command that runs this very checkpoint in each loader, or the sentence why there is none."""

import json
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Any

from ropext.families.config import auto_class
from ropext.forms import Params
from ropext.loaders.kinds import kinds_of
from ropext.loaders.lookup import LoaderReading, readings
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
    hf_overrides: Mapping[str, Any] | None = None  # what takes the place of the config's keys


@dataclass(frozen=True)
class Override:
    """What a config of the base would have to say: `keys` at `path` inside a composite."""

    model: str
    model_type: str
    keys: Mapping[str, Any]
    path: tuple[str, ...]
    target: int

    @property
    def nested(self) -> dict[str, Any]:
        """The keys as the whole config holds them."""
        nested = dict(self.keys)
        for part in reversed(self.path):
            nested = {part: nested}
        return nested


# The pipelines of transformers that read text, by the class that loads the model.
PIPELINES = {
    "AutoModelForCausalLM": "text-generation",
    "AutoModelForMaskedLM": "fill-mask",
    "AutoModelForImageTextToText": "image-text-to-text",
}


def _in_python(directory: str, model_type: str, masked_lm: bool) -> str:
    """What loads a directory in transformers."""
    name = "AutoModelForMaskedLM" if masked_lm else auto_class(model_type)
    if name in PIPELINES:
        make = f"pipeline({PIPELINES[name]!r}, {directory!r})"
        return f"from transformers import pipeline; pipe = {make}"
    name = name or "AutoModel"
    return f"from transformers import {name}; model = {name}.from_pretrained({directory!r})"


def serving_lines(
    directory: str,
    family: str,
    params: Params,
    *,
    context: int,
    target: int,
    model_type: str | None = None,
    masked_lm: bool = False,
    on_hub: bool = False,
) -> tuple[Serving, ...]:
    """Command lines for transformers, vLLM, SGLang, llama.cpp and lm-eval, in that order."""
    newest = {
        reading.loader: reading
        for reading in reversed(
            readings(family, params, model_type=model_type, length=target, target=target)
        )
    }
    place = shlex.quote(directory)
    words = pasted(_in_python(directory, model_type or family, masked_lm))
    lines = [_line(newest["transformers"], f"python -ic {words}")]
    if masked_lm:
        return tuple(lines)
    length = _announced(params, context, target)
    vllm = f"vllm serve {place} --max-model-len {target}"
    lines.append(_line(newest["vllm"], vllm, _needed(newest["vllm"], "vLLM", length["vllm"])))
    sglang = f"python -m sglang.launch_server --model-path {place} --context-length {target}"
    note = _needed(newest["sglang"], "SGLang", length["sglang"])
    lines.append(_line(newest["sglang"], sglang, note))
    still = "longrope-standing" in kinds_of(
        params
    )  # what its converter makes of it is not measured
    lines.append(
        _llama_cpp(newest["llama.cpp"], "" if still else family, directory, target, on_hub)
    )
    harness = pasted(f"pretrained={directory},max_length={target}")
    lines.append(
        _line(
            replace(newest["transformers"], loader="lm-eval"),
            f"lm_eval --model hf --model_args {harness} --tasks wikitext",
        )
    )
    return tuple(lines)


def override_lines(
    override: Override, readings: Iterable[LoaderReading]
) -> tuple[OverrideLine, ...]:
    """How to run the base's own weights with the plan's numbers, in each loader that takes a config
    and reads these as planned."""
    newest = {reading.loader: reading for reading in reversed([*readings])}
    out = []
    for loader in ("transformers", "vllm", "sglang"):
        if loader not in newest or newest[loader].verdict != "same":
            continue
        if loader == "transformers":
            command = _from_pretrained(override)
            argv = tuple[str, ...]()
        else:
            argv = _server_words(loader, override)
            command = shlex.join(argv)
        if command:
            out.append(OverrideLine(loader, command, argv=argv, hf_overrides=override.nested))
    return tuple(out)


# Its class completes rope_parameters when it is made, not when an argument takes their place.
NOT_BY_ARGUMENT = ("dots3_note_text",)


def _from_pretrained(override: Override) -> str:
    """The line of Python, by the class that loads this type; "" where no class does."""
    name = "" if override.model_type in NOT_BY_ARGUMENT else auto_class(override.model_type)
    given = ", ".join(f"{key}={value!r}" for key, value in override.nested.items())
    return f"{name}.from_pretrained({override.model!r}, {given})" if name else ""


def _server_words(loader: str, override: Override) -> tuple[str, ...]:
    """The command of a server, word by word; its JSON has no blanks, so that no line breaks it."""
    said = json.dumps(override.nested, separators=(",", ":"))
    model = override.model
    target = str(override.target)
    if loader == "vllm":
        return ("vllm", "serve", model, "--hf-overrides", said, "--max-model-len", target)
    program = ("python", "-m", "sglang.launch_server", "--model-path", model)
    return (*program, "--json-model-override-args", said, "--context-length", target)


def file_override_line(file: str, flags: str, target: int) -> OverrideLine:
    """How llama-server runs a GGUF of the base; `flags` are those that say the plan, if any do."""
    if not flags:
        note = "no flags express this: extend the file (ropext extend MODEL.gguf)"
        return OverrideLine("llama.cpp", "", note)
    length = str(target)
    argv = ("llama-server", "-m", file, *flags.split(), "-c", length)
    command = f"llama-server -m {pasted(file)} {flags} -c {length}"
    return OverrideLine("llama.cpp", command, argv=argv, environment=_environment_of(flags, length))


ENVIRONMENT = {
    "--rope-scaling": "LLAMA_ARG_ROPE_SCALING_TYPE",
    "--rope-scale": "LLAMA_ARG_ROPE_SCALE",
    "--yarn-orig-ctx": "LLAMA_ARG_YARN_ORIG_CTX",
}


def _environment_of(flags: str, length: str) -> dict[str, str]:
    """The variables that llama-server reads for the options of a YaRN; no others have all."""
    words = flags.split()
    names = dict(zip(words[::2], words[1::2], strict=False))
    if names.keys() != ENVIRONMENT.keys():
        return {}
    return {ENVIRONMENT[name]: value for name, value in names.items()} | {
        "LLAMA_ARG_CTX_SIZE": length
    }


def file_lines(
    file: str, target: int, readings: Iterable[LoaderReading], params: Params
) -> tuple[Serving, ...]:
    """How to run a GGUF file: every program has a length of its own, which is not the file's."""
    from ropext.loaders.gguf import environment, runners  # late: no directory needs it

    of = {"file": pasted(file), "name": PurePath(file).name, "target": str(target)}
    of = of | {"modelfile": pasted(f"{file}.Modelfile")}
    out = []
    for reading in readings:
        if "command" in (entry := runners()[reading.loader]):
            said, note = (entry.get(key, "").format(**of) for key in ("command", "note"))
            note += environment(params, target) if "starts" in entry else ""
            out.append(_line(reading, said, note))
    return tuple(out)


def _announced(params: Params, context: int, target: int) -> dict[str, int]:
    """The length that a server takes for itself where it is not the target (0: it is)."""
    match kinds_of(params)[0]:
        case "linear":
            times = round(target * params["factor"])
            return {"vllm": times, "sglang": times}
        case "longrope" | "longrope-two-sets" | "longrope-custom":
            return {"vllm": params.get("original_max_position_embeddings", context), "sglang": 0}
    return {"vllm": 0, "sglang": 0}


def _needed(reading: LoaderReading, server: str, announced: int) -> str:
    if not announced or (reading.verdict == "same" and not reading.flag):
        return ""
    flag = "--max-model-len" if reading.loader == "vllm" else "--context-length"
    return f"{flag} is needed: without it {server} takes {announced} tokens"


def _llama_cpp(
    reading: LoaderReading, family: str, directory: str, target: int, on_hub: bool
) -> Serving:
    gguf = pasted(f"{PurePath(directory).name or 'model'}.gguf")
    place = f"{'--remote ' if on_hub else ''}{pasted(directory)}"
    convert = f"python convert_hf_to_gguf.py {place} --outfile {gguf}"
    server = f"llama-server -m {gguf} -c {target}"
    if reading.verdict == "different" and reading.flag:
        command = f"{convert}\n{server} {reading.flag}"
        return Serving(reading.loader, command, "exact with these flags alone: " + reading.why)
    if reading.verdict in ("ignored", "different"):
        from ropext.loaders.gguf import takes_divisors  # late: few forms need it

        if takes_divisors(family):
            long = pasted(f"{PurePath(directory).name or 'model'}-long.gguf")
            like = f"ropext extend {gguf} --like {pasted(directory)} -o {long}"
            command = f"{convert}\n{like}\nllama-server -m {long} -c {target}"
            note = "its converter loses this scaling; ropext writes it into the GGUF, exactly"
            return Serving(reading.loader, command, note)
    return _line(reading, f"{convert}\n{server}")


def _line(reading: LoaderReading, command: str, note: str = "") -> Serving:
    if reading.verdict == "same":
        return Serving(reading.loader, command, note)
    if reading.verdict == "not measured":
        doubt = (
            "not measured for this model; ropext verify --endpoint URL compares a running server"
        )
        return Serving(reading.loader, command, "; ".join(filter(None, (note, doubt))))
    says = {"different": "computes something else", "ignored": "ignores the scaling"}
    sentence = f"{reading.loader} {says.get(reading.verdict, 'fails')}: {reading.why}"
    return Serving(reading.loader, "", sentence)
