"""Write a report as Markdown and as one self-contained HTML file. The HTML has no script and no
remote reference, and a policy that forbids both. Every text that came from a model, a corpus or a
path is escaped."""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from ropext.base.atomic import write_text
from ropext.base.table import Table, as_markdown
from ropext.base.table import escape as literal

Pictures = Mapping[str, tuple[str, bytes]]  # file in the folder -> caption, PNG
STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #222; background: #fff;
  max-width: 72rem; margin: 2rem auto; padding: 0 1.2rem; }
h1 { font-size: 1.5rem; margin-bottom: .2rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .2rem; }
p.note { color: #666; margin: .1rem 0 .6rem; max-width: 60rem; white-space: pre-line; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .8rem; text-align: right; border-bottom: 1px solid #e3e3e3;
  white-space: nowrap; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
th { border-bottom: 2px solid #999; font-weight: 600; }
img { max-width: 100%; height: auto; display: block; margin: .5rem 0 1.5rem; }
ul.verdicts { padding-left: 1.1rem; } ul.verdicts li { margin: .3rem 0; }
ul.warnings { color: #8a4b00; padding-left: 1.1rem; }
pre { background: #f5f5f5; padding: .7rem; overflow-x: auto; font-size: 13px; }
"""


@dataclass(frozen=True)
class Page:
    """A whole report except its pictures."""

    title: str
    subtitle: str
    verdicts: Sequence[str] = ()
    warnings: Sequence[str] = ()
    tables: Sequence[Table] = ()
    details: str = ""  # what exactly was run


def write_page(folder: Path, page: Page, pictures: Pictures) -> None:
    """Write report.md and report.html."""
    lines = [f"# {literal(page.title)}", "", literal(page.subtitle), ""]
    for verdict in page.verdicts:
        lines.append(f"- {literal(verdict)}")
    for warning in page.warnings:
        lines.append(f"- Note: {literal(warning)}")
    lines += ["", as_markdown(page.tables), ""]
    for name, (caption, _) in pictures.items():
        lines.append(f"![{literal(caption)}]({name})\n")
    write_text(folder / "report.md", "\n".join(lines).rstrip() + "\n")
    write_text(folder / "report.html", page_html(page, dict(pictures.values())))


def page_html(page: Page, pictures: Mapping[str, bytes]) -> str:
    """Return the whole report.html; `pictures` maps a caption to PNG bytes."""
    # Exactly this style sheet may apply, and nothing may be fetched from anywhere.
    allowed = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; img-src data:; style-src 'sha256-{allowed}'; "
        "base-uri 'none'; form-action 'none'"
    )
    body = [
        f"<h1>{escape(page.title)}</h1>",
        f'<p class="note">{escape(page.subtitle)}</p>',
        _html_list("verdicts", page.verdicts),
        _html_list("warnings", page.warnings),
    ]
    tables = [table_html(table) for table in page.tables]
    body += tables[:1]
    for caption, data in pictures.items():
        body.append(_html_picture(caption, data))
    body += tables[1:]
    body.append(f"<h2>What exactly was run</h2><pre>{escape(page.details)}</pre>")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(page.title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(part for part in body if part)
        + "\n</body>\n</html>\n"
    )


def _html_list(kind: str, lines: Sequence[str]) -> str:
    """Return the verdicts or warnings of report.html as a list; "" if there are none."""
    if not lines:
        return ""
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f'<ul class="{kind}">{items}</ul>'


def table_html(table: Table) -> str:
    """Return a table under its title, as report.html has it."""
    rows = "".join(f"<tr>{_html_cells('td', row)}</tr>" for row in table.rows)
    return (
        f'<h2>{escape(table.title)}</h2><p class="note">{escape(table.note)}</p>'
        f'<div class="scroll"><table><thead><tr>{_html_cells("th", table.header)}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _html_cells(element: str, cells: Sequence[str]) -> str:
    """Return the cells of a table's row for report.html."""
    return "".join(f"<{element}>{escape(cell)}</{element}>" for cell in cells)


def _html_picture(caption: str, data: bytes) -> str:
    """Return a PNG for report.html, inside the page."""
    coded = base64.b64encode(data).decode()
    return f'<img alt="{escape(caption)}" src="data:image/png;base64,{coded}">'
