"""A checkpoint that is written while ropext uses it never gives its numbers to the one before."""

import json
import os
import shutil
import signal
import tempfile
from functools import partial

import peft
import pytest
import torch
from command_line import Forked
from safetensors.torch import load_file, save_file
from tiny_checkpoints import LENGTHS, write_checkpoint, write_documents
from transformers import AutoModelForCausalLM

import ropext
from ropext.base.bundled import MODELS
from ropext.base.errors import InputError
from ropext.files.checkpoint import digests, open_snapshot, with_weights

WEIGHTS = "model.safetensors"


@pytest.fixture
def place(tmp_path):
    torch.set_num_threads(1)
    write_checkpoint(tmp_path / "base")
    write_documents(tmp_path / "docs.jsonl", count=24)
    return tmp_path


def extend(place, **wish):
    ropext.extend(place / "base", place / "out", no_verify=True, force=True, **wish)


def asked(place, **changes):
    options = {"data": str(place / "docs.jsonl"), "lengths": LENGTHS, "max_docs": 8}
    return options | {"base": str(place / "base")} | changes


def numbers(measured):
    return {label: row["metrics"] for label, row in measured.results["variants"].items()}


def scale(file, factor):
    """Write other weights into the same file, as a trainer that saves again does."""
    weights = {name: tensor * factor for name, tensor in load_file(file).items()}
    save_file(weights, file, {"format": "pt"})


def once(act):
    """Return a listener that acts at the first sentence, or unit, that has these words."""
    done = []

    def hears(words):
        def hear(*told):
            if not done and words in str(told[-1]):
                done.append(1)
                act()

        return hear

    return hears


def test_another_model_at_its_path_gets_no_number_under_the_old_one(place):
    """The base is read first; meanwhile OUT is replaced, and put back for the next call."""
    extend(place, factor=2, method="yarn")
    replace = once(partial(extend, place, factor=4, method="pi"))
    run = place / "run"
    with pytest.raises(InputError, match=r"out was changed while it was evaluated") as raised:
        ropext.evaluate(place / "out", run, show=replace("(base, short)"), **asked(place))
    assert raised.value.exit_code == 2
    assert not (run / "results.json").exists()
    kept = {folder.name.partition("-")[0] for folder in (run / "variants").iterdir()}
    assert kept == {"base", "untouched"}  # these finished; the extended one has nothing
    extend(place, factor=2, method="yarn")
    again = ropext.evaluate(place / "out", run, **asked(place))
    assert again.resumed > 0
    assert numbers(again) == numbers(ropext.evaluate(place / "out", **asked(place)))


def test_the_same_content_written_again_is_the_same_model(place):
    extend(place, factor=2, method="yarn")
    again = once(partial(extend, place, factor=2, method="yarn"))
    before = os.stat(place / "out").st_ino
    run = place / "run"
    done = ropext.evaluate(place / "out", run, show=again("(base, short)"), **asked(place))
    assert os.stat(place / "out").st_ino != before
    assert numbers(done) == numbers(ropext.evaluate(place / "out", **asked(place)))


def test_without_an_output_no_weight_is_hashed_and_no_folder_made(place, monkeypatch):
    extend(place, factor=2, method="yarn")
    there = numbers(ropext.evaluate(place / "out", place / "run", **asked(place)))

    def hashed(*_):
        raise AssertionError("weights were hashed")

    monkeypatch.setattr(digests, "content_digest", hashed)
    monkeypatch.setattr(tempfile, "tempdir", str(place / "nowhere"))
    assert numbers(ropext.evaluate(place / "out", **asked(place))) == there


def test_without_an_output_any_file_that_was_written_is_a_change(place):
    extend(place, factor=2, method="yarn")
    touch = once(partial(os.utime, place / "out" / WEIGHTS))
    with pytest.raises(InputError, match=r"evaluated \(model.safetensors is not as it was\)"):
        ropext.evaluate(place / "out", show=touch("(base, short)"), **asked(place))


