"""Documents that are trained on and measured on: told everywhere, and never denied."""

import json
import shutil

import pytest
from trained import count_training, train

import ropext
from ropext.base.narration import Call, Hooks
from ropext.pipeline.public import evaluate
from ropext.results.gates import parse_gate
from ropext.results.model_index import card_figures
from ropext.results.report import tables
from ropext.results.report.compared import compare_models
from ropext.results.rundir import judge_gates, open_runs_to_compare
from ropext.training import report, tuned_report

pytestmark = pytest.mark.slow

RUN = {"steps": 1, "batch_tokens": 256, "rank": 2, "eval_documents": 8, "patience": 0}


def lines_of(path, first, last):
    return [json.loads(line)["text"] for line in path.read_text().splitlines()[first:last]]


@pytest.fixture(scope="module")
def data(stories, tmp_path_factory):
    """Write twelve documents to train on, eight of them again in other files and other line ends,
    and eight new ones."""
    folder = tmp_path_factory.mktemp("data")
    texts = lines_of(stories, 0, 12)
    train = folder / "train.jsonl"
    train.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    again = folder / "again"
    again.mkdir()
    for number, text in enumerate(texts[:8]):
        (again / f"{number}.txt").write_text(text.replace(" ", "\r\n", 3) + "\n")
    new = folder / "new.jsonl"
    new.write_text("".join(json.dumps({"text": t}) + "\n" for t in lines_of(stories, 20, 28)))
    return {"train": str(train), "again": str(again), "new": str(new)}


@pytest.fixture(scope="module")
def tuned(extended, data, tmp_path_factory):
    output = tmp_path_factory.mktemp("tuned") / "out"
    told = []
    done = train(
        "finetune",
        extended,
        data["train"],
        output,
        evaluate=data["again"],
        call=Call(Hooks(told.append)),
        **RUN,
    )
    return done, output, told


def read(model, data, **more):
    return evaluate(str(model), data=data, lengths=(256,), **more)


def test_an_overlap_of_training_and_evaluation_is_reported_everywhere(tuned):
    done, output, told = tuned
    mark = "8 of 8 trained on"
    assert any("8 of 8 documents were trained on, whole or in part" in line for line in told)
    assert f"tuned ({mark})" in tuned_report.finetune_result(done)
    assert done.to_json()["overlap"]["trained_on"] == 8
    section = json.loads((output / "ropext.json").read_text())["finetune"]
    assert section["overlap"]["mark"] == mark
    card = (output / "README.md").read_text()
    assert "that were not trained on" not in card
    assert "documents of which 8 of 8 were trained on" in card
    assert f"tuned ({mark})" in card
    assert {own.dataset for own in card_figures(output)} == {
        "documents of which 8 of 8 were trained on"
    }


def test_a_plan_warns_of_the_overlap_before_the_training(extended, data):
    planned = count_training("finetune", extended, data["train"], evaluate=data["again"], **RUN)
    assert "warning: [seen] 8 of 8 documents were trained on" in report.dry_run_text(planned)
    planned = count_training("finetune", extended, data["train"], evaluate=data["new"], **RUN)
    assert planned.to_json()["overlap"]["mark"] == ""
    assert "trained on" not in report.dry_run_text(planned)


def test_a_forecast_has_no_choice_documents_before_the_training(extended, data):
    options = {"batch_tokens": 256, "rank": 2, "eval_documents": 8, "evaluate": data["new"]}
    planned = count_training("finetune", extended, data["train"], **options)
    assert planned.chooses_step
    assert "chose" not in report.dry_run_text(planned)
    assert planned.to_json()["overlap"]["chosen_on"] == 0
    # the overlap of the result
    assert planned.overlap.chosen_on == planned.judging_count > 0


