"""Learned position tables, evaluated: against a literal loop over stock models on the disk."""

import json

import pytest
import torch
from safetensors.torch import load_file
from small_tokenizer import make_tokenizer
from tiny_checkpoints import write_documents
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

import ropext
from ropext.base.errors import UsageError
from ropext.evaluation.lineup import line_up
from ropext.models import patching
from ropext.options.evaluate import Evaluate
from ropext.pipeline.public import evaluate

CONTEXT, TARGET, TAIL = 32, 128, 8
KEYS = {"n_embd": 32, "n_layer": 2, "n_head": 2}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Write a GPT-2 of 32 positions, loud enough that its rows are heard, and each method's
    extension."""
    path = tmp_path_factory.mktemp("tables")
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    model = GPT2LMHeadModel(GPT2Config(n_positions=CONTEXT, vocab_size=len(tokenizer), **KEYS))
    with torch.no_grad():
        for own in model.parameters():
            own.mul_(4)
    model.save_pretrained(path / "base")
    tokenizer.save_pretrained(path / "base")
    write_documents(path / "docs.jsonl", count=8)
    for method in ("linear", "copy"):
        ropext.extend(path / "base", path / method, method=method, factor=4, no_verify=True)
    return path


def asked(place, **changes):
    return {"data": str(place / "docs.jsonl"), "lengths": f"{CONTEXT},{TARGET}"} | changes


def nll(done, label, length):
    return done.results["variants"][label]["metrics"][f"tail_nll@{length}"]["value"]


def literal(model, place, length, window):
    """Compute the mean NLL of the last tokens before a length, each read by the stock model through
    windows of so many tokens with a stride of half."""
    tokenizer = AutoTokenizer.from_pretrained(place / "base")
    sums = 0.0
    for line in (place / "docs.jsonl").read_text().splitlines():
        ids = torch.tensor(tokenizer(json.loads(line)["text"]).input_ids)
        own = torch.full((TARGET,), torch.nan)
        begin, done = 0, 1
        while done < TARGET:
            part = ids[begin : min(begin + window, TARGET)].clone()
            part[0] = ids[0]  # a text that is cut begins with BOS, too
            logits = model(input_ids=part[None]).logits[0].log_softmax(-1)
            at = torch.arange(max(done, begin + 1), begin + len(part))
            own[at] = -logits[at - begin - 1, part[at - begin]]
            done, begin = begin + len(part), begin + window // 2
        sums += float(own[length - TAIL : length].double().sum())
    return sums / 8 / TAIL


@pytest.mark.parametrize("method", ["linear", "copy"])
def test_both_equal_stocks_reading_of_the_base_and_of_the_output(place, method):
    base, grown = (AutoModelForCausalLM.from_pretrained(place / own) for own in ("base", method))
    saved = evaluate(str(place / method), **asked(place))
    memory = evaluate(str(place / "base"), **asked(place, method=method, factor="4"))
    assert list(saved.results["variants"]) == ["base", "extended"]
    assert list(memory.results["variants"]) == ["base", f"{method}-4x"]
    for length in (CONTEXT, TARGET):
        short = literal(base, place, length, CONTEXT)
        whole = literal(grown, place, length, TARGET)
        for done in (saved, memory):
            assert nll(done, "base", length) == pytest.approx(short, abs=1e-5)
            assert nll(done, [*done.results["variants"]][1], length) == pytest.approx(
                whole, abs=1e-5
            )
    tax = saved.results["variants"]["extended"]["metrics"]["short_tax"]["value"]
    assert tax == 0 if method == "copy" else abs(tax) > 0.01


def test_a_patched_table_equals_the_checkpoints_and_unpatch_restores_it(place, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(place / "base")
    before = model.state_dict()["transformer.wpe.weight"].clone()
    grown = load_file(place / "linear" / "model.safetensors")["transformer.wpe.weight"]
    for method in ("copy", "linear"):  # the second replaces the first
        ropext.patch(model, method=method, factor=4)
    assert torch.equal(model.transformer.wpe.weight, grown)
    assert model.config.n_positions == TARGET
    ropext.save(model, tmp_path / "saved")
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    ids = torch.arange(TARGET)[None] % 90
    assert torch.equal(stock(input_ids=ids).logits, model(input_ids=ids).logits)
    assert ropext.verify(tmp_path / "saved").passed
    patching.unpatch(model)
    assert torch.equal(model.transformer.wpe.weight, before)
    assert model.config.n_positions == CONTEXT


def test_a_causal_mask_in_memory_grows_with_the_table():
    from transformers import GPTNeoConfig, GPTNeoForCausalLM

    keys = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "vocab_size": 64}
    kinds = [[["global", "local"], 1]]
    keys |= {"max_position_embeddings": 32, "window_size": 8, "attention_types": kinds}
    model = GPTNeoForCausalLM(GPTNeoConfig(**keys)).eval()
    ids = torch.arange(64)[None] % 60
    short = model(input_ids=ids[:, :32]).logits
    ropext.patch(model, method="copy", factor=2)
    assert torch.allclose(model(input_ids=ids).logits[:, :32], short, atol=1e-6)


def test_the_recorded_base_is_read_if_the_grown_table_lacks_old_rows(place, tmp_path):
    ropext.extend(place / "base", tmp_path / "odd", method="linear", target=80, no_verify=True)
    base, own = line_up(str(tmp_path / "odd"), None, Evaluate(data="any")).variants
    assert (base.snapshot.directory, base.config) == (place / "base", None)
    assert own.snapshot.directory == tmp_path / "odd"
    lone = line_up(str(place / "linear"), None, Evaluate(data="any", context=TARGET))
    assert (lone.context, [v.label for v in lone.variants]) == (TARGET, ["base", "untouched"])


def test_options_that_a_position_table_cannot_follow_are_refused(place):
    options = asked(place, method="linear", factor="2,4")
    with pytest.raises(UsageError, match="reads 64 tokens and no more"):
        evaluate(str(place / "base"), **options)
    with pytest.raises(UsageError, match=r"ends\); extend further"):
        evaluate(str(place / "copy"), **asked(place, lengths="256"))
    with pytest.raises(UsageError, match="has 32 rows"):
        evaluate(str(place / "base"), **asked(place, context=33))
    with pytest.raises(UsageError, match="known for that: linear, copy"):
        evaluate(str(place / "base"), **asked(place, method="yarn", factor="2"))
