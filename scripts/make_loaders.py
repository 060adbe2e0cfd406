"""Merge the known facts about loaders into the table that the package reads, and renew its pages.

    python scripts/make_loaders.py

scripts/loaders/facts.json holds facts written by hand, each with its versions and its evidence.
scripts/loaders/measured.json holds the engines' answers, and only scripts/loaders/measure.py writes
it. A measured verdict gets the words of a fact with the same verdict, in its own family or for a
Llama. If a fact contradicts a measurement or another fact, nothing is written: narrow its versions,
remove it, or write "over" into its cell, with the verdict that it overrides. A fact about versions
without a column makes a range of its own, which is listed for the families of that fact alone.
"""

import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

# This script's own tree, whichever ropext is installed.
sys.path.insert(0, str(Path(__file__).parents[1]))

from ropext.families.loaders.lookup import NEEDS
from ropext.families.loaders.table import NEVER, Version, VersionSpan, after, version_of

ROOT = Path(__file__).parents[1]
GGUF = ROOT / "ropext" / "loaders" / "gguf.json"
FACTS = ROOT / "scripts" / "loaders" / "facts.json"
MEASURED = ROOT / "scripts" / "loaders" / "measured.json"
TABLE = ROOT / "ropext" / "loaders" / "table.json"

RANGE = re.compile(r"\d+(\.\d+)*(-(\d+(\.\d+)*)?)?")
VERDICTS = ("same", "different", "ignored", "error", "not measured")
FACT_KEYS = {"loader", "versions", "evidence", "origin", "ran", "families", "cells"}
CELL_KEYS = {"is", "why", "flag", "evidence", "origin", "needs", "otherwise", "over"}
RAN = ("engine", "function")  # the evidence that needs no origin: something was run
COPIED = ("aliases", "file_readers", "evidence", "methods", "kinds")
# What a server announces in the place of the target, as serving.py counts it.
ANNOUNCED = ("target times factor", "original length")
SERVE = ("serve_directories", "serve_files")
# The ways in which a GGUF carries its spectrum; "-attn": with an attention factor of its own.
CARRIERS = ("theta", "linear", "yarn", "freqs", "factors")

Json = Mapping[str, Any]


class Refused(Exception):
    """Facts that are not well formed, or that contradict one another or a measurement."""


@dataclass(frozen=True)
class Cell:
    """What one fact or measurement says of a kind of dict in a family."""

    verdict: str
    why: str = ""
    flag: str = ""
    evidence: str = "engine"
    needs: str = ""
    otherwise: str = "different"
    over: str = ""  # the verdict that this one overrides
    spans: tuple[VersionSpan, ...] = ()  # the versions of the fact

    def told_as(self, fact: "Cell") -> "Cell":
        """Return this measured verdict with the words and conditions of a fact with the same
        verdict.

        The flag comes from the measurement: if the length is right, none is needed.
        """
        words = fact
        if fact.flag and self.verdict == "same" and not self.flag:
            words = self
        return Cell(
            verdict=self.verdict,
            why=words.why,
            flag=words.flag,
            evidence=self.evidence,
            needs=fact.needs,
            otherwise=fact.otherwise,
            spans=fact.spans,
        )

    def to_json(self, evidence: str) -> str | dict[str, str]:
        """Return the cell as the table has it, in a group of that evidence."""
        out = {"is": self.verdict}
        for key in ("why", "flag", "needs"):
            if getattr(self, key):
                out[key] = getattr(self, key)
        if self.otherwise != "different":
            out["otherwise"] = self.otherwise
        if self.evidence != evidence:
            out["evidence"] = self.evidence
        return self.verdict if len(out) == 1 else out


@dataclass(frozen=True)
class Fact:
    """What is known of one loader in some versions and families."""

    loader: str
    spans: tuple[VersionSpan, ...]  # empty for a loader whose versions have no numbers
    families: tuple[str, ...]
    ran: str
    cells: Mapping[str, Cell]

    def holds_in(self, spans: Sequence[VersionSpan]) -> bool:
        """Return whether the fact is about these versions; they are all inside or all outside of
        its own."""
        if not self.spans:
            return not spans
        return any(own.overlaps(span) for own in self.spans for span in spans)


