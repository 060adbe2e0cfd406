"""Every recipe that comes with ropext: its header, its plan on the model's own config, its command;
those that fit a small machine run for real."""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import typer

from ropext import bundled, inspecting
from ropext.cli.app import build
from ropext.cli.recipes import header
from ropext.options import sections
from ropext.pipeline import job
from ropext.pipeline.running import run
from ropext.recipefile import parse

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").rglob("*.yaml"))
CONFIGS = Path(__file__).parent / "configs"
# What a plan must come to: context, target.
REACH = {
    "llama3-8b-128k": (8192, 131072),
    "llama3-70b-multi-node": (8192, 32768),
    "mistral-7b-4x-pose": (32768, 131072),
    "qwen2.5-7b-128k": (32768, 131072),
    "smoke-test": (256, 512),
    "method-grid": (256, 1024),
    "demo": (256, 1024),
}


def test_there_is_a_recipe_for_each_use():
    assert {path.stem for path in RECIPES} == set(REACH)
    assert list(bundled.recipes()) == sorted(REACH)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_says_what_it_is_for(path):
    told = header(path)
    assert set(told) == {"what for", "needs", "command", "run"}
    asked = job.from_file(path)
    if asked.model == "ropext://demo":
        assert told["run"].startswith("yes")
    else:
        assert told["run"].startswith("not run")


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_plans_on_the_config_of_its_model(path, tmp_path):
    asked = job.from_file(path)
    model = asked.model
    if model != "ropext://demo":
        shutil.copy(CONFIGS / f"{model}.json", tmp_path / "config.json")
        model = str(tmp_path)
    plans = [inspecting.plan(model, **cell.request) for cell in asked.cells()]
    longest = max(plans, key=lambda plan: plan.target)
    assert (longest.context, longest.target) == REACH[path.stem]
    for plan in plans:
        assert plan.config["max_position_embeddings"] == plan.target
        assert {r.verdict for r in plan.readings if r.loader == "transformers"} >= {"same"}
        newest = next(r for r in plan.readings if r.loader == "transformers")
        assert newest.verdict == "same"


def test_the_qwen_recipe_is_what_its_authors_document():
    """Qwen2.5's model card: rope_scaling of factor 4.0 on 32768, type yarn."""
    asked = job.from_file(ROOT / "recipes/qwen2.5-7b-128k.yaml")
    config = json.loads((CONFIGS / f"{asked.model}.json").read_text())
    from ropext.planning import make_plan

    plan = make_plan(config, asked.cells()[0].extend(), asked.model)
    written = plan.config["rope_scaling"]
    assert written["factor"] == 4.0
    assert written["original_max_position_embeddings"] == 32768
    assert written.get("type", written.get("rope_type")) == "yarn"


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipes_command_parses(path):
    text = header(path)["command"]
    words = [shlex.split(part, comments=True) for part in _commands(text)]
    group = typer.main.get_command(build())
    assert words
    for own in words:
        name, command, rest = group.resolve_command(group.make_context("ropext", own[:1]), own)
        command.make_context(name, list(rest))


def _commands(text):
    """Each `ropext …` or `-m ropext …` of a header, without redirection."""
    text = re.sub(r"\"\$\(.*?\)\"", "CONFIG", text)
    for part in re.split(r"&&|then, on one machine:", text):
        found = re.search(r"(?:-m )?\bropext (.*)", part)
        if found:
            yield found[1].split(">")[0]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_as_the_schema_says(path):
    check(plain(parse(path.read_bytes(), path.name)), sections.schema(), path.name)


def test_the_schema_check_of_this_file_refuses(tmp_path):
    schema = sections.schema()
    for bad in (
        {"model": "a"},
        {"model": "a", "extend": {"fctor": 2}},
        {"model": "a", "extend": {"factor": "x"}},
        {"model": "a", "extend": {"factor": [[2]]}},
        {"model": "a", "extend": {"factor": 2}, "finetune": {"steps": 2}},
    ):
        with pytest.raises(AssertionError):
            check(bad, schema, "bad")


def plain(node):
    """The values as a YAML 1.2 editor sees them."""
    if isinstance(node, dict):
        return {key: plain(value) for key, (_, value) in node.items()}
    if isinstance(node.value, dict):
        return plain(node.value)
    if isinstance(node.value, tuple):
        return [plain(item) for item in node.value]
    if node.quoted:
        return node.value
    try:
        return json.loads(node.value)
    except ValueError:
        return None if node.is_null else node.value


KINDS = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "integer": int,
    "number": (int, float),
    "null": type(None),
}


def check(value, schema, where):
    """The part of JSON Schema that ours uses, literally."""
    kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    is_bool = isinstance(value, bool)
    assert any(
        isinstance(value, KINDS[kind]) and (kind == "boolean" or not is_bool) for kind in kinds
    ), (where, value, kinds)
    if isinstance(value, dict):
        assert set(value) <= set(schema["properties"]), (where, value)
        assert set(schema.get("required", ())) <= set(value), where
        for key, item in value.items():
            check(item, schema["properties"][key], f"{where}: {key}")
    if isinstance(value, list):
        for item in value:
            check(item, schema["items"], where)


@pytest.mark.slow
def test_the_smoke_test_runs_and_a_second_run_does_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = run("smoke-test", "smoke")
    first.raise_if_failed()
    before = written(tmp_path)
    assert set(first.cells[0].stages.values()) == {"done"}
    assert (tmp_path / "smoke/model.safetensors").is_file()
    again = run("smoke-test", "smoke")
    assert set(again.cells[0].stages.values()) == {"skipped"}
    assert again.cells[0].evidence == first.cells[0].evidence
    assert written(tmp_path) == before


@pytest.mark.slow
def test_the_grid_runs_and_ends_in_a_comparison(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = run("method-grid", "grid")
    done.raise_if_failed()
    names = ["ntk-2x", "ntk-4x", "yarn-2x", "yarn-4x"]
    assert sorted(path.name for path in (tmp_path / "grid").iterdir()) == names
    tails = done.comparison["text"]["lengths"][-1]["tail"]
    assert list(tails) == ["base", "untouched", *names]
    assert max(tails[name]["value"] for name in names) < tails["untouched"]["value"]
    assert (tmp_path / "grid.run/report.html").is_file()
    # The base was read once: the other cells have its very files.
    cells = sorted((tmp_path / "grid.run/cells").iterdir())
    arrays = [sorted((cell / "evaluation/variants").glob("base-*/short/*")) for cell in cells]
    assert all(own[0].samefile(arrays[0][0]) for own in arrays)
    before = written(tmp_path)
    again = run("method-grid", "grid")
    assert all({*cell.stages.values()} == {"skipped"} for cell in again.cells)
    assert again.comparison == done.comparison
    assert written(tmp_path) == before


def written(folder):
    """When each file was written, but for those that speak of this very call."""
    of_the_call = ("log.txt", "run.json", "recipe.yaml", ".hashes.json")
    files = [path for path in folder.rglob("*") if path.name not in of_the_call]
    return {path: path.stat().st_mtime_ns for path in files if path.is_file()}
