"""A spectrum that is trained together with a LoRA (`finetune --train-spectrum`).

The extended checkpoint's spectrum is where it begins. What it became is written as a base of its
own, extended like any other, and the adapter is merged into that one and saved for it.
"""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from ropext import proof
from ropext.checkpoint import provenance
from ropext.checkpoint.writing import write_checkpoint
from ropext.errors import UnsupportedModel
from ropext.inspecting import card_of, record_of
from ropext.options.extend import Extend
from ropext.patching import apply_config
from ropext.planning import Plan, make_plan
from ropext.rope import compression
from ropext.training.defaults import FIT_LEARNING_RATE
from ropext.training.finetune import Origin, open_origin
from ropext.training.spectrum import EveryPair, make_live

FILE = "spectrum.safetensors"  # in a checkpoint, beside the adapter
CEILING = 4.0  # on every pair factor, in factors: that of a fit


def join(model: Any, space: EveryPair) -> None:
    """Make a spectrum's numbers the model's own, so that they are trained with the adapter."""
    space.requires_grad_(True)
    model.add_module("ropext_spectrum", space)


def save(space: EveryPair, checkpoint: Path) -> None:
    """Keep what Trainer, which saves the adapter alone, does not."""
    state = {name: own.contiguous().cpu() for name, own in space.state_dict().items()}
    save_file(state, checkpoint / FILE)


def load(space: EveryPair, checkpoint: Path) -> None:
    """Take up what was saved."""
    space.load_state_dict(load_file(checkpoint / FILE))


def start_plan(origin: Origin) -> Plan:
    """The extended checkpoint's own spectrum as a longrope of the model before its extension."""
    scaled = [site for site in origin.record.sites if site.scaled]
    spectra = {(site.base, site.spectrum) for site in scaled}
    if len(spectra) > 1 or scaled[0].spectrum.short_inv_freq is not None:
        raise UnsupportedModel(
            "--train-spectrum moves one set of pair factors, and this checkpoint has more "
            f"({', '.join(site.label or 'short and long' for site in scaled)})"
        )
    base, own = scaled[0].base, scaled[0].spectrum
    return _plan(origin, compression(base, own), own.attention_factor / base.attention_factor)


def _plan(origin: Origin, factors: tuple[float, ...], attention: float) -> Plan:
    asked = origin.record.recipe
    names = ("context", "original_context", "from_original", "even_so")
    request = Extend(
        method="longrope",
        target=origin.target,
        pair_factors=factors,
        attention_factor=attention,
        **{name: asked[name] for name in names if name in asked},
    )
    return make_plan(origin.base_config(), request, str(origin.record.base.get("name") or "MODEL"))


def _space(plan: Plan, rate: float) -> EveryPair:
    """What moves, at its start, as an optimiser of this learning rate moves it at a fit's own."""
    return EveryPair(plan.main, CEILING * plan.factor, gain=FIT_LEARNING_RATE / rate)


def begin(model: Any, origin: Origin, rate: float) -> EveryPair:
    """Make the spectrum of a loaded model move, before PEFT wraps it."""
    plan = start_plan(origin)
    space = _space(plan, rate)
    apply_config(model, plan.config)
    make_live(model, plan.sites, plan.target, space)
    return space


def settle(origin: Origin, checkpoint: Path, rate: float, folder: Path) -> Origin:
    """Write the base that carries the final spectrum; the adapter belongs to that one. Tokenizer
    edits stay as the extension made them."""
    space = _space(start_plan(origin), rate)
    load(space, checkpoint)
    made = _plan(origin, *space.values())
    old, new = origin.record, record_of(made, origin.record.base)
    others = tuple(edit for edit in old.edits if edit.get("file") != "config.json")
    write_checkpoint(
        origin.snapshot,
        folder,
        config=made.config,
        record=replace(
            new,
            edits=(*new.edits, *others),
            command=old.command,
            versions=provenance.versions(),
            more=dict(old.more) | {"trained_spectrum": {"start": old.method}},
        ),
        card=lambda proved: card_of(made, origin.snapshot, folder.name, proved),
        link="symlink",  # the real files stay where they are; OUT gets its own
        force=True,
        prove=lambda directory: proof.prove_plan(directory, made, origin.base_config()),
    )
    return open_origin(str(folder))


def moved_text(before: Origin, after: Origin) -> str:
    """What the training made of the spectrum, in one sentence."""
    old, new = (
        next(site.spectrum for site in own.record.sites if site.scaled) for own in (before, after)
    )
    ratios = compression(old, new)
    pair = max(range(len(ratios)), key=lambda at: abs(math.log(ratios[at])))
    return (
        f"the spectrum was trained too: pair {pair} moved most (slowed {ratios[pair]:.3f} times), "
        f"the attention factor went from {old.attention_factor:.4f} to {new.attention_factor:.4f}"
    )
