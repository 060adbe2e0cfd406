"""ALiBi's slopes are scaled in memory and in eval: against stock whose own slopes are replaced by
literal ones."""

import json

import pytest
import torch
from command_line import run
from small_tokenizer import make_tokenizer

import ropext
from ropext.base.errors import UnsupportedModel, UsageError
from ropext.families import schemes
from ropext.models.patching import apply_config, unpatch
from ropext.planning import InMemory
from ropext.scaling.tables import growth

CONTEXT, FACTOR = 64, 4
# 2**(-8h/H) of Press et al. (2022) by head; of six, BLOOM appends every other one of eight and MPT
# takes every other one of eight first.
OF_FOUR = [2.0**-k for k in (2, 4, 6, 8)]
OF_SIX = [2.0**-k for k in (2, 4, 6, 8, 1, 3)]
NTK_OF_FOUR = [4.0 ** (-k / 3) for k in (0, 1, 2, 3)]
NTK_OF_SIX = [4.0 ** (-k / 5) for k in (1, 3, 4, 5, 0, 2)]  # by the order of the slopes


def tiny(kind, heads=4, attention=None):
    import transformers as hf

    torch.manual_seed(0)
    width = 8 * heads
    if kind == "bloom":
        config = hf.BloomConfig(
            vocab_size=300, hidden_size=width, n_layer=2, n_head=heads, seq_length=CONTEXT
        )
        config._attn_implementation = attention
        model = hf.BloomForCausalLM(config)
    elif kind == "mpt":
        config = hf.MptConfig(
            vocab_size=300, d_model=width, n_layers=2, n_heads=heads, max_seq_len=CONTEXT
        )
        config._attn_implementation = attention
        model = hf.MptForCausalLM(config)
    else:
        config = hf.FalconConfig(
            vocab_size=300,
            hidden_size=width,
            num_hidden_layers=2,
            num_attention_heads=heads,
            alibi=True,
            new_decoder_architecture=False,
            max_position_embeddings=CONTEXT,
        )
        config._attn_implementation = attention
        model = hf.FalconForCausalLM(config)
    for weight in model.parameters():  # so that attention looks at its input
        weight.data *= 4 if weight.dim() > 1 else 1
    return model.eval()


def literal(kind, slopes, patch):
    """Put slopes into stock's own code."""
    from transformers.models.bloom import modeling_bloom
    from transformers.models.falcon import modeling_falcon
    from transformers.models.mpt import modeling_mpt

    slopes = torch.tensor(slopes)
    if kind == "bloom" and hasattr(modeling_bloom, "_get_alibi_slopes"):
        patch.setattr(modeling_bloom, "_get_alibi_slopes", lambda *_: slopes)
    elif kind == "mpt":

        def build(heads, length, alibi_bias_max=8, device=None):
            return slopes[:, None, None] * torch.arange(1 - length, 1)

        patch.setattr(modeling_mpt, "build_mpt_alibi_tensor", build)
    else:

        def build(mask, heads, dtype):
            at = ((mask.cumsum(-1) - 1) * mask)[:, None, :]
            return (slopes[None, :, None] * at).reshape(-1, 1, mask.shape[1]).to(dtype)

        # Older transformers builds it in BLOOM as in Falcon.
        patch.setattr(modeling_falcon, "build_alibi_tensor", build)
        patch.setattr(modeling_bloom, "build_alibi_tensor", build, raising=False)


def logits(model, length, padded=0):
    ids = torch.arange(2 * length).reshape(2, length) % 250
    mask = torch.ones_like(ids)
    mask[0, :padded] = 0
    with torch.no_grad():
        return model(input_ids=ids, **({"attention_mask": mask} if padded else {})).logits[:, -4:]


