"""Write what every loader is asked to read: the checkpoints of the conformance kit, wider.

    python scripts/loaders/checkpoints.py DIR [FAMILY ...]

DIR/FAMILY/base and DIR/FAMILY/FORM are checkpoints of random weights. Beside them, reference.npz
has the log-probabilities that stock transformers gives to one text: for every form, for the base
(which a reader that ignores the scaling equals) and for configs that are misread in some way.
"""

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kit
import numpy as np
from bases import FAMILIES
from misreading import misreadings, with_theta
from transformers.utils import logging

from ropext.base.errors import RopextError
from ropext.base.jsontext import read_json, write_json

FORMS, CONTEXT, FACTOR = kit.FORMS, kit.CONTEXT, kit.FACTOR
VOCABULARY = 512
# Engines have kernels for some sizes only.
SIZES = kit.SIZES | {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
EXPERTS = {"moe_intermediate_size": 128}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    # Engines serve the released sizes of these four alone.
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "head_dim": 64,
    **EXPERTS,
}
INDEXER = {"index_n_heads": 4, "index_head_dim": 128}
GATED = {
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "shared_expert_intermediate_size": 128,
}
INTERLEAVED = {
    "partial_rotary_factor": 0.5,
    "rope_type": "default",
    "rope_theta": 50000.0,
    "mrope_section": [6, 5, 5],
    "mrope_interleaved": True,
}
# Beside the sizes, the partial rotary factors that releases have (llama.cpp's converter asks
# for Cohere 2's, which is whole).
OWN: dict[str, dict[str, Any]] = {
    "qwen3_moe": EXPERTS,
    "gemma2": {"query_pre_attn_scalar": 64},
    "gemma3_text": {"query_pre_attn_scalar": 64},
    "phi3": {"partial_rotary_factor": None},
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "cohere2": {"rotary_pct": 1.0},
    "glm4": {"partial_rotary_factor": 0.5},
    "glm4_moe": {"partial_rotary_factor": 0.5, **EXPERTS},
    "stablelm": {"partial_rotary_factor": 0.25},
    "gpt_neox": {"rotary_pct": 0.25, "intermediate_size": 1024},
    "qwen3_next": GATED | EXPERTS,
    "qwen3_5_text": GATED | {"rope_parameters": INTERLEAVED},
    "qwen3_5_moe_text": GATED | EXPERTS | {"rope_parameters": INTERLEAVED},
    "qwen3_vl_text": {
        "rope_scaling": {
            "rope_type": "default",
            "mrope_section": [12, 10, 10],
            "mrope_interleaved": True,
        }
    },
    "qwen2_5_vl_text": {"rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]}},
    "minimax_m2": {"rotary_dim": 32},
    "deepseek_v32": LATENT | INDEXER,
    "glm_moe_dsa": LATENT | {"qk_nope_head_dim": 192, "v_head_dim": 256} | INDEXER,
    "granitemoehybrid": {"shared_intermediate_size": 256},
    "gemma4_text": {"global_head_dim": 128, "num_global_key_value_heads": 1},
    "gemma3n_text": {"vocab_size_per_layer_input": VOCABULARY},
}


PIXELS = {
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "resample": 2,
    "rescale_factor": 1 / 255,
    "size": {"height": 28, "width": 28, "longest_edge": 28},
    "patch_size": 14,
}
IMAGES = {
    "gemma3": PIXELS | {"image_processor_type": "Gemma3ImageProcessor"},
    "mistral3": PIXELS | {"image_processor_type": "PixtralImageProcessor"},
}


def write_base(family: str, directory: Path) -> None:
    """A checkpoint of a family with random weights and no scaling."""
    text = FAMILIES[family].get("text_config", {}).get("model_type", family)
    kit.write_base(family, directory, SIZES, OWN.get(text))
    # Gemma 3's converter counts the tokens of a tokenizer.
    vocabulary = {f"t{number}": number for number in range(VOCABULARY)}
    tokenizer = {"model": {"type": "BPE", "vocab": vocabulary, "merges": []}, "added_tokens": []}
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    if family in IMAGES:  # ExLlamaV3 does not open a composite without it
        write_json(directory / "preprocessor_config.json", IMAGES[family])
    if family in (*IMAGES, "gemma4"):
        # MLX-LM takes the released vocabulary where the composite itself does not say another.
        config = read_json(directory / "config.json") | {"vocab_size": VOCABULARY}
        write_json(directory / "config.json", config)


def readings(place: Path) -> Iterator[tuple[str, Path, dict[str, Any]]]:
    """What can be made of one family's checkpoints: a label, the directory, and the config."""
    base = place / "base"
    plain = read_json(base / "config.json")
    yield "base", base, plain
    yield "theta 10,000 and no scaling", base, with_theta(plain, 10000.0)
    for form in FORMS:
        output = place / form
        if output.exists():
            config = read_json(output / "config.json")
            yield form, output, config
            for what, other in misreadings(config, plain).items():
                yield f"{form} {what}", output, other


def main(folder: Path, families: list[str]) -> None:
    ids = np.random.default_rng(0).integers(3, VOCABULARY, CONTEXT * FACTOR)
    folder.mkdir(parents=True, exist_ok=True)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    np.save(folder / "ids.npy", ids)
    (folder / "ids.json").write_text(json.dumps(ids.tolist()))
    for family in families or FAMILIES:
        base, told = folder / family / "base", {}
        if not base.exists():
            write_base(family, base)
        plain = read_json(base / "config.json")
        for form in FORMS:
            try:
                config = kit.extended(plain, form)
            except RopextError as error:
                told[form] = str(error)
                continue
            output = folder / family / form
            shutil.copytree(base, output, dirs_exist_ok=True)
            write_json(output / "config.json", config)
        found = {
            label: kit.log_probabilities(directory, config, [ids])[0].numpy()
            for label, directory, config in readings(folder / family)
        }
        np.savez(folder / family / "reference.npz", **found)
        (folder / family / "refused.json").write_text(json.dumps(told, indent=1))
        print(family, "refused:", {f: text[:120] for f, text in told.items()}, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