@dataclass(frozen=True)
class Column:
    """The versions of a loader that share one column."""

    loader: str
    label: str
    spans: tuple[VersionSpan, ...]
    composites: bool = False


@dataclass
class Reader:
    """One loader in one range of versions, as the table has it."""

    column: Column
    label: str
    spans: tuple[VersionSpan, ...]
    facts: tuple[Fact, ...]
    narrow: bool = False
    families: dict[str, dict[str, Cell]] = field(default_factory=dict)
    ran: dict[str, str] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)


def spans_of(text: str) -> tuple[VersionSpan, ...]:
    """Return the spans of "0.8, 0.11", "4.51-4.57" or "0.30-", which has no end."""
    spans = list[VersionSpan]()
    for part in filter(None, text.replace(" ", "").split(",")):
        low, dash, high = part.partition("-")
        first = version_of(low)
        if high:
            end = after(version_of(high))
        else:
            end = NEVER if dash else after(first)
        if not RANGE.fullmatch(part) or not first < end:
            raise Refused(f"versions {text!r}: {part!r} is no range of versions, such as 0.30-0.33")
        spans.append(VersionSpan(first, end))
    return tuple(spans)


def label_of(spans: Sequence[VersionSpan]) -> str:
    """Return the name of a range: the versions as people write them."""
    parts = list[str]()
    for span in spans:
        first = ".".join(map(str, span.first))
        if span.end == NEVER:
            parts.append(f"{first} or newer")
        elif span.end == after(span.first):
            parts.append(first)
        elif span.end[-1] > 0:
            last = ".".join(map(str, (*span.end[:-1], span.end[-1] - 1)))
            parts.append(f"{first}-{last}")
        else:
            parts.append(f"{first} to before {'.'.join(map(str, span.end))}")
    return ", ".join(parts)


def dotted(version: Version) -> str:
    """Return a version as the table has it; an end that never comes is empty."""
    return "" if version == NEVER else ".".join(map(str, version))


def columns_of(data: Json) -> list[Column]:
    columns = list[Column]()
    for row in data["columns"]:
        spans = spans_of(row["versions"])
        columns.append(Column(row["loader"], row["label"], spans, row.get("composites", False)))
    return columns


def facts_of(data: Json, columns: Sequence[Column]) -> list[Fact]:
    """Return the facts, each checked; the error for a mistake names its loader and families."""
    facts = list[Fact]()
    for row in data["facts"]:
        try:
            facts.append(_fact(row, data, columns))
        except Refused as why:
            names = ", ".join(row.get("families", ()))
            raise Refused(f"a fact of {row.get('loader')} ({names[:60]}): {why}") from None
    return facts


def _fact(row: Json, data: Json, columns: Sequence[Column]) -> Fact:
    if row.keys() - FACT_KEYS:
        raise Refused(f"unknown keys {sorted(row.keys() - FACT_KEYS)}")
    for key in ("loader", "evidence", "families", "cells"):
        if not row.get(key):
            raise Refused(f"it lacks {key!r}")
    has_versions = any(own.loader == row["loader"] and own.spans for own in columns)
    known = {column.loader for column in columns}
    if row["loader"] not in known:
        raise Refused(f"no column is of this loader; there are {', '.join(sorted(known))}")
    if has_versions and not row.get("versions"):
        raise Refused("it needs versions, such as 0.30- or 0.8, 0.11")
    if not has_versions and row.get("versions"):
        raise Refused("no versions")
    spans = spans_of(row.get("versions", ""))
    cells = {kind: _cell(kind, cell, row, data, spans) for kind, cell in row["cells"].items()}
    return Fact(row["loader"], spans, tuple(row["families"]), row.get("ran", ""), cells)


