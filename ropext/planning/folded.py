"""The plan for Self-Extend: nothing of the config changes, attention does it in memory."""

from collections.abc import Mapping
from typing import Any

from ropext import families
from ropext.errors import UnsupportedModel, UsageError
from ropext.options.extend import Extend, resolve_target
from ropext.options.fields import flag
from ropext.planning.plan import ExtensionPlan, PlannedSite
from ropext.scaling import self_extend
from ropext.scaling.self_extend import FoldOptions

OTHERS = ("attention_factor", "temperature", "like", "original_context")


def make_folded_plan(
    config: Mapping[str, Any], recipe: Extend, name: str, options: FoldOptions
) -> ExtensionPlan:
    """Plan window and group for a config that rotates."""
    given = [key for key in OTHERS if getattr(recipe, key) is not None]
    given += [key for key in ("from_original", "for_loaders") if getattr(recipe, key)]
    if given:
        raise UsageError(f"{flag(given[0])} is for a spectrum; {self_extend.NAME} leaves it alone")
    model = families.read(dict(config), context=recipe.context)
    if "mrope_section" in str(config):
        raise UnsupportedModel(f"{self_extend.NAME}: {name} has positions of several axes (mRoPE)")
    target = resolve_target(recipe, model.context)
    spectra = tuple(site.rope.spectrum.inv_freq for site in model.scaled_sites)
    how = self_extend.fold(model.context, target, options, spectra)
    return ExtensionPlan(
        name=name,
        recipe=recipe,
        method=self_extend.NAME,
        knobs={"window": how.window, "group": how.group},
        context=model.context,
        target=target,
        sites=tuple(
            PlannedSite(site.label, site.rope, site.rope.spectrum, site.params, site.scaled)
            for site in model.sites
        ),
        config=dict(config),
        edits=(),
        warnings=(),
        fold=how,
    )
