"""A table, a pin or a line of the README cannot change without its part of .ci/slow run again."""

import runpy
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OWN = runpy.run_path(str(ROOT / "scripts/slow_results.py"), run_name="own")


@pytest.fixture
def copy(tmp_path):
    """Copy the covered files, and write results for them."""
    for what in {what for covered in OWN["COVERED"].values() for what in covered}:
        name = what.partition(": ")[0]
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "benchmarks/results").mkdir(parents=True)
    for part in OWN["COVERED"]:
        OWN["write"](tmp_path, part, "1 passed\n")
    return tmp_path


def parts(root):
    return [sentence.split()[2] for sentence in OWN["stale"](root)]


@pytest.mark.parametrize(
    ("name", "old", "new", "red"),
    [
        (
            "constraints.txt",
            "typer==",
            "typer==9",
            ["environments", "lm-eval", "encoders", "readme", "oracle", "spellings", "port"],
        ),
        ("constraints.txt", "# The versions", "# Versions", []),
        ("locks/linux-x86_64-py311-cpu.txt", "torch==", "torch==9", ["airgap"]),
        ("Dockerfile", "USER 10001", "USER ropext", ["image"]),
        ("README.md", "ropext verify long", "ropext verify long --deep", ["readme"]),
        ("README.md", "ropext run smoke-test", "ropext run other", ["readme"]),
        (
            "README.md",
            "ropext.patch(model, method",
            "ropext.patch(model, factor=2, method",
            ["readme"],
        ),
        ("README.md", "These lines run on a bundled model", "They run on a bundled model", []),
        ("pyproject.toml", '"typer>=', '"typer>=9', ["floors"]),
        ("pyproject.toml", '"lm-eval>=', '"lm-eval>=9', ["lm-eval"]),
        ("pyproject.toml", '"hypothesis>=', '"hypothesis>=9', ["lm-eval"]),
        ("pyproject.toml", '"mkdocs-material>=', '"mkdocs-material>=99', []),
        ("pyproject.toml", "line-length = 100", "line-length = 90", []),
        ("ropext/families/types.json", '"gpt2"', '"gpt3"', ["oracle", "spellings"]),
        ("ropext/loaders/gguf.json", '"qwen2": {', '"qwen4": {', ["gguf"]),
        ("ropext/loaders/gguf.json", "compat.cpp at fb30", "compat.cpp at fb31", []),
        ("scripts/loaders/measured.json", '"same"', '"error"', ["loaders"]),
        ("scripts/loaders/checkpoints.py", "from ropext.base.jsontext", "from ropext.texts", []),
        ("scripts/loaders/checkpoints.py", "FACTOR = ", "FACTOR = 2 * ", ["loaders"]),
    ],
)
def test_each_planted_change_fails_its_test(copy, name, old, new, red):
    assert parts(copy) == []
    text = (copy / name).read_text("utf-8")
    assert old in text
    (copy / name).write_text(text.replace(old, new, 1), "utf-8")
    assert parts(copy) == red
    for part in red:
        OWN["write"](copy, part, "1 passed\n")
    assert parts(copy) == []


def test_a_part_that_was_never_run_is_named_and_refuses_nothing(copy, capsys, monkeypatch):
    (file,) = (copy / "benchmarks/results").glob("slow-floors-*.md")
    file.unlink()
    monkeypatch.setitem(OWN["main"].__globals__, "ROOT", copy)
    assert OWN["main"]([]) == 0
    assert ".ci/slow floors was not run yet\n" in capsys.readouterr().out


def test_a_new_result_takes_the_place_of_the_old_one(copy):
    results = copy / "benchmarks/results"
    (file,) = results.glob("slow-readme-*.md")
    file.rename(results / "slow-readme-2001-01-01.md")
    OWN["write"](copy, "readme", "\n".join(f"line {number}" for number in range(99)))
    assert [own.name for own in results.glob("slow-readme-*.md")] == [file.name]
    text = file.read_text("utf-8")
    assert "line 98\n" in text
    assert "line 9\n" not in text


def test_ci_run_asks_first_and_each_part_is_one_of_ci_slow():
    run, slow = ((ROOT / ".ci" / name).read_text("utf-8") for name in ("run", "slow"))
    assert run.index("scripts/slow_results.py") < run.index("rm -rf .venv")
    for part in OWN["COVERED"]:
        assert f"\n    {part})" in slow
