"""Every warning has a name in brackets, and docs/warnings.md a paragraph for each name."""

import ast
import json
import re
from pathlib import Path

import pytest
import tiny
from report import test_widths

from ropext.base.errors import RopextError
from ropext.files.inspecting import plan_config
from ropext.files.schemes import warnings as of_schemes
from ropext.options.extend import Extend
from ropext.planning import warnings

ROOT = Path(__file__).parents[1]
NAMED = re.compile(r"(?:warning: | \(warning: |[\w.-]+: )?\[([a-z0-9]+(?:-[a-z0-9]+)*)\] ")
# Each row is a warning of a plan; these leave the sentence to another function.
LEFT = ("not_longer", "unknown_keys_of_yarn", "unknown_keys_of_longrope")
ROWS = [row.__name__ for row in (warnings.published, *warnings.ROTARY)]
ROWS = [name for name in ROWS if name not in LEFT]
# Functions whose every sentence is a warning.
MADE_IN = {
    "planning/warnings.py": ("reached", "far", "_unknown_keys", *ROWS),
    "files/schemes/warnings.py": [row.__name__ for row in of_schemes.TABLES],
    "files/inspecting/model.py": ("_again",),
    "evaluation/documents.py": ("_corpus_warnings",),
    "evaluation/corpus/encoding.py": ("unknown",),
    "evaluation/lineup.py": ("overlaps_of",),
    "results/rundir.py": ("no_digest_warnings",),
    "training/judge.py": ("few_documents_warning",),
    "training/report.py": ("repeated_text_warning",),
}


def beginning(node, names):
    """Return how a sentence begins; "" if it is made elsewhere."""
    if isinstance(node, ast.Name):
        return beginning(names[node.id], {}) if node.id in names else ""
    if isinstance(node, ast.IfExp):
        return beginning(node.body, names)
    if isinstance(node, ast.ListComp):
        return beginning(node.elt, names)
    if isinstance(node, ast.JoinedStr):
        first = node.values[0]
        own = beginning(first, names) if isinstance(first, ast.Constant) else ""
        return own or (beginning(first.value, names) if hasattr(first, "value") else "")
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def sentences(function):
    """Yield the sentences that a function yields, returns or appends."""
    names = {n.targets[0].id: n.value for n in ast.walk(function)
             if isinstance(n, ast.Assign) and isinstance(n.targets[0], ast.Name)}  # fmt: skip
    for node in ast.walk(function):
        value = node.value if isinstance(node, ast.Yield | ast.Return) else None
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "append":
            value = node.args[0]
        if value is not None and (said := beginning(value, names)):
            yield node.lineno, said


@pytest.mark.parametrize("path", MADE_IN)
def test_every_sentence_that_is_a_warning_has_a_name(path):
    tree = ast.parse((ROOT / "ropext" / path).read_text("utf-8"))
    functions = {n.name: n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
    for name in MADE_IN[path]:
        found = [*sentences(functions[name])]
        assert found, name
        assert [place for place in found if not NAMED.match(place[1])] == []


def test_a_message_with_warning_names_a_known_warning():
    for path in (ROOT / "ropext").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                said = node.value.partition("warning: ")
                assert not said[2] or NAMED.match(said[2]), (path, node.lineno)


def test_the_page_has_a_paragraph_for_each_name_and_for_no_other():
    constants = (
        node.value
        for path in (ROOT / "ropext").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    named = {found[1] for text in constants if (found := NAMED.match(text))}
    page = (ROOT / "docs/warnings.md").read_text("utf-8")
    assert re.findall(r"^- `\[([\w-]+)\]`", page, re.M) == sorted(
        re.findall(r"^- `\[([\w-]+)\]`", page.partition("## Measurements")[0], re.M)
    ) + sorted(re.findall(r"^- `\[([\w-]+)\]`", page.partition("## Measurements")[2], re.M))
    assert {*re.findall(r"^- `\[([\w-]+)\]`", page, re.M)} == named


@pytest.mark.parametrize("name", test_widths.MODELS)
def test_the_warnings_of_a_plan_have_names(name):
    for method in (None, "pi", "yarn", "llama3"):
        for far in ({"factor": 4.0}, {"factor": 9.0, "from_original": True}):
            try:
                made = plan_config(
                    test_widths.MODELS[name], Extend(method=method, even_so=True, **far)
                )
            except RopextError:
                continue
            assert [own for own in made.warnings if not NAMED.match(own)] == []


def test_the_recorded_warnings_have_names():
    """On stderr, and in the JSON of recorded runs."""
    seen = 0
    for path in test_widths.TRANSCRIPTS.glob("*.txt"):
        text = path.read_text("utf-8")
        lines = re.findall(r"^warning: (.*)", text, re.M)
        for block in re.findall(
            r'^ *"warnings": (\[[^\[\]]*(?:\[[\w-]+\][^\[\]]*)*\])', text, re.M
        ):
            lines += json.loads(block)
        assert [line for line in lines if not NAMED.match(line)] == [], path.name
        seen += len(lines)
    assert seen > 3


def test_each_key_that_transformers_does_not_know_is_named():
    """A yarn can hold the keys of a longrope, too: Phi-3.5-MoE's class asks for them."""
    config = tiny.modern("phimoe")
    asked = Extend(factor=3.0, method="yarn", attention_factor=1.2)
    made = plan_config(config, asked)
    held = made.config["rope_parameters"]
    assert {"attn_factor", "short_mscale", "long_mscale"} <= held.keys()
    named = [warning for warning in made.warnings if warning.startswith("[unknown-keys]")]
    keys = [re.search(r"\((.*?)\)", warning)[1] for warning in named]
    assert keys == ["attn_factor", "short_mscale, long_mscale"]
