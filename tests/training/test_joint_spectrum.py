"""finetune --train-spectrum: what stock transformers and PEFT load is what was trained."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from test_finetune import RUN

from ropext import verifying
from ropext.training import joint, run_finetune, trainer
from ropext.training.finetune import open_origin

pytestmark = pytest.mark.slow

JOINT = RUN | {"train_spectrum": True, "eval_every": 8}


@pytest.fixture(scope="module")
def trained(extended, stories, tmp_path_factory):
    output = tmp_path_factory.mktemp("joint") / "out"
    told = []
    done = run_finetune(extended, str(stories), output, say=told.append, **JOINT)
    return done, output, told


def test_base_and_merged_carry_the_trained_spectrum_and_verify(trained, extended):
    done, output, _ = trained
    old, new = (
        json.loads((folder / "ropext.json").read_text())["sites"][0]["spectrum"]
        for folder in (extended, output)
    )
    assert old["inv_freq"] != new["inv_freq"]
    assert old["attention_factor"] != new["attention_factor"]
    assert max(abs(a / b - 1) for a, b in zip(old["inv_freq"], new["inv_freq"], strict=True)) < 0.5
    config = json.loads((output / "config.json").read_text())
    assert config["rope_parameters"]["rope_type"] == "longrope"
    assert (output / "base" / "config.json").read_bytes() == (output / "config.json").read_bytes()
    for folder in (output, output / "base"):
        found = verifying.check_directory(folder)
        assert found.passed, found.failures()
    assert any("the spectrum was trained too: pair" in note for note in done.notes)
    weights = [load_file(folder / "model.safetensors") for folder in (extended, output / "base")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert not (output / "base" / "model.safetensors").is_symlink()


def test_adapter_and_base_together_are_the_merged_checkpoint(trained, tmp_path):
    import peft
    from transformers import AutoModelForCausalLM

    done, output, _ = trained
    moved = tmp_path / "moved"  # nothing in it points at where it was written
    shutil.copytree(output, moved)
    base = AutoModelForCausalLM.from_pretrained(moved / "base")
    joined = peft.PeftModel.from_pretrained(base, moved / "adapter").eval()
    merged = AutoModelForCausalLM.from_pretrained(moved).eval()
    ids = torch.randint(3, 60, (1, 256), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.allclose(joined(ids).logits, merged(ids).logits, atol=1e-4)
    # What was judged in training, on live modules, is what the written checkpoint gives.
    tail = done.numbers["tuned"]["tail_nll@256"]["value"]
    assert done.evaluations[-1]["tail_nll"] == pytest.approx(tail, abs=1e-4)


def test_the_spectrums_gradient_takes_nothing_from_the_adapters(
    extended, stories, tmp_path, monkeypatch
):
    clip, seen = trainer._Trainer._clip_grad_norm, []

    def norms(trainer):
        found = {True: [], False: []}
        for name, own in trainer.model.named_parameters():
            if own.grad is not None:
                found["ropext_spectrum" in name].append(own.grad.float().flatten())
        return [float(torch.cat(found[kind]).norm()) for kind in (True, False)]

    def watched(trainer, model):
        for own in trainer.job.beside.parameters():
            own.grad *= 1e8  # a random model hardly feels its spectrum
        before = norms(trainer)
        told = clip(trainer, model)
        seen.append((before, norms(trainer), float(told)))
        return told

    monkeypatch.setattr(trainer._Trainer, "_clip_grad_norm", watched)
    options = JOINT | {"steps": 2, "eval_documents": 0}
    run_finetune(extended, str(stories), tmp_path / "out", **options)
    assert len(seen) == 2
    for (spectrum, adapter), (clipped, same), told in seen:
        assert spectrum > 100
        assert clipped == pytest.approx(1, rel=1e-4)
        assert same == pytest.approx(min(adapter, 1), rel=1e-4)
        assert told == pytest.approx(adapter, rel=1e-4)


def test_the_start_is_the_extended_checkpoint_itself(extended):
    origin = open_origin(str(extended))
    plan = joint.start_plan(origin)
    site = origin.record.sites[0]
    assert plan.main.wanted.inv_freq == pytest.approx(site.spectrum.inv_freq, rel=1e-12)
    assert plan.main.wanted.attention_factor == pytest.approx(site.spectrum.attention_factor)
    assert (plan.context, plan.target) == (64, 256)


def test_a_run_that_goes_on_has_the_same_spectrum(
    trained, extended, stories, tmp_path, monkeypatch
):
    step = trainer._Trainer.training_step

    def ends(self, *args, **kwargs):
        if self.state.global_step == 5:
            raise KeyboardInterrupt
        return step(self, *args, **kwargs)

    monkeypatch.setattr(trainer._Trainer, "training_step", ends)
    with pytest.raises(KeyboardInterrupt):
        run_finetune(extended, str(stories), tmp_path / "out", **JOINT)
    kept = load_file(tmp_path / "out.run/tuned/checkpoint-3/spectrum.safetensors")
    assert float(kept["offsets"].abs().max()) > 0
    monkeypatch.undo()
    done = run_finetune(extended, str(stories), tmp_path / "out", **JOINT)
    assert done.losses == trained[0].losses
    name = "config.json"
    assert (tmp_path / "out" / name).read_bytes() == (trained[1] / name).read_bytes()
