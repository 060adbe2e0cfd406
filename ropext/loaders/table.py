"""The loader table: lookups in table.json and engines.json, which hold what was measured and
nothing else; the second is written by scripts/loaders, from engines that ran.

A cell says what one loader's version range makes of one kind of rope dict in one group of families.
A family or a kind without a cell is "not measured"; nothing is inferred from a similar one.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from ropext import forms
from ropext.errors import UsageError, did_you_mean
from ropext.forms import Params


def close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=forms.EXACT)


def attention(params: Params) -> float:
    """The attention factor that transformers reads; 0 where the dict leaves it to a length."""
    if params.get("attention_factor") is not None:
        return float(params["attention_factor"])
    if params.get("factor") is None:
        return 0.0
    if params["rope_type"] == "longrope" and not params.get("original_max_position_embeddings"):
        return 0.0
    return forms.default_attention(params)


def _attn_factor_agrees(params: Params) -> bool:
    """attn_factor multiplies yarn's default where attention_factor replaces it."""
    attn = params.get("attn_factor")
    if not params.get("factor"):
        return attn in (None, 1)
    return close(
        (1.0 if attn is None else attn) * forms.mscale(params["factor"]), attention(params)
    )


def _mscales_agree(params: Params) -> bool:
    """short_mscale and long_mscale are there and equal the attention factor."""
    scales = (params.get("short_mscale"), params.get("long_mscale"))
    return all(s is not None and close(s, attention(params)) for s in scales)


# What a verdict can hang on: whether a dict has it, and what to say where it lacks that.
NEEDS: dict[str, tuple[Callable[[Params], bool], str]] = {
    "attn_factor": (
        _attn_factor_agrees,
        "attn_factor should be there and agree with the attention factor",
    ),
    "mscales": (
        _mscales_agree,
        "short_mscale and long_mscale should be there and agree with the attention factor",
    ),
    "betas": (
        lambda params: {"beta_fast", "beta_slow"} <= params.keys(),
        "beta_fast and beta_slow should be there, default or not",
    ),
}


def kinds_of(
    params: Params, *, length: int | None = None, v5_only: bool = False
) -> tuple[str, ...]:
    """Every kind that a rope dict (transformers-5 spelling) is of, the main one first.

    `length` is max_position_embeddings; `v5_only` says that the config has rope_parameters alone.
    """
    match params.get("rope_type", "default"):
        case "default":
            kinds = ["theta"]
        case "dynamic":
            kinds = ["dynamic-alpha" if params.get("alpha") else "dynamic"]
        case "yarn":
            kinds = _yarn_kinds(params, length)
        case "longrope":
            kinds = _longrope_kinds(params)
        case "proportional" if params.get("factor") in (None, 1):
            kinds = ["theta"]  # Gemma 4's own layers, with another theta at the most
        case "linear" | "llama3" | "proportional" as kind:
            kinds = [kind]
        case _:
            kinds = ["unknown"]
    return (*kinds, "v5-only") if v5_only else tuple(kinds)


def _yarn_kinds(params: Params, length: int | None) -> list[str]:
    betas = (params.get("beta_fast") or 32.0, params.get("beta_slow") or 1.0)
    factor = params.get("factor")
    explicit = params.get("attention_factor")
    default = forms.mscale(factor) if factor else None
    kinds = []
    if explicit is not None and (default is None or not close(explicit, default)):
        kinds.append("yarn-custom")
    elif params.get("mscale") and params.get("mscale_all_dim"):
        kinds.append("yarn-mscale")
    elif betas != (forms.BETA_FAST, forms.BETA_SLOW):
        kinds.append("yarn-betas")
    else:
        kinds.append("yarn")
    if not params.get("truncate", True):
        kinds.append("yarn-untruncated")
    original = params.get("original_max_position_embeddings")
    if not original:
        kinds.append("yarn-no-original")
    elif length is not None and length <= original:
        kinds.append("yarn-original-length")
    # The plain row was measured with both lengths right, and does not speak for such a dict.
    return kinds if len(kinds) == 1 else [kind for kind in kinds if kind != "yarn"]


def _longrope_kinds(params: Params) -> list[str]:
    kinds = ["longrope"]
    if params.get("short_factor") != params.get("long_factor"):
        kinds = ["longrope-two-sets"]
    pairs = (*(params.get("short_factor") or ()), *(params.get("long_factor") or ()))
    if math.inf in map(forms.decoded, pairs):
        kinds.append("longrope-standing")
    if params.get("attention_factor") is None:
        return kinds
    default = attention({**params, "attention_factor": None})
    if not close(params["attention_factor"], default):
        kinds = [k for k in kinds if k != "longrope"] + ["longrope-custom"]
    return kinds


