"""A saved config says the same to transformers 4 and 5, whose readers are transcribed here.

Theta and the share of rotating channels are not the class defaults: with those, a config that loses
them reads right by luck. (The loads in the real versions are in the family tests.)
"""

from typing import Any

import pytest
import transcriptions as truth
from comparing import assert_close, assert_number

from ropext import planning
from ropext.options.extend import Extend

# Class defaults of the share: Phi 0.5, GPT-NeoX 0.25, Llama 1.
CLASS_SHARE = {"phi": 0.5, "gpt_neox": 0.25, "llama": 1.0}
USUAL = {"theta": "rope_theta", "share": "partial_rotary_factor"}
NEOX = {"theta": "rotary_emb_base", "share": "rotary_pct"}
# 80 channels a head, of which Phi and GPT-NeoX rotate 32.
SIZES = {
    "hidden_size": 320,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 2,
    "intermediate_size": 640,
    "vocab_size": 128,
    "max_position_embeddings": 2048,
}
MODELS: dict[str, dict[str, Any]] = {
    "phi": SIZES | {"rope_theta": 77_000.0, "partial_rotary_factor": 0.4},
    "gpt_neox": SIZES | {"rotary_emb_base": 77_000, "rotary_pct": 0.4},
    "llama": SIZES | {"rope_theta": 77_000.0},
}
DIM = {"phi": 32, "gpt_neox": 32, "llama": 80}
TRUTHS = {"pi": truth.position_interpolation, "ntk": truth.ntk_aware, "yarn": truth.yarn}


def saved(family: str, method: str) -> dict[str, Any]:
    config = {"model_type": family} | MODELS[family]
    return planning.make_plan(config, Extend(method=method, factor=4.0)).config


def seen(family: str, method: str) -> dict[str, truth.Result]:
    """Return each version's reading of the saved config."""
    config, share = saved(family, method), CLASS_SHARE[family]
    names = NEOX if family == "gpt_neox" else USUAL
    return {
        "transformers 4": truth.seen_by_transformers_4(config, names, share),
        "transformers 5": truth.seen_by_transformers_5(config, names, share),
    }


@pytest.mark.parametrize("method", TRUTHS)
@pytest.mark.parametrize("family", MODELS)
def test_both_versions_compute_the_papers_formula(family: str, method: str) -> None:
    inv_freq, attention = TRUTHS[method](DIM[family], 77_000.0, 2048, 8192)
    for version, (ours, factor) in seen(family, method).items():
        what = f"{family} {method} in {version}"
        pairs = min(len(ours), len(inv_freq))
        assert_close(ours[:pairs], inv_freq[:pairs], 1e-12, what)
        assert len(ours) == len(inv_freq), f"{what}: {len(ours)} pairs, not {len(inv_freq)}"
        assert_number(factor, attention, 1e-12, f"{what}: attention factor")
