"""Every bundled recipe: its header, its plan on the model's own config, its command.

The recipes that fit a small machine run for real.
"""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import typer
import yaml
from json_schema import complaints

from ropext.base import bundled
from ropext.base.errors import UsageError
from ropext.cli.app import build
from ropext.cli.recipes import recipe_header
from ropext.files import inspecting
from ropext.pipeline.checked_recipe import open_recipe
from ropext.pipeline.public import run
from ropext.pipeline.recipe import read_recipe, recipe_schema

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
    "demo": (256, 1024),
}


def test_the_bundled_recipes_are_the_listed_ones():
    assert {path.stem for path in RECIPES} == set(REACH)
    assert list(bundled.recipes()) == sorted(REACH)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_states_its_purpose(path):
    told = recipe_header(path)
    assert set(told) == {"what for", "needs", "command", "run"}
    asked = open_recipe(path)
    if asked.model == "ropext://demo":
        assert told["run"].startswith("yes")
    else:
        assert told["run"].startswith("not run")


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_plans_on_the_config_of_its_model(path, tmp_path):
    asked = open_recipe(path)
    model = asked.model
    if model != "ropext://demo":
        shutil.copy(CONFIGS / f"{model}.json", tmp_path / "config.json")
        model = str(tmp_path)
    plan = inspecting.planned(inspecting.open_model(model), model, asked.extend_options())
    assert (plan.context, plan.target) == REACH[path.stem]
    assert plan.config["max_position_embeddings"] == plan.target
    newest = next(r for r in plan.readings if r.loader == "transformers")
    assert newest.verdict == "same"


def test_the_qwen_recipe_equals_its_authors_documentation():
    """Qwen2.5's model card: rope_scaling of factor 4.0 on 32768, type yarn."""
    asked = open_recipe(ROOT / "recipes/qwen2.5-7b-128k.yaml")
    config = json.loads((CONFIGS / f"{asked.model}.json").read_text())
    from ropext.planning import make_plan

    plan = make_plan(config, asked.extend_options(), asked.model)
    written = plan.config["rope_scaling"]
    assert written["factor"] == 4.0
    assert written["original_max_position_embeddings"] == 32768
    assert written.get("type", written.get("rope_type")) == "yarn"


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipes_command_parses(path):
    text = recipe_header(path)["command"]
    words = [shlex.split(part, comments=True) for part in _commands(text)]
    group = typer.main.get_command(build())
    assert words
    for own in words:
        name, command, rest = group.resolve_command(group.make_context("ropext", own[:1]), own)
        command.make_context(name, list(rest))


def _commands(text):
    """Yield each `ropext …` or `-m ropext …` of a header, without redirection."""
    text = re.sub(r"\"\$\(.*?\)\"", "CONFIG", text)
    for part in re.split(r"&&|then, on one machine:", text):
        found = re.search(r"(?:-m )?\bropext (.*)", part)
        if found:
            yield found[1].split(">")[0]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_as_the_schema_says(path):
    assert complaints(yaml.safe_load(path.read_text("utf-8")), recipe_schema()) == []


@pytest.mark.parametrize(
    "bad",
    [
        {"model": "a"},
        {"model": "a", "extend": {"fctor": 2}},
        {"model": "a", "extend": {"factor": "x"}},
        {"model": "a", "extend": {"factor": [2]}},
        {"model": "a", "extend": {"for": [["vllm"]]}},
        {"model": "a", "extend": {"link": "soft"}},
        {"model": "a", "extend": {"factor": 2}, "finetune": {"steps": 2}},
    ],
)
def test_the_schema_refuses_the_same_as_the_reader(bad):
    assert complaints(bad, recipe_schema())
    with pytest.raises(UsageError):
        read_recipe(bad)


@pytest.mark.slow
def test_the_smoke_test_runs_and_a_second_run_does_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = run("smoke-test", "smoke")
    first.raise_if_failed()
    before = written(tmp_path)
    assert set(first.stages.values()) == {"done"}
    assert (tmp_path / "smoke/model.safetensors").is_file()
    again = run("smoke-test", "smoke")
    assert set(again.stages.values()) == {"skipped"}
    assert again.evidence.measured.results == first.evidence.measured.results
    assert again.evidence.gates == first.evidence.gates
    assert written(tmp_path) == before


def written(folder):
    """Return when each file was written, without the files that concern this call."""
    of_the_call = ("log.txt", "used.log", "run.json", "recipe.yaml")
    files = [path for path in folder.rglob("*") if path.name not in of_the_call]
    return {path: path.stat().st_mtime_ns for path in files if path.is_file()}
