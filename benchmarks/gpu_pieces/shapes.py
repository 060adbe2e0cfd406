"""Models with random weights in the shapes of published ones; a dry run uses tiny ones.

The tiny ones have fewer layers, smaller widths and contexts, and the bundled tokenizer's
vocabulary.
"""

import shutil
from pathlib import Path
from typing import Any

from gpu_pieces import Day

LLAMA, QWEN2, QWEN3 = "Llama-3-8B", "Qwen2.5-7B", "Qwen3-0.6B"
# type, vocabulary, hidden, feed-forward, layers, heads, kv heads, head_dim, context, theta, tied
SHAPES: dict[str, tuple[Any, ...]] = {
    LLAMA: ("llama", 128256, 4096, 14336, 32, 32, 8, 128, 8192, 5e5, False),
    QWEN2: ("qwen2", 152064, 3584, 18944, 28, 28, 4, 128, 32768, 1e6, False),
    QWEN3: ("qwen3", 151936, 1024, 3072, 28, 16, 8, 128, 40960, 1e6, True),
}
SMALLER = 32  # times, contexts and rows of a dry run


def cut(day: Day, tokens: int) -> int:
    """So many tokens, or in a dry run a part of them."""
    return tokens // SMALLER if day.dry else tokens


def config_of(day: Day, name: str) -> Any:
    from transformers import AutoConfig

    kind, vocabulary, hidden, wide, layers, heads, kv, dim, context, theta, tied = SHAPES[name]
    if day.dry:
        vocabulary, hidden, wide, layers, heads, kv, dim = 1024, 64, 128, 2, 4, 2, 16
    return AutoConfig.for_model(
        kind,
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=wide,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        head_dim=dim,
        max_position_embeddings=cut(day, context),
        rope_parameters={"rope_type": "default", "rope_theta": theta},
        tie_word_embeddings=tied,
        architectures=[f"{kind.capitalize()}ForCausalLM"],
        # The ids belong to the bundled tokenizer, which this model uses.
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=None,
    )


def build(day: Day, name: str) -> Any:
    """Made on the device, in bfloat16 (on a CPU, which emulates it, in float32)."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    dtype = torch.float32 if day.dry else torch.bfloat16
    with torch.device(day.device):
        return AutoModelForCausalLM.from_config(config_of(day, name), dtype=dtype)


def checkpoint(day: Day, name: str) -> str:
    """Write the model to the disk, once; the bundled tokenizer reads for it."""
    from ropext.base.bundled import MODELS

    place, bundled = day.work / name, MODELS["ropext://demo"]
    if not (place / "tokenizer.json").is_file():
        shutil.rmtree(place, ignore_errors=True)
        build(day, name).save_pretrained(place)
        for file in bundled.glob("tokenizer*"):
            shutil.copy(file, place)
    return str(place)


def texts(day: Day, tokens: int, count: int) -> str:
    """Write a file of so many documents of that length: the modules of Python's own library,
    joined."""
    import json
    import sysconfig

    place = day.work / f"texts-{tokens}.jsonl"
    size, made, text = 5 * tokens, list[str](), ""  # a token of the bundled tokenizer is shorter
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("[a-z]*/[a-z]*.py")):
        text += path.read_text("utf-8", errors="replace")
        if len(text) >= size:
            made, text = [*made, text[:size]], ""
        if len(made) == count:
            break
    place.write_text("".join(json.dumps({"text": text}) + "\n" for text in made), "utf-8")
    return str(place)
