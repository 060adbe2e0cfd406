"""What public functions return is read as people read it, and again from the folder."""

import json
import math
import re
import shutil

import command_line
import numpy as np
import pytest
from json_schema import check, check_file

import ropext
from ropext.base.bundled import DATA
from ropext.base.errors import InputError, UsageError
from ropext.base.guard import FILES
from ropext.base.workdir import SEAL, write_manifest

FOLDER = "measured"


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """Make a folder with an extended checkpoint, a measurement of it, and a comparison."""
    place = tmp_path_factory.mktemp("opening")
    with DATA["ropext://held-out"].open(encoding="utf-8") as stream:
        texts = [json.loads(next(stream))["text"] for _ in range(2)]
    ropext.extend("ropext://demo", place / "longer", factor=2, method="pi", no_verify=True)
    measured = ropext.evaluate(
        place / "longer",
        place / FOLDER,
        data=texts,
        lengths=[256, 512],
        tasks=["passkey"],
        items=1,
        depths=[0.5],
    )
    runs = [f"{place / FOLDER}:untouched", f"{place / FOLDER}:extended"]
    return place, measured, ropext.compare(*runs, output=place / "compared")


def test_a_folder_gives_the_values_of_its_call(work):
    place, measured, compared = work
    opened = ropext.open(place / FOLDER)
    assert type(opened) is type(measured)
    assert opened.to_json() == measured.to_json()
    assert opened == measured
    assert opened != compared
    assert opened.to_json() == json.loads((place / FOLDER / "results.json").read_text())
    assert repr(opened) == repr(measured)
    again = ropext.open(str(place / "compared"))
    assert type(again) is type(compared)
    assert again.to_json() == compared.to_json()
    assert again.table() == compared.table()


def test_an_output_gives_the_values_of_its_call(work):
    place, _, _ = work
    made = ropext.extend(
        "ropext://demo", place / "longer", factor=2, method="pi", no_verify=True, force=True
    )
    opened = ropext.open(place / "longer")
    assert opened == made
    assert opened.to_json() == made.to_json() | {"left": {}, "notes": []}
    config = json.loads((place / "longer" / "config.json").read_text())
    edits = {row["key"]: row["after"] for row in opened.table()}
    assert edits["max_position_embeddings"] == config["max_position_embeddings"] == 512
    assert edits["rope_parameters.factor"] == config["rope_parameters"]["factor"] == 2
    with pytest.raises(InputError, match="was opened and has no plan"):
        assert opened.plan
    for rows in (opened.losses, opened.positions, opened.answers):
        with pytest.raises(UsageError, match=r"it has \.table\(\) and \.to_json\(\)"):
            rows()


def test_a_comparison_moves_with_its_runs(work, tmp_path):
    place, _, compared = work
    place.rename(tmp_path / "moved")
    try:
        moved = ropext.open(tmp_path / "moved" / "compared")
    finally:
        (tmp_path / "moved").rename(place)
    assert moved.to_json() == compared.to_json()


def test_the_rows_of_an_opened_run_equal_results_json(work):
    place, measured, compared = work
    variants = json.loads((place / FOLDER / "results.json").read_text())["variants"]
    rows = measured.table()
    assert len(rows) == 2 * len(variants)
    for row in rows:
        metrics = variants[row["model"]]["metrics"]
        length = row["length"]
        assert row["perplexity"] == metrics[f"tail@{length}"]["value"]
        if row["model"] != "base":
            assert row["passkey"] == metrics[f"passkey@{length}"]["value"]
    of_comparison = compared.table()
    assert [(row["length"], row["model"]) for row in of_comparison] == [
        *((256, "untouched"), (256, "extended")),
        *((512, "untouched"), (512, "extended")),
    ]
    for row in of_comparison:
        tail = variants[row["model"]]["metrics"][f"tail@{row['length']}"]["value"]
        assert row["tail perplexity"] == pytest.approx(tail)


def test_losses_are_those_of_the_files(work):
    place, measured, compared = work
    folder = place / FOLDER
    store = json.loads((folder / "results.json").read_text())["variants"]["extended"]["store"]
    hashes = [row["hashes"]["512"] for row in json.loads((folder / "documents.json").read_text())]
    losses = measured.losses()
    assert list(losses) == ["base", "untouched", "extended"]
    (unit,) = (folder / "variants" / store).glob("pass-*")
    for row, name in zip(losses["extended"], hashes, strict=True):
        kept = np.load(unit / f"{name[:32]}.npy")
        assert math.isnan(row[0])
        assert np.array_equal(row[1:], kept[1:512])
    for label, matrix in compared.losses().items():  # in the order of a comparison
        assert sorted(matrix[:, 1]) == sorted(losses[label][:, 1])


