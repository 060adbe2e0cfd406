"""Load a model's weights into memory, and measure the memory that is free or used.

Errors name the options that a user can change.
"""

import json
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ropext.base.atomic import file_errors
from ropext.base.errors import InputError, Stopped, UnsupportedModel, UsageError, first_line
from ropext.base.narration import Say
from ropext.base.systems import peak_memory
from ropext.families.schemes import read_positions
from ropext.files.checkpoint import Snapshot
from ropext.files.checkpoint.digests import check_unchanged
from ropext.models.quantised import raise_quantisation_error
from ropext.results.report.text import bytes_text

if TYPE_CHECKING:
    import torch
    from transformers import BitsAndBytesConfig, PreTrainedModel

    from ropext.options.evaluate import DocumentOptions

    # and the report on weights that its files lack
    Loaded = tuple[PreTrainedModel, Mapping[str, list[str]]]

Built = TypeVar("Built")
# Endings of the names of classes that predict masked tokens.
MASKED_HEADS = ("ForMaskedLM", "ForPreTraining", "WithLMHeadModel")
CGROUP = Path("/sys/fs/cgroup")
# Texts of a bare RuntimeError for memory that ran out.
OUT_OF_MEMORY = (
    "can't allocate memory",
    "not enough memory",
    "MPS backend out of memory",
    "CUDA error: out of memory",
    "_ALLOC_FAILED",
)


def local_rank() -> int:
    """Return the rank of this process on its machine, which chooses the GPU to load a model on."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def device_of(wanted: str) -> str:
    """Return the device to load a model on, for a value of --device; with several processes each
    takes its own GPU."""
    import torch

    if wanted != "auto":
        kind, _, number = wanted.partition(":")
        if kind == "cuda" and int(number or 0) >= torch.cuda.device_count():
            raise UsageError(f"--device {wanted}: torch finds no such CUDA device")
        if kind == "mps" and not torch.backends.mps.is_available():
            raise UsageError("--device mps: torch finds no Apple GPU")
        return wanted
    return f"cuda:{local_rank()}" if torch.cuda.is_available() else "cpu"


@contextmanager
def silenced() -> Iterator[None]:
    """Hide the progress bars and advice that transformers prints while a model is loaded or
    runs."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
            # Its name before transformers 5.24, which blames the caller's module.
            warnings.filterwarnings("ignore", "`past_key_values` is deprecated", FutureWarning)
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def auto_class(masked: bool) -> Any:
    """Return the auto class of transformers that loads causal or masked language models."""
    import transformers

    return transformers.AutoModelForMaskedLM if masked else transformers.AutoModelForCausalLM


def no_masked_head_error(snapshot: Snapshot) -> UnsupportedModel:
    """Return the error for a model to load that has no head for masked tokens."""
    what = ", ".join(snapshot.config.get("architectures") or ["by its weights"])
    advice = (
        f"a sentence encoder is measured by MTEB (pip install mteb): mteb run -m {snapshot.name} "
        "-b LongEmbed"
    )
    if "ForConditionalGeneration" in what:
        advice = "ropext neither measures nor trains a model that writes an answer to another text"
    return UnsupportedModel(
        f"{snapshot.name} has no head that predicts masked tokens ({what}); {advice}"
    )


def check_masked_head(snapshot: Snapshot, masked: bool) -> bool:
    """Return `masked`: whether the family of a model to load predicts masked tokens.

    Raise UnsupportedModel if it does but the model has no head for them.
    """
    names = snapshot.config.get("architectures") or ()
    if masked and names and not any(name.endswith(MASKED_HEADS) for name in names):
        raise no_masked_head_error(snapshot)
    return masked


def predicts_masked_tokens(snapshot: Snapshot) -> bool:
    """Return whether a model to load that does not rotate predicts masked tokens."""
    scheme = read_positions(snapshot.config)
    return check_masked_head(snapshot, scheme is not None and scheme.carried and not scheme.causal)


