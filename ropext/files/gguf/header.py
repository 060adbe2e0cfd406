"""Read the header of a GGUF file: the places of its keys and tensors, but no array's content.

A file is "GGUF", its version, two counts, the keys, the tensors' descriptions, padding, and the
tensors' bytes (llama.cpp, ggml/include/gguf.h), all little endian. A file that llama.cpp refuses
raises InputError here.
"""

import json
import math
import mmap
import os
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ropext.base.errors import InputError
from ropext.base.inputs import open_regular
from ropext.families.config import named

MAGIC = b"GGUF"
START = 24  # bytes before the first key
LONGEST_KEY = 0xFFFF  # bytes
LONGEST_NAME = 63  # bytes
LONGEST_TEXT = 1 << 24  # bytes of all texts together
MOST_STRINGS = 1 << 24  # in all arrays; the largest vocabularies have some 260,000
MOST_KEYS = 1 << 16
MOST_TENSORS = 500_000  # each needs hundreds of bytes in memory, and few in the file
ALIGNMENT = "general.alignment"

# Formats of the kinds of values with a fixed size, by the kind's number.
FORMATS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
UINT32 = 4
FLOAT32 = 6
BOOL = 7
STRING = 8
ARRAY = 9
WHOLE = frozenset((0, 1, 2, 3, 4, 5, 10, 11))
DECIMAL = frozenset((FLOAT32, 12))

# Types of tensors: name, numbers in a block, bytes of a block. A type that is missing here is newer
# than this table, and its tensor is taken to end at the next tensor.
_TYPES = json.loads(Path(__file__).with_name("types.json").read_text("utf-8"))
TYPES = {int(kind): tuple(row) for kind, row in _TYPES["tensor"].items()}
FILE_TYPES = {int(kind): name for kind, name in _TYPES["file"].items()}  # llama.cpp's llama.h
F32 = 0
NEWEST_TYPE = 255


class KeyValue(NamedTuple):
    """One key's value; `start` to `end` are the bytes of the whole entry in the file."""

    kind: int
    value: Any  # None for an array
    start: int
    end: int
    item: int = -1  # for an array: the kind of its items, their number, and the first byte
    items: int = 0
    at: int = 0