def _cell(
    kind: str, cell: str | Json, fact: Json, data: Json, spans: tuple[VersionSpan, ...]
) -> Cell:
    said: Json = {"is": cell} if isinstance(cell, str) else cell
    if kind not in data["kinds"]:
        raise Refused(f"no kind is called {kind!r}; there are {', '.join(data['kinds'])}")
    if said.keys() - CELL_KEYS:
        raise Refused(f"{kind}: unknown keys {sorted(said.keys() - CELL_KEYS)}")
    evidence = said.get("evidence", fact["evidence"])
    if evidence not in ("engine", *data["evidence"]):
        raise Refused(f"{kind}: nothing is known by {evidence!r}")
    if evidence not in RAN and not (said.get("origin") or fact.get("origin")):
        raise Refused(f"{kind}: what was not run needs its origin, where it stands")
    for key in ("is", "otherwise", "over"):
        if said.get(key, "same") not in VERDICTS:
            raise Refused(f"{kind}: {key} is one of {', '.join(VERDICTS)}")
    if said.get("needs") and said["needs"] not in NEEDS:
        raise Refused(f"{kind}: needs is one of {', '.join(NEEDS)}")
    if said["is"] != "same" and not said.get("why"):
        raise Refused(f"{kind}: {said['is']} says why")
    return Cell(
        verdict=said["is"],
        why=said.get("why", ""),
        flag=said.get("flag", ""),
        evidence=evidence,
        needs=said.get("needs", ""),
        otherwise=said.get("otherwise", "different"),
        over=said.get("over", ""),
        spans=spans,
    )


def readers_of(columns: Sequence[Column], facts: Sequence[Fact]) -> list[Reader]:
    """Return the ranges of versions: each column, cut if a fact begins or ends inside, and after a
    loader's columns the versions that only facts are about."""
    readers = list[Reader]()
    for loader in dict.fromkeys(column.loader for column in columns):
        mine = [column for column in columns if column.loader == loader]
        known = [fact for fact in facts if fact.loader == loader]
        for column in mine:
            pieces = _joined(_cut(column.spans, known), known) or [()]
            for spans in pieces:
                label = column.label if len(pieces) == 1 else label_of(spans)
                holding = tuple(fact for fact in known if fact.holds_in(spans))
                readers.append(Reader(column, label, spans, holding))
        listed = [span for column in mine for span in column.spans]
        every = [span for fact in known for span in fact.spans]
        for spans in _joined(_cut(_outside(every, listed), known), known):
            column = Column(loader, label_of(spans), spans)
            holding = tuple(fact for fact in known if fact.holds_in(spans))
            readers.append(Reader(column, column.label, spans, holding, narrow=True))
    return readers


def _cut(spans: Iterable[VersionSpan], facts: Iterable[Fact]) -> list[VersionSpan]:
    """Return the same versions in pieces: no fact holds in a part of a piece."""
    bounds = set[Version]()
    for fact in facts:
        for span in fact.spans:
            bounds |= {span.first, span.end}
    pieces = list[VersionSpan]()
    for span in spans:
        inside = [bound for bound in sorted(bounds) if span.first < bound < span.end]
        for first, end in zip([span.first, *inside], [*inside, span.end], strict=True):
            pieces.append(VersionSpan(first, end))
    return pieces


def _joined(pieces: Iterable[VersionSpan], facts: Sequence[Fact]) -> list[tuple[VersionSpan, ...]]:
    """Join the pieces in which the same facts hold; the newest come first."""
    together = dict[tuple[int, ...], list[VersionSpan]]()
    for piece in pieces:
        holding = tuple(k for k, fact in enumerate(facts) if fact.holds_in([piece]))
        spans = together.setdefault(holding, [])
        if spans and spans[-1].end == piece.first:
            piece = VersionSpan(spans.pop().first, piece.end)
        spans.append(piece)
    groups = [tuple(spans) for spans in together.values()]
    return sorted(groups, key=lambda spans: spans[-1].first, reverse=True)


