"""Write what every loader is asked to read: small checkpoints of each family in each form.

    python scripts/loaders/checkpoints.py DIR [FAMILY ...]

DIR/FAMILY/base and DIR/FAMILY/FORM are checkpoints of random weights, extended by ropext. Beside
them, reference.npz has the log-probabilities that stock transformers gives to one text: for every
form, for the base (which a reader that ignores the scaling equals) and for configs that lose some
keys. The weights make attention sharp: where a loader rotates otherwise, log-probabilities differ
by tenths of a nat.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers.utils import logging

import ropext
from ropext.errors import RopextError

CONTEXT, FACTOR, VOCABULARY, WINDOW = 128, 4, 512, 64
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": CONTEXT,
    "rope_theta": 50000.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_dropout": 0.0,
    "attention_bias": False,
}
GELU = {"hidden_activation": "gelu_pytorch_tanh", "hidden_act": "gelu_pytorch_tanh"}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 128}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    # Engines serve the released sizes of these four alone.
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "head_dim": 64,
    "moe_layer_freq": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "hidden_act": "silu",
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    **EXPERTS,
}
# The classes of these two are scaled by default.
UNSCALED = {"rope_type": "default", "rope_theta": 50000.0}
QUERIES = {"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": CONTEXT}
LAYERS = ["sliding_attention"] * 3 + ["full_attention"]
# What makes a family's config differ from SIZES; None leaves a key out.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "ministral3": {"rope_parameters": UNSCALED | QUERIES},
    "qwen2": {"use_sliding_window": False},
    "qwen3": {},
    "qwen3_moe": {"num_experts": 4, "decoder_sparse_step": 1, "norm_topk_prob": True, **EXPERTS},
    "gemma2": {
        "sliding_window": WINDOW,
        "query_pre_attn_scalar": 64,
        "tie_word_embeddings": True,
        **GELU,
    },
    "gemma3_text": {
        "sliding_window": WINDOW,
        "num_hidden_layers": 6,
        "sliding_window_pattern": 6,
        "query_pre_attn_scalar": 64,
        "rope_local_base_freq": 10000.0,
        "tie_word_embeddings": True,
        **GELU,
    },
    "phi3": {"original_max_position_embeddings": CONTEXT, "sliding_window": None},
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": WINDOW,
        "attention_bias": True,
        "rope_parameters": UNSCALED,
    },
    "deepseek_v2": {
        **LATENT,
        "topk_method": "greedy",
        "n_group": 1,
        "topk_group": 1,
        "scoring_func": "softmax",
        "norm_topk_prob": False,
    },
    "deepseek_v3": {
        **LATENT,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
    },
    "glm4": {"partial_rotary_factor": 0.5},
    "glm4_moe": {
        "partial_rotary_factor": 0.5,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        **EXPERTS,
    },
    "olmo2": {},
    # Its class default: another theta moves the windowed layers in transformers 4, not in 5.
    "olmo3": {"sliding_window": WINDOW, "layer_types": LAYERS, "rope_theta": 500000.0},
    "granite": {"attention_multiplier": 0.125},
    "cohere2": {"sliding_window": WINDOW, "layer_types": LAYERS, "tie_word_embeddings": True},
    "smollm3": {"no_rope_layers": [1, 1, 1, 0], "no_rope_layer_interval": 4},
    "stablelm": {"partial_rotary_factor": 0.25},
    "gpt_neox": {
        "rotary_pct": 0.25,
        "rotary_emb_base": 50000,
        "num_key_value_heads": None,
        "attention_bias": True,
        "intermediate_size": 1024,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-5,
        "use_parallel_residual": True,
    },
}
# The form, and how it is asked for. A fitted spectrum is a longrope; its knob is one factor a pair.
FORMS: dict[str, dict[str, Any]] = {
    "linear": {"method": "pi"},
    "theta": {"method": "ntk"},
    "llama3": {"method": "llama3"},
    "yarn": {"method": "yarn"},
    "yarn-custom": {"method": "yarn", "beta_fast": 8.0, "beta_slow": 2.0, "attention_factor": 1.3},
    "longrope": {"method": "longrope"},
    "longrope-custom": {"method": "longrope", "attention_factor": 1.25},
}


def sharpen(model: torch.nn.Module) -> None:
    """Draw weights under which far positions count: queries and keys are wide."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1:
                wide = 3.0 if any(part in name for part in ("q_", "k_", "qkv", "query")) else 1.0
                weight.normal_(0.0, wide / weight.shape[-1] ** 0.5, generator=generator)


