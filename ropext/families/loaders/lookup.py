"""Sort rope dicts into the kinds that are the rows of the loader table, and look up a dict and the
loaders that a user names."""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from ropext.base.errors import NotMeasured, UsageError, did_you_mean
from ropext.base.jsontext import untagged_float
from ropext.families.loaders.table import (
    LoaderVersions,
    TableCell,
    Verdict,
    loader_table,
    readers,
    span_of,
    spans_in,
)
from ropext.scaling import forms
from ropext.scaling.forms import Params

# A release, a build (b6789) or a commit.
_VERSION = re.compile(r"[\w.+-]*\d[\w.+-]*", re.ASCII)
# A dict can be of several kinds at once; the first verdict in this order counts.
_WORST_FIRST: tuple[Verdict, ...] = ("error", "different", "ignored", "not measured", "same")


def _attn_factor_agrees(params: Params) -> bool:
    """Return whether the attn_factor of a config's rope dict, which multiplies yarn's default,
    agrees with attention_factor."""
    product = params.get("attn_factor", 1.0) * forms.mscale(params["factor"])
    return forms.agree(product, forms.read_attention_factor(params))


def _mscales_agree(params: Params) -> bool:
    """Return whether a config's rope dict has short_mscale and long_mscale, equal to the attention
    factor."""
    for key in ("short_mscale", "long_mscale"):
        scale = params.get(key)
        if scale is None or not forms.agree(scale, forms.read_attention_factor(params)):
            return False
    return True


def _betas_are_there(params: Params) -> bool:
    """Return whether a config's rope dict has both betas, which some loaders need."""
    return "beta_fast" in params and "beta_slow" in params


# Conditions of a verdict: the test of a dict, and the sentence if it fails.
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
        _betas_are_there,
        "beta_fast and beta_slow should be there, default or not",
    ),
}


def kinds_of(
    params: Params, *, length: int | None = None, v5_only: bool = False
) -> tuple[str, ...]:
    """Return every kind of a rope dict in the loader table (transformers-5 spelling), the main kind
    first.

    `length` is max_position_embeddings; `v5_only` is True if the config has rope_parameters alone.
    """
    match params.get("rope_type", "default"):
        case "default":
            kinds = ["theta"]
        case "dynamic" if params.get("alpha"):
            kinds = ["dynamic-alpha"]
        case "yarn":
            kinds = _yarn_kinds(params, length)
        case "longrope":
            kinds = _longrope_kinds(params)
        case "proportional" if params.get("factor") in (None, 1):
            kinds = ["theta"]  # Gemma 4's own layers, with another theta at the most
        case "dynamic" | "linear" | "llama3" | "proportional" as kind:
            kinds = [kind]
        case _:
            kinds = ["unknown"]
    if v5_only:
        kinds.append("v5-only")
    return tuple(kinds)


def _yarn_kinds(params: Params, length: int | None) -> list[str]:
    """Return the kinds of a yarn in the loader table: by its attention factor or betas, and by the
    keys that it lacks."""
    explicit = params.get("attention_factor")
    fast = params.get("beta_fast", forms.BETA_FAST)
    slow = params.get("beta_slow", forms.BETA_SLOW)
    main = "yarn"
    if explicit is not None and not forms.agree(explicit, forms.mscale(params["factor"])):
        main = "yarn-custom"
    elif params.get("mscale") and params.get("mscale_all_dim"):
        main = "yarn-mscale"
    elif fast != forms.BETA_FAST or slow != forms.BETA_SLOW:
        main = "yarn-betas"
    kinds = [main]
    if not params.get("truncate", True):
        kinds.append("yarn-untruncated")
    original = params.get("original_max_position_embeddings")
    if not original:
        kinds.append("yarn-no-original")
    elif length is not None and length <= original:
        kinds.append("yarn-original-length")
    # The plain row was measured with both lengths right, and does not speak for such a dict.
    if len(kinds) > 1 and main == "yarn":
        kinds = kinds[1:]
    return kinds


def _longrope_kinds(params: Params) -> list[str]:
    """Return the kinds of a longrope in the loader table."""
    two_sets = params.get("short_factor") != params.get("long_factor")
    explicit = params.get("attention_factor")
    is_custom = explicit is not None and not forms.agree(explicit, forms.default_attention(params))
    kinds = list[str]()
    if two_sets:
        kinds.append("longrope-two-sets")
    elif not is_custom:
        kinds.append("longrope")
    if _has_non_rotating_pairs(params):
        kinds.append("longrope-standing")
    if is_custom:
        kinds.append("longrope-custom")
    return kinds


def _has_non_rotating_pairs(params: Params) -> bool:
    """Return whether a longrope dict is of the loader table's kind with an infinite factor, which
    stops its rotary pair."""
    for key in ("short_factor", "long_factor"):
        for factor in params.get(key) or ():
            if untagged_float(factor) == math.inf:
                return True
    return False


@dataclass(frozen=True)
class LoaderReading:
    """The result of one loader for one checkpoint's rope config."""

    loader: str
    versions: str
    verdict: Verdict
    why: str = ""
    flag: str = ""
    evidence: str = "engine"
    # Whether `why` has more than its evidence.
    has_reason: bool = field(default=True, metadata={"json": None})