def _outside(spans: Iterable[VersionSpan], listed: Sequence[VersionSpan]) -> list[VersionSpan]:
    """Return the versions of these spans that are in none of the others."""
    bounds = set[Version]()
    for span in (*spans, *listed):
        bounds |= {span.first, span.end}
    ordered = sorted(bounds)
    pieces = [VersionSpan(first, end) for first, end in pairwise(ordered)]
    return [
        piece
        for piece in pieces
        if any(piece.overlaps(span) for span in spans)
        and not any(piece.overlaps(span) for span in listed)
    ]


# A cell of one fact: loader, family, kind, and the versions of the fact.
Place = tuple[str, str, str, tuple[VersionSpan, ...]]


def merge(data: Json, measured: Json) -> Json:
    """Return the table of these facts and measurements; Refused names the contradictions."""
    columns = columns_of(data)
    facts = facts_of(data, columns)
    readers = readers_of(columns, facts)
    names = {f"{column.loader} {column.label}" for column in columns}
    if measured.keys() - names:
        raise Refused(f"no column is called {sorted(measured.keys() - names)}")
    contradictions = list[str]()
    stood = set[Place]()
    for reader in readers:
        merging = Merging(reader, contradictions, stood)
        for fact in reader.facts:
            merging.add_fact(fact)
        if not reader.narrow:
            merging.add_measured(measured.get(f"{reader.column.loader} {reader.column.label}", {}))
    contradictions += _idle(facts, stood)
    if contradictions:
        raise Refused("\n".join(dict.fromkeys(contradictions)))
    files = json.loads(GGUF.read_text("utf-8"))
    _check_programs(data, files)
    _check_serve_lines(data, columns)
    table = {key: data[key] for key in COPIED}
    table["readers"] = [_reader_json(reader) for reader in readers]
    table["gguf_readers"] = [_reader_json(_of_files(row, files)) for row in data["programs"]]
    return table | {key: data[key] for key in SERVE}


def _check_programs(data: Json, files: Json) -> None:
    """Check the facts about programs that run files; the error for a mistake names the program."""
    names = {"*", *files["architectures"], *files["experts"].values()}
    for row in files["architectures"].values():
        names |= {row["type"], row.get("windowed", row["type"]), *row.get("also", ())}
    kinds = {"*", "attn", *CARRIERS}
    for program in data["programs"]:
        about = list[str]()
        for fact in program.get("facts", ()):
            about += fact["families"]
            unknown = {*fact["families"]} - names
            if fact.keys() != {"families", "cells"} or unknown or fact["cells"].keys() - kinds:
                raise Refused(
                    f"a fact of {program['loader']} ({', '.join(fact['families'])}): of a program "
                    "that runs files a fact has families (architectures of gguf.json, their types, "
                    f'or "*") and cells by what carries the spectrum ({", ".join(sorted(kinds))})'
                )
            for kind, cell in fact["cells"].items():
                if not isinstance(cell, str) and cell.keys() - CELL_KEYS:
                    keys = sorted(cell.keys() - CELL_KEYS)
                    raise Refused(f"a fact of {program['loader']}: {kind} has unknown keys {keys}")
                said = _measured_cell(cell, "source")
                if said.verdict not in VERDICTS or (said.verdict != "same" and not said.why):
                    raise Refused(f"a fact of {program['loader']}: {kind} is no verdict with a why")
        twice = sorted({family for family in about if about.count(family) > 1})
        if twice:
            raise Refused(
                f"{program['loader']} has two facts about {', '.join(twice)}: the second would"
                " hide the first"
            )


def _check_serve_lines(data: Json, columns: Sequence[Column]) -> None:
    """Check the templates of serve lines: their loaders, and the length that a server announces."""
    loaders = {column.loader for column in columns}
    programs = {program["loader"] for program in data["programs"]}
    for template in data["serve_directories"]:
        name = template["loader"]
        if template.get("reading", name) not in loaders:
            raise Refused(f"the serve line of {name}: no column has {template['reading']!r}")
        unknown = {*template.get("announces", {}).values()} - {*ANNOUNCED}
        if unknown:
            raise Refused(f"{name} announces {unknown}; known are {', '.join(ANNOUNCED)}")
    for template in data["serve_files"]:
        if template["loader"] not in programs:
            raise Refused(f"{template['loader']} has a serve line of files, and is no program")