def kind_of(params: Params) -> str:
    """The row of the table that a rope dict belongs to."""
    return kinds_of(params)[0]


Verdict = Literal["same", "different", "ignored", "error", "not measured"]

# A dict can be of several kinds at once; the first verdict in this order is the one that counts.
_WORST_FIRST: tuple[Verdict, ...] = ("error", "different", "ignored", "not measured", "same")

_DATA: dict[str, Any] = json.loads(Path(__file__).with_name("table.json").read_text("utf-8"))

KINDS: dict[str, str] = _DATA["kinds"]

# What users also type for a loader of the table.
_ALIASES: dict[str, str] = _DATA["aliases"]

# Those whose rows are in gguf.json, which read no directory; why they should not, where one would.
FILE_READERS: dict[str, str] = _DATA["file readers"]

# What stands behind a cell where no engine read a model.
_EVIDENCE: dict[str, str] = _DATA["evidence"]

# The method that gives each kind, in the order in which they are offered for one another.
_METHODS: dict[str, str] = _DATA["methods"]


@dataclass(frozen=True)
class TableCell:
    """What was found for one kind of rope dict."""

    verdict: Verdict
    why: str = ""
    flag: str = ""  # what to pass to the loader; {target} and the like are filled in
    evidence: str = "engine"  # or a key of _EVIDENCE
    needs: str = ""  # the verdict holds where these keys agree with the attention factor ...
    otherwise: Verdict = "different"  # ... and this one where they do not


@dataclass(frozen=True)
class LoaderVersions:
    """One loader in one version range, with the cells of every family that was run in it."""

    loader: str
    versions: str
    spans: tuple[tuple[str, str], ...]  # first and last version of each span, for NAME==VERSION
    composites: bool  # its cells for a text model also speak for a composite around that model
    families: Mapping[str, Mapping[str, TableCell]]  # family -> kind -> cell
    measured: Mapping[str, str]  # family -> the versions it was run in
    failed: Mapping[str, str]  # family -> why it could not be run

    def known(self, family: str, model_type: str | None) -> str:
        """The name under which a model was run here, if it was: a composite's with its text part's,
        or one of the two."""
        whole = f"{model_type}/{family}"
        if whole in self.families or whole in self.failed:
            return whole
        if model_type is None or (self.composites and model_type not in self.families):
            return family
        return model_type


@dataclass(frozen=True)
class LoaderReading:
    """What one loader makes of one checkpoint's rope config."""

    loader: str
    versions: str
    verdict: Verdict
    why: str = ""
    flag: str = ""
    evidence: str = "engine"


@cache
def readers() -> tuple[LoaderVersions, ...]:
    """The table's loaders and version ranges, the newest of each loader first."""
    path = Path(__file__).with_name("engines.json")
    engines = json.loads(path.read_text("utf-8"))
    return tuple(
        _reader(entry, engines.get(f"{entry['loader']} {entry['versions']}", {}))
        for entry in _DATA["readers"]
    )


def _reader(entry: Mapping[str, Any], engine: Mapping[str, Any]) -> LoaderVersions:
    families: dict[str, dict[str, TableCell]] = {}
    measured: dict[str, str] = {}
    for group in entry["groups"]:
        evidence = group.get("evidence", entry.get("evidence", "engine"))
        cells = {kind: as_cell(cell, evidence) for kind, cell in group["cells"].items()}
        for family in group["families"]:
            families.setdefault(family, {}).update(cells)
            measured.setdefault(family, group.get("versions", entry["versions"]))
    for group in engine.get("groups", ()):
        evidence = group.get("evidence", engine["evidence"])
        by_kind = {kind: as_cell(cell, evidence) for kind, cell in group["cells"].items()}
        for family in group["families"]:
            known = families.setdefault(family, {})
            for kind, cell in by_kind.items():
                known[kind] = _told(cell, known.get(kind) or families["llama"].get(kind))
            measured.setdefault(family, group.get("versions", engine["versions"]))
    failed = engine.get("failed", {})
    spans = tuple((low, high) for low, high in entry["spans"])
    composites = entry.get("composites", False)
    return LoaderVersions(
        entry["loader"], entry["versions"], spans, composites, families, measured, failed
    )


