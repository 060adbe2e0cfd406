"""A model in memory is measured as the directory that holds it, and stays as it is."""

import hashlib
import json
import shutil
from functools import partial

import pytest
import torch
from small_models import tiny
from tiny_checkpoints import LENGTHS, write_checkpoint, write_documents
from transformers import AutoModelForCausalLM, AutoTokenizer

import ropext
from ropext.base.errors import NothingKept, OutputExists, UsageError
from ropext.models import patching

NEVER = (
    r"results of a model in memory are never resumed; give another output, force=True, or "
    r"ropext\.save the model and evaluate the directory"
)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    path = tmp_path_factory.mktemp("live")
    torch.set_num_threads(1)
    write_checkpoint(path / "model")
    write_documents(path / "docs.jsonl")
    return path


def loaded(place):
    return AutoModelForCausalLM.from_pretrained(place / "model")


def asked(place, **changes):
    asked = {"data": str(place / "docs.jsonl"), "lengths": LENGTHS, "max_docs": 8}
    return (
        asked | {"tasks": ["passkey"], "items": 1, "depths": [0.5], "haystack": "noise"} | changes
    )


def numbers(measured):
    """Return every number of every row."""
    variants = measured.results["variants"]
    kept = ("metrics", "retrieval", "positions", "verdicts")
    return {label: {key: row.get(key) for key in kept} for label, row in variants.items()}


def state(model):
    """Return everything of a model that an evaluation could change."""
    tensors = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        content = hashlib.sha256(tensor.detach().numpy().tobytes()).hexdigest()
        tensors[name] = (id(tensor), tensor.data_ptr(), content, tensor.requires_grad)
    modules = {}
    for name, module in model.named_modules():
        hooks = [list(module._forward_hooks), list(module._forward_pre_hooks)]
        plain = {k: v for k, v in vars(module).items() if isinstance(v, str | int | float | None)}
        modules[name] = (
            type(module),
            module.training,
            hooks,
            plain,
            id(vars(module).get("config")),
        )
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    more = (base.config.to_json_string(), base.config._attn_implementation, base.dtype, base.device)
    return tensors, modules, more, base.generation_config.to_json_string()


def test_a_plain_model_has_the_values_of_its_directory_and_stays_as_it_is(place, tmp_path):
    model = loaded(place).train()
    model.model.layers[0].mlp.down_proj.weight.requires_grad_(False)
    before = state(model)
    tokenizer = AutoTokenizer.from_pretrained(place / "model")
    here = ropext.evaluate(model, tmp_path / "run", tokenizer=tokenizer, **asked(place))
    assert state(model) == before
    there = ropext.evaluate(place / "model", **asked(place))
    assert numbers(here) == numbers(there)
    assert list(here.models) == ["base", "untouched"]
    assert ropext.open(tmp_path / "run") == here
    manifest = json.loads((tmp_path / "run" / "run.json").read_text())
    assert manifest["decides"]["variants"]["base"]["model"]["in_memory"] is True


class Packed(torch.nn.Parameter):
    """A weight with its scale, which the first forward moves into the module, as bitsandbytes does
    with the scales of 8 bits."""

    def __new__(cls, weight):
        scale = weight.abs().max()
        made = torch.Tensor._make_subclass(cls, weight / scale)
        made.scale = scale
        return made


class PackedLinear(torch.nn.Linear):
    scale = None

    def __init__(self, linear):
        super().__init__(linear.in_features, linear.out_features, bias=False)
        self.weight = Packed(linear.weight.data)

    def forward(self, states):
        if self.weight.scale is not None:
            self.scale = self.weight.scale
            self.weight.scale = None
        return (
            torch.nn.functional.linear(states, self.weight.as_subclass(torch.Tensor)) * self.scale
        )


def test_packed_weights_that_give_their_scale_away_are_read_by_every_variant(place):
    """The first copy took the scale of the model itself: all other variants had none."""
    plain = ropext.evaluate(loaded(place), method="yarn", factor=4, **asked(place))
    model = loaded(place)
    for layer in model.model.layers:
        layer.mlp.up_proj = PackedLinear(layer.mlp.up_proj)
    found = ropext.evaluate(model, method="yarn", factor=4, **asked(place))
    for label in ("base", "untouched", "yarn-4x"):
        for name, value in plain.values(label).items():
            assert found.values(label)[name].value == pytest.approx(value.value, abs=1e-3), name
    assert model.model.layers[0].mlp.up_proj.weight.scale is not None
    ids = torch.arange(40)[None]
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, loaded(place)(ids).logits)


