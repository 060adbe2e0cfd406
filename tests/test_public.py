"""The public names are there, each the function of its room, and cost nothing until used."""

import ast
import doctest
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import ropext
from ropext.errors import InputError, UsageError


@pytest.mark.parametrize("name", [n for n in ropext.__all__ if n != "__version__"])
def test_every_public_name_is_a_function(name):
    assert callable(getattr(ropext, name))
    assert name in dir(ropext)


class Loaded:
    """Stands for a model in memory, whose repr is long."""

    def __repr__(self) -> str:
        return "LlamaForCausalLM(" + "(layer): Linear\n" * 1000


@pytest.mark.parametrize("name", ["inspect", "plan", "evaluate", "extend", "fit", "finetune"])
def test_a_loaded_model_is_refused_with_what_writes_one(name, tmp_path):
    more = {"inspect": {}, "plan": {"factor": 4}, "evaluate": {"data": ["text"]},
            "extend": {"output": tmp_path / "out", "factor": 4}}  # fmt: skip
    options = more.get(name, {"data": ["text"], "output": tmp_path / "out"})
    with pytest.raises(UsageError, match=r"not a Loaded; .* `ropext\.save\(model, DIR\)`"):
        getattr(ropext, name)(Loaded(), **options)


def test_a_name_that_is_too_long_for_a_file_is_a_sentence():
    with pytest.raises(InputError, match=r"^a{80} cannot be read: File name too long$"):
        ropext.inspect("a" * 5000)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'extnd'"):
        ropext.extnd  # noqa: B018


def test_importing_ropext_imports_no_room():
    code = "import sys, ropext; print([m for m in sys.modules if m.startswith('ropext.')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['ropext.version']"


ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/python.md"


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
def test_what_the_page_says_is_what_python_answers(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    failed, tried = doctest.testfile(str(PAGE), module_relative=False, encoding="utf-8")
    assert (failed, tried > 20) == (0, True)
