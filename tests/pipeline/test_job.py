"""One recipe model for the file, the options and the schema; its cells; what it refuses."""

import inspect
import json
from pathlib import Path

import pytest

from ropext.errors import InputError, RopextError, UsageError
from ropext.options import sections
from ropext.options.evaluate import Evaluate as EvaluationOptions
from ropext.options.extend import Extend, Reach
from ropext.options.sections import SECTIONS, TABLE
from ropext.options.training import Finetune as TrainingOptions
from ropext.options.training import Fit
from ropext.pipeline import job
from ropext.recipefile import from_text, override

SMALL = {"model": "ropext://demo", "extend": {"method": "yarn", "factor": 2}}
OPTION_CLASSES = {
    "extend": Extend,
    "fit": Fit,
    "finetune": TrainingOptions,
    "evaluate": EvaluationOptions,
}
# Of an option class, but said by another section or by the run itself.
ELSEWHERE = {
    "extend": ("finetune", "like", "short_pair_factors"),
    "fit": tuple(Reach.model_fields),
    "evaluate": ("method", "factor", "context", "base", "adapter"),
}
# Of `ropext extend`, but about this very call: they decide nothing about what is made.
OF_THE_CALL = {
    *("output", "force", "dry_run", "time", "out", "words", "push_to_hub", "public"),
    "trust_remote_code",  # no recipe may ask for it
    "like",  # of a GGUF, of which no run is made
}


def sample(key):
    """A value of a key's kind, as a command line and as YAML spell it."""
    if key.choices:
        return key.choices[-1]
    return {bool: "true", int: "3", float: "0.5", str: "word"}[key.item]


@pytest.mark.parametrize("section", OPTION_CLASSES)
def test_every_option_is_a_key_of_its_section_or_says_where_it_is(section):
    have = {key.field for key in TABLE[section]}
    for name in OPTION_CLASSES[section].model_fields:
        assert (name in have) != (name in ELSEWHERE.get(section, ())), name


def test_every_flag_of_extend_is_a_key_of_a_recipe():
    from ropext.cli import extend

    spelled = {"hash_weights": "hash"}
    keys = {key.field for section in ("", "extend") for key in TABLE[section]}
    for name in inspect.signature(extend.command).parameters:
        if name in ("fit", "finetune", "evaluate"):
            assert "data" in {key.field for key in TABLE[name]}
        elif name not in OF_THE_CALL:
            assert spelled.get(name, name) in keys, name


def test_every_flag_of_the_other_commands_is_a_key_of_its_section():
    from ropext.cli import eval as evaluation
    from ropext.cli import finetune, fit

    for section, command in (("fit", fit), ("finetune", finetune), ("evaluate", evaluation)):
        keys = {key.field for key in TABLE[section]} | {key.field for key in TABLE[""]}
        for name in inspect.signature(command.command).parameters:
            own = name in keys or name in ELSEWHERE.get(section, ()) or name in OF_THE_CALL
            assert own or name in ("directory", "full", "losses"), (section, name)


@pytest.mark.parametrize(
    "dotted", [f"{name}.{key.name}" if name else key.name for name in TABLE for key in TABLE[name]]
)
def test_every_key_means_the_same_in_a_file_and_on_the_command_line(dotted, tmp_path):
    section, _, name = dotted.rpartition(".")
    key = next(key for key in TABLE[section] if key.name == name)
    text = f"{section}:\n  {name}: {sample(key)}\n" if section else f"{name}: {sample(key)}\n"
    written = from_text(text, "r.yaml", TABLE, Path())
    typed = from_text("{}", "r.yaml", TABLE, Path())
    override(typed, f"{dotted}={sample(key)}", TABLE)
    assert written.entries[dotted].value == typed.entries[dotted].value
    properties = sections.schema()["properties"]
    assert name in (properties[section]["properties"] if section else properties)


