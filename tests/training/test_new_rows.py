"""The new rows of a position table are trained and nothing else, by the bytes that are written."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from small_tokenizer import make_tokenizer
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    OPTConfig,
    OPTForCausalLM,
)

import ropext
from ropext.base.errors import InputError, UsageError
from ropext.files.checkpoint.provenance import read_record
from ropext.options.training import Finetune
from ropext.training import models
from ropext.training.new_rows import NewRows
from ropext.training.origin import open_origin

pytestmark = pytest.mark.slow

CONTEXT, TARGET = 32, 128
OPT_TABLE, GPT_TABLE = "model.decoder.embed_positions.weight", "transformer.wpe.weight"
SHORT = {"steps": 2, "batch_tokens": 256, "eval_documents": 2}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Write an OPT in bfloat16 and shards, two rows in front of its first position, and a GPT-2."""
    path, tokenizer = tmp_path_factory.mktemp("rows"), make_tokenizer()
    torch.manual_seed(0)
    keys = {"hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 64, "num_hidden_layers": 2}
    keys |= {"max_position_embeddings": CONTEXT, "num_attention_heads": 2}
    opt = OPTForCausalLM(OPTConfig(vocab_size=len(tokenizer), **keys)).bfloat16()
    opt.save_pretrained(path / "opt", max_shard_size="20KB")
    keys = {"n_positions": CONTEXT, "n_embd": 32, "n_layer": 2, "n_head": 2}
    GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), **keys)).save_pretrained(path / "gpt2")
    for name, method in (("opt", "linear"), ("gpt2", "copy")):
        tokenizer.save_pretrained(path / name)
        ropext.extend(path / name, path / f"{name}-long", method=method, factor=4, no_verify=True)
    words, rng = (
        np.array(["the", "quick", "brown", "fox", "jumps", "over", "lazy", "dog"]),
        np.random.default_rng(0),
    )
    rows = [{"text": " ".join(rng.choice(words, 200)) + f" {k}"} for k in range(20)]
    (path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def finetune(place, name, out, **options):
    data, long = place / "data.jsonl", place / f"{name}-long"
    return ropext.finetune(long, data, place / out, **SHORT | options).output


def weights(directory):
    found = {}
    for file in sorted(directory.glob("*.safetensors")):
        found |= load_file(file)
    return found


def test_the_new_rows_alone_are_other_bytes(place):
    out = finetune(place, "opt", "opt-tuned")
    before, after = weights(place / "opt-long"), weights(out)
    assert before.keys() == after.keys()
    for name in before.keys() - {OPT_TABLE}:
        assert torch.equal(before[name], after[name]), name
    old = [0, 1, *range(2, 2 + TARGET, 4)]  # two in front, and row i at 4 i
    last = TARGET + 1  # the row of the last position, which predicts nothing
    same = (before[OPT_TABLE] == after[OPT_TABLE]).all(1)
    assert same.nonzero()[:, 0].tolist() == [*old, last]
    assert after[OPT_TABLE].dtype == torch.bfloat16
    proof = read_record(out).proof
    assert (proof["rows_bit_exact"], proof["transformers"][0]) == (len(old), "5")
    assert f"{TARGET - CONTEXT} new rows of" in (out / "README.md").read_text("utf-8")
    assert ropext.verify(out, against=str(place / "opt"), deep=True).passed
    done = ropext.evaluate(out, data=str(place / "data.jsonl"), lengths=[TARGET])
    assert list(done.results["variants"]) == ["base", "tuned"]


def test_a_lora_with_new_rows_keeps_the_old_rows(place):
    out = finetune(place, "gpt2", "gpt2-tuned", train="both")
    before, after = weights(place / "gpt2-long"), weights(out)
    same = (before[GPT_TABLE] == after[GPT_TABLE]).all(1)
    assert same.nonzero()[:, 0].tolist() == [*range(CONTEXT), TARGET - 1]
    name = "transformer.h.0.attn.c_attn.weight"
    assert not torch.equal(before[name], after[name])
    assert ropext.verify(out).passed
    loaded = AutoModelForCausalLM.from_pretrained(out / "base")
    import peft

    joined = peft.PeftModel.from_pretrained(loaded, str(out / "adapter")).eval()
    ids = torch.arange(TARGET)[None]
    with torch.no_grad():
        merged = AutoModelForCausalLM.from_pretrained(out)(input_ids=ids).logits
        assert torch.allclose(joined(input_ids=ids).logits, merged, atol=1e-5)


def test_a_lora_alone_has_a_control_with_the_old_rows(place):
    out = finetune(place, "gpt2", "gpt2-lora", train="lora", control=True)
    assert torch.equal(weights(out)[GPT_TABLE], weights(place / "gpt2-long")[GPT_TABLE])
    numbers = json.loads((out / "training" / "numbers.json").read_text())
    assert {"base", "untuned", "tuned", "control"} <= numbers.keys()


def test_gradients_of_old_rows_are_zero(place):
    origin = open_origin(str(place / "opt-long"))
    options = Finetune(train="new-rows")
    model, no_lora = (
        models.load_to_train(origin.snapshot, options),
        SimpleNamespace(rank=None, alpha=None),
    )
    new_rows = NewRows(origin.table)
    joined = models.add_adapter(model, options, no_lora, new_rows)
    ((name, rows),) = new_rows.tables(joined)
    assert name == OPT_TABLE.removesuffix(".weight")
    ids = torch.arange(TARGET)[None]
    joined(input_ids=ids, labels=ids).loss.backward()
    moved = rows.grad.abs().sum(1) > 0
    assert moved.nonzero()[:, 0].tolist() == [2 + k for k in range(TARGET - 1) if k % 4]
    assert [p for p in joined.parameters() if p.requires_grad] == [rows]


def test_steps_below_the_rounding_of_bfloat16_are_not_lost(place):
    out = finetune(place, "opt", "opt-bfloat16", dtype="bfloat16", learning_rate=1e-6)
    (rows,) = load_file(out / "adapter" / "adapter_model.safetensors").values()
    moved = (rows.float() != weights(place / "opt-long")[OPT_TABLE].float()).all(1)
    assert moved.nonzero()[:, 0].tolist() == [2 + k for k in range(TARGET - 1) if k % 4]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"control": True}, 'add train="lora"'),
        ({"rank": 4}, 'rank goes with a LoRA; add train="both"'),
    ],
)
def test_options_of_another_kind_are_refused(place, options, said):
    with pytest.raises(UsageError, match=said):
        finetune(place, "gpt2", "never", **options)


def test_a_model_without_new_rows_is_refused(place, tmp_path):
    with pytest.raises(UsageError, match="is for a learned table of positions"):
        ropext.finetune(rotary(tmp_path), place / "data.jsonl", tmp_path / "x", train="new-rows")
    with pytest.raises(InputError, match="was not extended by ropext"):
        ropext.finetune(place / "gpt2", place / "data.jsonl", tmp_path / "x")
    ropext.extend(place / "gpt2", tmp_path / "odd", method="linear", target=80, no_verify=True)
    with pytest.raises(InputError, match="its table keeps 16 of 32 old rows"):
        ropext.finetune(tmp_path / "odd", place / "data.jsonl", tmp_path / "x")


def rotary(path):
    return ropext.extend("ropext://demo", path / "rotary", method="yarn", factor=2).output
