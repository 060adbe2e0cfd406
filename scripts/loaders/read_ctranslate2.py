"""Log-probabilities by CTranslate2 of what its own converter makes of a checkpoint.

The tokenizer alone is ours: it names the tokens t0, t1, ...
"""

import tempfile
from typing import Any

import ctranslate2
import numpy as np
import telling
import transformers


class Converter(ctranslate2.converters.TransformersConverter):
    """Theirs, for a checkpoint whose tokenizer has a vocabulary alone."""

    def load_tokenizer(self, _: Any, place: str, **__: Any) -> Any:
        names = {"pad_token": "t0", "bos_token": "t1", "eos_token": "t2", "unk_token": "t0"}
        return transformers.PreTrainedTokenizerFast(
            tokenizer_file=f"{place}/tokenizer.json", **names
        )


def read(directory: str, ids: np.ndarray) -> dict[str, Any]:
    """Return the log-probabilities of the last tokens, each after those before it."""
    with tempfile.TemporaryDirectory() as folder:
        Converter(directory).convert(folder, force=True)
        model = ctranslate2.Generator(folder, compute_type="float32")
        rows = model.forward_batch([ids.tolist()], return_log_probs=True)
        return {"": telling.of_tokens(np.array(rows)[0, -telling.LAST - 1 : -1], ids[1:])}


if __name__ == "__main__":
    telling.main(ctranslate2.__version__, read)
