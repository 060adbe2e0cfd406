"""Each step of the demo is said by a command of the same words; together they are affordable."""

from pathlib import Path

import pytest
import typer

from ropext.cli.app import build
from ropext.demo import read_recipe

FOLDER = Path("somewhere else") / "it"
MODEL, CONTEXT, MOST = "ropext://demo", 256, 5_600_000
RECIPE = read_recipe(finetune=True, far=True)
ALL = RECIPE.steps


@pytest.fixture(scope="module")
def group():
    return typer.main.get_command(build())


def parsed(group, words):
    name, command, rest = group.resolve_command(group.make_context("ropext", words[:1]), words)
    return command.make_context(name, list(rest)).params


def told(value):
    return ",".join(map(str, value)) if isinstance(value, tuple) else value


@pytest.mark.parametrize("step", ALL, ids=lambda step: step.name)
def test_the_command_of_a_step_asks_for_what_the_step_does(group, step):
    words = step.words(FOLDER)
    assert words[:2] == ("ropext", step.command)
    params = parsed(group, list(words[1:]))
    subject = next(str(params.pop(name)) for name in ("model", "directory") if name in params)
    assert subject == step.at(FOLDER, step.subject)
    if step.output:
        assert Path(params.pop("output")) == FOLDER / step.output  # typer 0.28 has it as a text
    asked = {name: value for name, value in params.items() if name in step.options}
    assert set(asked) == set(step.options)
    for name, value in step.options.items():
        given = told(asked[name])
        assert str(given) in (str(told(value)), f"{value}.0"), name


def test_every_option_is_known_to_the_function_that_is_called():
    from ropext.options.evaluate import Evaluate as Evaluation
    from ropext.options.extend import Extend
    from ropext.options.training import Finetune as Training
    from ropext.options.training import Fit

    known = {"eval": Evaluation, "finetune": Training, "fit": Fit}
    known |= {"extend": Extend, "plan": Extend}
    for step in ALL:
        if step.command in known:
            names = set(known[step.command].model_fields) | {"data"}
            assert set(step.options) <= names, step.name


def test_steps_work_on_what_is_bundled_or_was_made_before():
    made = set()
    for step in ALL:
        assert step.subject == MODEL or step.subject in made, step.name
        assert step.output not in made, step.name
        made |= {step.output} - {None}
    assert len({step.name for step in ALL}) == len(ALL)


def test_lengths_are_the_context_doubled_up_to_the_target():
    from ropext import inspect

    assert inspect(MODEL).model.context == CONTEXT
    (plan,) = (step for step in ALL if step.name == "plan")
    for step in ALL:
        if step.command == "eval" and "far" not in step.needs:
            assert step.options["lengths"] == (256, 512, 1024)
    assert plan.options["factor"] * CONTEXT == 1024


def test_leaving_out_the_fine_tuning_leaves_out_all_that_trains_weights():
    chosen = read_recipe(finetune=False, far=False).steps
    assert not [step.name for step in chosen if step.command == "finetune"]
    assert "fit" in {step.name for step in chosen}
    assert not [step for step in read_recipe(finetune=True, far=False).steps if "far" in step.needs]


def test_the_short_run_is_as_short_as_promised():
    tuning = [step for step in ALL if step.command == "finetune" and "far" not in step.needs]
    assert all(step.options["steps"] <= 60 for step in tuning if step.name == "tune")
    assert all(step.options["batch_tokens"] <= 8192 for step in tuning)
    trained = sum(step.trains for step in ALL if "far" not in step.needs)
    assert 3 * trained < MOST  # the rest is for reading; the count of a real run is tested


def test_gates_and_tables_name_what_is_measured():
    """Of the labels that steps give; the names of the numbers are those of a real demo."""
    labels = {step.label for step in ALL} | {"base", "untouched", "pi-4x", "ntk-4x", "yarn-4x"}
    labels |= {"demo", *(f"far/{name}" for name in ("untouched", "dynamic-32x", "yarn-32x"))}
    named = [own["gate"] for own in RECIPE.gates]
    named += [own["times"] for own in RECIPE.gates if "times" in own]
    for own in RECIPE.tables:
        named += [*own.get("rows", ()), *own.get("columns", {}).values()]
        named += [*own.get("instead", {}), *own.get("instead", {}).values()]
    assert {name.partition(":")[0] for name in (*named, *RECIPE.drawn)} <= labels


def test_no_option_repeats_a_default():
    """What the demo leaves to the defaults stays short to read and to type."""
    from ropext.options.evaluate import Evaluate as Evaluation

    defaults = {name: own.default for name, own in Evaluation.model_fields.items()}
    for step in ALL:
        if step.command == "eval":
            same = [k for k, v in step.options.items() if k in defaults and defaults[k] == v]
            assert same in ([], ["max_docs"]), step.name
