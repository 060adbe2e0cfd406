"""A model that was trained, merged or scaled by hand after it was loaded is not called its base."""

import peft
import pytest
import torch
from small_models import tiny
from tiny_checkpoints import LENGTHS, write_checkpoint, write_documents
from transformers import AutoModelForCausalLM, AutoTokenizer

import ropext
from ropext.base.errors import UsageError
from ropext.models.patching import unpatch

LORA = {"r": 2, "target_modules": ["q_proj"], "init_lora_weights": False}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    path = tmp_path_factory.mktemp("intact")
    torch.set_num_threads(1)
    write_checkpoint(path / "model")
    write_documents(path / "docs.jsonl")
    return path


def loaded(place, **how):
    return AutoModelForCausalLM.from_pretrained(place / "model", **how)


def evaluate(model, place, **changes):
    asked = {"data": str(place / "docs.jsonl"), "lengths": LENGTHS, "max_docs": 8}
    tokenizer = AutoTokenizer.from_pretrained(place / "model")
    return ropext.evaluate(model, tokenizer=tokenizer, **asked, **changes)


def row(measured, label):
    return measured.results["variants"][label]["metrics"]


def train(model):
    """Train as a user's own loop does."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    ids = torch.arange(40)[None]
    for _ in range(3):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def refusal(place):
    return rf"changed since ropext.patch \(.+\), .* give base='{place / 'model'}', from which it"


def test_weights_that_were_trained_after_patch_are_not_the_base(place):
    model = ropext.patch(loaded(place), method="yarn", factor=4)
    train(model)
    with pytest.raises(UsageError, match=refusal(place)):
        evaluate(model, place)
    named = evaluate(model, place, base=str(place / "model"))
    alone = ropext.evaluate(place / "model", data=str(place / "docs.jsonl"), lengths=LENGTHS,
                            max_docs=8)  # fmt: skip
    for length in (64, 256):
        name = f"tail_nll@{length}"
        assert row(named, "base")[name]["value"] == row(alone, "base")[name]["value"]
    ropext.patch(model, method="pi", factor=2)  # which changes no weight
    with pytest.raises(UsageError, match=refusal(place)):
        evaluate(model, place)
    ropext.patch(unpatch(model), method="pi", factor=2)  # the trained model is the base now
    assert list(evaluate(model, place).models) == ["base", "untouched", "extended"]


@pytest.mark.parametrize("change", ["one byte", "a cast", "no name"])
def test_a_weight_that_changed_in_one_byte_is_found(place, change):
    model = ropext.patch(loaded(place), method="yarn", factor=4)
    sentence = refusal(place)
    with torch.no_grad():
        if change == "a cast":
            model.lm_head.to(torch.bfloat16)
            sentence = r"\(lm_head.weight was cast to torch.bfloat16; cast a model before ropext"
        else:
            model.model.layers[1].mlp.up_proj.weight.view(torch.uint8)[3, 5] ^= 1
    if change == "no name":
        model.config._name_or_path = ""
        sentence = r"up_proj.weight has other values\), .* give the checkpoint by base=$"
    with pytest.raises(UsageError, match=sentence):
        evaluate(model, place)


def test_an_adapter_changes_no_weight_until_it_is_merged(place):
    torch.manual_seed(0)
    how = peft.LoraConfig(modules_to_save=["lm_head"], **LORA)
    model = peft.get_peft_model(ropext.patch(loaded(place), method="yarn", factor=4), how)
    train(model)
    read = evaluate(model, place)
    assert list(read.models) == ["base", "untouched", "extended", "extended+adapter"]
    with pytest.raises(UsageError, match=refusal(place)):
        evaluate(model.merge_and_unload(), place)


def test_an_adapter_that_is_there_before_the_patch_may_be_trained(place):
    torch.manual_seed(0)
    model = peft.get_peft_model(loaded(place), peft.LoraConfig(**LORA))
    ropext.patch(model, method="yarn", factor=4)
    train(model)
    assert "extended+adapter" in evaluate(model, place).models


def scaled(model, names, factor=0.25):
    for name in names:
        model.model.rotary_emb._buffers[name] *= factor
    return model


def test_frequencies_that_were_scaled_by_hand_are_refused(place):
    sentence = r"^model.rotary_emb.inv_freq of this model was changed by hand"
    for call in (
        lambda model: evaluate(model, place),
        lambda model: evaluate(model, place, method="yarn", factor=4),
        lambda model: ropext.patch(model, method="yarn", factor=4),
    ):
        with pytest.raises(UsageError, match=sentence):
            call(scaled(loaded(place), ["inv_freq"]))
    patched = ropext.patch(loaded(place), method="yarn", factor=4)
    with pytest.raises(UsageError, match=sentence):
        evaluate(scaled(patched, ["inv_freq"], 1.01), place)


def test_a_cast_explains_other_frequencies_and_no_more(place):
    model = loaded(place).to(torch.bfloat16)
    assert model.model.rotary_emb.inv_freq.dtype == torch.bfloat16
    assert list(evaluate(model, place).models) == ["base", "untouched"]
    back = model.to(torch.float32)  # the digits do not come back
    with pytest.raises(UsageError, match="changed by hand"):
        evaluate(back, place)


LONGROPE = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}


@pytest.mark.parametrize(
    ("kind", "params", "length"),
    [
        ("dynamic", {"factor": 4.0}, 64),
        ("longrope", LONGROPE | {"original_max_position_embeddings": 64}, 256),
    ],
)
def test_frequencies_that_follow_the_length_are_known_by_the_original_ones(
    place, tmp_path, kind, params, length
):
    rope = {"rope_type": kind, "rope_theta": 10000.0} | params
    longer = write_checkpoint(
        tmp_path / "longer", rope_parameters=rope, max_position_embeddings=length
    )
    model = AutoModelForCausalLM.from_pretrained(longer)
    before = model.model.rotary_emb.inv_freq.clone()
    model(input_ids=torch.arange(200)[None] % 40)
    assert not torch.equal(model.model.rotary_emb.inv_freq, before)
    assert "base" in evaluate(model, place, context=64).models
    with pytest.raises(UsageError, match="original_inv_freq of this model was changed by hand"):
        evaluate(scaled(model, ["original_inv_freq"]), place, context=64)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("method", ["yarn", "ntk", "dynamic"])
def test_a_patched_model_that_is_cast_computes_the_same_as_the_saved_one(
    place, tmp_path, dtype, method
):
    model = ropext.patch(loaded(place), factor=4, method=method).to(dtype)
    ropext.save(model, tmp_path / "saved", no_verify=True)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=dtype)
    assert stock.model.rotary_emb.inv_freq.dtype == torch.float32
    ids = torch.arange(250)[None] % 40
    with torch.no_grad():
        assert torch.equal(model(ids).logits, stock(ids).logits)
        stays = model.model.rotary_emb.inv_freq
        assert torch.equal(stays, stock.model.rotary_emb.inv_freq)
    unpatch(model)
    assert not model.model.rotary_emb._forward_pre_hooks


def test_a_patched_model_can_be_copied_and_pickled(tmp_path):
    model = ropext.patch(tiny(), method="yarn", factor=4)
    torch.save(model, tmp_path / "model.pt")
    again = torch.load(tmp_path / "model.pt", weights_only=False).to(torch.bfloat16)
    ids = torch.arange(100)[None] % 40
    assert torch.equal(again(ids).logits, model.to(torch.bfloat16)(ids).logits)


def test_training_after_patch_with_self_extend_is_noticed(place):
    model = ropext.patch(loaded(place), method="self-extend", factor=4)
    assert "extended" in evaluate(model, place).models
    ropext.patch(model, method="self-extend", factor=2)
    train(model)
    with pytest.raises(UsageError, match=refusal(place)):
        evaluate(model, place)