def newest(readings: Iterable[LoaderReading]) -> tuple[LoaderReading, ...]:
    """Return the reading of each loader in its newest version, which comes first in the loader
    table."""
    latest: dict[str, LoaderReading] = {}
    for reading in readings:
        latest.setdefault(reading.loader, reading)
    return tuple(latest.values())


def reads_exactly(loader: str, readings: Iterable[LoaderReading]) -> bool:
    """Return whether a loader, in its newest version, reads a rope dict as planned."""
    for reading in readings:
        if reading.loader == loader:
            return reading.verdict == "same"  # the newest comes first
    return False


def kind_in_words(kind: str) -> str:
    """Return words for the content of a config of this kind in the loader table."""
    return loader_table()["kinds"][kind]


def readers_for(family: str, model_type: str | None = None) -> tuple[LoaderVersions, ...]:
    """Return the loaders, each in a range of versions, that the table lists for a model family. It
    omits ranges with only single facts about other families."""
    listed = list[LoaderVersions]()
    for reader in readers():
        if not reader.narrow or reader.known(family, model_type) in reader.families:
            listed.append(reader)
    return tuple(listed)


def readings(
    family: str,
    params: Params,
    *,
    model_type: str | None = None,
    length: int | None = None,
    target: int | None = None,
    v5_only: bool = False,
) -> tuple[LoaderReading, ...]:
    """Return how every loader reads this dict in this family (its text part's model type).

    In a composite, `model_type` is the outer type. Loaders other than transformers were run only on
    text models, so their cells do not apply to it.
    """
    kinds = kinds_of(params, length=length, v5_only=v5_only)
    listed = list[LoaderReading]()
    for reader in readers_for(family, model_type):
        known = reader.known(family, model_type)
        listed.append(reading_in(reader, known, params, kinds, target))
    return tuple(listed)


def reading_in(
    reader: LoaderVersions,
    known: str,
    params: Params,
    kinds: tuple[str, ...],
    target: int | None = None,
) -> LoaderReading:
    """Return how a loader handles a rope dict of these kinds in the model family that it has as
    `known`."""
    cells = reader.families.get(known)
    if not cells:
        why = f"{known} was not run in it"
        if known in reader.failed:
            why = f"{known} could not be run: {reader.failed[known]}"
        return LoaderReading(reader.loader, reader.versions, "not measured", why)
    judged = [_cell_for_dict(cells.get(kind), kind, params) for kind in kinds]
    worst = min(judged, key=lambda cell: _WORST_FIRST.index(cell.verdict))
    reasons = list[str]()
    flags = list[str]()
    factor = params.get("factor") or 1.0
    for cell in judged:
        if cell.verdict == worst.verdict and cell.why and cell.why not in reasons:
            reasons.append(cell.why)
        if not cell.flag:
            continue
        flag = cell.flag.format(
            target="TARGET" if target is None else target,
            beta_fast=format(params.get("beta_fast", forms.BETA_FAST), "g"),
            beta_slow=format(params.get("beta_slow", forms.BETA_SLOW), "g"),
            attention_ratio=format(
                forms.read_attention_factor(params) / forms.mscale(factor), ".7g"
            ),
        )
        if flag not in flags:
            flags.append(flag)
    why = "; ".join(reasons)
    behind = loader_table()["evidence"].get(worst.evidence)
    if behind is not None:  # no engine read a model
        why = f"{why} ({behind})".strip()
    return LoaderReading(
        loader=reader.loader,
        versions=reader.measured[known],
        verdict=worst.verdict,
        why=why,
        flag=" ".join(flags),
        evidence=worst.evidence,
        has_reason=bool(reasons),
    )


def _cell_for_dict(cell: TableCell | None, kind: str, params: Params) -> TableCell:
    """Return the cell of the loader table for this very rope dict: "same" can depend on keys that
    other people omit."""
    if cell is None:
        return TableCell("not measured", f"{kind_in_words(kind)}: not run in it")
    if not cell.needs:
        return cell
    is_met, lack = NEEDS[cell.needs]
    if is_met(params):
        return cell
    why = lack
    if cell.why:
        why = f"{cell.why}; {lack}"
    return TableCell(cell.otherwise, why, cell.flag)


def _covers_version(reader: LoaderVersions, version: str) -> bool:
    """Return whether a loader's version that a user names is in a range of the loader table, or
    begins a version in it."""
    if reader.versions.split()[0] == version:  # a commit has no other name
        return True
    named = span_of(version)
    spans = reader.spans or spans_in(reader.versions)
    return any(span.overlaps(named) for span in spans)


def loader_of(name: str) -> str:
    """Return the loader that a user means, without its version."""
    aliases = loader_table()["aliases"]
    loader = aliases.get(name.lower(), name.lower()).partition("==")[0]
    return aliases.get(loader, loader)


def names_for() -> list[str]:
    """Return the names that --for takes, as its error and docs/loaders.md list them."""
    loaders = dict.fromkeys(reader.loader for reader in readers())
    return [*loaders, "transformers4", "lm-studio", *loader_table()["file_readers"]]


