"""Put a LoRA on a loaded model, after a check of its files and before PEFT reads them."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ropext.base.errors import InputError, first_line
from ropext.base.jsontext import Json
from ropext.files.checkpoint.adapter import WEIGHTS, read_lora

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel


def add_adapter(model: Any, adapter: str) -> Any:
    """Return a model in memory with a LoRA on top.

    PEFT gets the config that ropext checked, not the file, and memory for no more than the
    adapter's weights.
    """
    import peft
    from safetensors import SafetensorError

    given = read_lora(adapter)
    try:
        _check_size(model, given, Path(adapter, WEIGHTS).stat().st_size)
        config = peft.LoraConfig(**given)
        joined = peft.PeftModel.from_pretrained(model, adapter, config=config)
        joined.eval()
        copy_adapter_weights(joined, Path(adapter))
        return joined
    except (OSError, TypeError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise InputError(
            f"--adapter {adapter} cannot be put on this model: {first_line(error)}"
        ) from error


def copy_adapter_weights(joined: "nn.Module", adapter: Path) -> None:
    """Copy the weights of an adapter that have PEFT's own names into a model in memory.

    PEFT renames them like names from transformers 4, and loses some (Laguna's shared
    experts) with a warning.
    """
    import peft
    from safetensors.torch import load_file

    stored = load_file(adapter / WEIGHTS)
    for name, weight in peft.get_peft_model_state_dict(joined).items():
        if name in stored and stored[name].shape == weight.shape:
            weight.data.copy_(stored[name])


def _check_size(model: "PreTrainedModel", given: dict[str, Json], size: int) -> None:
    """Raise ValueError if a LoRA's config makes PEFT take more memory, on top of a model in memory,
    than a file of `size` bytes can fill."""
    import peft

    copied = tuple(given.get("modules_to_save") or ())
    for name, module in model.named_modules():
        if copied and name.endswith(copied) and any(True for _ in module.children()):
            raise ValueError(f"modules_to_save names {name}, which is more than one layer")
    config = peft.LoraConfig(**(given | {"modules_to_save": None}))
    trial = peft.PeftModel(model, config, low_cpu_mem_usage=True)  # on the meta device
    numbers = sum(weight.numel() for name, weight in trial.named_parameters() if "lora_" in name)
    trial.unload()
    vars(model).pop("peft_config", None)  # peft before 0.21 leaves it behind
    if numbers > size:
        raise ValueError(
            f"its config asks for {numbers:,} numbers, its weights have {size:,} bytes"
        )