def log_probabilities(
    directory: Path, ids: np.ndarray, config: dict[str, Any] | None = None
) -> np.ndarray:
    """What stock transformers gives to each token after the first, by another config if one is
    given."""
    made = {}
    if config is not None:
        made["config"] = transformers.AutoConfig.for_model(**config)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", **made
    ).eval()
    with torch.inference_mode():
        logits = model(torch.as_tensor(ids)[None]).logits[0].double()
    return logits[:-1].log_softmax(-1).gather(1, torch.as_tensor(ids)[1:, None])[:, 0].numpy()


def write_base(family: str, directory: Path) -> None:
    """A checkpoint of a family with random weights and no scaling."""
    values = {key: own for key, own in (SIZES | FAMILIES[family]).items() if own is not None}
    config = transformers.AutoConfig.for_model(family, **values)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    sharpen(model)
    model.save_pretrained(directory)
    # Gemma 3's converter counts the tokens of a tokenizer.
    vocabulary = {f"t{number}": number for number in range(VOCABULARY)}
    tokenizer = {"model": {"type": "BPE", "vocab": vocabulary, "merges": []}, "added_tokens": []}
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    # As on the hub, not as transformers 5 saves it: with the keys that releases have.
    path = directory / "config.json"
    saved = {k: v for k, v in json.loads(path.read_text()).items() if k != "rope_parameters"}
    path.write_text(json.dumps(saved | {"rope_scaling": None} | values, indent=1))


def alternatives(directory: Path) -> dict[str, dict[str, Any]]:
    """What a reader that loses part of a config makes of it, by what it loses."""
    config = json.loads((directory / "config.json").read_text())
    params = config.get("rope_parameters") or {}
    flat = params if "rope_type" in params else params.get("full_attention", {})
    scale = {"attention_factor", "attn_factor", "short_mscale", "long_mscale"}
    betas = {"beta_fast", "beta_slow"}
    lost = {
        "its attention factor": scale,
        "its betas": betas,
        "its attention factor and betas": scale | betas,
    }
    found = {
        what: _without(config, keys)
        for what, keys in lost.items()
        if keys & flat.keys() and (len(keys) < 5 or betas & flat.keys())
    }
    if "llama_4_scaling_beta" in flat:
        still = {"llama_4_scaling_beta": 0.0}
        kept = {key: config[key] | still for key in ("rope_parameters", "rope_scaling")}
        found["the scaling of its queries"] = config | kept
    return found


def _without(data: Any, keys: set[str]) -> Any:
    if not isinstance(data, dict):
        return data
    return {key: _without(own, keys) for key, own in data.items() if key not in keys}


def write_factors(base: Path) -> Path:
    """One factor a pair, from 1 to 6: no closed form has them."""
    num = len(ropext.inspect(str(base)).model.scaled_sites[0].rope.spectrum.inv_freq)
    path = base.with_name("factors.json")
    path.write_text(json.dumps([1 + 5 * pair / num for pair in range(num)]))
    return path


def readings(place: Path) -> Iterator[tuple[str, Path, dict[str, Any] | None]]:
    """What can be made of one family's checkpoints: a label, the directory, and the config where it
    is not the directory's own."""
    base = place / "base"
    yield "base", base, None
    plain = json.loads((base / "config.json").read_text())
    plain |= dict.fromkeys(("rope_theta", "rotary_emb_base"), 10000.0)
    plain.pop("rope_parameters", None)
    yield "theta 10,000 and no scaling", base, plain
    for form in FORMS:
        output = place / form
        if output.exists():
            yield form, output, None
            for what, config in alternatives(output).items():
                yield f"{form} without {what}", output, config


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
        for form, options in FORMS.items():
            knobs = dict(options)
            try:
                if form.startswith("longrope"):
                    knobs["pair_factors"] = str(write_factors(base))
                output = folder / family / form
                ropext.extend(str(base), output, factor=FACTOR, force=True, prove=False, **knobs)
            except RopextError as error:
                told[form] = str(error)
        found = {
            label: log_probabilities(directory, ids, config)
            for label, directory, config in readings(folder / family)
        }
        np.savez(folder / family / "reference.npz", **found)
        (folder / family / "refused.json").write_text(json.dumps(told, indent=1))
        gaps = {f: round(float(np.abs(v - found["base"]).mean()), 4) for f, v in found.items()}
        print(family, gaps, "refused:", {f: text[:120] for f, text in told.items()}, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
