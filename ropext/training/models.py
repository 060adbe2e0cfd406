"""Prepare the model in memory for training: without weights, loaded, and with its LoRA."""

import importlib.util
import re
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from ropext.base.errors import InputError, UsageError, did_you_mean
from ropext.files.checkpoint import Snapshot
from ropext.models import processes
from ropext.models.load import (
    Loading,
    device_of,
    load_model,
    loading_errors,
    local_rank,
    model_without_weights,
    predicts_masked_tokens,
    with_attention,
)
from ropext.options.training import Finetune, TrainingOptions
from ropext.training.defaults import Settings
from ropext.training.new_rows import NewRows

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import BitsAndBytesConfig, PreTrainedModel

TRACKERS = ("none", "tensorboard", "wandb", "trackio")  # packages of these names


def training_device(options: TrainingOptions) -> torch.device:
    """Return the device on which this process trains; with CUDA, a GPU of its own."""
    name = device_of(options.device)
    return torch.device("cuda", local_rank()) if name.startswith("cuda") else torch.device(name)


def training_dtype(options: TrainingOptions) -> torch.dtype:
    """Return the dtype of the weights that are frozen in training: bfloat16 on a GPU, float32 on
    a CPU, which emulates bfloat16."""
    if options.dtype != "auto":
        chosen: torch.dtype = getattr(torch, options.dtype)
        return chosen
    return torch.bfloat16 if training_device(options).type == "cuda" else torch.float32


def load_to_train(snapshot: Snapshot, options: TrainingOptions) -> "PreTrainedModel":
    """Load the model to train with its weights, and with the attention that the user chose, or
    another that it has. Under FSDP the first process alone holds the weights, and accelerate
    shares them out from there (its cpu_ram_efficient_loading)."""
    where = training_device(options)
    qlora = isinstance(options, Finetune) and options.qlora
    packed = qlora or bool(snapshot.quantisation)
    how = Loading(
        dtype=training_dtype(options),
        place={"": where} if packed else None,
        attention=options.attn_implementation,
        masked=predicts_masked_tokens(snapshot),
        quantiser=qlora_quantiser(where) if qlora else None,
    )
    if processes.is_fsdp() and not processes.is_main():
        with loading_errors(snapshot, how):
            model = with_attention(
                how.attention,
                partial(model_without_weights, snapshot, dtype=training_dtype(options)),
            )
    else:
        model = load_model(snapshot, how)
    if processes.is_fsdp():
        # Parameters that a family keeps in float32 while it loads become float32 in all processes.
        dtypes = processes.ask_first_process(
            lambda: {name: p.dtype for name, p in model.named_parameters()}
        )
        for name, parameter in model.named_parameters():
            parameter.data = parameter.data.to(dtypes[name])
    elif not packed:  # packed weights cannot be moved once they are loaded
        module: nn.Module = model
        module.to(where)
    model.config.use_cache = False
    return model


def check_tracker(name: str) -> None:
    """Refuse a training with an unknown tracker of --report-to, or with a tracker whose package is
    not installed."""
    if name not in TRACKERS:
        raise UsageError(f"--report-to is one of {', '.join(TRACKERS)}, was {name!r}")
    known = [name]
    if name == "tensorboard":
        known.append("tensorboardX")  # serves as well
    if name != "none" and not any(map(importlib.util.find_spec, known)):
        raise UsageError(
            f"--report-to {name} needs the package {name}, which is not installed: "
            f"pip install {name}"
        )


def qlora_quantiser(where: torch.device) -> "BitsAndBytesConfig":
    """Return QLoRA's quantiser of the frozen weights in training: 4-bit NormalFloat, doubly
    quantised (Dettmers et al. 2023, section 3)."""
    import transformers

    if where.type != "cuda":
        raise UsageError("--qlora needs a CUDA device; leave it out, or try --dtype bfloat16")
    if importlib.util.find_spec("bitsandbytes") is None:
        raise UsageError(
            "--qlora needs the package bitsandbytes, which is not installed: "
            "pip install bitsandbytes, or leave --qlora out"
        )
    return transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )


