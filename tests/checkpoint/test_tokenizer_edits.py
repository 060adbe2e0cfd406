"""Lengths in other files than config.json, and tokenizer.json's truncation, are cleared without
parsing the file."""

import json
import os
import re
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ropext.base.errors import InputError
from ropext.files.checkpoint import open_snapshot, tokenizer
from ropext.files.checkpoint.tokenizer import clear_truncation, find_truncation, length_edits
from ropext.scaling.rope import Edit


@pytest.fixture
def snapshot(model: Path):
    (model / "tokenizer.json").write_text("{}")
    return open_snapshot(str(model))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (2048, 8192),
        (512, 8192),
        (8191, 8192),
        (2048.0, 8192),
        (8192, None),
        (10**6, None),
        (int(1e30), None),
        (1e30, None),
        (None, None),
    ],
)
def test_model_max_length_is_raised_to_the_target(snapshot, before, after):
    changed = replace(
        snapshot, length_files={"tokenizer_config.json": {"model_max_length": before}}
    )
    edits, notes = length_edits(changed, 2048, 8192)
    key = "model_max_length"
    wanted = () if after is None else (key, before, after, "tokenizer_config.json")
    assert edits == ((Edit(*wanted),) if wanted else ())
    assert notes == ()


@pytest.mark.parametrize(
    ("before", "after", "noted"), [(2048, 8192, 0), (4096, 8192, 0), (20, None, 1), (8192, None, 0)]
)
def test_limits_that_were_a_choice_stay(snapshot, before, after, noted):
    for file, key in (
        ("generation_config.json", "max_length"),
        ("sentence_bert_config.json", "max_seq_length"),
    ):
        changed = replace(snapshot, length_files={file: {key: before}})
        edits, notes = length_edits(changed, 2048, 8192)
        assert edits == (() if after is None else (Edit(key, before, after, file),))
        assert len(notes) == noted
        assert all(key in note and str(before) in note for note in notes)


@pytest.mark.parametrize("value", ["2048", True, [2048], {}, -(10**400)])
def test_a_model_max_length_that_is_no_number_is_refused(snapshot, value):
    changed = replace(snapshot, length_files={"tokenizer_config.json": {"model_max_length": value}})
    with pytest.raises(InputError, match=r"tokenizer_config\.json: model_max_length"):
        length_edits(changed, 2048, 8192)


def cleared(tmp_path: Path, text: bytes) -> bytes | None:
    source, target = tmp_path / "tokenizer.json", tmp_path / "out.json"
    source.write_bytes(text)
    target.unlink(missing_ok=True)
    span = find_truncation(source)
    if span is None:
        return None
    clear_truncation(source, target, span)
    return target.read_bytes()


TRUNCATION = b'{"direction": "Right", "max_length": 512, "strategy": "LongestFirst", "stride": 0}'


@pytest.mark.parametrize(
    "text",
    [
        b'{"version": "1.0", "truncation": %s, "padding": null}',
        b'{"truncation":%s}',
        b'{\n\t"trunc\\u0061tion"\r\n :\n %s\n}',
        b'{"model": {"truncation": {"a": [1, {"]": "\\"}"}]}}, "x": [[],{}], "truncation": %s}',
        b'{"a": "\\\\", "b": -1.5e3, "c": true, "d": "}{][", "truncation": %s} ',
        b'{"e\xc3\xa9": "\xf0\x9f\xa6\x99", "truncation": %s}',
    ],
)
def test_clearing_the_truncation_changes_no_other_byte_of_tokenizer_json(
    tmp_path: Path, text: bytes
):
    whole = text.replace(b"%s", TRUNCATION)
    assert cleared(tmp_path, whole) == text.replace(b"%s", b"null")
    assert find_truncation(tmp_path / "tokenizer.json").value["max_length"] == 512


@pytest.mark.parametrize(
    "text",
    [
        b"{}",
        b'{"truncation": null}',
        b'{"a": {"truncation": {}}}',
        b'{"a": "truncation"}',
        b" { } ",
    ],
)
def test_a_tokenizer_json_without_a_truncation_is_not_rewritten(tmp_path: Path, text: bytes):
    assert cleared(tmp_path, text) is None