@pytest.mark.slow
def test_a_base_in_8_bits_gains_nothing_over_itself(place):
    pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    eight = BitsAndBytesConfig(load_in_8bit=True)
    model = AutoModelForCausalLM.from_pretrained(place / "model", quantization_config=eight)
    found = ropext.evaluate(model, method="yarn", factor=4, **asked(place, tasks=[]))
    values = found.values("untouched")
    context = found.frame.context
    assert (values[f"gain@{context}"].value, values["short_tax"].value) == (0, 0)
    assert values["short_tax"].ci95 == (0, 0)


def test_a_patched_model_has_the_values_of_the_saved_directory(place, tmp_path):
    model = ropext.patch(loaded(place), method="yarn", factor=4)
    before = state(model)
    here = ropext.evaluate(model, **asked(place))
    assert state(model) == before
    tokenizer = AutoTokenizer.from_pretrained(place / "model")
    ropext.save(model, tmp_path / "longer", tokenizer=tokenizer, no_verify=True)
    there = ropext.evaluate(tmp_path / "longer", **asked(place))
    assert list(here.models) == ["base", "untouched", "extended"]
    assert numbers(here) == numbers(there)


def test_a_folded_model_is_read_by_self_extend(place):
    how = {"window": 16, "group": 8}
    model = ropext.patch(loaded(place), method="self-extend", factor=4, **how)
    before = state(model)
    here = ropext.evaluate(model, **asked(place))
    assert state(model) == before
    memory = ropext.evaluate(place / "model", method="self-extend", factor=4, **how, **asked(place))
    rows = numbers(memory)
    assert numbers(here)["extended"]["metrics"] == rows[next(reversed(rows))]["metrics"]
    assert numbers(here)["base"] == rows["base"]


def test_an_adapter_is_read_without_and_with(place):
    import peft

    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    torch.manual_seed(0)
    model = peft.get_peft_model(loaded(place), config).eval()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    before = state(model)
    here = ropext.evaluate(model, **asked(place))
    assert state(model) == before
    assert list(here.models) == ["base", "untouched", "untouched+adapter"]
    plain = ropext.evaluate(place / "model", **asked(place))
    rows = numbers(here)
    assert rows["untouched"] == numbers(plain)["untouched"]
    merged = ropext.evaluate(model.merge_and_unload(), **asked(place))
    there = numbers(merged)["untouched"]["metrics"]["tail@256"]["value"]
    assert rows["untouched+adapter"]["metrics"]["tail@256"]["value"] == pytest.approx(there, 1e-4)
    assert rows["untouched"]["metrics"]["tail@256"]["value"] != pytest.approx(there, 1e-3)


def with_adapters(place):
    import peft

    torch.manual_seed(0)
    how = {"r": 2, "target_modules": ["q_proj"], "init_lora_weights": False}
    model = peft.get_peft_model(loaded(place), peft.LoraConfig(**how))
    model.add_adapter("other", peft.LoraConfig(lora_alpha=64, **how))
    return model.eval()


def test_a_merged_adapter_is_refused_and_no_weight_changes(place):
    model = with_adapters(place)
    model.merge_adapter(["other"])
    before = state(model)
    with pytest.raises(UsageError, match=r"^the adapter other is merged .* unmerge_adapter\(\)"):
        ropext.evaluate(model, **asked(place))
    assert state(model) == before


def rotated_by_mine(monkeypatch):
    from transformers.models.llama import modeling_llama

    stock = modeling_llama.apply_rotary_pos_emb

    def mine(q, k, cos, sin, *rest, **more):
        return stock(q, k, cos * 0.5, sin, *rest, **more)

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", mine)


def attended_by_mine(monkeypatch):
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    stock = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def mine(module, query, *rest, **more):
        return stock(module, query * 0.5, *rest, **more)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", mine)


def hooked_everywhere(monkeypatch):
    from torch.nn.modules import module

    def halve(kind, args, output):
        return output * 0.5 if isinstance(kind, torch.nn.Linear) else output

    monkeypatch.setitem(module._global_forward_hooks, 77, halve)


