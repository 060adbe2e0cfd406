"""`ropext eval` and `ropext compare` as a shell sees them: stdout, stderr, exit codes, files."""

import csv
import io
import json
import shutil

import numpy as np
import pytest
import torch
from command_line import run
from json_schema import check
from marked import manifest
from pyarrow import parquet
from tiny_checkpoints import write_checkpoint, write_documents

from ropext.base.errors import RopextError
from ropext.options.evaluate import Evaluate
from ropext.results import rundir
from ropext.results.gates import GateMetrics, parse_gate
from ropext.results.rundir import read_run


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """Write two runs of the same tokens, and one of other tokens."""
    path = tmp_path_factory.mktemp("commands")
    torch.set_num_threads(1)
    write_checkpoint(path / "model")
    write_checkpoint(path / "other", seed=1)
    write_documents(path / "docs.jsonl")
    write_documents(path / "strange.jsonl", seed=7)
    for model, data, name, more in (
        ("model", "docs", "one", ["--method", "yarn,pi", "--factor", "4"]),
        ("other", "docs", "two", ["--method", "yarn", "--factor", "4"]),
        ("model", "strange", "apart", []),
    ):
        arguments = [str(path / model), "--data", str(path / f"{data}.jsonl"), "--quiet"]
        code, _ = run("eval", *arguments, "--lengths", "64,256", "-o", str(path / name), *more)
        assert code == 0
    return path


def evaluated(runs, *more, capsys):
    arguments = [str(runs / "model"), "--data", str(runs / "docs.jsonl"), "--lengths", "64,256"]
    keep = ["--method", "yarn,pi", "--factor", "4", "-o", str(runs / "one")]
    return run("eval", *arguments, *keep, *more, capsys=capsys)


def test_stdout_is_the_result_and_stderr_the_narration(runs, capsys):
    code, said = evaluated(runs, capsys=capsys)
    assert code == 0
    assert "\n\nPerplexity of the last 16 tokens before each length\n" in said.out
    assert "  gain: how much better a model predicts" in said.out
    assert "36 finished pieces were found" in said.err
    assert "report.html" in said.err


def test_a_terminal_shows_one_table_of_lengths_and_the_rest_on_request(runs, capsys):
    printed = evaluated(runs, capsys=capsys)[1].out
    assert printed.count("\n\n") == 1  # the sure statement, then a table
    said, printed = printed.split("\n\n")
    assert "Inside the trained context pi-4x pays a short tax" in said
    lines = [line.split() for line in printed.splitlines()]
    results = json.loads((runs / "one" / "results.json").read_text())
    own = results["variants"]["pi-4x"]["metrics"]
    first, last = [line for line in lines if line[:1] == ["pi-4x"]]
    assert float(last[1]) == pytest.approx(own["tail@256"]["value"], abs=1e-3)
    assert float(last[2]) == pytest.approx(own["gain@256"]["value"], abs=1e-4)
    tax = own["short_tax"]["value"]
    assert any(float(word) == pytest.approx(tax, abs=1e-4) for word in first[3:] if word[0] in "+-")
    assert [line[1] for line in lines if line[:1] == ["64"]] == ["base"]
    every = evaluated(runs, "--full", capsys=capsys)[1].out
    for title in ("Cumulative perplexity", "Bits per byte", "Loss by position", "effective"):
        assert title in every
        assert title not in printed


def test_json_is_one_document_and_equals_the_file(runs, capsys):
    code, said = evaluated(runs, "--json", "--quiet", capsys=capsys)
    data = json.loads(said.out)
    check(data, "results")
    assert (code, said.err) == (0, "")
    assert data.pop("gates") == []
    assert data == json.loads((runs / "one" / "results.json").read_text())
    value = data["variants"]["yarn-4x"]["metrics"]["tail@256"]
    assert set(value) == {"value", "se", "ci95", "n"}
    assert value["ci95"][0] < value["value"] < value["ci95"][1]
    assert value["n"] == 9


