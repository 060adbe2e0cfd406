"""The proof's one forward pass. Loaded by child.py, by path: it imports nothing of ropext.

The written config and its base are run as small models of random weights. A model keeps its rotary
geometry and its first layers, as many as hold one of each kind; everything else is made narrow.
Where nothing rotates, an input as long as the table goes through the first layer with its weights,
and what its attention is told of the distances of two tokens is noted.
"""

from __future__ import annotations

import copy
import inspect
import re
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
    from types import ModuleType

    from torch import Tensor, nn
    from transformers import PreTrainedConfig, PreTrainedModel

    from ropext.base.jsontext import Json
    from ropext.proof.answers import (
        BuiltAttention,
        BuiltRotary,
        DirectoryJob,
        PassAnswer,
        ReadAnswer,
        SmallPass,
        WantedNumbers,
    )

    NamedModules = Sequence[tuple[str, nn.Module]]
    BuiltModel = tuple[PreTrainedConfig, PreTrainedModel]

MOST_PARAMETERS = 50_000_000  # 200 MB in float32; a type that stays wider is not run
NARROW = 64
FEED_FORWARD = re.compile(
    r"(intermediate_(size|dim)|ffn_(hidden_)?(size|dim)|n_inner|ff_dim|d_ff)$"
)
EXPERTS = re.compile(r"(num|n)_?\w*experts$")
CHOSEN = re.compile(r"(experts?_per_tok(en)?|moe_topk|moe_k|top_k_experts|top_k)$")
QUERY_HEADS = re.compile(r"(num|n)_(attention_|\w*query_)?heads?$")
KEY_HEADS = re.compile(r"(num_\w*key_value|kv_n|\w*num_kv|n_head_kv)\w*(heads|groups)?$|n_head_kv$")
STATE_HEADS = re.compile(r"mamba_(n|num)_heads$|mamba_d_ssm$|mamba_intermediate_size$")
TOKEN_IDS = re.compile(r"(pad|bos|eos|sep|cls|mask)_token_id$")
NUMBERED = re.compile(r"idx|index|layer_id|layer_number|depth")
# Where nothing rotates.
LONGEST = 1 << 15  # tokens; attention that is not fused would want gigabytes
SQUARE = 1 << 11  # tokens, where every layer holds its whole square of distances
LAYERS = ("num_hidden_layers", "encoder_layers", "decoder_layers", "text_layers")


class NotRun(Exception):
    """Why this type is not run."""


def layers_of(model: nn.Module, count: int) -> list[nn.Module]:
    """The text model's stack of layers."""
    from torch import nn

    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return list(module)
    raise NotRun(f"no stack of {count} layers found")


def kind(layer: nn.Module) -> tuple[Hashable, ...]:
    """What tells a layer from those of another kind: its modules, their shapes and settings."""
    parts: list[Hashable] = []
    for name, module in layer.named_modules():
        settings = [
            (key, value)
            for key, value in vars(module).items()
            if isinstance(value, bool | int | str | type(None)) and not NUMBERED.search(key)
        ]
        shapes = [tuple(p.shape) for p in module._parameters.values() if p is not None]
        parts.append((name, type(module).__name__, tuple(shapes), tuple(sorted(settings, key=str))))
    return tuple(parts)


def kinds(layers: Sequence[nn.Module], config: PreTrainedConfig) -> list[Hashable]:
    """The kind of each layer; lists of the config with an entry for each layer tell too."""
    lists = [v for v in vars(config).values() if isinstance(v, list) and len(v) == len(layers)]
    return [(kind(layer), str([v[index] for v in lists])) for index, layer in enumerate(layers)]


def first_of_each_kind(*models: Sequence[Hashable]) -> int:
    """How many of the first layers hold one of each kind, of the written model and of the base."""
    pairs = list(zip(*models, strict=True))
    return max(map(pairs.index, pairs)) + 1


def _heads(key: str, value: int, values: Mapping[str, Json], names: Mapping[str, str]) -> int:
    if KEY_HEADS.search(key):
        queries = values.get(names.get("num_attention_heads", "num_attention_heads"))
        return 2 if value == queries else 1
    return min(value, 2)


def _each(value: Json, change: Callable[[int], int]) -> Json:
    """Change a number, or every number of a list."""
    if isinstance(value, list):
        return [_each(one, change) for one in value]
    return change(value) if isinstance(value, int) and not isinstance(value, bool) else value


