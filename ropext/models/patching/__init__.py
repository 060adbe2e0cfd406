"""Extend a model that is already in memory, by the same plan as a directory.

ropext builds two models without weights, one from the model's config and one from the new
config. It carries over only the differences between them: rotary buffers (always in float32,
whatever the model's dtype), softmax scales, attributes, and the configs that modules hold.
Parameters (except a learned position table), hooks, device placement and every reference to the
model are unchanged.
"""

import copy
import json
import types
from collections.abc import Container
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

from ropext.base.errors import InputError
from ropext.base.inputs import not_a_model
from ropext.base.jsontext import Json, JsonObject, untagged
from ropext.files.inspecting import plan_config
from ropext.files.inspecting.held import ORIGINAL
from ropext.models.patching.schemes import (
    SLOPES,
    position_tables_of,
    set_alibi_slopes,
    set_table_rows,
)
from ropext.options.door import public
from ropext.options.evaluate import SelfExtend
from ropext.options.extend import Extend, parse_extend
from ropext.planning import CONFIG_ALONE, ExtensionPlan, InMemory
from ropext.scaling.self_extend import FoldOptions

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedConfig, PreTrainedModel

Model = TypeVar("Model")

# State of the model in memory, not of the scheme that the config describes.
LOADED = "model of transformers in memory, or a model of PEFT around one"  # help of an argument
RUNTIME = {"architectures", "dtype", "quantization_config", "transformers_version", "use_cache"}
PLAIN = (bool, int, float, str, tuple, list, dict, type(None), types.FunctionType)
PLANNED = "_ropext_plan"  # attribute of a patched model: the plan it computes by


def base_model(model: object, call: str = "patch") -> "PreTrainedModel":
    """Return the transformers model in memory, taken out of a PEFT wrapper if it has one.

    Raise an error that names `call` if it is no transformers model.
    """
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel) and hasattr(model, "get_base_model"):
        model = model.get_base_model()
    if not isinstance(model, PreTrainedModel):
        raise not_a_model(f"{call} wants a transformers model", model)
    return model


def _model_without_weights(
    model: "PreTrainedModel", config: "PreTrainedConfig"
) -> "PreTrainedModel":
    """Return a model of the same class as the one in memory, with real buffers and no
    parameters."""
    from accelerate import init_empty_weights

    config = copy.deepcopy(config)
    config._attn_implementation = model.config._attn_implementation
    config.name_or_path = model.config.name_or_path
    with init_empty_weights(include_buffers=False):
        return type(model)(config)


def _update_config(
    live: "PreTrainedConfig", old: "PreTrainedConfig", new: "PreTrainedConfig"
) -> None:
    """Write the differences between two configs, and between their parts, into the config of a
    model in memory.

    It bypasses __setattr__, which would standardise the rope dict a second time.
    """
    from transformers import PreTrainedConfig as Config

    for key in vars(old).keys() | vars(new).keys():
        if key in RUNTIME or key.startswith("_"):
            continue
        before = vars(old).get(key)
        after = vars(new).get(key)
        part = vars(live).get(key)
        if isinstance(part, Config) and isinstance(before, Config) and isinstance(after, Config):
            _update_config(part, before, after)
        elif key not in vars(new):
            vars(live).pop(key, None)
        elif before != after:
            vars(live)[key] = copy.deepcopy(after)


def _renew_rotary_module(live: "nn.Module", new: "nn.Module") -> None:
    """Replace the whole state of a rotary module of a model in memory by the state of a fresh
    module.

    It keeps state of its own (longrope's cached long set, dynamic's length), and may have been cast
    with the model.
    """
    import torch

    from ropext.models.patching.intact import EXACT, forget_exact

    if EXACT in vars(live):
        forget_exact(live)
    numbers = next(chain(live.parameters(), live.buffers()), torch.empty(0))
    stale = [key for key in vars(live) if key.endswith(("long_inv_freq", "max_seq_len_cached"))]
    stale += [name for name in live._buffers if name.endswith("inv_freq")]
    for key in stale:
        delattr(live, key)
    for name, value in new._buffers.items():
        if value is not None:
            live.register_buffer(name, value.to(numbers.device), persistent=False)
    for key, value in vars(new).items():
        if isinstance(value, PLAIN) and not key.startswith("_") and key != "training":
            setattr(live, key, copy.deepcopy(value))


def _renew_module(live: "nn.Module", old: "nn.Module", new: "nn.Module") -> None:
    """Give a module of a model in memory the attributes that differ between two models without
    weights, and the buffers whose shapes differ (a causal mask, position numbers)."""
    from torch import nn

    every_module_has = vars(nn.Module()).keys()
    for key, after in vars(new).items():
        before = vars(old).get(key)
        if key not in every_module_has and isinstance(after, PLAIN) and before != after:
            setattr(live, key, copy.deepcopy(after))
    for key in new._non_persistent_buffers_set & live._buffers.keys():
        renewed = new._buffers[key]
        stock = old._buffers[key]
        held = live._buffers[key]
        if renewed is None or stock is None or held is None:
            continue
        if renewed.shape != stock.shape:
            live.register_buffer(key, renewed.to(held.device), persistent=False)


def _check_same_weights(old: "nn.Module", new: "nn.Module", tables: Container[str]) -> None:
    """Raise InputError if the new config describes other weights than the model in memory has;
    position tables may differ."""
    different = set[tuple[str, "torch.Size"]]()
    for model in (old, new):
        for name, weight in model.state_dict().items():
            if name.removesuffix(".weight") not in tables:
                different ^= {(name, weight.shape)}
    if different:
        raise InputError(
            "the new config describes other weights than the model in memory has "
            f"({min(different)[0]}); "
            "give a config that differs from the model's in its positions only"
        )


