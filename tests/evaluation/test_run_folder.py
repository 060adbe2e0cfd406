"""docs/reference/run-folder.md names every file of a run's folder and describes its content."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from command_line import DRIVER, environment, run
from pyarrow import parquet
from tiny_checkpoints import write_checkpoint, write_documents

import ropext
from ropext.base import atomic

PAGE = Path(ropext.__file__).parents[1] / "docs" / "reference" / "run-folder.md"


def described():
    """Return the names of the page's table as patterns."""
    section = PAGE.read_text("utf-8").split("## Files")[1].split("\n## ")[0]
    cells = re.findall(r"^\| (`.+?`) \|", section, flags=re.MULTILINE)
    names = [name for cell in cells for name in re.findall(r"`(.+?)`", cell)]
    assert len(names) > 10
    return [re.sub(r"\b[A-Z]+\b", r"[^/]+", name.replace(".", r"\.")) for name in names]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("described")
    write_checkpoint(path / "model")
    write_documents(path / "docs.jsonl")
    words = [path / "model", "--data", path / "docs.jsonl", "--lengths", "64,256", "--quiet"]
    words += ["--method", "yarn", "--factor", "4", "--protocol", "hf-stride"]
    words += ["--tasks", "copy", "--items", "2", "--max-docs", "2", "--kl"]
    assert run("eval", *words, "-o", path / "run", "--losses", path / "losses.parquet")[0] == 0
    return path


def test_a_run_holds_no_file_that_the_page_does_not_name(folder):
    patterns = described()
    place = folder / "run"
    files = [own.relative_to(place).as_posix() for own in place.rglob("*") if own.is_file()]
    unnamed = [name for name in files if not any(re.fullmatch(own, name) for own in patterns)]
    assert not unnamed
    kinds = {own for own in patterns if any(re.fullmatch(own, name) for name in files)}
    assert set(patterns) - kinds == {r"variants/[^/]+/lm-eval/[^/]+\.json"}  # not installed here


def test_the_arrays_match_the_page(folder):
    place, losses = folder / "run", parquet.read_table(folder / "losses.parquet").to_pylist()
    results = json.loads((place / "results.json").read_text())
    store = place / "variants" / results["variants"]["yarn-4x"]["store"]
    for document in json.loads((place / "documents.json").read_text()):
        name = f"{document['hashes']['256'][:32]}.npy"
        loss = np.load(store / "pass-256" / name)
        assert np.isnan(loss[0])
        rows = [
            own
            for own in losses
            if (own["document"], own["variant"]) == (document["name"], "yarn-4x")
        ]
        assert [own["loss"] for own in rows] == [*map(float, loss[1:])]
        assert [own["position"] for own in rows] == [*range(1, len(loss))]
        text = np.load(place / "documents" / name)
        assert (text.dtype, text.shape) == (np.int32, loss.shape)
        assert np.load(store / "stride-256" / name).shape == (2,)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="counts no descriptors so")
def test_more_documents_than_a_process_may_open_files(tmp_path):
    """macOS grants 256 descriptors: an evaluation without -o, one with it, and its comparison."""
    write_checkpoint(tmp_path / "model")
    texts = [f"{n} " + "the cat sat on the mat " * 12 for n in range(300)]
    rows = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (tmp_path / "many.jsonl").write_text(rows, encoding="utf-8")
    read = ["eval", "model", "--data", "many.jsonl", "--lengths", "64", "--max-docs", "300"]
    read += ["--method", "yarn", "--factor", "2"]
    lines = [read, [*read, "-o", "run"], ["compare", "run:untouched", "run:yarn-2x"]]
    limited = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))\n"
    done = subprocess.run(
        [sys.executable, "-P", "-c", limited + DRIVER, json.dumps(lines)],
        cwd=tmp_path,
        env=environment(tmp_path),
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for code, _, err in map(json.loads, done.stdout.splitlines()):
        assert code == 0, err
    assert len(list((tmp_path / "run").rglob("documents/*"))) >= 300


def test_a_log_that_cannot_be_written_is_one_sentence(tmp_path, monkeypatch, capsys):
    """Found by a campaign of failing calls: its traceback was a bug's."""
    opens = Path.open

    def refused(path, *words, **named):
        if path.name == "used.log":
            raise PermissionError(13, "Permission denied", str(path))
        return opens(path, *words, **named)

    write_checkpoint(tmp_path / "model")
    write_documents(tmp_path / "docs.jsonl")
    words = [tmp_path / "model", "--data", tmp_path / "docs.jsonl", "--lengths", "64", "--quiet"]
    capsys.readouterr()  # drop the output of making the model
    monkeypatch.setattr(Path, "open", refused)
    code, heard = run("eval", *words, "--max-docs", "1", "-o", tmp_path / "run", capsys=capsys)
    assert code == 4
    (line,) = heard.err.splitlines()
    assert line.startswith("error: ")
    assert line.endswith(
        "used.log cannot be written: Permission denied; what is finished is kept in "
        f"{tmp_path / 'run'}; run the same command to resume"
    )
    monkeypatch.undo()
    assert run("eval", *words, "--max-docs", "1", "-o", tmp_path / "run")[0] == 0


FULL = "cannot be written: No space left on device"


@pytest.mark.parametrize(
    ("file", "is_kept"),
    [
        ("run.json", False),
        ("short/", False),
        ("pass-64/", True),
        ("results.json", True),
        ("losses.parquet", True),
    ],
)
def test_a_full_disk_is_exit_code_4_if_something_is_kept(
    tmp_path, monkeypatch, capsys, file, is_kept
):
    write_checkpoint(tmp_path / "model")
    write_documents(tmp_path / "docs.jsonl")
    words = [tmp_path / "model", "--data", tmp_path / "docs.jsonl", "--lengths", "64", "--quiet"]
    words += ["--max-docs", "1", "-o", tmp_path / "run"]
    words += ["--losses", tmp_path / "losses.parquet"]
    capsys.readouterr()  # drop the output of making the model
    fill(monkeypatch, file)
    code, heard = run("eval", *words, capsys=capsys)
    (line,) = heard.err.splitlines()
    if is_kept:
        kept = f"; what is finished is kept in {tmp_path / 'run'}; run the same command to resume"
        assert (code, line.endswith(f"{FULL}{kept}")) == (4, True), line
    else:
        assert (code, line.endswith(FULL)) == (2, True), line
        assert not list(tmp_path.glob("run/*"))
    monkeypatch.undo()
    assert run("eval", *words)[0] == 0


def test_without_an_output_a_full_disk_keeps_nothing(tmp_path, monkeypatch, capsys):
    write_checkpoint(tmp_path / "model")
    write_documents(tmp_path / "docs.jsonl")
    words = [tmp_path / "model", "--data", tmp_path / "docs.jsonl", "--lengths", "64", "--quiet"]
    capsys.readouterr()  # drop the output of making the model
    fill(monkeypatch, "losses.parquet")
    losses = tmp_path / "losses.parquet"
    code, heard = run("eval", *words, "--losses", losses, capsys=capsys)
    assert (code, heard.err) == (2, f"error: {losses} {FULL}\n")
    assert not losses.exists()


def fill(monkeypatch, name):
    """Have the disk be full when the file of this name, or a file in this folder, is flushed."""
    replace_whole = atomic.replace_whole

    def replaced(path, write, **how):
        if name in f"{path.parent.name}/{path.name}":
            raise OSError(28, "No space left on device", str(path))
        replace_whole(path, write, **how)

    monkeypatch.setattr(atomic, "replace_whole", replaced)
