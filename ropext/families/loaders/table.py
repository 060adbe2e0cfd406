"""Load the loader table: table.json, which scripts/make_loaders.py merges from measurements and
from facts known by hand.

A cell has the verdict on one loader's version range for one kind of rope dict in one group of
families. A family or a kind without a cell is "not measured"; nothing is inferred from a similar
one.
"""

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal, NotRequired, TypedDict

# Ranges of versions are compared as far as both are written: 5 is any 5.x.
Version = tuple[int, ...]
NEVER: Version = (sys.maxsize,)  # later than every version


def version_of(text: str) -> Version:
    """Return the numbers of a loader's version; an empty tuple if the text has none."""
    return tuple(int(part) for part in re.findall(r"\d+", text))


def after(version: Version) -> Version:
    """Return the first loader version that does not begin with these numbers: 5.24 after 5.23."""
    if not version:
        return NEVER
    return (*version[:-1], version[-1] + 1)


@dataclass(frozen=True)
class VersionSpan:
    """All versions from `first` on and before `end`."""

    first: Version
    end: Version

    def overlaps(self, other: "VersionSpan") -> bool:
        """Return whether a loader version is in both spans."""
        return self.first < other.end and other.first < self.end


def span_of(version: str) -> VersionSpan:
    """Return all loader versions that begin with this version."""
    numbers = version_of(version)
    return VersionSpan(numbers, after(numbers))


def spans_in(label: str) -> tuple[VersionSpan, ...]:
    """Return the loader versions that a label begins with ("0.30-0.33 (source)"); none for a
    commit."""
    first, dash, last = label.split()[0].partition("-")
    if not re.fullmatch(r"[\d.]+", first + last):
        return ()
    if not dash:
        return (span_of(first),)
    return (VersionSpan(version_of(first), after(version_of(last))),)


Verdict = Literal["same", "different", "ignored", "error", "not measured"]
WRONG: tuple[Verdict, ...] = ("different", "ignored", "error")

# A cell in JSON: a verdict, or an object that says more. `is` is a keyword of Python's classes.
CellObject = TypedDict(
    "CellObject",
    {
        "is": Verdict,
        "why": NotRequired[str],
        "flag": NotRequired[str],
        "evidence": NotRequired[str],
        "needs": NotRequired[str],
        "otherwise": NotRequired[Verdict],
    },
)
CellData = Verdict | CellObject


class GroupData(TypedDict):
    """Families with equal verdicts."""

    families: list[str]
    versions: str
    evidence: str
    cells: dict[str, CellData]


class ReaderData(TypedDict):
    """One loader in one range of versions."""

    loader: str
    versions: str
    # The first version of each, and the first that is no longer in it ("": there is none).
    spans: list[list[str]]
    composites: bool
    narrow: bool
    groups: list[GroupData]
    failed: dict[str, str]


class ServeData(TypedDict):
    """The command for a directory or a file: templates, whose names serving.py fills in."""

    loader: str
    command: str
    reading: NotRequired[str]  # the loader whose reading decides whether ropext prints it
    note: NotRequired[str]
    needed: NotRequired[str]  # printed if it takes another length for itself:
    announces: NotRequired[dict[str, str]]  # by kind, which length that is
    rewritten: NotRequired[str]  # if its converter loses a scaling that a GGUF can carry
    override: NotRequired[list[str]]  # runs the base with other keys, word by word
    environment: NotRequired[bool]  # its environment scales every file


class TableData(TypedDict):
    """The content of the file."""

    aliases: dict[str, str]  # other names that users type for a loader
    file_readers: dict[str, str]  # loaders that read no directory; why one should not, if it would
    evidence: dict[str, str]  # the basis of a cell if no engine read a model
    methods: dict[str, str]  # the method that gives each kind, the first to be offered first
    kinds: dict[str, str]
    readers: list[ReaderData]  # of directories
    gguf_readers: list[ReaderData]  # of GGUF files: its families are architectures
    serve_directories: list[ServeData]
    serve_files: list[ServeData]


_FILE = Path(__file__).parents[2] / "loaders/table.json"


@cache
def loader_table() -> TableData:
    """Return the loader table as table.json has it."""
    table: TableData = json.loads(_FILE.read_text("utf-8"))
    return table


@dataclass(frozen=True)
class TableCell:
    """The result for one kind of rope dict."""

    verdict: Verdict
    why: str = ""
    flag: str = ""  # an option to pass to the loader; {target} and the like are filled in
    evidence: str = "engine"  # or a key of the table's `evidence`
    needs: str = ""  # the verdict holds if these keys agree with the attention factor ...
    otherwise: Verdict = "different"  # ... and this one if they do not


@dataclass(frozen=True)
class LoaderVersions:
    """One loader in one version range, with the cells of every family that was run in it."""

    loader: str
    versions: str
    spans: tuple[VersionSpan, ...]  # for NAME==VERSION
    composites: bool  # its cells for a text model also speak for a composite around that model
    families: Mapping[str, Mapping[str, TableCell]]  # family -> kind -> cell
    measured: Mapping[str, str]  # family -> the versions it was run in
    failed: Mapping[str, str]  # family -> why it could not be run
    narrow: bool = False  # only single facts are known of it: it is listed for their families

    def known(self, family: str, model_type: str | None) -> str:
        """Return the name under which a loader was run with a model type, if it was. It is the
        composite's with its text part's, or either alone."""
        whole = f"{model_type}/{family}"
        if whole in self.families or whole in self.failed:
            return whole
        if model_type is None or (self.composites and model_type not in self.families):
            return family
        return model_type


@cache
def readers(
    of: Literal["readers", "gguf_readers"] = "readers",
) -> tuple[LoaderVersions, ...]:
    """Return the table's loaders of directories and their ranges of versions, the newest of each
    loader first; for "gguf_readers" the programs that run a GGUF file, llama.cpp first."""
    read = list[LoaderVersions]()
    for entry in loader_table()[of]:
        families = dict[str, dict[str, TableCell]]()
        measured = dict[str, str]()
        for group in entry["groups"]:
            cells = dict[str, TableCell]()
            for kind, cell in group["cells"].items():
                if isinstance(cell, str):
                    cells[kind] = TableCell(cell, evidence=group["evidence"])
                    continue
                cells[kind] = TableCell(
                    verdict=cell["is"],
                    why=cell.get("why", ""),
                    flag=cell.get("flag", ""),
                    evidence=cell.get("evidence", group["evidence"]),
                    needs=cell.get("needs", ""),
                    otherwise=cell.get("otherwise", "different"),
                )
            for family in group["families"]:
                families[family] = cells
                measured[family] = group["versions"]
        spans = list[VersionSpan]()
        for first, end in entry["spans"]:
            spans.append(VersionSpan(version_of(first), version_of(end) or NEVER))
        read.append(
            LoaderVersions(
                loader=entry["loader"],
                versions=entry["versions"],
                spans=tuple(spans),
                composites=entry["composites"],
                families=families,
                measured=measured,
                failed=entry["failed"],
                narrow=entry["narrow"],
            )
        )
    return tuple(read)