class Description(NamedTuple):
    """One tensor; its offset counts from the beginning of the tensors' bytes."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int
    size: int


@dataclass(frozen=True)
class GgufHeader:
    """The keys and tensors of one file."""

    path: Path
    size: int  # bytes of the whole file
    version: int
    entries: Mapping[str, KeyValue]
    tensors: tuple[Description, ...]
    alignment: int
    described: tuple[int, int]  # the tensors' descriptions in the file
    data: int  # the first byte of the tensors

    def wrong(self, what: str) -> InputError:
        """Return the error about a GGUF's header, with the path of the file."""
        return InputError(f"{self.path}: {what}")

    def _typed(self, key: str, kinds: frozenset[int], wanted: str) -> Any:
        """Return the value of a GGUF key, or None if the key is missing. Raise InputError if its
        type is not one of `kinds`."""
        entry = self.entries.get(key)
        if entry is None:
            return None
        if entry.kind not in kinds or entry.value is None:
            raise self.wrong(f"the value of {named(key)} is not {wanted}")
        return entry.value

    def whole(self, key: str, low: int = 1, high: int = 1 << 40) -> int | None:
        """Return a GGUF key that holds a whole number. Return None if the key is absent."""
        value = self._typed(key, WHOLE, "a whole number")
        if value is not None and not low <= value <= high:
            raise self.wrong(f"{named(key)} is {value}, not a whole number of {low} to {high}")
        if value is None:
            return None
        return int(value)

    def decimal(self, key: str) -> float | None:
        """Return a GGUF key that holds a finite float. Return None if the key is missing."""
        value = self._typed(key, DECIMAL, "a number with a fraction (float32)")
        if value is not None and not math.isfinite(value):
            raise self.wrong(f"{named(key)} is not a finite number")
        if value is None:
            return None
        return float(value)

    def text(self, key: str) -> str | None:
        """Return a GGUF key that holds a text. Return None if the key is missing."""
        value = self._typed(key, frozenset((STRING,)), "a text")
        if value is None:
            return None
        return str(value)

    def numbers(self, key: str, most: int = 1 << 14) -> tuple[int, ...] | None:
        """Return a GGUF's short array of whole numbers or truth values. Return None if the key is
        absent."""
        entry = self.entries.get(key)
        if entry is None:
            return None
        if entry.kind != ARRAY or entry.item not in WHOLE | {BOOL} or entry.items > most:
            raise self.wrong(f"the value of {named(key)} is not a list of whole numbers")
        form = f"<{entry.items}{FORMATS[entry.item]}"
        return tuple(map(int, struct.unpack(form, self.read(entry.at, struct.calcsize(form)))))

    def texts(self, key: str) -> tuple[str, ...] | None:
        """Return a GGUF's list of texts, such as a vocabulary. Return None if the key is absent."""
        entry = self.entries.get(key)
        if entry is None:
            return None
        if entry.kind != ARRAY or entry.item != STRING:
            raise self.wrong(f"the value of {named(key)} is not a list of texts")
        data = self.read(entry.at, entry.end - entry.at)
        texts = list[str]()
        at = 0
        for _ in range(entry.items):
            (length,) = struct.unpack_from("<Q", data, at)
            texts.append(data[at + 8 : at + 8 + length].decode(errors="replace"))
            at += 8 + length
        return tuple(texts)

    def read(self, at: int, length: int) -> bytes:
        """Return bytes of the GGUF file. Raise InputError if it ends before."""
        with open(open_regular(self.path), "rb") as file:
            file.seek(at)
            data = file.read(length)
        if len(data) != length:
            raise self.wrong(
                "it shrank while it was read: let whoever writes it finish, then try again"
            )
        return data

    def tensor(self, name: str) -> Description | None:
        """Return the description of a tensor in the GGUF's header, or None."""
        for tensor in self.tensors:
            if tensor.name == name:
                return tensor
        return None

    def floats(self, name: str, signed: bool = False) -> tuple[float, ...]:
        """Return the numbers of a GGUF's small float32 tensor, or none if it is absent. They must
        be above 0 unless `signed`."""
        tensor = self.tensor(name)
        if tensor is None:
            return ()
        if tensor.kind != F32 or len(tensor.shape) != 1 or tensor.size > 1 << 20:
            raise self.wrong(f"the tensor {named(name)} is not a row of float32 numbers")
        data = self.read(self.data + tensor.offset, tensor.size)
        values = struct.unpack(f"<{tensor.shape[0]}f", data)
        if not signed and not all(0 < value < math.inf for value in values):
            raise self.wrong(f"the tensor {named(name)} does not hold numbers above 0")
        return values

    @property
    def end(self) -> int:
        """The end of the tensors' bytes in the file, padding aside."""
        if not self.tensors:
            return self.data
        last = self.tensors[-1]
        return self.data + last.offset + last.size


