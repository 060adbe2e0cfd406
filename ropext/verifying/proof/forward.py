"""Run the proof's one forward pass.

child.py loads this file by path: it imports nothing of ropext. The written config and its base run
as small models of random weights. A small model keeps its rotary geometry and so many of its first
layers that they include each kind; all other sizes shrink. If a model rotates nothing, an input as
long as its table goes through its first layer with its weights. The pass notes the distances of two
tokens that its attention receives.
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
    from typing import TypeVar

    from torch import Tensor, nn
    from transformers import PreTrainedConfig, PreTrainedModel

    from ropext.base.jsontext import Json
    from ropext.verifying.proof.answers import (
        BuiltAttention,
        BuiltRotary,
        DirectoryJob,
        PassAnswer,
        ReadAnswer,
        WantedNumbers,
    )

    NamedModules = Sequence[tuple[str, nn.Module]]
    Ran = TypeVar("Ran")

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
# For models that rotate nothing.
LONGEST = 1 << 15  # tokens; attention that is not fused would want gigabytes
SQUARE = 1 << 11  # tokens, if every layer holds its whole square of distances
LAYERS = ("num_hidden_layers", "encoder_layers", "decoder_layers", "text_layers")


class NotRun(Exception):
    """The reason why a small model of this type does not run."""


def stack_of_layers(model: nn.Module, count: int) -> list[nn.Module]:
    """Return the stack of layers of a model that the child process built by transformers. Raise
    NotRun if there is none of this length."""
    from torch import nn

    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return list(module)
    raise NotRun(f"no stack of {count} layers found")


def kind_of_layer(layer: nn.Module) -> tuple[Hashable, ...]:
    """Return the modules of a layer with their shapes and settings, by which the proof's small
    model includes each kind of layer. Layers of one kind have them equal."""
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


def kinds_of_layers(layers: Sequence[nn.Module], config: PreTrainedConfig) -> list[Hashable]:
    """Return the kind of each layer that the child process built, with the layer's entry in each
    list of the config that has one for each."""
    lists = [v for v in vars(config).values() if isinstance(v, list) and len(v) == len(layers)]
    return [
        (kind_of_layer(layer), str([v[index] for v in lists])) for index, layer in enumerate(layers)
    ]


def count_to_include_each_kind(*models: Sequence[Hashable]) -> int:
    """Return how many of the first layers a small model needs to include each kind, of the written
    model and of the base."""
    pairs = list(zip(*models, strict=True))
    return max(map(pairs.index, pairs)) + 1


def _fewer_heads(key: str, value: int, values: Mapping[str, Json], names: Mapping[str, str]) -> int:
    """Return the number of heads of a small model for a config key: 2 at most, and 1 for shared
    keys."""
    if KEY_HEADS.search(key):
        queries = values.get(names.get("num_attention_heads", "num_attention_heads"))
        return 2 if value == queries else 1
    return min(value, 2)


def _change_numbers(value: Json, change: Callable[[int], int]) -> Json:
    """Return a config value of a small model: a number, or every number of a list, changed; any
    other value unchanged."""
    if isinstance(value, list):
        return [_change_numbers(one, change) for one in value]
    return change(value) if isinstance(value, int) and not isinstance(value, bool) else value


def narrow_config(
    config: PreTrainedConfig, layers: int, count: int, heads_too: bool
) -> PreTrainedConfig:
    """Return the config of a small model: `count` layers, a small vocabulary, few experts and
    narrow feed-forwards.

    With `heads_too` it has fewer heads and a smaller hidden size, too.
    """
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
            value = _change_numbers(value, lambda n: min(n, NARROW))
        elif TOKEN_IDS.search(key):
            value = None if value is None else 0
        elif key == names.get("num_hidden_layers", "num_hidden_layers"):
            value = count
        elif FEED_FORWARD.search(key) and "mamba" not in key:
            value = _change_numbers(value, lambda n: min(n, NARROW))
        elif CHOSEN.search(key):
            value = _change_numbers(value, lambda n: min(n, 2))
        elif EXPERTS.search(key) and "shared" not in key:
            value = _change_numbers(value, lambda n: min(n, 4))
        elif key in ("n_group", "topk_group", "num_expert_group"):
            value = value and 1
        elif heads_too and STATE_HEADS.search(key):
            value = _change_numbers(value, lambda n: max(1, n * wide // hidden))
        elif heads_too and (KEY_HEADS.search(key) or QUERY_HEADS.search(key) or key == heads_key):
            kept = config.to_dict()
            value = _change_numbers(value, partial(_fewer_heads, key, values=kept, names=names))
        values[key] = value
    if shared:
        values["num_kv_shared_layers"] = max(0, count - (layers - shared))
    return type(config).from_dict(values)


def fill_parameters(model: nn.Module, known: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Give every parameter of a small model memory and a value: the value that `known` has under
    its name, else a random one.

    Return the parameters by name.
    """
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


