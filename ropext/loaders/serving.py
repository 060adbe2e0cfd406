"""The command that runs this very checkpoint in each loader, or the sentence why there is none."""

import json
import shlex
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import PurePath

from ropext.forms import Params
from ropext.loaders.table import LoaderReading, kinds_of, readings


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
    lines = [_line(newest["transformers"], _pipeline(directory, masked_lm))]
    if masked_lm:
        return tuple(lines)
    length = _announced(params, context, target)
    vllm = f"vllm serve {place} --max-model-len {target}"
    lines.append(_line(newest["vllm"], vllm, _needed(newest["vllm"], "vLLM", length["vllm"])))
    sglang = f"python -m sglang.launch_server --model-path {place} --context-length {target}"
    note = _needed(newest["sglang"], "SGLang", length["sglang"])
    lines.append(_line(newest["sglang"], sglang, note))
    still = "longrope-standing" in kinds_of(params)  # no key of a GGUF stops a pair
    lines.append(
        _llama_cpp(newest["llama.cpp"], "" if still else family, directory, target, on_hub)
    )
    harness = shlex.quote(f"pretrained={directory},max_length={target}")
    lines.append(
        _line(
            replace(newest["transformers"], loader="lm-eval"),
            f"lm_eval --model hf --model_args {harness} --tasks wikitext",
        )
    )
    return tuple(lines)


def file_lines(
    file: str, target: int, readings: Iterable[LoaderReading], params: Params
) -> tuple[Serving, ...]:
    """How to run a GGUF file: every program has a length of its own, which is not the file's."""
    from ropext.loaders.gguf import environment, runners  # late: no directory needs it

    place, out = shlex.quote(file), []
    for reading in readings:
        if "command" in (entry := runners()[reading.loader]):
            note = entry.get("note", "") + (environment(params) if "starts" in entry else "")
            out.append(_line(reading, entry["command"].format(file=place, target=target), note))
    return tuple(out)


def _pipeline(directory: str, masked_lm: bool) -> str:
    task = "fill-mask" if masked_lm else "text-generation"
    make = f"pipe = pipeline({json.dumps(task)}, {json.dumps(directory)})"
    return f"python -ic {shlex.quote(f'from transformers import pipeline; {make}')}"


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
    gguf = shlex.quote(f"{PurePath(directory).name or 'model'}.gguf")
    place = f"{'--remote ' if on_hub else ''}{shlex.quote(directory)}"
    convert = f"python convert_hf_to_gguf.py {place} --outfile {gguf}"
    server = f"llama-server -m {gguf} -c {target}"
    if reading.verdict == "different" and reading.flag:
        command = f"{convert} && {server} {reading.flag}"
        return Serving(reading.loader, command, "exact with these flags alone: " + reading.why)
    if reading.verdict in ("ignored", "different"):
        from ropext.loaders.gguf import takes_divisors  # late: few forms need it

        if takes_divisors(family):
            long = shlex.quote(f"{PurePath(directory).name or 'model'}-long.gguf")
            like = f"ropext extend {gguf} --like {shlex.quote(directory)} -o {long}"
            command = f"{convert} && {like} && llama-server -m {long} -c {target}"
            note = "its converter loses this scaling; ropext writes it into the GGUF, exactly"
            return Serving(reading.loader, command, note)
    return _line(reading, f"{convert} && {server}")


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
