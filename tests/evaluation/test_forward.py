"""One pass, in slices, in chunks: the same NLL as the model's own forward gives."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from small_models import CONTEXT, VOCABULARY, random_ids, rope, tiny

from ropext.evaluation.forward import HEAD_BYTES, NanInLogits, ReadingMode, TokenScorer, slice_for
from ropext.evaluation.reading import pinned
from ropext.evaluation.variants import Variant
from ropext.results.perplexity import LossStatistics
from ropext.results.values import Bootstrap

STATIC = ["default", "linear", "yarn", "llama3", "proportional"]
DYNAMIC = ["dynamic", "longrope"]
LENGTH = 4 * CONTEXT


def plain_nll(model, ids):
    """Run the model's own forward over the whole sequence, and torch's cross-entropy."""
    row = torch.as_tensor(ids).long()[None]
    logits = model(input_ids=row, use_cache=False).logits[0].float()
    return F.cross_entropy(logits[:-1], row[0, 1:], reduction="none").numpy()


def checked(model, chunk=None, slice_tokens=16, columns=None):
    scorer = TokenScorer(model, ReadingMode(chunk, slice_tokens, columns=columns))
    scorer.self_check()
    return scorer


def extended(rope_type, **more):
    # Stock dynamic is written with the old context in max_position_embeddings.
    limit = CONTEXT if rope_type == "dynamic" else LENGTH
    return tiny(max_position_embeddings=limit, rope_parameters=rope(rope_type), **more)


@pytest.mark.parametrize("rope_type", STATIC)
def test_single_pass_equals_a_forward_per_prefix(rope_type):
    model, ids = extended(rope_type), random_ids(LENGTH)
    nll = checked(model).token_nll(ids)
    assert np.isnan(nll[0])
    for length in (5, CONTEXT, 100, 200, LENGTH):
        assert nll[1:length] == pytest.approx(plain_nll(model, ids[:length]), abs=2e-5)


def test_no_rope_type_of_transformers_is_forgotten():
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    assert {"default", *ROPE_INIT_FUNCTIONS} == {*STATIC, *DYNAMIC}


@pytest.mark.parametrize("rope_type", [*STATIC, *DYNAMIC])
def test_chunked_equals_full_when_pinned(rope_type):
    model, ids = extended(rope_type), random_ids(LENGTH)
    truth = plain_nll(extended(rope_type), ids)
    with pinned(model, LENGTH):
        chunked = checked(model, chunk=48).token_nll(ids)
    assert chunked[1:] == pytest.approx(truth, abs=5e-5)


@pytest.mark.parametrize("rope_type", DYNAMIC)
def test_chunked_differs_from_full_when_not_pinned(rope_type):
    """This is why pinning is needed; if transformers changes this, pinning can go."""
    model, ids = extended(rope_type), random_ids(LENGTH)
    truth = plain_nll(extended(rope_type), ids)
    scorer = TokenScorer(model, ReadingMode(48, 16))
    assert np.abs(scorer.token_nll(ids)[1:] - truth).max() > 0.05


@pytest.mark.parametrize("rope_type", DYNAMIC)
def test_pinning_leaves_the_module_as_it_found_it(rope_type):
    model, ids = extended(rope_type), random_ids(LENGTH)
    model(input_ids=torch.as_tensor(ids).long()[None])  # dynamic has grown now
    rotary = model.model.rotary_emb
    before = rotary.inv_freq.clone(), rotary.rope_type
    cached = getattr(rotary, "max_seq_len_cached", None)
    with pinned(model, CONTEXT // 2):
        short = plain_nll(model, ids[: CONTEXT // 2])
    assert torch.equal(rotary.inv_freq, before[0])
    assert rotary.rope_type == before[1]
    assert getattr(rotary, "max_seq_len_cached", None) == cached
    fresh = plain_nll(extended(rope_type), ids[: CONTEXT // 2])
    assert short == pytest.approx(fresh, abs=1e-5)


def spectrum_at(model, length):
    with pinned(model, length):
        return tuple(model.model.rotary_emb.inv_freq.tolist())


SAME_SETS = rope("longrope") | {"short_factor": [1.0, 2.0, 4.0, 8.0]}


@pytest.mark.parametrize(
    ("model", "passes"),
    [
        *((extended(rope_type), (LENGTH,)) for rope_type in STATIC),
        (extended("longrope"), (CONTEXT, LENGTH)),
        (tiny(max_position_embeddings=LENGTH, rope_parameters=SAME_SETS), (LENGTH,)),
        (extended("dynamic"), (CONTEXT, 128, LENGTH)),
    ],
)
@pytest.mark.parametrize("known", [True, False])
def test_the_config_tells_which_passes_serve_the_lengths(model, passes, known):
    """The tables that stock's own modules use at each length agree. In a family whose rotary
    embeddings ropext does not know, each length has a pass if the spectrum may depend on it."""
    lengths = (16, 32, CONTEXT, 128, LENGTH)
    frame = LossStatistics(CONTEXT, lengths, 16, Bootstrap())
    config = model.config.to_dict() | ({} if known else {"model_type": "gpt2"})
    if not known and model.config.rope_parameters["rope_type"] in DYNAMIC:
        passes = lengths
    elif known:
        spectra = [(spectrum_at(model, length), length) for length in lengths]
        # the longest of the lengths with the same spectrum
        assert tuple(dict(spectra).values()) == passes
    assert Variant("any", "extended", None, config=config).regimes(frame) == {
        f"pass-{length}": length for length in passes
    }


def test_tokens_of_8_bits_share_a_pass_with_the_window_of_the_base():
    """LLM.int8 treats a column by all tokens of a pass; without outliers each token is alone."""
    frame = LossStatistics(CONTEXT, (16, CONTEXT, LENGTH), 16, Bootstrap())
    config = extended("yarn").config.to_dict()
    for eight, passes in (
        ({"load_in_8bit": True}, (CONTEXT, LENGTH)),
        ({"load_in_8bit": True, "llm_int8_threshold": 0.0}, (LENGTH,)),
        ({"load_in_8bit": False, "load_in_4bit": True}, (LENGTH,)),
    ):
        quantised = config | {"quantization_config": eight}
        assert Variant("any", "extended", None, config=quantised).regimes(frame) == {
            f"pass-{length}": length for length in passes
        }


# Each scales, caps or otherwise treats its logits, routes between experts, or windows its layers.
KINDS = {
    "gemma2": {"final_logit_softcapping": 5.0, "sliding_window": 24, "query_pre_attn_scalar": 8},
    "gemma3_text": {"sliding_window": 24, "query_pre_attn_scalar": 8},
    "cohere": {"logit_scale": 0.25},
    "granite": {"logits_scaling": 4.0},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3": {},
    "gpt_neox": {},
    "phi3": {},
    "mistral": {"sliding_window": 24},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk", [None, 32])
def test_sliced_head_is_the_models_own(kind, chunk):
    model, ids = tiny(kind, **KINDS[kind]), random_ids(96)
    scorer = checked(model, chunk=chunk)
    assert scorer.manner.split
    assert scorer.token_nll(ids)[1:] == pytest.approx(plain_nll(model, ids), abs=1e-4)


PLAIN = ["llama", "mixtral", "qwen3", "gpt_neox", "phi3", "mistral", "gemma3_text"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tiles_are_used_only_if_the_head_is_a_plain_matrix(kind, dtype):
    """A cap of 100 hides from bfloat16 logits of usual size, and is found all the
    same; the numbers are the model's own either way."""
    changes = KINDS[kind] | ({"final_logit_softcapping": 100.0} if kind == "gemma2" else {})
    model, ids = tiny(kind, dtype=dtype, **changes), random_ids(96)
    scorer = checked(model, columns=48)  # 128 entries: two whole tiles and a part
    assert (scorer.manner.columns is not None) == (kind in PLAIN)
    near = 1e-4 if dtype == torch.float32 else 0.02
    assert scorer.token_nll(ids)[1:] == pytest.approx(plain_nll(model, ids), abs=near)


