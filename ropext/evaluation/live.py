"""A model in memory as an evaluation wants it: copies that share its weights, so that nothing of it
changes."""

import copy
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ropext.checkpoint import Snapshot
from ropext.checkpoint.provenance import Record, read_record
from ropext.errors import UsageError, first_line
from ropext.jsontext import Json
from ropext.patching import apply_plan, base_model, plan_in

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class HeldModel:
    """A model that its user holds."""

    model: "torch.nn.Module"  # of transformers, or of PEFT around one
    live: "PreTrainedModel"  # the transformers model itself
    tokenizer: "PreTrainedTokenizerBase"
    token: str = field(default_factory=lambda: secrets.token_hex(16))

    def copied(self) -> "torch.nn.Module":
        """Copy everything but the numbers of the weights, which both read from the same memory."""
        try:
            copied = copy.deepcopy(self.model, _shared(self.model)).eval()
        except Exception as error:  # whatever an attribute of the model's raises
            raise UsageError(
                f"{type(self.live).__name__} cannot be copied, and evaluate changes nothing of the "
                f"model itself: {first_line(error)}"
            ) from error
        plan = plan_in(base_model(copied))
        if plan is not None and plan.fold is not None:
            apply_plan(copied, plan)  # the copied hooks still speak to the model itself
        return copied

    def identity(self) -> dict[str, Json]:
        """Return what `provenance.identity` does for a directory. No digest tells all that computes
        (patched functions, hooks, autocast), so that no two calls have the same."""
        return {"in_memory": True, "weights_sha256": f"in memory, {self.token}"}


def _shared(model: "torch.nn.Module") -> dict[int, object]:
    """Map each weight to one of the same numbers for a copy of the model."""
    import torch

    shared = dict[int, object]()
    for module in model.modules():
        # Of 8 bits bitsandbytes keeps the weights in a state once the model has read something.
        for value in getattr(getattr(module, "state", None), "__dict__", {}).values():
            if isinstance(value, torch.Tensor):
                shared[id(value)] = value
    for parameter in model.parameters():
        # PEFT switches the gradients of adapters on and off. A packed weight has attributes, which
        # bitsandbytes moves into the module that first reads with it.
        own = torch.Tensor._make_subclass(type(parameter), parameter.data)
        vars(own).update(vars(parameter))
        shared[id(parameter)] = own
    return shared


@dataclass(frozen=True)
class HeldSnapshot(Snapshot):
    """The small files of a model in memory, in a folder that lasts as long as its evaluation."""

    held: HeldModel | None = None
    origin: Snapshot | None = None  # the checkpoint that its weights were loaded from

    def require_weights(self) -> None:
        """They are in memory."""


def held_by(snapshot: Snapshot) -> HeldModel | None:
    """Return the model in memory that a snapshot stands for."""
    return snapshot.held if isinstance(snapshot, HeldSnapshot) else None


def origin_of(snapshot: Snapshot) -> Snapshot:
    """Return the checkpoint that a model's weights were loaded from: of a directory itself."""
    if isinstance(snapshot, HeldSnapshot) and snapshot.origin is not None:
        return snapshot.origin
    return snapshot


def record_of_weights(snapshot: Snapshot) -> Record | None:
    """Read what was done to a model's weights, as it lies where they were loaded from."""
    return read_record(origin_of(snapshot).directory)