def positions_to_read(context: int, target: int) -> list[int]:
    """Return the positions that a small model reads: inside the old context, beyond it, and up to
    the target's last."""
    wanted = {0, 1, 2, 3, context // 2, context - 1, context, context + 1}
    wanted |= {(context + target) // 2, target - 2, target - 1}
    return sorted(p for p in wanted if 0 <= p < max(context + 2, target))


def text_model_of(model: nn.Module, text: PreTrainedConfig) -> PreTrainedModel:
    """Return the outermost module of a built model that is the text model by itself. Raise NotRun
    if there is none."""
    from transformers import PreTrainedModel

    for _, module in model.named_modules():
        if isinstance(module, PreTrainedModel) and isinstance(module.config, type(text)):
            return module
    raise NotRun("its text part is no model of its own")


def number_within(number: float, wanted: float, bound: float) -> float:
    """Return the number that transformers computed if it is within the bound, else the planned one.

    At a million tokens an angle magnifies the last bit of a float32 frequency.
    """
    same = number == wanted or (wanted != 0 and abs(number / wanted - 1) <= bound)
    return number if same else wanted


def nearest_site(
    label: str, inv_freq: Sequence[float], sites: Sequence[WantedNumbers]
) -> WantedNumbers:
    """Return the planned site nearest to a rotary module of a small model, by the measure that
    compares the numbers."""

    def off(site: WantedNumbers) -> float:
        """Return the largest relative difference of a planned site's frequencies from the
        frequencies of the small model's module."""
        if len(site["inv_freq"]) != len(inv_freq):
            return float("inf")
        pairs = zip(inv_freq, site["inv_freq"], strict=True)
        return max(abs(f - w) / w if w else abs(f) for f, w in pairs)

    return min((s for s in sites if label in ("", s["label"])), key=off)


def _planned_numbers(
    numbers: Tensor, factor: float, config: PreTrainedConfig
) -> tuple[Tensor, float]:
    """Return the planned numbers for a rotary module of a small model, whatever its config."""
    return numbers, factor


def set_rotary_numbers(
    base: NamedModules, after: Mapping[str, nn.Module], sites: Sequence[WantedNumbers]
) -> None:
    """Write the plan's numbers into the rotary modules of the base's small model."""
    import torch

    for name, module in base:
        for buffer in [b for b in module._buffers if b.endswith("inv_freq")]:
            prefix = buffer.removesuffix("inv_freq")
            if prefix.endswith("original_"):
                continue
            label = prefix.rstrip("_")
            twin = after[name]
            inv_freq = getattr(twin, buffer).double().tolist()
            site = nearest_site(label, inv_freq, sites)
            pairs = zip(inv_freq, site["inv_freq"], strict=True)
            numbers = torch.tensor([number_within(f, w, site["bound"]) for f, w in pairs])
            factor = getattr(twin, f"{prefix}attention_scaling", site["attention_factor"])
            factor = number_within(float(factor), site["attention_factor"], site["bound"])
            for copied in (buffer, f"{prefix}original_inv_freq"):
                if copied in module._buffers:
                    module._buffers[copied] = numbers.clone()
            vars(module).pop(f"{prefix}long_inv_freq", None)
            if hasattr(module, f"{prefix}attention_scaling"):
                setattr(module, f"{prefix}attention_scaling", factor)
            attributes = vars(module)
            if hasattr(module, "rope_init_fn"):
                attributes["rope_init_fn"] = partial(_planned_numbers, numbers, factor)
            kinds_by_label = getattr(module, "rope_type", None)
            if isinstance(kinds_by_label, dict):  # else it would recompute them
                attributes["rope_type"] = kinds_by_label | {label: "default"}
            else:
                attributes["rope_type"] = "default"


def set_softmax_factors(
    base: Mapping[str, nn.Module],
    was: Sequence[BuiltAttention],
    now: Sequence[BuiltAttention],
    sites: Sequence[WantedNumbers],
) -> None:
    """Write the plan's softmax factors into the attention modules of the base's small model."""
    after = {entry["module"]: entry["softmax_factor"] for entry in now}
    for entry in was:
        built = after[entry["module"]]
        wanted = min((s["softmax_factor"] for s in sites), key=lambda w: abs(w - built))
        ratio = number_within(built, wanted, sites[0]["bound"]) / entry["softmax_factor"]
        module = base[entry["module"]]
        name = "scaling" if hasattr(module, "scaling") else "softmax_scale"
        if abs(ratio - 1) > 1e-9:
            setattr(module, name, getattr(module, name) * ratio)


class SmallModel:
    """A small model, with the numbers that the child reads from it."""

    child: ModuleType
    modules: NamedModules

    def __init__(
        self, child: ModuleType, cls: type[PreTrainedModel], config: PreTrainedConfig
    ) -> None:
        """Build a small model from a narrow config, without weights."""
        self.child = child
        self.model: PreTrainedModel = child.model_without_weights(cls, config)
        self.modules = child.text_modules(self.model, child.text_config(self.model.config, []))

    def rotary_numbers(self) -> list[BuiltRotary]:
        """Return the numbers of the small model's rotary modules, as the child process reads
        them."""
        embeddings: list[BuiltRotary] = self.child.rotary_numbers(self.modules)
        return embeddings

    def attention_factors(self) -> list[BuiltAttention]:
        """Return the softmax factors of the small model's attention modules, as the child process
        reads them."""
        factors: list[BuiltAttention] = self.child.attention_factors(self.model, self.modules, [])
        return factors

    def outputs_at(self, where: list[int]) -> Tensor:
        """Return the small model's outputs at these positions; each token sees those before it, as
        in one document.

        Raise NotRun if the forward takes no positions, ArithmeticError if an output is not finite.
        """
        import torch

        last = -1  # position that any rotary module was given

        def see_position(
            module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
        ) -> None:
            """Note the largest position that a rotary module of the small model receives."""
            nonlocal last
            for value in (*args, *kwargs.values()):
                if isinstance(value, torch.Tensor) and not value.is_floating_point():
                    last = max(last, int(value.max()))

        for _, module in self.modules:
            if any(name.endswith("inv_freq") for name in module._buffers):
                module.register_forward_pre_hook(see_position, with_kwargs=True)
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


def reason_not_run(child: ModuleType, error: Exception) -> str:
    """Return why a small model did not run: the sentence of a NotRun, or the child's sentence about
    another exception."""
    return str(error) if isinstance(error, NotRun) else child.sentence_of_error(error)


def output_difference(one: Tensor, other: Tensor) -> float:
    """Return the largest difference between the outputs of two small models, relative to the
    largest output."""
    return float((one - other).abs().max() / one.abs().max())


def compare_small_models(
    base: SmallModel,
    after: SmallModel,
    sites: Sequence[WantedNumbers],
    where: list[int],
    have: Tensor,
) -> float:
    """Return the largest difference of the written config's small model from the base's with the
    plan's numbers.

    Raise NotRun if the base's rotary module would overwrite those numbers in every pass.
    """
    set_rotary_numbers(base.modules, dict(after.modules), sites)
    set_softmax_factors(
        dict(base.modules), base.attention_factors(), after.attention_factors(), sites
    )
    for mine, wanted in zip(base.rotary_numbers(), after.rotary_numbers(), strict=True):
        factor = wanted["attention_factor"]
        planned = nearest_site(wanted["label"], wanted["inv_freq"], sites)["attention_factor"]
        if abs(mine["attention_factor"] - factor) > 1e-4 and abs(planned / factor - 1) < 1e-4:
            raise NotRun("the base's rotary module computes its numbers anew in every pass")
    return output_difference(base.outputs_at(where), have)


def first_that_runs(attempt: Callable[[bool], Ran]) -> Ran:
    """Return the result of a small model with few heads, or else of one with all heads.

    Raise the error of the first attempt if both fail.
    """
    try:
        return attempt(True)
    except Exception as error:
        try:
            return attempt(False)
        except Exception:
            raise error from None


def run_small_models(
    child: ModuleType,
    cls: type[PreTrainedModel],
    texts: Sequence[PreTrainedConfig],
    job: DirectoryJob,
    full: Collection[BuiltRotary],
) -> PassAnswer:
    """Run the small models of the written config and of the base's, if given. Return the child's
    answer.

    `failed` is set if only the written config's model fails. Raise NotRun if the base's cannot run.
    """
    where = positions_to_read(job["context"], job["target"])
    after = SmallModel(child, cls, texts[0])
    answer: PassAnswer = {"last": where[-1], "difference": None, "note": None}
    parameters = sum(p.numel() for p in after.model.parameters())
    if parameters > MOST_PARAMETERS:
        raise NotRun(f"its smallest form has {parameters} parameters")
    numbers = {tuple(one["inv_freq"]) for one in after.rotary_numbers()}
    if not numbers or not numbers <= {tuple(one["inv_freq"]) for one in full}:
        raise NotRun("a narrow copy of it rotates differently")
    if len(texts) == 1:
        fill_parameters(after.model, {})
        after.outputs_at(where)
        answer["note"] = "finite; the base is not at hand to compare with"
        return answer
    base = SmallModel(child, cls, texts[1])
    known = fill_parameters(base.model, {})
    try:
        old = base.outputs_at(where)
    except Exception as error:
        raise NotRun(f"the base's own small model fails: {reason_not_run(child, error)}") from error
    fill_parameters(after.model, known)
    try:
        new = after.outputs_at(where)
    except Exception as error:
        answer["failed"] = reason_not_run(child, error)
        return answer
    answer["moved"] = output_difference(old, new)
    if not answer["moved"]:
        frequencies = [one["inv_freq"] for one in base.rotary_numbers()]
        why = "not compared: no output depends on the rotation"
        if frequencies == [one["inv_freq"] for one in after.rotary_numbers()]:
            why = "equal to the base's, whose frequencies it has"
        answer["note"] = f"finite; {why}"
        return answer
    try:
        answer["difference"] = compare_small_models(base, after, job["sites"], where, new)
    except NotRun as reason:
        answer["note"] = f"finite; not compared: {reason}"
    return answer


def run_forward_pass(
    child: ModuleType,
    models: Sequence[PreTrainedModel],
    job: DirectoryJob,
    full: Collection[BuiltRotary],
) -> PassAnswer:
    """Return the child's answer about one pass of a small model: `reason` if it did not run,
    `failed` if the written config fails.

    `models` holds the written config's model, then the base's if there is one. A reason is never a
    failure: it explains which part of this type cannot be made small.
    """
    path = job["text_path"]
    answer: PassAnswer = {"reason": None, "failed": None, "layers": 0}
    try:
        texts = [child.text_config(model.config, path) for model in models]
        parts = list(map(text_model_of, models, texts))
        count = texts[0].num_hidden_layers
        stacks = [stack_of_layers(one, count) for one in parts]
        chosen = count_to_include_each_kind(*map(kinds_of_layers, stacks, texts))

        def attempt(heads_too: bool) -> PassAnswer:
            """Run the small models with few heads, or with all of them."""
            narrowed = [narrow_config(text, count, chosen, heads_too) for text in texts]
            return run_small_models(child, type(parts[0]), narrowed, job, full)

        done = first_that_runs(attempt)
        done["layers"] = chosen
        done["of"] = count
        return answer | done
    except Exception as error:
        answer["reason"] = reason_not_run(child, error)
        return answer


def config_with_one_layer(config: PreTrainedConfig, path: Sequence[str]) -> PreTrainedConfig:
    """Return a copy of a config of transformers with one layer in each of its counts of layers."""
    cut = copy.deepcopy(config)
    part = cut
    for key in path:
        part = getattr(part, key)
    for key in LAYERS:
        if isinstance(getattr(part, key, None), int):
            setattr(part, key, 1)
    return cut


def load_one_layer(
    cls: type[PreTrainedModel],
    config: PreTrainedConfig,
    directory: str,
    path: Sequence[str],
    trust_remote_code: bool,
) -> tuple[PreTrainedModel, str]:
    """Load one layer of a written model with its weights by transformers, or all layers if the
    class cannot be built with one.

    Return the model and the name of that part.
    """
    import torch

    def built(config: PreTrainedConfig) -> PreTrainedModel:
        """Return the model that transformers loads from the directory with this config."""
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
        return built(config_with_one_layer(config, path)), "its first layer"
    except Exception:  # a list for each layer, a pattern of layers: the whole model then
        return built(config), "the whole model"


def read_to_last_position(
    cls: type[PreTrainedModel],
    config: PreTrainedConfig,
    job: DirectoryJob,
    trust_remote_code: bool,
) -> ReadAnswer:
    """Return the child's answer whether a model without rotation reads tokens up to its last
    position with finite outputs."""
    import torch

    length = job["last"]
    path = job["text_path"]
    changes = dict[str, list[int]]()
    length = min(length, SQUARE) if job["listen"] else length
    if length > LONGEST:
        return {"failed": None, "said": f"forward not run: more than {LONGEST} tokens"}
    model, said = load_one_layer(cls, config, job["directory"], path, trust_remote_code)
    names = ("text_model", "language_model", "decoder") if path else ()
    part = next((getattr(model, name) for name in names if hasattr(model, name)), model)
    vocab = part.config.get_text_config().vocab_size
    first = min(16, vocab // 2)  # the special tokens come first; padding would take no position
    ids = first + torch.arange(length)[None] % (vocab - first)
    inputs = {"input_ids": ids}
    if job["listen"]:
        note_distances(part, length, changes)
        if "decoder_input_ids" in inspect.signature(part.forward).parameters:
            inputs["decoder_input_ids"] = ids
    try:
        with torch.no_grad():
            out = part(**inputs)
    except (IndexError, RuntimeError) as error:
        return {"failed": str(error).splitlines()[0], "said": ""}
    except (TypeError, ValueError) as error:  # the model wants another input than tokens
        return {
            "failed": None,
            "said": f"forward not run: {str(error).splitlines()[0]}",
            "distances": {},
        }
    tensors = [value for value in out.values() if isinstance(value, torch.Tensor)]
    if not all(bool(torch.isfinite(value).all()) for value in tensors):
        return {"failed": "not all it gives is finite", "said": ""}
    said = f"{said} reads {length} tokens, and all it gives is finite"
    return {"failed": None, "said": said, "distances": changes, "read": length}


def note_distances(model: nn.Module, length: int, noted: dict[str, list[int]]) -> None:
    """Note the distances of two tokens at which each attention module of transformers receives a
    new value.

    T5's bias looks its buckets up; DeBERTa's and XLNet's layers receive distances as an argument.
    """
    names = {module: name for name, module in model.named_modules()}

    def note_changes(
        module: nn.Module, args: tuple[Tensor, ...], kwargs: Mapping[str, Tensor]
    ) -> None:
        """Note the distances at which the values change that one attention module of transformers
        receives."""
        given = kwargs.get("relative_pos", kwargs.get("r"))
        given = args[0] if names[module].endswith("relative_attention_bias") else given
        if given is None or (len(given) != 2 * length and given.shape[-2:] != (length, length)):
            return
        # one for each token before and behind; else one row for each
        ring = len(given) == 2 * length
        line = given[: length + 1, 0] if ring else given.reshape(-1, length)[-1, :, None]
        changes = (line[1:] != line[:-1]).any(1).flip(0).nonzero()[:, 0] + 1
        noted[names[module]] = [0, *(change for change in changes.tolist() if change < length - 1)]

    for module in names:
        module.register_forward_pre_hook(note_changes, with_kwargs=True)