def test_tiles_over_many_slices_of_tokens(monkeypatch):
    from ropext.evaluation import forward

    monkeypatch.setattr(forward, "TILE_TOKENS", 20)
    for bias in (False, True):
        model, ids = tiny(), random_ids(LENGTH)
        if bias:
            model.lm_head.bias = torch.nn.Parameter(torch.linspace(-3, 3, VOCABULARY))
        scorer = checked(model, chunk=64, columns=50)
        assert scorer.manner.columns == 50
        assert scorer.token_nll(ids)[1:] == pytest.approx(plain_nll(model, ids), abs=5e-5)


def test_a_wrapped_head_is_not_taken_for_its_matrix():
    model, ids = tiny(), random_ids(96)
    model.lm_head.register_forward_hook(lambda module, args, output: output * 0.5)
    scorer = checked(model, columns=64)
    assert scorer.manner.columns is None
    assert scorer.token_nll(ids)[1:] == pytest.approx(plain_nll(model, ids), abs=5e-5)


def test_a_model_without_its_soft_cap_gives_other_losses():
    """Without the cap the numbers are others: the test above can fail."""
    model, ids = tiny("gemma2", **KINDS["gemma2"]), random_ids(96)
    hidden = model.model(input_ids=torch.as_tensor(ids).long()[None]).last_hidden_state[0]
    bare = F.cross_entropy(
        model.lm_head(hidden)[:-1], torch.as_tensor(ids[1:]).long(), reduction="none"
    )
    assert np.abs(bare.numpy() - plain_nll(model, ids)).max() > 0.1