def _of_files(program: Json, files: Json) -> Reader:
    """Return a program that runs GGUF files, with a cell for each architecture and each carrier of
    a spectrum.

    The architecture's type in transformers is listed if it decides.
    """
    column = Column(program["loader"], program["label"], ())
    reader = Reader(column, program["label"], (), ())
    for name, row in files["architectures"].items():
        types = dict.fromkeys((row["type"], *row.get("also", ())))
        for more in (row.get("windowed"), files["experts"].get(name)):
            if more:
                types[more] = None
        cells = {each: _file_cells(program, name, row, each) for each in types}
        reader.families[name] = cells[row["type"]]
        for each, own in cells.items():
            if own != cells[row["type"]]:
                reader.families[f"{name}/{each}"] = own
    reader.ran = dict.fromkeys(reader.families, program["label"])
    return reader


def _file_cells(program: Json, name: str, row: Json, text_type: str) -> dict[str, Cell]:
    """Return a program's cells for an architecture: from facts about its type, about itself, or
    about all."""
    known = _known_of(program, text_type, name)
    is_first = "evidence" not in program  # llama.cpp, whose evidence is the architecture's
    evidence = row.get("evidence", "engine") if is_first else program["evidence"]
    cells = dict[str, Cell]()
    for carrier in CARRIERS:
        why = program.get("why", "")
        if is_first:
            why = program["why"].get(carrier, carrier)
        for kind, asked in ((carrier, (carrier, "*")), (f"{carrier}-attn", ("attn", carrier, "*"))):
            said = next(
                (known[each] for each in asked if each in known), {"is": "same", "why": why}
            )
            cell = _measured_cell(said, evidence)
            cells[kind] = (
                cell if cell.verdict != "same" else _by_its_one_program(cell, program, name, row)
            )
    return cells


def _known_of(program: Json, *names: str) -> Json:
    """Return the cells of the first of these names that a fact is about, else of all families."""
    by_family = dict[str, Json]()
    for fact in program.get("facts", ()):
        by_family |= dict.fromkeys(fact["families"], fact["cells"])
    return next((by_family[name] for name in (*names, "*") if name in by_family), {})


def _by_its_one_program(cell: Cell, program: Json, name: str, row: Json) -> Cell:
    """Turn the cell of an architecture that one program alone knows into an error for the
    others."""
    only = row.get("only", "").lower()
    if not only:
        return cell
    why = f"knows no architecture {name}"
    if program["loader"] == only:
        why = f"reads its own blob, but `ollama create` refuses a copy: llama-quantize {why}"
    return Cell("error", why, evidence=cell.evidence)


def _idle(facts: Sequence[Fact], stood: set[Place]) -> list[str]:
    """Return a sentence about each cell whose "over" overrides nothing, because the contradiction
    is gone."""
    idle = list[str]()
    for fact in facts:
        for family in fact.families:
            for kind, cell in fact.cells.items():
                if cell.over and (fact.loader, family, kind, cell.spans) not in stood:
                    where = f"{fact.loader} {label_of(fact.spans)}, {family}, {kind}"
                    idle.append(f'{where}: its "over": "{cell.over}" stands over nothing')
    return idle


