"""Say what scaling without training gave on the measured model.

scripts/make_measured.py writes measured.json from benchmarks/results.
"""

import json
import math
import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from ropext.families import Model

KNOWN = {"yarn": "YaRN"}  # the names of measured methods that a sentence spells otherwise
EQUAL = 0.005  # nats per token: differences below half a percent are noise
SHAPE = ("layers", "heads", "kv_heads", "head_dim")


@cache
def _data() -> Mapping[str, Any]:
    content: Mapping[str, Any] = json.loads(
        (files(__package__) / "measured.json").read_text("utf-8")
    )
    return content


def _percent(nats: float) -> str:
    """Return a difference of losses as percent of perplexity, in two digits."""
    percent = abs(math.expm1(nats)) * 100
    return f"{percent:.0f} %" if percent >= 10 else f"{percent:.2g} %"


def _more(nats: float) -> str:
    return f"{_percent(nats)} {'more' if nats > 0 else 'less'}"


def _compared(worse: Mapping[str, float]) -> str:
    """Compare the perplexity of each kind of text with that of truncated text."""
    kinds = list[str]()
    for kind, nats in worse.items():
        amount = _more(nats)
        than = "than"
        if abs(nats) < EQUAL:
            amount = "the same"
            than = "as"
        whole = "" if kinds else f" perplexity {than} truncated text"
        kinds.append(f"{amount}{whole} on {kind}")
    return ", ".join(kinds)


def _where(name: str, model: Model) -> str:
    """Return the measured model, and whether it is the model of this name."""
    known = _data()["model"]
    rope = model.scaled_sites[0].rope
    shape = [getattr(model, size) for size in SHAPE]
    is_alike = shape == [known[size] for size in SHAPE] and rope.theta == known["theta"]
    if not is_alike:
        return f"{known['name']} (not this model)"
    if _letters(known["name"]) in _letters(name):
        return f"{known['name']} (this model, by its name and shape)"
    return f"{known['name']} (this model has its shape)"


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def twofold(name: str, model: Model, method: str) -> str:
    """Return the results of a method at 2 times the context; those of YaRN if the method was not
    measured."""
    methods = _data()["factors"]["2"]
    unknown = ""
    if method not in methods:
        unknown = f" ({method} was not measured)"
        method = "yarn"
    seen = methods[method]
    scaling = f"untrained {KNOWN.get(method, method)} at 2×{unknown}"
    parts = [_compared(seen["worse"])]
    if "found" in seen:
        share = f"{seen['found'] * 100:.0f} %"
        parts.append(f"{share} of the needles found that truncation cuts off")
    inside = max(seen["inside"].values())
    parts.append(f"up to {_percent(inside)} more perplexity inside the context")
    return f"on {_where(name, model)}, {scaling}: {'; '.join(parts)}"


def farther() -> str:
    """Return what YaRN gave at 4 and 8 times the context, as the end of a sentence."""
    factors = _data()["factors"]
    four, eight = (factors[factor]["yarn"] for factor in ("4", "8"))
    novels = [_more(seen["worse"]["novels"]) for seen in (four, eight)]
    share = f"{four['found'] * 100:.0f} %"
    return (
        f"on {_data()['model']['name']}, YaRN has {novels[0]} perplexity on novels than truncated "
        f"text at 4× and {novels[1]} at 8×, and finds {share} of the needles at 4×"
    )
