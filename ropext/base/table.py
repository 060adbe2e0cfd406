"""Define one table and its formats: columns, Markdown, LaTeX, CSV, dicts.

Cells may come from a model, a corpus or a path. Markdown shows them literally, so that they bring
neither HTML nor Markdown. In LaTeX they bring no command, in CSV no formula.
"""

import csv
import io
import re
import textwrap
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Self

Format = Literal["csv", "latex", "markdown"]
BLANK = "-"  # a cell without a value


class Number(str):
    """A cell that is a number: a str, as tables print it, that keeps the number and its
    interval."""

    value: float
    ci95: tuple[float, float] | None

    def __new__(cls, text: str, value: float, ci95: tuple[float, float] | None = None) -> Self:
        """Make a cell of any table from the text of a number. Keep the number and its interval."""
        cell = super().__new__(cls, text)
        cell.value = value
        cell.ci95 = ci95
        return cell


class Marked(str):
    """A cell that names a model with a remark: a str, as tables print it, that keeps both."""

    name: str
    remark: str

    def __new__(cls, name: str, remark: str) -> Self:
        """Make a cell of any table from the name of a model and a remark on it."""
        cell = super().__new__(cls, f"{name} ({remark})")
        cell.name = name
        cell.remark = remark
        return cell


@dataclass(frozen=True)
class Table:
    """Rows under a header, with a title and a note."""

    title: str
    note: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def with_rows(tables: Iterable[Table]) -> list[Table]:
    """Return the tables that have rows; a printed page shows no empty table."""
    return [table for table in tables if table.rows]


WIDTH = 120  # characters of a printed line
HIDDEN = ("Cc", "Cf", "Cs", "Co")  # categories of Unicode: control, format, surrogate, private


def wrapped_line(text: str, first: str = "", rest: str = "  ") -> str:
    """Wrap a line of any table or message at its spaces, to 120 columns. `first` begins the first
    row, `rest` each further one."""
    if len(first + text) <= WIDTH:
        return first + text
    room = max(WIDTH - max(len(first), len(rest)), 20)
    lines = textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False)
    return first + f"\n{rest}".join(lines)


@dataclass(frozen=True)
class Padding:
    """The width and alignment of one column."""

    width: int
    is_numeric: bool

    def padded(self, cell: str) -> str:
        """Pad a table cell to the width of its column: numbers to the right, words to the left."""
        return cell.rjust(self.width) if self.is_numeric else cell.ljust(self.width)


GAP = "  "  # between columns
LEAST_LAST = 20  # characters of the last column, which is folded if it is too wide
NUMERIC = re.compile(r"[-+]?(\d|inf$)|-?$")
WHOLE_NUMBER = re.compile(r"[-+]?\d[\d.]*(e[-+]?\d+)?")


