"""The two hooks of mkdocs.yml: the index is the navigation, and links may leave docs/.

A link to a file outside docs/ leads into the repository if `repo_url` is set. If not, the site
shows its label as text.
"""

import posixpath
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

BRANCH = "main"
INDEX = "README.md"
FENCE = re.compile(r"(^```.*?^```$)", re.M | re.S)
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)")
HEADING = re.compile(r"^## (.+)$", re.M)


def navigation(index: str) -> list[Any]:
    """Return a section for each heading of the index. A page is in the first that links to it."""
    sections: list[Any] = [INDEX]
    seen: set[str] = set()
    parts = HEADING.split(index)
    for title, text in zip(["Pages", *parts[1::2]], parts[::2], strict=True):
        names = [target.partition("#")[0] for _, target in LINK.findall(text)]
        local = [name for name in names if re.fullmatch(r"(?!\.\.|\w+:).+\.md", name)]
        new = [name for name in dict.fromkeys(local) if name not in seen]
        seen.update(new)
        if new:
            sections.append({title: new})
    return sections


def stay(text: str, page: str, repository: str | None) -> str:
    """Return the Markdown text of a page without links to files outside docs/."""

    def rewritten(link: re.Match[str]) -> str:
        label, target = link.groups()
        place = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), target))
        if ":" in target or target.startswith("#") or place.startswith("docs/"):
            return link[0]
        return f"[{label}]({repository.rstrip('/')}/blob/{BRANCH}/{place})" if repository else label

    return outside_of_code(text, lambda part: LINK.sub(rewritten, part))


def outside_of_code(text: str, change: Callable[[str], str]) -> str:
    """Return the text with its fenced blocks as they are and all else changed."""
    parts = FENCE.split(text)
    return "".join(part if part.startswith("```") else change(part) for part in parts)


def on_config(config: Any) -> Any:
    """Take the navigation from the index."""
    config.nav = navigation((Path(config.docs_dir) / INDEX).read_text("utf-8"))
    return config


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Rewrite the links of one page that leave docs/."""
    return stay(markdown, page.file.src_uri, config.repo_url)
