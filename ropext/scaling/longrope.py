"""LongRoPE's carrier: one factor per pair (Ding et al. 2024, arXiv 2402.13753).

The factors come from a file in any of the formats in which people share them.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from ropext.base.errors import InputError, UsageError
from ropext.base.jsontext import untagged_float
from ropext.scaling.forms import Params, longrope_attention
from ropext.scaling.method import Method, Scaling
from ropext.scaling.rope import Rope


@dataclass(frozen=True)
class LongropeKnobs:
    """The factors: searched, fitted, or taken from a release."""

    pair_factors: tuple[float, ...] | None = field(
        default=None,
        metadata={
            "help": "FILE with one number per pair (JSON, CSV, or a config with long_factor)",
            "file": True,
        },
    )
    short_pair_factors: tuple[float, ...] | None = field(
        default=None,
        metadata={
            "help": "a second set for inputs within the trained context (from the same file)"
        },
    )


def _check_factors(rope: Rope, factors: tuple[float, ...], which: str) -> None:
    """Raise UsageError unless LongRoPE has one positive number of --pair-factors per rotary
    pair."""
    pairs = rope.dim // 2
    if len(factors) != pairs:
        raise UsageError(
            f"--pair-factors gives {len(factors)} {which}numbers, but this model rotates {pairs} "
            f"pairs (dim {rope.dim}); 'ropext inspect' lists them"
        )
    for i, value in enumerate(factors):
        if not value > 0:  # infinity: this pair does not turn
            raise UsageError(
                f"--pair-factors: {which}number {i} is {value:g}; each must be above 0, or inf"
            )


def longrope(rope: Rope, target: int, knobs: LongropeKnobs) -> Scaling:
    """Scale RoPE by one factor per pair, f'_i = f_i / lambda_i.

    The attention factor is 1; the caller applies the factor of a file or a flag.
    """
    if knobs.pair_factors is None:
        raise UsageError(
            "--method longrope needs --pair-factors FILE, one number per pair; `ropext plan` shows "
            "the methods that need none"
        )
    if rope.context < 2:
        raise UsageError(
            "--method longrope needs a context above 1 token (it divides by its logarithm); "
            "correct it with --context N"
        )
    long = knobs.pair_factors
    _check_factors(rope, long, "")
    short = knobs.short_pair_factors
    if short:
        _check_factors(rope, short, "short ")
    native: Params = {
        "rope_type": "longrope",
        "rope_theta": rope.theta,
        "factor": target / rope.context,
        "original_max_position_embeddings": rope.context,
        "short_factor": list(short or long),
        "long_factor": list(long),
    }
    return Scaling(long, 1.0, native, short)


METHOD = Method(
    name="longrope",
    summary="One factor per pair from a file: searched, fitted or released by somebody.",
    paper="Ding et al. 2024, arXiv 2402.13753",
    carried="longrope",
    scale=longrope,
    knobs=LongropeKnobs,
    needs="--pair-factors",
    competes=False,
    fits=(),
    colour=7,
)


# The long set, the short set if the file has a different one, the attention factor if it has one.
PairFactors = tuple[tuple[float, ...], tuple[float, ...] | None, float | None]


def parse_pair_factors(text: str, name: str) -> PairFactors:
    """Return LongRoPE's pair factors, and any attention factor, from the text of a file of
    --pair-factors.

    The text may be a JSON list, or a JSON object with `pair_factors`, `long_factor` or
    `rescale_factors`, and `short_factor` (also inside `rope_scaling` or `rope_parameters`). It may
    also be CSV: one row, one column, or the released LongRoPE files, which repeat the row for every
    layer.
    """
    stripped = text.strip()
    if stripped[:1] in ("[", "{"):
        return _json_factors(stripped, name)
    rows = list[tuple[float, ...]]()
    for line in stripped.splitlines():
        if line.strip():
            rows.append(_numbers(line.strip().strip(",").split(","), name))
    if not rows:
        raise InputError(f"--pair-factors {name}: the file is empty")
    is_column = len(rows) > 1 and all(len(row) == 1 for row in rows)
    if is_column:
        return tuple(row[0] for row in rows), None, None
    if len(set(rows)) > 1:
        raise InputError(
            f"--pair-factors {name}: its {len(rows)} rows differ, but a config has one set "
            "of factors for all layers"
        )
    return rows[0], None, None


def _numbers(items: object, name: str) -> tuple[float, ...]:
    """Return numbers of LongRoPE from a list in a file of pair factors. Raise InputError if an item
    is no number."""
    if not isinstance(items, list):
        raise InputError(f"--pair-factors {name}: expected a list of numbers")
    try:
        for item in items:
            if isinstance(item, bool):
                raise TypeError("true and false are not numbers")
        return tuple(float(untagged_float(item)) for item in items)
    except (TypeError, ValueError, OverflowError) as error:
        raise InputError(f"--pair-factors {name}: not a number: {str(error)[:80]}") from None


def _json_factors(text: str, name: str) -> PairFactors:
    """Return LongRoPE's pair factors, and any attention factor, from the JSON text of a file."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"--pair-factors {name} is not valid JSON: {error}") from None
    if isinstance(data, list):
        return _numbers(data, name), None, None
    whole = data
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(data.get(key), Mapping):
            data = data[key]
            break
    for key in ("pair_factors", "long_factor", "rescale_factors"):
        if key not in data:
            continue
        long = _numbers(data[key], name)
        short = None
        if "short_factor" in data:
            short = _numbers(data["short_factor"], name)
        if short == long:
            short = None
        return long, short, _attention(whole | data, name)
    raise InputError(
        f"--pair-factors {name}: found none of the keys pair_factors, long_factor, rescale_factors"
    )


def _attention(data: Mapping[str, object], name: str) -> float | None:
    """Return LongRoPE's attention factor from a longrope dict with pair factors. Return None if it
    determines none.

    A stated factor wins; otherwise it is computed from the lengths, as stock does.
    """
    if data.get("attention_factor") is not None:
        return _numbers([data["attention_factor"]], name)[0]
    stated_original = data.get("original_max_position_embeddings")
    stated_target = data.get("max_position_embeddings")
    stated_factor = data.get("factor")
    if "long_factor" not in data or stated_original is None:
        return None
    if stated_factor is None and stated_target is None:
        return None
    stated = [stated_original or 0, stated_target or 0, stated_factor or 0]
    original, target, factor = _numbers(stated, name)
    if original <= 1:
        raise InputError(f"--pair-factors {name}: original_max_position_embeddings is {original:g}")
    return longrope_attention(factor or target / original, int(original))
