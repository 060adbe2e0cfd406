"""Whole runs on the bundled model: extended, fine-tuned, evaluated; killed and resumed."""

import json
import os
import signal
from pathlib import Path

import pytest
from command_line import Forked, in_two_processes, run
from json_schema import check, check_file

import ropext

pytestmark = pytest.mark.slow

RECIPE = """\
model: ropext://demo
extend: {method: yarn, factor: 2, no_verify: true}
finetune: {data: ropext://tuning, steps: 3, batch_tokens: 1024, save_every: 1, eval_documents: 0}
evaluate: {data: ropext://held-out, max_docs: 8, lengths: [128, 512]}
"""


def go():
    return run("run", "r.yaml", "-o", "out")[0]


def start(folder):
    (folder / "r.yaml").write_text(RECIPE)
    return Forked(go, folder)


def finish(folder):
    code, said = start(folder).wait()
    assert code == 0, said
    return said


def tree(directory):
    """Return every file's bytes, without the logs, which concern this call."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name not in ("log.txt", "used.log")
    }


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Run without any disturbance."""
    folder = tmp_path_factory.mktemp("straight")
    finish(folder)
    return folder


def test_the_output_is_tuned_measured_and_stock(straight):
    record = json.loads((straight / "out/ropext.json").read_text())
    check(record, "ropext")
    variants = record["run"]["evaluation"]["variants"]
    assert list(variants) == ["base", "untouched", "extended", "tuned"]
    tails = {label: own["metrics"]["tail_nll@512"]["value"] for label, own in variants.items()}
    assert tails["extended"] < tails["untouched"] - 0.5
    assert record["finetune"]["steps"] == 3
    assert record["run"]["recipe"] == RECIPE
    card = (straight / "out/README.md").read_text()
    assert "### What was measured" in card
    assert "| tuned |" in card
    report = (straight / "out.run/report.html").read_text()
    assert "Loss of the training" in report
    from ropext.results.model_index import card_figures

    # What a push shows on the hub: the finished checkpoint's own figures.
    shown = card_figures(straight / "out", [f"{straight / 'out.run/evaluation'}:tuned"])
    assert variants["tuned"]["metrics"]["tail@512"]["value"] in [own.value for own in shown]
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(straight / "out")
    assert model.config.max_position_embeddings == 512


def test_killed_at_any_stage_it_resumes_and_ends_with_the_same_bytes(straight, tmp_path):
    for line in (
        "extend",
        "step 1 of 3",
        "writing the checkpoint",
        "evaluate",
        "loading out.run/tuned",
        "report",
    ):
        process = start(tmp_path)
        found = any(said.startswith(line) for said in process.said)  # up to there it is read
        process.kill()
        assert process.wait()[0] in (-signal.SIGKILL, 0)
        assert found, line
    assert "extend: done before, skipped" in finish(tmp_path)
    assert tree(tmp_path / "out") == tree(straight / "out")
    mine, theirs = tree(tmp_path / "out.run"), tree(straight / "out.run")
    assert mine == theirs


def test_an_interrupt_is_reported_with_the_command_that_resumes(tmp_path):
    process = start(tmp_path)
    assert any(said.startswith("evaluate") for said in process.said)
    process.kill(signal.SIGINT)
    code, said = process.wait()
    assert code == 4, said
    assert "finished stages are kept in out.run; run the same command to resume" in said
    assert "Traceback" not in said
    assert not (tmp_path / "out").exists()


def test_a_changed_key_trains_again_and_reads_only_what_is_new(straight, tmp_path, monkeypatch):
    import shutil

    shutil.copytree(straight, tmp_path / "copy", copy_function=os.link)
    monkeypatch.chdir(tmp_path / "copy")
    (tmp_path / "copy/out.run/log.txt").unlink()  # a link: it would be written in both
    stores = "out.run/evaluation/variants"
    before = sorted((straight / stores).glob("base-*/short/*"))
    said = []
    done = ropext.run("r.yaml", "out", overrides=["finetune.steps=2"], say=said.append)
    assert done.stages == {
        "plan": "skipped",
        "extend": "skipped",
        "finetune": "done",
        "evaluate": "done",
        "report": "done",
    }
    assert any(line.startswith("finetune: again (changed: finetune.steps") for line in said)
    after = sorted((tmp_path / "copy" / stores).glob("base-*/short/*"))
    assert [own.name for own in after] == [own.name for own in before] != []
    assert all(own.samefile(other) for own, other in zip(after, before, strict=True))
    (tuned,) = (tmp_path / "copy" / stores).glob("tuned-*/pass-512")
    (first,) = (straight / stores).glob("tuned-*/pass-512")
    names = [own.name for own in sorted(tuned.iterdir())]
    assert names == [own.name for own in sorted(first.iterdir())] != []
    assert all((tuned / own).read_bytes() != (first / own).read_bytes() for own in names)
    assert json.loads((tmp_path / "copy/out/ropext.json").read_text())["finetune"]["steps"] == 2


