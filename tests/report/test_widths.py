"""No line of a plan or of a recorded answer is longer than 120 characters.

A folded command is still the same command.
"""

import ast
import json
import os
import re
import subprocess
from pathlib import Path

import configs
import published
import pytest
from gguf_files import making

from ropext.base.errors import RopextError
from ropext.files import inspecting
from ropext.files.inspecting import plan_config
from ropext.files.inspecting.serving import read_unchanged
from ropext.options.extend import Extend
from ropext.planning import make_plan
from ropext.results.report import text

TRANSCRIPTS = Path(__file__).parents[1] / "golden/transcripts"
MODELS = published.CONFIGS | {
    name: config for name, config in vars(configs).items() if isinstance(config, dict)
}
del MODELS["__builtins__"]
LONGEST = 120


def too_long(shown):
    """Return the lines that are too long, except for a word that a shell must take whole."""
    lines = [line for line in shown.splitlines() if len(line) > LONGEST]
    return [line for line in lines if len(line.removesuffix(" \\").split()) > 1]


@pytest.mark.parametrize("path", sorted(TRANSCRIPTS.glob("*.txt")), ids=lambda path: path.stem)
def test_no_line_of_a_transcript_is_too_long(path):
    answer = path.read_text("utf-8").partition("--- stdout\n")[2].partition("\n--- stderr")[0]
    if not answer.startswith(("{", "[")):
        assert too_long(answer) == []


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("method", [None, "pi", "ntk", "by-parts", "yarn", "llama3"])
def test_no_line_of_a_plan_is_too_long(name, method):
    for more in ({"factor": 4.0}, {"target": 300_000, "from_original": True}):
        try:
            made = plan_config(MODELS[name], Extend(method=method, even_so=True, **more))
        except RopextError:
            continue
        assert too_long(text.plan_details(made)) == []


@pytest.mark.parametrize("arch", ["llama", "gemma2", "mistral3", "qwen3"])
def test_no_line_of_the_plan_of_a_gguf_is_too_long(tmp_path, monkeypatch, arch):
    monkeypatch.chdir(tmp_path)
    making.write(Path("model.gguf"), arch)
    for method in ("pi", "ntk", "yarn"):
        made = inspecting.plan("model.gguf", target=1024, method=method)
        assert too_long(text.plan_details(made)) == []
    served = read_unchanged(inspecting.open_model("model.gguf"))
    assert too_long(text.served_details(served)) == []


def words_of(command):
    """Return a command's words, as a shell has them."""
    line = f"printf '%s\\0' {command}"
    return subprocess.run(
        ["sh", "-c", line], capture_output=True, check=True, text=True
    ).stdout.split("\0")


@pytest.mark.skipif(os.name == "nt", reason="no line is folded for cmd and PowerShell")
def test_a_folded_command_is_the_same_command():
    factors = tuple(1.0 + 0.123456 * pair for pair in range(64))
    wish = Extend(method="longrope", factor=4.0, pair_factors=factors)
    made = make_plan(configs.LLAMA, wish, "some models/base, the first")
    lines = {line.loader: line.command for line in made.overrides()}
    assert {*lines} >= {"transformers", "vllm", "sglang"}
    for loader, command in lines.items():
        shown = text.serving_text([line for line in made.overrides() if line.loader == loader])
        body = re.sub(rf"^  {re.escape(loader)} *", "", shown)
        assert too_long(body) == []
        folds = {"transformers": 5, "vllm": 1, "sglang": 2}.get(loader, 0)
        assert body.count("\n") >= folds
        wholes = [line for line in map(str.strip, body.splitlines()) if "{" in line]
        if loader in ("vllm", "sglang"):  # of JSON nothing is broken
            json.loads(wholes[0].removesuffix(" \\").strip("'"))
        if loader == "transformers":
            assert ast.dump(ast.parse(body)) == ast.dump(ast.parse(command))
        elif command:
            one, other = (words_of(line) for line in (command, body))
            assert len(one) == len(other)
            for a, b in zip(one, other, strict=True):
                assert a == b or (a[0] == "{" and json.loads(a) == json.loads(b))
