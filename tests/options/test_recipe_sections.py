"""One recipe model serves the file, the options and the schema, with the same refusals."""

import inspect
import json

import pytest

from ropext.base.errors import InputError, RopextError, UsageError
from ropext.options.endpoint import ONLY
from ropext.options.evaluate import Evaluate as EvaluationOptions
from ropext.options.extend import Extend, Reach
from ropext.options.fields import value_kind
from ropext.options.training import Finetune as TrainingOptions
from ropext.options.training import Fit
from ropext.pipeline.checked_recipe import open_recipe, recipe_from_options
from ropext.pipeline.recipe import (
    SECTIONS,
    Recipe,
    RecipeSource,
    options_by_key,
    parse_recipe,
    recipe_from_source,
    recipe_schema,
)

SMALL = {"model": "ropext://demo", "extend": {"method": "yarn", "factor": 2}}
OPTION_CLASSES = {
    "extend": Extend,
    "fit": Fit,
    "finetune": TrainingOptions,
    "evaluate": EvaluationOptions,
}
# Keys of an option class that another section or the run itself sets.
ELSEWHERE = {
    "extend": ("finetune", "like"),
    "fit": tuple(Reach.model_fields),
    "evaluate": (
        *("method", "factor", "target", "context", "base", "adapter", "kv"),
        *("window", "group", "literal"),  # options of a method in memory
    ),
}
# Options of `ropext extend` that concern this call alone: they do not change the result.
OF_THE_CALL = {
    *("output", "force", "dry_run", "time", "out", "words", "push_to_hub", "public"),
    "trust_remote_code",  # no recipe may ask for it
    *("serve", "details", "as_json", "quiet", "log_times"),  # how it is printed
    "as_kind",  # a directory of a GGUF, which `run` never makes
    "like",  # for a GGUF, which `run` never makes
}


def sample(info):
    """Return a value of a field's kind, as a command line and as YAML spell it."""
    item, _, choices = value_kind(info)
    return choices[-1] if choices else {bool: "true", int: "3", float: "0.5", str: "word"}[item]


@pytest.mark.parametrize("section", OPTION_CLASSES)
def test_every_option_is_a_key_of_its_section_or_names_its_place(section):
    for name in OPTION_CLASSES[section].model_fields:
        here = name in SECTIONS[section].model_fields
        assert here != (name in ELSEWHERE.get(section, ())), name


def test_every_flag_of_extend_is_a_key_of_a_recipe():
    from ropext.cli.options import command_of

    known = {**Recipe.model_fields, **SECTIONS["extend"].model_fields}
    for name in inspect.signature(command_of("extend")).parameters:
        if name in ("fit", "finetune", "evaluate"):
            assert "data" in SECTIONS[name].model_fields
        elif name not in OF_THE_CALL:
            assert name in known, name


def test_every_flag_of_the_other_commands_is_a_key_of_its_section():
    from ropext.cli.options import command_of

    for section, command in (("fit", "fit"), ("finetune", "finetune"), ("evaluate", "eval")):
        known = {**SECTIONS[section].model_fields, **Recipe.model_fields}
        for name in inspect.signature(command_of(command)).parameters:
            own = name in known or name in ELSEWHERE.get(section, ()) or name in OF_THE_CALL
            own = own or name in ("directory", "full", "losses", "table_format", *ONLY)
            assert own, (section, name)


KEYS = [
    (section, key, SECTIONS[section].model_fields[field])
    for section in SECTIONS
    for key, field in options_by_key(section).items()
]


@pytest.mark.parametrize(("section", "key", "info"), KEYS, ids=[f"{s}.{k}" for s, k, _ in KEYS])
def test_every_key_means_the_same_in_a_file_and_on_the_command_line(section, key, info):
    """A value, or the error about it, is the same except for its place."""

    def read(text, *words):
        text = f"model: m\n{text}\n" + ("" if section == "extend" else "extend: {}\n")
        try:
            found = recipe_from_source(RecipeSource("r.yaml", parse_recipe(text, "r.yaml")), words)
        except RopextError as error:
            return str(error).rpartition(": ")[2]
        return getattr(getattr(found, section), options_by_key(section)[key])

    value = {"for": "vllm", "tasks": "passkey", "method": "yarn"}.get(key, sample(info))
    rest = "" if section == "extend" or key == "data" else "data: d, "
    written = read(f"{section}: {{{rest}{key}: {value}}}")
    assert written == read(f"{section}: {{{rest}}}", f"{section}.{key}={value}")
    assert key in recipe_schema()["$defs"][SECTIONS[section].__name__]["properties"]