@pytest.mark.parametrize("change", [rotated_by_mine, attended_by_mine, hooked_everywhere])
def test_results_of_a_model_in_memory_are_never_resumed(place, tmp_path, monkeypatch, change):
    """No look at the model reveals these changes; each alters its outputs."""
    model = loaded(place)
    run = tmp_path / "run"
    before = numbers(ropext.evaluate(model, run, **asked(place)))
    with monkeypatch.context() as patch:
        change(patch)
        with pytest.raises(OutputExists, match=NEVER):
            ropext.evaluate(model, run, **asked(place))
        alone = numbers(ropext.evaluate(model, **asked(place)))
        again = ropext.evaluate(model, run, force=True, **asked(place))
        assert (numbers(again), again.resumed) == (alone, 0)
    assert alone != before


def test_autocast_is_no_reason_to_resume(place, tmp_path):
    model = loaded(place)
    run = tmp_path / "run"
    before = numbers(ropext.evaluate(model, run, **asked(place)))
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(OutputExists, match=NEVER):
        ropext.evaluate(model, run, **asked(place))
    with torch.autocast("cpu", torch.bfloat16):
        again = ropext.evaluate(model, run, force=True, **asked(place))
    assert numbers(again) != before


def test_the_output_of_a_directory_takes_no_model_in_memory(place, tmp_path):
    run = tmp_path / "run"
    ropext.evaluate(place / "model", run, **asked(place))
    with pytest.raises(OutputExists, match=NEVER):
        ropext.evaluate(loaded(place), run, **asked(place))
    other = tmp_path / "other"
    ropext.evaluate(loaded(place), other, **asked(place))
    with pytest.raises(OutputExists, match="differs in variants"):
        ropext.evaluate(place / "model", other, **asked(place))


@pytest.mark.parametrize("kl", [False, True])
def test_an_interrupted_call_keeps_nothing_that_a_later_one_takes(place, tmp_path, kl):
    model = loaded(place)
    run = tmp_path / "run"
    read = []

    def stop():
        return len(read) > 5

    def show(done, total, what):
        read.append(what)

    with pytest.raises(NothingKept, match="of a model in memory"):
        ropext.evaluate(model, run, show=show, stop=stop, kl=kl, **asked(place))
    assert not run.exists()
    done = ropext.evaluate(model, run, kl=kl, **asked(place))
    assert done.resumed == 0
    assert ropext.open(run) == done


def test_two_models_in_memory_have_no_base_in_common(place, tmp_path):
    """Whether their bases compute the same is not known."""
    for name in ("one", "two"):
        model = ropext.patch(loaded(place), method="yarn", factor=4)
        ropext.evaluate(model, tmp_path / name, **asked(place))
    compared = ropext.compare(tmp_path / "one", tmp_path / "two")
    assert sum("base" in row["model"] for row in compared.table()) >= 2


def test_overlaps_and_base_of_a_tuned_model_are_those_of_its_directory(place, tmp_path):
    ropext.extend(place / "model", tmp_path / "longer", method="yarn", factor=4, no_verify=True)
    tuned = tmp_path / "tuned"
    shutil.copytree(tmp_path / "longer", tuned)
    shutil.copytree(tmp_path / "longer", tuned / "base")
    record = json.loads((tuned / "ropext.json").read_text())
    (tuned / "ropext.json").write_text(json.dumps(record | {"finetune": {"steps": 1}}))
    model = AutoModelForCausalLM.from_pretrained(tuned)
    there = ropext.evaluate(tuned, **asked(place))
    here = ropext.evaluate(model, **asked(place))
    assert list(here.models) == ["base", "untouched", "tuned"]
    assert numbers(here) == numbers(there)
    overlaps = {label: row["overlap"] for label, row in here.results["variants"].items()}
    assert overlaps["tuned"]["complete"] is False
    assert overlaps == {label: row["overlap"] for label, row in there.results["variants"].items()}
    assert here.results["warnings"] == there.results["warnings"]
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    changed = ropext.evaluate(model, **asked(place))
    assert numbers(changed)["base"] == numbers(there)["base"]  # the weights of before the training
    assert numbers(changed)["tuned"] != numbers(there)["tuned"]


@pytest.mark.parametrize("patch", ["self-extend", "yarn"])
def test_a_patched_model_takes_no_method(place, patch):
    model = ropext.patch(loaded(place), method=patch, factor=4)
    with pytest.raises(UsageError, match=r"^method extends a model as it was trained, .*unpatch"):
        ropext.evaluate(model, method="ntk", factor=4, **asked(place))