def test_options_and_a_file_make_the_same_job(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text(
        "model: ropext://demo\nextend: {method: yarn, factor: 2.0, for: [vllm], link: hard}\n"
        "finetune: {data: ropext://tuning, steps: 3}\nevaluate: {data: ropext://held-out}\n"
    )
    top = {"model": "ropext://demo", "revision": None}
    wish = {"method": "yarn", "factor": 2.0, "for_loaders": ("vllm",), "link": "hard"}
    later = {"finetune": "ropext://tuning", "evaluate": "ropext://held-out", "fit": None}
    one = job.from_file(path)
    two = job.from_options(top, wish, later, ["finetune.steps=3"])
    three = job.from_mapping(
        {
            "model": "ropext://demo",
            "extend": {"method": "yarn", "factor": 2.0, "for": ["vllm"], "link": "hard"},
            "finetune": {"data": "ropext://tuning", "steps": 3},
            "evaluate": {"data": "ropext://held-out"},
        }
    )
    assert one.resolved() == two.resolved() == three.resolved()
    assert one.cells() == two.cells() == three.cells()
    assert one.stages == ("plan", "extend", "finetune", "evaluate", "report")


def test_a_grid_has_a_cell_of_every_method_and_factor():
    grid = job.from_mapping(SMALL | {"extend": {"method": ["pi", "yarn"], "factor": [2, 4.5]}})
    assert [cell.name for cell in grid.cells()] == ["pi-2x", "pi-4.5x", "yarn-2x", "yarn-4.5x"]
    assert [cell.extend().factor for cell in grid.cells()] == [2, 4.5, 2, 4.5]
    targets = job.from_mapping(SMALL | {"extend": {"method": ["pi", "yarn"], "target": 1024}})
    assert [cell.name for cell in targets.cells()] == ["pi-1024", "yarn-1024"]
    alone = job.from_mapping(SMALL)
    assert [cell.name for cell in alone.cells()] == [""]


def test_the_fit_takes_how_far_and_for_whom_from_extend():
    wanted = SMALL | {
        "extend": {"method": "yarn", "factor": 2, "for": ["vllm"]},
        "fit": {"data": "ropext://tuning", "steps": 4},
        "seed": 7,
    }
    asked = job.from_mapping(wanted)
    options = asked.fitting(asked.cells()[0])
    assert options == {
        "factor": 2,
        "for_loaders": ("vllm",),
        "start": "yarn",
        "steps": 4,
        "link": "copy",
        "seed": 7,
    }


def test_one_seed_for_all_sections_but_those_that_name_their_own():
    asked = job.from_mapping(
        SMALL
        | {
            "seed": 5,
            "finetune": {"data": "ropext://tuning"},
            "evaluate": {"data": "ropext://held-out", "seed": 6},
        }
    )
    assert asked.finetuning()["seed"] == 5
    assert asked.evaluation()["seed"] == 6
    assert asked.resolved()["finetune"]["seed"] == 5


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("extend: {factor: 2}\n", "r.yaml names no model"),
        ("model: a\n", "r.yaml has no section extend"),
        ("model: a\nextend:\n  factor: 2\n  target: 9\n", "r.yaml, line 2 (extend): --factor 2"),
        ("model: a\nextend: {method: yran}\n", "line 2 (extend): "),
        ("model: a\nextend: {link: soft}\n", "link is one of copy, hard, symlink"),
        ("model: a\nextend: {factor: [2, 2]}\n", "line 2 (extend): the grid has 2x twice"),
        ("model: a\nextend: {factor: 2}\nfinetune: {steps: 2}\n", "line 3: finetune needs data"),
        (
            "model: a\nextend: {factor: 2}\nfinetune: {data: b, rank: 0}\n",
            "line 3 (finetune): --rank must be at least 1",
        ),
        ("model: a\nextend: {factor: 2}\nevaluate: {items: 2}\n", "line 3 (evaluate): nothing to"),
        (
            "model: a\nextend: {factor: 2}\nevaluate: {data: b, fail_if: [x]}\n",
            "line 3 (evaluate): --fail-if 'x' is not a gate",
        ),
        ("model: a\nextend: {factor: 2}\nfit: {data: b, within: pi}\n", "line 3 (fit): --within"),
    ],
)
def test_what_the_options_refuse_is_told_with_the_section_and_its_line(tmp_path, text, words):
    path = tmp_path / "r.yaml"
    path.write_text(text)
    with pytest.raises(RopextError) as caught:
        job.from_file(path)
    assert words in str(caught.value), str(caught.value)


def test_what_the_options_refuse_names_what_the_command_line_changed(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text("model: a\nextend: {factor: 2}\nfinetune: {data: b, rank: 4}\n")
    said = r"line 3 \(finetune, with finetune.rank=0\): --rank must be at least 1"
    with pytest.raises(UsageError, match=said):
        job.from_file(path, ["extend.factor=4", "finetune.rank=0"])


def test_a_name_is_a_bundled_recipe_where_there_is_no_such_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert job.from_file("smoke-test").name == "smoke-test.yaml"
    (tmp_path / "smoke-test").write_text("model: mine\nextend: {factor: 2}\n")
    assert job.from_file("smoke-test").model == "mine"
    with pytest.raises(InputError, match="did you mean smoke-test"):
        job.from_file("smoke-tst")
    with pytest.raises(InputError, match=r"sub/smoke-test does not exist"):
        job.from_file("sub/smoke-test")


def test_the_schema_refuses_and_takes_what_the_reader_does():
    schema = sections.schema()
    assert json.loads(json.dumps(schema)) == schema
    assert schema["additionalProperties"] is False
    assert set(schema["properties"]) == {key.name for key in TABLE[""]} | set(SECTIONS) - {""}
    steps = schema["properties"]["finetune"]["properties"]["steps"]
    assert steps["type"] == ["integer", "null"]
    factor = schema["properties"]["extend"]["properties"]["factor"]
    assert factor["type"][:2] == ["array", "number"]


def test_bad_overrides_are_refused_before_anything_is_opened():
    with pytest.raises(UsageError, match="did you mean steps"):
        job.from_mapping(SMALL, ["finetune.stps=4"])
