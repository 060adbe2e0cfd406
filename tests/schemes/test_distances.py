"""Relative positions are extended by a key: against stock's buckets, and those worked by hand."""

import json
import math
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from command_line import run

import ropext
from ropext.base.errors import InputError, ProofFailed, UnsupportedModel, UsageError
from ropext.families import schemes
from ropext.families.config import census
from ropext.families.schemes import DISTANCES, OTHERS
from ropext.models.patching import unpatch
from ropext.scaling.tables import starts

T5 = {"vocab_size": 99, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
T5_TEXT = {"vocab_size": 99, "hidden_size": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2}
T5_TEXT |= {"num_heads": 2}
PATCHES = {"hidden_size": 16, "patch_embed_hidden_size": 16, "d_kv": 8, "d_ff": 32, "seq_len": 16}
PATCHES |= {"num_hidden_layers": 1, "num_attention_heads": 2}
DEBERTA = {
    "vocab_size": 99,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "relative_attention": True,
    "position_biased_input": False,
    "pos_att_type": ["p2c", "c2p"],
    "position_buckets": 16,
    "max_position_embeddings": 40,
    "share_att_key": True,
}
XLNET = {"vocab_size": 99, "d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 32, "clamp_len": 20}
MODELS = {  # class, keys, and the key that is raised
    "t5": ("T5ForConditionalGeneration", T5, "relative_attention_max_distance"),
    "mt5": ("MT5ForConditionalGeneration", T5, "relative_attention_max_distance"),
    "umt5": ("UMT5ForConditionalGeneration", T5, "relative_attention_max_distance"),
    "longt5": ("LongT5ForConditionalGeneration", T5, "relative_attention_max_distance"),
    "switch_transformers": (
        "SwitchTransformersForConditionalGeneration",
        T5 | {"num_experts": 2},
        "relative_attention_max_distance",
    ),
    "pix2struct": (
        "Pix2StructForConditionalGeneration",
        {"text_config": T5_TEXT, "vision_config": PATCHES},
        "relative_attention_max_distance",
    ),
    "deberta-v2": ("DebertaV2ForMaskedLM", DEBERTA, "max_position_embeddings"),
    "xlnet": ("XLNetLMHeadModel", XLNET, "clamp_len"),
}
QUICK = ("t5", "deberta-v2", "xlnet")  # each extension is proved by a process of its own
EACH = [own if own in QUICK else pytest.param(own, marks=pytest.mark.slow) for own in MODELS]


def tiny(model_type):
    import transformers

    name, keys, _ = MODELS[model_type]
    cls = getattr(transformers, name)
    torch.manual_seed(0)
    return cls(cls.config_class(**keys)).eval()


def beginnings(line):
    """Return the places at which a list of codes by distance changes."""
    return [0] + [d for d in range(1, len(line)) if bool((line[d] != line[d - 1]).any())]


def told_by_stock(model):
    """Return the codes of stock's own functions for each distance up to one beyond the key, by
    module."""
    from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position

    kind = model.config.model_type
    if kind == "deberta-v2":
        modules = [m for m in model.modules() if type(m).__name__ == "DisentangledSelfAttention"]
        return [
            beginnings(
                make_log_bucket_position(
                    torch.arange(m.max_relative_positions + 2),
                    m.position_buckets,
                    m.max_relative_positions,
                ).long()
            )
            for m in modules
        ]
    if kind == "xlnet":
        length = model.config.clamp_len + 2
        table = model.transformer.relative_positional_encoding(length, length)
        return [beginnings(table[: length + 1, 0].flip(0))]
    found = []
    for module in model.modules():
        if getattr(module, "has_relative_attention_bias", False) and "Local" not in str(
            type(module)
        ):
            heads = module.relative_attention_bias.embedding_dim
            count = module.relative_attention_bias.num_embeddings
            codes = torch.arange(count).float()[:, None].expand(count, heads)
            held, module.relative_attention_bias.weight.data = (
                module.relative_attention_bias.weight.data,
                codes,
            )
            length = module.relative_attention_max_distance + 2
            found.append(beginnings(module.compute_bias(length, length)[0, 0, -1].flip(0)))
            module.relative_attention_bias.weight.data = held
    return found


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Make (base, extension) of a type once."""
    root, done = tmp_path_factory.mktemp("distances"), {}

    def of(model_type):
        if model_type not in done:
            base = root / model_type
            tiny(model_type).save_pretrained(base)
            (base / "tokenizer_config.json").write_text('{"model_max_length": 64}')
            done[model_type] = base, ropext.extend(base, root / f"{model_type}-4x", factor=4)
        return done[model_type]

    return of


@pytest.mark.parametrize("model_type", EACH)
def test_stock_tells_distances_apart_as_the_formula_predicts(made, model_type):
    import transformers

    base, extended = made(model_type)
    cls = getattr(transformers, MODELS[model_type][0])
    ends = []
    for place in (base, extended.output):
        found = schemes.read_positions(json.loads((place / "config.json").read_text()))
        formulas = [list(starts(found, causal=causal)) for causal in (False, True)]
        told = told_by_stock(cls.from_pretrained(place))
        assert told
        assert all(own in formulas for own in told)
        ends.append(max(own[-1] for own in told))
    assert ends[1] > 3 * ends[0]
    proved = extended.written.proof["forward"]
    assert f"{ends[1]} or more apart look alike" in proved


@pytest.mark.parametrize("model_type", EACH)
def test_extending_changes_one_key_and_no_byte_of_a_weight(made, model_type):
    base, extended = made(model_type)
    key = MODELS[model_type][2]
    before, after = (
        json.loads((place / "config.json").read_text()) for place in (base, extended.output)
    )
    if model_type == "pix2struct":
        assert after["vision_config"] == before["vision_config"]
        before, after = before["text_config"], after["text_config"]
    assert {name for name in after if after[name] != before.get(name)} == {key}
    assert after[key] == 4 * extended.plan.context
    weights = "model.safetensors"
    assert (base / weights).read_bytes() == (extended.output / weights).read_bytes()
    if model_type in QUICK:
        verified = ropext.verify(extended.output, against=str(base), deep=True)
        assert verified.passed
        assert "rows" not in {check.what for check in verified.checks}  # it has no table


def test_the_borders_of_buckets_equal_those_worked_by_hand():
    t5 = schemes.read_positions({"model_type": "t5"})
    # 32 buckets, half for each side: 8 exact, then 8 of a factor 16**(1/8), the root of 2.
    assert starts(t5)[8:] == [8, 12, 16, 23, 32, 46, 64, 91]
    # To 512 the factor is 64**(1/8) = 2**(3/4); to 2,048 it is 2, and borders are whole numbers.
    assert starts(replace(t5, context=512))[8:] == [8, 14, 23, 39, 64, 108, 182, 305]
    assert starts(replace(t5, context=2048))[8:] == [8, 16, 32, 64, 128, 256, 512, 1024]
    assert starts(t5, causal=True)[-1] == math.ceil(16 * 8 ** (15 / 16)) == 113
    # DeBERTa-v3: 256 to each side; 256 tokens are 128 + ceil(127 ln 2 / ln (511/128)) = 192.
    v3 = {"model_type": "deberta-v2", "relative_attention": True, "position_biased_input": False}
    v3 = schemes.read_positions(v3 | {"position_buckets": 256, "max_relative_positions": -1})
    assert (v3.key, v3.context) == ("max_position_embeddings", 512)
    assert sum(start <= 256 for start in starts(v3)) - 1 == 192
    assert starts(v3)[-1] == 512


def test_stock_tells_far_tokens_apart_without_ropext(made):
    base, extended = made("t5")
    code = (
        "import sys; sys.modules['ropext'] = None\n"
        "import torch, transformers\n"
        "m = transformers.T5EncoderModel.from_pretrained(sys.argv[1])\n"
        "a = m.encoder.block[0].layer[0].SelfAttention\n"
        "b = a.compute_bias(401, 401)[0, :, 400]\n"
        "print(torch.equal(b[:, 400 - 100], b[:, 0]))\n"
    )
    said = [
        subprocess.run(
            [sys.executable, "-c", code, place], check=True, capture_output=True, text=True
        ).stdout.strip()
        for place in (base, extended.output)
    ]
    assert said == ["True", "False"]


@pytest.mark.parametrize("model_type", QUICK)
def test_a_model_in_memory_computes_as_the_checkpoint(made, model_type):
    base, extended = made(model_type)
    cls = type(tiny(model_type))
    model, stored = cls.from_pretrained(base).eval(), cls.from_pretrained(extended.output).eval()
    ids = 16 + torch.arange(200)[None] % 80
    inputs = {"input_ids": ids} | ({"decoder_input_ids": ids} if model_type == "t5" else {})
    with torch.no_grad():
        before = model(**inputs).logits
        patched = ropext.patch(model, factor=4)(**inputs).logits
        assert torch.equal(patched, stored(**inputs).logits)
        assert not torch.equal(patched, before)
        assert torch.equal(unpatch(model)(**inputs).logits, before)


def test_more_than_is_read_is_not_claimed(tmp_path):
    from transformers import XLNetConfig, XLNetLMHeadModel

    model = XLNetLMHeadModel(XLNetConfig(**XLNET | {"clamp_len": 1000}))
    model.save_pretrained(tmp_path / "base")
    done = ropext.extend(tmp_path / "base", tmp_path / "out", factor=4)
    said = done.written.proof["forward"]
    assert "reads 2048 tokens" in said
    assert said.endswith("; it distinguishes distances up to 2046, as planned")


def test_a_key_that_stock_does_not_read_gets_no_name(made, tmp_path, monkeypatch):
    from ropext.files.schemes import plan

    monkeypatch.setattr(plan, "lengthened", lambda config, *_: dict(config))
    with pytest.raises(ProofFailed, match="apart up to a distance of 91, which is not what"):
        ropext.extend(made("t5")[0], tmp_path / "out", factor=4)
    assert not (tmp_path / "out").exists()


def test_verify_finds_another_key_and_another_weight(made, tmp_path):
    import shutil

    base, extended = made("xlnet")
    bad = shutil.copytree(extended.output, tmp_path / "bad")
    config = json.loads((bad / "config.json").read_text()) | {"clamp_len": 60}
    (bad / "config.json").write_text(json.dumps(config))
    said = [check.sentence for check in ropext.verify(bad).failures()]
    assert any("clamp_len gives 60 tokens, but ropext.json states 80" in own for own in said)
    shutil.copy(extended.output / "config.json", bad)
    data = bytearray((bad / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (bad / "model.safetensors").write_bytes(data)
    assert not ropext.verify(bad, against=str(base), deep=True).passed


def test_plan_and_inspect_name_the_position_from_which_all_look_alike(made, capsys):
    base, _ = made("t5")
    code, said = run("plan", base, "--factor", 4, capsys=capsys)
    assert code == 0
    assert "128 -> 512 tokens by max-distance" in said.out
    assert "tokens 91 (in a decoder 113) or more apart look alike" in said.out
    assert "after it those 305 (in a decoder 413) or more" in said.out
    code, said = run("inspect", base, capsys=capsys)
    assert (
        "all the same from 91 (in a decoder 113) on; relative_attention_max_distance 128"
        in said.out
    )


def test_every_such_type_of_the_census_has_a_row_or_a_reason():
    kinds = ("buckets", "disentangled", "transformer-xl")
    types = {name for name, known in census().items() if known.scheme in kinds}
    assert types <= set(DISTANCES) | set(OTHERS)
    for name in types:
        found = schemes.read_positions({"model_type": name})
        assert bool(found.key) == (name in DISTANCES and name not in ("deberta-v2", "xlnet"))
        assert found.key or name in schemes.refusal(found)


@pytest.mark.parametrize(
    ("config", "words", "error", "said"),
    [
        ({"model_type": "deberta"}, {}, UnsupportedModel, "longer, it needs new rows"),
        ({"model_type": "deberta-v2"}, {}, UnsupportedModel, "position_buckets is above 0"),
        (
            {"model_type": "deberta-v2"} | DEBERTA | {"position_biased_input": True},
            {},
            UnsupportedModel,
            "position_biased_input false",
        ),
        ({"model_type": "xlnet", "clamp_len": -1}, {}, UnsupportedModel, "nothing is clamped"),
        ({"model_type": "t5"}, {"method": "yarn"}, UsageError, "has T5's relative buckets; known"),
        ({"model_type": "t5"}, {"method": "linear"}, UsageError, "known for that: max-distance"),
        ({"model_type": "bert"}, {"method": "clamp"}, UsageError, "known for that: linear, copy"),
        ({"model_type": "t5"}, {"theta": 1e6}, UsageError, "theta is for rotary embeddings"),
        (
            {"model_type": "t5", "relative_attention_max_distance": 16},
            {},
            UnsupportedModel,
            "extended by its relative_attention_max_distance where that is above half",
        ),
        (
            {"model_type": "t5", "relative_attention_num_buckets": "32"},
            {},
            InputError,
            "relative_attention_num_buckets must be a whole number",
        ),
        ({"model_type": "xlnet", "clamp_len": 2.5}, {}, InputError, "clamp_len must be a whole"),
    ],
)
def test_a_model_without_that_key_is_refused_in_one_sentence(config, words, error, said, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(error, match=said) as raised:
        ropext.plan(tmp_path, factor=4, **words)
    assert raised.value.exit_code == 2
    assert "\n" not in str(raised.value)


def test_evaluate_and_finetune_refuse_models_of_distances(made):
    for model_type in ("t5", "xlnet"):  # a DeBERTa is read: tests/evaluation/test_masked.py
        with pytest.raises(UnsupportedModel, match=r" uses .*plan(,| and) extend"):
            ropext.evaluate(made(model_type)[1].output, data=["a text"])
    with pytest.raises(UnsupportedModel, match="uses T5's relative buckets"):
        ropext.finetune(made("t5")[1].output, ["a text"], "nowhere")