def test_an_evaluation_reports_trained_documents_in_tables_gates_and_comparisons(
    tuned, data, tmp_path
):
    _, output, _ = tuned
    again, new = tmp_path / "again", tmp_path / "new"
    found = read(output, data["again"], output=again, tasks=("passkey",), items=1)
    assert any("8 of 8 documents were trained on" in line for line in found.results["warnings"])
    (label,) = [name for name in found.results["variants"] if name not in ("base", "untouched")]
    mark = "8 of 8 trained on"
    name = f"{label} ({mark})"
    shown = [table for table in tables.text_tables(found) if table.rows]
    assert len(shown) >= 5
    for table in shown:
        assert name in [row[0] for row in table.rows], table.title
        assert not any(row[0].startswith("base (") for row in table.rows)
    (retrieval,) = tables.retrieval_tables(found)
    assert label in [row[0] for row in retrieval.rows]  # keys are no documents
    assert name in (again / "report.md").read_text().replace("\\", "")
    gates = [parse_gate(f"{metric}.value > 1e9") for metric in ("tail@256", "passkey@256")]
    marked, plain = judge_gates(found, gates)
    assert marked.reason.endswith(f"({label}: 8 of 8 trained on)")
    assert "trained on" not in plain.reason
    assert {own.dataset for own in card_figures(output, [str(again)])} >= {
        "again (8 of 8 trained on)"
    }
    fresh = read(output, data["new"], output=new)
    assert fresh.results["variants"][label]["overlap"]["mark"] == ""
    assert not any("trained on" in line for line in fresh.results["warnings"])
    side = compare_models(open_runs_to_compare([f"{again}:base", f"{again}:{label}"]).alone)
    assert [row[0] for row in side.tables[0].rows] == ["base", name, "winner"]
    models = {"base", "untouched", label}
    for rows in (found.table(), found.positions(), ropext.open(again).table()):
        assert {row["model"] for row in rows} == models == set(found.losses())
    assert {row["model"]: row["remark"] for row in side.table()} == {"base": None, label: mark}


def test_an_adapter_records_its_training_documents(tuned, data):
    _, output, _ = tuned
    found = read(output / "base", data["again"], adapter=str(output / "adapter")).results
    marks = {name: own["overlap"] for name, own in found["variants"].items()}
    (name,) = [own for own in marks if own.endswith("+adapter")]
    assert marks.pop(name)["trained_on"] == 8
    assert set(marks.values()) == {None}
    (output / "adapter" / "trained_on.json").rename(output / "adapter" / "kept")
    found = read(output / "base", data["new"], adapter=str(output / "adapter")).results
    (output / "adapter" / "kept").rename(output / "adapter" / "trained_on.json")
    assert found["variants"][name]["overlap"]["mark"] == "training data not recorded"


def test_a_record_without_hashes_denies_nothing(tuned, data, tmp_path):
    _, output, _ = tuned
    old = tmp_path / "old"
    shutil.copytree(output, old)
    record = json.loads((old / "ropext.json").read_text())
    del record["trained_on"], record["finetune"]["overlap"]
    (old / "ropext.json").write_text(json.dumps(record))
    found = read(old, data["new"]).results
    assert [own["overlap"] and own["overlap"]["mark"] for own in found["variants"].values()] == [
        *(None, None),  # the base, and it untouched
        "training data not recorded",
    ]
    assert any("is not (fully) recorded" in line for line in found["warnings"])
    assert {own.dataset for own in card_figures(old)} == {
        "documents (whether they were trained on is not recorded)"
    }


def test_extensions_and_fits_of_a_tuned_model_know_its_training_documents(tuned, data, tmp_path):
    """Extended again, and fitted: each record lists the documents of the earlier training."""
    _, output, _ = tuned
    wide = tmp_path / "wide"
    ropext.extend(str(output), str(wide), method="pi", factor=2, no_verify=True)
    found = read(wide, data["again"]).results["variants"]
    assert [own["overlap"]["trained_on"] for own in found.values()] == [8, 8, 8]
    fit = count_training("fit", output, data["new"], factor=2, steps=1, packing="glued")
    assert fit.overlap.mark == ""
    assert fit.data.trained.count > 12


def test_a_fit_records_its_documents_and_a_later_finetune_warns(base, data, stories, tmp_path):
    output = tmp_path / "fitted"
    options = {"factor": 4, "start": "pi", "steps": 1, "batch_tokens": 256}
    ropext.fit(base, str(stories), output, retrieval_items=0, retrieval_share=0, **options)
    record = json.loads((output / "ropext.json").read_text())
    assert record["fit"]["overlap"]["mark"] == ""
    card = (output / "README.md").read_text()
    assert "short tax" in card
    assert not {"passkey", "None"} & set(card.split())  # no question was put, no knob left open
    found = read(output, str(stories), max_docs=1000).results["variants"]
    assert found["fitted"]["overlap"]["documents"] == 24
    assert found["fitted"]["overlap"]["trained_on"] == record["trained_on"]["documents"] == 18
    assert found["fitted"]["overlap"]["chosen_on"] == len(record["fit"]["judging"]) == 6
    assert found["fitted"]["overlap"]["mark"] == "18 of 24 trained on, 6 of 24 chosen on"
    assert not card_figures(output)  # its numbers come from the documents that chose its step
    assert found["base"]["overlap"] is None  # its spectrum was fitted on nothing
    planned = count_training("finetune", output, data["new"], evaluate=data["again"], **RUN)
    held = {f"stories.jsonl:{number}" for number in range(1, 9)} & set(record["fit"]["judging"])
    assert planned.overlap.trained_on == 8 - len(held)