@pytest.mark.parametrize(
    ("kind", "attention"),
    [("bloom", "eager"), ("mpt", "eager"), ("falcon", "eager"), ("falcon", "sdpa")],
)
def test_stock_with_literal_slopes_computes_the_same(kind, attention):
    model = tiny(kind, attention=attention)
    length = FACTOR * CONTEXT
    for method, scaled in (("interpolated", [1 / 4] * 4), ("ntk-alibi", NTK_OF_FOUR)):
        ropext.patch(model, method=method, factor=FACTOR)
        for padded in (0, 7):
            plain = tiny(kind, attention=attention)
            plain.config.max_seq_len = length
            with pytest.MonkeyPatch.context() as patch:
                # Falcon rounds its slopes and its bias to bfloat16 before ropext sees them.
                patch.setattr(torch.Tensor, "bfloat16", lambda own: own)
                ours = logits(model, length, padded)
                literal(kind, [a * b for a, b in zip(OF_FOUR, scaled, strict=True)], patch)
                wanted = logits(plain, length, padded)
            assert torch.allclose(ours, wanted, atol=1e-4, rtol=1e-4)
            with pytest.MonkeyPatch.context() as patch:
                literal(kind, OF_FOUR, patch)
                assert not torch.allclose(ours, logits(plain, length, padded), atol=1e-3)


