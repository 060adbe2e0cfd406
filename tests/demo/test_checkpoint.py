"""The bundled checkpoint: stock files, and the behaviour that the demo builds on, for real."""

import json

import pytest
import torch

from ropext.base.bundled import MODELS
from ropext.tasks import passkey, repetition
from scripts.demo_checkpoint.tokenizer import load_encoder

CHECKPOINT = MODELS["ropext://demo"]


@pytest.fixture(scope="module")
def model():
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(CHECKPOINT)


def test_config_is_spelled_for_both_majors_of_transformers():
    config = json.loads((CHECKPOINT / "config.json").read_text())
    assert config["rope_theta"] == 10000.0
    assert config["rope_scaling"] is None
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 10000.0}
    assert config["max_position_embeddings"] == 256
    assert config["head_dim"] >= 32
    tokenizer = json.loads((CHECKPOINT / "tokenizer_config.json").read_text())
    assert tokenizer["tokenizer_class"] == "PreTrainedTokenizerFast"


def test_weights_are_small_and_the_card_names_the_trained_parts():
    assert (CHECKPOINT / "model.safetensors").stat().st_size <= 4_000_000
    card = (CHECKPOINT / "README.md").read_text()
    assert "Retrieval was trained" in card
    assert "Held out from training" in card


def test_weights_are_complete_in_stock_transformers(model):
    from transformers import AutoModelForCausalLM

    _, found = AutoModelForCausalLM.from_pretrained(CHECKPOINT, output_loading_info=True)
    assert not any(found[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


@torch.no_grad()
def share_found(model, length):
    encoder = load_encoder(CHECKPOINT)
    depths = [i / 39 for i in range(40)]
    items = passkey.TASK.build(
        encoder, repetition(encoder), length=length, depths=depths, index=0, seed=99
    )
    ids = torch.tensor([[*item.prompt, *item.answer] for item in items])
    size = len(items[0].answer)
    best = model(input_ids=ids, use_cache=False).logits[:, -size - 1 : -1].argmax(-1)
    return float((best == ids[:, -size:]).all(-1).float().mean())


@pytest.mark.slow
@pytest.mark.parametrize("length", [64, 128, 256])
def test_keys_are_found_inside_the_window(model, length):
    assert share_found(model, length) >= 0.9


@pytest.mark.slow
def test_keys_are_lost_at_four_times_the_window(model):
    assert share_found(model, 1024) <= 0.1


@pytest.mark.slow
@torch.no_grad()
def test_plain_rotary_embeddings_explode_beyond_the_window(model):
    """The same last 64 tokens, read with 256 tokens of context and with 1024."""
    encoder = load_encoder(CHECKPOINT)
    held_out = CHECKPOINT.parent / "data" / "held-out.jsonl"
    texts = [json.loads(line)["text"] for line in held_out.read_text().splitlines()[:16]]
    ids = torch.tensor([encoder.encode(text)[:1024] for text in texts])

    def tail(window):
        logits = model(input_ids=window, use_cache=False).logits[:, -65:-1]
        return float(
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), window[:, -64:].flatten())
        )

    assert tail(ids) - tail(ids[:, -256:]) >= 1.0
