"""The header reader against gguf's own, and on files that are wrong."""

import re
import struct
import time

import command_line
import numpy as np
import pytest
from gguf_files import making

from ropext.base.errors import InputError, RopextError, UnsupportedModel, UsageError
from ropext.files import inspecting
from ropext.files.gguf import open_gguf
from ropext.files.gguf.header import STRING, TYPES, read_gguf

gguf = making.gguf
KINDS = {
    "x.bool": True,
    "x.text": "grüße\nzwei",
    "x.list": [1, 2, 3],
    "x.texts": ["a", "", "é"],
    **{f"x.{t.__name__}": t(7) for t in (np.uint8, np.int8, np.uint16, np.int16, np.uint32)},
    **{f"x.{t.__name__}": t(7) for t in (np.int32, np.uint64, np.int64, np.float32, np.float64)},
}


@pytest.fixture
def path(tmp_path):
    return making.write(tmp_path / "model.gguf", general=KINDS, q8=["blk.0.attn_q.weight"])


def test_equals_the_gguf_packages_reading(path):
    own, oracle = read_gguf(path), gguf.GGUFReader(path)
    fields = {key: f for key, f in oracle.fields.items() if not key.startswith("GGUF.")}
    assert list(own.entries) == list(fields)
    for key, field in fields.items():
        entry = own.entries[key]
        assert entry.kind == field.types[0]
        if entry.value is not None:
            assert entry.value == field.contents()
        else:
            assert entry.items == len(field.data)
    assert own.alignment == oracle.alignment
    assert own.data == oracle.data_offset
    for mine, other in zip(own.tensors, oracle.tensors, strict=True):
        assert mine.name == other.name
        assert mine.shape == tuple(other.shape)
        assert mine.kind == other.tensor_type
        assert (own.data + mine.offset, mine.size) == (other.data_offset, other.n_bytes)


def test_types_are_those_of_the_gguf_package():
    known = gguf.constants.GGML_QUANT_SIZES
    assert {int(kind): (kind.name, *sizes) for kind, sizes in known.items()} == TYPES


def test_a_vocabulary_of_262_thousand_is_skipped_at_once(tmp_path):
    path = making.write(tmp_path / "large.gguf", tokens=262_144)
    start = time.perf_counter()
    own = read_gguf(path)
    assert own.entries["tokenizer.ggml.tokens"].items == 262_144
    assert time.perf_counter() - start < 2  # a guard: the gguf package took ten


def at(path, key):
    """Return the place at which a key's value begins."""
    entry = read_gguf(path).entries[key]
    return entry.start + 8 + len(key) + 4


def patched(path, place, data):
    content = bytearray(path.read_bytes())
    content[place : place + len(data)] = data
    path.write_bytes(content)


def number(form, value):
    return struct.pack(f"<{form}", value)


def test_read_gguf_refuses_other_kinds_and_versions(path):
    whole = path.read_bytes()
    for data, said in [
        (b"PK\3\4" + whole[4:], "does not begin with GGUF"),
        (b"", "it has 0 bytes"),
        (whole[:4] + number("I", 1) + whole[8:], "version 1"),
        (whole[:4] + struct.pack(">I", 3) + whole[8:], "big-endian"),
        (whole[:4] + number("I", 4) + whole[8:], "version 4"),
        (whole[:8] + number("Q", 1 << 40) + whole[16:], "tensors do not fit"),
        (whole[:16] + number("Q", 1 << 62) + whole[24:], "keys do not fit"),
    ]:
        path.write_bytes(data)
        with pytest.raises(InputError, match=said):
            read_gguf(path)


