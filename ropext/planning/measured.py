"""Write sentences of a plan about untrained scaling: its results on the measured model.

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
def _measured_results() -> Mapping[str, Any]:
    """Return the content of measured.json: results of untrained methods on one model."""
    content: Mapping[str, Any] = json.loads(
        (files(__package__) / "measured.json").read_text("utf-8")
    )
    return content


def _perplexity_percent(nats: float) -> str:
    """Return a measured difference of losses as percent of perplexity, in two digits."""
    percent = abs(math.expm1(nats)) * 100
    return f"{percent:.0f} %" if percent >= 10 else f"{percent:.2g} %"


def _perplexity_change(nats: float) -> str:
    """Return a measured difference of losses as "N % more" or "N % less" perplexity."""
    return f"{_perplexity_percent(nats)} {'more' if nats > 0 else 'less'}"


def _compared_with_truncation(worse: Mapping[str, float]) -> str:
    """Return the measured perplexity of each kind of text, compared with truncated text's."""
    kinds = list[str]()
    for kind, nats in worse.items():
        amount = _perplexity_change(nats)
        than = "than"
        if abs(nats) < EQUAL:
            amount = "the same"
            than = "as"
        whole = "" if kinds else f" perplexity {than} truncated text"
        kinds.append(f"{amount}{whole} on {kind}")
    return ", ".join(kinds)


def _measured_model(name: str, model: Model) -> str:
    """Return the model of measured.json, and whether the planned model of this name is the same."""
    known = _measured_results()["model"]
    rope = model.scaled_sites[0].rope
    shape = [getattr(model, size) for size in SHAPE]
    is_alike = shape == [known[size] for size in SHAPE] and rope.theta == known["theta"]
    if not is_alike:
        return f"{known['name']} (not this model)"
    if _letters_of_name(known["name"]) in _letters_of_name(name):
        return f"{known['name']} (this model, by its name and shape)"
    return f"{known['name']} (this model has its shape)"


def _letters_of_name(name: str) -> str:
    """Return the letters and digits of a model's name, to compare it with the measured model's."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def twofold(name: str, model: Model, method: str) -> str:
    """Return the sentence of a plan about a method's measured results at 2 times the context; about
    YaRN if the method was not measured."""
    methods = _measured_results()["factors"]["2"]
    unknown = ""
    if method not in methods:
        unknown = f" ({method} was not measured)"
        method = "yarn"
    seen = methods[method]
    scaling = f"untrained {KNOWN.get(method, method)} at 2×{unknown}"
    parts = [_compared_with_truncation(seen["worse"])]
    if "found" in seen:
        share = f"{seen['found'] * 100:.0f} %"
        parts.append(f"{share} of the needles found that truncation cuts off")
    inside = max(seen["inside"].values())
    parts.append(f"up to {_perplexity_percent(inside)} more perplexity inside the context")
    return f"on {_measured_model(name, model)}, {scaling}: {'; '.join(parts)}"


def farther() -> str:
    """Return YaRN's measured results at 4 and 8 times the context, as the end of a plan's
    warning."""
    results = _measured_results()
    four, eight = (results["factors"][factor]["yarn"] for factor in ("4", "8"))
    novels = [_perplexity_change(seen["worse"]["novels"]) for seen in (four, eight)]
    share = f"{four['found'] * 100:.0f} %"
    return (
        f"on {results['model']['name']}, YaRN has {novels[0]} perplexity on novels than truncated "
        f"text at 4× and {novels[1]} at 8×, and finds {share} of the needles at 4×"
    )