def _apply_config(live: "PreTrainedModel", config: "PreTrainedConfig", in_memory: InMemory) -> None:
    """Make a model in memory compute as a config says, with the changes that a plan makes only in
    memory."""
    from transformers import PreTrainedConfig

    from ropext.models.patching.self_extend import apply_fold, remove_fold

    vars(live).pop(PLANNED, None)  # patch sets it again
    remove_fold(live)
    old = _model_without_weights(live, live.config)
    new = _model_without_weights(live, config)
    growth = in_memory.growth
    tables = position_tables_of(live, growth)
    _check_same_weights(old, new, tables)
    for table in tables.values():
        set_table_rows(table, growth)
    if growth is not None or SLOPES in vars(live):
        set_alibi_slopes(live, growth)
    if not hasattr(live, ORIGINAL):
        setattr(live, ORIGINAL, copy.deepcopy(live.config))
    before = dict(old.named_modules())
    after = dict(new.named_modules())
    seen = set[int]()  # some modules hold copies of the config, most the same one
    for name, module in live.named_modules():
        if name not in after:
            continue  # an adapter's own layers
        held = getattr(module, "config", None)
        if isinstance(held, PreTrainedConfig) and id(held) not in seen:
            seen.add(id(held))
            _update_config(held, before[name].config, after[name].config)
        if any(key.endswith("inv_freq") for key in after[name]._non_persistent_buffers_set):
            _renew_rotary_module(module, after[name])
        else:
            _renew_module(module, before[name], after[name])
    if in_memory.fold is not None:
        apply_fold(live, in_memory.fold)


def apply_config(
    model: Model,
    config: JsonObject,
    in_memory: InMemory = CONFIG_ALONE,
) -> Model:
    """Make a model in memory compute as if it had been loaded with this config dict, and return it.

    A second call with another config replaces the first. The only weight that may change is a
    learned position table, if the plan changes it in memory.
    """
    live = base_model(model)
    kind = config.get("model_type")
    if kind != live.config.model_type:
        raise InputError(
            f"the config is of type {kind!r}, the model in memory of type "
            f"{live.config.model_type!r}"
        )
    _apply_config(live, type(live.config).from_dict(untagged(config)), in_memory)
    return model


def apply_plan(model: Model, plan: ExtensionPlan) -> Model:
    """Make a model in memory compute as a plan says, and return it."""
    return apply_config(model, plan.config, plan.in_memory)


def unpatch(model: Model) -> Model:
    """Make a model in memory compute as it did before the first patch, and return it."""
    live = base_model(model, "unpatch")
    original = getattr(live, ORIGINAL, None)
    if original is not None:
        from ropext.models.patching.intact import SUMS

        _apply_config(live, original, CONFIG_ALONE)
        vars(live).pop(SUMS, None)
    return model


def check_rotation(live: "PreTrainedModel") -> None:
    """Raise UsageError if the rotary frequencies of a model in memory were changed by hand."""
    from ropext.models.patching.intact import check_frequencies

    if any(name.endswith("inv_freq") for name, _ in live.named_buffers()):
        check_frequencies(live, _model_without_weights(live, live.config))


def name_of_loaded(live: "PreTrainedModel") -> str:
    """Return the directory or hub id that a model in memory came from, as transformers keeps it.
    Return "" if it keeps none."""
    return str(getattr(live.config, "_name_or_path", ""))


def plan_for_loaded(
    model: object,
    *,
    window: int | None = None,
    group: int | None = None,
    literal: bool = False,
    **options: Any,
) -> ExtensionPlan:
    """Return the plan for a model in memory, from the config that it had before any patch."""
    live = base_model(model)
    name = name_of_loaded(live) or type(live).__name__
    fold = SelfExtend(window=window, group=group, literal=literal).fold
    given = None if fold == FoldOptions() else fold
    return plan_config(config_before_patch(live), parse_extend(options), name, given)


def plan_of_patched(live: object) -> ExtensionPlan | None:
    """Return the plan that a patched model in memory computes by. Return None if it is not
    patched."""
    made: ExtensionPlan | None = getattr(live, PLANNED, None)
    return made


def config_of_loaded(live: "PreTrainedModel") -> dict[str, Json]:
    """Return the config by which a model in memory computes, with all the spellings that a plan
    wrote."""
    config: dict[str, Json] = json.loads(live.config.to_json_string())
    made = plan_of_patched(live)
    return config if made is None else config | dict(made.config)


def config_before_patch(live: "PreTrainedModel") -> dict[str, Json]:
    """Return the config of a model in memory from before any patch, as save_pretrained would write
    it: without the values that the library fills in."""
    config: dict[str, Json] = json.loads(getattr(live, ORIGINAL, live.config).to_json_string())
    return config


@public(SelfExtend, Extend, without=("finetune",), model=LOADED)
def patch(
    model: Model,
    *,
    window: int | None = None,
    group: int | None = None,
    literal: bool = False,
    **options: Any,
) -> Model:
    """Extend a loaded model in place, and return it.

    Its logits then equal the logits of the checkpoint that `ropext extend` writes with these
    options. No checkpoint can describe the method `self-extend`. It takes `window`, `group` and
    `literal` (the paper's rule, by which queries inside the trained context see groups too). A
    second call replaces the first; `ropext.models.patching.unpatch` undoes it.
    """
    from ropext.models.patching.intact import keep_exact, keep_sums

    live = base_model(model)
    made = plan_for_loaded(model, window=window, group=group, literal=literal, **options)
    made.raise_if_refused()
    check_rotation(live)
    is_first = plan_of_patched(live) is None
    apply_plan(model, made)
    keep_exact(live)
    setattr(live, PLANNED, made)
    if is_first:
        keep_sums(live, position_tables_of(live, None))  # the old rows of tables are kept unchanged
    return model