def test_a_body_that_the_forward_does_not_call_falls_back_to_whole_chunks():
    model, ids = tiny(), random_ids(96)
    # The forward adds something to the logits that depends on the input ids themselves.
    own = model.forward

    def forward(input_ids=None, **kwargs):
        output = own(input_ids=input_ids, **kwargs)
        output.logits = output.logits + 3.0 * F.one_hot(input_ids, VOCABULARY)
        return output

    model.forward = forward
    scorer = checked(model)
    assert not scorer.manner.split
    assert scorer.token_nll(ids)[1:] == pytest.approx(plain_nll(model, ids), abs=5e-5)


def test_a_slice_has_the_size_that_the_budget_allows():
    assert slice_for(int(HEAD_BYTES * 1000 * 512), 1000) == 512
    assert slice_for(int(HEAD_BYTES * 1000 * 511), 1000) == 256
    assert slice_for(1, 1000) == 16


def test_token_nll_is_right_for_any_length():
    model, scorer = tiny(), checked(tiny())
    for count in (1, 2, 15, 16, 17, 33):
        ids = random_ids(count)
        assert len(scorer.token_nll(ids)) == count
        if count > 1:
            assert scorer.token_nll(ids)[1:] == pytest.approx(plain_nll(model, ids), abs=5e-5)


def test_half_precision_is_summed_in_float32():
    model, ids = tiny(dtype=torch.bfloat16), random_ids(96)
    assert checked(model).token_nll(ids)[1:] == pytest.approx(plain_nll(model, ids), abs=0.15)


def test_logits_that_are_not_numbers_stop_with_the_place():
    model = tiny()
    model.model.embed_tokens.weight.data[77] = float("nan")
    scorer = TokenScorer(model, ReadingMode(None, 16))
    ids = random_ids(64)
    ids[ids == 77] = 78
    scorer.token_nll(ids)
    ids[40] = 77
    # A masked position times not-a-number is not a number: the message already names the first
    # token.
    with pytest.raises(NanInLogits, match=r"not finite at token 1$"):
        scorer.token_nll(ids)
