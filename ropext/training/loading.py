"""The model in memory, as training wants it."""

from typing import Any

import torch

from ropext.checkpoint import Snapshot
from ropext.errors import InputError, UnsupportedModel, UsageError
from ropext.evaluation.loading import local_rank, with_attention
from ropext.evaluation.work import processes
from ropext.options.training import Finetune
from ropext.training import sharing

# Config keys whose presence means that logits are scaled or capped; the probe of the loaded model
# decides, these only let the estimate know it beforehand.
CAPPING = (
    "final_logit_softcapping",
    "logit_scale",
    "logits_scaling",
    "lm_head_multiplier",
    "output_multiplier_scale",
)


def device(options: Finetune) -> torch.device:
    """Where this process trains."""
    if options.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda was asked for, but torch finds no CUDA device")
    if options.device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", local_rank())


def dtype(options: Finetune, where: torch.device) -> torch.dtype:
    """Of the frozen weights: bfloat16 on a GPU, float32 on a CPU, which emulates the other."""
    if options.dtype != "auto":
        found: torch.dtype = getattr(torch, options.dtype)
        return found
    return torch.bfloat16 if where.type == "cuda" else torch.float32


def skeleton(snapshot: Snapshot, attention: str = "eager", **keywords: Any) -> Any:
    """The model from its config alone, its weights on the meta device."""
    import transformers
    from accelerate import init_empty_weights

    config = transformers.AutoConfig.from_pretrained(snapshot.directory, trust_remote_code=False)
    build: Any = transformers.AutoModelForCausalLM.from_config
    try:
        with init_empty_weights(include_buffers=False):
            model = build(config, attn_implementation=attention, **keywords)
    except ValueError as error:
        if attention != "eager":
            raise
        raise UnsupportedModel(
            f"{snapshot.name}: transformers has no causal language model of type "
            f"{config.model_type}: {str(error).splitlines()[0]}"
        ) from None
    model.tie_weights()  # accelerate gives the head weights of its own
    return model


def caps_logits(model: Any) -> str | None:
    """Why the loss will need whole logits, as far as the config tells."""
    config = model.config.get_text_config()
    for key in CAPPING:
        value = getattr(config, key, None)
        if value not in (None, 0, 1, 1.0):
            return f"it scales or caps its logits ({key} {value:g})"
    return None


def is_eager(skeleton: Any, asked: str | None) -> bool:
    """Whether attention will hold its whole square of positions."""
    return asked == "eager" or not (asked or getattr(skeleton, "_supports_sdpa", True))


def load(snapshot: Snapshot, options: Finetune) -> Any:
    """The extended model with its weights. Under FSDP they stay in the first process's memory, and
    accelerate shares them out from there (its cpu_ram_efficient_loading)."""
    where = device(options)
    # Neither code from the model nor a pickle beside its weights.
    keywords = {
        "dtype": dtype(options, where),
        "trust_remote_code": False,
        "use_safetensors": True,
    }
    if options.qlora:
        keywords["quantization_config"] = four_bits(where)
    packed = options.qlora or bool(snapshot.quantisation)
    if packed:
        keywords["device_map"] = {"": where}
    if sharing.is_fsdp():
        model = _share_dtypes(_with_attention(snapshot, options.attn_implementation, keywords))
    else:
        model = _with_attention(snapshot, options.attn_implementation, keywords)
        # Packed weights cannot be moved once they are loaded.
        model = model if packed else model.to(where)
    model.config.use_cache = False
    return model


def _share_dtypes(model: Any) -> Any:
    """What a family keeps in float32 while it loads is that in all processes."""
    dtypes = sharing.by_first(lambda: {name: own.dtype for name, own in model.named_parameters()})
    for name, own in model.named_parameters():
        own.data = own.data.to(dtypes[name])
    return model


def _with_attention(snapshot: Snapshot, asked: str | None, keywords: dict[str, Any]) -> Any:
    """Loaded with the attention that was asked for, or one that the model has. FSDP takes all
    weights from the first process; the others hold none."""
    import transformers
    from safetensors import SafetensorError

    def build(kind: str) -> Any:
        if sharing.is_fsdp() and processes()[0] != 0:
            return skeleton(snapshot, kind, dtype=keywords["dtype"])
        return transformers.AutoModelForCausalLM.from_pretrained(
            snapshot.directory, attn_implementation=kind, **keywords
        )

    try:
        return with_attention(asked, build)
    except (ValueError, ImportError, SafetensorError) as error:
        reason = str(error).strip().splitlines()[0]
        if asked and ("attn_implementation" in str(error) or isinstance(error, ImportError)):
            raise UsageError(f"--attn-implementation {asked}: {reason}") from error
        raise InputError(
            f"{snapshot.name} cannot be loaded as a causal language model: {reason}"
        ) from error


TRACKERS = {"none": None, "tensorboard": "tensorboard", "wandb": "wandb", "trackio": "trackio"}


def check_tracker(name: str) -> None:
    """Trainer has the switch; the package behind it is the user's."""
    import importlib.util

    if name not in TRACKERS:
        raise UsageError(f"--report-to is one of {', '.join(TRACKERS)}, was {name!r}")
    package = TRACKERS[name]
    # tensorboardX serves as well.
    known = [package, "tensorboardX"] if package == "tensorboard" else [package]
    if package and not any(importlib.util.find_spec(str(own)) for own in known):
        raise UsageError(
            f"--report-to {name} needs the package {package}, which is not installed: "
            f"pip install {package}"
        )


def four_bits(where: torch.device) -> Any:
    """QLoRA's quantiser: 4-bit NormalFloat, doubly quantised (Dettmers et al. 2023, section 3)."""
    import importlib.util

    import transformers

    if where.type != "cuda":
        raise UsageError("--qlora needs a CUDA device; leave it out, or try --dtype bfloat16")
    if importlib.util.find_spec("bitsandbytes") is None:
        raise UsageError(
            "--qlora needs the package bitsandbytes, which is not installed: "
            "pip install 'ropext[qlora]', or leave --qlora out"
        )
    return transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
