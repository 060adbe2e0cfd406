"""The text of a recipe, read strictly: plain YAML in which every value has its line.

Tags (which name code), anchors and aliases (which multiply), merges and several documents are
refused, and a value becomes what its key says, never what YAML guesses (`no` is a text where a text
is wanted; 2e-4 is a number). What a section takes stands in a table of keys.
"""

import difflib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ropext.errors import InputError, UsageError, did_you_mean
from ropext.files import read_bytes
from ropext.lengths import parse_length
from ropext.options.fields import Key

DEPTH_LIMIT = 4  # sections hold keys, keys hold lists
_NULL = ("", "~", "null")


Keys = dict[str, tuple["Node", "Node"]]  # by their names: the key and its value


@dataclass(frozen=True)
class Node:
    """A word or text, a list, or keys with their values."""

    value: "str | tuple[Node, ...] | Keys"
    name: str  # of the file, or the word of the command line
    line: int = 0  # 0: of the command line
    quoted: bool = False

    @property
    def where(self) -> str:
        return f"{self.name}, line {self.line}" if self.line else self.name

    @property
    def is_null(self) -> bool:
        return not self.quoted and self.value in _NULL


def parse(data: bytes | str, name: str) -> Keys:
    """Read a YAML text whose top is a mapping."""
    import yaml  # late: only recipes need it

    if isinstance(data, bytes):
        try:
            data = data.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise InputError(f"{name} is not UTF-8 text (byte {error.start})") from None
    try:
        events = iter(list(_events(data, name)))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        at = "" if mark is None else f", line {mark.line + 1}"
        raise InputError(f"{name}{at}: not valid YAML: {error.problem}") from None
    except (yaml.YAMLError, RecursionError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InputError(f"{name}: not valid YAML: {first}") from None
    tree: Node | None = None
    for event in events:
        if isinstance(event, yaml.DocumentStartEvent):
            if tree is not None:
                where = f"{name}, line {_line(event)}"
                raise InputError(f"{where}: a recipe is one document; drop the ---")
            tree = _node(next(events), events, name)
    if tree is None or not isinstance(tree.value, dict):
        raise InputError(f"{name} is no recipe: it has no keys such as model and extend")
    return tree.value


def _events(text: str, name: str) -> Iterator[Any]:
    """Yield the parser's events while they are no deeper than a recipe; its own time grows with the
    square of the depth."""
    import yaml

    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > DEPTH_LIMIT + 1:  # the top mapping is none of the levels
            raise InputError(
                f"{name}, line {_line(event)}: nested deeper than anything in a recipe"
            )
        yield event


def _line(event: Any) -> int:
    return int(event.start_mark.line) + 1


def _node(event: Any, events: Iterator[Any], name: str) -> Node:
    import yaml

    line = _line(event)
    where = f"{name}, line {line}"
    if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
        raise InputError(f"{where}: anchors and aliases (& and *) are not read; repeat the value")
    if getattr(event, "tag", None):
        raise InputError(f"{where}: tags (!{str(event.tag).lstrip('!')[:40]}) are not read")
    if isinstance(event, yaml.ScalarEvent):
        return Node(event.value, name, line, event.style is not None)
    if isinstance(event, yaml.SequenceStartEvent):
        items = []
        while not isinstance(following := next(events), yaml.SequenceEndEvent):
            items.append(_node(following, events, name))
        return Node(tuple(items), name, line)
    entries: Keys = {}
    while not isinstance(following := next(events), yaml.MappingEndEvent):
        key = _node(following, events, name)
        if not isinstance(key.value, str):
            raise InputError(f"{key.where}: a key is a word")
        if key.value in entries:
            first = entries[key.value][0].line
            raise InputError(f"{key.where}: {key.value} is given twice (line {first})")
        entries[key.value] = (key, _node(next(events), events, name))
    return Node(entries, name, line)


SIZE_LIMIT = 1 << 16  # bytes; a recipe has a few dozen lines

_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
# Names that are or end in one of these words: HF_TOKEN, but not TOKENIZER_DIR or TOKEN_COUNTS.
_SECRET = re.compile(r"(.*_)?(token|(api)?key|secret|password|passwd)", re.IGNORECASE)
_NUMBER = re.compile(r"[-+]?(\d[\d_]*\.?\d*|\.\d+)([eE][-+]?\d+)?")


Sections = Mapping[str, tuple[Key, ...]]  # section -> its keys; "" has those of the top


@dataclass(frozen=True)
class Entry:
    """A value that was given, and where: for messages, and for what a path counts from."""

    value: Any
    where: str
    folder: Path
    local: bool = False


@dataclass
class Given:
    """All that was given, by dotted key (`finetune.steps`), and the sections that are there."""

    entries: dict[str, Entry] = field(default_factory=dict)
    sections: dict[str, str] = field(default_factory=dict)  # name -> where it begins

    def section(self, name: str) -> dict[str, Any]:
        """The values of a section by their keys."""
        prefix = f"{name}." if name else ""
        return {
            key.removeprefix(prefix): entry.value
            for key, entry in self.entries.items()
            if key.startswith(prefix) and ("." in key) == bool(name)
        }

    def place(self, key: str) -> str | None:
        """A place as the file system finds it from here, its variables filled in."""
        entry = self.entries.get(key)
        return None if entry is None else place(entry)

    def put(self, key: str, value: Any, where: str, folder: Path = Path()) -> None:
        """A value from the command line's own options."""
        self.entries[key] = Entry(value, where, folder)
        section = key.rpartition(".")[0]
        if section:
            self.sections.setdefault(section, where)


def read(path: Path, sections: Sections, folder: Path) -> tuple[Given, str]:
    """(what a recipe file gives, its text verbatim); relative paths count from `folder`."""
    if path.is_file() and path.stat().st_size > SIZE_LIMIT:
        raise InputError(
            f"{path} has more than the {SIZE_LIMIT // 1024} KiB that a recipe may have"
        )
    data = read_bytes(path, SIZE_LIMIT)
    return from_text(data, path.name, sections, folder), data.decode("utf-8", "replace")


def from_text(data: bytes | str, name: str, sections: Sections, folder: Path) -> Given:
    """What a recipe's text gives; relative paths count from `folder`."""
    given = Given()
    for word, (key, node) in parse(data, name).items():
        if not word or word not in sections:
            _put(given, _known(word, "", sections, key.where), "", node, folder)
        elif isinstance(node.value, dict):
            given.sections[word] = key.where
            for inner, (at, value) in node.value.items():
                _put(given, _known(inner, word, sections, at.where), word, value, folder)
        elif not node.is_null:
            raise InputError(
                f"{key.where}: {word} is a section, with keys such as {sections[word][0].name} "
                "below it"
            )
    return given


def _put(given: Given, key: Key, section: str, node: Node, folder: Path) -> None:
    dotted = f"{section}.{key.name}" if section else key.name
    value = typed(key, dotted, node)
    if value is None:
        given.entries.pop(dotted, None)
        return
    given.entries[dotted] = Entry(value, node.where, folder, key.local)
    if section:
        given.sections.setdefault(section, node.where)
    if key.place:
        if not str(value).strip():
            raise InputError(f"{node.where}: {dotted} is empty; name a place, or leave the key out")
        place(given.entries[dotted])  # so that a missing variable is told at once


def override(given: Given, word: str, sections: Sections) -> None:
    """Apply one `key=value` of the command line; paths count from the working directory."""
    dotted, equals, text = word.partition("=")
    if not equals:
        raise UsageError(f"{word!r} is no KEY=VALUE, such as finetune.steps=60")
    section, _, name = dotted.strip().rpartition(".")
    if name and not section and name in sections:
        if text.strip() != "null":
            raise UsageError(f"{word}: {name} is a section; write {name}.KEY=VALUE, or {name}=null")
        given.sections.pop(name, None)
        for key in [key for key in given.entries if key.startswith(f"{name}.")]:
            del given.entries[key]
        return
    if section not in sections:
        raise UsageError(f"{word}: there is no section {section!r}{_near(section, list(sections))}")
    known = _known(name, section, sections, word, UsageError)
    node = Node(text.strip(), word)
    try:
        if known.takes_list and text.strip().startswith("["):
            node = replace(parse(f"value: {text}", word)["value"][1], line=0)
        _put(given, known, section, node, Path())
    except InputError as error:
        raise UsageError(str(error)) from None


def _known(
    key: str, section: str, sections: Sections, where: str, kind: type[Exception] = InputError
) -> Key:
    """The key of that name; an unknown one is refused with its nearest neighbours."""
    if key == "trust_remote_code":
        raise kind(
            f"{where}: no recipe allows a model's own code to run; where you trust the model, give "
            "--trust-remote-code on the command line"
        )
    for known in sections[section]:
        if known.name == key:
            return known
    here = section or "a recipe"
    names = [known.name for known in sections[section]] + (
        [] if section else [s for s in sections if s]
    )
    owners = [name for name, keys in sections.items() if name and key in [k.name for k in keys]]
    if owners and not difflib.get_close_matches(key, names, 1, 0.8):
        raise kind(f"{where}: {here} has no key {key!r}; it is a key of {' and of '.join(owners)}")
    raise kind(f"{where}: {here} has no key {key!r}{_near(key, names)}")


def _near(word: str, names: list[str]) -> str:
    known = [name for name in names if name]
    return "; " + did_you_mean(word, known, f"known are {', '.join(known)}")


def place(entry: Entry) -> str:
    """Where a place lies, seen from here: hub ids, `ropext://` names and absolute paths as they
    are; a relative path counts from the recipe's folder."""
    text = _VARIABLE.sub(lambda match: _variable(match[1], entry.where), str(entry.value))
    if "$" in text:
        raise InputError(
            f"{entry.where}: {str(entry.value)!r} holds a $ that names no variable; write ${{NAME}}"
        )
    text = os.path.expanduser(text)
    if "://" in text or entry.folder == Path():
        return text
    looks_local = text.startswith((".", "~", "/")) or Path(text).suffix in _DATA_SUFFIXES
    if entry.local or looks_local or (entry.folder / text).exists():
        return str(entry.folder / text)
    return text


_DATA_SUFFIXES = (".txt", ".md", ".jsonl", ".parquet", ".json", ".csv")


def _variable(name: str, where: str) -> str:
    if _SECRET.fullmatch(name):
        raise InputError(
            f"{where}: ${{{name}}} looks like a secret, which has no place in a recipe"
        )
    if name not in os.environ:
        raise InputError(f"{where}: the environment variable {name} is not set")
    return os.environ[name]


def typed(key: Key, dotted: str, node: Node) -> Any:
    """The value as its key says; None where it was left empty."""
    if isinstance(node.value, dict):
        raise InputError(f"{node.where}: {dotted} takes {_wanted(key)}, not keys of its own")
    if isinstance(node.value, tuple):
        if not key.takes_list:
            raise InputError(f"{node.where}: {dotted} takes {_wanted(key)}, not a list")
        items = tuple(_single(key, dotted, item, node.where) for item in node.value)
        return items if items or not key.matrix else None
    if node.is_null:
        return None
    if key.is_list:
        if key.place:
            return node.value  # a file that has the list
        parts = [part.strip() for part in node.value.split(",") if part.strip()]
        return tuple(_single(key, dotted, Node(part, node.name), node.where) for part in parts)
    return _single(key, dotted, node, node.where)


def _single(key: Key, dotted: str, node: Node, where: str) -> Any:
    text, kind = node.value, key.item
    if not isinstance(text, str):
        raise InputError(f"{where}: {dotted} takes {_wanted(key)}, not lists in a list")
    if kind is str:
        return text
    if kind is bool and not node.quoted and text in ("true", "false"):
        return text == "true"
    if kind in (int, float) and not node.quoted and _NUMBER.fullmatch(text) and len(text) < 400:
        digits = text.replace("_", "")
        if kind is float:
            return float(digits)
        if float(digits).is_integer():
            # Digits as they stand: a float holds no more than sixteen of them.
            return int(digits) if digits.lstrip("+-").isdecimal() else int(float(digits))
    if key.length:
        try:
            return parse_length(text, f"{where}: {dotted}")
        except UsageError as error:
            raise InputError(str(error)) from None
    shown = repr(text[:60]) if node.quoted else text[:60]
    raise InputError(f"{where}: {dotted} takes {_wanted(key)}, was {shown}")


_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}


def _wanted(key: Key) -> str:
    words = _WORDS[key.item]
    if key.matrix:
        return f"{words} or a list of them"
    if key.is_list:
        return f"a list, each item {words}" + (", or the path of a file" if key.place else "")
    return words