def test_a_hard_link_to_the_weights_is_no_change_of_them(place):
    extend(place, factor=2, method="yarn")
    file = place / "out" / WEIGHTS
    there = numbers(ropext.evaluate(place / "out", **asked(place)))
    link = once(partial(os.link, file, place / "linked"))
    done = ropext.evaluate(place / "out", show=link("(base, short)"), **asked(place))
    assert numbers(done) == there

    def rewrite():
        """Write other weights of the same size, and give the file its old time."""
        time = os.stat(file).st_mtime_ns
        scale(file, 2.0)
        os.utime(file, ns=(time, time))

    with pytest.raises(InputError, match=r"model.safetensors is not as it was"):
        ropext.evaluate(place / "out", show=once(rewrite)("(base, short)"), **asked(place))


def test_with_an_output_the_content_of_linked_weights_decides(place):
    extend(place, factor=2, method="yarn")
    file = place / "out" / WEIGHTS
    link = once(partial(os.link, file, place / "linked"))
    run = place / "run"
    done = ropext.evaluate(place / "out", run, show=link("(base, short)"), **asked(place))
    assert numbers(done) == numbers(ropext.evaluate(place / "out", **asked(place)))

    def rewrite():
        """Write into the same file, give it its old time, and link it."""
        time = os.stat(file).st_mtime_ns
        with file.open("r+b") as stream:
            stream.seek(-2, os.SEEK_END)
            stream.write(b"\0\0")
        os.utime(file, ns=(time, time))
        os.link(file, place / "again")

    said = once(rewrite)("(base, short)")
    with pytest.raises(InputError, match=r"model.safetensors is not as it was"):
        ropext.evaluate(place / "out", place / "two", show=said, **asked(place))


def test_the_states_of_the_base_are_kept_for_a_while_without_an_output(place):
    whole = ropext.evaluate(place / "base", place / "run", kl=True, **asked(place, base=None))
    alone = ropext.evaluate(place / "base", kl=True, **asked(place, base=None))
    assert numbers(alone) == numbers(whole)
    assert "kl@64" in numbers(alone)["untouched"]


def test_weights_that_are_written_or_truncated_after_loading_change_no_number(place):
    """transformers maps the file: in a page that was not read yet the model would change, or end
    in a SIGBUS."""
    file = place / "base" / WEIGHTS
    whole = numbers(ropext.evaluate(place / "base", **asked(place, base=None)))
    content = file.read_bytes()

    def evaluate(act):
        done = ropext.evaluate(
            place / "base", show=once(act)("(base, short)"), **asked(place, base=None)
        )
        assert numbers(done) == whole

    for act in (partial(scale, file, 2.0), partial(os.truncate, file, 0)):
        code, said = Forked(partial(evaluate, act), place).wait()
        assert code != -signal.SIGBUS
        assert code == 0, said
        file.write_bytes(content)


def test_a_config_that_changes_before_the_weights_are_loaded_is_a_change(place):
    extend(place, factor=2, method="yarn")
    config = place / "out" / "config.json"

    def edit():
        known = json.loads(config.read_text())
        config.write_text(json.dumps(known | {"rms_norm_eps": 0.5}))

    with pytest.raises(InputError, match=r"evaluated \(config.json is not as it was\)"):
        ropext.evaluate(
            place / "out", place / "run", show=once(edit)("(base, short)"), **asked(place)
        )


@pytest.mark.parametrize("output", [None, "run"])
def test_an_adapter_that_is_trained_on_meanwhile_gets_no_number(place, output):
    base = AutoModelForCausalLM.from_pretrained(place / "base")
    how = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    peft.get_peft_model(base, how).save_pretrained(place / "adapter")
    change = once(partial(scale, place / "adapter" / "adapter_model.safetensors", 2.0))
    with pytest.raises(InputError, match=r"adapter \(adapter\) was changed while it was"):
        ropext.evaluate(
            place / "base",
            output and place / output,
            adapter=str(place / "adapter"),
            show=change("(base, short)"),
            **asked(place, base=None),
        )
    assert not (place / "run" / "results.json").exists()


