"""Words that Windows' users type, and lines that their shells take; the same answers on Linux."""

import ast
import json
import os
import re
import sys
import time
from pathlib import Path

import pytest
from tiny_checkpoint import make_llama

import ropext
from ropext import extend, families, plan, verify
from ropext.base.errors import InputError
from ropext.base.inputs import is_path
from ropext.base.narration import join_for_shells
from ropext.base.systems import move
from ropext.evaluation.corpus.sources import Source, read_documents
from ropext.families import loaders
from ropext.pipeline.recipe import read_recipe
from ropext.results.gates import split_run_spec

WORDS = ["plain", "two words", r"C:\my models\out", r"C:\R&D", "a,b", "x;y|z", "模型"]
WORDS += ["C:\\my dir\\", 'a "b']


def arguments(line):
    """Split a command line by the rules of Microsoft's C runtime, transcribed from "Parsing C
    command-line arguments"."""
    words, word, quoted, at, begun = [], "", False, 0, False
    while at < len(line):
        slashes = len(line) - at - len(line[at:].lstrip("\\"))
        if slashes and line[at + slashes : at + slashes + 1] == '"':
            word, at, begun = word + "\\" * (slashes // 2), at + slashes, True
            if slashes % 2:
                word, at = word + '"', at + 1
            continue
        letter, at = line[at], at + 1
        if letter == '"':
            quoted, begun = not quoted, True
        elif letter == " " and not quoted:
            words, word, begun = words + [word] * begun, "", False
        else:
            word, begun = word + letter, True
    return words + [word] * begun


def test_cmd_and_powershell_read_the_quoted_words_back(monkeypatch):
    monkeypatch.setattr(sys, "platform", "win32")
    line = join_for_shells(*WORDS)
    assert arguments(line) == WORDS
    # Where cmd and PowerShell look for operators.
    outside = re.sub(r'"(?:\\\\|\\"|[^"])*"', "", line)
    assert not set(outside) & set("&|;,<>(){}'$`@%^!")


def powershell_word(text):
    """Read one word in quotes by PowerShell's about_Quoting_Rules, transcribed; four letters are
    quotes, and $ must not expand anything."""
    assert text[0] == '"'
    word = ""
    rest = iter(text[1:])
    for letter in rest:
        if letter == "`":
            word += next(rest)
        elif letter in '"“”„':
            break
        else:
            assert letter != "$", text
            word += letter
    assert list(rest) == [], text
    return word


@pytest.mark.parametrize("word", ["a$(calc)", "a`b", "x”; calc; “y", "„ $env:TOKEN", "two words"])
def test_powershell_runs_nothing_of_a_folders_name(monkeypatch, word):
    monkeypatch.setattr(sys, "platform", "win32")
    assert powershell_word(join_for_shells(word)) == word


def test_lines_for_windows_have_no_word_of_a_posix_shell(monkeypatch):
    monkeypatch.setattr(sys, "platform", "win32")
    params = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    place = r"C:\my models\out"
    known = loaders.readings("llama", params, length=16384, target=16384)
    directory = loaders.ServedDirectory(place, families.read({"model_type": "llama"}))
    lines = loaders.serving_lines(directory, known, params, context=4096, target=16384)
    for line in lines:
        if line.loader in ("vllm", "sglang"):
            continue  # they run in WSL, a POSIX shell
        assert "&&" not in line.command
        for one in line.command.splitlines():
            assert any(place in word.replace("\\\\", "\\") for word in arguments(one)) or (
                one.startswith("llama-server -m out.gguf")
            )
    code = arguments(lines[0].command)[-1]
    compile(code, "pasted", "exec")


@pytest.mark.parametrize("text", [r"C:\texts", "C:/texts", r"\\server\texts", "./x", "~/x", "/x"])
def test_a_drive_letter_begins_a_path(text):
    assert is_path(text)
    assert split_run_spec(text) == (Path(text), None)
    with pytest.raises(InputError, match="there is no such file or folder"):
        list(read_documents(Source(text)))


def test_a_variant_or_a_config_follows_a_colon():
    assert not any(map(is_path, ["wikitext:wikitext-2", "a:b", "org/name"]))
    assert split_run_spec(r"C:\runs\one:tuned") == (Path(r"C:\runs\one"), "tuned")
    assert split_run_spec("run:tuned") == (Path("run"), "tuned")


def texts(value):
    """Return every key and text of JSON."""
    if isinstance(value, dict):
        return [text for pair in value.items() for part in pair for text in texts(part)]
    if isinstance(value, list):
        return [text for part in value for text in texts(part)]
    return [value] if isinstance(value, str) else []


def test_the_record_names_files_in_folders_with_slashes(tmp_path):
    """On a real Windows this fails if a path becomes text by `str`."""
    base = make_llama(tmp_path / "base")
    (base / "more").mkdir()
    (base / "more" / "code.py").write_text("x = 1\n", encoding="utf-8")
    extend(base, tmp_path / "out", method="yarn", factor=2, no_verify=True)
    said = texts(json.loads((tmp_path / "out" / "ropext.json").read_text(encoding="utf-8")))
    assert "more/code.py" in said
    assert not any("more\\" in text for text in said)


def test_no_relative_path_becomes_text_but_with_slashes():
    """What Linux can hold of it: `relative_to` is followed by `as_posix`, or joined as a path."""
    joined = {"target / file.relative_to(source)"}  # pipeline/run_output.py
    later = {"[file.relative_to(folder) for file in files]"}  # sources
    package, found = Path(ropext.__file__).parent, 0
    for file in package.rglob("*.py"):
        parents, tree = {}, ast.parse(file.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            parents |= dict.fromkeys(ast.iter_child_nodes(node), node)
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr == "relative_to":
                around = parents[parents[node]]
                said = around.attr if isinstance(around, ast.Attribute) else ast.unparse(around)
                assert said == "as_posix" or said in joined | later, (file.name, said)
                found += 1
            if isinstance(node, ast.Attribute) and node.attr == "relpath":
                around = parents[parents[node]]
                assert ast.unparse(around).startswith("Path("), file.name
    assert found >= 8


def test_a_rename_waits_for_a_virus_scanner(tmp_path, monkeypatch):
    (tmp_path / "old").write_text("x", encoding="utf-8")
    tries, wait = [], []

    def rename(*names):
        tries.append(names)
        if len(tries) < 3:
            raise PermissionError(13, "[WinError 5] Access is denied")
        os.rename(*names)

    monkeypatch.setattr(time, "sleep", wait.append)
    with pytest.raises(PermissionError):  # elsewhere nothing is waited for
        move(rename, tmp_path / "old", tmp_path / "new")
    monkeypatch.setattr(sys, "platform", "win32")
    move(rename, tmp_path / "old", tmp_path / "new")
    assert (tmp_path / "new").exists()
    assert len(wait) == 1


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_output_redirected_by_powershell_is_read(tmp_path, encoding):
    file, pairs = tmp_path / "recipe.yaml", tmp_path / "pairs.txt"
    pairs.write_bytes("1.0\n2.0\n".encode(encoding))
    text = "model: 模型\nextend: {method: longrope, factor: 2, pair_factors: pairs.txt}\n"
    file.write_bytes(text.replace("\n", "\r\n").encode(encoding))
    recipe = read_recipe(file)
    assert recipe.model == "模型"
    assert recipe.extend.pair_factors == (1.0, 2.0)
    assert recipe.source.text.startswith("model")


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_a_plan_that_powershell_redirected_is_read(tmp_path, encoding):
    extend("ropext://demo", tmp_path / "out", method="yarn", factor=4)
    wanted, file = plan("ropext://demo", method="yarn", factor=4), tmp_path / "plan.json"
    file.write_bytes(json.dumps(wanted.to_json()).replace("\n", "\r\n").encode(encoding))
    assert verify(tmp_path / "out", against=str(file)).passed
    file.write_bytes(b'{"a\xff": 1}')
    with pytest.raises(InputError, match="is not UTF-8 text"):
        verify(tmp_path / "out", against=str(file))
