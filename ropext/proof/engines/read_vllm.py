"""Log-probabilities by vLLM's own engine: read_vllm.py IDS.npy OUT.npz DIRECTORY ...

Runs by its path, in an environment with vllm (its CPU build too); imports nothing of ropext.
"""

import gc
import os
import sys
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB

import numpy as np
import vllm

LAST = 2048  # positions told


def engine_of(directory: str, length: int | None) -> vllm.LLM:
    """vLLM's engine on one checkpoint; without a length it takes the config's."""
    return vllm.LLM(
        directory,
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_num_seqs=1,
        max_model_len=length,
        disable_log_stats=True,
        load_format="safetensors",
        # Its CPU operator for interleaved pairs rotates a slice of MLA's queries wrongly; the same
        # layers in torch do not.
        compilation_config={"custom_ops": ["none"]},
    )


def log_probabilities(directory: str, ids: list[int]) -> tuple[np.ndarray, int]:
    """Of the last tokens, each after those before it; and the length taken from the config."""
    engine = engine_of(directory, None)
    length = engine.llm_engine.model_config.max_model_len
    if length <= len(ids):  # the answer takes one token more
        del engine
        gc.collect()
        engine = engine_of(directory, len(ids) + 1)
    params = vllm.SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    answer = engine.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)[0]
    found = [
        own[token].logprob for own, token in zip(answer.prompt_logprobs[1:], ids[1:], strict=True)
    ]
    del engine
    gc.collect()
    return np.array(found[-LAST:]), length


def main(ids: str, output: str, directories: list[str]) -> None:
    """Write name -> log-probabilities, name/length, name/error -> what was said, the version."""
    tokens = np.load(ids).tolist()
    found: dict[str, Any] = {"version": np.array(vllm.__version__)}
    for directory in directories:
        try:
            found[directory], length = log_probabilities(directory, tokens)
            found[f"{directory}/length"] = np.array(length)
        except Exception as error:  # an engine fails in its own ways: what it says is kept
            found[f"{directory}/error"] = np.array(f"{type(error).__name__}: {error}"[:2000])
        np.savez(output, **found)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
