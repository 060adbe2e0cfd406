"""Runs of other kinds: conversations, trained norms and embeddings, a base on the hub, repeats, no
memory, trackers."""

import importlib.util
import json
import os
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from test_finetune import RUN
from trained import count_training, train
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as DECODERS

from ropext.base.errors import InputError, Stopped, UsageError
from ropext.base.narration import Call, Hooks
from ropext.models.adapter import add_adapter
from ropext.models.load import memory_errors
from ropext.options.training import Finetune
from ropext.training import learning, models, trainer, tuned_writing
from ropext.training.finetune import prepare_finetune
from ropext.training.origin import open_origin
from ropext.training.report import TrainingSummary, passes_text
from ropext.verifying import verification

pytestmark = pytest.mark.slow

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}. {{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}assistant. {% endif %}"
)
SHORT = RUN | {"steps": 2, "eval_documents": 0}


def test_norms_and_tied_embeddings_can_be_trained_and_stay_tied(extended, stories, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    output = tmp_path / "out"
    options = SHORT | {"targets": ("q_proj",), "train_norms": True, "train_embeddings": True}
    train("finetune", extended, str(stories), output, **options)
    old, new = (load_file(folder / "model.safetensors") for folder in (extended, output))
    assert old.keys() == new.keys()
    changed = {name for name in old if not torch.equal(old[name], new[name])}
    assert changed == {
        name for name in old if "norm" in name or "q_proj" in name or "embed" in name
    }
    assert verification.verify(output).passed
    # The adapter has them too: on the base in its folder, it is the merged model.
    base, merged = (AutoModelForCausalLM.from_pretrained(p) for p in (output / "base", output))
    ids = torch.arange(4, 60)[None]
    with torch.no_grad():
        before = base(input_ids=ids).logits
        wanted = merged(input_ids=ids).logits
        found = PeftModel.from_pretrained(base, output / "adapter")(input_ids=ids).logits
    assert torch.allclose(found, wanted, atol=1e-5)
    assert not torch.allclose(before, wanted, atol=1e-3)


SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SMALL |= {"max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
TIED = {
    "gpt2": SMALL,
    "gpt_bigcode": SMALL,
    "gpt_neo": SMALL | {"attention_types": [[["global"], 2]]},
    "opt": SMALL | {"word_embed_proj_dim": 32, "ffn_dim": 64},
    "biogpt": SMALL | {"intermediate_size": 64},
    "xglm": SMALL | {"ffn_dim": 64},
    "ministral3": tiny.modern("ministral3"),
}
# What stock's queries are scaled by.
SCALE = {"original_max_position_embeddings": 64, "llama_4_scaling_beta": 0.1}
TIED["ministral3"]["rope_parameters"] |= SCALE
# Whenever stock loads a Youtu it empties the padding token's row, trained or not.
TIED["youtu"] = tiny.modern("youtu") | {"pad_token_id": None}
# Embeddings and heads under names of their own; .ci/slow takes every decoder type.
NAMED = ["falcon", "gpt_neox_japanese", "gemma3_text", "laguna", "llama", "llama4_text"]
NAMED += ["deepseek_v4", "gemma3n_text", "longcat_flash"]  # layers that a LoRA passes over
if os.environ.get("SPELLINGS") == "all":
    NAMED = sorted(n for n in DECODERS if tiny.text_part(n) == (n, ()) and n not in TIED)


@pytest.mark.parametrize("model_type", [*TIED, *NAMED])
def test_a_trained_tied_embedding_stays_tied(tmp_path, model_type):
    """Loss in memory, of the adapter on its base, and of the merged model as stock loads it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    text = TIED.get(model_type) or tiny.modern(model_type)
    made = text | {"model_type": model_type, "tie_word_embeddings": True, "dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps(made))
    torch.manual_seed(0)
    try:
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path)).eval()
    except Exception as error:
        pytest.skip(f"stock builds none: {error}"[:99])
    if model.get_output_embeddings().weight is not model.get_input_embeddings().weight:
        pytest.skip("stock does not tie it")
    ids = torch.arange(3, 11)[None]

    def loss(of):
        with torch.no_grad():
            return float(of(input_ids=ids, labels=ids, use_cache=False).loss)

    model.save_pretrained(tmp_path / "base")
    rank = SimpleNamespace(value=1)  # some gates have one row
    lora, options = SimpleNamespace(rank=rank, alpha=rank), Finetune(train_embeddings=True)
    try:
        untrained = loss(model)
        joined = models.add_adapter(model, options, lora).eval()
    except Exception as refused:  # stock cannot run this tiny one, or PEFT takes no such model
        pytest.skip(str(refused)[:99])
    for rows in joined.parameters():
        rows.data += 0.05 * torch.randn_like(rows) * rows.requires_grad
    joined.save_pretrained(tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval()
    if loss(base) != pytest.approx(untrained, abs=1e-6):
        pytest.skip("stock's save does not give it back")
    merged = add_adapter(base, str(tmp_path / "adapter"))
    assert loss(merged) == pytest.approx(loss(joined), abs=1e-5)
    merged.merge_and_unload().save_pretrained(tmp_path / "merged")
    (tmp_path / "merged/config.json").write_text(json.dumps(made))  # as the base says
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    assert stock.get_output_embeddings().weight is stock.get_input_embeddings().weight
    assert loss(stock) == pytest.approx(loss(joined), abs=1e-5)


def test_verify_holds_tied_weights_against_those_stored(extended, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(extended, folder)
    stored = load_file(folder / "model.safetensors")
    rows = stored["model.embed_tokens.weight"]
    for other, passed in ((rows.clone(), True), (rows + 1, False)):
        save_file(
            stored | {"lm_head.weight": other}, folder / "model.safetensors", {"format": "pt"}
        )
        (folder / "ropext.json").unlink(missing_ok=True)
        checks = [c for c in verification.verify(folder).checks if c.what == "tied weights"]
        assert [c.passed for c in checks] == ([] if passed else [False])
    assert "lm_head.weight and model.embed_tokens.weight" in checks[0].sentence


def conversing(extended, tmp_path, roles=("user", "assistant")):
    """Write the extended model with a chat template, and a conversation of two rows: the user's
    words fill one of them, and most of the next."""
    model, data = tmp_path / "model", tmp_path / "talk.jsonl"
    shutil.copytree(extended, model)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    words = "the cat sat on a mat and then it ran away " * 12
    talk = [
        {"role": own, "content": said}
        for own, said in zip(roles, (words, "over the hill"), strict=True)
    ]
    data.write_text(json.dumps({"messages": talk}))
    return model, data


def test_of_conversations_the_assistants_turns_alone_move_the_weights(extended, tmp_path):
    """The reported loss is stock transformers' loss over the assistant's tokens."""
    from transformers import AutoModelForCausalLM

    model, data = conversing(extended, tmp_path)
    prepared = prepare_finetune(str(model), str(data), Finetune(**SHORT))
    (document,) = prepared.data.documents
    decoded = prepared.encoder.tokenizer.decode(document.ids[document.mask()])
    assert decoded == "over the hill</s>"
    done = train("finetune", model, str(data), tmp_path / "out", **SHORT)
    stock, each = AutoModelForCausalLM.from_pretrained(model), []
    for row in (prepared.rows[0], prepared.rows[1]):  # the first step's, before any change
        ids = torch.as_tensor(row.ids).long()
        with torch.no_grad():
            logits = stock(ids[None]).logits[0]
        nll = torch.nn.functional.cross_entropy(logits[:-1], ids[1:], reduction="none")
        each.append(nll[torch.as_tensor(row.scored[1:])])
    assert len(each[0]) == 0 < len(each[1])
    assert done.by_step[0]["loss"] == pytest.approx(float(torch.cat(each).mean()), abs=1e-5)
    assert all(entry["grad_norm"] > 0 for entry in done.by_step)


@pytest.mark.parametrize("sliced", [True, False])
def test_a_step_in_which_nothing_is_scored_teaches_nothing(extended, tmp_path, monkeypatch, sliced):
    model, data = conversing(extended, tmp_path)
    if not sliced:
        monkeypatch.setattr(learning, "use_sliced_loss", lambda *_: "for this test")
    done = train("finetune", model, str(data), tmp_path / "out", **SHORT | {"batch_tokens": 256})
    first, second = done.by_step
    assert (first["loss"], first["grad_norm"]) == (0, 0)
    assert second["loss"] > 1
    assert second["grad_norm"] > 0


def test_conversations_in_which_the_user_alone_speaks_are_refused(extended, tmp_path):
    model, data = conversing(extended, tmp_path, roles=("user", "user"))
    with pytest.raises(InputError, match="is long enough and has an assistant's turn"):
        train("finetune", model, str(data), tmp_path / "out", **SHORT)


def test_text_that_is_read_again_is_reported(extended, stories, tmp_path):
    prepared = prepare_finetune(str(extended), str(stories), Finetune(**SHORT))
    # 700 characters hold two rows of 256, and all 24 documents can train.
    assert prepared.rows.passes_over_data == 4 / 48
    assert len(prepared.data.documents) == 24
    assert passes_text(prepared.rows) == "rows: 4, and the documents hold 48"
    one = tmp_path / "one.jsonl"
    one.write_text(stories.read_text().splitlines()[0])
    told = []
    done = train(
        "finetune", extended, str(one), tmp_path / "out", call=Call(Hooks(told.append)), **SHORT
    )
    sentence = "rows: 4, and the documents hold 2: 2.0 passes"
    assert any(line.startswith(sentence) for line in told)
    assert any(note.startswith(sentence) for note in done.notes)
    record = json.loads((tmp_path / "out" / "ropext.json").read_text())
    assert record["finetune"]["passes"] == 2


def test_the_adapter_of_a_base_on_the_hub_names_the_extended_one_there(extended, tmp_path):
    origin = open_origin(str(extended))
    there = replace(origin.snapshot, hub_id="org/extended-model", commit="0123abc")
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_model.safetensors").write_bytes(b"weights")
    (adapter / "adapter_config.json").write_text(
        json.dumps({"base_model_name_or_path": str(tmp_path), "r": 4})
    )
    story = TrainingSummary({}, (), (), {})
    there = replace(origin, snapshot=there)
    tuned_writing.write_adapter(there, adapter, tmp_path / "out", story)
    found = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    wanted = {"base_model_name_or_path": "org/extended-model", "revision": "0123abc", "r": 4}
    assert found == wanted
    card = (tmp_path / "out" / "README.md").read_text()
    assert 'from_pretrained("org/extended-model", dtype="auto")' in card
    assert str(tmp_path) not in card


def test_out_of_memory_names_three_options_and_the_same_call_resumes(
    extended, stories, tmp_path, monkeypatch
):
    step = trainer._Trainer.training_step

    def grows(self, *args, **kwargs):
        if self.state.global_step == 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return step(self, *args, **kwargs)

    options = RUN | {"eval_documents": 0}
    with monkeypatch.context() as full:
        full.setattr(trainer._Trainer, "training_step", grows)
        with pytest.raises(Stopped, match=r"--micro-rows 1.*--strategy pose.*--dtype bfloat16"):
            train("finetune", extended, str(stories), tmp_path / "out", **options)
    told = []
    train(
        "finetune",
        extended,
        str(stories),
        tmp_path / "out",
        call=Call(Hooks(told.append)),
        **options,
    )
    assert "resuming after step 3" in told


def test_the_cpus_allocator_error_is_out_of_memory_too():
    with pytest.raises(Stopped, match="out of memory"), memory_errors("out of memory"):
        torch.empty(2**60)
    with pytest.raises(RuntimeError, match="shape"), memory_errors(""):
        torch.empty(2) @ torch.empty(3, 3)


def test_cuda_out_of_memory_is_exit_4_and_a_sentence():
    for words in (
        "CUDA error: out of memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    ):
        with pytest.raises(Stopped, match="smaller") as stopped, memory_errors("smaller rows"):
            raise RuntimeError(words)
        assert stopped.value.exit_code == 4


def test_no_refusal_rests_on_an_estimate(extended, stories, monkeypatch):
    monkeypatch.setattr("ropext.training.objective.free_memory", lambda device: 1)
    assert count_training("finetune", extended, str(stories), **RUN).needs.recompute


@pytest.mark.skipif(
    importlib.util.find_spec("trackio") is not None, reason="trackio is installed here"
)
def test_a_tracker_whose_package_is_missing_is_refused_before_anything_runs(
    extended, stories, tmp_path
):
    with pytest.raises(UsageError, match="--report-to trackio needs the package trackio"):
        train("finetune", extended, str(stories), tmp_path / "out", report_to="trackio", **RUN)
    with pytest.raises(UsageError, match="--report-to is one of none, tensorboard"):
        train("finetune", extended, str(stories), tmp_path / "out", report_to="notebook", **RUN)
    assert not list(tmp_path.iterdir())


# Replaces the package, so that transformers' own callback prints its destination and its values.
WRITER = """
from pathlib import Path
class SummaryWriter:
    def __init__(self, log_dir):
        Path(log_dir).mkdir(parents=True)
        self.events = open(Path(log_dir) / "events.out", "w")
    def add_text(self, name, text):
        pass
    def add_scalar(self, name, value, step):
        print(name, step, value, file=self.events)
    def flush(self):
        self.events.flush()
    close = flush
"""


def test_files_of_a_tracker_are_part_of_the_result(extended, stories, tmp_path, monkeypatch):
    (tmp_path / "tensorboardX.py").write_text(WRITER)
    monkeypatch.syspath_prepend(tmp_path)
    options = SHORT | {"report_to": "tensorboard"}
    done = train("finetune", extended, str(stories), tmp_path / "out", **options)
    (events,) = (tmp_path / "out/training/runs").glob("*/events.out")
    told = [line.split() for line in events.read_text().splitlines()]
    losses = [(int(step), float(value)) for name, step, value in told if name == "train/loss"]
    assert losses == [(own["step"], pytest.approx(own["loss"])) for own in done.by_step]
