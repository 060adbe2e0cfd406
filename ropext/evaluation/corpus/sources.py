"""Read raw documents from local files or from a `datasets` id, one after the other."""

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ropext.base import bundled
from ropext.base.errors import InputError, class_name
from ropext.base.inputs import (
    check_link,
    check_links,
    check_names,
    is_path,
    open_regular,
    read_bytes,
)
from ropext.base.jsontext import JsonObject
from ropext.base.narration import join_for_shells
from ropext.options.fields import DOCUMENTS, JSON, TABLES, Texts

T = TypeVar("T")
Messages = list[JsonObject]
DEFAULT_COLUMNS = ("text", "messages")
NO_SPLIT = ""
SAVED = ("dataset_dict.json", "state.json")  # files that `save_to_disk` of datasets writes
LARGEST = 64  # MiB of one document, which takes some twenty times as much memory
MOST_KINDS = 8  # file types that a warning names
CARD_LIMIT = 16 << 20  # bytes of a dataset's card
PER_JSON = 16  # times the largest document: the limit for a JSON file, which is read at once
PER_FILE = 1024  # times the largest document: the limit for one unpacked file


@dataclass(frozen=True)
class Source:
    """The place of documents, with the options that belong to it."""

    data: str  # a file, a folder, or a datasets id (`ID:CONFIG` if it has configurations)
    column: str | None = None
    split: str | None = None  # as the user wrote it
    revision: str | None = None
    largest: int = LARGEST  # MiB of one document
    default_split: str = "test"
    pieces: str | None = None  # how each text is split: at blank-lines, a separator, windows
    flag: str = "--data"  # the option that names it, for errors

    @property
    def place(self) -> Path:
        """Return the path of the documents that --data names, if they are local.

        Raise an error if `data` cannot be a path's name.
        """
        found = bundled.find_bundled(self.data, "data")
        if found is not None:
            return found
        place = Path(self.data)
        check_names(place, f"; {self.flag} names documents, and in Python a list holds texts")
        return place

    def error(self, sentence: str) -> InputError:
        """Return the error for a mistake in the documents, after the option that names them."""
        return InputError(f"{self.flag} {sentence}")

    @property
    def is_streamed(self) -> bool:
        """Return whether the documents of --data may be a stream without an end."""
        return not isinstance(self.data, Texts) and not self.place.exists()

    def part(self, splits: Mapping[str, T]) -> T:
        """Return the split to read (--split, or the default one), from the splits that the data
        has."""
        split = self.split or self.default_split
        if self.split is None and NO_SPLIT in splits:
            return splits[NO_SPLIT]
        if split not in splits:
            names = ", ".join(filter(None, splits))
            remedy = f"--split takes one of {names}" if names else "it has none, leave --split out"
            raise self.error(f"{self.data} has no split {split}: {remedy}")
        return splits[split]


@dataclass(frozen=True)
class RawDocument:
    """One document as it was found: plain text, or the messages of a conversation."""

    name: str
    content: str | Messages


def _too_large(source: Source, what: str, mib: int) -> InputError:
    """Return the error for text of --data beyond --max-document-mib."""
    return source.error(
        f"{what} has more than {mib:,} MiB of text; split it, or raise --max-document-mib"
    )


def _within(documents: Iterator[RawDocument], place: str, source: Source) -> Iterator[RawDocument]:
    """Yield the documents of one --data file or stream. Raise an error if one or all of them are
    too large."""
    left = source.largest * PER_FILE << 20
    for document in documents:
        text = document.content if isinstance(document.content, str) else repr(document.content)
        size = len(text.encode("utf-8", "surrogatepass"))
        if size > source.largest << 20:
            raise _too_large(source, document.name, source.largest)
        left -= size
        if left < 0:
            raise _too_large(source, place, source.largest * PER_FILE)
        yield document


