"""Make a GGUF in float32: python convert_gguf.py CONVERTER DIRECTORY OUT.gguf

CONVERTER is the convert_hf_to_gguf.py of a llama.cpp checkout. It runs unchanged except for the
vocabulary, whose tokens are named t0, t1, ...: it refuses tokenizers that it does not know, and the
text is given as token ids. This imports nothing of ropext.
"""

import importlib
import sys
from pathlib import Path
from typing import Any


def convert(converter: Path, directory: Path, output: Path) -> None:
    """Write one GGUF."""
    sys.path[:0] = [str(converter.parent / "gguf-py"), str(converter.parent)]
    import gguf
    import torch
    from conversion import base

    def set_vocab(model: Any) -> None:
        size, writer = model.hparams["vocab_size"], model.gguf_writer
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list([f"t{number}" for number in range(size)])
        writer.add_token_types([gguf.TokenType.NORMAL] * size)
        writer.add_token_merges(["t 0"])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)

    module = importlib.import_module(converter.stem)
    hparams = base.ModelBase.load_hparams(directory, False)
    kind = module.get_model_class(base.get_model_architecture(hparams, base.ModelType.TEXT))
    kind.set_vocab = set_vocab
    kind.no_mtp = True  # stock saves no layers that draft
    with torch.inference_mode():
        kind(directory, gguf.LlamaFileType.ALL_F32, output, hparams=hparams).write()


if __name__ == "__main__":
    convert(*(Path(word).resolve() for word in sys.argv[1:]))
