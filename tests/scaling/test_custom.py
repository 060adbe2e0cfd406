"""A function of the user's own as `--method module:function`: carried exactly, or refused."""

import importlib
import json
import math
import re
import shlex
import sys
from functools import partial
from pathlib import Path

import command_line
import pytest
from comparing import assert_close

import ropext
from ropext.base.errors import UsageError
from ropext.files.checkpoint import provenance
from ropext.options.evaluate import Evaluate
from ropext.pipeline.recipe import read_recipe
from ropext.scaling import custom
from ropext.scaling.rope import Rope

PAGE = Path(ropext.__file__).parents[1] / "docs" / "adding-a-method.md"
WRONG = """
def raises(rope, factor):
    return {}["theta"]

def leaves(rope, factor):
    raise SystemExit(0)

def few(rope, factor):
    return [1.0], 1.0

def infinite(rope, factor):
    return [float("inf")] * (rope.dim // 2), 1.0

def cold(rope, factor):
    return rope.spectrum.inv_freq, 0.0

def alone(rope, factor):
    return rope.spectrum.inv_freq

def hot(rope, factor):
    return [f / factor for f in rope.spectrum.inv_freq], 1.25

def chance(rope, factor):
    import random

    return [f / (factor + random.random()) for f in rope.spectrum.inv_freq], 1.0

def kept(rope, factor):
    slow = rope.dim // 4
    return [0.0 if i >= slow else f for i, f in enumerate(rope.spectrum.inv_freq)], 1.0
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a folder to work in, with the page's mine.py and a module of mistakes."""
    page = PAGE.read_text("utf-8")
    [first, *_] = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    (tmp_path / "mine.py").write_text(first, "utf-8")
    (tmp_path / "wrong.py").write_text(WRONG, "utf-8")
    monkeypatch.chdir(tmp_path)
    for name in ("mine", "wrong"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def test_a_function_itself_is_a_method_and_the_record_has_its_source(folder):
    def slower(rope, factor):
        return [f / factor for f in rope.spectrum.inv_freq], 1.0

    pi = ropext.plan("ropext://demo", factor=4, method="pi")
    plan = ropext.plan("ropext://demo", factor=4, method=slower)
    assert plan.main.wanted == pi.main.wanted
    assert plan.method == f"{__name__}:slower"
    ropext.extend("ropext://demo", "out", factor=4, method=slower, no_verify=True)
    record = json.loads(Path("out/ropext.json").read_text("utf-8"))
    assert record["method"] == plan.method
    source = record["method_source"]
    assert "def slower(rope, factor):" in source
    assert "return [f / factor for f in rope.spectrum.inv_freq], 1.0" in source
    ropext.extend("ropext://demo", "named", factor=4, method="wrong:hot", no_verify=True)
    record = json.loads(Path("named/ropext.json").read_text("utf-8"))
    assert record["method_source"].startswith("def hot(rope, factor):")


def test_a_source_is_recorded_without_its_tokens(folder, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "CaNaRyOfTheTests")
    text = """
def slower(rope, factor):
    open_url("https://user:password@host/CaNaRyOfTheTests", "hf_ABCDEFGHIJKLMNOPQRST") if 0 else 0
    return [f / factor for f in rope.spectrum.inv_freq], 1.0
"""
    (folder / "secretive.py").write_text(text, "utf-8")
    monkeypatch.delitem(sys.modules, "secretive", raising=False)
    ropext.extend("ropext://demo", "out", factor=4, method="secretive:slower", no_verify=True)
    source = json.loads(Path("out/ropext.json").read_text("utf-8"))["method_source"]
    assert 'open_url("https://***@host/***", "***")' in source


def test_functions_are_methods_of_an_evaluation_too():
    first = Evaluate(method=lambda rope, factor: ([1.0], 1.0), factor=2, data="x")
    assert re.fullmatch(rf"{re.escape(__name__)}:lambda_[0-9a-f]{{8}}", *first.method)

    def one(rope, factor):
        return [f / factor for f in rope.spectrum.inv_freq], 1.0

    other = one
    assert Evaluate(method=["pi", one], factor=2, data="x").method == (
        "pi",
        f"{__name__}:one",
    )

    def one(rope, factor):
        return rope.spectrum.inv_freq, 1.0

    second, first = Evaluate(method=[one, other], factor=2, data="x").method
    assert first == f"{__name__}:one"
    assert re.fullmatch(rf"{re.escape(first)}_[0-9a-f]{{8}}", second)
    assert Evaluate(method=[one], factor=2, data="x").method == (second,)  # and stays so
    with pytest.raises(UsageError, match=r"^two functions are called .*:one; give each its own"):
        Evaluate(method=[other, other], factor=2, data="x")


def times(share, rope, factor, more=1.0):
    """Divide all by a share of the factor."""
    return [f / (factor * share * more) for f in rope.spectrum.inv_freq], 1.0


def divided_by(share):
    def inner(rope, factor):
        return [f / (factor * share) for f in rope.spectrum.inv_freq], 1.0

    return inner


def first_helper(share):
    return share


def second_helper(share):
    return share / 2


class Sharing:
    """A callable with a state."""

    def __init__(self, share):
        self.share = share

    def __call__(self, rope, factor):
        return [f / (factor * self.share) for f in rope.spectrum.inv_freq], 1.0

    def scale(self, rope, factor):
        return self(rope, factor)


def several(kind):
    """Return three functions that differ only in a bound value: 1, 2 and 4."""
    shares = (1.0, 2.0, 4.0)
    if kind == "partials":
        return [partial(times, share) for share in shares]
    if kind == "partials of partials":
        return [partial(partial(times, 1.0), more=share) for share in shares]
    if kind == "defaults":
        return [
            lambda rope, factor, by=share: (
                [f / (factor * by) for f in rope.spectrum.inv_freq],
                1.0,
            )
            for share in shares
        ]
    if kind == "closures":
        return [divided_by(share) for share in shares]
    if kind == "objects":
        return [Sharing(share) for share in shares]
    return [Sharing(share).scale for share in shares]


@pytest.mark.parametrize(
    "kind",
    ["partials", "partials of partials", "defaults", "closures", "objects", "methods of objects"],
)
def test_bound_arguments_distinguish_functions(kind):
    functions = several(kind)
    names = Evaluate(method=functions, factor=2, data="x").method
    assert len({*names}) == 3
    assert Evaluate(method=several(kind), factor=2, data="x").method == names  # made once more
    rope = Rope(8, 1e4, 1024)
    for name, share in zip(names, (1.0, 2.0, 4.0), strict=True):
        scaling = custom.method(name).scale(rope, 2048, None)
        assert_close(scaling.pair_factors, [2 * share] * 4, 1e-12, name)


def test_functions_that_call_different_helpers_are_different_methods():
    first = Evaluate(
        method=lambda rope, factor: ([first_helper(1.0)] * (rope.dim // 2), 1.0), factor=2, data="x"
    )
    second = Evaluate(
        method=lambda rope, factor: ([second_helper(1.0)] * (rope.dim // 2), 1.0),
        factor=2,
        data="x",
    )
    assert first.method != second.method


def test_a_recursive_inner_function_has_a_name():
    def again(rope, factor):
        return again(rope, factor / 2) if factor > 2 else (rope.spectrum.inv_freq, 1.0)

    assert Evaluate(method=again, factor=2, data="x").method == (f"{__name__}:again",)


def test_a_name_gives_its_modules_present_value(folder, monkeypatch):
    monkeypatch.syspath_prepend(folder)
    wrong = importlib.import_module("wrong")
    hot = wrong.hot
    by_function = ropext.plan("ropext://demo", factor=4, method=hot)
    assert by_function.method == "wrong:hot"
    wrong.hot = divided_by(2.0)
    by_name = ropext.plan("ropext://demo", factor=4, method="wrong:hot")
    now = by_name.main.rope.spectrum.inv_freq
    assert_close(by_name.main.wanted.inv_freq, [f / 8 for f in now], 1e-12, "redefined")
    before = ropext.plan("ropext://demo", factor=4, method=hot)  # it is kept, by a name of its own
    assert before.main.wanted == by_function.main.wanted
    assert before.method != by_function.method


def test_a_record_has_the_source_of_the_function_that_was_planned(folder, monkeypatch):
    """The name means another function by the time the plan is written."""
    monkeypatch.syspath_prepend(folder)
    wrong = importlib.import_module("wrong")
    plan = ropext.plan("ropext://demo", factor=4, method=wrong.hot)
    wrong.hot = divided_by(2.0)
    wrong.hot.__module__ = "wrong"
    wrong.hot.__name__ = "hot"
    ropext.plan("ropext://demo", factor=4, method=wrong.hot)
    record = provenance.record_of(plan, {"config": {}})
    assert record.more["method_source"].startswith("def hot(rope, factor):")


def test_the_source_of_a_partial_includes_its_bound_arguments():
    plan = ropext.plan("ropext://demo", factor=4, method=partial(partial(times, 2.0), more=3.0))
    lines = plan.method_source.splitlines()
    assert lines[0] == "def times(share, rope, factor, more=1.0):"
    assert lines[-1] == "# bound: (2.0,) {'more': 3.0}"  # Python joins the two
    assert custom.method(plan.method).summary == "Divide all by a share of the factor."


def test_a_function_must_return_two_results(folder):
    with pytest.raises(UsageError) as caught:
        ropext.plan("ropext://demo", factor=4, method="wrong:alone")
    assert str(caught.value) == (
        "method wrong:alone must return two things, the inverse frequencies and the attention "
        "factor (1.0 for none); it returned a tuple of 16"
    )


@pytest.fixture
def run(capsys):
    """Run the command line in this process: (exit code, stdout, stderr)."""

    def run(*words):
        code, said = command_line.run(*words, capsys=capsys)
        return code, said.out, said.err

    return run


def test_the_lines_of_the_page_run_and_their_output_works_without_the_function(folder, run):
    page = PAGE.read_text("utf-8")
    [lines] = re.findall(r"```bash\n(.*?)```", page, flags=re.DOTALL)
    small = ["--max-docs", "2", "--lengths", "256", "--quiet"]
    for line in lines.splitlines():
        named = line.replace("MODEL", "ropext://demo").replace("books.jsonl", "ropext://held-out")
        _, *words = shlex.split(named)
        code, said, wrong = run(*words, *(small if words[0] == "eval" else ()))
        assert code == 0, wrong
        assert "mine:mixed" in said.replace("mine.mixed-4x", "mine:mixed")
    (folder / "mine.py").unlink()
    del sys.modules["mine"]
    assert run("verify", "OUT")[0] == 0
    # By hand: d = 32, so that the last pair is divided by exactly the factor.
    site = json.loads(Path("OUT", "ropext.json").read_text("utf-8"))["sites"][0]
    ratios = [
        a / b for a, b in zip(site["base"]["inv_freq"], site["spectrum"]["inv_freq"], strict=True)
    ]
    a = math.log(4) / 16**0.625
    assert_close(ratios, [math.exp(a * (i + 1) ** 0.625) for i in range(16)], 1e-12, "mixed NTK")
    assert_close(ratios[-1:], [4.0], 1e-12, "the last pair")


def test_a_function_gives_the_whole_spectrum_even_for_a_scaled_model(folder):
    rope = Rope(8, 1e4, 1024, 512, (1.0, 1.5, 2.0, 2.0), attention_factor=1.1)
    made = custom.method("wrong:hot").scale(rope, 4096, None)
    assert_close(made.pair_factors, [4.0] * 4, 1e-12, "over what it reads with now")
    assert_close([made.attention_factor * 1.1], [1.25], 1e-12, "in all")
    plan = ropext.plan("ropext://demo", factor=4, method="wrong:hot")
    assert plan.to_json()["sites"][0]["attention_factor"] == 1.25
    still = custom.method("wrong:kept").scale(Rope(8, 1e4, 1024), 4096, None)
    assert still.pair_factors == (1.0, 1.0, math.inf, math.inf)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("wrong:raises", "KeyError: 'theta' (wrong.py, line 3)"),
        ("wrong:leaves", "SystemExit: 0 (wrong.py, line 6)"),
        ("wrong:few", "must return 16 finite inverse frequencies"),
        ("wrong:infinite", "must return 16 finite inverse frequencies"),
        ("wrong:cold", "an attention factor above 0; it returned"),
        ("wrong:chance", "returned other numbers when it was called again with the same arg"),
        ("wrong:alone", "must return two things"),
        ("wrong:absent", "module 'wrong' has no attribute 'absent'"),
        ("nowhere_at_all:mixed", "there is no module nowhere_at_all; looked in this folder (/"),
        ("nowhere.at_all:mixed", "there is no module nowhere; looked in this folder (/"),
        (r"C:\texts\mine", "is not a method"),
        ("C:/texts/mine", "is not a method"),
        ("./mine.py:mixed", "is not a method"),
        ("mine.py:mixed", "is not a method"),
    ],
)
def test_a_wrong_custom_method_gives_one_sentence(folder, run, name, said):
    code, printed, wrong = run("plan", "ropext://demo", "--factor", "4", "--method", name)
    assert (code, printed) == (2, "")
    assert said in wrong
    assert len(wrong.strip().splitlines()) == 1


def test_a_spectrum_without_a_stock_form_is_refused(folder, run):
    """llama.cpp reads no longrope of a directory, and GPT-2 turns nothing."""
    words = ("plan", "ropext://demo", "--factor", "4", "--method", "mine:mixed")
    code, _, wrong = run(*words, "--for", "llama.cpp")
    assert (code, len(wrong.splitlines())) == (2, 1)
    assert "cannot be written exactly" in wrong
    table = {"model_type": "gpt2", "n_positions": 1024, "n_embd": 8, "n_head": 2, "n_layer": 1}
    Path("gpt2").mkdir()
    Path("gpt2", "config.json").write_text(json.dumps(table), "utf-8")
    code, _, wrong = run("plan", "gpt2", "--factor", "2", "--method", "mine:mixed")
    assert (code, "is for other models" in wrong) == (2, True)


def test_a_recipe_imports_nothing(folder, run):
    """Recipes come from strangers: nothing that one names is run, by whatever key."""
    (folder / "evil.py").write_text("open('RAN', 'w').close()\ndef f(rope, factor): ...\n", "utf-8")
    start = {"model": "ropext://demo", "extend": {"factor": 4}}
    for section, key in (("extend", "method"), ("fit", "start")):
        recipe = start | {"fit": {"data": "ropext://tuning"}}
        recipe[section] = recipe[section] | {key: "evil:f"}
        (folder / "recipe.yaml").write_text(json.dumps(recipe), "utf-8")
        assert run("run", "recipe.yaml", "-o", "OUT")[0] == 2
        assert not (folder / "RAN").exists()
    with pytest.raises(UsageError, match="a recipe names no code"):
        read_recipe({"model": "ropext://demo", "extend": {"factor": 4, "method": "evil:f"}})
    words = ("extend", "ropext://demo", "--factor", "4", "-o", "OUT", "--finetune", "x.jsonl")
    code, _, wrong = run(*words, "--method", "evil:f")
    assert (code, "a recipe names no code" in wrong) == (2, True)
    assert not (folder / "RAN").exists()
