"""Convert checkpoints with llama.cpp's own converter: python convert_gguf.py LLAMA_CPP CHECKPOINTS

Each FAMILY/FORM gets a model.gguf in float32. The vocabulary alone is ours: the converter refuses
tokenizers that it does not know. What fails leaves its words in convert.error.
"""

import sys
from pathlib import Path
from typing import Any

import torch

SOURCE, FOLDER = Path(sys.argv[1]), Path(sys.argv[2])
sys.path[:0] = [str(SOURCE / "gguf-py"), str(SOURCE)]

import convert_hf_to_gguf as converter  # noqa: E402
import gguf  # noqa: E402
from conversion import base  # noqa: E402


def set_vocabulary(model: Any) -> None:
    """Name the tokens t0, t1, ...: the text is given as token ids."""
    size, writer = model.hparams["vocab_size"], model.gguf_writer
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([f"t{number}" for number in range(size)])
    writer.add_token_types([gguf.TokenType.NORMAL] * size)
    writer.add_token_merges(["t 0"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def convert(directory: Path) -> None:
    """Write one model.gguf."""
    hparams = base.ModelBase.load_hparams(directory, False)
    kind = converter.get_model_class(base.get_model_architecture(hparams, base.ModelType.TEXT))
    kind.set_vocab = set_vocabulary
    output = directory / "model.gguf"
    with torch.inference_mode():
        kind(directory, gguf.LlamaFileType.ALL_F32, output, hparams=hparams).write()


for place in sorted(FOLDER.glob("*/*/config.json")):
    for old in ("model.gguf", "convert.error"):
        (place.parent / old).unlink(missing_ok=True)
    try:
        convert(place.parent)
    except Exception as error:  # a converter fails in its own ways: what it says is kept
        text = f"{type(error).__name__}: {error}"[:2000]
        (place.parent / "convert.error").write_text(text)
