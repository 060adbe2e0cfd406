"""Every command in the README and the guide parses, and those of the guide run as they stand."""

import json
import re
import shlex
from pathlib import Path

import pytest
import typer
from tiny_checkpoint import make_llama

from ropext.cli.app import COMMANDS, build

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/guide.md", "docs/finetuning.md", "docs/evaluation.md")


def commands(page):
    """The words of every ropext line in the page's shell blocks, and of its indented ones."""
    text = (ROOT / page).read_text("utf-8").replace("\\\n", " ")
    lines = "\n".join(re.findall(r"^```sh\n(.*?)^```", text, re.M | re.S)).splitlines()
    lines += [line.strip() for line in text.splitlines() if line.startswith("    ropext ")]
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("ropext ")]


@pytest.mark.parametrize("page", PAGES)
def test_every_command_of_a_page_parses(page):
    found = commands(page)
    assert found
    group = typer.main.get_command(build())
    for words in found:
        name, command, rest = group.resolve_command(group.make_context("ropext", words[:1]), words)
        command.make_context(name, list(rest))  # fails on an unknown option or a missing one


def test_the_guide_speaks_of_every_command():
    text = (ROOT / "docs/guide.md").read_text("utf-8")
    assert [name for name in COMMANDS if f"ropext {name}" not in text] in ([], ["compare"])


@pytest.mark.slow
def test_the_guide_runs_as_it_stands(ropext, tmp_path, monkeypatch):
    make_llama(tmp_path / "model")
    llama3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    llama3 |= {"factor": 8.0, "original_max_position_embeddings": 16}
    make_llama(tmp_path / "scaled", rope_scaling=llama3)
    resaved = make_llama(tmp_path / "resaved") / "config.json"
    config = json.loads(resaved.read_text())
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": config.pop("rope_theta")}
    resaved.write_text(json.dumps(config))
    monkeypatch.chdir(tmp_path)
    ran = 0
    for words in commands("docs/guide.md"):
        if "--endpoint" in words:
            continue  # wants a server; its own tests have one
        code, out, err = ropext(*words)
        assert code == 0, (words, err)
        assert out
        ran += 1
    assert ran == 13
    assert (tmp_path / "spectrum.png").stat().st_size > 10_000
    assert (tmp_path / "model-4x/model.safetensors").samefile(tmp_path / "model/model.safetensors")