def read_documents(source: Source) -> Iterator[RawDocument]:
    """Read every document of --data in its own order; raise an error if there is no text at all."""
    path = source.place
    if isinstance(source.data, Texts):
        found = _given(source)
    elif any((path / name).is_file() for name in SAVED):
        found = _within(_read_dataset(source), source.data, source)
    elif path.is_dir():
        found = _read_folder(path, source)
    elif path.exists():
        source.part({NO_SPLIT: None})
        found = _read_file(path, path.name, source, named=True)
    else:
        require_data(source)
        found = _within(_read_dataset(source), source.data, source)
    count = 0
    some = False
    for document in found:
        count += 1
        content = document.content
        some = some or bool(content.strip() if isinstance(content, str) else content)
        yield document
    if not some:
        only = "only empty documents" if count else "no document"
        raise source.error(f"{source.data} holds {only}; give a text to read")


def _given(source: Source) -> Iterator[RawDocument]:
    """Yield the documents that a Python caller gave as texts."""
    source.part({NO_SPLIT: None})
    for number, row in enumerate(getattr(source.data, "rows", ()), 1):
        name = f"{source.data}:{number}"
        yield RawDocument(name, _row_content(row, source, name))


def _row_content(row: object, source: Source, where: str) -> str | Messages:
    """Return the text or messages in a row of --data; the row may also be the text or the messages
    themselves."""
    if isinstance(row, str | list):
        return _content({source.column or DEFAULT_COLUMNS[0]: row}, source, where)
    if not isinstance(row, Mapping):
        raise source.error(f"{where} is {class_name(row)}; expected a text or a row with columns")
    return _content(row, source, where)


def is_missing(source: Source) -> bool:
    """Return True if the named documents can only be a path here, and nothing has that path."""
    if isinstance(source.data, Texts) or source.place.exists():
        return False
    if source.place.suffix in READERS:
        return True
    return is_path(source.data) and not Path(_repository(source)[0]).is_dir()


def require_data(source: Source) -> None:
    """Raise InputError if the named documents can only be a path here, and nothing has that
    path."""
    if is_missing(source):
        raise source.error(f"{source.data}: there is no such file or folder")


# The words in names of folders, otherwise of files, by which `datasets` knows a split (its
# data_files.py).
SPLITS = {
    "train": "train|training",
    "validation": "validation|valid|dev|val",
    "test": "test|testing|eval|evaluation",
}
SHARD = re.compile(r"data/([^/]+)-\d{5}-of-\d{5}[^/]*\.[^/]*")
# A name that is a split's word, numbered or not: `eval.txt`, `books-test-2.txt`, not a title.
WHOLE_NAME = re.compile(rf"(^|.*[-._ /])({'|'.join(SPLITS.values())})[-._ 0-9]*\.\w+")
FOLDER, FILE = (rf"(^|[-._ 0-9/])({{}}){end}" for end in ("([-._ 0-9][^/]*)?/", "[-._ 0-9][^/]*$"))


def splits_of(names: Sequence[str], *, partly: bool = False) -> dict[str, Sequence[str]]:
    """Divide the document files of a --data folder into splits as `datasets` does; if no name has a
    split's word, all are NO_SPLIT.

    File names count only if every file has such a word, or with `partly`: a title may contain one.
    """
    shards = [(match[1], name) for name in names if (match := SHARD.fullmatch(name))]
    if shards:
        return {split: [n for name, n in shards if name == split] for split, _ in shards}
    by_folder = _by_split(names, FOLDER)
    if by_folder:
        return by_folder
    by_file = _by_split(names, FILE)
    named = {name for part in by_file.values() for name in part}
    if by_file and (partly or len(named) == len(names)):
        return by_file
    return {NO_SPLIT: names}


def _by_split(names: Sequence[str], place: str) -> dict[str, Sequence[str]]:
    """Return the names of the documents' files in a --data folder of the corpus, by the split whose
    word they contain."""
    by_split = {
        split: [name for name in names if re.search(place.format(words), name)]
        for split, words in SPLITS.items()
    }
    return {split: part for split, part in by_split.items() if part}


def _files_in(folder: Path) -> list[str]:
    """Return the document files of a --data folder that ropext can read, without its card and
    hidden files."""
    return _visible(folder, [file for file in folder.rglob("*") if file.suffix in READERS])


