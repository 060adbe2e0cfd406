"""A model in memory, with errors that a user can act on: the one loader of weights."""

import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from ropext.checkpoint import Snapshot
from ropext.checkpoint.unchanged import check_unchanged
from ropext.errors import InputError, UnsupportedModel, UsageError, first_line
from ropext.models.masked import headless, is_masked

if TYPE_CHECKING:
    import torch
    from transformers import BitsAndBytesConfig, PreTrainedModel

    from ropext.options.evaluate import DocumentOptions
    from ropext.options.training import TrainingOptions

    Loaded = tuple[PreTrainedModel, Mapping[str, list[str]]]  # and what its files lack

Built = TypeVar("Built")


def local_rank() -> int:
    """Which process of this machine we are, under `accelerate launch`."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def device_of(options: "DocumentOptions | TrainingOptions") -> str:
    """The device name; under several processes each takes its own GPU."""
    import torch

    if options.device != "auto":
        if options.device.startswith("cuda") and not torch.cuda.is_available():
            raise UsageError("--device cuda: torch finds no CUDA device")
        if options.device == "mps" and not torch.backends.mps.is_available():
            raise UsageError("--device mps: torch finds no Apple GPU")
        return options.device
    return f"cuda:{local_rank()}" if torch.cuda.is_available() else "cpu"


@contextmanager
def silenced() -> Iterator[None]:
    """No progress bars and advice from transformers, which would mix with our own narration."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def auto_class(masked: bool) -> Any:
    """The stock class that loads causal or masked language models."""
    import transformers

    return transformers.AutoModelForMaskedLM if masked else transformers.AutoModelForCausalLM


def skeleton(
    snapshot: Snapshot,
    attention: str = "eager",
    trust_remote_code: bool = False,
    masked: bool | None = None,
    dtype: "torch.dtype | None" = None,
) -> "PreTrainedModel":
    """The model from its config alone, its weights on the meta device."""
    from accelerate import init_empty_weights
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(snapshot.directory, trust_remote_code=trust_remote_code)
    keywords: dict[str, torch.dtype] = {}
    if dtype is not None:  # None would replace the config's own by float32
        keywords["dtype"] = dtype
    if masked is None:
        masked = is_masked(snapshot)
    try:
        with init_empty_weights(include_buffers=False):
            model: PreTrainedModel = auto_class(masked).from_config(
                config,
                attn_implementation=attention,
                trust_remote_code=trust_remote_code,
                **keywords,
            )
    except ValueError as error:
        if attention != "eager":
            raise
        raise UnsupportedModel(
            f"{snapshot.name}: transformers has no causal language model of type "
            f"{config.model_type}: {first_line(error)}"
        ) from None
    model.tie_weights()  # accelerate gives the head weights of its own
    return model


@dataclass(frozen=True)
class Loading:
    """How the weights of a model are put in memory."""

    dtype: "torch.dtype | str" = "auto"  # "auto": the dtype that they are stored in
    place: "Mapping[str, torch.device | str] | str | None" = None  # a device map; None: the CPU
    attention: str | None = None  # None: SDPA where the model has it
    trust_remote_code: bool = False
    masked: bool = False  # the model fills in masked tokens
    quantiser: "BitsAndBytesConfig | None" = None
    purpose: str = "trained"  # what is done with it, for a message


def loading_of(
    options: "DocumentOptions", trust_remote_code: bool = False, masked: bool = False
) -> Loading:
    """How the options of an evaluation load a model."""
    import torch

    dtype = options.dtype if options.dtype == "auto" else getattr(torch, options.dtype)
    place = options.device_map or {"": device_of(options)}
    return Loading(
        dtype=dtype,
        place=place,
        attention=options.attn_implementation,
        trust_remote_code=trust_remote_code,
        masked=masked,
        purpose="evaluated",
    )


def load_model(snapshot: Snapshot, how: Loading) -> "PreTrainedModel":
    """Load the causal or masked language model, in evaluation mode. Its weights are in memory, and
    a checkpoint that was changed since it was opened is refused."""
    keywords = dict[str, object]()
    if how.place is not None:
        keywords["device_map"] = how.place
    if how.quantiser is not None:
        keywords["quantization_config"] = how.quantiser

    def build(attention: str) -> "Loaded":
        loaded: Loaded = auto_class(how.masked).from_pretrained(
            snapshot.directory,
            dtype=how.dtype,
            trust_remote_code=how.trust_remote_code,
            use_safetensors=True,  # a pickle beside them is never opened
            attn_implementation=attention,
            output_loading_info=True,
            **keywords,
        )
        return loaded

    with loading_errors(snapshot, how):
        model, report = with_attention(how.attention, build)
        _copy_mapped(model)
    check_unchanged(snapshot, how.purpose)
    if how.masked and report["missing_keys"]:
        raise headless(snapshot)
    return model


def _copy_mapped(model: "PreTrainedModel") -> None:
    """Copy weights on the CPU into memory. As safetensors loads them they are maps of their files:
    who writes into a file changes the model, and who truncates it ends the process (SIGBUS)."""
    import torch

    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.device.type == "cpu" and type(tensor) in (torch.Tensor, torch.nn.Parameter):
            tensor.data = tensor.data.clone()


@contextmanager
def loading_errors(snapshot: Snapshot, how: Loading) -> Iterator[None]:
    """Say in one sentence why stock transformers cannot load a model."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, ValueError, ImportError, SafetensorError) as error:
        reason = first_line(error)
        if how.attention and _attention_fails(snapshot, how, how.attention):
            raise UsageError(f"--attn-implementation {how.attention}: {reason}") from error
        kind = "masked" if how.masked else "causal"
        raise InputError(
            f"{snapshot.name} cannot be loaded as a {kind} language model: {reason}"
        ) from error


def _attention_fails(snapshot: Snapshot, how: Loading, attention: str) -> bool:
    """Whether the model, without its weights, is built with eager attention but not with this."""
    return not _is_built(snapshot, how, attention) and _is_built(snapshot, how, "eager")


def _is_built(snapshot: Snapshot, how: Loading, attention: str) -> bool:
    try:
        skeleton(snapshot, attention, how.trust_remote_code, how.masked)
    except (OSError, ValueError, ImportError, UnsupportedModel):
        return False
    return True


def with_attention(wanted: str | None, build: Callable[[str], Built]) -> Built:
    """A model built with the attention asked for, or with SDPA where it has that, else eager.

    Always said, for a config may name another one, and transformers fetches kernels by such names.
    """
    if wanted:
        return build(wanted)
    try:
        return build("sdpa")
    except ValueError as error:
        if "sdpa" not in str(error).lower() and "scaled_dot_product" not in str(error):
            raise
        return build("eager")