def test_every_truncation_is_refused(path):
    whole = path.read_bytes()
    own = read_gguf(path)
    for length in [*range(0, own.data, 7), own.data, own.end - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(InputError, match=r"ends inside|has .* bytes|do not fit"):
            read_gguf(path)
    path.write_bytes(whole[: own.end])  # without the padding behind the last tensor
    assert read_gguf(path).end == own.end


def test_read_gguf_refuses_lengths_beyond_the_file(path):
    keys = {"x.list": 4, "x.texts": 4, "tokenizer.ggml.tokens": 4, "x.text": 0}
    whole = path.read_bytes()
    for key, shift in keys.items():
        for count in (10**9, 1 << 62, (1 << 64) - 1):
            path.write_bytes(whole)
            patched(path, at(path, key) + shift, number("Q", count))
            with pytest.raises(InputError, match=r"ends inside|does not exist|none of"):
                read_gguf(path)


def test_a_list_of_a_thousand_million_texts_is_refused_without_reading_them(tmp_path):
    """The file is large enough for them: 8 GB of empty texts, sparse."""
    path = making.write(tmp_path / "model.gguf")
    place = at(path, "tokenizer.ggml.merges") + 4
    with path.open("r+b") as file:
        file.seek(place)
        file.write(number("Q", 10**9))
        file.truncate(9 * 10**9)
    with pytest.raises(InputError, match=r"1,000,000,000 texts"):
        read_gguf(path)


def test_read_gguf_refuses_a_key_or_tensor_that_occurs_twice(path):
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b"x.uint32", b"x.uint16"))
    with pytest.raises(InputError, match=r"x\.uint16 occurs twice"):
        read_gguf(path)
    path.write_bytes(whole.replace(b"blk.1.attn_q.weight", b"blk.0.attn_q.weight"))
    with pytest.raises(InputError, match="twice"):
        read_gguf(path)


@pytest.mark.parametrize("offset", [1, 16, 32, 1 << 40])
def test_read_gguf_refuses_tensors_that_overlap_or_are_not_aligned(path, offset):
    own = read_gguf(path)
    name = b"blk.0.attn_norm.weight"
    place = path.read_bytes().index(name) + len(name) + 4 + 8 + 4
    (was,) = struct.unpack("<Q", path.read_bytes()[place : place + 8])
    assert was == own.tensor(name.decode()).offset
    for new in (was + offset, was - min(offset, was)):
        patched(path, place, number("Q", new))
        with pytest.raises(InputError, match="begins at byte"):
            read_gguf(path)


def test_read_gguf_refuses_dimensions_and_types_out_of_range(path):
    name = b"blk.0.attn_norm.weight"
    place = path.read_bytes().index(name) + len(name)
    for shift, form, wrong in ((0, "I", 5), (4, "Q", 1 << 63), (12, "I", 300)):
        whole = path.read_bytes()
        patched(path, place + shift, number(form, wrong))
        with pytest.raises(InputError, match=r"dimensions|out of range|ends inside"):
            read_gguf(path)
        path.write_bytes(whole)


def test_a_type_that_is_newer_than_the_table_is_carried(tmp_path):
    path = making.write(tmp_path / "model.gguf", data={"a": np.zeros(64, np.float32)})
    place = path.read_bytes().index(b"\1\0\0\0\0\0\0\0a", 24) + 9 + 4 + 8
    patched(path, place, number("I", 77))
    assert read_gguf(path).tensors[0].size == 256


@pytest.mark.parametrize(
    ("key", "item", "said"),
    [
        ("context_length", 4096.0, "context_length is not a whole number"),
        ("context_length", "long", "context_length is not a whole number"),
        ("context_length", 0, "context_length is 0"),
        ("rope.freq_base", 10000, "freq_base is not a number with a fraction"),
        ("rope.freq_base", float("nan"), "not a finite number"),
        ("rope.freq_base", 0.5, "llama.rope.freq_base is 0.5, which is out of range"),
        ("rope.scaling.attn_factor", -1.0, r"llama.rope.scaling.attn_factor is -1, which is out"),
        ("rope.scale_linear", -1.0, r"llama.rope.scale_linear is -1, which is out of range"),
        ("rope.scaling.type", 3, "scaling.type is not a text"),
        ("rope.scaling.type", "su", "su, which llama.cpp does not know"),
        ("rope.scaling.factor", -2.0, "llama.rope.scaling.factor is -2, which is out of range"),
        ("rope.dimension_count", 7, "rotates 7 of 16"),
        ("rope.dimension_count", 8, "llama turns all"),
        ("attention.head_count", [2.5, 1.0], "not a list of whole numbers"),
        ("attention.key_length", 1 << 30, "key_length is"),
        ("attention.kv_lora_rank", 0, "kv_lora_rank is"),
    ],
)
def test_inspect_refuses_impossible_values_of_a_gguf(tmp_path, key, item, said):
    path = making.write(tmp_path / "model.gguf", metadata=making.LLAMA | {key: item})
    with pytest.raises(InputError, match=said) as caught:
        inspecting.inspect(str(path))
    assert str(caught.value).startswith(str(path))