def model_without_weights(
    snapshot: Snapshot,
    attn_implementation: str = "eager",
    trust_remote_code: bool = False,
    masked: bool | None = None,
    dtype: "torch.dtype | None" = None,
) -> "PreTrainedModel":
    """Load a model from its config alone, with its weights on the meta device."""
    from accelerate import init_empty_weights
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(snapshot.directory, trust_remote_code=trust_remote_code)
    keywords: dict[str, torch.dtype] = {}
    if dtype is not None:  # None would replace the config's dtype by float32
        keywords["dtype"] = dtype
    if masked is None:
        masked = predicts_masked_tokens(snapshot)
    try:
        with init_empty_weights(include_buffers=False):
            model: PreTrainedModel = auto_class(masked).from_config(
                config,
                attn_implementation=attn_implementation,
                trust_remote_code=trust_remote_code,
                **keywords,
            )
    except ValueError as error:
        if attn_implementation != "eager":
            raise
        raise UnsupportedModel(
            f"{snapshot.name}: transformers has no causal language model of type "
            f"{config.model_type}: {first_line(error)}"
        ) from None
    model.tie_weights()  # accelerate gives the head separate weights
    return model


@dataclass(frozen=True)
class Loading:
    """The settings for loading a model's weights into memory."""

    dtype: "torch.dtype | str" = "auto"  # "auto": the dtype of the files
    place: "Mapping[str, torch.device | str] | str | None" = None  # a device map; None: the CPU
    attention: str | None = None  # None: SDPA if the model has it
    trust_remote_code: bool = False
    masked: bool = False  # the model fills in masked tokens
    quantiser: "BitsAndBytesConfig | None" = None
    purpose: str = "trained"  # the use of the model, for a message


def loading_of(
    options: "DocumentOptions", trust_remote_code: bool = False, masked: bool = False
) -> Loading:
    """Return how to load a model's weights into memory: the dtype, device and attention that the
    options name."""
    import torch

    dtype = options.dtype if options.dtype == "auto" else getattr(torch, options.dtype)
    place = options.device_map or {"": device_of(options.device)}
    return Loading(
        dtype=dtype,
        place=place,
        attention=options.attn_implementation,
        trust_remote_code=trust_remote_code,
        masked=masked,
        purpose="evaluated",
    )


def load_model(snapshot: Snapshot, how: Loading) -> "PreTrainedModel":
    """Load a causal or masked language model, in evaluation mode, with its weights in memory.

    Raise an error if the checkpoint was changed since it was opened.
    """
    import torch

    keywords = dict[str, object]()
    if how.place is not None:
        keywords["device_map"] = how.place
    if how.quantiser is not None:
        keywords["quantization_config"] = how.quantiser
    build: Callable[..., Loaded] = partial(
        auto_class(how.masked).from_pretrained,
        snapshot.directory,
        dtype=how.dtype,
        trust_remote_code=how.trust_remote_code,
        use_safetensors=True,  # a pickle next to them is never opened
        output_loading_info=True,
        **keywords,
    )
    with loading_errors(snapshot, how):
        model, report = with_attention(how.attention, build)
    # On the CPU safetensors maps the files of the weights into memory. A program that writes into a
    # file would change the model; a program that truncates it would end this process (SIGBUS).
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.device.type == "cpu" and type(tensor) in (torch.Tensor, torch.nn.Parameter):
            tensor.data = tensor.data.clone()
    check_unchanged(snapshot, how.purpose)
    if how.masked and report["missing_keys"]:
        raise no_masked_head_error(snapshot)
    return model