def columns(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table as text with columns padded to their widest cell. Fold the last column if it
    is too wide; leave out an empty header."""
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
    """Return the width of each column of a table, and whether all of its cells are numbers."""
    count = len(header) if header else len(body[0])
    layout = list[Padding]()
    before = 0  # characters in front of the column
    for k in range(count):
        cells = [row[k] for row in body]
        width = max(map(len, [header[k], *cells] if header else cells))
        if k == count - 1:
            width = min(width, max(WIDTH - before, LEAST_LAST))
        before += width + len(GAP)
        layout.append(Padding(width, _is_numeric(cells)))
    return layout


def _is_numeric(cells: Sequence[str]) -> bool:
    """Return whether all cells of a table's column are numbers or blank."""
    return bool(cells) and all(map(NUMERIC.match, cells))


def _line(layout: Sequence[Padding], row: Sequence[str]) -> str:
    """Return one row of a text table with its cells padded to their columns."""
    cells = [column.padded(cell) for column, cell in zip(layout, row, strict=True)]
    first = "".join(cell + GAP for cell in cells[:-1])
    indent = " " * sum(column.width + len(GAP) for column in layout[:-1])
    return wrapped_line(cells[-1].rstrip(), first, indent).rstrip()


def as_text(tables: Iterable[Table], lines: Sequence[str] = ()) -> str:
    """Return the tables of any command as the text for a terminal, then `lines`."""
    parts = list[str]()
    for table in tables:
        part = f"{table.title}\n{columns(table.header, table.rows)}"
        for line in table.note.splitlines():
            part += "\n" + wrapped_line(line, "  ", "  ")
        parts.append(part)
    if lines:
        parts.append("\n".join(map(wrapped_line, lines)))
    return "\n\n".join(parts)


def verdict_first(lines: Sequence[str], tables: Iterable[Table]) -> str:
    """Format the sentences of any command as text for a terminal, then its tables in padded
    columns."""
    parts = [as_text((), lines), as_text(tables)]
    return "\n\n".join(filter(None, parts))


def as_markdown(tables: Iterable[Table]) -> str:
    """Return tables as sections of a Markdown page."""
    parts = list[str]()
    for table in tables:
        parts.append(f"## {escape(table.title)}")
        parts += map(escape, table.note.splitlines())
        parts.append(grid(table))
    return "\n\n".join(parts)


def grid(table: Table) -> str:
    """Return a table's header and rows in Markdown, without its title."""
    lines = [_markdown_row(table.header), "|" + "---|" * len(table.header)]
    for row in table.rows:
        lines.append(_markdown_row(row))
    return "\n".join(lines)


def _markdown_row(row: Sequence[str]) -> str:
    """Return one row of a Markdown table."""
    return "| " + " | ".join(map(_literal, row)) + " |"


def escape(text: str) -> str:
    """Escape a text so that Markdown shows it literally, on one line, even at the beginning of a
    line."""
    return re.sub(r"^(\d*)([-+=.)])", r"\1\\\2", _literal(text))


def _literal(text: str) -> str:
    """Escape any text inside a line or a table of Markdown, in which a leading mark begins no list
    and no heading."""
    text = " ".join(visible(text).split())
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    text = re.sub(r"([\\`*_\[\]|~$#!{}])", r"\\\1", text)
    # An address would become a link by itself.
    return text.replace("://", "&#58;//").replace("www.", "www&#46;").replace("@", "&#64;")


Record = dict[str, str | float | None]
REMARK = "remark"  # a column for programs: the remarks on models


def records(table: Table) -> list[Record]:
    """Return a dict for each row of a table, with None for a blank cell. Numbers stay numbers; the
    ends of their intervals get names that end in `low` and `high`. Remarks have a column of their
    own."""
    heads = _heads(table.header)
    with_interval = set[str]()
    with_remark = set[str]()
    for row in table.rows:
        for head, cell in zip(heads, row, strict=True):
            if isinstance(cell, Number) and cell.ci95 is not None:
                with_interval.add(head)
            elif isinstance(cell, Marked):
                with_remark.add(head)
    listed = list[Record]()
    for row in table.rows:
        record = Record()
        for head, cell in zip(heads, row, strict=True):
            record[head] = _content(cell)
            if head in with_remark:
                record[REMARK] = cell.remark if isinstance(cell, Marked) else None
            if head not in with_interval:
                continue
            record[f"{head} low"] = None
            record[f"{head} high"] = None
            if isinstance(cell, Number) and cell.ci95 is not None:
                record[f"{head} low"] = cell.ci95[0]
                record[f"{head} high"] = cell.ci95[1]
        listed.append(record)
    return listed


def _heads(header: Sequence[str]) -> list[str]:
    """Return a name for each column of a table: a column without one is called model, and equal
    names are numbered."""
    heads = list[str]()
    for place, head in enumerate(header):
        name = head or "model"
        if before := header[:place].count(head):
            name += f" {before + 1}"
        heads.append(name)
    return heads


def _content(cell: str) -> str | float | None:
    """Return the value of a table's cell for CSV and dicts: a number, a model's name, a text, or
    None if it is blank."""
    if isinstance(cell, Number):
        return cell.value
    if cell in ("", BLANK):
        return None
    return cell.name if isinstance(cell, Marked) else str(cell)


def as_csv(tables: Iterable[Table]) -> str:
    """Return tables as CSV with a header; if there are several, a line with its title precedes
    each."""
    written = list(tables)
    parts = list[str]()
    for table in written:
        stream = io.StringIO()
        rows = records(table)
        writer = csv.writer(stream, lineterminator="\n")
        if len(written) > 1:
            writer.writerow([_harmless(f"# {table.title}")])
        writer.writerow(map(_harmless, rows[0]))
        for row in rows:
            writer.writerow(map(_harmless, row.values()))
        parts.append(stream.getvalue().rstrip("\n"))
    return "\n\n".join(parts)


def _harmless(content: str | float | None) -> str | float | None:
    """Return a CSV cell that no spreadsheet takes for a formula."""
    if not isinstance(content, str):
        return content
    text = _one_line(content)
    if text.startswith(("=", "+", "-", "@")) and not WHOLE_NUMBER.fullmatch(text):
        return f"'{text}"
    return text


def _one_line(text: str) -> str:
    """Return a text on one line, without invisible characters, for a cell of CSV or LaTeX."""
    return " ".join(visible(text).split())


def as_latex(tables: Iterable[Table]) -> str:
    """Return tables as LaTeX for a paper that uses the package booktabs; title and note are
    comments."""
    parts = list[str]()
    for table in tables:
        lines = [f"% {_one_line(table.title)}"]
        for line in table.note.splitlines():
            lines.append(f"% {_one_line(line)}")
        sides = list[str]()
        for place in range(len(table.header)):
            cells = [row[place] for row in table.rows]
            sides.append("r" if _is_numeric(cells) else "l")
        lines += [f"\\begin{{tabular}}{{{''.join(sides)}}}", "\\toprule"]
        lines += [_latex_row(table.header), "\\midrule"]
        lines += map(_latex_row, table.rows)
        lines += ["\\bottomrule", "\\end{tabular}"]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _latex_row(row: Sequence[str]) -> str:
    """Return one row of a LaTeX table."""
    text = " & ".join(map(_latex, row)) + r" \\"
    # A bracket after the `\\` of the row before would be its argument.
    return f"{{}}{text}" if text.startswith("[") else text


# What LaTeX would obey, and the signs of numbers.
LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "…": r"\dots{}",
    "<": "$<$",
    ">": "$>$",
    "|": "$|$",
}
for mark in "&%$#_{}":
    LATEX[mark] = f"\\{mark}"


def _latex(cell: str) -> str:
    """Escape a table cell for LaTeX."""
    text = "".join(LATEX.get(character, character) for character in _one_line(cell))
    if cell != BLANK and NUMERIC.match(cell):
        text = text.replace("-", "$-$")
    return text


def in_format(tables: Iterable[Table], name: Format) -> str:
    """Return tables as the text that `--format` names: csv, latex or markdown."""
    if name == "csv":
        return as_csv(tables)
    if name == "latex":
        return as_latex(tables)
    return as_markdown(tables)


def visible(text: str) -> str:
    """Remove control characters from a text to print or write, and marks that change the direction
    or hide text."""
    kept = list[str]()
    for character in text:
        if character in "\n\t" or unicodedata.category(character) not in HIDDEN:
            kept.append(character)
    return "".join(kept)
