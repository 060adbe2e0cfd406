"""Every file of a run's folder stands in docs/evaluation-in-detail.md, and holds what it says."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from command_line import run
from pyarrow import parquet
from tiny_checkpoints import write_checkpoint, write_documents

import ropext

PAGE = Path(ropext.__file__).parents[1] / "docs" / "evaluation-in-detail.md"


def described():
    """The names of the page's table as patterns."""
    section = PAGE.read_text("utf-8").split("## The folder of a run")[1].split("\n## ")[0]
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
    words += ["--tasks", "copy", "--items", "2", "--max-docs", "2"]
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


def test_the_arrays_are_what_the_page_says(folder):
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