def _told(cell: TableCell, known: TableCell | None) -> TableCell:
    """An engine's verdict, in the words and with the conditions of a cell that says the same."""
    if known is None or known.verdict != cell.verdict:
        return cell
    if known.flag and cell.verdict == "same" and not cell.flag:  # here the length is right
        return replace(cell, needs=known.needs, otherwise=known.otherwise)
    return replace(known, evidence=cell.evidence)


def sourced(why: str, evidence: str) -> str:
    """What is said of a cell, with what stands behind it where no engine read a model."""
    return f"{why} ({_EVIDENCE[evidence]})".strip() if evidence in _EVIDENCE else why


def as_cell(cell: str | Mapping[str, str], evidence: str) -> TableCell:
    if isinstance(cell, str):
        return TableCell(cell, evidence=evidence)  # type: ignore[arg-type]
    values: dict[str, Any] = {"evidence": evidence, **cell}
    return TableCell(values.pop("is"), **values)


def readings(
    family: str,
    params: Params,
    *,
    model_type: str | None = None,
    length: int | None = None,
    target: int | None = None,
    v5_only: bool = False,
) -> tuple[LoaderReading, ...]:
    """What every loader makes of this dict in this family (its text part's model type).

    In a composite, `model_type` is the outer type: loaders other than transformers were run on text
    models alone, so that their cells do not speak for it.
    """
    kinds = kinds_of(params, length=length, v5_only=v5_only)
    return tuple(
        _reading(reader, family, params, kinds, model_type, target) for reader in readers()
    )


def _reading(
    reader: LoaderVersions,
    family: str,
    params: Params,
    kinds: Sequence[str],
    model_type: str | None,
    target: int | None,
) -> LoaderReading:
    known = reader.known(family, model_type)
    cells = reader.families.get(known)
    if not cells:
        why = f"{known} was not run in it"
        if known in reader.failed:
            why = f"{known} could not be run: {reader.failed[known]}"
        return LoaderReading(reader.loader, reader.versions, "not measured", why)
    versions = reader.measured[known]
    judged = [_judge(cells.get(kind), kind, params) for kind in kinds]
    worst = min(judged, key=lambda cell: _WORST_FIRST.index(cell.verdict))
    why = "; ".join(dict.fromkeys(c.why for c in judged if c.verdict == worst.verdict and c.why))
    why = sourced(why, worst.evidence)
    flag = " ".join(dict.fromkeys(_filled(c.flag, params, target) for c in judged if c.flag))
    return LoaderReading(reader.loader, versions, worst.verdict, why, flag, worst.evidence)


def _judge(cell: TableCell | None, kind: str, params: Params) -> TableCell:
    """The cell for this very dict: "same" can hang on keys that other people leave out."""
    if cell is None:
        return TableCell("not measured", f"{KINDS[kind]}: not run in it")
    if cell.needs and not NEEDS[cell.needs][0](params):
        why = "; ".join(filter(None, (cell.why, NEEDS[cell.needs][1])))
        return TableCell(cell.otherwise, why, cell.flag)
    return cell


def _filled(flag: str, params: Params, target: int | None) -> str:
    factor = params.get("factor") or 1.0
    return flag.format(
        target="TARGET" if target is None else target,
        beta_fast=format(params.get("beta_fast") or forms.BETA_FAST, "g"),
        beta_slow=format(params.get("beta_slow") or forms.BETA_SLOW, "g"),
        attention_ratio=format(attention(params) / forms.mscale(factor), ".7g"),
    )


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text))


def _covers(reader: LoaderVersions, version: str) -> bool:
    """Whether a version lies in a span, compared as far as both are written: 5 is any 5.x."""
    wanted = _version(version)
    spans = [(_version(low), _version(high)) for low, high in reader.spans]
    return any(
        low[: len(wanted)] <= wanted and wanted[: len(high)] <= high[: len(wanted)]
        for low, high in spans
    )


def loader_of(name: str) -> str:
    """The loader that a user means, without its version."""
    loader = _ALIASES.get(name.lower(), name.lower()).partition("==")[0]
    return _ALIASES.get(loader, loader)


def names_for() -> list[str]:
    """The names that --for takes, as its error and docs/loaders.md list them."""
    loaders = dict.fromkeys(reader.loader for reader in readers())
    return [*loaders, "transformers4", "lm-studio", *FILE_READERS]