def _visible(folder: Path, files: Sequence[Path]) -> list[str]:
    """Return files by their places in a --data folder, without its card and hidden files."""
    files = sorted(file for file in files if file.is_file() and file.name != "README.md")
    places = [file.relative_to(folder) for file in files]
    hidden = (".", "__")
    return [at.as_posix() for at in places if not any(p.startswith(hidden) for p in at.parts)]


def unread_files(source: Source) -> list[str]:
    """Return warnings about files of a --data folder that ropext does not read, and about names
    that might have been splits."""
    folder = source.place
    if isinstance(source.data, Texts) or not folder.is_dir():
        return []
    if any((folder / name).is_file() for name in SAVED):
        return []
    names = _files_in(folder)
    if not names:
        return []
    return _other_kinds(source, folder) + _other_splits(source, names)


def _other_kinds(source: Source, folder: Path) -> list[str]:
    """Return a warning about the files of a --data folder that no reader of the corpus can read as
    documents."""
    others = _visible(folder, [file for file in folder.rglob("*") if file.suffix not in READERS])
    if not others:
        return []
    kinds = ", ".join(sorted({Path(name).suffix or name for name in others})[:MOST_KINDS])
    return [
        f"[left-out] {source.flag} {source.data}: {len(others)} files are not read ({kinds}), only"
        f" {', '.join(READERS)}"
    ]


def _other_splits(source: Source, names: Sequence[str]) -> list[str]:
    """Return a warning about the --data files outside the split that is read, or about names that
    might have been splits."""
    by_split = splits_of(names, partly=source.split is not None)
    read = source.part(by_split)
    if NO_SPLIT not in by_split:
        apart = len(names) - len(read)
        if not apart:
            return []
        split = source.split or source.default_split
        others = ", ".join(name for name in by_split if name != split)
        held = {name for part in by_split.values() for name in part}
        counts = [f"{len(held) - len(read)} in {others}"] if others else []
        if len(held) < len(names):
            counts.append(f"{len(names) - len(held)} in no split")
        return [
            f"[left-out] {source.flag} {source.data}: the split {split} is read, {len(read)} of "
            f"{len(names)} files ({', '.join(counts)})"
        ]
    by_file = _by_split([name for name in names if WHOLE_NAME.fullmatch(name)], FILE)
    if not by_file:
        return []
    split, (named, *_) = next(iter(by_file.items()))
    count = len(_by_split(names, FILE)[split])  # as --split divides them
    return [
        f"[no-split] {source.flag} {source.data}: all {len(names)} files are read, though "
        f"{named} is named as a split; file names divide a folder only where each of them names "
        f"a split (--split {split} reads {count} of them)"
    ]


def _read_folder(folder: Path, source: Source) -> Iterator[RawDocument]:
    """Yield the documents of a split of a --data folder, or of the whole folder."""
    names = _files_in(folder)
    if not names:
        kinds = ", ".join(READERS)
        raise source.error(f"{folder}: the folder holds no file of a known kind ({kinds})")
    for name in source.part(splits_of(names, partly=source.split is not None)):
        check_link(folder / name, folder)
        yield from _read_file(folder / name, name, source, named=False)


def _read_file(path: Path, name: str, source: Source, *, named: bool) -> Iterator[RawDocument]:
    """Yield the documents of one file of --data.

    `named`: the user named this very file, so any suffix is read as text.
    """
    reader = READERS.get(path.suffix, _read_text if named else None)
    if named and path.suffix == JSON:
        reader = _read_json
    elif named and path.suffix in TABLES:
        raise source.error(
            f"{path}: {path.suffix} is not read; convert it to jsonl (one object with a "
            "text column a line) or parquet"
        )
    if reader is None:
        return
    try:
        yield from _within(reader(path, name, source), name, source)
    except UnicodeDecodeError:
        raise source.error(
            f"{path} is not UTF-8 text: `iconv -f latin1 -t utf-8 {join_for_shells(str(path))}` "
            "converts it from Latin-1; or give txt, jsonl or parquet"
        ) from None
    except OSError as error:
        raise source.error(f"{path} cannot be read: {error.strerror or error}") from error