def narrow(config: PreTrainedConfig, layers: int, count: int, heads_too: bool) -> PreTrainedConfig:
    """The same config with `count` layers, few tokens and experts, and narrow feed-forwards."""
    values = config.to_dict()
    names = dict(getattr(config, "attribute_map", {}))
    hidden_key = names.get("hidden_size", "hidden_size")
    heads_key = names.get("num_attention_heads", "num_attention_heads")
    hidden: Json = values.get(hidden_key)
    heads: Json = values.get(heads_key)
    wide = hidden
    if heads_too and isinstance(heads, int) and isinstance(hidden, int):
        size = values.get("head_dim") or hidden // heads
        wide = min(heads, 2) * max(size, hidden // heads) if "kv_lora_rank" not in values else 256
    shared = values.get("num_kv_shared_layers") or 0
    for key, value in list(values.items()):
        if isinstance(value, list) and len(value) == layers:
            value = value[:count]
        if key in (hidden_key, "hidden_size"):
            value = wide
        elif "vocab_size" in key:
            value = _each(value, lambda n: min(n, NARROW))
        elif TOKEN_IDS.search(key):
            value = None if value is None else 0
        elif key == names.get("num_hidden_layers", "num_hidden_layers"):
            value = count
        elif FEED_FORWARD.search(key) and "mamba" not in key:
            value = _each(value, lambda n: min(n, NARROW))
        elif CHOSEN.search(key):
            value = _each(value, lambda n: min(n, 2))
        elif EXPERTS.search(key) and "shared" not in key:
            value = _each(value, lambda n: min(n, 4))
        elif key in ("n_group", "topk_group", "num_expert_group"):
            value = value and 1
        elif heads_too and STATE_HEADS.search(key):
            value = _each(value, lambda n: max(1, n * wide // hidden))
        elif heads_too and (KEY_HEADS.search(key) or QUERY_HEADS.search(key) or key == heads_key):
            kept = config.to_dict()
            value = _each(value, partial(_heads, key, values=kept, names=names))
        values[key] = value
    if shared:
        values["num_kv_shared_layers"] = max(0, count - (layers - shared))
    return type(config).from_dict(values)


def fill(model: nn.Module, known: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Give every parameter its place in memory: random, or as `known` has it under its name."""
    import torch

    generator = torch.Generator().manual_seed(0)
    made = dict[int, torch.nn.Parameter]()
    out = dict[str, torch.Tensor]()
    for prefix, module in model.named_modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            full = f"{prefix}.{name}"
            if id(parameter) not in made:  # tied ones stay tied
                value = known.get(full)
                if value is None or value.shape != parameter.shape:
                    value = torch.randn(parameter.shape, generator=generator)
                    value = value / parameter.shape[-1] ** 0.5 if value.ndim > 1 else 1 + value / 10
                made[id(parameter)] = torch.nn.Parameter(value, requires_grad=False)
            module._parameters[name] = made[id(parameter)]
            out[full] = made[id(parameter)]
    return out


def positions(context: int, target: int) -> list[int]:
    """Inside the old context, beyond it, and up to the target's last."""
    wanted = {0, 1, 2, 3, context // 2, context - 1, context, context + 1}
    wanted |= {(context + target) // 2, target - 2, target - 1}
    return sorted(p for p in wanted if 0 <= p < max(context + 2, target))


def owner(model: nn.Module, text: PreTrainedConfig) -> PreTrainedModel:
    """The outermost module that is the text model by itself."""
    from transformers import PreTrainedModel

    for _, module in model.named_modules():
        if isinstance(module, PreTrainedModel) and isinstance(module.config, type(text)):
            return module
    raise NotRun("its text part is no model of its own")


def near(number: float, wanted: float, bound: float) -> float:
    """The wanted number, as stock rounds it where it is within the bound: at a million tokens an
    angle magnifies the last bit of a float32 frequency."""
    same = number == wanted or (wanted != 0 and abs(number / wanted - 1) <= bound)
    return number if same else wanted


def site_of(label: str, inv_freq: Sequence[float], sites: Sequence[WantedNumbers]) -> WantedNumbers:
    """The planned site that a module comes nearest to, as the comparison of numbers has it."""

    def off(site: WantedNumbers) -> float:
        if len(site["inv_freq"]) != len(inv_freq):
            return float("inf")
        pairs = zip(inv_freq, site["inv_freq"], strict=True)
        return max(abs(f - w) / w if w else abs(f) for f, w in pairs)

    return min((s for s in sites if label in ("", s["label"])), key=off)


def _given(numbers: Tensor, factor: float, config: PreTrainedConfig) -> tuple[Tensor, float]:
    """What a rotary module computes from its config, given in place of that."""
    return numbers, factor


def set_numbers(
    base: NamedModules, after: Mapping[str, nn.Module], sites: Sequence[WantedNumbers]
) -> None:
    """Write the plan's numbers into the rotary modules of the base's model."""
    import torch

    for name, module in base:
        for buffer in [b for b in module._buffers if b.endswith("inv_freq")]:
            prefix = buffer.removesuffix("inv_freq")
            if prefix.endswith("original_"):
                continue
            label = prefix.rstrip("_")
            twin = after[name]
            inv_freq = getattr(twin, buffer).double().tolist()
            site = site_of(label, inv_freq, sites)
            pairs = zip(inv_freq, site["inv_freq"], strict=True)
            numbers = torch.tensor([near(f, w, site["bound"]) for f, w in pairs])
            factor = getattr(twin, f"{prefix}attention_scaling", site["attention_factor"])
            factor = near(float(factor), site["attention_factor"], site["bound"])
            for copied in (buffer, f"{prefix}original_inv_freq"):
                if copied in module._buffers:
                    module._buffers[copied] = numbers.clone()
            vars(module).pop(f"{prefix}long_inv_freq", None)
            if hasattr(module, f"{prefix}attention_scaling"):
                setattr(module, f"{prefix}attention_scaling", factor)
            attributes = vars(module)
            if hasattr(module, "rope_init_fn"):
                attributes["rope_init_fn"] = partial(_given, numbers, factor)
            kinds_by_label = getattr(module, "rope_type", None)
            if isinstance(kinds_by_label, dict):  # else it would recompute them
                attributes["rope_type"] = kinds_by_label | {label: "default"}
            else:
                attributes["rope_type"] = "default"


def set_softmax(
    base: Mapping[str, nn.Module],
    was: Sequence[BuiltAttention],
    now: Sequence[BuiltAttention],
    sites: Sequence[WantedNumbers],
) -> None:
    """Write the plan's softmax factors into the attention modules of the base's model."""
    after = {entry["module"]: entry["softmax_factor"] for entry in now}
    for entry in was:
        built = after[entry["module"]]
        wanted = min((s["softmax_factor"] for s in sites), key=lambda w: abs(w - built))
        ratio = near(built, wanted, sites[0]["bound"]) / entry["softmax_factor"]
        module = base[entry["module"]]
        name = "scaling" if hasattr(module, "scaling") else "softmax_scale"
        if abs(ratio - 1) > 1e-9:
            setattr(module, name, getattr(module, name) * ratio)


class Small:
    """A small model, with what the child reads off it."""

    child: ModuleType
    modules: NamedModules

    def __init__(
        self, child: ModuleType, cls: type[PreTrainedModel], config: PreTrainedConfig
    ) -> None:
        self.child = child
        self.cls = cls
        self.config = config
        self.model: PreTrainedModel = child.skeleton(cls, config)
        self.modules = child.text_modules(self.model, child.text_config(self.model.config, []))

    def rotary(self) -> list[BuiltRotary]:
        embeddings: list[BuiltRotary] = self.child.rotary(self.modules)
        return embeddings

    def attention(self) -> list[BuiltAttention]:
        factors: list[BuiltAttention] = self.child.attention(
            self.modules, self.cls, self.config, []
        )
        return factors

    def run(self, where: list[int]) -> Tensor:
        """The outputs at these positions; all tokens see those before them, as in one document."""
        import torch

        last = -1  # position that any rotary module was given

        def see(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
            nonlocal last
            for value in (*args, *kwargs.values()):
                if isinstance(value, torch.Tensor) and not value.is_floating_point():
                    last = max(last, int(value.max()))

        for _, module in self.modules:
            if any(name.endswith("inv_freq") for name in module._buffers):
                module.register_forward_pre_hook(see, with_kwargs=True)
        row = torch.tensor([where])
        with torch.no_grad():
            out: torch.Tensor = self.model(
                input_ids=torch.arange(len(where))[None] % NARROW,
                attention_mask=torch.ones_like(row),
                position_ids=row,
                use_cache=False,
            )[0]
        if last < where[-1]:
            raise NotRun("its forward takes no positions")
        if not bool(out.isfinite().all()):
            raise ArithmeticError("the outputs are not finite")
        return out


def sentence_of(error: Exception) -> str:
    """One line of an exception."""
    lines = str(error).strip().splitlines() or ["no message"]
    name = "" if isinstance(error, NotRun) else f"{type(error).__name__}: "
    return f"{name}{lines[-1].strip()}"


def apart(one: Tensor, other: Tensor) -> float:
    """The largest difference, over the largest output."""
    return float((one - other).abs().max() / one.abs().max())


def compare(
    base: Small, after: Small, sites: Sequence[WantedNumbers], where: list[int], have: Tensor
) -> float:
    """The largest difference of the written model's outputs from those of the base with the plan's
    numbers."""
    set_numbers(base.modules, dict(after.modules), sites)
    set_softmax(dict(base.modules), base.attention(), after.attention(), sites)
    for mine, wanted in zip(base.rotary(), after.rotary(), strict=True):
        factor = wanted["attention_factor"]
        planned = site_of(wanted["label"], wanted["inv_freq"], sites)["attention_factor"]
        if abs(mine["attention_factor"] - factor) > 1e-4 and abs(planned / factor - 1) < 1e-4:
            raise NotRun("the base's rotary module computes its numbers anew in every pass")
    return apart(base.run(where), have)


def attempt(
    child: ModuleType,
    cls: type[PreTrainedModel],
    texts: Sequence[PreTrainedConfig],
    asked: SmallPass,
    full: Collection[BuiltRotary],
) -> PassAnswer:
    """Run the small models of the written config and of the base's, where that is given too; NotRun
    where the base cannot, `failed` where only the written one."""
    where = positions(asked["context"], asked["target"])
    after = Small(child, cls, texts[0])
    answer: PassAnswer = {"last": where[-1], "difference": None, "note": None}
    parameters = sum(p.numel() for p in after.model.parameters())
    if parameters > MOST_PARAMETERS:
        raise NotRun(f"its smallest form has {parameters} parameters")
    numbers = {tuple(one["inv_freq"]) for one in after.rotary()}
    if not numbers or not numbers <= {tuple(one["inv_freq"]) for one in full}:
        raise NotRun("a narrow copy of it rotates differently")
    if len(texts) == 1:
        fill(after.model, {})
        after.run(where)
        answer["note"] = "finite; the base is not at hand to compare with"
        return answer
    base = Small(child, cls, texts[1])
    known = fill(base.model, {})
    try:
        old = base.run(where)
    except Exception as error:
        raise NotRun(f"the base's own small model fails: {sentence_of(error)}") from error
    fill(after.model, known)
    try:
        new = after.run(where)
    except Exception as error:
        answer["failed"] = sentence_of(error)
        return answer
    answer["moved"] = apart(old, new)
    if not answer["moved"]:
        frequencies = [one["inv_freq"] for one in base.rotary()]
        why = "not compared: no output depends on the rotation"
        if frequencies == [one["inv_freq"] for one in after.rotary()]:
            why = "equal to the base's, whose frequencies it has"
        answer["note"] = f"finite; {why}"
        return answer
    try:
        answer["difference"] = compare(base, after, asked["sites"], where, new)
    except NotRun as reason:
        answer["note"] = f"finite; not compared: {reason}"
    return answer


def forward(
    child: ModuleType, built: Sequence[BuiltModel], job: DirectoryJob, full: Collection[BuiltRotary]
) -> PassAnswer:
    """What one pass shows: `reason` where it was not run, `failed` where the written config fails.

    A reason is never a failure: it says what of this type cannot be made small.
    """
    path = job["text_path"]
    asked = job["forward"]
    assert asked is not None
    answer: PassAnswer = {"reason": None, "failed": None, "layers": 0}
    try:
        texts = [child.text_config(config, path) for config, _ in built]
        parts = [owner(model, child.text_config(model.config, path)) for _, model in built]
        count = texts[0].num_hidden_layers
        stacks = [layers_of(one, count) for one in parts]
        chosen = first_of_each_kind(*map(kinds, stacks, texts))
        last: Exception | None = None
        for heads_too in (True, False):
            narrowed = [narrow(text, count, chosen, heads_too) for text in texts]
            try:
                done = attempt(child, type(parts[0]), narrowed, asked, full)
            except Exception as error:
                last = last or error
                continue
            answer["layers"] = chosen
            answer["of"] = count
            return answer | done
        assert last is not None
        raise last
    except Exception as error:
        answer["reason"] = sentence_of(error)
        return answer


def shallow(config: PreTrainedConfig, path: Sequence[str]) -> PreTrainedConfig:
    """The config with one layer where its class can be built so."""
    cut = copy.deepcopy(config)
    part = cut
    for key in path:
        part = getattr(part, key)
    for key in LAYERS:
        if isinstance(getattr(part, key, None), int):
            setattr(part, key, 1)
    return cut


def load(
    cls: type[PreTrainedModel],
    config: PreTrainedConfig,
    directory: str,
    path: Sequence[str],
    trust_remote_code: bool,
) -> tuple[PreTrainedModel, str]:
    """The model with its weights: one layer of it, or all where it has settings for each layer."""
    import torch

    def built(config: PreTrainedConfig) -> PreTrainedModel:
        model: PreTrainedModel = cls.from_pretrained(
            directory,
            config=config,
            dtype=torch.float32,
            use_safetensors=True,
            trust_remote_code=trust_remote_code,
        )
        model.eval()
        return model

    try:
        return built(shallow(config, path)), "its first layer"
    except Exception:  # a list for each layer, a pattern of layers: the whole model then
        return built(config), "the whole model"


def read_last(
    cls: type[PreTrainedModel],
    config: PreTrainedConfig,
    job: DirectoryJob,
    trust_remote_code: bool,
) -> ReadAnswer:
    """Whether stock reads so many tokens, and all that it gives for them is finite."""
    import torch

    length = job["last"]
    path = job["text_path"]
    changes = dict[str, list[int]]()
    length = min(length, SQUARE) if job["listen"] else length
    if length > LONGEST:
        return {"failed": None, "said": f"forward not run: more than {LONGEST} tokens"}
    model, said = load(cls, config, job["directory"], path, trust_remote_code)
    names = ("text_model", "language_model", "decoder") if path else ()
    part = next((getattr(model, name) for name in names if hasattr(model, name)), model)
    vocab = part.config.get_text_config().vocab_size
    first = min(16, vocab // 2)  # below stand the special tokens; padding would take no position
    ids = first + torch.arange(length)[None] % (vocab - first)
    inputs = {"input_ids": ids}
    if job["listen"]:
        listen(part, length, changes)
        if "decoder_input_ids" in inspect.signature(part.forward).parameters:
            inputs["decoder_input_ids"] = ids
    try:
        with torch.no_grad():
            out = part(**inputs)
    except (IndexError, RuntimeError) as error:
        return {"failed": str(error).splitlines()[0], "said": ""}
    except (TypeError, ValueError) as error:  # another input is wanted beside the tokens
        return {
            "failed": None,
            "said": f"forward not run: {str(error).splitlines()[0]}",
            "told": {},
        }
    tensors = [value for value in out.values() if isinstance(value, torch.Tensor)]
    if not all(bool(torch.isfinite(value).all()) for value in tensors):
        return {"failed": "not all it gives is finite", "said": ""}
    said = f"{said} reads {length} tokens, and all it gives is finite"
    return {"failed": None, "said": said, "told": changes, "read": length}


def listen(model: nn.Module, length: int, heard: dict[str, list[int]]) -> None:
    """Note the distances at which each module is told something new: T5's buckets where its bias is
    looked up, DeBERTa's and XLNet's as their layers are given them."""
    names = {module: name for name, module in model.named_modules()}

    def hear(module: nn.Module, args: tuple[Tensor, ...], kwargs: Mapping[str, Tensor]) -> None:
        given = kwargs.get("relative_pos", kwargs.get("r"))
        given = args[0] if names[module].endswith("relative_attention_bias") else given
        if given is None or (len(given) != 2 * length and given.shape[-2:] != (length, length)):
            return
        ring = len(given) == 2 * length  # of all tokens before and behind; else one row for each
        line = given[: length + 1, 0] if ring else given.reshape(-1, length)[-1, :, None]
        changes = (line[1:] != line[:-1]).any(1).flip(0).nonzero()[:, 0] + 1
        heard[names[module]] = [0, *(change for change in changes.tolist() if change < length - 1)]

    for module in names:
        module.register_forward_pre_hook(hear, with_kwargs=True)
