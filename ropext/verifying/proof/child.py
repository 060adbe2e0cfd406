"""Build models with upstream transformers from directories, without weights: the proof's child
process.

Run it as a script, by path, in a fresh process. It imports nothing of ropext and prevents any other
module from importing it. It reads a job from stdin and writes one JSON line per directory to the
file that its only argument names, so that a crash keeps the finished lines. It names ropext's types
for the type checker alone.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import math
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from types import ModuleType

    from torch import nn
    from transformers import PreTrainedConfig, PreTrainedModel

    from ropext.base.jsontext import Json
    from ropext.verifying.proof.answers import (
        Built,
        BuiltAttention,
        BuiltBase,
        BuiltNumbers,
        BuiltRotary,
        ChildJob,
        DirectoryJob,
        TypeDescription,
    )

    NamedModules = Sequence[tuple[str, nn.Module]]


NOT_TEXT = re.compile(r"vision|visual|audio|image|video|speech|vae|token2wav")
# Composites first: some of their types also name their text part's class for causal modelling.
AUTO = (
    "AutoModelForImageTextToText",
    "AutoModelForCausalLM",
    "AutoModelForMaskedLM",
    "AutoModelForSeq2SeqLM",
    "AutoModelForMultimodalLM",
    "AutoModel",
)
LARGE = 1 << 21  # values of a tensor; as float32 they take 8 MB


class Blocked:
    """An import finder in front of all others that refuses to import ropext."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        """Raise ImportError if the child process imports ropext."""
        if name.partition(".")[0] == "ropext":
            raise ImportError("ropext takes no part in its own proof")


def block_ropext() -> None:
    """Make every import of ropext fail in the child process; end it if one succeeds."""
    sys.meta_path.insert(0, Blocked)
    try:
        import ropext  # noqa: F401
    except ImportError:
        return
    raise SystemExit("the proof process could import ropext")


def text_config(config: PreTrainedConfig, path: list[str]) -> PreTrainedConfig:
    """Return the part of transformers' config that holds the rope dict of the built text model;
    `path` leads to it, if known."""
    if not path:
        return config.get_text_config()
    for key in path:
        config = getattr(config, key)
    return config


def model_class(
    config: PreTrainedConfig, directory: str, trust_remote_code: bool
) -> type[PreTrainedModel]:
    """Return the class of transformers by which the child process builds a config: its
    architecture, or the first auto class that knows its type.

    Raise ValueError if there is neither.
    """
    import transformers

    names = getattr(config, "architectures", None) or []
    if type(config).__module__.partition(".")[0] != "transformers" and trust_remote_code:
        from transformers.dynamic_module_utils import get_class_from_dynamic_module

        auto_map = getattr(config, "auto_map", None) or {}
        for auto, reference in auto_map.items():
            if auto.startswith("AutoModel") and reference.rpartition(".")[2] in names:
                custom: type[PreTrainedModel] = get_class_from_dynamic_module(reference, directory)
                return custom
    for name in names:
        named = getattr(transformers, name, None)
        if isinstance(named, type) and issubclass(named, transformers.PreTrainedModel):
            return named
    for auto in (getattr(transformers, name) for name in AUTO if hasattr(transformers, name)):
        known = auto._model_mapping
        if type(config) in known:
            classes = known[type(config)]
            if isinstance(classes, tuple):
                classes = classes[0]
            chosen: type[PreTrainedModel] = classes
            return chosen
    raise ValueError(f"no model class for {names or type(config).__name__}")


def model_without_weights(cls: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    """Return the model that transformers builds in the child process from a config, with real
    buffers, which include its inverse frequencies, and no parameters."""
    import torch
    from accelerate import init_empty_weights
    from torch.overrides import TorchFunctionMode

    makers: tuple[Callable[..., object], ...] = (torch.empty, torch.zeros, torch.rand, torch.randn)

    class OnMeta(TorchFunctionMode):
        """A mode that makes a large tensor on the meta device at once. init_empty_weights moves it
        there only after it was allocated, and the experts of one layer of Kimi K2 take 45 GB."""

        def __torch_function__(
            self,
            function: Callable[..., object],
            types: Collection[type],
            args: Sequence[object] = (),
            kwargs: dict[str, object] | None = None,
        ) -> object:
            """Make a large tensor on the meta device in place of memory, while transformers builds
            a model in the child process."""
            kwargs = kwargs or {}
            if function in makers:
                made = function(*args, **kwargs | {"device": "meta"})
                if isinstance(made, torch.Tensor) and made.numel() > LARGE:
                    return made
            return function(*args, **kwargs)

    with OnMeta(), init_empty_weights(include_buffers=False):
        model: PreTrainedModel = cls(copy.deepcopy(config))
        model.eval()
        return model


def text_modules(model: PreTrainedModel, text: PreTrainedConfig) -> NamedModules:
    """Return the modules of the text model that transformers built in the child process, with their
    paths."""
    paths = [(n, m) for n, m in model.named_modules() if not NOT_TEXT.search(n.lower())]
    typed = [(n, m) for n, m in paths if isinstance(getattr(m, "config", None), type(text))]
    # If every part has a config class of its own (Blt), or none keeps its config, take all.
    if not any(b.endswith("inv_freq") for _, m in typed for b in m._buffers):
        return paths
    keep = {id(m) for _, m in typed}
    return [(n, m) for n, m in paths if id(m) in keep or getattr(m, "config", None) is None]


def attention_factor_at(module: nn.Module, label: str, last: int) -> float | None:
    """Run transformers' own forward at positions 0 and `last`, which settles everything that
    depends on the length.

    Return the factor that it multiplies into cos, read at position 0, at which the cosine is 1:
    PhiMoE takes it from other keys than the module's attribute. Return None if the forward wants
    other arguments.
    """
    import torch

    x = torch.zeros(1, 2, 1)
    for shape in ((1, 2), (3, 1, 2)):  # plain, and one row for each M-RoPE axis
        positions = torch.tensor([0, last]).expand(shape)
        try:
            out = module(x, positions, label) if label else module(x, positions)
        except Exception:  # any refusal only means that the forward has another signature
            continue
        cos = out[0] if isinstance(out, tuple | list) else out
        return float(cos[..., 0, :].abs().max())
    return None


def is_rotation(module: nn.Module) -> bool:
    """Return whether a module with inverse frequencies that the child process built rotates
    (Voxtral's embedding of times adds)."""
    return hasattr(module, "config") or "Rotary" in type(module).__name__


def rotary_numbers(modules: NamedModules, length: int | None = None) -> list[BuiltRotary]:
    """Return the inverse frequencies and the attention factor of every rotary module of a model
    that the child process built, at `length` [the config's full length]."""
    embeddings: list[BuiltRotary] = []
    for name, module in modules:
        for buffer in [b for b in module._buffers if b.endswith("inv_freq")]:
            prefix = buffer.removesuffix("inv_freq")
            if prefix.endswith("original_") or not is_rotation(module):
                continue
            label = prefix.rstrip("_")
            first = getattr(module, buffer).clone()
            config = getattr(module, "config", None)
            last = (length or int(getattr(config, "max_position_embeddings", None) or 2)) - 1
            params = getattr(config, "rope_parameters", None) or {}
            attention = attention_factor_at(module, label, last)
            if attention is None:
                attention = float(getattr(module, f"{prefix}attention_scaling", 1.0))
            two_sets = hasattr(module, f"{prefix}long_inv_freq")  # set by a longrope's forward
            embeddings.append(
                {
                    "module": name,
                    "label": label,
                    "inv_freq": getattr(module, buffer).double().tolist(),
                    "short_inv_freq": first.double().tolist() if two_sets else None,
                    "attention_factor": attention,
                    "params": params.get(label) or params,
                }
            )
    return embeddings


def softmax_scales(modules: NamedModules) -> dict[str, tuple[float, float | None]]:
    """Return for each attention module that the child process built the factor of q·k, and
    1/sqrt(head dim) if it is known."""
    scales = {}
    for name, module in modules:
        if "Attention" not in type(module).__name__:
            continue
        scale = getattr(module, "scaling", getattr(module, "softmax_scale", None))
        if isinstance(scale, float | int):
            dim = getattr(module, "qk_head_dim", None) or getattr(module, "head_dim", None)
            scales[name] = (float(scale), dim**-0.5 if isinstance(dim, int) else None)
    return scales


def make_rope_plain(config: PreTrainedConfig, seen: set[int]) -> None:
    """Set every rope dict of a config of transformers in the child process to the default type.
    Keep its other keys."""
    for value in list(vars(config).values()):
        if hasattr(value, "to_diff_dict") and id(value) not in seen:
            seen.add(id(value))
            make_rope_plain(value, seen)
    rope = getattr(config, "rope_parameters", None)
    if isinstance(rope, dict):
        for entry in [rope, *rope.values()]:
            if isinstance(entry, dict) and "rope_type" in entry:
                entry["rope_type"] = "default"


def attention_factors(
    model: PreTrainedModel, modules: NamedModules, path: list[str]
) -> list[BuiltAttention]:
    """Return the softmax factor of every attention module of a model that the child process built:
    its scale over its scale with plain RoPE.

    The plain scale is 1/sqrt(head dim) in most families. If it is not, the model is built a second
    time with plain RoPE (Gemma's query_pre_attn_scalar, Granite's attention_multiplier).
    """
    scales = softmax_scales(modules)
    plain = {name: unit for name, (_, unit) in scales.items() if unit}
    if any(abs(scale / plain.get(n, float("inf")) - 1) > 1e-6 for n, (scale, _) in scales.items()):
        twin = copy.deepcopy(model.config)
        make_rope_plain(text_config(twin, path), set())
        plain_model = model_without_weights(type(model), twin)
        built = softmax_scales(text_modules(plain_model, text_config(twin, path)))
        plain = {name: scale for name, (scale, _) in built.items()}
    return [
        {"module": name, "softmax_factor": scale / plain[name]}
        for name, (scale, _) in scales.items()
    ]


def module_numbers(
    model: PreTrainedModel, path: list[str], length: int | None = None
) -> BuiltNumbers:
    """Return the numbers that the rotary and attention modules of a model compute in the child
    process."""
    modules = text_modules(model, text_config(model.config, path))
    return {
        "rotary": rotary_numbers(modules, length),
        "attention": attention_factors(model, modules, path),
    }


def changed_keys(one: Json, other: Json, path: str = "") -> list[str]:
    """Return the dotted keys at which transformers, in the child process, reads the base and the
    written directory differently."""
    if not (isinstance(one, dict) and isinstance(other, dict)):
        return [] if type(one) is type(other) and one == other else [path]
    keys = {**one, **other}
    return [
        each
        for key in keys
        for each in changed_keys(
            one.get(key), other.get(key), f"{path}.{key}" if path else str(key)
        )
    ]


def infinity_from_json(value: dict[str, Json]) -> Json:
    """Return infinity for the child process if this object is transformers' JSON spelling of it;
    else the object."""
    return math.inf if value == {"__float__": "Infinity"} else value


def build_base(
    entry: DirectoryJob, cls: type[PreTrainedModel], config: PreTrainedConfig
) -> tuple[BuiltBase, PreTrainedModel | None]:
    """Build the base's config with transformers in the child process. Return the answer and the
    model.

    The model is None if it cannot be built, or if the job only reads tokens (`last`).
    """
    if entry["base"] is None:
        return {"error": "its config is not at hand"}, None
    out: BuiltBase = {"error": None, "changed": None}
    try:
        values = json.loads(json.dumps(entry["base"]), object_hook=infinity_from_json)
        base = config_without_quantiser(type(config).from_dict(values))
        out["changed"] = changed_keys(base.to_dict(), config.to_dict())
        if entry["last"]:
            return out, None
        model = model_without_weights(cls, base)
        read = module_numbers(model, entry["text_path"], entry["base_context"])
        out["rotary"] = read["rotary"]
        out["attention"] = read["attention"]
        return out, model
    except Exception as error:
        out["error"] = sentence_of_error(error)
        return out, None


def config_without_quantiser(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the config as transformers can build it in the child process, on this machine.

    Drop its attention implementation and its quantiser's loader, which would need packages or a GPU
    and change nothing about positions.
    """
    config._attn_implementation = None
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config
    return config


def sibling_module(name: str) -> ModuleType:
    """Load and return another module of the child process from its file in this folder."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read_config(directory: str, trust: bool) -> PreTrainedConfig:
    """Return the config of a directory as transformers reads it in the child process.

    If transformers does not know the type and no code is trusted, use the config class of the first
    architecture of transformers that the config names.
    """
    import transformers

    values = json.loads((Path(directory) / "config.json").read_text(encoding="utf-8"))
    if values["model_type"] not in transformers.CONFIG_MAPPING and not trust:
        for name in values.get("architectures") or []:
            if config_class := getattr(getattr(transformers, name, None), "config_class", None):
                del values["model_type"]
                named: PreTrainedConfig = config_class.from_dict(values)
                return named
    config: PreTrainedConfig = transformers.AutoConfig.from_pretrained(
        directory, trust_remote_code=trust
    )
    return config


def build_directory(job: ChildJob, entry: DirectoryJob) -> Built | TypeDescription:
    """Return the child's answer about one directory: all facts that the parent process compares."""
    directory = entry["directory"]
    trust = job["trust_remote_code"]
    config = read_config(directory, trust)
    quantised = getattr(config, "quantization_config", None) is not None
    config = config_without_quantiser(config)
    cls = model_class(config, directory, trust)
    if entry.get("describe"):
        child = sys.modules[__name__]
        described: TypeDescription = sibling_module("describing").describe_type(
            child, directory, config, cls
        )
        return described
    stored = sibling_module("tensors")
    table = {}
    apart = list[str]()
    if job["tensors"]:
        table = stored.stored_tensors(directory)
    if table:
        apart = stored.differing_tied_tensors(cls, config, directory)
    base, base_model = build_base(entry, cls, config)
    answer: Built = {"model_class": cls.__name__, "base": base, "untied": apart}
    if entry["last"]:
        answer["tensors"] = stored.compare_stored_tensors(cls, config, directory, table, quantised)
        answer["last"] = sibling_module("forward").read_to_last_position(cls, config, entry, trust)
        return answer
    model = model_without_weights(cls, config)
    computed = module_numbers(model, entry["text_path"])
    answer["rotary"] = computed["rotary"]
    answer["attention"] = computed["attention"]
    answer["forward"] = None
    answer["tensors"] = None
    if entry["target"]:
        models = [model] if base_model is None else [model, base_model]
        child = sys.modules[__name__]
        answer["forward"] = sibling_module("forward").run_forward_pass(
            child, models, entry, computed["rotary"]
        )
    if table:
        answer["tensors"] = stored.compare_stored_tensors(cls, config, directory, table, quantised)
    return answer


def limit_memory(room: int) -> None:
    """Limit the child process to `room` bytes of addresses above its present use, which includes
    torch.

    Do nothing outside Linux: only Linux reports the present use and applies such a limit to every
    kind of allocation.
    """
    if sys.platform != "linux":
        return
    import resource

    sizes = Path("/proc/self/statm").read_text(encoding="ascii")
    now = int(sizes.split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard == resource.RLIM_INFINITY or now + room < hard:
        resource.setrlimit(resource.RLIMIT_AS, (now + room, hard))


def sentence_of_error(error: Exception) -> str:
    """Return the child's sentence about an exception of transformers: its name and the last line of
    its message."""
    if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
        return "MemoryError: it takes more memory than its proof is given for sizes like these"
    lines = str(error).strip().splitlines() or ["no message"]
    return f"{type(error).__name__}: {lines[-1].strip()}"


def main() -> None:
    """Read a job of the parent process from stdin, and write one JSON line about each directory to
    the file of the argument."""
    block_ropext()
    job: ChildJob = json.load(sys.stdin)
    import torch
    import transformers
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.set_num_threads(1)
    limit_memory(job["room"])
    with open(sys.argv[1], "w", encoding="utf-8") as out:
        for entry in job["directories"]:
            answer: dict[str, Json] = {"directory": entry["directory"]}
            answer["transformers"] = transformers.__version__
            try:
                answer |= build_directory(job, entry)
                answer["error"] = None
            except Exception as error:
                answer["error"] = sentence_of_error(error)
            out.write(json.dumps(answer) + "\n")
            out.flush()
            os.fsync(out.fileno())


if __name__ == "__main__":
    main()
