"""The text of a file of pair factors, in each of the forms in which they are handed round."""

import json
from collections.abc import Mapping

from ropext.errors import InputError
from ropext.forms import decoded, longrope_attention

# The long set, the short set where the file has one that differs, the attention factor it says.
PairFactors = tuple[tuple[float, ...], tuple[float, ...] | None, float | None]


def parse_pair_factors(text: str, name: str) -> PairFactors:
    """Read the numbers of each pair, and the attention factor where the file says one.

    Read are: a JSON list; a JSON object with `pair_factors` or `long_factor` and `short_factor`
    (also inside `rope_scaling` or `rope_parameters`); CSV, one row or one column, or the released
    LongRoPE files, which repeat the row for every layer.
    """
    stripped = text.strip()
    if stripped[:1] in ("[", "{"):
        return _json_factors(stripped, name)
    rows = [row for row in stripped.splitlines() if row.strip()]
    values = [_numbers(row.strip().strip(",").split(","), name) for row in rows]
    if not values:
        raise InputError(f"--pair-factors {name}: the file is empty")
    if len(values) > 1 and all(len(row) == 1 for row in values):
        return tuple(row[0] for row in values), None, None
    if any(row != values[0] for row in values):
        raise InputError(
            f"--pair-factors {name}: its {len(values)} rows differ, but a stock config has one set "
            "of factors for all layers"
        )
    return values[0], None, None


def _numbers(items: object, name: str) -> tuple[float, ...]:
    if not isinstance(items, list):
        raise InputError(f"--pair-factors {name}: expected a list of numbers")
    try:
        if any(isinstance(item, bool) for item in items):
            raise TypeError("true and false are not numbers")
        return tuple(float(decoded(item)) for item in items)
    except (TypeError, ValueError, OverflowError) as error:
        raise InputError(f"--pair-factors {name}: not a number: {str(error)[:80]}") from None


def _json_factors(text: str, name: str) -> PairFactors:
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
        if key in data:
            long = _numbers(data[key], name)
            short = _numbers(data["short_factor"], name) if "short_factor" in data else None
            attention = _attention({**whole, **data}, name)
            return long, None if short == long else short, attention
    raise InputError(
        f"--pair-factors {name}: found none of the keys pair_factors, long_factor, rescale_factors"
    )


def _attention(data: Mapping[str, object], name: str) -> float | None:
    """The attention factor of a longrope dict: as it says, or as stock makes it of its lengths."""
    if data.get("attention_factor") is not None:
        return _numbers([data["attention_factor"]], name)[0]
    lengths = [data.get("original_max_position_embeddings"), data.get("max_position_embeddings")]
    factor = data.get("factor")
    if "long_factor" not in data or lengths[0] is None or factor is lengths[1] is None:
        return None
    original, target, factor = _numbers([value or 0 for value in (*lengths, factor)], name)
    if original <= 1:
        raise InputError(f"--pair-factors {name}: original_max_position_embeddings is {original:g}")
    return longrope_attention(factor or target / original, int(original))
