"""The public names are there, each the function of its room, and cost nothing until used."""

import ast
import doctest
import inspect
import json
import math
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import run

import ropext
from ropext.base.bundled import MODELS
from ropext.base.errors import InputError, RopextError, UsageError
from ropext.options.door import message_for_python


@pytest.mark.parametrize("name", [n for n in ropext.__all__ if n != "__version__"])
def test_every_public_name_is_a_function(name):
    assert callable(getattr(ropext, name))
    assert name in dir(ropext)


class Loaded:
    """Stands for a model in memory, whose repr is long."""

    def __repr__(self) -> str:
        return "LlamaForCausalLM(" + "(layer): Linear\n" * 1000


@pytest.mark.parametrize("name", ["inspect", "plan", "evaluate", "extend", "fit", "finetune"])
def test_a_loaded_model_is_refused_with_the_call_that_saves_it(name, tmp_path):
    more = {"inspect": {}, "plan": {"factor": 4}, "evaluate": {"data": ["text"]},
            "extend": {"output": tmp_path / "out", "factor": 4}}  # fmt: skip
    options = more.get(name, {"data": ["text"], "output": tmp_path / "out"})
    said = r"not a Loaded$"
    if name not in ("inspect", "plan"):
        said = r"not by a Loaded; .* `ropext\.save\(model, DIR\)`"
    with pytest.raises(UsageError, match=said):
        getattr(ropext, name)(Loaded(), **options)


# Each function's further arguments, next to the wrong one.
RIGHT = {
    "compare": {"output": "compared"},
    "evaluate": {"model": "ropext://demo", "output": "run", "data": ["text"]},
    "extend": {"model": "ropext://demo", "output": "out", "factor": 4},
    "finetune": {"directory": "ropext://demo", "data": ["text"], "output": "out"},
    "fit": {"model": "ropext://demo", "data": ["text"], "output": "out", "factor": 4},
    "inspect": {"model": "ropext://demo"},
    "open": {"run": "run"},
    "patch": {"factor": 4},
    "plan": {"model": "ropext://demo", "factor": 4},
    "push": {"directory": "out", "repository": "ORG/NAME"},
    "run": {"recipe": {"model": "ropext://demo", "extend": {"factor": 4}}, "output": "out"},
    "save": {"directory": "out"},
    "verify": {"directory": "out"},
}
NAMES = tuple(name for name in ropext.__all__ if name != "__version__")
ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/python.md"
SHOWN = {name: inspect.signature(getattr(ropext, name)).parameters for name in NAMES}
PARAMETERS = [(name, word) for name in NAMES for word in SHOWN[name]]


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """Make a folder with an extended checkpoint, and a model that was patched."""
    from transformers import AutoModelForCausalLM

    place = tmp_path_factory.mktemp("public")
    ropext.extend("ropext://demo", place / "out", factor=4, method="pi", no_verify=True)
    model = AutoModelForCausalLM.from_pretrained(MODELS["ropext://demo"])
    return place, ropext.patch(model, method="pi", factor=4)


@pytest.mark.parametrize(("name", "word"), PARAMETERS)
def test_an_argument_of_another_kind_is_a_sentence(out, name, word, monkeypatch):
    place, model = out
    monkeypatch.chdir(place)
    right = {"model": model} if name in ("patch", "save") else {}
    given = right | RIGHT[name] | {word: object()}
    runs = [given.pop("runs")] if "runs" in given else []
    if word == "target":
        given.pop("factor", None)
    with pytest.raises(RopextError, match="object"):
        getattr(ropext, name)(*runs, **given)


@pytest.mark.parametrize("name", NAMES)
def test_python_shows_every_argument_with_a_line_about_it(name):
    function = getattr(ropext, name)
    assert function.__name__ == name
    shown = inspect.signature(function).parameters
    kinds = {parameter.kind for parameter in shown.values()}
    assert inspect.Parameter.VAR_KEYWORD not in kinds
    assert " at 0x" not in str(inspect.signature(function))
    lines = inspect.getdoc(function).partition("Arguments:\n")[2].splitlines()
    assert [line.split(":")[0].strip() for line in lines] == list(shown)
    assert all(len(line.partition(": ")[2]) > 5 for line in lines)
    if name in RIGHT and "factor" in shown and name != "evaluate":
        assert shown["factor"].default is None
        assert shown["factor"].annotation == float | None


