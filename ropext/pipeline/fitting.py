"""Request a fit of a model; for a GGUF, also write the GGUF with the fitted spectrum."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ropext.base import bundled, guard
from ropext.base.narration import Call
from ropext.files.checkpoint import provenance
from ropext.files.inspecting import open_model, planned
from ropext.options.extend import Extend, Writing
from ropext.options.training import Fit
from ropext.pipeline import extending
from ropext.planning import Plan

if TYPE_CHECKING:
    from ropext.training.request import TrainingRequest


def fit_request(
    model: str, data: str, options: Fit, revision: str | None = None
) -> "TrainingRequest":
    """Return the request for a fit of a model."""
    from ropext.training.request import TrainingRequest

    finish = None
    gguf = bundled.find_gguf(model)
    if gguf is not None:
        finish = partial(_add_gguf, model, f"{gguf.stem}-long.gguf")
    return TrainingRequest(model, data, options, revision, finish)


def _add_gguf(model: str, name: str, output: Path, call: Call, directory: Path) -> None:
    """Write the GGUF with a directory's spectrum into that directory, and add it to the list of
    files.

    `directory` is renamed to `output` later, so the record has the name `output`.
    """
    snapshot = open_model(model)
    plan = extending.warned(planned(snapshot, model, Extend(like=str(directory))), call.hooks.say)
    assert isinstance(plan, Plan)  # a GGUF rotates
    plan = replace(plan, recipe=plan.recipe.changed(like=str(output)))
    before = guard.listing(directory)
    nothing_is_there = replace(call, force=False)
    extending.write_extension(snapshot, plan, directory / name, Writing(), nothing_is_there)
    for file in guard.listing(directory):
        if file not in before:
            provenance.relist(directory, file)
    call.hooks.say(
        f"{output / name} is the GGUF with the fitted frequencies; the same folder has the weights "
        "in float32"
    )