@contextmanager
def loading_errors(snapshot: Snapshot, how: Loading) -> Iterator[None]:
    """Raise one sentence about why stock transformers cannot load a model into memory."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, ValueError, ImportError, SafetensorError) as error:
        raise_quantisation_error(error)
        reason = first_line(error)
        wanted = how.attention
        if wanted and not _is_built(snapshot, how, wanted) and _is_built(snapshot, how, "eager"):
            raise UsageError(f"--attn-implementation {wanted}: {reason}") from error
        kind = "masked" if how.masked else "causal"
        raise InputError(
            f"{snapshot.name} cannot be loaded as a {kind} language model: {reason}"
        ) from error


def _is_built(snapshot: Snapshot, how: Loading, attention: str) -> bool:
    """Return whether transformers loads a model, without its weights, with this attention."""
    try:
        model_without_weights(snapshot, attention, how.trust_remote_code, how.masked)
    except (OSError, ValueError, ImportError, UnsupportedModel):
        return False
    return True


def with_attention(wanted: str | None, build: Callable[..., Built]) -> Built:
    """Load a model with the wanted attention; without a wish, with SDPA if it has that, else eager.

    The argument is always passed: a config may name another attention, and transformers fetches
    kernels by such names.
    """
    if wanted:
        return build(attn_implementation=wanted)
    try:
        return build(attn_implementation="sdpa")
    except ValueError as error:
        if "sdpa" not in str(error).lower() and "scaled_dot_product" not in str(error):
            raise
        return build(attn_implementation="eager")


@contextmanager
def memory_errors(sentence: str) -> Iterator[None]:
    """Raise Stopped with a sentence that names the options that help, if a model takes more memory
    than there is.

    Turn an error of a quantisation library into a sentence that names the library.
    """
    import torch

    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise Stopped(sentence) from error
    except Exception as error:
        # The CPU's allocator, Apple's and CUDA's libraries raise a bare RuntimeError.
        if isinstance(error, RuntimeError) and any(words in str(error) for words in OUT_OF_MEMORY):
            raise Stopped(sentence) from error
        raise_quantisation_error(error)
        raise


def out_of_memory(what: str, remains: str = "finished documents are kept") -> str:
    """Return the sentence that a loaded model took more memory than there is while it read `what`,
    and which options help."""
    return (
        f"out of memory while reading {what}; {remains}: run again with a smaller --chunk (e.g. "
        "2048), a smaller --slice-memory, or --dtype bfloat16"
    )


def free_memory(device: "torch.device") -> int:
    """Return the bytes of memory that a model on this device may still take; on a CPU a share of
    its machine's free memory.

    Page cache counts as free, because the kernel gives it back. A container's own limit counts too.
    """
    import psutil  # accelerate needs it
    import torch

    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type == "mps":  # its memory is the machine's
        left = torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
        return min(int(left), free_memory(torch.device("cpu")))
    limits = [int(psutil.virtual_memory().available)]
    limit = CGROUP / "memory.max"
    used = CGROUP / "memory.current"
    most = ""
    if limit.exists() and used.exists():
        most = limit.read_text("ascii").strip()
    if most.isdigit():  # else "max": no limit
        limits.append(int(most) - int(used.read_text("ascii")) + _inactive_file_bytes())
    return min(limits) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def report_memory_used(
    log: Path | None, say: Say, device: "torch.device | str", what: str, seconds: float
) -> None:
    """Report the time and the peak memory of the first unit of work with a loaded model.

    Append both to a log, which no comparison of runs reads.
    """
    import torch

    on_gpu = torch.device(device).type == "cuda"
    peak = torch.cuda.max_memory_allocated(device) if on_gpu else peak_memory()
    say(f"{what} took {seconds:.2g} s, and {bytes_text(peak)} of memory at the peak")
    if log is None:
        return
    with file_errors(log), log.open("a", encoding="utf-8") as out:
        out.write(json.dumps({"what": what, "seconds": seconds, "peak_bytes": peak}) + "\n")


def _inactive_file_bytes() -> int:
    """Return the bytes of free memory that a loaded model may take from a container's page cache,
    which the kernel takes back first. Return 0 if the container does not report them."""
    stat = CGROUP / "memory.stat"
    lines = stat.read_text("ascii").splitlines() if stat.exists() else []
    return sum(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))