def _read_text(path: Path, name: str, source: Source) -> Iterator[RawDocument]:
    """Yield the whole of a text file of --data as one document."""
    with open(open_regular(path), encoding="utf-8-sig") as file:  # a byte-order mark is no text
        text = file.read((source.largest << 20) + 1)
    if "\x00" in text:
        raise source.error(f"{path} is binary (it holds zero bytes), not a text")
    yield RawDocument(name, text)


def _read_jsonl(path: Path, name: str, source: Source) -> Iterator[RawDocument]:
    """Yield a document for each line of a jsonl file of --data, except blank lines."""
    most = 2 * source.largest << 20  # including parts that are not text
    with open(open_regular(path), encoding="utf-8-sig") as file:
        for number, line in enumerate(iter(lambda: file.readline(most + 1), ""), 1):
            if len(line) > most:
                raise _too_large(source, f"{path}, line {number}", source.largest)
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise source.error(f"{path}, line {number}: not valid JSON: {error}") from None
            if not isinstance(row, dict):
                raise source.error(f"{path}, line {number}: expected an object with columns")
            where = f"{path}, line {number}"
            yield RawDocument(f"{name}:{number}", _content(row, source, where))


def _read_json(path: Path, name: str, source: Source) -> Iterator[RawDocument]:
    """Yield the documents of a JSON file of --data: an array of texts or objects, or one object."""
    most = source.largest * PER_JSON
    with open(open_regular(path), encoding="utf-8-sig") as file:
        text = file.read((most << 20) + 1)
    if len(text) > most << 20:
        raise source.error(f"{path} has more than {most:,} MiB; convert it to jsonl or parquet")
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise source.error(f"{path}: not valid JSON: {error}") from None
    rows = content if isinstance(content, list) else [content]
    for number, row in enumerate(rows, 1):
        yield RawDocument(f"{name}:{number}", _row_content(row, source, f"{path}, row {number}"))


def _read_parquet(path: Path, name: str, source: Source) -> Iterator[RawDocument]:
    """Yield a document for each row of a parquet file of --data."""
    import pyarrow
    import pyarrow.parquet

    try:
        with open(open_regular(path), "rb") as stream:
            file = pyarrow.parquet.ParquetFile(stream)
            wanted = _column(dict.fromkeys(file.schema_arrow.names), source, str(path))
            # Row by row: sizes in the file can be false, and a page of some kilobytes can unpack
            # to gigabytes in each row. (Threads would cost ten times a row's time.)
            rows = file.iter_batches(batch_size=1, columns=[wanted], use_threads=False)
            for number, row in enumerate(rows, 1):
                if row.nbytes > 2 * source.largest << 20:
                    raise _too_large(source, f"{path}, row {number}", source.largest)
                content = _content(row.to_pylist()[0], source, f"{path}, row {number}")
                yield RawDocument(f"{name}:{number}", content)
    except pyarrow.ArrowException as error:
        raise source.error(f"{path} is not a parquet file: {error}") from None


Reader = Callable[[Path, str, Source], Iterator[RawDocument]]
_OF_EACH = (_read_text, _read_text, _read_jsonl, _read_parquet)
READERS: dict[str, Reader] = dict(zip(DOCUMENTS, _OF_EACH, strict=True))


def _column(row: JsonObject, source: Source, where: str) -> str:
    """Return the column of a row of --data that holds the text; raise an error if it is missing."""
    candidates = DEFAULT_COLUMNS if source.column is None else (source.column,)
    for candidate in candidates:
        if candidate in row:
            return candidate
    raise source.error(
        f"{where}: there is no column {' or '.join(candidates)}; there are "
        f"{', '.join(row) or 'none'} (--column NAME)"
    )


def _content(row: JsonObject, source: Source, where: str) -> str | Messages:
    """Return the text or messages in a row of --data; raise an error for anything else."""
    name = _column(row, source, where)
    content = row[name]
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(
        isinstance(part, dict) and "role" in part and "content" in part for part in content
    ):
        return content
    raise source.error(
        f"{where}: column {name} holds {type(content).__name__}, expected text or a list of "
        "messages with role and content"
    )


