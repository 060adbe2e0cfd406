"""Hostile JSON is refused in one sentence, which names the file."""

import os
from pathlib import Path

import pytest

from ropext.base.errors import InputError
from ropext.base.jsontext import CONFIG_DEPTH_LIMIT, dump, parse_object, read_object

BAD = {
    "empty": (b"", "empty"),
    "cut in an object": (b'{"a": 1, ', "cut short"),
    "cut in a string": (b'{"a": "xyz', "cut short"),
    "cut after a key": (b'{"a"', "cut short"),
    "no comma": (b'{"a": 1 "b": 2}', "column 9"),
    "trailing text": (b'{"a": 1} {}', "not valid JSON"),
    "an array": (b"[1, 2]", "array"),
    "null": (b"null", "null"),
    "duplicate": (b'{"x": {"rope_theta": 1, "rope_theta": 2}}', "'rope_theta' occurs twice"),
    "NaN": (b'{"a": NaN}', "NaN"),
    "Infinity": (b'{"a": -Infinity}', "-Infinity"),
    "float overflow": (b'{"a": 1e999}', "1e999"),
    "digits": (b'{"a": ' + b"9" * 5000 + b"}", "not valid"),
    "not UTF-8": (b'{"a": "\xff"}', "UTF-8 text (byte 8)"),
    "UTF-16": ('{"a": 1}'.encode("utf-16"), "UTF-8"),
    "deep arrays": (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "deep"),
    "deep objects": (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "deep"),
    "81 levels": (b'{"a": ' + b"[" * 80 + b"]" * 80 + b"}", "80 levels"),
    "containers": (b'{"a": [' + b"{}," * 500_000 + b"{}]}", "500,000"),
}


@pytest.mark.parametrize(("data", "words"), BAD.values(), ids=BAD)
def test_bad_json_is_refused_in_one_sentence(tmp_path: Path, data: bytes, words: str):
    path = tmp_path / "config.json"
    path.write_bytes(data)
    with pytest.raises(InputError) as error:
        read_object(path)
    assert str(path) in str(error.value)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_json_of_80_levels_is_read():
    assert parse_object(b'{"a": ' + b"[" * 79 + b"]" * 79 + b"}", "x")["a"]


def test_a_config_of_more_than_64_levels_is_refused(tmp_path: Path):
    path = tmp_path / "config.json"
    path.write_bytes(b'{"a": ' + b"[" * 63 + b"]" * 63 + b"}")
    assert read_object(path, CONFIG_DEPTH_LIMIT)["a"]
    path.write_bytes(b'{"a": ' + b"[" * 64 + b"]" * 64 + b"}")
    with pytest.raises(InputError, match="more than 64 levels"):
        read_object(path, CONFIG_DEPTH_LIMIT)


def test_transformers_spelling_of_infinity_is_kept():
    data = b'{"a": {"__float__": "Infinity"}}'
    assert parse_object(data, "x") == {"a": {"__float__": "Infinity"}}


def test_json_above_16_mb_is_refused_before_parsing(tmp_path: Path):
    path = tmp_path / "config.json"
    with open(path, "wb") as file:
        file.write(b"{")
        file.truncate(16 * 10**6 + 1)  # sparse: the refusal may not depend on the content
    with pytest.raises(InputError, match="16,000,001 bytes, more than the 16 MB"):
        read_object(path)
    with open(path, "wb") as file:
        file.write(b'{"a": 1}' + b" " * (16 * 10**6 - 8))
    assert read_object(path) == {"a": 1}


@pytest.mark.needs("mkfifo")
def test_only_regular_files_are_opened(tmp_path: Path):
    fifo, loop, device, gone = (tmp_path / name for name in ("fifo", "loop", "device", "gone"))
    os.mkfifo(fifo)
    loop.symlink_to(loop)
    device.symlink_to("/dev/zero")
    gone.symlink_to(tmp_path / "nowhere")
    for path, words in ((fifo, "regular"), (device, "regular"), (tmp_path, "regular")):
        with pytest.raises(InputError, match=words):
            read_object(path)
    for path in (loop, gone):
        with pytest.raises(InputError, match="cannot be read"):
            read_object(path)


def test_a_link_to_a_regular_file_is_read(tmp_path: Path):
    (tmp_path / "blob").write_text('{"a": 1}')
    (tmp_path / "config.json").symlink_to("blob")
    assert read_object(tmp_path / "config.json") == {"a": 1}


def test_dump_is_transformers_layout_in_the_order_of_the_keys():
    value = {"z": 1e-05, "a": [1, 2], "ü": "é", "b": {}, "t": 10000.0}
    text = '{\n  "z": 1e-05,\n  "a": [\n    1,\n    2\n  ],\n  "ü": "é",\n  "b": {},\n'
    assert dump(value).decode() == text + '  "t": 10000.0\n}\n'


def test_a_lone_surrogate_survives():
    value = parse_object(rb'{"a": "\ud800"}', "x")
    assert parse_object(dump(value), "x") == value