@dataclass
class Merging:
    """One reader while its cells come together."""

    reader: Reader
    contradictions: list[str]
    stood: set[Place]  # the cells that override another

    def refuse(self, family: str, kind: str, what: str) -> None:
        """Note a contradiction, to go on and find the others."""
        where = f"{self.reader.column.loader} {self.reader.label}"
        self.contradictions.append(f"{where}, {family}, {kind}: {what}")

    def add_fact(self, fact: Fact) -> None:
        for family in fact.families:
            cells = self.reader.families.setdefault(family, {})
            self.reader.ran.setdefault(family, fact.ran or self.reader.label)
            for kind, cell in fact.cells.items():
                other = cells.get(kind)
                if other is None or cell.over == other.verdict:
                    cells[kind] = cell
                    if other is not None:
                        self.stood.add((self.reader.column.loader, family, kind, cell.spans))
                elif other.over == cell.verdict:
                    self.stood.add((self.reader.column.loader, family, kind, other.spans))
                else:
                    self.refuse(
                        family,
                        kind,
                        f"one fact says {cell.verdict}, another {other.verdict}: narrow the "
                        f'versions of one, take one out, or write "over": "{other.verdict}" into '
                        "the one that holds",
                    )

    def add_measured(self, column: Json) -> None:
        """Add what engines answered. The versions that ran decide which facts that is about."""
        self.reader.failed = column.get("failed", {})
        for group in column.get("groups", ()):
            evidence = group.get("evidence", column["evidence"])
            ran = group.get("versions", column["versions"])
            for family in group["families"]:
                cells = self.reader.families.setdefault(family, {})
                for kind, said in group["cells"].items():
                    cell = _measured_cell(said, evidence)
                    known = cells.get(kind)
                    if known is None:
                        cells[kind] = self._in_words_of_llama(kind, cell)
                    else:
                        cells[kind] = self._held_against(known, cell, family, kind, ran)
                self.reader.ran.setdefault(family, ran)

    def _in_words_of_llama(self, kind: str, cell: Cell) -> Cell:
        fact = self.reader.families.get("llama", {}).get(kind)
        if fact is None or fact.verdict != cell.verdict:
            return cell
        return cell.told_as(fact)

    def _held_against(self, fact: Cell, cell: Cell, family: str, kind: str, ran: str) -> Cell:
        """Return the cell of a fact that was measured, too."""
        if fact.over == cell.verdict:
            self.stood.add((self.reader.column.loader, family, kind, fact.spans))
            return fact
        if fact.verdict == cell.verdict:
            return cell.told_as(fact)
        versions = [version_of(text) for text in re.findall(r"\d+(?:\.\d+)+", ran)]
        about = any(span.first <= own < span.end for span in fact.spans for own in versions)
        if about or not versions or not fact.spans:
            self.refuse(
                family,
                kind,
                f"a fact says {fact.verdict} ({fact.why or 'no why'}), {ran} was measured to be "
                f"{cell.verdict}: narrow the versions of the fact, take it out, or write "
                f'"over": "{cell.verdict}" into its cell',
            )
        return fact


def _measured_cell(said: str | Json, evidence: str) -> Cell:
    cell: Json = {"is": said} if isinstance(said, str) else said
    return Cell(cell["is"], cell.get("why", ""), cell.get("flag", ""), evidence)


def _reader_json(reader: Reader) -> Json:
    """Return a reader as the table has it: families that read alike form one group."""
    groups = list[dict[str, Any]]()
    for family, cells in reader.families.items():
        evidence = next(iter(cells.values())).evidence
        rows = {kind: cell.to_json(evidence) for kind, cell in cells.items()}
        group = {"versions": reader.ran[family], "evidence": evidence, "cells": rows}
        for known in groups:
            if known == group | {"families": known["families"]}:
                known["families"].append(family)
                break
        else:
            groups.append({"families": [family], **group})
    spans = [[dotted(span.first), dotted(span.end)] for span in reader.spans]
    return {
        "loader": reader.column.loader,
        "versions": reader.label,
        "spans": spans,
        "composites": reader.column.composites,
        "narrow": reader.narrow,
        "groups": groups,
        "failed": reader.failed,
    }


def text_of(table: Json) -> str:
    """Return the table as its file holds it, which no one edits."""
    return json.dumps(table, indent=1, ensure_ascii=False) + "\n"


def main() -> int:
    """Write the table, then the pages; nothing where something is contradicted."""
    data = json.loads(FACTS.read_text("utf-8"))
    measured = json.loads(MEASURED.read_text("utf-8"))
    try:
        table = merge(data, measured)
    except Refused as why:
        print(f"{TABLE.relative_to(ROOT)} is not written:\n{why}", file=sys.stderr)
        return 1
    TABLE.write_text(text_of(table), "utf-8")
    import make_tables  # late: it reads the table

    make_tables.main()
    return 0


if __name__ == "__main__":
    sys.exit(main())