def _with_text_alone(rows: Any, source: Source) -> Any:
    """Return a dataset of documents with only the column that ropext reads.

    To decode an image or a sound, `datasets` would open the path in its row, which may be any file
    here.
    """
    from datasets.features.features import require_decoding

    there = rows.column_names
    if not there:  # a stream may not know its columns
        return rows
    name = _column(dict.fromkeys(there), source, f"{source.data}, row 0")
    kind = rows.features[name]
    if require_decoding(kind):
        raise source.error(
            f"{source.data}: column {name} holds {type(kind).__name__}, expected text or a list "
            "of messages with role and content"
        )
    return rows.select_columns([name])


def _open_stream(name: str, config: str, split: str, source: Source) -> Any:
    """Open a split of a --data repository on the hub or disk as a stream; raise an error if its
    card names files outside it."""
    import datasets

    folder = Path(name)
    if folder.is_dir():
        check_links(folder)
        for word in _words_of_card(folder):
            if "://" in word:  # `datasets` would open that address before it returns
                raise source.error(f"{source.data}: its card names an address: {word[:80]}")
    builder = datasets.load_dataset_builder(name, config or None, revision=source.revision)
    for files in (builder.config.data_files or {}).values():
        for file in files:
            is_own = file.startswith("hf://datasets/")
            if folder.is_dir():
                is_own = Path(os.path.normpath(file)).is_relative_to(folder.resolve())
            if not is_own:
                raise source.error(f"{source.data}: its card names a file outside of it: {file}")
    return builder.as_streaming_dataset(split=split)


def _words_of_card(folder: Path) -> Iterator[str]:
    """Yield, before documents of the corpus are read, every text under `configs` in the two files
    of a --data repository from which `datasets` reads them."""
    import yaml
    from huggingface_hub import DatasetCard

    parts: list[Any] = []
    card = folder / "README.md"
    if card.is_file():
        text = read_bytes(card, CARD_LIMIT).decode("utf-8-sig")
        parts.append(DatasetCard(text).data.get("configs"))
    alone = folder / ".huggingface.yaml"
    if alone.is_file():
        parts.append(yaml.safe_load(read_bytes(alone, CARD_LIMIT)))
    seen = set[int]()  # YAML aliases can repeat a part many times
    while parts:
        part = parts.pop()
        if isinstance(part, str):
            yield part
        elif isinstance(part, list | dict) and id(part) not in seen:
            seen.add(id(part))
            parts += part.values() if isinstance(part, dict) else part


def _repository(source: Source) -> tuple[str, str]:
    """Split the --data name `ID:CONFIG`, or `FOLDER:CONFIG` for a dataset repository on the
    disk."""
    name, colon, config = source.data.rpartition(":")
    return (name, config) if colon else (config, "")


def _read_dataset(source: Source) -> Iterator[RawDocument]:
    """Yield the documents of a dataset repository, on the hub or on the disk, or of a folder that
    `datasets` saved."""
    from ropext.files.checkpoint import hub  # late: local texts need neither

    name, config = _repository(source)
    split = source.split or source.default_split
    place = source.place
    is_here = place.is_dir() or Path(name).is_dir()
    if not is_here and hub.is_out_of_reach(name, source.revision):
        raise source.error(
            f"{source.data} is no file or folder here, and the hub cannot be reached to "
            "look for a dataset of that name (no network, or HF_ENDPOINT is wrong)"
        )
    import datasets
    import yaml

    try:
        if place.is_dir():
            check_links(place)
            name = place.name
            saved = datasets.load_from_disk(str(place))
            rows = source.part(saved if isinstance(saved, dict) else {NO_SPLIT: saved})
        else:
            rows = _open_stream(name, config, split, source)
        for number, row in enumerate(_with_text_alone(rows, source)):
            where = f"{source.data}, row {number}"
            yield RawDocument(f"{name}:{number}", _content(row, source, where))
    except (
        OSError,
        ValueError,
        RuntimeError,  # a dataset with code
        ImportError,
        yaml.YAMLError,
        datasets.exceptions.DatasetsError,
    ) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise source.error(
            f"{source.data}: neither a local file nor a dataset that can be read (split "
            f"{split!r}): {first}"
        ) from error