class _Reader:
    """A position in a mapped file; no read passes the file's end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.at = START
        self.end = len(data)
        self.text = LONGEST_TEXT
        self.texts = MOST_STRINGS  # texts left for lists; `text` has the bytes left for text values

    def refuse(self, what: str) -> InputError:
        """Return the error for a header that is not valid GGUF."""
        return InputError(f"{self.path} is not a valid GGUF file: {what}")

    def take(self, length: int, what: str) -> int:
        """Step over so many bytes of a GGUF's header. Return the position of the first."""
        at = self.at
        if length > self.end - at:
            raise self.refuse(f"it ends inside {what} (cut short, or a length that is wrong)")
        self.at = at + length
        return at

    def number(self, form: str, what: str) -> Any:
        """Read the next number of a GGUF's header, by its struct format."""
        (value,) = struct.unpack_from(f"<{form}", self.data, self.take(struct.calcsize(form), what))
        return value

    def string(self, what: str, most: int) -> bytes:
        """Read the next text of a GGUF's header as bytes, of at most `most` bytes."""
        length = self.number("Q", what)
        if length > most and length <= self.end - self.at:
            raise self.refuse(f"{what} has {length:,} bytes, more than {most:,}")
        at = self.take(length, what)
        return self.data[at : at + length]

    def name(self, what: str, most: int) -> str:
        """Read the next text of a GGUF's header as UTF-8."""
        raw = self.string(what, most)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise self.refuse(f"{what} is not UTF-8") from None

    def entry(self, kind: int, start: int, key: str) -> KeyValue:
        """Read the value of a GGUF key by its type. A list's content is skipped."""
        if kind == BOOL:
            number = self.number("B", key)
            if number > 1:
                raise self.refuse(f"{key} is neither true nor false")
            return KeyValue(kind, bool(number), start, self.at)
        if kind in FORMATS:
            value = self.number(FORMATS[kind], key)
            return KeyValue(kind, value, start, self.at)
        if kind == STRING:
            raw = self.string(key, self.text)
            self.text -= len(raw)
            return KeyValue(kind, raw.decode(errors="replace"), start, self.at)
        if kind != ARRAY:
            raise self.refuse(f"{key} has the kind {kind}, which does not exist")
        item = self.number("I", key)
        count = self.number("Q", key)
        at = self.at
        if item in FORMATS:
            self.take(count * struct.calcsize(FORMATS[item].replace("?", "B")), key)
        elif item == STRING:
            self._skip_strings(count, key)
        else:
            raise self.refuse(f"{key} is a list of the kind {item}, which does not exist")
        return KeyValue(kind, None, start, self.at, item, count, at)

    def _skip_strings(self, count: int, key: str) -> None:
        """Skip a list of texts in a GGUF's header, for example the tokenizer's vocabulary."""
        if count > (self.end - self.at) // 8:
            raise self.refuse(f"it ends inside {key}, a list of {count:,} texts")
        if count > self.texts:
            raise self.refuse(f"{key} is a list of {count:,} texts, more than {self.texts:,}")
        self.texts -= count
        at = self.at
        last = self.end - 8
        length = struct.Struct("<Q").unpack_from
        for _ in range(count):
            if at > last:
                raise self.refuse(f"it ends inside {key}, a list of {count:,} texts")
            at += 8 + length(self.data, at)[0]
        self.take(at - self.at, key)


@contextmanager
def _mapped(path: Path) -> Iterator[mmap.mmap]:
    """Yield a GGUF file as mapped memory, so that only its header is read."""
    descriptor = open_regular(path)
    try:
        size = os.fstat(descriptor).st_size
        if size < START:
            raise InputError(f"{path} is not a GGUF file: it has {size} bytes")
        with mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) as data:
            yield data
    finally:
        os.close(descriptor)


