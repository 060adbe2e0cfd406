"""Compute the readings of a model that a server could use instead of the planned one."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from ropext import families
from ropext.base.errors import RopextError
from ropext.base.jsontext import JsonObject
from ropext.families import Model
from ropext.scaling import forms
from ropext.scaling.rope import RopeSite
from ropext.verifying.judging import Neighbour

STEP = 1.25  # by which the factor of the two nearest neighbours differs
WITH_FACTOR = ("linear", "yarn", "llama3", "dynamic")
PLAIN = "the plain base"
Params = dict[str, Any]
Changed = Callable[[RopeSite], Params | None]


def neighbours(config: JsonObject, model: Model, base: JsonObject | None) -> list[Neighbour]:
    """Return the configs that a server could read in place of the planned one, `config`.

    A config is None if no config can set that reading. A plan that scales nothing has no
    neighbours.
    """
    if base is None and all(site.params["rope_type"] == "default" for site in model.scaled_sites):
        return []
    found = list[Neighbour]()
    for step in (STEP, 1 / STEP):
        name = f"factor {_factor_of_site(model.scaled_sites[0]) * step:.3g}"
        changed = _neighbour_config(
            config, model, partial(_rope_with_other_factor, step=step), step
        )
        found.append(Neighbour(name, changed, decides=True))
    plain = base
    if plain is None:
        plain = _neighbour_config(config, model, _plain_rope)
    found.append(Neighbour(PLAIN, plain, decides=True))
    for name, change in (
        ("attention factor 1", _rope_without_attention_factor),
        ("twice the original length", _rope_of_twice_the_length),
    ):
        if any(change(site) is not None for site in model.scaled_sites):
            found.append(Neighbour(name, _neighbour_config(config, model, change), decides=False))
    return found


def _neighbour_config(
    config: JsonObject, model: Model, change: Changed, step: float = 1.0
) -> JsonObject | None:
    """Return a config that a server could read in place of the planned one, for `verify` to compare
    the server's answers with. Return None if a rope dict cannot be changed so."""
    params = dict[str, Params]()
    for site in model.scaled_sites:
        changed = change(site)
        if changed is None:
            return None
        params[site.label] = changed
    try:
        return families.write(dict(config), model, params, round(model.context * step))
    except RopextError:
        return None


def _factor_of_site(site: RopeSite) -> float:
    """Return by how much a planned config slows the slowest pair, to find factors that a server
    could read instead."""
    if "factor" in site.params:
        return float(site.params["factor"])
    return max(site.rope.context / site.rope.original_context, 1.0)


def _rope_with_other_factor(site: RopeSite, step: float) -> Params | None:
    """Return the rope dict by which `verify` checks whether a server reads a factor greater by
    `step`. Return None if its form has none."""
    params = dict(site.params)
    attention = forms.read_attention_factor(params)
    kind = params["rope_type"]
    if kind in WITH_FACTOR and "factor" in params:
        stated = {"attention_factor", "attn_factor"} & params.keys()
        follows = math.isclose(attention, forms.default_attention(params), rel_tol=1e-6)
        if stated and follows:
            params = {key: value for key, value in params.items() if key not in stated}
        return params | {"factor": params["factor"] * step}
    if kind == "longrope":
        longer = _stretched_pair_factors(params["long_factor"], step)
        return forms.with_attention(params | {"long_factor": longer}, attention)
    if kind == "default":
        dim = site.rope.dim
        return params | {"rope_theta": params["rope_theta"] * step ** (dim / (dim - 2))}
    return None


def _stretched_pair_factors(factors: list[float], step: float) -> list[float]:
    """Return LongRoPE's pair factors by which `verify` checks whether a server reads the largest
    one larger by `step`; factors of 1 stay 1."""
    largest = max(factor for factor in factors if math.isfinite(factor))
    if largest <= 1:
        return [factor * step for factor in factors]
    power = 1 + math.log(step) / math.log(largest)
    return [factor**power for factor in factors]


def _plain_rope(site: RopeSite) -> Params | None:
    """Return the rope dict by which `verify` checks whether a server ignores the scaling."""
    return {"rope_type": "default", "rope_theta": site.params["rope_theta"]}


def _rope_without_attention_factor(site: RopeSite) -> Params | None:
    """Return the rope dict by which `verify` checks whether a server ignores the attention factor.
    Return None if that is 1 already."""
    params = dict(site.params)
    if math.isclose(forms.read_attention_factor(params), 1):
        return None
    return forms.with_attention(params, 1.0)


def _rope_of_twice_the_length(site: RopeSite) -> Params | None:
    """Return the rope dict by which `verify` checks whether a server reads twice the original
    length. Return None if its form has no use for it."""
    params = dict(site.params)
    if params["rope_type"] not in ("yarn", "llama3"):
        return None
    original = params.get("original_max_position_embeddings", site.rope.original_context)
    return params | {"original_max_position_embeddings": 2 * original}