def test_inspect_refuses_unknown_architectures_and_adapters(tmp_path):
    path = making.write(tmp_path / "a.gguf", "frobnicate")
    with pytest.raises(UnsupportedModel, match="'frobnicate' is not in ropext's table"):
        inspecting.inspect(str(path))
    path = making.write(tmp_path / "b.gguf", "gpt2")
    with pytest.raises(UnsupportedModel, match="gpt2 has no rotary embedding"):
        inspecting.inspect(str(path))
    path = making.write(tmp_path / "c.gguf", general={"general.type": "adapter"})
    with pytest.raises(UnsupportedModel, match="of the type adapter"):
        inspecting.inspect(str(path))
    with pytest.raises(UsageError, match="--revision"):
        inspecting.inspect(str(path), revision="main")


def test_a_missing_file_is_not_sought_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("gone.gguf", "sub/gone.GGUF", str(tmp_path / "gone.gguf"), "../gone.gguf"):
        with pytest.raises(InputError, match=f"^there is no file {re.escape(name)}"):
            inspecting.inspect(name)


def test_a_refused_plan_of_a_gguf_names_the_file(tmp_path):
    linear = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    path = making.write(tmp_path / "a.gguf", metadata=making.LLAMA | linear)
    with pytest.raises(UsageError, match="--original-context 64") as caught:
        inspecting.plan(str(path), factor=2.0)
    assert str(caught.value).startswith(f"{path}, its metadata as a config: ")


def test_inspect_refuses_rope_factors_of_a_wrong_shape_or_type(tmp_path):
    for row, said in [
        (np.ones(5, np.float32), "one number for each of 8 pairs"),
        (np.zeros(8, np.float32), "numbers above 0"),
        (np.ones((2, 4), np.float32), "row of float32"),
        (np.ones(8, np.float16), "row of float32"),
    ]:
        data = making.tensors() | {"rope_freqs.weight": row}
        with pytest.raises(InputError, match=said):
            open_gguf(str(making.write(tmp_path / "m.gguf", data=data)))


def test_split_files_are_read_by_their_first_part(tmp_path):
    halves = [dict(list(making.tensors().items())[:3]), dict(list(making.tensors().items())[3:])]
    paths = []
    for number_of, data in enumerate(halves):
        split = {"split.no": np.uint16(number_of), "split.count": np.uint16(2)}
        split |= {"split.tensors.count": np.int32(6)}
        path = tmp_path / f"m-0000{number_of + 1}-of-00002.gguf"
        meta = making.LLAMA if not number_of else {}
        paths.append(making.write(path, metadata=meta, general=split, data=data, tokens=0))
    found = open_gguf(str(paths[0]))
    assert [part.path for part in found.parts] == paths
    with pytest.raises(UsageError, match="name the first one"):
        open_gguf(str(paths[1]))
    paths[1].rename(tmp_path / "away.gguf")
    with pytest.raises(InputError, match="00002-of-00002"):
        open_gguf(str(paths[0]))


def test_text_that_is_not_utf_8_does_not_break_the_terminal(path):
    patched(path, at(path, "x.text") + 8, b"\xff\x1b")
    assert read_gguf(path).entries["x.text"].kind == STRING
    patched(path, path.read_bytes().index(b"x.text"), b"\x1b\xff")
    with pytest.raises(RopextError, match="not UTF-8") as caught:
        read_gguf(path)
    assert str(caught.value).isprintable()


def in_place_of(old, new):
    return lambda whole: whole.replace(old, new, 1)


NAME = b"blk.0.attn_norm.weight"
BAD = {
    "not a GGUF": lambda whole: b"PK\3\4" + whole[4:],
    "version 1": lambda whole: whole[:4] + number("I", 1) + whole[8:],
    "big-endian": lambda whole: whole[:4] + struct.pack(">I", 3) + whole[8:],
    "cut in the header": lambda whole: whole[:300],
    "cut in a tensor": lambda whole: whole[:-64],
    "more tensors than fit": lambda whole: whole[:8] + number("Q", 1 << 40) + whole[16:],
    "more keys than fit": lambda whole: whole[:16] + number("Q", 1 << 62) + whole[24:],
    "a text beyond the file": in_place_of(number("Q", 6) + b"x.text", number("Q", 1 << 60)),
    "a list of 10^9 numbers": in_place_of(
        b"x.list" + number("I", 9) + number("I", 5) + number("Q", 3),
        b"x.list" + number("I", 9) + number("I", 5) + number("Q", 10**9),
    ),
    "not aligned": lambda whole: moved(whole, 4),
    "over another": lambda whole: moved(whole, -32),
    "a key twice": in_place_of(b"x.uint32", b"x.uint16"),
    "a kind of value": in_place_of(
        b"llama.context_length" + number("I", 4), b"llama.context_length" + number("I", 6)
    ),
    "an architecture": in_place_of(number("Q", 5) + b"llama", number("Q", 5) + b"panda"),
}