def read_gguf(path: Path) -> GgufHeader:
    """Read the header of one GGUF file, whatever its size. Raise InputError if it is not valid."""
    with _mapped(path) as data:
        version, tensors, keys = _begin(path, data)
        reader = _Reader(path, data)
        entries = dict[str, KeyValue]()
        for number in range(keys):
            start = reader.at
            key = reader.name(f"the name of key {number + 1} of {keys:,}", LONGEST_KEY)
            if not key:
                raise reader.refuse("a key has no name")
            if key in entries:
                raise reader.refuse(f"the key {named(key)} occurs twice")
            entries[key] = reader.entry(reader.number("I", named(key)), start, named(key))
        alignment = _alignment(reader, entries.get(ALIGNMENT))
        begin = reader.at
        rows = [_row(reader, number, tensors) for number in range(tensors)]
        described = begin, reader.at
        place = -(-reader.at // alignment) * alignment
        placed = _placed(reader, rows, place, alignment)
        return GgufHeader(path, len(data), version, entries, placed, alignment, described, place)


def _begin(path: Path, data: mmap.mmap) -> tuple[int, int, int]:
    """Return a GGUF's version, its number of tensors and its number of keys."""
    if data[:4] != MAGIC:
        raise InputError(f"{path} is not a GGUF file: it does not begin with GGUF")
    version, tensors, keys = struct.unpack_from("<IQQ", data, 4)
    if version & 0xFFFF == 0 and version:
        raise InputError(f"{path} is a big-endian GGUF file, which is not read here")
    if version not in (2, 3):
        raise InputError(f"{path} is a GGUF file of version {version}; known are 2 and 3")
    for count, least, most, what in (
        (keys, 13, MOST_KEYS, "keys"),
        (tensors, 24, MOST_TENSORS, "tensors"),
    ):
        if count > min(most, len(data) // least):
            raise InputError(
                f"{path} is not a valid GGUF file: {count:,} {what} do not fit in it ({most:,} are "
                "the most)"
            )
    return version, tensors, keys


def _alignment(reader: _Reader, entry: KeyValue | None) -> int:
    """Return the alignment of the tensors that a GGUF's header states, 32 bytes by default."""
    if entry is None:
        return 32
    value = entry.value
    if entry.kind != UINT32 or value < 1 or value & (value - 1):
        raise reader.refuse(f"{ALIGNMENT} is not a power of two")
    return int(value)


def _row(reader: _Reader, number: int, of: int) -> tuple[str, tuple[int, ...], int, int]:
    """Read a GGUF tensor's name, shape, type and offset."""
    name = reader.name(f"the name of tensor {number + 1} of {of:,}", LONGEST_NAME)
    dimensions = reader.number("I", named(name))
    if dimensions > 4:
        raise reader.refuse(f"the tensor {named(name)} has {dimensions} dimensions")
    shape = tuple(reader.number("Q", named(name)) for _ in range(dimensions))
    kind = reader.number("I", named(name))
    offset = reader.number("Q", named(name))
    if kind > NEWEST_TYPE or math.prod(shape) >= 1 << 63 or max(shape, default=0) >= 1 << 63:
        raise reader.refuse(f"the tensor {named(name)} has a type or a shape that is out of range")
    return name, shape, kind, offset


def _placed(
    reader: _Reader,
    rows: list[tuple[str, tuple[int, ...], int, int]],
    data: int,
    alignment: int,
) -> tuple[Description, ...]:
    """Return the GGUF's tensors. Each must begin at the end of the one before, padded to the
    alignment. llama.cpp allows no other order."""
    out = []
    seen = set[str]()
    place = 0
    for index, (name, shape, kind, offset) in enumerate(rows):
        if name in seen:
            raise reader.refuse(f"the tensor {named(name)} occurs twice")
        seen.add(name)
        if offset != place:
            raise reader.refuse(
                f"the tensor {named(name)} begins at byte {offset:,} of the tensors, where "
                f"{place:,} is expected (not aligned, a gap, or over another)"
            )
        if kind in TYPES:
            _, block, bytes_each = TYPES[kind]
            width = 1
            if shape:
                width = shape[0]
            if width % block:
                raise reader.refuse(f"a row of the tensor {named(name)} is no whole blocks")
            size = math.prod(shape) // block * bytes_each
        else:
            following = reader.end - data
            if index + 1 < len(rows):
                following = rows[index + 1][3]
            size = max(0, following - offset)
        if data + offset + size > reader.end:
            raise reader.refuse(f"it ends inside the tensor {named(name)} (cut short)")
        out.append(Description(name, shape, kind, offset, size))
        place = -(-(offset + size) // alignment) * alignment
    return tuple(out)