def test_the_signatures_of_python_and_of_editors_have_the_same_arguments():
    tree = ast.parse(Path(ropext.__file__).with_suffix(".pyi").read_text("utf-8"))
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            names = [arg.arg for arg in (*node.args.args, *node.args.kwonlyargs)]
            shown = inspect.signature(getattr(ropext, node.name)).parameters
            assert names == [word for word in shown if word != "runs"]


@pytest.mark.parametrize(
    ("name", "given", "sentence"),
    [
        (
            "evaluate",
            {"model": "x", "methods": "pi"},
            "unknown option 'methods'; did you mean method",
        ),
        ("plan", {"model": "x", "for": "vllm"}, "unknown option 'for'; did you mean for_loaders"),
        ("run", {"recipe": "x", "forse": True}, "unknown option 'forse'; did you mean force"),
        (
            "save",
            {"model": "x", "zzz": 1},
            "unknown option 'zzz'; known are model, directory, tokenizer, no",
        ),
        ("plan", {"model": "x", "factr": None}, "unknown option 'factr'; did you mean factor"),
        ("extend", {"model": "x"}, "missing a required argument: 'output'"),
    ],
)
def test_a_wrong_call_of_a_public_function_gives_one_sentence(name, given, sentence):
    with pytest.raises(UsageError, match=rf"^ropext\.{name}: {sentence}"):
        getattr(ropext, name)(**given)


def test_a_config_or_a_model_in_memory_is_planned_as_its_directory(out):
    from transformers import AutoConfig

    there = ropext.plan("ropext://demo", factor=4, method="yarn")
    config = AutoConfig.from_pretrained(MODELS["ropext://demo"])
    patched = out[1]
    for given in (config, config.to_dict(), patched):
        here = ropext.plan(given, factor=4, method="yarn")
        assert here.main.wanted == there.main.wanted
        assert here.config["rope_scaling"] == there.config["rope_scaling"]
    assert ropext.inspect(config).main == ropext.inspect("ropext://demo").main
    now = ropext.inspect(patched)
    assert (now.model.context, now.main.params["rope_type"]) == (1024, "linear")
    for wrong in (math.nan, -math.inf, [{"inside": math.nan}], {1}):
        for function in (ropext.inspect, ropext.plan):
            with pytest.raises(UsageError, match=r"^this config cannot be written as JSON: "):
                function(config.to_dict() | {"note": wrong}, factor=4)
    above = ropext.plan(config.to_dict() | {"note": math.inf}, factor=4)
    json.dumps(above.to_json(), allow_nan=False)
    assert above.config["note"] == {"__float__": "Infinity"}  # as transformers writes it
    with pytest.raises(UsageError, match=r"^this config has no model_type"):
        ropext.plan({"rope_theta": 1.0}, factor=4)
    with pytest.raises(UsageError, match=r"^revision main is of a hub id"):
        ropext.inspect(config, revision="main")


def test_none_is_an_option_that_was_not_given():
    assert ropext.plan("ropext://demo", factor=4, method=None, revision=None).target == 1024


def test_a_name_that_is_too_long_for_a_file_is_a_sentence():
    with pytest.raises(InputError, match=r"^a{80} cannot be read: File name too long$"):
        ropext.inspect("a" * 5000)


NAMED = re.compile(r"\bropext(?:\.[A-Za-z_]+)+")


def test_a_public_address_of_the_page_is_there_after_import_ropext_alone():
    text = PAGE.read_text("utf-8").replace("ropext.json", "")
    named = sorted({*NAMED.findall(text), "ropext.rope.Rope", "ropext.errors.UsageError"})
    assert {"ropext.errors.RopextError", "ropext.patching.unpatch", "ropext.bundled"} <= {*named}
    for name in named:
        module = name.split(".")[1]
        assert module in dir(ropext)
        if module not in NAMES:
            subprocess.run([sys.executable, "-c", f"import ropext; {name}"], check=True)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'extnd'"):
        ropext.extnd  # noqa: B018


def test_importing_ropext_imports_only_its_version():
    code = "import sys, ropext; print([m for m in sys.modules if m.startswith('ropext.')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['ropext.version']"