def test_positions_and_answers_are_those_of_the_files(work):
    place, measured, compared = work
    variants = json.loads((place / FOLDER / "results.json").read_text())["variants"]
    rows = measured.positions()
    for label, variant in variants.items():
        of_model = [row for row in rows if row["model"] == label]
        assert [row["loss"] for row in of_model] == [
            o["nll"]["value"] for o in variant["positions"]
        ]
        gains = [octave.get("gain", {}).get("value") for octave in variant["positions"]]
        assert [row["gain"] for row in of_model] == gains
    lines = (place / FOLDER / "items.jsonl").read_text().splitlines()
    kept = [json.loads(line) for line in lines]
    answers = measured.answers()
    assert len(answers) == len(kept) > 0
    for answer, line in zip(answers, kept, strict=True):
        assert answer.pop("model") == line.pop("variant")
        assert answer == line
    # Each model's mean loss over [start, stop) of the documents in common.
    of_tokens = compared.losses()
    for row in compared.positions():
        part = of_tokens[row["model"]][:, row["start"] : row["stop"]]
        assert row["loss"] == pytest.approx(np.nanmean(part))


def test_a_notebook_shows_the_table(work):
    _, measured, compared = work
    page = measured._repr_html_()
    assert page.count("<table>") == 1
    for row in measured.table():
        assert f"<td>{row['model']}</td>" in page
    assert repr(measured).startswith("<Evaluated in ")
    assert "\n        extended " in repr(measured)
    assert compared._repr_html_().count("<table>") == len(compared.tables)


def test_a_run_is_opened_by_its_output(tmp_path):
    with DATA["ropext://held-out"].open(encoding="utf-8") as stream:
        (tmp_path / "texts.jsonl").write_text(next(stream) + next(stream), "utf-8")
    recipe = {
        "model": "ropext://demo",
        "extend": {"method": "pi", "factor": 2, "no_verify": True},
        "evaluate": {
            "data": str(tmp_path / "texts.jsonl"),
            "lengths": "256,512",
        },
    }
    for gates, is_there in ((["tail@512.value < 1"], True), (["tail@512.value > 1"], False)):
        recipe["evaluate"]["fail_if"] = gates
        done = ropext.run(recipe, tmp_path / "whole", force=True)
        assert (done.output is not None) == is_there
        for place in (tmp_path / "whole", tmp_path / "whole.run"):
            opened = ropext.open(place)
            assert opened == done
            assert opened.to_json() == done.to_json() | {"stages": dict(opened.stages)}
            check(done.to_json(), "run")
            assert opened.table() == done.table()
        check_file(tmp_path / "whole.run/outcome.json")
        assert [row["model"] for row in opened.table()][:3] == ["base", "untouched", "extended"]
        assert opened.losses()["extended"].shape == (2, 512)
    assert (failed := opened).to_json()["gates"][0]["passed"] is False
    recipe["evaluate"]["fail_if"] = ["tail@512.value < 1"]
    again = ropext.run(recipe, tmp_path / "whole", force=True)
    assert again.stages["evaluate"] == "skipped"
    assert ropext.open(tmp_path / "whole") == again != failed
    recipe["evaluate"]["lengths"] = "512"
    ropext.run(recipe, tmp_path / "whole", only="evaluate")
    with pytest.raises(InputError, match="is not finished; run the same command again"):
        ropext.open(tmp_path / "whole")


@pytest.mark.slow
def test_a_gate_is_judged_again_if_the_run_that_it_names_changed(work, tmp_path):
    place, _, _ = work
    with DATA["ropext://held-out"].open(encoding="utf-8") as stream:
        (tmp_path / "texts.jsonl").write_text(next(stream) + next(stream), "utf-8")
    other = tmp_path / "other"
    shutil.copytree(place / FOLDER, other)
    measuring = {"data": str(tmp_path / "texts.jsonl"), "lengths": "256,512"}
    gate = f"tail_nll@512.value > 0.01 vs {other}"
    recipe = {
        "model": "ropext://demo",
        "extend": {"method": "pi", "factor": 2, "no_verify": True},
        "evaluate": measuring | {"fail_if": [gate]},
    }
    output = tmp_path / "whole"
    assert ropext.run(recipe, output).output == output
    assert ropext.open(output).to_json()["gates"][0]["passed"] is True
    shutil.rmtree(other)
    ropext.extend("ropext://demo", tmp_path / "yarn", factor=2, method="yarn", no_verify=True)
    ropext.evaluate(tmp_path / "yarn", other, **measuring)
    assert ropext.run(recipe, output).output is None
    opened = ropext.open(output)
    (judged,) = opened.to_json()["gates"]
    assert (opened.output, judged["passed"]) == (None, False)
    kept = json.loads((tmp_path / "whole.run/outcome.json").read_text())
    assert [gate["passed"] for gate in kept["gates"]] == [False]
    assert "FAILED tail_nll@512" in (tmp_path / "whole.run/report.html").read_text("utf-8")
    results = other / "results.json"
    results.write_text(results.read_text("utf-8").replace("0.", "1.", 1), "utf-8")
    with pytest.raises(InputError, match=r"edited, added or deleted .* results\.json"):
        ropext.run(recipe, output)


