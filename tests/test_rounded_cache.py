"""A rounded KV cache: ggml's own rounding, and a cache that rounds the states that it stores."""

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from transformers import AutoModelForCausalLM, DynamicCache

from ropext.base.errors import UnsupportedModel, UsageError
from ropext.families.loaders.gguf import reorders_keys
from ropext.models.patching.rounding import (
    cache_rounded,
    hadamard_size_of_keys,
    hadamard_size_of_values,
    rounded_cache,
)
from ropext.options.cache import StoredCache, stored_cache

GGML = {"q8_0": GGMLQuantizationType.Q8_0, "q4_0": GGMLQuantizationType.Q4_0}


def states(width, seed=0):
    """Return keys with outliers, a block of zeros, and one of exact halves."""
    made = torch.randn(2, 3, 40, width, generator=torch.Generator().manual_seed(seed))
    made[..., 5] *= 30
    made[0, 0, 0, :32] = 0
    made[0, 0, 1, :32] = torch.arange(32) * 0.5
    made[0, 0, 1, 31] = 127.0
    return made


@pytest.mark.parametrize("kind", GGML)
@pytest.mark.parametrize("width", [32, 64, 96])
def test_a_rounded_cache_rounds_as_ggml_does(kind, width):
    keys = states(width)
    truth = dequantize(quantize(keys.numpy().reshape(-1, width), GGML[kind]), GGML[kind])
    found = rounded_cache(keys, kind, 0).numpy().reshape(-1, width)
    np.testing.assert_array_equal(found, truth)


@pytest.mark.parametrize(("width", "of_keys"), [(64, 64), (128, 128), (192, 64), (256, 256)])
def test_a_rounded_cache_applies_the_hadamard_matrix_of_llama_cpp(width, of_keys):
    assert hadamard_size_of_keys("q4_0", width) == of_keys
    assert hadamard_size_of_values("q8_0", width) == 64
    size = of_keys
    signs = [[-1.0 if (i & j).bit_count() % 2 else 1.0 for j in range(size)] for i in range(size)]
    matrix = np.array(signs, np.float32) / np.float32(np.sqrt(size))
    keys = states(width)
    turned = keys.numpy().reshape(-1, size) @ matrix
    rounded = dequantize(quantize(turned.reshape(-1, width), GGML["q4_0"]), GGML["q4_0"])
    truth = (rounded.reshape(-1, size) @ matrix).reshape(keys.shape)
    found = rounded_cache(keys, "q4_0", size).numpy()
    # A sum next to a half rounds the other way: one step of a few entries.
    far = np.abs(found - truth) > 1e-4
    assert far.mean() < 0.01
    assert np.abs(found - truth).mean() < 1e-3


def test_other_widths_and_types_have_no_hadamard_matrix():
    assert [hadamard_size_of_keys(kind, 64) for kind in ("f16", "fp8")] == [0, 0]
    assert (hadamard_size_of_keys("q4_0", 80), hadamard_size_of_values("q4_0", 96)) == (0, 0)


def test_eight_bits_of_floating_point():
    made = torch.tensor([0.0, 1.06, 1.07, 17.0, 500.0, -1e9, 0.001])
    # Three bits behind the point: steps of 1/8 from 1 on, of 2 from 16 on, of 1/512 below 1/64.
    truth = torch.tensor([0.0, 1.0, 1.125, 16.0, 448.0, -448.0, 1 / 512])
    assert torch.equal(rounded_cache(made, "fp8", 0), truth)


class RoundingCache(DynamicCache):
    """Rounds the stored states: the same numbers by another way."""

    def __init__(self, config, stored):
        super().__init__(config=config)
        self.stored = stored

    def update(self, key_states, value_states, *args, **kwargs):
        width = key_states.shape[-1]
        stored = self.stored
        key_states = rounded_cache(
            key_states, stored.keys, hadamard_size_of_keys(stored.keys, width)
        )
        value_states = rounded_cache(
            value_states, stored.values, hadamard_size_of_values(stored.values, width)
        )
        return super().update(key_states, value_states, *args, **kwargs)


SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
}


def tiny(model_type, attention="sdpa", **more):
    from transformers import AutoConfig

    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **(SIZES | more))
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    with torch.no_grad():  # as large as trained ones, so that a rounding is seen
        for parameter in model.parameters():
            parameter.mul_(4)
    return model.eval()


