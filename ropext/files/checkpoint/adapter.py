"""Read adapter_config.json strictly before PEFT sees it: a plain LoRA, each value within bounds.
PEFT imports modules that such a file names, opens paths, and compiles its texts as patterns."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ropext.base.errors import InputError
from ropext.base.inputs import check_links
from ropext.base.jsontext import Json, read_object
from ropext.files.checkpoint.snapshot import ADAPTER_CONFIG

WEIGHTS = "adapter_model.safetensors"
MOST = 20_000  # names in a list, layers of a model

# Letters, digits, dots and anchors only: such a regular expression cannot backtrack.
Name = Annotated[str, Field(pattern=r"^\^?(?:[\w-]|\\?\.)+\$?$", max_length=500)]
# PEFT writes these itself for experts that transformers 5 fused: ".*\.gate_up_proj".
Pattern = Annotated[str, Field(pattern=r"^(?:\.\*\\\.)?\^?(?:[\w-]|\\?\.)+\$?$", max_length=500)]
Names = Annotated[list[Name], Field(max_length=MOST)]
Rank = Annotated[int, Field(ge=1, le=16_384)]
Alpha = Annotated[float, Field(gt=0, le=10**6)]
Layer = Annotated[int, Field(ge=0, le=MOST)]
# Keys that ropext does not pass to PEFT: without the refused keys they change nothing.
UNREAD = {
    "base_model_name_or_path", "revision", "peft_version", "auto_mapping", "inference_mode",
    "megatron_core", "qalora_group_size", "runtime_config",
}  # fmt: skip


class Lora(BaseModel):
    """The keys of adapter_config.json that ropext passes to PEFT."""

    model_config = ConfigDict(strict=True)

    peft_type: Literal["LORA"]
    task_type: Literal["CAUSAL_LM", "FEATURE_EXTRACTION"] | None = None
    r: Rank = 8
    lora_alpha: Alpha = 8
    lora_dropout: Annotated[float, Field(ge=0, lt=1)] = 0
    target_modules: Names | Literal["all-linear", "dummy-target-modules"] | None = None
    exclude_modules: Names | None = None
    modules_to_save: Names | None = None
    target_parameters: Names | None = None
    layers_to_transform: Layer | Annotated[list[Layer], Field(max_length=MOST)] | None = None
    layers_pattern: Name | Names | None = None
    rank_pattern: dict[Pattern, Rank] | None = None
    alpha_pattern: dict[Pattern, Alpha] | None = None
    bias: Literal["none", "all", "lora_only"] = "none"
    init_lora_weights: bool | Literal["gaussian", "orthogonal"] = True
    fan_in_fan_out: bool = False
    use_rslora: bool = False
    use_dora: bool = False
    lora_bias: bool = False
    ensure_weight_tying: bool = False


def read_lora(adapter: str | Path) -> dict[str, Json]:
    """Open the adapter_config.json in an adapter's directory on the disk, and return the arguments
    of peft.LoraConfig. Raise InputError if the adapter is not a plain LoRA in safetensors."""
    directory = Path(adapter)
    check_links(directory)
    if not (directory / WEIGHTS).is_file():
        raise InputError(
            f"--adapter {adapter} must be a directory with {WEIGHTS}; a pickled adapter "
            "(adapter_model.bin) is never opened"
        )
    config = read_object(directory / ADAPTER_CONFIG)
    foreign = [key for key in config if config[key] and key not in {*Lora.model_fields, *UNREAD}]
    try:
        lora = Lora.model_validate(config)
        key = next(iter(foreign), None)
        why = "not a key of a plain LoRA"
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = str(first["loc"][0])
        why = first["msg"]
    if key is not None:
        raise InputError(
            f"{directory / ADAPTER_CONFIG}: {key[:80]} is {repr(config.get(key))[:60]}, which is "
            f"not supported ({why[:90]}); if you trust the adapter, merge it into its base (peft's "
            "merge_and_unload) and name the merged directory"
        )
    return lora.model_dump(exclude_unset=True, exclude={"peft_type"})
