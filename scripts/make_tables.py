"""Write the tables of methods, loaders and retrieval tasks: in docs/methods.md, loaders.md,
loaders-in-detail.md, reference/gguf-support.md, reference/tasks.md.

    python scripts/make_tables.py

A test fails when a file and the code differ.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

# This script's own tree, whichever ropext is installed.
sys.path.insert(0, str(Path(__file__).parents[1]))

from ropext.families.loaders.table import LoaderVersions, TableCell, loader_table, readers
from ropext.scaling import METHODS, Method
from ropext.tasks import TASKS, Task, TaskWithWording

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- generated: begin -->", "<!-- generated: end -->"

_MARKS = {"engine": "", "source": "†", "function": "‡", "thread": "§"}

# Kinds of dict that ropext writes or that are common on the hub; the rest is in the lists.
_MAIN = (
    "theta",
    "linear",
    "llama3",
    "yarn",
    "yarn-custom",
    "longrope",
    "longrope-two-sets",
    "longrope-custom",
    "dynamic",
    "v5-only",
)


# Kinds that ropext writes, and the loaders that have a column in the table by family.
_WRITTEN = ("theta", "linear", "llama3", "yarn", "yarn-custom", "longrope", "longrope-custom")
_ENGINES = ("transformers", "vllm", "sglang", "llama.cpp", "mlx", "exllamav3")


def methods() -> str:
    """Return the tables of docs/methods.md."""
    lines = ["| method | what it does | saved as rope type | paper |", "|---|---|---|---|"]
    lines += [f"| `{m.name}` | {m.summary} | {m.carried} | {m.paper} |" for m in METHODS.values()]
    lines += ["", "| method | knob | default | meaning |", "|---|---|---|---|"]
    for method in METHODS.values():
        lines += _knobs(method)
    return "\n".join(lines) + "\n"


def _knobs(method: Method) -> list[str]:
    return [
        f"| `{method.name}` | `{'--' + knob.name.replace('_', '-')}` | {_shown(knob.default)} | "
        f"{knob.metadata['help']} |"
        for knob in fields(method.knobs)
        if knob.name != "short_pair_factors"  # comes in the file of --pair-factors
    ]


def _shown(default: Any) -> str:
    if isinstance(default, bool):
        return "yes" if default else "no"
    return "-" if default is None else f"{default:g}"


# What a loader reads of the forms that ropext writes: the first letter whose forms it all has.
_LETTERS = {
    "A": ("all of them", _WRITTEN),
    "D": (
        "all except a custom attention factor",
        ("theta", "linear", "llama3", "yarn", "longrope"),
    ),
    "R": (
        "theta, linear, llama3 and yarn with its default attention factor; not longrope",
        ("theta", "linear", "llama3", "yarn"),
    ),
    "Y": ("theta, linear and yarn with its default attention factor", ("theta", "linear", "yarn")),
    "y": ("theta and yarn with its default attention factor", ("theta", "yarn")),
    "L": ("theta, linear and llama3", ("theta", "linear", "llama3")),
    "l": ("theta and linear", ("theta", "linear")),
    "t": ("only theta", ("theta",)),
    "s": ("some form, but not theta", ()),
}
_NOTHING, _UNKNOWN = "-", "."


def letters() -> str:
    """Return the table of docs/loaders.md."""
    columns = _columns()
    lines = [f"| {letter} | {text} |" for letter, (text, _) in _LETTERS.items()]
    lines += [f"| {_NOTHING} | none |", f"| {_UNKNOWN} | not measured |", ""]
    lines += ["| family | " + " | ".join(map(_title, columns)) + " |"]
    lines += ["|---" * (len(columns) + 1) + "|"]
    for family in ["llama", *_families_read(columns)]:
        stock = columns[0].families.get(family, {})
        cells = [_letter(column.families.get(family, {}), stock) for column in columns]
        lines.append(f"| `{family}` | " + " | ".join(cells) + " |")
    return "\n".join(["| letter | is read exactly |", "|---|---|", *lines]) + "\n"


def _letter(cells: Mapping[str, TableCell], stock: Mapping[str, TableCell]) -> str:
    """Return the letter for the forms that a family can carry: a form that stock refuses is no
    loss."""
    if "theta" not in cells:
        return _UNKNOWN
    carried = [kind for kind in _WRITTEN if kind not in stock or stock[kind].verdict == "same"]
    known = [kind for kind in carried if kind in cells]
    read = {kind for kind in known if cells[kind].verdict == "same"}
    if not read:
        return _NOTHING
    fits = (name for name, (_, forms) in _LETTERS.items() if read >= {*known} & {*forms})
    return next(fits) + _MARKS[cells["theta"].evidence]


def loaders() -> str:
    """Return the tables of docs/loaders-in-detail.md."""
    parts = [_legend(), "### Llama\n\n" + _table("llama")]
    parts += ["### Why, and which flag\n", *(_reasons(reader) for reader in readers())]
    parts += ["### By family: what each engine reads as stock transformers 5\n", _by_family()]
    parts += ["### Other families\n", *(_families(reader) for reader in readers())]
    return "\n".join(part for part in parts if part).rstrip() + "\n"


def _legend() -> str:
    rows = "\n".join(f"| `{kind}` | {text} |" for kind, text in loader_table()["kinds"].items())
    return f"| kind | what the config holds |\n|---|---|\n{rows}\n"


def _columns() -> list[LoaderVersions]:
    """Return the loaders that read other families than Llama."""
    return [r for r in readers() if r.loader in _ENGINES and r.families.keys() > {"llama"}]


def _families_read(columns: Sequence[LoaderVersions]) -> list[str]:
    """Return the families, without Llama, that some loader other than transformers reads."""
    others = [column for column in columns if column.loader != "transformers"]
    read = {f for other in others for f, cells in other.families.items() if "theta" in cells}
    return sorted(read - {"llama"})


def _by_family() -> str:
    """Return the table of the forms that ropext writes, for the families that several loaders
    read."""
    columns = _columns()
    lines = [
        "| family | " + " | ".join(map(_title, columns)) + " |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for family in _families_read(columns):
        cells = [_forms_read(column.families.get(family, {})) for column in columns]
        lines.append(f"| `{family}` | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _forms_read(cells: Mapping[str, TableCell]) -> str:
    known = [kind for kind in _WRITTEN if kind in cells]
    read = [kind for kind in known if cells[kind].verdict == "same"]
    if "theta" not in known:
        return "not measured"
    word = "all" if read == known else ", ".join(read) or "**none**"
    return word + _MARKS[cells["theta"].evidence]


def _title(reader: LoaderVersions) -> str:
    return f"{reader.loader} {reader.versions}"


def _table(family: str) -> str:
    lines = ["| loader | " + " | ".join(_MAIN) + " |", "|---" * (len(_MAIN) + 1) + "|"]
    for reader in readers():
        if reader.narrow and family not in reader.families:
            continue
        cells = reader.families.get(family, {})
        words = [_word(cells.get(kind)) for kind in _MAIN]
        lines.append(f"| {_title(reader)} | " + " | ".join(words) + " |")
    return "\n".join(lines) + "\n"


def _word(cell: TableCell | None) -> str:
    if cell is None:
        return "not measured"
    word = cell.verdict if cell.verdict == "same" else f"**{cell.verdict}**"
    return word + _MARKS[cell.evidence] + ("\\*" if cell.flag or cell.needs else "")


def _reasons(reader: LoaderVersions) -> str:
    """Return a list of the reasons in the cells of Llama; kinds with the same reason share a
    line."""
    kinds = dict[tuple[str, str, str], list[str]]()
    for kind, cell in reader.families.get("llama", {}).items():
        if cell.verdict != "same" or cell.why or cell.flag:
            kinds.setdefault((cell.verdict, cell.why, cell.flag), []).append(_kind(kind, cell))
    lines = [
        f"- {', '.join(names)}: {'; '.join(filter(None, (verdict, why, _flag(flag))))}"
        for (verdict, why, flag), names in kinds.items()
    ]
    if not lines:
        return ""
    return f"**{_title(reader)}**\n\n" + "\n".join(lines) + "\n"


def _kind(kind: str, cell: TableCell) -> str:
    return f"`{kind}`" + _MARKS[cell.evidence]


def _flag(flag: str) -> str:
    return f"`{flag.replace('{', '<').replace('}', '>')}`" if flag else ""


def _families(reader: LoaderVersions) -> str:
    """Return a list of the families other than Llama; families that read alike share an entry."""
    alike: dict[tuple[tuple[str, TableCell], ...], list[str]] = {}
    for family, cells in reader.families.items():
        if family != "llama":
            alike.setdefault(tuple(cells.items()), []).append(family)
    return "\n".join(_group(reader, names, dict(cells)) for cells, names in alike.items())


def _group(reader: LoaderVersions, names: Sequence[str], cells: Mapping[str, TableCell]) -> str:
    verdicts: dict[tuple[str, str], list[str]] = {}
    for kind, cell in cells.items():
        why = "" if cell.verdict == "same" and not cell.needs else cell.why
        verdicts.setdefault((cell.verdict, why), []).append(_kind(kind, cell))
    lines = [
        f"- {verdict}: {', '.join(kinds)}" + (f" ({why})" if why else "")
        for (verdict, why), kinds in verdicts.items()
    ]
    listed = ", ".join(f"`{name}`" for name in names)
    head = f"**{reader.loader} {reader.measured[names[0]]}**: {listed}\n\n"
    return head + "\n".join(lines) + "\n"


def tasks() -> str:
    """Return the table of docs/reference/tasks.md."""
    lines = ["| `--tasks` | what is asked | asked in |", "|---|---|---|"]
    for task in TASKS:
        lines.append(f"| `{task.name}` | {task.summary} ({task.details}) | {_asked_in(task)} |")
    return "\n".join(lines) + "\n"


def _asked_in(task: Task) -> str:
    if task.in_words:
        return "words"
    if isinstance(task, TaskWithWording):
        return "token ids; of a server in words"
    return "token ids"


_FILE_KINDS = ("theta", "linear", "yarn", "freqs", "factors")


def gguf() -> str:
    """Return the tables of docs/reference/gguf-support.md."""
    data = json.loads((ROOT / "ropext/loaders/gguf.json").read_text("utf-8"))
    return "\n".join([*_architectures(data), "", *_refused(data), "", *_programs()]) + "\n"


def _architectures(data: Mapping[str, Any]) -> list[str]:
    """Return the table of the forms that llama.cpp carries for each architecture."""
    lines = [
        "| architecture | model type | theta | linear | yarn | any frequencies | attention factor "
        "| full-attention layers | evidence |",
        "|---" * 9 + "|",
    ]
    for name, row in data["architectures"].items():
        adds = row.get("adds", [])
        lacks = row.get("lacks", [])
        types = [
            row["type"],
            *row.get("also", []),
            *([row["windowed"]] if "windowed" in row else []),
        ]
        divisors = [kind for kind in ("freqs", "factors") if kind in adds]
        layers = f"one of {row['every']}" if row.get("every", 1) > 1 else "all"
        if row.get("every") == 1:
            layers = "as the file lists them"
        cells = [
            f"`{name}`",
            ", ".join(f"`{kind}`" for kind in types),
            *(_yes(kind not in lacks) for kind in ("theta", "linear", "yarn")),
            " and ".join(f"`{_TENSORS[kind]}`" for kind in divisors) or "no",
            _yes("attn" not in lacks),
            layers,
            row.get("evidence", "run") + (f" of {row['only']} alone" if "only" in row else ""),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


_TENSORS = {"freqs": "rope_freqs", "factors": "rope_factors"}


def _yes(is_so: bool) -> str:
    return "yes" if is_so else "no"


def _refused(data: Mapping[str, Any]) -> list[str]:
    """Return the table of the architectures that ropext refuses by name, with the reason."""
    lines = ["| refused | architectures |", "|---|---|"]
    for reason, names in data["refused"].items():
        lines.append(f"| {reason} | {', '.join(f'`{name}`' for name in names)} |")
    return lines


def _programs() -> list[str]:
    """Return the table of each program's reading of a file, by architecture."""
    lines = [
        "| program | version | architectures | theta | linear | yarn | `rope_freqs` "
        "| `rope_factors` | evidence |",
        "|---" * 9 + "|",
    ]
    for reader in readers("gguf_readers"):
        groups = dict[tuple[str, ...], list[str]]()
        for family, cells in reader.families.items():
            row = tuple(_of_file(cells, kind) for kind in _FILE_KINDS)
            groups.setdefault((*row, cells["theta"].evidence), []).append(family)
        for row, families in groups.items():
            named = ", ".join(f"`{family}`" for family in families)
            if len(families) > 16:
                named = f"{len(families)} architectures" if len(groups) > 1 else "all"
            told = [f"`{reader.loader}`", reader.versions, named, *row]
            lines.append(f"| {' | '.join(told)} |")
    return lines


def _of_file(cells: Mapping[str, TableCell], kind: str) -> str:
    """Return a verdict, and the one with an attention factor if it differs."""
    verdict = cells[kind].verdict
    other = cells[f"{kind}-attn"].verdict
    return verdict if other == verdict else f"{verdict}; with an attention factor: {other}"


TABLES = {
    "docs/methods.md": methods,
    "docs/loaders.md": letters,
    "docs/loaders-in-detail.md": loaders,
    "docs/reference/gguf-support.md": gguf,
    "docs/reference/tasks.md": tasks,
}


def renewed(name: str) -> str:
    """Return a page with its table as it should be."""
    before, rest = (ROOT / name).read_text("utf-8").split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n{TABLES[name]()}{END}{after}"


def main() -> None:
    """Write every page, or none."""
    pages = {name: renewed(name) for name in TABLES}
    for name, text in pages.items():
        (ROOT / name).write_text(text, "utf-8")


if __name__ == "__main__":
    main()