def test_a_csv_on_stdout_holds_the_numbers_of_the_file_and_nothing_else(runs, capsys):
    code, said = evaluated(runs, "--format", "csv", capsys=capsys)
    rows = list(csv.DictReader(io.StringIO(said.out)))
    results = json.loads((runs / "one" / "results.json").read_text())["variants"]
    assert (code, len(rows)) == (0, 8)
    for row in rows:
        value = results[row["model"]]["metrics"][f"tail@{row['length']}"]
        assert float(row["perplexity"]) == value["value"]
        assert [float(row["perplexity low"]), float(row["perplexity high"])] == value["ci95"]
    assert "Inside the trained context pi-4x pays a short tax" in said.err


def test_compare_writes_its_tables_as_latex(runs, capsys):
    names = [f"{runs}/one:{name}" for name in ("yarn-4x", "pi-4x")]
    code, said = run("compare", *names, "--format", "latex", capsys=capsys)
    assert (code, said.out.count("\\begin{tabular}")) == (0, 3)
    assert said.out.startswith("% Tail perplexity, 9 paired documents\n")


def test_compare_gives_a_csv_a_row_for_each_length_and_model(runs, capsys):
    names = [f"{runs}/one:{name}" for name in ("yarn-4x", "pi-4x")]
    code, said = run("compare", *names, "--json", capsys=capsys)
    assert code == 0
    text = json.loads(said.out)["text"]
    code, said = run("compare", *names, "--format", "csv", capsys=capsys)
    rows = list(csv.DictReader(io.StringIO(said.out)))
    wanted = [(str(at["length"]), name) for at in text["lengths"] for name in at["tail"]]
    assert [(row["length"], row["model"]) for row in rows] == wanted
    assert len(wanted) == 2 * len(text["lengths"])
    values = [value for at in text["lengths"] for value in at["tail"].values()]
    assert [float(row["tail perplexity"]) for row in rows] == [each["value"] for each in values]
    for at, row in zip(text["lengths"], rows[1::2], strict=True):
        assert float(row["difference"]) == at["difference"]["pi-4x"]["value"]
        assert float(row["difference inside"]) == text["short"]["pi-4x"]["value"]
    for row in rows[::2]:  # the reference
        assert row["difference"] == row["difference high"] == row["difference inside"] == ""


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--format", "csv", "--json"), "--format csv and --json are two forms of the result"),
        (("--format", "csv", "--dry-run"), "--format prints a measurement"),
    ],
)
def test_a_format_without_a_table_is_refused(runs, words, sentence, capsys):
    code, said = evaluated(runs, *words, capsys=capsys)
    assert code == 2
    assert sentence in said.err


@pytest.mark.parametrize("where", ["documents", "variants"])
@pytest.mark.parametrize("kind", ["claims", "object", "cut"])
def test_a_strangers_array_is_one_sentence_and_runs_nothing(runs, tmp_path, where, kind, capsys):
    theirs = shutil.copytree(runs / "two", tmp_path / "theirs")
    (file, *_) = (theirs / where).rglob("*.npy")
    if kind == "claims":  # eight terabytes
        with file.open("wb") as stream:
            head = {"descr": "<i8", "fortran_order": False, "shape": (10**12,)}
            np.lib.format.write_array_header_1_0(stream, head)
    elif kind == "object":
        np.save(file, np.array([tmp_path], dtype=object), allow_pickle=True)
    else:
        file.write_bytes(file.read_bytes()[:20])
    code, said = run("compare", str(runs / "one"), str(theirs), capsys=capsys)
    assert (code, said.out, said.err.count("\n")) == (2, "", 1)
    assert "theirs is damaged" in said.err


def judged(runs, gate):
    """Return the exit code of one gate on the first run."""
    try:
        rundir.raise_if_gates_failed(rundir.judge_gates(read_run(runs / "one"), [parse_gate(gate)]))
    except RopextError as error:
        return error.exit_code
    return 0


