"""What `verify` says of a config as transformers 5 saves it: rope_parameters alone."""

import configs
import pytest

from ropext import families
from ropext.verifying.rotary import check_spellings

PLAIN = {
    key: value for key, value in configs.LLAMA.items() if key not in ("rope_theta", "rope_scaling")
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}


def checks(config, recorded=False):
    return [*check_spellings(config, families.as_read(config), recorded)]


@pytest.mark.parametrize("theta", [10000.0, 5e5])
def test_an_unextended_model_saved_by_transformers_5_gets_a_note(theta):
    base = PLAIN | {"rope_parameters": {"rope_type": "default", "rope_theta": theta}}
    (check,) = checks(base)
    assert check.passed
    assert "note: rope_theta is only in rope_parameters" in check.sentence
    assert "--fix writes it" in check.sentence
    # MLX-LM 0.32.2, TGI 3.3.6 and ExLlamaV2 0.3.2 were measured to read it otherwise.
    assert check.sentence.endswith("among the newest engines measured: mlx, tgi and exllamav2")
    fixed = families.respell(base)
    assert [(c.passed, c.sentence) for c in checks(fixed)] == [
        (True, "all keys that engines read for RoPE agree")
    ]


@pytest.mark.parametrize(("rope", "recorded"), [(YARN, False), ({"rope_type": "default"}, True)])
def test_an_extension_that_loaders_of_today_lose_is_wrong(rope, recorded):
    saved = PLAIN | {"rope_parameters": rope | {"rope_theta": 5e5}}
    found = checks(saved, recorded)
    assert found
    assert not any(check.passed for check in found)


def test_a_key_that_no_current_loader_loses_is_a_note():
    """Qwen 3 with rope_parameters alone was measured in transformers and llama.cpp, which agree."""
    saved = PLAIN | {"model_type": "qwen3", "head_dim": 128}
    saved |= {"rope_parameters": YARN | {"rope_theta": 1e6}}
    (check,) = checks(saved, True)
    assert check.passed
    assert "note: the yarn scaling is only in rope_parameters" in check.sentence
