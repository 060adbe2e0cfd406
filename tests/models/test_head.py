"""Whether logits are the decoder's states times one matrix, and nothing else."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ropext.models.head import logits_after, predicted_head_problem, why_head_is_not_plain

BENT = "it scales or caps its logits"
IDS = torch.arange(3, 35)[None]


class Capped(LlamaForCausalLM):
    """Caps its logits in code of its own, of which no config tells."""

    cap: float

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = self.cap * torch.tanh(output.logits / self.cap)
        return output


def small(kind=LlamaForCausalLM, dtype=torch.float32, largest=1.0, **changes):
    """Make a random model whose largest logit, before any cap, is about `largest`."""
    torch.manual_seed(0)
    shape = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "pad_token_id": 0,
    }
    model = kind(LlamaConfig(**shape | changes)).eval()
    with torch.no_grad():
        hidden = model.model(input_ids=IDS).last_hidden_state
        model.lm_head.weight *= largest / model.lm_head(hidden).abs().max()
    return model.to(dtype)


@torch.no_grad()
def reason(model):
    return why_head_is_not_plain(model, IDS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("largest", [0.01, 1.0, 30.0])
def test_a_plain_head_is_plain_at_any_size_of_its_logits(dtype, largest):
    assert reason(small(dtype=dtype, largest=largest)) is None


@pytest.mark.parametrize(
    ("largest", "cap"),
    [
        (0.1, 30.0),  # 16 times as large it would still be hidden in bfloat16's rounding
        (20.0, 1000.0),  # at logits of 100 it would
    ],
)
def test_a_cap_shows_in_bfloat16_over_small_logits_and_over_large_ones(largest, cap):
    model = small(Capped, torch.bfloat16, largest)
    model.cap = cap
    assert reason(model) == BENT
    model.cap = 1e6
    assert reason(model) is None


def test_a_bias_belongs_to_the_matrix_and_a_hook_does_not():
    model = small()
    model.lm_head.bias = torch.nn.Parameter(torch.linspace(-3, 3, 64))
    assert reason(model) is None
    model.lm_head.register_forward_hook(lambda module, inputs, output: output)
    assert "its output layer is wrapped" in reason(model)


def test_class_and_config_predict_a_head_problem():
    model = small()
    assert predicted_head_problem(model) is None
    model.config.logit_scale = 0.25
    assert predicted_head_problem(model) == "it scales or caps its logits (logit_scale 0.25)"
    model.lm_head = torch.nn.Sequential(model.lm_head)
    assert (
        predicted_head_problem(model) == "its output layer is a Sequential, not a plain linear one"
    )


@torch.no_grad()
def test_logits_after_given_states_are_those_of_the_models_own_forward():
    model = small(Capped)
    model.cap = 0.5
    output = model.model(input_ids=IDS)
    part = output.last_hidden_state[:, 5:9]
    whole = model(input_ids=IDS).logits[0]
    assert torch.allclose(logits_after(model, output, part), whole[5:9], atol=1e-6)
    assert "forward" not in vars(model.model)
