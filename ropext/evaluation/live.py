"""A model in memory as an evaluation wants it: copies that share its weights, so that nothing of it
changes, and what tells it from another model."""

import copy
import functools
import hashlib
import inspect
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

from ropext.checkpoint import Snapshot
from ropext.checkpoint.provenance import Record, digest, read_record
from ropext.errors import UsageError, first_line
from ropext.jsontext import Json
from ropext.patching import apply_plan, base_model, config_of, hooks_of, original_of, plan_in

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# Their versions stand in the key of an evaluation (`plan.LIBRARIES`); other code is known by its
# source.
VERSIONED = ("torch", "transformers", "peft", "accelerate", "ropext")
ATTENTIONS = (
    "eager",
    "sdpa",
    "flash_attention_2",
    "flash_attention_3",
    "flex_attention",
)
# Attributes of modules that decide no number: where the weights came from, and what training sets.
UNDECIDING = (
    "name_or_path",
    "warnings_issued",
    "gradient_checkpointing",
    "_gradient_checkpointing_func",
    "_is_hf_initialized",
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
            plan = plan_in(self.live)
            knobs = {} if plan is None else dict(plan.knobs)
            content["modules_sha256"] = digest([_modules_of(self.model), knobs])
        return content


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


def why_no_key(model: "torch.nn.Module") -> str:
    """Say what of a model no digest tells; "" where its tensors, code and patch are all of it."""
    from torch.nn import Parameter

    from ropext.patching.self_extend import NAME  # late: it loads torch

    live = base_model(model)
    attention = live.config._attn_implementation
    if attention not in (*ATTENTIONS, NAME):
        return f"an attention of its own ({attention})"
    ours = hooks_of(live)
    for name, module in model.named_modules():
        place = name or type(module).__name__
        hooks = {*module._forward_hooks, *module._forward_pre_hooks}
        if hooks - ours:
            return f"a hook of its user's on {place}"
        if "forward" in vars(module) and not hasattr(module, "_hf_hook"):
            return f"another forward on {place}"
        if not _is_known(type(module)):
            return f"code without a source file ({type(module).__name__})"
        for parameter in module._parameters.values():
            if parameter is not None and type(parameter) is not Parameter:
                return f"packed weights ({type(parameter).__name__})"
        for key, value in _attributes(module):
            opaque = _opaque(value)
            if opaque:
                return f"{opaque} in {place}.{key}"
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
        name = _name_of(type(module))
        sources[name] = None
        if _root(home) not in VERSIONED:
            sources[name] = _source(sys.modules[home])
    return sources


def _modules_of(model: "torch.nn.Module") -> dict[str, Json]:
    """Return the class and the attributes of every module, by its place: scales, and which of its
    adapters are on."""
    modules = dict[str, Json]()
    for place, module in model.named_modules():
        values = dict[str, Json]()
        for key, value in _attributes(module):
            values[key] = _as_json(value)
        modules[place] = {"class": _name_of(type(module)), "values": values}
    return modules


def _attributes(module: "torch.nn.Module") -> Iterator[tuple[str, object]]:
    """Yield what a module holds beside tensors, modules and hooks, and what no patch keeps there
    for itself."""
    from torch import nn

    every_module_has = vars(nn.Module()).keys()
    for key, value in vars(module).items():
        if key in every_module_has or key in UNDECIDING or key.startswith("_ropext"):
            continue
        yield key, value


def _name_of(code: type | FunctionType) -> str:
    return f"{code.__module__}.{code.__qualname__}"


def _parts(value: object) -> list[object]:
    """Return what a container or a function with arguments consists of."""
    if isinstance(value, dict):
        return list(value.keys()) + list(value.values())
    if isinstance(value, list | tuple | set | frozenset):
        return list(value)
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, MethodType):
        return [value.__func__]
    return []


def _opaque(value: object) -> str:
    """Say what of an attribute JSON does not tell from another; "" where it tells all."""
    for part in _parts(value):
        opaque = _opaque(part)
        if opaque:
            return opaque
    if isinstance(value, FunctionType):
        home = value.__module__
        if _root(home) in VERSIONED:
            return ""
        if value.__closure__ or _source(sys.modules[home]) is None:
            return f"a function of its user's ({value.__qualname__})"
        return ""
    home = _root(type(value).__module__)
    if home in VERSIONED or home in ("builtins", "functools", "collections", "types"):
        return ""
    return f"an object of its user's ({type(value).__name__})"


def _as_json(value: object) -> Json:
    """Write an attribute of a module as JSON; an object of a library by its class alone."""
    import torch
    from transformers import PreTrainedConfig

    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, dict):
        return [[str(key), _as_json(part)] for key, part in value.items()]
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    if isinstance(value, torch.Tensor):
        return [str(value.dtype), list(value.shape), _bytes_of(value).hex()]
    if isinstance(value, PreTrainedConfig):
        return [value.to_json_string(), str(value._attn_implementation)]
    if isinstance(value, FunctionType):
        home = value.__module__
        source = None if _root(home) in VERSIONED else _source(sys.modules[home])
        return [_name_of(value), source]
    if isinstance(value, torch.dtype | torch.device | type):
        return str(value)
    if isinstance(value, functools.partial):
        return [_as_json(part) for part in _parts(value)]
    return [_name_of(type(value)), [_as_json(part) for part in _parts(value)]]


def _bytes_of(tensor: "torch.Tensor") -> bytes:
    import torch

    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    content: bytes = data.numpy().tobytes()
    return content


def _tensors_digest(model: "torch.nn.Module") -> str:
    """Hash every parameter and buffer, those that no checkpoint stores too, each by its name."""
    whole = hashlib.sha256()
    tensors = [*model.named_parameters(), *model.named_buffers()]
    for name, tensor in sorted(tensors, key=lambda entry: entry[0]):
        head = json.dumps([name, str(tensor.dtype), list(tensor.shape)])
        whole.update(head.encode())
        whole.update(_bytes_of(tensor))
    return whole.hexdigest()
