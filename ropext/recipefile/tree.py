"""YAML as a tree in which every value has its line; nothing that runs, names or multiplies."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ropext.errors import InputError

DEPTH_LIMIT = 4  # sections hold keys, keys hold lists
_NULL = ("", "~", "null")


@dataclass(frozen=True)
class Scalar:
    """One word or text."""

    text: str
    line: int
    quoted: bool = False

    @property
    def is_null(self) -> bool:
        return not self.quoted and self.text in _NULL


@dataclass(frozen=True)
class Many:
    """A list."""

    items: tuple["Node", ...]
    line: int


@dataclass(frozen=True)
class Branch:
    """Keys with their values, each with the line of its key."""

    entries: dict[str, tuple[int, "Node"]]
    line: int


Node = Scalar | Many | Branch


def parse(data: bytes | str, name: str) -> Branch:
    """The tree of a YAML text whose top is a mapping."""
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
    if not isinstance(tree, Branch):
        raise InputError(f"{name} is no recipe: it has no keys such as model and extend")
    return tree


def _events(text: str, name: str) -> Iterator[Any]:
    """What the parser finds, as long as it is no deeper than a recipe; the parser's own time grows
    with the square of the depth."""
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
        return Scalar(event.value, line, event.style is not None)
    if isinstance(event, yaml.SequenceStartEvent):
        items = []
        while not isinstance(following := next(events), yaml.SequenceEndEvent):
            items.append(_node(following, events, name))
        return Many(tuple(items), line)
    entries: dict[str, tuple[int, Node]] = {}
    while not isinstance(following := next(events), yaml.MappingEndEvent):
        key = _node(following, events, name)
        if not isinstance(key, Scalar):
            raise InputError(f"{name}, line {key.line}: a key is a word")
        if key.text in entries:
            first = entries[key.text][0]
            raise InputError(f"{name}, line {key.line}: {key.text} is given twice (line {first})")
        entries[key.text] = (key.line, _node(next(events), events, name))
    return Branch(entries, line)