class GgmlCache(DynamicCache):
    """Stores keys as llama.cpp does after its converter reordered the rows of q and k.

    LlamaModel's `permute` puts the channels 0, 48, 1, 49 and so on of a head next to each other.
    """

    def __init__(self, config, kind):
        super().__init__(config=config)
        self.kind = GGML[kind]

    def update(self, key_states, value_states, *args, **kwargs):
        keys = key_states.numpy()
        width = keys.shape[-1]
        order = np.arange(width).reshape(2, width // 2).swapaxes(0, 1).reshape(width)
        stored = quantize(np.ascontiguousarray(keys[..., order]).reshape(-1, width), self.kind)
        back = np.empty_like(keys)
        back[..., order] = dequantize(stored, self.kind).reshape(keys.shape)
        return super().update(torch.from_numpy(back), value_states, *args, **kwargs)


@pytest.mark.parametrize("kind", GGML)
def test_keys_of_llama_are_rounded_in_the_order_of_the_gguf(kind):
    """Heads of 96 channels, three blocks that no matrix turns."""
    model = tiny("llama", hidden_size=192, head_dim=96)
    ids = torch.arange(48)[None] * 7 % 64
    stored = StoredCache(kind, "f16")
    with torch.no_grad():
        truth = model(input_ids=ids, past_key_values=GgmlCache(model.config, kind)).logits
        other = model(input_ids=ids, past_key_values=RoundingCache(model.config, stored)).logits
        with cache_rounded(model, stored):
            found = model(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(found, truth, atol=1e-3, rtol=1e-3)
    assert (other - truth).abs().max() > 20 * (found - truth).abs().max()


# By llama.cpp's converters and its llama_model_rope_type: these turn neighbours in llama.cpp and
# halves in transformers; cohere turns neighbours in both, qwen2 halves in both.
@pytest.mark.parametrize(
    ("model_type", "reordered"),
    [
        *((name, True) for name in ("llama", "mistral", "mixtral", "granite", "olmo", "smollm3")),
        *((name, True) for name in ("arcee", "ministral3")),
        *((name, False) for name in ("cohere", "qwen2", "qwen3", "gemma3_text", "phi3", "olmo2")),
        *((name, False) for name in ("gpt_oss", "llama4_text", "unheard_of")),
    ],
)
def test_reorders_keys_is_true_for_the_types_that_the_converter_reorders(model_type, reordered):
    assert reorders_keys(model_type) == reordered


@pytest.mark.parametrize("name", ["q8_0", "q4_0", "fp8", "q8_0/q4_0", "f16/q4_0", "q4_0/f16"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_model_attends_to_the_rounded_cache(name, attention):
    model = tiny("llama", attention)
    stored = stored_cache(name)
    ids = torch.arange(48)[None] * 7 % 64
    with torch.no_grad():
        before = model(input_ids=ids, use_cache=False).logits
        truth = model(input_ids=ids, past_key_values=RoundingCache(model.config, stored)).logits
        with cache_rounded(model, stored):
            once = model(input_ids=ids, use_cache=False).logits
            cache = DynamicCache(config=model.config)
            parts = [
                model(input_ids=part, past_key_values=cache).logits for part in ids.split(20, 1)
            ]
        after = model(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(once, truth, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(torch.cat(parts, 1), truth, atol=1e-4, rtol=1e-4)
    assert float((once - before).abs().max()) > 1e-3
    assert torch.equal(after, before)


def test_windows_soft_caps_and_sinks_are_the_models_own():
    experts = {"num_local_experts": 2, "num_experts_per_tok": 2}
    for kind, attention, more in (
        ("gemma2", "eager", {"sliding_window": 16}),
        ("gpt_oss", "eager", {"sliding_window": 16, **experts}),
        ("qwen3", "sdpa", {}),
    ):
        model = tiny(kind, attention, head_dim=32, **more)
        ids = torch.arange(48)[None] * 7 % 64
        stored = StoredCache("q4_0", "q8_0")
        with torch.no_grad():
            truth = model(input_ids=ids, past_key_values=RoundingCache(model.config, stored)).logits
            with cache_rounded(model, stored):
                once = model(input_ids=ids, use_cache=False).logits
        torch.testing.assert_close(once, truth, atol=1e-3, rtol=1e-3)


def test_layers_whose_cache_keeps_other_numbers_are_refused():
    widths = {"qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}
    ranks = {"kv_lora_rank": 16, "q_lora_rank": 16}
    heads = {"num_key_value_heads": 2}
    latent = tiny("deepseek_v3", **widths, **ranks, **heads, first_k_dense_replace=2)
    with (
        pytest.raises(UnsupportedModel, match="latent"),
        cache_rounded(latent, stored_cache("fp8")),
    ):
        pass
    narrow = tiny("llama", head_dim=16)
    with (
        pytest.raises(UnsupportedModel, match="no whole blocks of 32"),
        cache_rounded(narrow, stored_cache("q8_0")),
    ):
        pass
    assert narrow.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("name", ["q5_1", "q8_0/", "q8_0/q4_0/fp8", "F16"])
def test_an_unknown_type_of_kv_cache_is_refused(name):
    with pytest.raises(UsageError, match="is not a type of KV cache"):
        stored_cache(name)
