"""Log-probabilities by llama.cpp of a GGUF, in an environment with llama-cpp-python.

By its C functions, whose defaults are llama-server's: the package's own class gives every yarn the
default betas and a factor of 1, whatever the file says.
"""

from typing import Any

import llama_cpp as c
import numpy as np
import telling

BATCH = 512  # tokens whose logits are held at once


def read(path: str, ids: np.ndarray) -> dict[str, Any]:
    """Return the log-probabilities of the last tokens, each after those before it: cache in
    float32, no flash attention."""
    model = c.llama_model_load_from_file(path.encode(), c.llama_model_default_params())
    if not model:
        raise ValueError("llama.cpp cannot load the GGUF")
    params = c.llama_context_default_params()
    params.n_ctx, params.n_batch = len(ids), BATCH
    params.type_k = params.type_v = c.GGML_TYPE_F32
    params.flash_attn_type = c.LLAMA_FLASH_ATTN_TYPE_DISABLED
    context = c.llama_init_from_model(model, params)
    if not context:
        raise ValueError(f"llama.cpp has no context of {len(ids)} tokens for it")
    size = c.llama_vocab_n_tokens(c.llama_model_get_vocab(model))
    batch, found = c.llama_batch_init(BATCH, 0, 1), []
    for start in range(0, len(ids) - 1, BATCH):
        given, wanted = ids[start : start + BATCH], ids[start + 1 : start + BATCH + 1]
        batch.n_tokens = len(given)
        for at, token in enumerate(given):
            batch.token[at], batch.pos[at], batch.logits[at] = token, start + at, True
            batch.n_seq_id[at], batch.seq_id[at][0] = 1, 0
        if c.llama_decode(context, batch):
            raise ValueError(f"llama.cpp fails after {start} tokens")
        rows = np.ctypeslib.as_array(c.llama_get_logits(context), (len(given), size))
        found.append(telling.of_tokens(rows[: len(wanted)], wanted))
    c.llama_batch_free(batch)
    c.llama_free(context)
    c.llama_model_free(model)
    return {"": np.concatenate(found)[-telling.LAST :]}


if __name__ == "__main__":
    quiet = c.llama_log_callback(lambda *_: None)
    c.llama_log_set(quiet, None)
    telling.main(c.llama_version().decode(), read)