def test_options_and_a_file_make_the_same_job(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text(
        "model: ropext://demo\nextend: {method: yarn, factor: 2.0, for: [vllm], link: hard}\n"
        "finetune: {data: ropext://tuning, steps: 3}\nevaluate: {data: ropext://held-out}\n"
    )
    top = {"model": "ropext://demo", "revision": None}
    wish = {"method": "yarn", "factor": 2.0, "for_loaders": ("vllm",), "link": "hard"}
    later = {"finetune": "ropext://tuning", "evaluate": "ropext://held-out", "fit": None}
    one = open_recipe(path)
    two = recipe_from_options(top, wish, later, ["finetune.steps=3"])
    three = open_recipe(
        {
            "model": "ropext://demo",
            "extend": {"method": "yarn", "factor": 2.0, "for": ["vllm"], "link": "hard"},
            "finetune": {"data": "ropext://tuning", "steps": 3},
            "evaluate": {"data": "ropext://held-out"},
        }
    )
    assert one.resolved() == two.resolved() == three.resolved()
    assert one.extend_options() == two.extend_options() == three.extend_options()
    assert one.stages == ("plan", "extend", "finetune", "evaluate", "report")


def test_the_fit_takes_how_far_and_for_whom_from_extend():
    wanted = SMALL | {
        "extend": {"method": "yarn", "factor": 2, "for": ["vllm"]},
        "fit": {"data": "ropext://tuning", "steps": 4},
        "seed": 7,
    }
    asked = open_recipe(wanted)
    assert asked.fit_options() == Fit(
        factor=2.0, for_loaders=("vllm",), start=("yarn",), steps=4, link="copy", seed=7
    )


def test_one_seed_serves_all_sections_without_their_own():
    asked = open_recipe(
        SMALL
        | {
            "seed": 5,
            "finetune": {"data": "ropext://tuning"},
            "evaluate": {"data": "ropext://held-out", "seed": 6},
        }
    )
    assert asked.finetune_options().seed == 5
    assert asked.evaluate_options().seed == 6
    assert asked.resolved()["finetune"]["seed"] == 5


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("extend: {factor: 2}\n", "r.yaml names no model"),
        ("model: a\n", "r.yaml has no section extend"),
        ("model: a\nextend:\n  factor: 2\n  target: 9\n", "r.yaml, line 2 (extend): --factor 2"),
        ("model: a\nextend: {method: yran}\n", "line 2 (extend): --method"),
        ("model: a\nextend: {link: soft}\n", "link is one of copy, hard, symlink"),
        ("model: a\nextend: {factor: 2}\nfinetune: {steps: 2}\n", "line 3: finetune needs data"),
        (
            "model: a\nextend: {factor: 2}\nfinetune: {data: b, rank: 0}\n",
            "line 3: finetune.rank must be at least 1",
        ),
        ("model: a\nextend: {factor: 2}\nevaluate: {items: 2}\n", "line 3 (evaluate): nothing to"),
        (
            "model: a\nextend: {factor: 2}\nevaluate: {data: b, fail_if: [x]}\n",
            "line 3 (evaluate): --fail-if 'x' is not a gate",
        ),
        (
            "model: a\nextend: {factor: 2}\nfit: {data: b, within: pi}\n",
            "line 3: fit.within is one of",
        ),
        (
            "model: a\nextend: {factor: 2}\nfit: {data: b, factor: 4}\n",
            "line 3: fit has no key 'factor'; it is a key of extend",
        ),
    ],
)
def test_a_refused_recipe_key_is_named_with_its_section_and_line(tmp_path, text, words):
    path = tmp_path / "r.yaml"
    path.write_text(text)
    with pytest.raises(RopextError) as caught:
        open_recipe(path)
    assert words in str(caught.value), str(caught.value)


def test_a_refused_option_names_the_command_lines_change(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text(
        "model: a\nextend: {factor: 2}\nfinetune: {data: b, window: 64, strategy: pose}\n"
    )
    said = r"line 3 \(finetune, with finetune.strategy=full\): --window is for --strategy pose"
    with pytest.raises(UsageError, match=said):
        open_recipe(path, ["extend.factor=4", "finetune.strategy=full"])


def test_a_name_is_a_bundled_recipe_if_there_is_no_such_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert open_recipe("smoke-test").source.name == "smoke-test.yaml"
    (tmp_path / "smoke-test").write_text("model: mine\nextend: {factor: 2}\n")
    assert open_recipe("smoke-test").model == "mine"
    with pytest.raises(InputError, match="did you mean smoke-test"):
        open_recipe("smoke-tst")
    with pytest.raises(InputError, match=r"sub/smoke-test does not exist"):
        open_recipe("sub/smoke-test")


def test_the_schema_describes_each_key_as_the_reader_accepts_it():
    made = recipe_schema()
    assert json.loads(json.dumps(made)) == made
    assert made["additionalProperties"] is False
    assert set(made["properties"]) == set(Recipe.model_fields)
    assert made["required"] == ["model", "extend"]
    fit, tune = (made["$defs"][name]["properties"] for name in ("FitSection", "FinetuneSection"))
    assert fit["steps"] == {
        "default": 40,
        "description": "optimiser steps",
        "maximum": 10**9,
        "minimum": 1,
        "type": "integer",
    }
    assert fit["batch_tokens"]["type"] == ["integer", "string"]  # 8192 or 8k
    assert {"type": "null"} in tune["schedule"]["anyOf"]
    assert "metavar" not in json.dumps(made)


def test_bad_overrides_are_refused_before_anything_is_opened():
    with pytest.raises(UsageError, match="did you mean steps"):
        open_recipe(SMALL, ["finetune.stps=4"])
