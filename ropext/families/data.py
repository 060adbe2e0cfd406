"""The two data files of this room, read when first asked for."""

import json
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

# What it would take to extend a type that is not rotary, or whose rotation no config reaches.
REFUSALS = {
    "hard-coded": "rotates with a base that is fixed in its code (or in a table among its weights),"
    " so no config can scale it; it takes a code patch or an edit of that table",
    "own order": "keeps its frequencies in an order of its own (by image axes) and refuses every"
    " scaled rope type; it takes a code patch",
    "twin": "keeps an unscaled rotary embedding beside the scaled one, for the layers that"
    " rope_scaling_layers leaves out; it takes a plan per layer",
    "learned": "has a learned table of absolute positions; it takes a longer table in the weights"
    " (rows interpolated) and usually fine-tuning",
    "sinusoidal": "adds fixed sinusoids to its embeddings; it takes a code patch that scales the"
    " positions",
    "alibi": "uses ALiBi, which has no rotation to scale; it takes other slopes, in code",
    "buckets": "uses T5's relative buckets, which run at any length; it takes a larger maximum"
    " distance and fine-tuning",
    "mixed": "mixes absolute positions with relative ones; it takes a longer table in the weights",
    "disentangled": "uses DeBERTa's relative tables; it takes longer tables in the weights",
    "transformer-xl": "uses Transformer-XL's relative positions, which have no trained limit",
    "recurrent": "keeps its state recurrently and has no positions to scale",
    "none": "rotates nothing, so there is no rotary embedding to scale",
    "two towers": "is made of two models with positions of their own; extend the one that reads the"
    " long input as a model by itself",
    "other": "is not a text model with a rotary context window",
}


class Known(NamedTuple):
    """What the census says about a model type."""

    scheme: str  # "rotary", "composite" or a key of REFUSALS
    path: tuple[str, ...] = ()  # composite: where its text part stands
    text: str = ""  # composite: the text part's type where its config does not name one


@cache
def _load(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((files(__package__) / name).read_text())
    return content


def version() -> str:
    """The transformers version that the census and the defaults were taken from."""
    return str(_load("defaults.json")["transformers"])


@cache
def census() -> dict[str, Known]:
    """Every model type of that version."""
    out: dict[str, Known] = {}
    for scheme, types in _load("types.json").items():
        if scheme == "composite":
            for name, (*path, text) in types.items():
                out[name] = Known(scheme, tuple(path), text)
        elif scheme != "transformers":
            out |= {name: Known(scheme) for name in types}
    return out


def defaults(text_type: str) -> dict[str, Any]:
    """What absent keys mean for a rotary type."""
    found: dict[str, Any] = _load("defaults.json")["types"].get(text_type, {})
    return found


def added(model_type: str) -> dict[str, Any]:
    """The keys that a composite type adds to a text config that leaves them out."""
    found: dict[str, Any] = _load("defaults.json")["composites"].get(model_type, {})
    return found
