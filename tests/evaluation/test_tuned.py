"""A tuned directory is compared with the model before it: OUT/base with its recorded spectrum."""

import shutil
from dataclasses import replace

import pytest
from tiny_checkpoints import LENGTHS, write_checkpoint, write_documents
from trained import train

import ropext
from ropext.files.checkpoint import provenance
from ropext.files.checkpoint.provenance import read_record
from ropext.pipeline.public import evaluate

TRAINING = {"steps": 6, "batch_tokens": 512, "learning_rate": 0.01, "rank": 4, "eval_every": 6}


@pytest.fixture(scope="session")
def place(tmp_path_factory):
    path = tmp_path_factory.mktemp("tuned")
    write_checkpoint(path / "model")
    write_documents(path / "docs.jsonl")
    write_documents(path / "training.jsonl", count=16, seed=3)
    ropext.extend(str(path / "model"), path / "extended", method="yarn", factor=4.0, no_verify=True)
    return path


def read(path, place, **more):
    options = {"data": str(place / "docs.jsonl"), "lengths": LENGTHS}
    return evaluate(str(path), **options, **more)


def numbers(done, label):
    return {name: own["value"] for name, own in done.results["variants"][label]["metrics"].items()}


@pytest.mark.slow
def test_eval_compares_a_tuned_checkpoint_with_its_bases(place):
    import torch

    with torch.inference_mode(False):
        train('finetune',
            str(place / "extended"), str(place / "training.jsonl"), place / "tuned",
            eval_documents=2, **TRAINING,
        )  # fmt: skip
    found = read(place / "tuned", place)
    assert list(found.results["variants"]) == ["base", "untouched", "tuned"]
    model = read(place / "model", place)
    untuned = read(place / "extended", place)
    # The base is the model before its extension, not the tuned weights in another rotation.
    assert numbers(found, "base") == pytest.approx(numbers(model, "base"), rel=1e-5)
    tails = [numbers(found, "tuned"), numbers(untuned, "extended")]
    assert tails[0]["tail_nll@256"] < tails[1]["tail_nll@256"]
    # Named by hand it is the same.
    named = read(place / "tuned", place, base=str(place / "model"))
    assert numbers(named, "base") == pytest.approx(numbers(found, "base"), rel=1e-5)
    # Without the folder (a download of the model alone) and without a base anywhere: said.
    shutil.rmtree(place / "tuned" / "base")
    shutil.move(place / "model", place / "moved")
    heard = []
    alone = read(place / "tuned", place, say=heard.append)
    assert list(alone.results["variants"]) == ["tuned"]
    assert "gain@256" not in numbers(alone, "tuned")
    assert any("name it with --base MODEL" in line for line in heard)
    shutil.move(place / "moved", place / "model")


def test_a_fitted_spectrum_left_the_weights_alone(place):
    """Its base is the same weights with the recorded spectrum."""
    fitted = place / "fitted"
    shutil.copytree(place / "extended", fitted)
    record = read_record(fitted)
    provenance.write(replace(record, more={"fit": {"steps": 1}}), fitted)
    found, expected = read(fitted, place), read(place / "extended", place)
    assert numbers(found, "base") == numbers(expected, "base")
    assert numbers(found, "fitted") == numbers(expected, "extended")