@pytest.mark.slow
def test_a_base_that_changes_during_a_training_makes_no_output(place):
    shutil.copytree(MODELS["ropext://demo"], place / "demo")
    options = {"data": "ropext://tuning", "steps": 1, "batch_tokens": 512}
    change = once(partial(scale, place / "demo" / WEIGHTS, 2.0))
    fit = partial(ropext.fit, place / "demo", output=place / "fitted", factor=2, retrieval_items=1)
    with pytest.raises(InputError, match=r"demo was changed while it was trained"):
        fit(say=change("fitting"), **options)
    assert not (place / "fitted").exists()
    extend(place, factor=2, method="yarn")
    change = once(partial(scale, place / "out" / WEIGHTS, 2.0))
    options["data"] = str(place / "docs.jsonl")
    with pytest.raises(InputError, match=r"out was changed while it was trained"):
        ropext.finetune(
            place / "out", output=place / "tuned", say=change("training tuned"), **options
        )
    assert not (place / "tuned").exists()


@pytest.mark.parametrize("stage", ["extend: begins", "evaluate: begins"])
def test_a_base_that_changes_during_a_run_ends_it(place, stage):
    recipe = {
        "model": str(place / "base"),
        "extend": {"factor": 2, "method": "yarn", "no_verify": True},
        "evaluate": {"data": str(place / "docs.jsonl"), "lengths": "64,128", "max_docs": 8},
    }
    content = (place / "base" / WEIGHTS).read_bytes()
    change = once(partial(scale, place / "base" / WEIGHTS, 2.0))
    with pytest.raises(InputError, match=r"base was changed while it was (read|evaluated)"):
        ropext.run(recipe, place / "whole", say=change(stage))
    assert not (place / "whole").exists()
    assert not (place / "whole.run" / "evaluation" / "results.json").exists()
    (place / "base" / WEIGHTS).write_bytes(content)
    done = ropext.run(recipe, place / "whole")
    alone = ropext.evaluate(
        place / "whole", lengths="64,128", max_docs=8, data=str(place / "docs.jsonl")
    )
    assert (
        done.to_json()["evaluation"]["variants"]["extended"]["metrics"]
        == numbers(alone)["extended"]
    )


@pytest.fixture
def cached(place, monkeypatch):
    """Make a hub's cache that holds one model, without a network."""
    from huggingface_hub import constants

    repo = place / "hub" / "models--some--model"
    for commit in ("a" * 40, "b" * 40):
        shutil.copytree(place / "base", repo / "snapshots" / commit)
    scale(repo / "snapshots" / ("b" * 40) / WEIGHTS, 2.0)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("a" * 40)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(place / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return repo


def test_a_branch_that_moves_in_the_hubs_cache_moves_no_run(place, cached):
    before = open_snapshot("some/model")
    (cached / "refs" / "main").write_text("b" * 40)
    assert with_weights(before).directory == cached / "snapshots" / ("a" * 40)
    assert open_snapshot("some/model").commit == "b" * 40


def test_a_file_that_changes_in_the_hubs_cache_is_a_change(place, cached):
    before = open_snapshot("some/model")
    file = cached / "snapshots" / ("a" * 40) / "config.json"
    file.write_text(file.read_text().replace('"rms_norm_eps"', '"layer_norm_eps"'))
    with pytest.raises(InputError, match=r"some/model was changed while it was fetched"):
        with_weights(before)
    change = once(partial(scale, cached / "snapshots" / ("a" * 40) / WEIGHTS, 2.0))
    with pytest.raises(InputError, match=r"some/model was changed while it was evaluated"):
        ropext.evaluate(
            "some/model", place / "run", say=change("loading"), **asked(place, base=None)
        )
    assert not (place / "run").exists()
