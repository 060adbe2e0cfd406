"""Log-probabilities by vLLM's own engine, in an environment that has it (its CPU build too)."""

import gc
import os
import shlex
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB

import numpy as np
import telling
import vllm
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser


def options_of(place: str) -> dict[str, Any]:
    """Return the options of a directory, or of a whole line `vllm serve ...`, which vLLM's own
    parser reads."""
    if not place.startswith("vllm serve "):
        return {"model": place}
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    model, *words = shlex.split(place)[2:]
    given = parser.parse_args(["--model", model, *words])
    return {key: getattr(given, key) for key in ("model", "hf_overrides", "max_model_len")}


def engine_of(place: str, length: int | None) -> vllm.LLM:
    """Start vLLM's engine on one checkpoint; without a length it takes the config's."""
    return vllm.LLM(
        **{"max_model_len": length} | options_of(place),
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_num_seqs=1,
        disable_log_stats=True,
        load_format="safetensors",
        # Its CPU operator for interleaved pairs rotates a slice of MLA's queries wrongly; the same
        # layers in torch do not.
        compilation_config={"custom_ops": ["none"]},
    )


def read(directory: str, ids: np.ndarray) -> dict[str, Any]:
    """Return the log-probabilities of the last tokens, each after those before it, and the length
    taken from the config."""
    tokens = ids.tolist()
    engine = engine_of(directory, None)
    length = engine.llm_engine.model_config.max_model_len
    if length <= len(tokens):  # the answer takes one token more
        del engine
        gc.collect()
        engine = engine_of(directory, len(tokens) + 1)
    params = vllm.SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    answer = engine.generate([{"prompt_token_ids": tokens}], params, use_tqdm=False)[0]
    rows = zip(answer.prompt_logprobs[1:], tokens[1:], strict=True)
    found = [own[token].logprob for own, token in rows]
    del engine
    gc.collect()
    return {"": np.array(found[-telling.LAST :]), "length": length}


if __name__ == "__main__":
    telling.main(vllm.__version__, read)
