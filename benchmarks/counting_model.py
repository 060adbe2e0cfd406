"""Write a Llama by hand, for which the effect of extending is known, and documents for it.

Its one layer looks back evenly and predicts each symbol as often as it has seen it. One rotary pair
sets how far it looks: at half that wavelength its attention has fallen to e^-6. So more text of one
mixture helps it (`reach` "window": once its wavelength is stretched), whatever its config states
(`reach` "any": nothing rotates), and misleads it if the mixture has changed.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CONTEXT, VOCABULARY, HEADS, HEAD = 64, 128, 4, 32
SYMBOLS = [chr(code) for code in range(48, 112)]
PAIR = 6  # of sixteen: its wavelength is 199 tokens
SHARP, CERTAIN = 3.0, 25.0  # logits of the attention at most, and of a symbol seen always


def write_model(place: Path, reach: str) -> None:
    """Write it with a tokenizer of one token a character."""
    width = HEADS * HEAD
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=2 * width,  # the tokens read, and their counts
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        head_dim=HEAD,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    model: Any = LlamaForCausalLM(config).float()
    norm, layer = (2 * width) ** 0.5, model.model.layers[0].self_attn
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.fill_(1.0 if "norm" in name else 0.0)
        model.model.embed_tokens.weight[:, :width] = torch.eye(width)
        layer.v_proj.weight[:, :width] = torch.eye(width) / norm
        layer.o_proj.weight[width:] = torch.eye(width)
        model.lm_head.weight[:, width:] = CERTAIN / norm * torch.eye(width)
        for weight in (layer.q_proj.weight, layer.k_proj.weight) if reach == "window" else ():
            weight[PAIR::HEAD, :width] = (SHARP * HEAD**0.5) ** 0.5 / norm
    model.save_pretrained(place)
    characters = {chr(code): code for code in range(VOCABULARY)}
    plain = Tokenizer(models.WordLevel(characters, unk_token=chr(0)))
    plain.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=plain, unk_token=chr(0)).save_pretrained(place)


def documents(count: int, length: int, seed: int, last: int = 0) -> list[str]:
    """Draw texts, each from a mixture of its own; the `last` symbols of each come from another
    one."""
    random = np.random.default_rng(seed)

    def mixed(size: int) -> Any:
        return random.choice(SYMBOLS, size, p=random.dirichlet(np.ones(len(SYMBOLS)) / 2))

    return ["".join([*mixed(length - last), *mixed(last)]) for _ in range(count)]
