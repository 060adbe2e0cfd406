"""`ropext run`, `recipes`, `schema`, and `extend` with later steps, as a user types them."""

import io
import json
import re
from datetime import UTC, datetime

import pytest
from json_schema import check, check_file

from ropext.cli.output import Timed


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "r.yaml"
    path.write_text(
        "model: ropext://demo\nextend:\n  method: yarn\n  factor: 2\n  no_verify: true\n"
    )
    (tmp_path / "old.yaml").write_text(
        "model: ropext://demo\ntrust_remote_code: true\nextend: {factor: 2}\n"
    )
    return path


def test_run_reports_finished_and_next_stages(ropext, recipe, tmp_path):
    code, out, err = ropext("run", "r.yaml", "-o", "out")
    assert code == 0, err
    assert "plan done, extend done, report done" in out
    assert "next: ropext verify out" in out
    assert err.splitlines() == [f"{name}: begins" for name in ("plan", "extend", "report")]
    code, out, err = ropext("run", "r.yaml", "-o", "out", "--json", "--quiet")
    assert (code, err) == (0, "")
    check(json.loads(out), "run")
    check_file(tmp_path / "out.run/outcome.json")
    assert json.loads(out)["stages"] == {
        "plan": "skipped",
        "extend": "skipped",
        "report": "skipped",
    }
    assert json.loads((tmp_path / "out/ropext.json").read_text())["command"][:2] == [
        "ropext",
        "run",
    ]


def test_log_times_puts_the_time_in_front_of_each_line_on_stderr(ropext, recipe):
    before = datetime.now(UTC).replace(microsecond=0)
    code, out, err = ropext("run", "r.yaml", "-o", "out", "--log-times", "--json")
    after = datetime.now(UTC)
    assert code == 0, err
    lines = [line.split(" ", 1) for line in err.splitlines()]
    assert [text for _, text in lines] == ["plan: begins", "extend: begins", "report: begins"]
    times = [datetime.strptime(at, "%Y-%m-%dT%H:%M:%S%z") for at, _ in lines]
    assert [before, *times, after] == sorted([before, *times, after])
    assert json.loads(out)["stages"]["extend"] == "done"
    code, _, err = ropext("run", "r.yaml", "-o", "out", "--log-times", "--only", "dance")
    assert code == 2
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ error: --only dance: [^\n]*\n", err)
    assert ropext("run", "r.yaml", "-o", "out", "--only", "dance")[2].startswith("error: ")


def test_a_line_in_parts_and_lines_in_one_part_have_one_time_each():
    stream = io.StringIO()
    timed = Timed(stream)
    for part in ("one", " line\n", "two\nlines\n", "the last"):
        timed.write(part)
    stamp = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ "
    assert re.sub(stamp, "@", stream.getvalue()) == "@one line\n@two\n@lines\n@the last"
    assert not timed.isatty()


def test_the_help_names_the_stages(ropext):
    from ropext.pipeline.recipe import STAGES

    text = " ".join(ropext("run", "--help")[1].split())
    assert f"all later ones: {', '.join(STAGES[:-1])} or {STAGES[-1]}" in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["run", "nowhere.yaml", "-o", "out"],
            "nowhere.yaml is neither a file nor a bundled recipe",
        ),
        (["run", "smoke-tset", "-o", "out"], "did you mean smoke-test?"),
        (["run", "r.yaml"], "r.yaml names no output; add output: DIR, or give -o OUT"),
        (["run", "r.yaml", "-o", "out", "extend.facter=3"], "did you mean factor"),
        (["run", "r.yaml", "-o", "out", "--only", "fit"], "the recipe has no such section"),
        (["run", "r.yaml", "-o", "out", "--from", "extend", "--only", "plan"], "give one"),
        (
            ["extend", "ropext://demo", "--factor", "2", "-o", "out", "--finetune", "books.jsonl"],
            "the command line: finetune.data is books.jsonl, and there is no such file or folder",
        ),
        (["run", "r.yaml", "-o", "out", "extend.method=longrope"], "--pair-factors"),
        (
            ["run", "r.yaml", "-o", "out", "extend.method=pi", "extend.beta_fast=3"],
            "--beta-fast is a knob of by-parts and yarn, not of --method pi",
        ),
        (["run", "r.yaml", "-o", "out", "model=.."], "is inside the input"),
        (["run", "r.yaml", "-o", "out", "=4"], "a recipe has no key ''"),
        (
            ["run", "r.yaml", "-o", "out", "trust_remote_code=true"],
            "no recipe allows a model's own code to run; where you trust the model, give "
            "--trust-remote-code on the command line",
        ),
        (["run", "old.yaml", "-o", "out"], "old.yaml, line 2: no recipe allows a model's own code"),
        (
            ["run", "r.yaml", "-o", "out", "evaluate.attn_implementation=evil/kernel"],
            "'evil/kernel' names a kernel on the hub, which transformers would fetch and run",
        ),
        (["recipes", "list"], "recipes takes ls, or cat NAME, and not 'list'"),
        (["recipes", "ls", "demo"], "recipes ls takes no name"),
        (["recipes", "cat"], "recipes cat wants a NAME"),
        (["recipes", "cat", "smoke"], "did you mean smoke-test?"),
        (
            ["extend", "ropext://demo", "-o", "out", "finetune.steps=3"],
            "finetune.steps=3: finetune needs data",
        ),
        (["extend", "ropext://dem", "--factor", "2", "-o", "out"], "did you mean ropext://demo?"),
        (
            ["extend", "ropext://demo", "--factor", "2", "-o", "out", "evaluate.items=x"],
            "evaluate.items must be a whole number, was 'x'",
        ),
    ],
)
def test_a_mistake_in_run_exits_2_with_one_sentence(ropext, recipe, tmp_path, words, said):
    code, out, err = ropext(*words)
    assert (code, out) == (2, "")
    assert said in err
    assert err.startswith("error: ")
    assert len(err.splitlines()) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["old.yaml", "r.yaml"]


def test_extend_with_overrides_alone_is_a_run_too(ropext, recipe, tmp_path):
    words = ["extend", "ropext://demo", "--factor", "2", "--no-verify", "-o", "out"]
    code, _, err = ropext(*words, "seed=3")
    assert code == 0, err
    assert json.loads((tmp_path / "out.run/run.json").read_text())["resolved"] == {
        "model": "ropext://demo",
        "seed": 3,
        "extend": {
            "factor": 2.0,
            "from_original": False,
            "again": False,
            "even_so": False,
            "untrained": False,
            "length_only": False,
            "link": "copy",
            "no_verify": True,
            "hash": False,
        },
    }


def test_plain_extend_leaves_no_run_directory(ropext, recipe, tmp_path):
    assert ropext("extend", "ropext://demo", "--factor", "2", "--no-verify", "-o", "out")[0] == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["old.yaml", "out", "r.yaml"]


def test_recipes_are_listed_and_printed(ropext):
    from ropext.base.bundled import recipes

    code, out, _ = ropext("recipes", "ls")
    assert code == 0
    for name, path in recipes().items():
        assert f"{name}\n" in out
        assert ropext("recipes", "cat", name)[1] == path.read_text()
    found = json.loads(ropext("recipes", "ls", "--json")[1])
    assert {own["name"] for own in found} == set(recipes())


def test_the_schema_is_one_json_document(ropext):
    code, out, _ = ropext("schema")
    assert code == 0
    assert json.loads(out)["required"] == ["model", "extend"]
