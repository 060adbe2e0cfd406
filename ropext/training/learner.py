"""What learns a spectrum: in a fit alone, weights frozen; in `finetune --train-spectrum` together
with the LoRA.

There the extended checkpoint's spectrum is where it begins. What it became is written as a base of
its own, extended like any other, and the adapter is merged into that one and saved for it.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional

from ropext import proof
from ropext.checkpoint import provenance
from ropext.checkpoint.provenance import Record
from ropext.checkpoint.writing import write_checkpoint
from ropext.errors import Stopped, UnsupportedModel
from ropext.inspecting import card_of, record_of
from ropext.options.extend import Extend
from ropext.patching import apply_config
from ropext.planning import Plan, make_plan
from ropext.training import spectrum
from ropext.training.loss import head_loss, shift
from ropext.training.origin import Origin, open_origin
from ropext.training.sequences import IGNORED
from ropext.training.spectrum import Space


class LeftGuards(Stopped):
    """The spectrum moved out of what is allowed."""


class Learner(nn.Module):
    """Its state is the spectrum's alone, so that a checkpoint holds a few numbers.

    Windows weigh the same, however many of their tokens are scored; questions less (Row.weight).
    """

    accepts_loss_kwargs = False  # Trainer then divides the mean by the accumulation steps

    def __init__(self, model: Any, space: Space, *, sliced: bool) -> None:
        super().__init__()
        self.model, self.space, self.sliced = model, space, sliced

    def forward(
        self,
        input_ids: torch.Tensor,
        labels: torch.Tensor,
        row_weights: torch.Tensor | None = None,
        **inputs: Any,
    ) -> dict[str, torch.Tensor]:
        reason = self.space.outside()
        if reason is not None:
            raise LeftGuards(reason)
        wanted = shift(labels)
        rows = torch.stack(self._rows(input_ids, wanted, inputs))
        return {"loss": (rows if row_weights is None else rows * row_weights).mean()}

    def _rows(
        self, ids: torch.Tensor, wanted: torch.Tensor, inputs: dict[str, Any]
    ) -> list[torch.Tensor]:
        """The mean loss of every row; 0 where nothing is scored."""
        if not self.sliced:
            logits = self.model(input_ids=ids, use_cache=False, **inputs).logits
            return [
                functional.cross_entropy(own.float(), labels, ignore_index=IGNORED, reduction="sum")
                / (labels != IGNORED).sum().clamp(min=1)
                for own, labels in zip(logits, wanted, strict=True)
            ]
        hidden = self.model.base_model(input_ids=ids, use_cache=False, **inputs).last_hidden_state
        rows = []
        for own, labels in zip(hidden, wanted, strict=True):
            # Only what is scored goes through the head: half of a window, a few tokens of an item.
            at = (labels != IGNORED).nonzero()[:, 0]
            rows.append(head_loss(self.model, own[at], labels[at]) / max(1, len(at)))
        return rows

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        return self.space.state_dict()

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        return self.space.load_state_dict(dict(state_dict))

    def get_input_embeddings(self) -> Any:
        return self.model.get_input_embeddings()

    def activation_checkpointing_enable(self, **options: Any) -> None:
        self.model.activation_checkpointing_enable(**options)

    def gradient_checkpointing_enable(self, **options: Any) -> None:
        self.model.gradient_checkpointing_enable(**options)


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
    request = Extend(
        method="longrope",
        target=origin.target,
        pair_factors=factors,
        attention_factor=attention,
        **kept,
    )
    return make_plan(origin.base_config(), request, str(origin.record.base.get("name") or "MODEL"))


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
