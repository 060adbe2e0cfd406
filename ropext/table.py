"""One table, and the two ways to write it: columns for a terminal, Markdown for cards and reports.

Cells may come from a model, a corpus or a path: in Markdown they are shown literally, so that they
bring neither HTML nor Markdown.
"""

import re
import textwrap
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """Rows under a header, and what they show in words."""

    title: str
    note: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def with_rows(tables: Iterable[Table]) -> list[Table]:
    """Return the tables that have rows."""
    return [table for table in tables if table.rows]


WIDTH = 120  # characters of a printed line
HIDDEN = ("Cc", "Cf", "Cs", "Co")  # categories of Unicode: control, format, surrogate, private


def folded(text: str, first: str = "", rest: str = "  ") -> str:
    """Break a text at its spaces where it is too wide; `first` and `rest` begin its lines."""
    if len(first + text) <= WIDTH:
        return first + text
    room = max(WIDTH - max(len(first), len(rest)), 20)
    lines = textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False)
    return first + f"\n{rest}".join(lines)


@dataclass(frozen=True)
class Padding:
    """How one column is padded."""

    width: int
    is_numeric: bool

    def padded(self, cell: str) -> str:
        """Pad a cell: numbers to the right, words to the left."""
        return cell.rjust(self.width) if self.is_numeric else cell.ljust(self.width)


GAP = "  "  # between columns
LEAST_LAST = 20  # characters of the last column, which is folded where it is too wide
NUMERIC = re.compile(r"[-+]?(\d|inf$)|-?$")


def columns(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Write columns padded to their widest cell, the last one folded where it is too wide; an
    empty header is left out."""
    body = [list(map(str, row)) for row in rows]
    layout = _layout(header, body)
    lines = list[str]()
    if header:
        lines.append(_line(layout, header))
        lines.append(_line(layout, ["-" * column.width for column in layout]))
    for row in body:
        lines.append(_line(layout, row))
    return "\n".join(lines)


def _layout(header: Sequence[str], body: Sequence[Sequence[str]]) -> list[Padding]:
    """Find each column's width, and whether all of its cells are numbers."""
    count = len(header) if header else len(body[0])
    layout = list[Padding]()
    before = 0  # characters in front of the column
    for k in range(count):
        cells = [row[k] for row in body]
        width = max(map(len, [header[k], *cells] if header else cells))
        if k == count - 1:
            width = min(width, max(WIDTH - before, LEAST_LAST))
        before += width + len(GAP)
        is_numeric = bool(cells) and all(map(NUMERIC.match, cells))
        layout.append(Padding(width, is_numeric))
    return layout


def _line(layout: Sequence[Padding], row: Sequence[str]) -> str:
    cells = [column.padded(cell) for column, cell in zip(layout, row, strict=True)]
    first = "".join(cell + GAP for cell in cells[:-1])
    indent = " " * sum(column.width + len(GAP) for column in layout[:-1])
    return folded(cells[-1].rstrip(), first, indent).rstrip()


def as_text(tables: Iterable[Table], lines: Sequence[str] = ()) -> str:
    """Write tables for a terminal, then `lines`."""
    parts = list[str]()
    for table in tables:
        part = f"{table.title}\n{columns(table.header, table.rows)}"
        for line in table.note.splitlines():
            part += "\n" + folded(line, "  ", "  ")
        parts.append(part)
    if lines:
        parts.append("\n".join(map(folded, lines)))
    return "\n\n".join(parts)


def verdict_first(lines: Sequence[str], tables: Iterable[Table]) -> str:
    """Write sentences for a terminal, then the tables that they were made from."""
    parts = [as_text((), lines), as_text(tables)]
    return "\n\n".join(filter(None, parts))


def as_markdown(tables: Iterable[Table]) -> str:
    """Write tables as the sections of a report."""
    parts = list[str]()
    for table in tables:
        parts.append(f"## {escape(table.title)}\n\n{escape(table.note)}\n\n{grid(table)}")
    return "\n\n".join(parts)


def grid(table: Table) -> str:
    """Write a table's header and rows in Markdown, without its title."""
    lines = [_markdown_row(table.header), "|" + "---|" * len(table.header)]
    for row in table.rows:
        lines.append(_markdown_row(row))
    return "\n".join(lines)


def _markdown_row(row: Sequence[str]) -> str:
    return "| " + " | ".join(map(_literal, row)) + " |"


def escape(text: str) -> str:
    """Write text so that Markdown shows it literally, on one line, also where a line begins."""
    return re.sub(r"^(\d*)([-+=.)])", r"\1\\\2", _literal(text))


def _literal(text: str) -> str:
    """Escape text inside a line or a table, where a leading mark begins no list and no heading."""
    text = " ".join(visible(text).split())
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    text = re.sub(r"([\\`*_\[\]|~$#!{}])", r"\\\1", text)
    # An address would become a link by itself.
    return text.replace("://", "&#58;//").replace("www.", "www&#46;").replace("@", "&#64;")


def visible(text: str) -> str:
    """Drop control characters, and marks that change the direction or hide text."""
    kept = list[str]()
    for character in text:
        if character in "\n\t" or unicodedata.category(character) not in HIDDEN:
            kept.append(character)
    return "".join(kept)
