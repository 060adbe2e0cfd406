"""`finetune --train-spectrum`: the spectrum moves together with the LoRA.

The extended checkpoint's spectrum is where it begins. What it became is written as a base of its
own, extended like any other, and the adapter is merged into that one and saved for it.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from ropext import proof
from ropext.checkpoint import provenance
from ropext.checkpoint.provenance import Record
from ropext.checkpoint.writing import write_checkpoint
from ropext.errors import UnsupportedModel
from ropext.inspecting import card_of, record_of
from ropext.options.extend import Extend
from ropext.patching import apply_config
from ropext.planning import Plan, make_plan
from ropext.training import spectrum
from ropext.training.origin import Origin, open_origin
from ropext.training.spectrum import Space

FILE = "spectrum.safetensors"  # in a checkpoint, beside the adapter
RATE = 0.02  # of a fit (docs/fitting.md); the LoRA's own rate is another one
CEILING = 4.0


@dataclass(frozen=True)
class Moving:
    """A spectrum that learns inside of a model with a LoRA."""

    space: Space
    plan: Plan  # of the start

    def join(self, model: Any) -> None:
        """Make its numbers the model's own, so that they are trained with the adapter."""
        self.space.requires_grad_(True)
        model.add_module("ropext_spectrum", self.space)

    def parameters(self) -> Iterable[Any]:
        return self.space.parameters()

    def save(self, checkpoint: Path) -> None:
        state = {name: own.contiguous().cpu() for name, own in self.space.state_dict().items()}
        save_file(state, checkpoint / FILE)

    def load(self, checkpoint: Path) -> None:
        self.space.load_state_dict(load_file(checkpoint / FILE))


def start_plan(origin: Origin) -> Plan:
    """The extended checkpoint's own spectrum as a longrope of the model before its extension."""
    record = origin.record
    scaled = [site for site in record.sites if site.scaled]
    spectra = {(site.base, site.spectrum) for site in scaled}
    if len(spectra) > 1 or scaled[0].spectrum.short_inv_freq is not None:
        raise UnsupportedModel(
            "--train-spectrum moves one set of pair factors, and this checkpoint has more "
            f"({', '.join(site.label or 'short and long' for site in scaled)})"
        )
    base, own = scaled[0].base, scaled[0].spectrum
    factors = tuple(f / w for f, w in zip(base.inv_freq, own.inv_freq, strict=True))
    return _plan(origin, factors, own.attention_factor / base.attention_factor)


def _plan(origin: Origin, factors: tuple[float, ...], attention: float) -> Plan:
    asked = origin.record.recipe
    names = ("context", "original_context", "from_original", "even_so")
    kept = {name: asked[name] for name in names if name in asked}
    wish = Extend(
        method="longrope",
        target=origin.target,
        pair_factors=factors,
        attention_factor=attention,
        **kept,
    )
    return make_plan(origin.base_config(), wish, str(origin.record.base.get("name") or "MODEL"))


def begin(model: Any, origin: Origin, rate: float) -> Moving:
    """Make the spectrum of a loaded model move, before PEFT wraps it."""
    plan = start_plan(origin)
    apply_config(model, plan.config)
    space = spectrum.EveryPair(plan.main, CEILING * plan.factor, gain=RATE / rate)
    spectrum.make_live(model, plan.sites, plan.target, space)
    return Moving(space, plan)


def settle(origin: Origin, checkpoint: Path, rate: float, folder: Path) -> Origin:
    """Write the base that carries the final spectrum; the adapter belongs to that one."""
    plan = start_plan(origin)
    space = spectrum.EveryPair(plan.main, CEILING * plan.factor, gain=RATE / rate)
    Moving(space, plan).load(checkpoint)
    made = _plan(origin, *space.values())

    def prove(directory: Path) -> Mapping[str, Any]:
        return proof.prove(
            directory,
            proof.expected(made.sites, made.factor),
            forward=proof.Forward(made.context, made.target, origin.base_config()),
            text_path=made.model.path,
        ).to_json()

    write_checkpoint(
        origin.snapshot,
        folder,
        config=made.config,
        record=_record(origin, made),
        card=lambda proved: card_of(made, origin.snapshot, folder.name, proved),
        link="symlink",  # the real files stay where they are; OUT gets its own
        force=True,
        prove=prove,
    )
    return open_origin(str(folder))


def _record(origin: Origin, made: Plan) -> Record:
    """The extension's record with the new spectrum; tokenizer edits stay as they were made."""
    old = origin.record
    others = tuple(edit for edit in old.edits if edit.get("file") != "config.json")
    new = record_of(made, old.base)
    return replace(
        new,
        edits=(*new.edits, *others),
        command=old.command,
        versions=provenance.versions(),
        more=dict(old.more) | {"trained_spectrum": {"start": old.method}},
    )


def moved_text(before: Origin, after: Origin) -> str:
    """What the training made of the spectrum, in one sentence."""
    old, new = (
        next(site.spectrum for site in own.record.sites if site.scaled) for own in (before, after)
    )
    ratios = [a / b for a, b in zip(old.inv_freq, new.inv_freq, strict=True)]
    pair = max(range(len(ratios)), key=lambda at: abs(math.log(ratios[at])))
    return (
        f"the spectrum was trained too: pair {pair} moved most (slowed {ratios[pair]:.3f} times), "
        f"the attention factor went from {old.attention_factor:.4f} to {new.attention_factor:.4f}"
    )