def moved(whole, shift):
    """Return the file with a tensor that begins elsewhere."""
    place = whole.index(NAME) + len(NAME) + 4 + 8 + 4
    (was,) = struct.unpack("<Q", whole[place : place + 8])
    return whole[:place] + number("Q", was + shift) + whole[place + 8 :]


@pytest.mark.parametrize("spoil", BAD.values(), ids=BAD)
def test_a_bad_file_is_one_sentence_and_nothing_is_written(capsys, path, tmp_path, spoil):
    whole = path.read_bytes()
    path.write_bytes(spoil(whole))
    assert path.read_bytes() != whole
    words = ("extend", path, "--factor", "4", "-o", tmp_path / "long.gguf")
    code, said = command_line.run(*words, capsys=capsys)
    assert (code, said.out, len(said.err.strip().splitlines())) == (2, "", 1)
    assert [own.name for own in tmp_path.iterdir()] == ["model.gguf"]


def raw(path, keys, pieces, size=0):
    """Write a file of so many keys: each a piece of bytes, or a hole by its length."""
    with path.open("wb") as file:
        file.write(b"GGUF" + number("I", 3) + number("Q", 0) + number("Q", keys))
        for piece in pieces:
            file.seek(piece, 1) if isinstance(piece, int) else file.write(piece)
        file.truncate(file.tell() + size)
    return path


def key(name, kind):
    return number("Q", len(name)) + name.encode() + number("I", kind)


def test_texts_and_keys_of_a_sparse_file_are_bounded_together(tmp_path):
    """A few kilobytes in an archive: texts of 16 MB, lists of empty texts, keys without end."""
    text = [own for n in range(8) for own in (key(f"t{n}", 8) + number("Q", 1 << 22), 1 << 22)]
    half = (1 << 23) + 1
    listed = [(key(f"l{n}", 9) + number("I", 8) + number("Q", half), half * 8) for n in range(3)]
    cases = {
        "t4 has 4,194,304 bytes, more than": (8, text),
        "l1 is a list of 8,388,609 texts, more than": (3, [own for pair in listed for own in pair]),
        "70,000 keys do not fit": (70_000, [1 << 30]),
        "4,611,686,018,427,387,904 keys do not fit": (1 << 62, [1 << 30]),
    }
    for said, (keys, pieces) in cases.items():
        with pytest.raises(InputError, match=said):
            read_gguf(raw(tmp_path / "model.gguf", keys, pieces, 64))


@pytest.mark.parametrize("alignment", [0, 3, 1 << 31])
def test_an_alignment_that_cannot_be_is_one_sentence(path, tmp_path, capsys, alignment):
    """Of 2^31 a tensor begins two gigabytes on, which the file does not have."""
    whole = path.read_bytes()
    (keys,) = struct.unpack("<Q", whole[16:24])
    own = key("general.alignment", 4) + number("I", alignment)
    path.write_bytes(whole[:16] + number("Q", keys + 1) + own + whole[24:])
    words = ("extend", path, "--factor", "4", "-o", tmp_path / "long.gguf")
    code, said = command_line.run(*words, capsys=capsys)
    assert (code, len(said.err.strip().splitlines())) == (2, 1)
    assert [own.name for own in tmp_path.iterdir()] == ["model.gguf"]


def test_names_draw_nothing_on_a_terminal_and_forge_no_line(path, tmp_path, capsys):
    hostile = "x\x1b[2J\nerror: \u202eno"  # clears, begins a line, turns the writing round
    whole = path.read_bytes()
    for old, kind in ((b"x.text", "Q"), (NAME, "Q"), (b"llama", "Q")):
        new = hostile.encode().ljust(len(old), b"\r")
        place = whole.index(number(kind, len(old)) + old)
        after = place + 8 + len(old)
        path.write_bytes(whole[:place] + number(kind, len(new)) + new + whole[after:])
        for words in (("inspect",), ("plan", "--factor", "4"), ("extend", "--factor", "4", "-o")):
            out = (tmp_path / "long.gguf",) if words[-1] == "-o" else ()
            _, said = command_line.run(words[0], path, *words[1:], *out, capsys=capsys)
            both = said.out + said.err
            assert not {"\x1b", "\r", "\u202e"} & set(both)
            assert "\nerror: \\u" not in both
            assert len(said.err.strip().splitlines()) <= 1
        (tmp_path / "long.gguf").unlink(missing_ok=True)
