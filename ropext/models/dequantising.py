"""A GGUF as a directory: weights dequantised by transformers, the rotary embedding as read here.

transformers' own reader of GGUF leaves out rope.scaling and rope_freqs, so that a scaled file would
be measured unscaled; the config that is written here states the numbers that llama.cpp computes.
"""

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from importlib import import_module
from io import StringIO
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ropext import families
from ropext.base import bundled
from ropext.base.errors import InputError
from ropext.base.jsontext import dump
from ropext.base.narration import Say, in_bytes, no_messages
from ropext.base.staging import check_space
from ropext.files.checkpoint.provenance import read_record
from ropext.files.inspecting import open_model

if TYPE_CHECKING:
    from ropext.files.gguf import GgufFile

BYTES = 4  # for each weight: float32 keeps every digit of the file's values


@contextmanager
def dequantised_directory(
    model: str, say: Say = no_messages, check: Callable[[str], object] | None = None
) -> Iterator[str]:
    """Yield the name by which transformers loads a model: unchanged, or a temporary directory of
    dequantised weights if the model is a GGUF file.

    The directory lasts as long as the context. `check` gets it before the weights, which take long
    to make: it can refuse the config, the tokenizer or the record.
    """
    if bundled.find_gguf(model) is None:
        yield model
        return
    from ropext.files.gguf import as_file  # late: a directory needs none of it

    snapshot = as_file(open_model(model))
    # Windows keeps a file that a model still maps.
    with tempfile.TemporaryDirectory(prefix="ropext-gguf-", ignore_cleanup_errors=True) as folder:
        place = Path(folder) / snapshot.head.path.stem
        check_gguf_is_readable(snapshot)
        if check is not None:
            write_gguf_without_weights(snapshot, place)
            check(str(place))
        yield str(dequantise(snapshot, place, say))


def check_gguf_is_readable(model: "GgufFile") -> None:
    """Raise an error if transformers cannot load a GGUF here, whatever it holds."""
    if len(model.parts) > 1:
        raise InputError(
            f"{model.name} is split, and transformers reads one file; `llama-gguf-split --merge` "
            "makes one of its parts"
        )
    for package in ("torch", "transformers", "gguf"):  # transformers names torch where gguf lacks
        import_module(package)


def write_gguf_without_weights(model: "GgufFile", place: Path) -> None:
    """Write the directory from which transformers builds the model of a GGUF in memory without
    weights: config.json, the tokenizer's files and ropext.json."""
    _write_directory(model, place, _save_config)


def dequantise(model: "GgufFile", place: Path, say: Say = no_messages) -> Path:
    """Dequantise a GGUF in memory by transformers, and write it as a directory of float32
    weights."""
    needed = BYTES * sum(prod(tensor.shape) for tensor in model.head.tensors)
    check_space(place, needed)
    say(
        f"transformers dequantises {model.quantisation} to float32: {in_bytes(needed)} of "
        f"memory, and as much in {place.parent.parent}"
    )
    _write_directory(model, place, _save_model)
    return place


def _write_directory(model: "GgufFile", place: Path, save: Callable[[Path, Path], None]) -> None:
    """Write a directory of a GGUF that transformers loads: the parts that `save` takes from the
    file, its tokenizer, its record, and a config with its own rotary embeddings."""
    path = model.head.path
    with redirect_stderr(StringIO()), _gguf_refused(model):  # its progress bars
        from transformers import AutoTokenizer

        save(path, place)
        tokenizer: Any = AutoTokenizer.from_pretrained(
            path.parent, gguf_file=path.name, trust_remote_code=False
        )
        tokenizer.save_pretrained(place)
        config: dict[str, Any] = json.loads((place / "config.json").read_text("utf-8"))
    (place / "config.json").write_bytes(dump(with_rope(config, model.config)))
    if (stored := model.kept_record) is not None:
        (place / "ropext.json").write_bytes(dump(stored))
        record = read_record(place)
        assert record is not None, place
        # A file names no more of its base than its positions.
        base = {**record.base, "config": with_rope(config, record.base["config"])}
        (place / "ropext.json").write_bytes(dump(stored | {"base": base}))


def _save_model(path: Path, place: Path) -> None:
    """Dequantise the model of a GGUF in memory by transformers, and save its weights and config."""
    import torch
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(
        path.parent,
        gguf_file=path.name,
        trust_remote_code=False,
        dtype=torch.float32,
        use_safetensors=True,
    )
    # They are plain float32 now, which transformers would refuse to save.
    loaded.hf_quantizer = None
    loaded.is_quantized = False
    vars(loaded.config).pop("quantization_config", None)
    loaded.save_pretrained(place)


def _save_config(path: Path, place: Path) -> None:
    """Save the config that transformers reads from the header of a GGUF."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name, trust_remote_code=False)
    config.save_pretrained(place)


@contextmanager
def _gguf_refused(model: "GgufFile") -> Iterator[None]:
    """Raise InputError with the reason and a remedy if transformers cannot load a GGUF."""
    try:
        yield
    except ImportError as error:
        raise InputError(f"{model.name}: transformers needs a package for it: {error}") from None
    except (OSError, ValueError, KeyError, RuntimeError, TypeError, AttributeError) as error:
        reason = str(error).strip().splitlines()[:1] or [type(error).__name__]
        raise InputError(
            f"{model.name} cannot be dequantised by transformers ({reason[0]}); measure the "
            "Hugging Face checkpoint that it was made from"
        ) from error


def with_rope(config: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Return the config of a dequantised model with the rotary embeddings and the length of another
    one."""
    params = {site.label: dict(site.params) for site in families.read(other).scaled_sites}
    length = other["max_position_embeddings"]
    return families.write(config, families.read(config), params, length)