def select(name: str) -> tuple[LoaderVersions, ...]:
    """Return the version ranges of a loader that a name of --for means: NAME is the newest range,
    NAME==VERSION the ranges with that version."""
    loader = loader_of(name)
    aliases = loader_table()["aliases"]
    file_readers = loader_table()["file_readers"]
    if loader in file_readers:
        why = file_readers[loader] or "for a directory, --for llama.cpp covers its converter"
        raise UsageError(
            f"--for {name} needs a GGUF file as MODEL (ropext plan MODEL.gguf --for {loader});"
            f" {why}"
        )
    mine = [reader for reader in readers() if reader.loader == loader]
    if not mine:
        known = names_for()
        meant = did_you_mean(loader, [*known, *aliases], "none has a name like it;")
        raise UsageError(f"--for {name!r}: no such loader; {meant} known are {', '.join(known)}")
    return _readers_of_version(name, mine)


def select_file(name: str) -> tuple[LoaderVersions, ...]:
    """Return the programs for GGUF files that a name of --for means, as `select` does for
    directories."""
    loader = loader_of(name)
    mine = [reader for reader in readers("gguf_readers") if reader.loader == loader]
    if not mine:
        known = ", ".join(reader.loader for reader in readers("gguf_readers"))
        raise UsageError(f"--for {name}: it was not measured with GGUF files; these were: {known}")
    versions = mine[0].versions
    for reader in readers():  # this table has the version numbers of llama.cpp's commit
        if (reader.loader, reader.versions) == (loader, versions):
            mine = [replace(mine[0], spans=reader.spans)]
    return _readers_of_version(name, mine)


def _readers_of_version(name: str, mine: Sequence[LoaderVersions]) -> tuple[LoaderVersions, ...]:
    """Return the first of a loader's version ranges, or the ranges with the version of
    NAME==VERSION."""
    _, is_stated, version = loader_table()["aliases"].get(name.lower(), name).partition("==")
    if not is_stated:
        return (mine[0],)
    ranges = ", ".join(reader.versions for reader in mine)
    if not _VERSION.fullmatch(version):
        raise UsageError(f"--for {name!r}: a version is in numbers; measured are {ranges}")
    fitting = tuple(reader for reader in mine if _covers_version(reader, version))
    if not fitting:
        raise NotMeasured(f"--for {name!r}: this version was not measured; measured are {ranges}")
    return fitting


def parse_for(text: str) -> tuple[str, ...]:
    """Return ("vllm", "llama.cpp") for the names "vllm,llama.cpp" of --for. Each must be a loader
    in the table of how engines read a config."""
    names = list[str]()
    for part in text.split(","):
        name = part.strip()
        if name and name not in names:
            names.append(name)
    if not names:
        raise UsageError("--for wants the names of loaders, such as vllm,llama.cpp")
    for name in names:
        if loader_of(name) not in loader_table()["file_readers"]:
            select(name)
    return tuple(names)


def unmeasured(name: str, family: str, params: Params, *, model_type: str | None = None) -> str:
    """Return which part of such a rope dict was not measured in a loader, and the nearest facts.
    These are the kind in another family, and this family with the plain form."""
    reader = select(name)[0]
    known = reader.known(family, model_type)
    cells = reader.families.get(known, {})
    missing = [kind for kind in kinds_of(params) if kind not in cells]
    column = f"{reader.loader} {reader.versions}"
    if not cells or not missing:
        parts = [f"{column}: {known} was not run in it"]
    else:
        parts = [f"{column}: of {known}, {kind_in_words(missing[0])} was not run"]
        plain = cells.get(str(params["rope_type"]))
        if plain is not None:
            parts.append(f"its plain {params['rope_type']} was ({plain.verdict})")
    if missing:
        elsewhere = reader.families.get("llama", {}).get(missing[0])
        if elsewhere is not None and elsewhere.verdict != "not measured":
            parts.append(f"of a llama it is read ({elsewhere.verdict})")
    return ", ".join(parts)


def nearest_exact(
    name: str, family: str, params: Params, *, start: str = "", model_type: str | None = None
) -> str:
    """Return the options for the nearest form that this loader reads exactly; "" if it has none.

    Nearest: yarn for a dict with a temperature, else llama3. The product of two scalings has none
    of these forms: `start` are the options by which a model that is scaled already starts from its
    original spectrum.
    """
    methods = loader_table()["methods"]
    order = list(methods)
    if forms.agree(forms.read_attention_factor(params), 1.0):
        order = ["llama3", "yarn", "theta", "linear"]
    mine = kinds_of(params)
    for kind in order:
        if kind not in mine and _all_read_kind(name, family, kind, model_type):
            return f"{start}--method {methods[kind]}"
    return ""


def _all_read_kind(name: str, family: str, kind: str, model_type: str | None) -> bool:
    """Return whether each version of a loader that a name means reads a kind of rope dict
    exactly."""
    for reader in select(name):
        cell = reader.families.get(reader.known(family, model_type), {}).get(kind)
        if cell is None or cell.verdict != "same":
            return False
    return True
