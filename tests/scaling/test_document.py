"""docs/methods.md holds the list of methods as it is; docs/adding-a-method.md works as written."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from comparing import assert_close

import ropext
from ropext import scaling
from scripts import make_tables

PACKAGE = Path(ropext.__file__).parent
DOCS = PACKAGE.parent / "docs"

# d 6, theta 1e6: the numbers at the end of the page.
MODEL = {
    "model_type": "llama",
    "hidden_size": 12,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "intermediate_size": 16,
    "vocab_size": 32,
    "max_position_embeddings": 64,
    "rope_theta": 1e6,
}


@pytest.mark.parametrize("page", make_tables.TABLES)
def test_the_generated_tables_of_the_pages_are_up_to_date(page: str) -> None:
    text = (DOCS.parent / page).read_text("utf-8")
    assert text == make_tables.renewed(page), "run: python scripts/make_tables.py"


def test_methods_page_explains_every_method_and_knob() -> None:
    text = (DOCS / "methods.md").read_text("utf-8")
    for method in scaling.METHODS.values():
        assert f"(`{method.name}`):" in text, f"no formula of {method.name}"
        for knob in fields(method.knobs):
            assert knob.metadata["help"]
            assert knob.metadata["help"] in text or knob.name == "short_pair_factors"


def block(text: str, language: str) -> str:
    """Return the last code block of a language."""
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)[-1]


def apply(diff: str, text: str) -> str:
    """Replace each removed line by the added ones that follow it."""
    hunks = re.findall(r"^-(.*)\n((?:\+.*\n)+)", diff, flags=re.MULTILINE)
    assert hunks
    for old, added in hunks:
        new = "\n".join(line[1:] for line in added.splitlines())
        assert text.count(f"{old}\n") == 1, old
        text = text.replace(f"{old}\n", f"{new}\n")
    return text


def ropext_in(copy: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "ropext", *arguments],
        cwd=copy,
        env=os.environ | {"PYTHONPATH": str(copy)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_the_page_on_adding_a_method_works_as_written(tmp_path: Path) -> None:
    page = (DOCS / "adding-a-method.md").read_text("utf-8")
    shutil.copytree(PACKAGE, tmp_path / "ropext", ignore=shutil.ignore_patterns("__pycache__"))
    methods = tmp_path / "ropext" / "scaling"
    (methods / "mixed.py").write_text(block(page, "python"), "utf-8")
    front = methods / "__init__.py"
    front.write_text(apply(block(page, "diff"), front.read_text("utf-8")), "utf-8")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(MODEL), "utf-8")

    for line in block(page, "sh").splitlines():
        _, *command = shlex.split(line)
        assert "mixed" in ropext_in(tmp_path, *command)

    # The value that the page works out by hand.
    request = ["plan", "./model", "--factor", "512", "--method", "mixed", "--power", "2", "--json"]
    plan = json.loads(ropext_in(tmp_path, *request))
    [site] = plan["sites"]
    expected = [1 / 2, 0.01 / 16, 0.0001 / 512]
    assert_close(site["inv_freq"], expected, 1e-12, "mixed NTK")
    assert site["rope"]["rope_type"] == "longrope"
    assert_close(site["rope"]["long_factor"], [2.0, 16.0, 512.0], 1e-12, "its carrier")
