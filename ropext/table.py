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
    """Those that show anything."""
    return [table for table in tables if table.rows]


WIDTH = 120  # of what is printed


def folded(text: str, first: str = "", rest: str = "  ") -> str:
    """Break a text at its spaces where it is too wide; `first` and `rest` begin its lines."""
    if len(first + text) <= WIDTH:
        return first + text
    room = max(WIDTH - max(len(first), len(rest)), 20)
    lines = textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False)
    return first + f"\n{rest}".join(lines)


def columns(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns padded to their widest cell, numbers to the right, words to the left, the last one
    folded where it is too wide; a header of nothing is left out."""
    body = [list(map(str, row)) for row in rows]
    shown = [list(header), *body] if header else body
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    before = sum(widths[:-1]) + 2 * len(widths[:-1])
    widths[-1] = min(widths[-1], max(WIDTH - before, 20))
    numeric = [
        all(re.match(r"[-+]?(\d|inf$)|-?$", cell) for cell in column)
        for column in zip(*body, strict=True)
    ] or [False] * len(widths)

    def line(row: Sequence[str]) -> str:
        cells = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric, strict=True)
        ]
        first = "".join(f"{cell}  " for cell in cells[:-1])
        return folded(cells[-1].rstrip(), first, " " * before).rstrip()

    top = [line(header), line(["-" * width for width in widths])] if header else []
    return "\n".join([*top, *map(line, body)])


def as_text(tables: Iterable[Table], lines: Sequence[str] = ()) -> str:
    """Write tables for a terminal, then `lines`."""
    parts = []
    for table in tables:
        note = [folded(line, "  ", "  ") for line in table.note.splitlines()]
        parts.append("\n".join([table.title, columns(table.header, table.rows), *note]))
    parts += ["\n".join(map(folded, lines))] if lines else []
    return "\n\n".join(parts)


def verdict_first(lines: Sequence[str], tables: Iterable[Table]) -> str:
    """Write sentences for a terminal, then the tables that they were made from."""
    return "\n\n".join(part for part in (as_text((), lines), as_text(tables)) if part)


def as_markdown(tables: Iterable[Table]) -> str:
    """Write tables as the sections of a report."""
    parts = [f"## {escape(t.title)}\n\n{escape(t.note)}\n\n{grid(t)}" for t in tables]
    return "\n\n".join(parts)


def grid(table: Table) -> str:
    """Write a table's header and rows in Markdown, without its title."""
    lines = ["| " + " | ".join(map(_literal, row)) + " |" for row in (table.header, *table.rows)]
    return "\n".join([lines[0], "|" + "---|" * len(table.header), *lines[1:]])


def escape(text: str) -> str:
    """Write text so that Markdown shows it literally, on one line, also where a line begins."""
    return re.sub(r"^(\d*)([-+=.)])", r"\1\\\2", _literal(text))


def _literal(text: str) -> str:
    """The text inside a line or a table, where a leading mark begins no list and no heading."""
    text = " ".join(visible(text).split())
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    text = re.sub(r"([\\`*_\[\]|~$#!{}])", r"\\\1", text)
    # An address would become a link by itself.
    return text.replace("://", "&#58;//").replace("www.", "www&#46;").replace("@", "&#64;")


def visible(text: str) -> str:
    """Drop control characters, and marks that change the direction or hide text."""
    return "".join(
        c for c in text if c in "\n\t" or unicodedata.category(c) not in ("Cc", "Cf", "Cs", "Co")
    )