@pytest.mark.parametrize("kind", ["bloom", "mpt", "falcon"])
def test_heads_that_are_no_power_of_two_are_taken_by_their_slopes(kind):
    model, plain = tiny(kind, heads=6), tiny(kind, heads=6)
    ropext.patch(model, method="ntk-alibi", factor=FACTOR)
    plain.config.max_seq_len = FACTOR * CONTEXT
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "bfloat16", lambda own: own)
        rows = {padded: logits(model, 150, padded) for padded in (0, 149)}  # with one token, too
        scaled = [a * b for a, b in zip(OF_SIX, NTK_OF_SIX, strict=True)]
        literal(kind, scaled, patch)
        for padded, ours in rows.items():
            assert torch.allclose(ours[1], logits(plain, 150, padded)[1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["bloom", "mpt", "falcon"])
def test_a_factor_of_one_and_taking_it_back_are_stock(kind):
    model = tiny(kind)
    stock, config = logits(model, CONTEXT), model.config.to_dict()
    found = schemes.read_positions(config)
    for method in ("interpolated", "ntk-alibi"):
        apply_config(model, config, InMemory(growth(found, method, found.context)))
        assert torch.equal(logits(model, CONTEXT), stock)
    ropext.patch(model, method="interpolated", factor=FACTOR)
    assert not torch.equal(logits(model, CONTEXT), stock)
    ropext.patch(model, method="ntk-alibi", factor=FACTOR)  # a second time adds nothing
    twice = logits(model, CONTEXT)
    assert torch.equal(logits(ropext.patch(tiny(kind), factor=FACTOR), CONTEXT), twice)
    assert torch.equal(logits(unpatch(model), CONTEXT), stock)


def test_a_step_on_cached_keys_is_that_of_the_whole():
    for kind in ("bloom", "mpt", "falcon"):
        model = ropext.patch(tiny(kind), method="ntk-alibi", factor=FACTOR)
        ids = torch.arange(60)[None]
        with torch.no_grad():
            whole = model(input_ids=ids).logits[:, -1]
            before = model(input_ids=ids[:, :-1], use_cache=True).past_key_values
            step = model(input_ids=ids[:, -1:], past_key_values=before).logits[:, -1]
        assert torch.allclose(step, whole, atol=1e-4, rtol=1e-4)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    path, tokenizer = tmp_path_factory.mktemp("slopes"), make_tokenizer()
    for kind in ("bloom", "mpt"):
        tiny(kind).save_pretrained(path / kind)
        tokenizer.save_pretrained(path / kind)
    rows = [{"text": "the quick brown fox jumps over the lazy dog " * 60 + str(k)} for k in (1, 2)]
    (path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("kind", ["bloom", "mpt"])
def test_eval_reads_plain_and_scaled_slopes_and_the_base(place, kind):
    from transformers import AutoModelForCausalLM

    ropext.evaluate(
        place / kind,
        place / f"{kind}-run",
        method=["interpolated", "ntk-alibi"],
        factor=[2, FACTOR],
        data=str(place / "data.jsonl"),
        lengths=[CONTEXT, FACTOR * CONTEXT],
    )
    results = json.loads((place / f"{kind}-run" / "results.json").read_text())
    scaled = [
        f"{method}-{factor}x" for method in ("interpolated", "ntk-alibi") for factor in (2, 4)
    ]
    assert list(results["variants"]) == ["base", "untouched", *scaled]
    model = AutoModelForCausalLM.from_pretrained(place / kind)
    assert model.config.to_dict().get("max_seq_len", CONTEXT) == CONTEXT


@pytest.mark.parametrize("options", [{}, {"method": ["interpolated"], "factor": [2]}])
def test_lengths_that_stock_mpt_does_not_read_are_refused(place, options):
    lengths = [CONTEXT, FACTOR * CONTEXT]
    with pytest.raises(UsageError, match=r"lengths=256: .*; extend further, or give shorter"):
        ropext.evaluate(place / "mpt", data=str(place / "data.jsonl"), lengths=lengths, **options)


def test_eval_refuses_a_context_far_above_the_length_of_mpt_but_not_of_bloom(place, capsys):
    words = ["eval", place / "bloom", "--data", place / "data.jsonl", "--dry-run"]
    code, said = run(*words, "--context", 6 * CONTEXT, capsys=capsys)  # bounded by nothing
    assert (code, said.err.count("Traceback")) == (0, 0)
    words[1] = place / "mpt"
    code, said = run(*words, "--context", 6 * CONTEXT, capsys=capsys)
    assert code == 2
    assert "a quarter of it is beyond the 64 tokens that the config allows" in said.err


def test_a_config_without_a_length_asks_for_it(place, tmp_path, capsys):
    import shutil

    lost = shutil.copytree(place / "bloom", tmp_path / "lost")
    config = json.loads((lost / "config.json").read_text())
    del config["seq_length"]
    (lost / "config.json").write_text(json.dumps(config))
    words = ["eval", lost, "--method", "interpolated", "--factor", 4, "--dry-run"]
    words += ["--data", place / "data.jsonl"]
    code, said = run(*words, capsys=capsys)
    assert (code, said.err.count("\n")) == (2, 1)
    assert "lost states no length; give --context N, the tokens it was trained on" in said.err
    code, said = run(*words, "--context", CONTEXT, "--lengths", "256", capsys=capsys)
    assert code == 0


def test_a_stock_checkpoint_is_refused_in_words(place, tmp_path, capsys):
    for kind in ("bloom", "mpt"):
        for words in (("plan",), ("extend", "-o", tmp_path / "out")):
            code, said = run(
                words[0], place / kind, *words[1:], "--method", "interpolated", "--factor", 4,
                capsys=capsys,
            )  # fmt: skip
            assert code == 2
            assert "ropext.patch and eval --method scale its slopes in memory" in said.err
    model = ropext.patch(tiny("bloom"), factor=FACTOR)
    with pytest.raises(UnsupportedModel, match="no config and no weight can carry others"):
        ropext.save(model, tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_an_option_that_does_not_fit_is_refused_in_one_sentence():
    with pytest.raises(UsageError, match="known for that: ntk-alibi, interpolated"):
        ropext.patch(tiny("mpt"), method="ntk", factor=FACTOR)
    with pytest.raises(UsageError, match=r"^theta is for rotary embeddings; this model has ALiBi"):
        ropext.patch(tiny("mpt"), factor=FACTOR, theta=1e6)
    model = tiny("bloom")
    del model.config.seq_length
    with pytest.raises(UsageError, match="context=N, the tokens it was trained on"):
        ropext.patch(model, factor=FACTOR)
    stated = ropext.patch(model, factor=FACTOR, context=CONTEXT)
    assert torch.equal(logits(stated, 99), logits(ropext.patch(tiny("bloom"), factor=FACTOR), 99))
