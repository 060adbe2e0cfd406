"""The command that runs this very checkpoint in each loader, or the sentence why there is none."""

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

from ropext.forms import Params
from ropext.loaders.table import LoaderReading, kinds_of, readings
from ropext.narration import pasted


@dataclass(frozen=True)
class Serving:
    """How to run the checkpoint in one loader; no command where it would compute something else."""

    loader: str
    command: str
    note: str = ""


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
    make = f"pipeline({'fill-mask' if masked_lm else 'text-generation'!r}, {directory!r})"
    words = pasted(f"from transformers import pipeline; pipe = {make}")
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
    model: str,
    keys: Mapping[str, Any],
    readings: Iterable[LoaderReading],
    flags: str,
    target: int,
    path: Sequence[str] = (),
    file: str = "",
) -> tuple[Serving, ...]:
    """How to run the base's own weights with the plan's numbers, in each loader that reads these as
    planned: `keys` are what its config has to say, at `path` inside a composite; `flags` are
    llama-server's, of a GGUF `file` alone."""
    exact = {each.loader: each for each in reversed([*readings])}
    exact = {name: each for name, each in exact.items() if each.verdict == "same"}
    nested: Mapping[str, Any] = keys
    for part in reversed(path):
        nested = {part: nested}
    place, override = shlex.quote(model), shlex.quote(json.dumps(nested))
    given = ", ".join(f"{key}={value!r}" for key, value in nested.items())
    lines = {
        "transformers": f"AutoModelForCausalLM.from_pretrained({model!r}, {given})",
        "vllm": f"vllm serve {place} --hf-overrides {override} --max-model-len {target}",
        "sglang": f"python -m sglang.launch_server --model-path {place} "
        f"--json-model-override-args {override} --context-length {target}",
    }
    out = [Serving(name, line) for name, line in lines.items() if name in exact and not file]
    if "llama.cpp" in exact:
        says = f"llama-server -m {file or 'MODEL.gguf'} {flags} -c {target}" if flags else ""
        note = "" if says else "no flags express this: extend the file (ropext extend MODEL.gguf)"
        out.append(Serving("llama.cpp", says, note))
    return tuple(out)


def file_lines(
    file: str, target: int, readings: Iterable[LoaderReading], params: Params
) -> tuple[Serving, ...]:
    """How to run a GGUF file: every program has a length of its own, which is not the file's."""
    from ropext.loaders.gguf import environment, runners  # late: no directory needs it

    of = {"file": pasted(file), "name": PurePath(file).name, "target": str(target)}
    of, out = of | {"modelfile": pasted(f"{file}.Modelfile")}, []
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