def test_the_base_of_a_patched_model_may_be_named(place, tmp_path):
    other = write_checkpoint(tmp_path / "other", tie_word_embeddings=True)
    model = ropext.patch(loaded(place), method="pi", factor=4)
    plain = ropext.evaluate(model, **asked(place))
    named = ropext.evaluate(model, base=str(other), **asked(place))
    alone = ropext.evaluate(other, **asked(place))
    for label in ("base", "untouched"):
        read = numbers(named)[label]["metrics"]["tail_nll@64"]
        assert read == numbers(alone)[label]["metrics"]["tail_nll@64"]
        assert read != numbers(plain)[label]["metrics"]["tail_nll@64"]
    extended = numbers(named)["extended"]["metrics"]["tail_nll@64"]
    assert extended == numbers(plain)["extended"]["metrics"]["tail_nll@64"]


def test_a_model_without_a_base_is_called_by_its_name(place, tmp_path):
    ropext.extend(place / "model", tmp_path / "longer", method="yarn", factor=4, no_verify=True)
    (tmp_path / "longer" / "ropext.json").unlink()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "longer")
    here = ropext.evaluate(model, **asked(place))
    (warning,) = [text for text in here.results["warnings"] if text.startswith("[no-base]")]
    assert warning.startswith(f"[no-base] {tmp_path / 'longer'} is scaled")


def test_an_error_leaves_the_model_as_it_is(place):
    model = ropext.patch(loaded(place), method="pi", factor=2).train()
    before = state(model)

    def stop(done, total, what):
        raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        ropext.evaluate(model, show=stop, **asked(place))
    assert state(model) == before


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"dtype": "bfloat16"}, "dtype is about a model that ropext loads"),
        ({"adapter": "x"}, "adapter is about a model that ropext loads"),
        ({"revision": "main"}, "revision is of a hub id"),
        ({"tokenizer": "gpt2"}, "ropext.evaluate: tokenizer must be a tokenizer of transformers"),
    ],
)
def test_options_for_loading_are_refused_for_a_model_in_memory(place, changes, sentence):
    with pytest.raises(UsageError, match=f"^{sentence}"):
        ropext.evaluate(loaded(place), **asked(place, **changes))


@pytest.mark.parametrize("call", ["evaluate", "patch", "save", "unpatch"])
@pytest.mark.parametrize(
    ("wrapper", "a_wrapper", "inside"),
    [
        (torch.compile, "an OptimizedModule", "model._orig_mod"),
        (torch.nn.DataParallel, "a DataParallel", "model.module"),
    ],
)
def test_a_torch_wrapper_is_refused_with_the_object_to_pass(
    place, tmp_path, call, wrapper, a_wrapper, inside
):
    wrapped = wrapper(loaded(place))
    calls = {
        "evaluate": lambda: ropext.evaluate(wrapped, **asked(place)),
        "patch": lambda: ropext.patch(wrapped, method="yarn", factor=2.0),
        "save": lambda: ropext.save(wrapped, tmp_path / "saved"),
        "unpatch": lambda: patching.unpatch(wrapped),
    }
    with pytest.raises(UsageError) as raised:
        calls[call]()
    wanted = f"{call} wants a transformers model, not {a_wrapper} around one"
    assert str(raised.value) == f"{wanted}; pass {inside}"


@pytest.mark.parametrize(
    ("wrapper", "inside"),
    [(torch.compile, "model._orig_mod"), (torch.nn.DataParallel, "model.module")],
)
def test_a_directory_is_made_from_the_model_inside_a_torch_wrapper(place, wrapper, inside):
    """As `extend` and `verify` say, which read no model in memory."""
    wrapped = wrapper(loaded(place))
    sentence = (
        rf"use `ropext\.save\({inside}, DIR\)`; for any other model {inside}\.save_pretrained"
    )
    for call in (ropext.verify, partial(ropext.extend, output="out")):
        with pytest.raises(UsageError, match=sentence):
            call(wrapped)
    with pytest.raises(UsageError, match=r"not a DataParallel around one; pass model\.module"):
        ropext.inspect(torch.nn.DataParallel(wrapped))


def test_evaluate_asks_for_the_tokenizer_of_a_model_without_a_path(place):
    with pytest.raises(UsageError, match=r"^give tokenizer="):
        ropext.evaluate(tiny(), **asked(place))


def test_a_model_without_a_head_is_refused(place):
    model = loaded(place).model
    tokenizer = AutoTokenizer.from_pretrained(place / "model")
    with pytest.raises(UsageError, match=r"no head that predicts tokens; load the model by Auto"):
        ropext.evaluate(model, tokenizer=tokenizer, **asked(place))
