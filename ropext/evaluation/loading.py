"""A model and its tokenizer in memory, with errors that a user can act on."""

import json
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ropext import families
from ropext.checkpoint import Snapshot
from ropext.checkpoint.adapter import WEIGHTS, read_lora
from ropext.corpus.sandbox import try_class, try_tokenizer
from ropext.errors import InputError, Stopped, UnsupportedModel, UsageError
from ropext.families.config import Dict, flat, parts
from ropext.files import peak_memory
from ropext.narration import Say
from ropext.report.text import size

if TYPE_CHECKING:
    import torch

    from ropext.options.evaluate import DocumentOptions
    from ropext.options.training import TrainingOptions

# How the names of classes end that predict masked tokens.
MASKED_HEADS = ("ForMaskedLM", "ForPreTraining", "WithLMHeadModel")
CGROUP = Path("/sys/fs/cgroup")
# Keys of tokenizer_config.json that no class counts to, and what others are counted to at once.
LENGTHS_OF_TOKENIZERS = ("model_max_length", "max_length")
COUNTED = 10_000


def local_rank() -> int:
    """Which process of this machine we are, under `accelerate launch`."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def device_of(options: "DocumentOptions | TrainingOptions") -> str:
    """The device name; under several processes each takes its own GPU."""
    import torch

    if options.device != "auto":
        if options.device.startswith("cuda") and not torch.cuda.is_available():
            raise UsageError("--device cuda was asked for, but torch finds no CUDA device")
        if options.device == "mps" and not torch.backends.mps.is_available():
            raise UsageError("--device mps was asked for, but torch finds no Apple GPU")
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


def load_tokenizer(snapshot: Snapshot, trust_remote_code: bool) -> Any:
    """The tokenizer that lies beside the model."""
    from transformers import AutoTokenizer

    if "tokenizer.json" in snapshot.files:
        file = snapshot.path("tokenizer.json")
        try_tokenizer(file, file.stat().st_mtime_ns)
    if not trust_remote_code and _needs_trial(snapshot):
        files = [snapshot.path(name).stat() for name in snapshot.files if _is_read(name)]
        size = sum(file.st_size for file in files)
        try_class(snapshot.directory, size, max((file.st_mtime_ns for file in files), default=0))
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            snapshot.directory, trust_remote_code=trust_remote_code
        )
        if len(tokenizer) <= len(set(tokenizer.all_special_tokens)):  # what some classes make of it
            raise ValueError("its files are missing")
        return tokenizer
    except Exception as error:  # tokenizers raises this very class for a file it cannot read
        reason = " ".join(str(error).split())
        if "tokenizer.json" not in snapshot.files:
            reason = f"there is no tokenizer.json, and {reason}"
        raise InputError(
            f"{snapshot.name} has no tokenizer that transformers can load: {reason}"
        ) from error


def _is_read(name: str) -> bool:
    """Whether a tokenizer may be made of a file."""
    return "/" not in name and not name.endswith((".safetensors", ".py", ".md"))


def _needs_trial(snapshot: Snapshot) -> bool:
    """Whether making the tokenizer may take more than its files say: they are converted, or its
    class is given a number that it may count to."""
    if "tokenizer.json" not in snapshot.files:
        return True
    for part in parts(Dict(snapshot.tokenizer_config or {})):
        for key, value in part.values.items():
            if key in LENGTHS_OF_TOKENIZERS:
                continue
            if any(type(item) in (int, float) and item > COUNTED for item in flat(value)):
                return True
    return False


def headless(snapshot: Snapshot) -> UnsupportedModel:
    """The error of a model that predicts no tokens."""
    what = ", ".join(snapshot.config.get("architectures") or ["by its weights"])
    return UnsupportedModel(
        f"{snapshot.name} has no head that predicts masked tokens ({what}); a sentence encoder is "
        f"measured by MTEB (pip install mteb): mteb run -m {snapshot.name} -b LongEmbed"
    )


def fills_in(snapshot: Snapshot, masked: bool) -> bool:
    """Whether it is a masked language model, as its family is; without a head it is refused."""
    names = snapshot.config.get("architectures") or ()
    if masked and names and not any(name.endswith(MASKED_HEADS) for name in names):
        raise headless(snapshot)
    return masked


def is_masked(snapshot: Snapshot) -> bool:
    """Whether a model that does not rotate fills in masked tokens."""
    scheme = families.read_positions(snapshot.config)
    return fills_in(snapshot, scheme is not None and scheme.carried and not scheme.causal)


def auto_class(masked: bool) -> Any:
    """The stock class that loads causal or masked language models."""
    import transformers

    return transformers.AutoModelForMaskedLM if masked else transformers.AutoModelForCausalLM


def skeleton(
    snapshot: Snapshot,
    attention: str = "eager",
    trust_remote_code: bool = False,
    masked: bool | None = None,
    **keywords: Any,
) -> Any:
    """The model from its config alone, its weights on the meta device."""
    from accelerate import init_empty_weights
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(snapshot.directory, trust_remote_code=trust_remote_code)
    build: Any = auto_class(is_masked(snapshot) if masked is None else masked).from_config
    keywords |= {"attn_implementation": attention, "trust_remote_code": trust_remote_code}
    try:
        with init_empty_weights(include_buffers=False):
            model = build(config, **keywords)
    except ValueError as error:
        if attention != "eager":
            raise
        raise UnsupportedModel(
            f"{snapshot.name}: transformers has no causal language model of type "
            f"{config.model_type}: {str(error).splitlines()[0]}"
        ) from None
    model.tie_weights()  # accelerate gives the head weights of its own
    return model


def load_model(
    snapshot: Snapshot, options: "DocumentOptions", trust_remote_code: bool, masked: bool = False
) -> Any:
    """The causal or masked language model, in evaluation mode."""
    import torch
    from safetensors import SafetensorError

    dtype = options.dtype if options.dtype == "auto" else getattr(torch, options.dtype)
    place = options.device_map or {"": device_of(options)}
    try:
        model, loading = with_attention(
            options.attn_implementation,
            lambda kind: auto_class(masked).from_pretrained(
                snapshot.directory,
                dtype=dtype,
                trust_remote_code=trust_remote_code,
                use_safetensors=True,  # a pickle beside them is never opened
                attn_implementation=kind,
                output_loading_info=True,
                device_map=place,
            ),
        )
    except (OSError, ValueError, ImportError, SafetensorError) as error:
        raise InputError(
            f"{snapshot.name} cannot be loaded as a {'masked' if masked else 'causal'} language "
            f"model: {_first_line(error)}"
        ) from error
    if masked and loading["missing_keys"]:
        raise headless(snapshot)
    return model.eval()


def with_attention(wanted: str | None, build: Callable[[str], Any]) -> Any:
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


def add_adapter(model: Any, adapter: str) -> Any:
    """A LoRA on top of a loaded model. PEFT gets the config that was checked, not the file, and
    memory for no more than the weights beside it."""
    import peft
    from safetensors import SafetensorError

    given = read_lora(adapter)
    try:
        _check_size(model, given, Path(adapter, WEIGHTS).stat().st_size)
        config = peft.LoraConfig(**given)
        joined = peft.PeftModel.from_pretrained(model, adapter, config=config).eval()
        put_weights(joined, Path(adapter))
        return joined
    except (OSError, TypeError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise InputError(
            f"--adapter {adapter} cannot be put on this model: {_first_line(error)}"
        ) from error


def put_weights(joined: Any, adapter: Path) -> None:
    """Give a PEFT model the weights of an adapter that bear its own names. PEFT renames them as it
    does those of transformers 4, and loses some (Laguna's shared experts) with a warning."""
    import peft
    from safetensors.torch import load_file

    stored = load_file(adapter / WEIGHTS)
    for name, weight in peft.get_peft_model_state_dict(joined).items():
        if name in stored and stored[name].shape == weight.shape:
            weight.data.copy_(stored[name])


def _check_size(model: Any, given: dict[str, Any], size: int) -> None:
    """Refuse a config that makes PEFT allocate more than a file of `size` bytes can fill."""
    import peft

    copied = tuple(given.get("modules_to_save") or ())
    for name, module in model.named_modules():
        if copied and name.endswith(copied) and any(True for _ in module.children()):
            raise ValueError(f"modules_to_save names {name}, which is more than one layer")
    config = peft.LoraConfig(**(given | {"modules_to_save": None}))
    trial = peft.PeftModel(model, config, low_cpu_mem_usage=True)  # on the meta device
    numbers = sum(weight.numel() for name, weight in trial.named_parameters() if "lora_" in name)
    trial.unload()
    vars(model).pop("peft_config", None)  # left behind by peft before 0.21
    if numbers > size:
        raise ValueError(
            f"its config asks for {numbers:,} numbers, its weights have {size:,} bytes"
        )


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


@contextmanager
def memory_errors(sentence: str) -> Iterator[None]:
    """Out of memory becomes a sentence, which names the options that help."""
    import torch

    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise Stopped(sentence) from error
    except RuntimeError as error:
        # The CPU's allocator, Apple's and CUDA's libraries raise a bare RuntimeError.
        words = (
            *("can't allocate memory", "not enough memory", "MPS backend out of memory"),
            *("CUDA error: out of memory", "_ALLOC_FAILED"),
        )
        if not any(known in str(error) for known in words):
            raise
        raise Stopped(sentence) from error


def out_of_memory(what: str, remains: str = "finished documents are kept") -> str:
    """The sentence of an evaluation."""
    return (
        f"out of memory while reading {what}; {remains}: run again with a smaller --chunk (e.g. "
        "2048), a smaller --slice-memory, or --dtype bfloat16"
    )


def free_memory(device: "torch.device") -> int:
    """Bytes that this process may still take; on a CPU a share of what its machine has left.

    Page cache counts as free, for the kernel gives it back; a container's own limit counts too.
    """
    import psutil  # accelerate needs it
    import torch

    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type == "mps":  # its memory is the machine's
        left = torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
        return min(int(left), free_memory(torch.device("cpu")))
    limits = [int(psutil.virtual_memory().available)]
    limit, used = (CGROUP / f"memory.{name}" for name in ("max", "current"))
    if limit.exists() and used.exists() and (most := limit.read_text("ascii").strip()).isdigit():
        cached = _entries(CGROUP / "memory.stat").get("inactive_file", 0)
        limits.append(int(most) - int(used.read_text("ascii")) + cached)
    return min(limits) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def tell_used(log: Path, say: Say, device: "torch.device | str", what: str, seconds: float) -> None:
    """Say what the first unit of a long piece of work took, and keep it in a log, which no
    comparison of runs reads."""
    import torch

    on_gpu = torch.device(device).type == "cuda"
    peak = torch.cuda.max_memory_allocated(device) if on_gpu else peak_memory()
    say(f"{what} took {seconds:.2g} s, and {size(peak)} of memory at the peak")
    with log.open("a", encoding="utf-8") as out:
        out.write(json.dumps({"what": what, "seconds": seconds, "peak_bytes": peak}) + "\n")


def _entries(path: Path) -> dict[str, int]:
    """Lines `name: number unit` or `name number`; nothing where there is no such file."""
    lines = path.read_text("ascii").replace(":", " ").splitlines() if path.exists() else []
    return {parts[0]: int(parts[1]) for line in lines if len(parts := line.split()) > 1}
