"""The model in memory, as training wants it."""

from typing import Any

import torch

from ropext.checkpoint import Snapshot
from ropext.errors import InputError, UnsupportedModel, UsageError
from ropext.evaluation.loading import local_rank, with_attention
from ropext.training.options import Options

# Config keys whose presence means that logits are scaled or capped; the probe of the loaded model
# decides, these only let the estimate know it beforehand.
CAPPING = (
    "final_logit_softcapping",
    "logit_scale",
    "logits_scaling",
    "lm_head_multiplier",
    "output_multiplier_scale",
)


def device(options: Options) -> torch.device:
    """Where this process trains."""
    if options.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda was asked for, but torch finds no CUDA device")
    if options.device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", local_rank())


def dtype(options: Options, where: torch.device) -> torch.dtype:
    """Of the frozen weights: bfloat16 on a GPU, float32 on a CPU, which emulates the other."""
    if options.dtype != "auto":
        found: torch.dtype = getattr(torch, options.dtype)
        return found
    return torch.bfloat16 if where.type == "cuda" else torch.float32


def skeleton(snapshot: Snapshot) -> Any:
    """The model from its config alone; inside of init_empty_weights it takes no memory."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(snapshot.directory, trust_remote_code=False)
    try:
        return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    except ValueError as error:
        raise UnsupportedModel(
            f"{snapshot.name}: transformers has no causal language model of type "
            f"{config.model_type}: {str(error).splitlines()[0]}"
        ) from None


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


def load(snapshot: Snapshot, options: Options) -> Any:
    """The extended model with its weights."""
    where = device(options)
    # Neither code from the model nor a pickle beside its weights.
    keywords = {
        "dtype": dtype(options, where),
        "trust_remote_code": False,
        "use_safetensors": True,
    }
    if options.qlora:
        keywords["quantization_config"] = four_bits(where)
    # Packed weights cannot be moved once they are loaded.
    packed = options.qlora or snapshot.is_quantised
    if packed:
        keywords["device_map"] = {"": where}
    model = _with_attention(snapshot, options.attn_implementation, keywords)
    if not packed:
        model = model.to(where)
    model.config.use_cache = False
    return model


def _with_attention(snapshot: Snapshot, asked: str | None, keywords: dict[str, Any]) -> Any:
    """Loaded with the attention that was asked for, or one that the model has."""
    import transformers
    from safetensors import SafetensorError

    try:
        return with_attention(
            asked,
            lambda kind: transformers.AutoModelForCausalLM.from_pretrained(
                snapshot.directory, attn_implementation=kind, **keywords
            ),
        )
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
            "pip install bitsandbytes, or leave --qlora out"
        )
    return transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
