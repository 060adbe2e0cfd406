"""A model in memory as an evaluation wants it: copies that share its weights, so that nothing of it
changes, and what tells it from another model."""

import copy
import hashlib
import inspect
import itertools
import json
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ropext.checkpoint import Snapshot
from ropext.checkpoint.provenance import digest
from ropext.errors import UsageError, first_line
from ropext.patching import apply_plan, base_model, config_of, hooks_of, original_of, plan_in

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# Their versions stand in the key of an evaluation; other code is known by its source.
VERSIONED = ("torch", "transformers", "peft", "accelerate", "ropext")
ATTENTIONS = (
    "eager",
    "sdpa",
    "flash_attention_2",
    "flash_attention_3",
    "flex_attention",
    "ropext_self_extend",
)


@dataclass(frozen=True)
class HeldModel:
    """A model that its user holds."""

    model: "torch.nn.Module"  # of transformers, or of PEFT around one
    live: "PreTrainedModel"  # the transformers model itself
    tokenizer: "PreTrainedTokenizerBase"
    has_key: bool  # what decides its numbers is told from another's: an output may be kept

    def copied(self) -> "torch.nn.Module":
        """Copy everything but the numbers of the weights, which both read from the same memory."""
        from torch.nn import Parameter

        shared = dict[int, object]()
        for parameter in self.model.parameters():
            shared[id(parameter)] = parameter
            if type(parameter) is Parameter:  # PEFT switches the gradients of adapters on and off
                shared[id(parameter)] = Parameter(parameter.detach(), requires_grad=False)
        try:
            copied = copy.deepcopy(self.model, shared).eval()
        except Exception as error:  # whatever an attribute of the model's raises
            raise UsageError(
                f"{type(self.live).__name__} cannot be copied, and evaluate changes nothing of the "
                f"model itself: {first_line(error)}"
            ) from error
        plan = plan_in(base_model(copied))
        if plan is not None and plan.fold is not None:
            apply_plan(copied, plan)  # the copied hooks still speak to the model itself
        return copied

    def identity(self) -> dict[str, Any]:
        """What tells it from another model, as `provenance.identity` tells directories."""
        content: dict[str, Any] = {
            "hub_id": None,
            "commit": None,
            "config_sha256": digest([config_of(self.live), original_of(self.live)]),
            "attention": self.live.config._attn_implementation,
            "weights_sha256": "not hashed: no output",
        }
        if self.has_key:
            content["weights_sha256"] = _tensors_digest(self.model)
            content["code_sha256"] = digest(_code_of(self.model))
        return content


@dataclass(frozen=True)
class HeldSnapshot(Snapshot):
    """The small files of a model in memory, in a folder that lasts as long as its evaluation."""

    held: HeldModel | None = None

    def require_weights(self) -> None:
        """They are in memory."""


def held_by(snapshot: Snapshot) -> HeldModel | None:
    """Return the model in memory that a snapshot stands for."""
    return snapshot.held if isinstance(snapshot, HeldSnapshot) else None


def why_no_key(model: object) -> str:
    """Say what of a model no digest tells; "" where its tensors, code and patch are all of it."""
    from torch.nn import Parameter

    live = base_model(model)
    attention = live.config._attn_implementation
    if attention not in ATTENTIONS:
        return f"an attention of its own ({attention})"
    ours = hooks_of(live)
    for name, module in model.named_modules():  # type: ignore[attr-defined]
        place = name or type(module).__name__
        hooks = module._forward_hooks.keys() | module._forward_pre_hooks.keys()
        if hooks - ours:
            return f"a hook of its user's on {place}"
        if "forward" in vars(module) and not hasattr(module, "_hf_hook"):
            return f"another forward on {place}"
        if not _is_known(type(module)):
            return f"code without a source file ({type(module).__name__})"
        for parameter in module._parameters.values():
            if parameter is not None and type(parameter) is not Parameter:
                return f"packed weights ({type(parameter).__name__})"
    return ""


def _root(name: str) -> str:
    return name.partition(".")[0]


def _is_known(kind: type) -> bool:
    """Whether a module computes by code of a known version, or with a source file."""
    forward = kind.forward  # type: ignore[attr-defined]
    home = _root(kind.__module__)
    if _root(forward.__module__) not in (home, *VERSIONED):
        return False  # somebody put another one there
    return home in VERSIONED or _source(sys.modules[kind.__module__]) is not None


def _source(module: ModuleType) -> str | None:
    try:
        return inspect.getsource(module)
    except (OSError, TypeError):
        return None  # a notebook's


def _code_of(model: "torch.nn.Module") -> dict[str, str | None]:
    """Return the source of all modules of Python, by their names, of which no version is known."""
    sources = dict[str, str | None]()
    for module in model.modules():
        home = type(module).__module__
        name = f"{home}.{type(module).__qualname__}"
        sources[name] = None
        if _root(home) not in VERSIONED:
            sources[name] = _source(sys.modules[home])
    return sources


def _tensors_digest(model: "torch.nn.Module") -> str:
    """Hash every parameter and buffer, those that no checkpoint stores too, each by its name."""
    import torch

    whole = hashlib.sha256()
    tensors = itertools.chain(model.named_parameters(), model.named_buffers())
    for name, tensor in sorted(tensors, key=lambda entry: entry[0]):
        head = json.dumps([name, str(tensor.dtype), list(tensor.shape)])
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        whole.update(head.encode())
        whole.update(data.numpy().tobytes())
    return whole.hexdigest()