def test_a_fit_comes_between_the_extension_and_the_training(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    wish = {
        "model": "ropext://demo",
        "extend": {"method": "yarn", "factor": 2, "no_verify": True},
        "fit": {
            "data": "ropext://tuning",
            "steps": 2,
            "batch_tokens": 1024,
            "retrieval_items": 0,
            "held_out": 8,
        },
        "evaluate": {"data": "ropext://held-out", "max_docs": 8, "lengths": [128, 512]},
    }
    done = ropext.run(wish, "out")
    assert list(done.stages) == ["plan", "extend", "fit", "evaluate", "report"]
    assert list(done.evidence.measured.models)[-2:] == ["extended", "fitted"]
    record = json.loads((tmp_path / "out/ropext.json").read_text())
    assert record["fit"]
    again = ropext.run(wish, "out")
    assert set(again.stages.values()) == {"skipped"}


def test_the_control_is_in_the_table_and_reads_as_in_its_training(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = {
        "model": "ropext://demo",
        "extend": {"method": "yarn", "factor": 2, "no_verify": True},
        "finetune": {"data": "ropext://tuning", "steps": 1, "batch_tokens": 1024, "control": True,
                     "eval": "ropext://held-out", "eval_documents": 8},
        "evaluate": {"data": "ropext://held-out", "max_docs": 8, "lengths": [512],
                     "tasks": ["passkey"], "items": 2,
                     "fail_if": ["tail_nll@512 > 1 vs control", "passkey@512.value < 0 vs base"]},
    }  # fmt: skip
    done = ropext.run(recipe, "out")
    assert done.output
    check(done.to_json(), "run")
    check_file(Path("out.run/outcome.json"))
    variants = done.to_json()["evaluation"]["variants"]
    assert list(variants) == ["base", "untouched", "control", "extended", "tuned"]
    # The same adapter, loaded again, on the same documents.
    read = json.loads(Path("out/training/numbers.json").read_text(encoding="utf-8"))
    for label in ("base", "control", "tuned"):
        found = variants[label]["metrics"]["tail_nll@512"]["value"]
        assert found == pytest.approx(read[label]["tail_nll@512"]["value"], abs=1e-5)
    values = [variants[label]["metrics"]["tail_nll@512"]["value"] for label in ("base", "control")]
    assert values[0] != values[1]
    # Both read the last 256 tokens of the questions, which hold the needles of two of five depths.
    for label in ("base", "control"):
        assert variants[label]["metrics"]["passkey@512"]["value"] == pytest.approx(0.4)
    assert "by adaptation to the text alone" in done.to_text()
    assert "| control |" in Path("out.run/report.md").read_text(encoding="utf-8")
    pushed = ropext.push("out", "org/name", dry_run=True).files
    assert not [name for name in pushed if name.startswith("control")]


def test_two_processes_make_the_same_as_one(straight, tmp_path):
    """Evaluations to the bit; the training within rounding: sums have another order."""
    (tmp_path / "r.yaml").write_text(RECIPE)
    (_, first), (_, second) = both = in_two_processes(go, tmp_path)
    assert [code for code, _ in both] == [0, 0], first + second
    assert (first + second).count("wrote out") == 1
    one, two = (json.loads((own / "out/ropext.json").read_text()) for own in (straight, tmp_path))
    mine, theirs = (own["run"]["evaluation"]["variants"] for own in (two, one))
    for label in ("base", "untouched", "extended"):
        assert mine[label] == theirs[label]
    tails = [own["tuned"]["metrics"]["tail_nll@512"]["value"] for own in (mine, theirs)]
    assert tails[0] == pytest.approx(tails[1], abs=1e-4)
    both = in_two_processes(go, tmp_path)
    assert [code for code, _ in both] == [0, 0]
    assert "".join(said for _, said in both).count("done before, skipped") == 5