def select(name: str) -> tuple[LoaderVersions, ...]:
    """The readers a user means: NAME is the newest range, NAME==VERSION the one that holds it."""
    loader = loader_of(name)
    version = _ALIASES.get(name.lower(), name).partition("==")[2]
    if loader in FILE_READERS:
        why = FILE_READERS[loader] or "for a directory, --for llama.cpp covers its converter"
        raise UsageError(
            f"--for {name} needs a GGUF file as MODEL (ropext plan MODEL.gguf --for {loader});"
            f" {why}"
        )
    mine = [r for r in readers() if r.loader == loader]
    if not mine:
        known = names_for()
        meant = did_you_mean(loader, [*known, *_ALIASES], "none has a name like it;")
        raise UsageError(f"--for {name!r}: no such loader; {meant} known are {', '.join(known)}")
    if not version:
        return (mine[0],)
    fitting = tuple(r for r in mine if _covers(r, version))
    if not fitting:
        ranges = ", ".join(r.versions for r in mine)
        raise UsageError(f"--for {name!r}: this version was not measured; measured are {ranges}")
    return fitting


def parse_for(text: str) -> tuple[str, ...]:
    """The value of --for, checked: "vllm,llama.cpp" -> ("vllm", "llama.cpp")."""
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not names:
        raise UsageError("--for wants the names of loaders, such as vllm,llama.cpp")
    for name in names:
        if loader_of(name) not in FILE_READERS:
            select(name)
    return names


def exact_in(
    names: Iterable[str],
    family: str,
    params: Params,
    even_so: bool = False,
    *,
    model_type: str | None = None,
) -> bool:
    """Whether every named loader reads the dict as stock transformers 5 does.

    "Not measured" is a refusal unless `even_so`; what was seen to differ is refused always.
    """
    accepted = {"same", "not measured"} if even_so else {"same"}
    kinds = kinds_of(params)
    return all(
        _reading(reader, family, params, kinds, model_type, None).verdict in accepted
        for name in names
        for reader in select(name)
    )


def misread(name: str, family: str, params: Params, *, model_type: str | None = None) -> str:
    """Say what a loader makes of such a dict where that is known to be something else; "" where it
    is not known, or right."""
    for reader in select(name):
        reading = _reading(reader, family, params, kinds_of(params), model_type, None)
        if reading.verdict not in ("same", "not measured"):
            known = f"{reader.loader} {reader.versions} reads {params['rope_type']} scaling in"
            return f"{known} {family} otherwise ({reading.verdict}: {reading.why})"
    return ""


def unmeasured(name: str, family: str, params: Params, *, model_type: str | None = None) -> str:
    """What of such a dict is not known in a loader, and what is: the kind in another family, and
    this family with the plain form."""
    reader = select(name)[0]
    known = reader.known(family, model_type)
    cells = reader.families.get(known, {})
    missing = [kind for kind in kinds_of(params) if kind not in cells]
    told = [f"{reader.loader} {reader.versions}: {known} was not run in it"]
    if cells and missing:
        plain = cells.get(str(params["rope_type"]))
        told = [f"{reader.loader} {reader.versions}: of {known}, {KINDS[missing[0]]} was not run"]
        if plain is not None:
            told.append(f"its plain {params['rope_type']} was ({plain.verdict})")
    elsewhere = reader.families.get("llama", {}).get(missing[0]) if missing else None
    if elsewhere is not None and elsewhere.verdict != "not measured":
        told.append(f"of a llama it is read ({elsewhere.verdict})")
    return ", ".join(told)


def nearest_exact(
    name: str, family: str, params: Params, *, scaled: bool = False, model_type: str | None = None
) -> str:
    """The options that give the nearest form which this loader reads exactly; "" if it has none.

    Nearest: yarn for a dict with a temperature, else llama3. The product of two scalings has none
    of these forms, so that a model which is `scaled` already starts from its original spectrum.
    """
    order = list(_METHODS)
    if params.get("rope_type") not in ("yarn", "longrope") or close(attention(params), 1.0):
        order = ["llama3", "yarn", "theta", "linear"]
    mine = set(kinds_of(params))
    for kind in order:
        cells = [
            reader.families.get(reader.known(family, model_type), {}).get(kind)
            for reader in select(name)
        ]
        if kind not in mine and all(c is not None and c.verdict == "same" for c in cells):
            return ("--from-original " if scaled else "") + f"--method {_METHODS[kind]}"
    return ""