@pytest.mark.parametrize(
    ("gate", "code"),
    [
        ("tail@256 > 1", 3),
        ("tail@256 > 1e9", 0),
        ("yarn-4x:short_tax.value > 1e9", 0),
        ("tail@256 > -1e9 vs untouched", 3),
        ("tail@256 > 1e9 vs untouched", 0),
        ("yarn-4x:tail@256 > 1e9 vs {runs}/two", 0),
        ("yarn-4x:tail@256 > -1e9 vs {runs}/two:untouched", 3),
        ("yarn-4x:tail@256 > 1e9 vs {runs}/apart", 3),  # cannot be answered
        ("tail@4k > 1", 3),
        ("tail@256 = 1", 2),
        ("nobody:tail@256 > 1", 2),
        ("yarn-4x:tail@256 > 1 vs yarn-4x", 2),
        ("yarn-4x:tail@256 > 1 vs {runs}/one:yarn-4x", 2),
        ("tail@256 > 1e9 vs yarn-4x", 0),
        ("tail@256 > 1 vs {runs}/one", 2),
        ("tail@256 > 1 vs " + "a" * 300, 3),
        ("rounding@256 > 1", 2),  # no cache is rounded
        ("tail@256 > 1 vs nowhere", 3),
    ],
)
def test_fail_if_sets_the_exit_code(runs, gate, code):
    assert judged(runs, gate.format(runs=runs)) == code


@pytest.mark.parametrize("words", [["-o", "never"], ["--dry-run"]])
@pytest.mark.parametrize(
    ("gate", "said"),
    [
        ("tail@4k > 1", "4k is none of the lengths that are measured (64, 256)"),
        ("passkey@256 < 1", "passkey is asked only where --tasks names it: add --tasks passkey"),
        ("passky@256 < 1", "no such metric; there are tail@LENGTH, tail_nll@LENGTH, "),
        ("base:gain@256 > 1", "no such metric; there are tail@LENGTH, "),
        ("nobody:tail@256 > 1", "no variant 'nobody'; there are base, untouched"),
        ("tail@256 > 1 vs untouched", "compares untouched only with itself; name another model"),
        ("base:tail@256 > 1 vs base", "vs, or ./base for the folder of that name"),
        ("tail@256 > 1 vs ./untouched", "./untouched is neither the directory of an evaluation"),
        ("tail@256 > 1 vs " + "a" * 300, "a" * 80 + " cannot be read: File name too long"),
        ("tail@256 > 1 vs nowhere", "nowhere is neither the directory of an evaluation nor a"),
        ("tail@256 > 1 vs {runs}", "has no results of ropext eval"),
    ],
)
def test_a_gate_on_an_unmeasured_metric_is_refused_before_anything_is_read(
    runs, capsys, tmp_path, monkeypatch, words, gate, said
):
    monkeypatch.chdir(tmp_path)
    asked = [str(runs / "model"), "--data", str(runs / "docs.jsonl"), "--lengths", "64,256"]
    gate = gate.format(runs=runs)
    code, captured = run("eval", *asked, "--fail-if", gate, *words, capsys=capsys)
    assert (code, captured.out) == (2, "")
    assert said in captured.err
    assert "loading" not in captured.err
    assert list(tmp_path.iterdir()) == []