def add_adapter(
    model: "PreTrainedModel",
    options: Finetune,
    settings: Settings,
    new_rows: NewRows | None = None,
) -> "PeftModel":
    """Return the model in PEFT, with a LoRA to train, new rows of a position table, or both.

    Norms (--train-norms), embeddings (--train-embeddings) and a position table are trained as full
    copies; in the table only new rows move.
    """
    import peft
    from peft.utils.constants import DUMMY_TARGET_MODULES

    names: list[str] | str = DUMMY_TARGET_MODULES  # PEFT's word for none
    if settings.rank is not None and settings.alpha is not None:
        linear = lora_layer_names(model, options.targets)
        check_lora_rank(model, linear, settings.rank.value)
        # Full names if a short one would also match outside of the text decoder.
        inside = {id(module) for module in model.get_decoder().modules()}
        where = dict[str, bool]()
        for name, module in model.named_modules():
            if name.rpartition(".")[2] in linear:
                where[name] = id(module) in inside
        names = linear
        if not all(where.values()):
            names = [name for name, is_inside in where.items() if is_inside]
    saved = _norm_names(model) if options.train_norms else []
    if options.train_embeddings:
        embedding = model.get_input_embeddings()
        name = next(name for name, module in model.named_modules() if module is embedding)
        # PEFT ties a trained embedding only if a name here ends in a name that it knows.
        saved += [name, f"{name}.lm_head"]
    if new_rows is not None:
        saved += new_rows.modules(model)
    tied = bool(getattr(model.config.get_text_config(), "tie_word_embeddings", False))
    config = peft.LoraConfig(
        # PEFT has no kind for a masked language model.
        task_type="CAUSAL_LM" if hasattr(model, "prepare_inputs_for_generation") else None,
        lora_dropout=options.dropout,
        target_modules=names,
        modules_to_save=saved or None,
        # Without it the trained copy of a tied embedding would leave the head behind.
        ensure_weight_tying=tied and options.train_embeddings,
        bias="none",
    )
    if settings.rank is not None and settings.alpha is not None:
        config.r = settings.rank.value
        config.lora_alpha = settings.alpha.value
    joined = peft.get_peft_model(model, config)
    if new_rows is not None:
        new_rows.prepare(joined)
    return joined


def lora_layer_names(model: "PreTrainedModel", wanted: tuple[str, ...]) -> list[str]:
    """Return the short names of the linear layers that get a LoRA, all or the `wanted` ones; refuse
    a name that no layer has.

    These layers are inside the model's blocks, which are the members of a list of modules. The
    output head stays out, and so do projections of images or sound from outside of the text
    decoder. Layers that multiply otherwise (DeepSeek V4's groups, Llama 4's router) stay out too.
    So do the layers of a router, past which LongCat reads the weights.
    """
    head = model.get_output_embeddings()
    decoder = model.get_decoder()
    plain = dict[str, bool]()
    for name, module in decoder.named_modules():
        parent, _, short = name.rpartition(".")
        inside = any(part.isdigit() for part in parent.split("."))
        # Also the classes that quantisers make of nn.Linear, and the transposed Conv1D of GPT-2.
        kind = type(module).__name__
        linear = isinstance(module, nn.Linear) or kind in ("Conv1D", "Linear4bit")
        if inside and module is not head and linear:
            kinds = f"{kind} {type(decoder.get_submodule(parent)).__name__}"
            plain[short] = plain.get(short, True) and not re.search("Router|Grouped", kinds)
    linears = [name for name, is_plain in plain.items() if is_plain]
    if not linears:
        raise InputError("--targets: this model has no linear layer inside its blocks")
    for name in wanted:
        if name not in linears:
            meant = did_you_mean(name, linears, "none has a name like it;")
            raise UsageError(
                f"--targets {name} matches no linear layer; {meant} there are {', '.join(linears)}"
            )
    return list(wanted) or linears


def _norm_names(model: nn.Module) -> list[str]:
    """Return the full names of the norms to train: modules without children whose class is
    called a norm and whose weights have one dimension."""
    names = []
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        norm = "norm" in type(module).__name__.lower() and not list(module.children())
        if norm and isinstance(weight, nn.Parameter) and weight.ndim == 1:
            names.append(name)
    return names


def check_lora_rank(model: "PreTrainedModel", names: Iterable[str], rank: int) -> None:
    """Refuse a --rank of a LoRA beyond a layer's smaller side, which would train more than the
    layer has."""
    wanted = set(names)
    sides = [
        (min(module.weight.shape), name)
        for name, module in model.get_decoder().named_modules()
        # A quantiser's packed weight does not have the layer's shape; a block can have its name.
        if name.rpartition(".")[2] in wanted
        and type(module).__name__ != "Linear4bit"
        and hasattr(module, "weight")
    ]
    smallest, name = min(sides, default=(rank, ""))
    if rank > smallest:
        raise UsageError(
            f"--rank {rank} is above {smallest}, the smaller side of {name}; give at most "
            f"{smallest}, or name other layers (--targets)"
        )