def test_a_run_json_that_was_edited_is_named_wherever_a_run_is_read_or_resumed(
    work, tmp_path, ropext_line
):
    place, _, _ = work
    folder = shutil.copytree(place / FOLDER, tmp_path / "edited")
    manifest = folder / "run.json"
    text = manifest.read_text("utf-8")
    manifest.write_text(text.replace('"eval"', '"evil"', 1), "utf-8")
    assert manifest.read_text("utf-8") != text
    said = f"{manifest} is not as ropext wrote it: it was edited or damaged"
    for words in (
        ("compare", folder),
        ("compare", place / FOLDER, "--fail-if", f"extended:tail@512 > 9 vs {folder}"),
        ("eval", place / "longer", "--data", "ropext://held-out", "--lengths", "512", "-o", folder),
    ):
        code, out, err = ropext_line(*words)
        assert (code, out) == (2, ""), words
        assert said in err, words
    with pytest.raises(InputError, match=re.escape(said)):
        ropext.open(folder)


def test_a_path_without_a_result_gives_one_sentence(tmp_path):
    (tmp_path / "file").write_text("no result")
    for folder in (tmp_path, tmp_path / "nowhere", tmp_path / "file"):
        with pytest.raises(InputError, match="holds no result of ropext; give what `ropext ext"):
            ropext.open(folder)


def test_a_run_that_changed_is_not_compared_again(work):
    place, _, _ = work
    manifest = place / FOLDER / "run.json"
    kept = manifest.read_bytes()
    data = json.loads(kept)
    data["decides"]["seed"] = 7
    write_manifest(manifest.parent, {k: v for k, v in data.items() if k != SEAL})
    try:
        with pytest.raises(InputError, match=r"changed since .* compared it"):
            ropext.open(place / "compared")
    finally:
        manifest.write_bytes(kept)


@pytest.fixture
def ropext_line(capsys):
    """Run a command line in this process: (exit code, stdout, stderr)."""

    def run(*words):
        code, said = command_line.run(*words, capsys=capsys)
        return code, said.out, said.err

    return run


def halved(text):
    """Return results in which the perplexity of `extended` is half of the old one."""
    results = json.loads(text)
    results["variants"]["extended"]["metrics"]["tail@512"]["value"] /= 2
    return json.dumps(results)


EDITS = {
    "results.json": halved,
    "items.jsonl": lambda text: text.replace('"recall": 0.', '"recall": 1.').replace("0.0", "1.0"),
    "documents.json": lambda text: text.replace("texts:1", "texts:9"),
}


@pytest.mark.parametrize("name", [*EDITS, "variants"])
def test_a_file_that_was_edited_is_refused_by_name_wherever_a_run_is_read(
    work, name, tmp_path, ropext_line
):
    place, measured, _ = work
    folder = shutil.copytree(place / FOLDER, tmp_path / "edited")
    whole = shutil.copytree(place / FOLDER, tmp_path / "whole")
    assert ropext.open(whole) == measured
    if name in EDITS:
        before = (folder / name).read_text("utf-8")
        (folder / name).write_text(EDITS[name](before), "utf-8")
        assert (folder / name).read_text("utf-8") != before
    else:
        file = next((folder / "variants").glob("extended-*/pass-*/*.npy"))
        np.save(file, np.load(file) / 2)
        name = file.relative_to(folder).as_posix()
    for words in (
        ("compare", f"{folder}:untouched", f"{folder}:extended"),
        ("compare", f"{whole}:untouched", f"{folder}:extended"),
        ("compare", whole, "--fail-if", f"tail_nll@512.value > 9 vs {folder}"),
        ("push", place / "longer", "me/x", "--dry-run", "--results", f"{folder}:extended"),
    ):
        code, out, err = ropext_line(*words)
        assert (code, out) == (2, ""), words
        assert f"{folder} holds files that were edited" in err, words
        assert name in err, words
    with pytest.raises(InputError, match=name):
        ropext.open(folder)


def test_a_run_whose_manifest_lists_no_digest_is_read_with_a_warning(work, tmp_path, ropext_line):
    place, measured, _ = work
    folder = shutil.copytree(place / FOLDER, tmp_path / "old")
    data = json.loads((folder / "run.json").read_text("utf-8"))
    rest = {key: value for key, value in data.items() if key not in (SEAL, FILES)}
    write_manifest(folder, rest)
    said = f"[no-digest] {folder}: run.json lists no digest of results.json"
    *others, warning = ropext.open(folder).to_json()["warnings"]
    assert warning.startswith(said)
    assert others == measured.to_json()["warnings"]
    push = ("push", place / "longer", "me/x", "--dry-run", "--results", f"{folder}:extended")
    for words in (("compare", f"{folder}:untouched", f"{folder}:extended"), push):
        code, _, err = ropext_line(*words)
        assert (code, err.count(f"warning: {said}")) == (0, 1), words
    gate = ("compare", place / FOLDER, "--fail-if", f"tail_nll@512.value > 9 vs {folder}")
    code, out, err = ropext_line(*gate)
    assert code == 0
    assert said in out + err