@pytest.mark.parametrize(
    ("text", "words"),
    {
        b"": "cut short",
        b"[]": "not a JSON object",
        b"\xef\xbb\xbf{}": "not a JSON object",
        b'{"a": ': "cut short",
        b'{"a": [1, {': "cut short",
        b'{"a": "x': "cut short",
        b'{"a"': "cut short",
        b'{"a": }': "not valid JSON at byte 7",
        b"{a: 1}": "not valid JSON at byte 2",
        b'{"a": 1 "truncation": {}}': "cut short",
        b'{"a": 1,}': "not valid JSON at byte 9",
        b'{"a": 1]': "not valid JSON at byte 8",
        b'{"truncation": {}': "cut short",
        b'{"a": ' + b"[" * 66 + b"]" * 66 + b"}": "nested more than 64 levels deep",
        b'{"truncation": 5}': "expected an object",
        b'{"truncation": {"a": 1, "a": 2}}': "occurs twice",
        b'{"truncation": {"a": "' + b"x" * 70_000 + b'"}}': "bytes",
    }.items(),
)
def test_damaged_files_are_named(tmp_path: Path, text: bytes, words: str):
    with pytest.raises(InputError) as error:
        cleared(tmp_path, text)
    assert words in str(error.value)
    assert "tokenizer.json" in str(error.value)


def test_an_import_compiles_no_long_expression(monkeypatch):
    """The expression of nested values has thousands of bytes: it waits for a tokenizer."""
    lengths = []
    compiled = re.compile

    def heard(expression, flags=0):
        lengths.append(len(expression))
        return compiled(expression, flags)

    monkeypatch.setattr(re, "compile", heard)
    runpy.run_path(tokenizer.__file__)
    assert lengths
    assert max(lengths) < 100


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None)
@given(
    content=st.dictionaries(st.text(max_size=8), JSON, max_size=5),
    place=st.integers(0, 5),
    ascii_only=st.booleans(),
    indent=st.none() | st.integers(0, 2),
    escaped=st.sets(st.sampled_from("truncation")),
)
def test_clearing_the_truncation_of_a_random_object_equals_json(
    tmp_path_factory, content, place, ascii_only, indent, escaped
):
    """Against json: the same object but for that value, with letters of its key as escapes."""
    content.pop("truncation", None)
    items = list(content.items())
    items.insert(place, ("truncation", {"max_length": 7, "s": '"}'}))
    written = json.dumps(dict(items), ensure_ascii=ascii_only, indent=indent)
    key = "".join(f"\\u{ord(c):04x}" if c in escaped else c for c in "truncation")
    written = written.replace('"truncation"', f'"{key}"')
    text = written.encode(errors="surrogatepass")
    found = cleared(tmp_path_factory.mktemp("t"), text)
    after = json.loads(found.decode(errors="surrogatepass"))
    assert after == dict(items) | {"truncation": None}
    assert list(after) == [key for key, _ in items]


# VmHWM counts this program alone; ru_maxrss also counts the parent's memory at the fork.
MEASURE = """
import sys
from pathlib import Path
from ropext.files.checkpoint.tokenizer import clear_truncation, find_truncation
def peak():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) // 1024
source = Path(sys.argv[1])
imported = peak()
span = find_truncation(source)
clear_truncation(source, source.with_name("out.json"), span)
print(span.start, peak() - imported)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_a_file_of_35_megabytes_takes_little_memory(tmp_path: Path):
    """The truncation comes last, so that the whole file is scanned."""
    source = tmp_path / "tokenizer.json"
    vocab = {f'token number {n} \\u00e9"': n for n in range(500_000)}
    merges = [[f"left{n}", f"right{n}"] for n in range(500_000)]
    content = {"model": {"vocab": vocab, "merges": merges}, "truncation": {"max_length": 512}}
    source.write_text(json.dumps(content), encoding="utf-8")
    assert os.path.getsize(source) > 35e6
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(source)], capture_output=True, text=True, check=True
    )
    start, megabytes = map(int, done.stdout.split())
    before = source.read_bytes()
    end = len(before) - 1
    assert (tmp_path / "out.json").read_bytes() == before[:start] + b"null" + before[end:]
    print(f"{megabytes} MB")
    assert megabytes < 80  # without the imports; the file is read whole, once


@pytest.mark.parametrize(("longest", "cleared"), [(8191, True), (8192, False), (2000000, False)])
def test_a_truncation_that_cuts_nothing_stays(tmp_path, snapshot, longest, cleared):
    stored = {"truncation": {"max_length": longest, "strategy": "LongestFirst"}, "model": {}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(stored))
    here = replace(snapshot, directory=tmp_path, files={"tokenizer.json": 1})
    edits, _ = length_edits(here, 2048, 8192)
    assert any(edit.key == "truncation" for edit in edits) is cleared
