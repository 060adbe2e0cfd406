"""ropext reads the folder of a run that an older commit wrote, and refuses a damaged one in a
sentence that names the file and the key.

`recorded/run` is `ropext eval ropext://demo --method yarn --factor 2 --data ropext://held-out
--max-docs 3 --lengths 256,512 --tasks passkey --items 2 -o run` by commit 861e2509, the last whose
results were read and written by hand, without its reports.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from ropext.base.errors import InputError
from ropext.results.report.compared import compare_runs
from ropext.results.rundir import read_run, read_unchecked_run

RUN = Path(__file__).with_name("recorded") / "run"
LABELS = ["base", "untouched", "yarn-2x"]


def test_an_older_run_is_read_as_it_was_written():
    run = read_run(RUN)
    written = json.loads((RUN / "results.json").read_text("utf-8"))
    assert json.loads(json.dumps(run.results)) == written
    assert list(run.models) == LABELS
    assert len(run.models["yarn-2x"].items) == 20
    assert run.facts.warnings == tuple(written["warnings"])


@pytest.mark.parametrize("label", LABELS)
def test_the_numbers_of_a_recorded_run_follow_from_its_arrays_and_answers(label):
    run = read_run(RUN)
    metrics = json.loads((RUN / "results.json").read_text("utf-8"))["variants"][label]["metrics"]
    model = replace(run.models[label], numbers=None)
    again = replace(run, models=run.models | {label: model}).values(label)
    assert [name for name in again if name in metrics] == list(metrics)
    for name in metrics:
        value = again[name]
        assert value.value == pytest.approx(metrics[name]["value"], rel=1e-12), name
        assert value.n == metrics[name]["n"]


def test_the_models_of_a_recorded_run_are_compared():
    compared = compare_runs([f"{RUN}:base", f"{RUN}:untouched", f"{RUN}:yarn-2x"])[1]
    tails = compared.tables[0]
    assert [row[0] for row in tails.rows] == [*LABELS, "winner"]


DAMAGE = {
    "results.json": [
        (("lengths",), "ab", "results.json is damaged: "),
        (("headline",), 3, "results.json is damaged: headline is not a text"),
        (("warnings",), 3, "results.json is damaged: warnings is not an array"),
        (("variants", "base", "metrics"), [], "metrics is not an object"),
        (("variants", "base", "passes"), {"short": "x"}, "passes.short is not a whole number"),
        (("variants", "base", "metrics", "tail@512", "value"), "x", "tail@512.value is not a num"),
        (("variants", "base", "metrics", "tail@512", "ci95"), [1], "tail@512.ci95"),
        (("variants", "base", "positions", 0, "nll"), 1, "positions.0.nll is not an object"),
        (("variants", "yarn-2x", "retrieval", "passkey"), 1, "retrieval.passkey is not an array"),
        (("variants", "yarn-2x", "overlap"), {"names": 1}, "the key 'documents' is missing"),
    ],
    "documents.json": [((0, "hashes"), {}, "documents.json is damaged")],
}


@pytest.mark.parametrize(
    ("file", "keys", "value", "sentence"),
    [(file, *damage) for file, every in DAMAGE.items() for damage in every],
    ids=str,
)
def test_a_damaged_file_is_named_with_its_key(tmp_path, file, keys, value, sentence):
    shutil.copytree(RUN, tmp_path / "run")
    path = tmp_path / "run" / file
    data = json.loads(path.read_text("utf-8"))
    place = data
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value
    path.write_text(json.dumps(data), "utf-8")
    with pytest.raises(InputError) as refused:
        read_unchecked_run(tmp_path / "run")
    said = str(refused.value)
    assert sentence in said
    assert file in said
    assert "\n" not in said


@pytest.mark.parametrize("key", ["task", "length", "depth", "exact", "answer", "prompt_hash"])
def test_an_answer_without_a_key_is_refused(tmp_path, key):
    shutil.copytree(RUN, tmp_path / "run")
    path = tmp_path / "run" / "items.jsonl"
    first, *others = path.read_text("utf-8").splitlines()
    answer = json.loads(first)
    del answer[key]
    path.write_text("\n".join([json.dumps(answer), *others]), "utf-8")
    with pytest.raises(InputError, match=rf"items\.jsonl is damaged: the key '{key}' is missing"):
        read_unchecked_run(tmp_path / "run")