def test_a_variant_comes_before_a_folder_of_its_name(runs, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(runs / "two", "yarn-4x")
    (tmp_path / "pi-4x").mkdir()  # no run: `vs pi-4x` does not read it

    def looked_at(gate):
        words = ("compare", str(runs / "one"), "--fail-if", gate, "--json")
        code, said = run(*words, capsys=capsys)
        assert code in (0, 3), said.err
        gates = json.loads(said.out)["gates"]
        return {judged["variant"]: judged["looked_at"] for judged in gates}

    one, two = read_run(runs / "one"), read_run(runs / "two")
    beside = one.difference("pi-4x", one.only("yarn-4x"))["tail@256"].value
    apart = one.difference("pi-4x", two.only("yarn-4x"))["tail@256"].value
    assert beside != apart
    assert looked_at("tail@256.value > 0 vs yarn-4x") == {"pi-4x": beside}
    folder = looked_at("tail@256.value > 0 vs ./yarn-4x:yarn-4x")
    assert (list(folder), folder["pi-4x"]) == (["yarn-4x", "pi-4x"], apart)
    assert list(looked_at("tail@256.value > 0 vs pi-4x")) == ["yarn-4x"]


@pytest.mark.parametrize(
    ("specs", "gate", "judged"),
    [
        (["one:yarn-4x", "one:pi-4x"], "tail@256", ["yarn-4x", "pi-4x"]),
        (["one:yarn-4x", "one:untouched"], "tail@256", ["yarn-4x"]),
        (["one:base", "one:untouched"], "tail@256", ["untouched"]),
        (["one:base", "one:pi-4x"], "base:tail@256", ["base"]),
        (["one:yarn-4x", "two"], "tail@256", ["one:yarn-4x", "two:yarn-4x"]),
        (["one", "two"], "tail@256", ["one:yarn-4x", "pi-4x", "two:yarn-4x"]),
        (["one", "two"], "pi-4x:tail@256", ["pi-4x"]),
        (["one:yarn-4x", "two:untouched"], "untouched:tail@256", ["untouched"]),
        (["one", "again/../one:pi-4x"], "tail@256", ["yarn-4x", "one:pi-4x"]),
        (["one:base", "two:base"], "tail@256", "it is about none of one:base, two:base; name one"),
        (["one:base", "one:pi-4x"], "yarn-4x:tail@256", "no variant 'yarn-4x'; there are base, p"),
    ],
)
def test_compare_judges_the_named_models_once_each(
    runs, tmp_path, monkeypatch, capsys, specs, gate, judged
):
    monkeypatch.chdir(runs)
    (runs / "again").mkdir(exist_ok=True)
    words = ("compare", *specs, "--json", "-o", str(tmp_path / "report"), "--fail-if")
    code, said = run(*words, f"{gate} > 1", capsys=capsys)
    if isinstance(judged, str):
        assert code == 2
        assert judged in json.loads(said.out)["error"]
        assert not (tmp_path / "report").exists()
        return
    assert code == 3
    assert [one["variant"] for one in json.loads(said.out)["gates"]] == judged
    assert f"{len(judged)} of {len(judged)} gates failed" in said.err
    for name in judged:
        assert f"({name}: " in said.err


def test_an_output_may_have_the_name_of_the_variant_that_a_gate_names(
    runs, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(runs / "one", "base")
    again = [str(runs / "model"), "--data", str(runs / "docs.jsonl"), "--lengths", "64,256"]
    again += ["--method", "yarn,pi", "--factor", "4", "-o", "base"]
    code, said = run("eval", *again, "--fail-if", "tail@256 > 1e9 vs base", capsys=capsys)
    assert code == 0, said.err
    code, said = run("eval", *again, "--fail-if", "tail@256 > 1e9 vs ./base", capsys=capsys)
    assert code == 2
    assert "--fail-if" in said.err


def test_gates_accept_exactly_the_measured_metrics(runs, tmp_path, capsys):
    """The names known before the run are the names in the results, for each variant and for
    pairs."""
    arguments = [str(runs / "model"), "--data", str(runs / "docs.jsonl"), "--lengths", "64,256"]
    arguments += ["--protocol", "hf-stride", "--tasks", "passkey", "--items", "1", "--quiet"]
    arguments += ["--method", "yarn", "--factor", "4", "-o", str(tmp_path / "run")]
    assert run("eval", *arguments, capsys=capsys)[0] == 0
    done = read_run(tmp_path / "run")
    labels = tuple(done.models)
    options = Evaluate(data="docs.jsonl", tasks=("passkey",), protocol="hf-stride")
    coming = GateMetrics(options, done.models, (64, 256))

    def flat(at, whole):
        return {f"{name}@{length}" for name in at for length in (64, 256)} | {*whole}

    for label in labels:
        assert flat(*coming.metrics(label)) == set(done.results["variants"][label]["metrics"])
        for other in {*labels} - {label}:
            pair = done.difference(label, done.only(other))
            assert flat(*coming.metrics(label, other)) == set(pair)


def test_failed_gates_end_with_3_after_the_result(runs, capsys):
    gates = ["--fail-if", "tail@256 > 1", "--fail-if", "tail@256 > 1e9"]
    code, said = evaluated(runs, *gates, "--json", capsys=capsys)
    assert code == 3
    passed = [own["passed"] for own in json.loads(said.out)["gates"]]
    assert passed == [False, False, True, True]
    assert "2 of 4 gates failed" in said.err


def test_a_summary_that_cannot_be_written_hides_no_gate(runs, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path))  # a folder
    code, heard = evaluated(runs, "--fail-if", "tail@256 > 1", capsys=capsys)
    assert code == 3
    assert f"note: GITHUB_STEP_SUMMARY={tmp_path} cannot be written" in heard.err


def test_a_github_summary_gets_gates_and_tables(runs, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    (tmp_path / "summary.md").write_text("before\n")
    evaluated(runs, "--fail-if", "tail@256 > 1", capsys=capsys)
    text = (tmp_path / "summary.md").read_text()
    assert text.startswith("before\n- FAILED tail&#64;256 &gt; 1: ")
    assert text.index("## Tail perplexity") < text.index("## Gates")


def test_dry_run_reads_nothing_and_writes_nothing(runs, capsys, tmp_path):
    arguments = [str(runs / "model"), "--data", str(runs / "docs.jsonl"), "--lengths", "64,256"]
    out = ["-o", str(tmp_path / "never"), "--dry-run"]
    code, said = run("eval", *arguments, *out, "--json", capsys=capsys)
    data = json.loads(said.out)
    assert code == 0
    # Nine documents: seven windows of the base (0-64, then every 32), one pass of the model.
    assert data["passes"] == 9 * 7 + 9
    assert data["tokens"] == 9 * 7 * 64 + 9 * 256
    assert not (tmp_path / "never").exists()
    code, said = run("eval", *arguments, *out, capsys=capsys)
    assert "each document in one pass" in said.out


def test_a_dry_run_refuses_the_directories_that_the_run_refuses(runs, capsys, tmp_path):
    asked = [str(runs / "model"), "--data", str(runs / "docs.jsonl"), "--lengths", "64,256"]
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "manifest.json").write_text("[]")  # somebody else's
    for where, force, said in (
        (runs / "one", [], "holds another run"),
        (mine, [], "holds something else"),
        (mine, ["--force"], "holds something else"),
    ):
        for dry in ([], ["--dry-run"]):
            code, captured = run("eval", *asked, "-o", str(where), *force, *dry, capsys=capsys)
            assert (code, captured.out) == (2, "")
            assert said in captured.err
    assert run("eval", *asked, "-o", str(runs / "apart"), "--force", "--dry-run")[0] == 0
    assert [own.name for own in mine.iterdir()] == ["manifest.json"]


def test_a_target_says_how_far_as_a_factor_does(runs, capsys):
    words = ["eval", runs / "model", "--data", runs / "docs.jsonl", "--max-docs", "1"]
    words += ["--lengths", "64,256", "--method", "pi", "--json", "--quiet"]
    answers = [
        json.loads(run(*words, *far, capsys=capsys)[1].out)["variants"]["pi-4x"]
        for far in (("--factor", "4"), ("--target", "256"))
    ]
    assert answers[0] == answers[1]
    assert answers[0]["target"] == 256
    for bad in (("--factor", "4", "--target", "256"), ()):
        code, said = run(*words, *bad, capsys=capsys)
        assert (code, "--target" in said.err) == (2, True)


def test_an_evaluation_writes_its_report_and_plots(runs):
    one = runs / "one"
    assert {file.name for file in (one / "plots").iterdir()} == {
        *("nll-by-position.png", "gain.png", "spectra.png")
    }
    for file in (one / "plots").iterdir():
        assert file.read_bytes().startswith(b"\x89PNG")
    text = (one / "report.md").read_text()
    assert "Inside the trained context yarn-4x pays a short tax" in text
    assert "| yarn-4x |" in text
    assert (one / "report.html").read_text().count("data:image/png;base64,") == 3
    manifest = json.loads((one / "run.json").read_text())
    assert manifest["command"] == "eval"
    assert len(manifest["decides"]["tokens_sha256"]) == 9
    assert manifest["decides"]["variants"]["yarn-4x"]["spectrum_sha256"]
    assert not any(name in json.dumps(manifest) for name in ("time", "host", "user"))


def test_text_of_models_and_corpora_is_escaped(runs, capsys, tmp_path):
    hostile = "<script>alert(1)</script>"
    write_checkpoint(tmp_path / "m")
    (tmp_path / "m").rename(tmp_path / "<b>m<")
    write_documents(tmp_path / "docs.jsonl")
    (tmp_path / "docs.jsonl").rename(tmp_path / "<img src=x>.jsonl")
    data = tmp_path / "<img src=x>.jsonl"
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    lines = [json.dumps({"text": f"{hostile} {row['text']} {hostile}"}) for row in rows]
    data.write_text("\n".join(lines))
    arguments = [str(tmp_path / "<b>m<"), "--data", str(data), "--lengths", "64"]
    code, _ = run("eval", *arguments, "-o", str(tmp_path / "run"), capsys=capsys)
    assert code == 0
    html = (tmp_path / "run" / "report.html").read_text()
    for part in ("<script", "<img src=x", "<b>m"):
        assert part not in html
    assert "&lt;b&gt;m&lt;" in html


def test_compare_pairs_runs_and_names_winners(runs, capsys, tmp_path):
    out = str(tmp_path / "compared")
    names = [str(runs / "one"), str(runs / "two")]
    code, said = run("compare", *names, "--json", "-o", out, capsys=capsys)
    assert code == 0
    text = json.loads(said.out)["text"]
    assert text["documents"] == 9
    assert text["reference"] == "each run's own base"
    assert set(text["lengths"][0]["tail"]) == {
        *("one:base", "one:untouched", "one:yarn-4x", "pi-4x"),
        *("two:base", "two:untouched", "two:yarn-4x"),
    }
    # Models of other weights: each run's own base, with the number of its own run.
    for name in ("one", "two"):
        own = json.loads((runs / name / "results.json").read_text())["variants"]["base"]["metrics"]
        shown = text["lengths"][-1]["tail"][f"{name}:base"]["value"]
        assert shown == pytest.approx(own["tail@256"]["value"], rel=1e-6)
        # The extension is compared with this base: the same numbers as inside the run.
        results = json.loads((runs / name / "results.json").read_text())
        made = results["variants"]["yarn-4x"]["metrics"]
        label = f"{name}:yarn-4x"
        delta = text["lengths"][-1]["difference"][label]
        assert delta["value"] == pytest.approx(-made["gain@256"]["value"], abs=1e-9)
        assert text["short"][label]["value"] == pytest.approx(made["short_tax"]["value"], abs=1e-9)
        assert text["references"][label] == f"{name}:base"
    for name in ("report.md", "report.html", "plots/difference-by-position.png"):
        assert (tmp_path / "compared" / name).exists()


def test_a_model_of_another_base_is_not_compared_with_the_first(runs, capsys):
    code, said = run("compare", str(runs / "one"), f"{runs / 'two'}:yarn-4x", capsys=capsys)
    assert code == 2
    assert "two:yarn-4x was extended from another base than base; name its RUN without" in said.err
    for first in ("yarn-4x", "base"):  # one model of each run, the first named as the reference
        specs = [f"{runs / name}:{first}" for name in ("one", "two")]
        code, said = run("compare", *specs, "--json", capsys=capsys)
        assert (code, json.loads(said.out)["text"]["reference"]) == (0, f"one:{first}")


def test_a_pattern_that_the_shell_left_names_runs(runs, capsys):
    """As cmd and PowerShell leave it."""
    code, said = run("compare", str(runs / "o*e"), str(runs / "tw*"), "--json", capsys=capsys)
    assert code == 0
    assert {"one:base", "two:base"} <= set(json.loads(said.out)["text"]["lengths"][0]["tail"])
    code, said = run("compare", str(runs / "none*"), capsys=capsys)
    assert code == 2
    assert "none*" in said.err


def test_runs_of_one_base_show_it_once(runs, capsys, tmp_path):
    shutil.copytree(runs / "one", tmp_path / "again")
    code, said = run("compare", str(runs / "one"), str(tmp_path / "again"), "--json", capsys=capsys)
    assert code == 0
    tails = json.loads(said.out)["text"]["lengths"][0]["tail"]
    assert [label for label in tails if "base" in label] == ["base"]


def test_a_gate_that_cannot_be_answered_fails_after_the_result_is_printed(runs, capsys):
    """The run that it names read other documents, which shows when both are there."""
    gate = f"tail@64 > 0 vs {runs / 'apart'}:untouched"
    code, said = evaluated(runs, "--fail-if", gate, capsys=capsys)
    assert code == 3
    assert said.out.startswith("FAILED ")
    assert "\n\nPerplexity of the last 16 tokens before each length\n" in said.out
    assert "read different tokens" in said.out


def test_compare_two_variants_of_one_run(runs, capsys):
    specs = [f"{runs / 'one'}:yarn-4x", f"{runs / 'one'}:pi-4x"]
    code, said = run("compare", *specs, capsys=capsys)
    assert code == 0
    assert "Loss difference to yarn-4x" in said.out


def test_answers_are_compared_with_the_truncated_baseline(runs, capsys, tmp_path):
    words = ["--tasks", "passkey", "--items", "1", "--lengths", "64,256", "--quiet"]
    words += ["--method", "yarn", "--factor", "4", "-o", str(tmp_path / "asked")]
    docs = ["--data", str(runs / "docs.jsonl")]
    assert run("eval", str(runs / "model"), *docs, *words, capsys=capsys)[0] == 0
    code, said = run("compare", str(tmp_path / "asked"), "--json", capsys=capsys)
    assert code == 0
    found = json.loads(said.out)["retrieval"]
    assert list(found) == ["untouched", "yarn-4x"]  # against the base
    assert "passkey@256" in found["yarn-4x"]


@pytest.mark.parametrize(
    ("specs", "says"),
    [
        (["one", "apart"], "read different tokens"),
        (["a" * 300, "two"], "cannot be read: File name too long"),
        (["one:nobody", "two"], "holds no variant 'nobody'"),
        (["nowhere", "two"], "has no results of ropext eval"),
        (["one:yarn-4x"], "two models at least"),
    ],
)
def test_compare_refuses_results_that_do_not_compare(runs, capsys, specs, says):
    code, said = run("compare", *(str(runs / spec) for spec in specs), capsys=capsys)
    assert code == 2
    assert says in said.err
    assert "Traceback" not in said.err


def test_bases_of_two_definitions_of_the_short_window_do_not_compare(runs, capsys, tmp_path):
    old, new = str(tmp_path / "old"), str(runs / "one")
    shutil.copytree(new, old)
    whole = json.loads((tmp_path / "old/run.json").read_text())
    assert whole["decides"]["short_window"] == 2
    assert json.loads((runs / "one/results.json").read_text())["short_window"] == 2
    del whole["ropext"]
    before = {k: v for k, v in whole["decides"].items() if k != "short_window"}
    manifest(tmp_path / "old", **whole | {"decides": before})
    code, said = run("compare", new, old, capsys=capsys)
    assert code == 2
    assert f"{old} truncates its base by version 1 and {new} by version 2" in said.err
    # The models that read the long window are unchanged, and without a BOS so is the base.
    assert run("compare", f"{new}:yarn-4x", f"{old}:yarn-4x", capsys=capsys)[0] == 0
    gate = f"tail@256 > 9 vs {old}:base"
    both = [f"{new}:yarn-4x", f"{new}:pi-4x", "--json"]
    code, said = run("compare", *both, "--fail-if", gate, capsys=capsys)
    assert code == 3
    assert "truncates its base by version 1" in json.loads(said.out)["gates"][0]["reason"]
    manifest(tmp_path / "old", **whole | {"decides": before | {"bos": None}})
    assert run("compare", new, old, capsys=capsys)[0] == 0


def test_compare_refuses_an_unfinished_run(runs, capsys, tmp_path):
    manifest(tmp_path, "eval")
    code, said = run("compare", str(tmp_path), str(runs / "one"), capsys=capsys)
    assert code == 2
    assert "not finished" in said.err


def test_nought_is_an_answer_and_not_an_option_left_out(runs, capsys):
    code, said = evaluated(runs, "--max-docs", "0", capsys=capsys)
    assert code == 2
    assert "--max-docs must be at least 1" in said.err


@pytest.mark.parametrize(
    ("more", "what"),
    [(("--seed", "-1"), "--seed must be at least 0"), (("--base", "x"), "--base goes with")],
)
def test_options_that_would_be_ignored_or_crash_are_refused(runs, capsys, more, what):
    code, said = evaluated(runs, *more, capsys=capsys)
    assert code == 2
    assert what in said.err


def test_losses_are_those_of_a_literal_loop_token_by_token(runs, tmp_path, capsys):
    """Stock transformers, one document at a time, and its own cross entropy."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert evaluated(runs, "--losses", str(tmp_path / "x.parquet"), capsys=capsys)[0] == 0
    rows = parquet.read_table(tmp_path / "x.parquet").to_pylist()
    assert {row["variant"] for row in rows} == {"base", "untouched", "yarn-4x", "pi-4x"}
    own = [row for row in rows if row["variant"] == "untouched"]
    model = AutoModelForCausalLM.from_pretrained(runs / "model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(runs / "model")
    texts = [json.loads(line)["text"] for line in (runs / "docs.jsonl").read_text().splitlines()]
    wanted = {}
    for number, text in enumerate(texts, 1):
        ids = torch.tensor([tokenizer(text)["input_ids"][:256]])
        if ids.shape[1] < 256:
            continue
        logits = model(ids).logits[0, :-1].float()
        nll = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")
        for at, loss in enumerate(nll.tolist(), 1):
            wanted[f"docs.jsonl:{number}", at] = (int(ids[0, at]), loss)
    assert len(own) == len(wanted) == 9 * 255
    for row in own:
        token, loss = wanted[row["document"], row["position"]]
        assert (row["token"], row["loss"]) == (token, pytest.approx(loss, abs=2e-5))


def test_losses_without_documents_are_refused(runs, tmp_path, capsys):
    words = ["--tasks", "passkey", "--lengths", "64", "--losses", str(tmp_path / "x.parquet")]
    code, said = run("eval", str(runs / "model"), *words, capsys=capsys)
    assert (code, said.out) == (2, "")
    assert "--losses" in said.err
    assert not (tmp_path / "x.parquet").exists()