def test_the_signatures_that_editors_read_are_those_of_the_functions():
    made = runpy.run_path(str(ROOT / "scripts/make_signatures.py"), run_name="signatures")["stub"]()
    assert Path(ropext.__file__).with_suffix(".pyi").read_text("utf-8") == made


@pytest.mark.parametrize(
    ("name", "options"),
    [("plan", {"method", "beta_fast", "for_loaders"}), ("evaluate", {"data", "tasks", "revision"}),
     ("fit", {"within", "factor"}), ("finetune", {"evaluate", "rank"}), ("patch", {"method"})],
)  # fmt: skip
def test_a_signature_names_the_options(name, options):
    tree = ast.parse(Path(ropext.__file__).with_suffix(".pyi").read_text("utf-8"))
    made = {node.name: node.args for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert options <= {arg.arg for arg in made[name].kwonlyargs}
    assert made[name].kwarg is None
    assert made.keys() == set(ropext.__all__) - {"__version__"}


def test_every_public_function_is_called_on_the_page():
    called = PAGE.read_text("utf-8").replace(">>> ropext.", "ropext.")
    names = [name for name in ropext.__all__ if name != "__version__"]
    assert [name for name in names if f"ropext.{name}(" not in called] == []


@pytest.mark.slow
@pytest.mark.parametrize("page", [PAGE, ROOT / "docs/reference/results-in-python.md"])
def test_the_values_on_the_page_equal_pythons(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    failed, tried = doctest.testfile(str(page), module_relative=False, encoding="utf-8")
    assert (failed, tried > 20) == (0, True)


ALL = {word: shown for name in NAMES for word, shown in SHOWN[name].items()}


@pytest.mark.parametrize(
    ("sentence", "worded"),
    [
        ("--max-docs must be at least 1", "max_docs must be at least 1"),
        ("it exists; --force replaces it", "it exists; force=True replaces it"),
        (
            "give --from-original --target 524288 --method yarn",
            'give from_original=True, target=524288, method="yarn"',
        ),
        (
            "name it with --base MODEL, or give -o RUN",
            "name it with base=MODEL, or give output=RUN",
        ),
        (
            "add --tasks passkey,mkey; or --for vllm",
            'add tasks="passkey,mkey"; or for_loaders="vllm"',
        ),
        ("--fail-if 'x' is not a gate", "gates 'x' is not a gate"),
        ("texts (--data) is in out (--output)", "texts (data) is in out (output)"),
        ("--lengths 4k: read", 'lengths="4k": read'),
        ("--data texts:1 is empty", "data texts:1 is empty"),
        # What is no argument of the function, a command, and a name with dashes stay.
        ("llama-server --rope-scaling yarn", "llama-server --rope-scaling yarn"),
        ("run ropext eval OUT --data X; or --force", "run ropext eval OUT --data X; or force=True"),
        ("no my--data.jsonl is here", "no my--data.jsonl is here"),
    ],
)
def test_a_message_names_arguments_in_place_of_flags(sentence, worded):
    assert message_for_python(sentence, ALL) == worded


def test_errors_and_narration_from_python_name_arguments(tmp_path, capsys):
    with pytest.raises(UsageError, match=r"^factor must be .*above 1 and at most 4096, was 1.0$"):
        ropext.plan("ropext://demo", factor=1)
    with pytest.raises(UsageError, match="did you mean gates"):
        ropext.evaluate("ropext://demo", fail_if=["x"])
    heard = []
    few = {"data": "ropext://held-out", "lengths": [256], "max_docs": 2}
    ropext.evaluate("ropext://demo", say=heard.append, split_documents="windows", **few)
    assert any("(split_documents)" in line for line in heard)
    code, told = run("plan", "ropext://demo", "--factor", "1", capsys=capsys)
    assert (code, told.err.startswith("error: --factor must be")) == (2, True)


def test_the_help_of_patch_lists_its_parameters():
    shown = inspect.signature(ropext.patch).parameters
    assert "finetune" not in shown
    assert "    model: model of transformers in memory, or" in inspect.getdoc(ropext.patch)
    assert "    model: directory, file or hub id" in inspect.getdoc(ropext.plan)
