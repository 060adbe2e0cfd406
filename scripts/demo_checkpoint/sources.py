"""Read the text that every machine with Python has: the standard library's sources, split by
package.

A held-out package has no sibling in training: all its files are held out. A top-level module counts
as a package of its own. A file is dropped if most of its lines are in an earlier file.
"""

import sysconfig
from dataclasses import dataclass
from pathlib import Path

HELD_OUT = (
    "argparse",
    "asyncio",
    "difflib",
    "email",
    "html",
    "logging",
    "sqlite3",
    "statistics",
    "tarfile",
    "unittest",
    "wsgiref",
    "xml",
    "zoneinfo",
)
"""Packages that training never sees; the bundled evaluation documents come from here."""

SKIPPED_FOLDERS = {
    "__pycache__",
    "_bundled",
    "idle_test",
    "lib-dynload",
    "site-packages",
    "dist-packages",
    "test",
    "tests",
}
"""Not on every machine, not text, or (the tests) siblings of every held-out package."""

SEEN_SHARE = 0.5
"""A file with more than this share of its lines in earlier files is a near-duplicate."""


@dataclass(frozen=True)
class Document:
    """One source file."""

    path: str
    package: str
    text: str


def library() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def read_documents(root: Path) -> list[Document]:
    """Return every source file under `root`, in path order, near-duplicates dropped."""
    documents = []
    seen: set[str] = set()
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        folders = set(relative.parts[:-1])
        if folders & SKIPPED_FOLDERS or any(name.startswith("config-") for name in folders):
            continue
        if relative.name.startswith("_sysconfigdata"):
            continue  # the build's own paths, different on every machine
        text = read_source(path)
        lines = [line.strip() for line in text.splitlines() if len(line.strip()) > 8]
        if not lines or sum(line in seen for line in lines) > SEEN_SHARE * len(lines):
            continue
        seen.update(lines)
        documents.append(Document(relative.as_posix(), package_of(relative), text))
    return documents


def read_source(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return path.read_text(encoding="latin-1")


def package_of(relative: Path) -> str:
    """Return the package: `email/message.py` belongs to `email`, `_strptime.py` to `strptime`."""
    return relative.parts[0].removesuffix(".py").lstrip("_")


def split(documents: list[Document]) -> tuple[list[Document], list[Document]]:
    """Training documents and held-out ones."""
    training = [document for document in documents if document.package not in HELD_OUT]
    held_out = [document for document in documents if document.package in HELD_OUT]
    return training, held_out
