"""One GGUF model as a snapshot: its metadata as the config that transformers would have."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from ropext import bundled, forms
from ropext.carriers.gguf import GgufCarrier
from ropext.checkpoint.snapshot import Snapshot
from ropext.errors import NotExpressible, UnsupportedModel
from ropext.families.config import named
from ropext.families.geometry import MOST_LAYERS, MOST_ROTARY
from ropext.families.table import Label, family
from ropext.gguf.header import FILE_TYPES, TYPES, GgufHeader
from ropext.jsontext import Json, JsonObject
from ropext.loaders.gguf import (
    STORED,
    Architecture,
    GgufRope,
    given_by_ollama,
    older_names,
)
from ropext.loaders.gguf import read as ggml_read
from ropext.rope import Rope, plain_inv_freq

RECORD = "ropext.record"  # the key that holds ropext.json
WHOLE = "ropext.file_sha256"  # of the whole file, these 64 characters taken as zeros
FILLER = "ropext.filler"  # the key that moves the tensors to whole pages
PARTS = "split.tensors.count"
FREQS = "rope_freqs.weight"
LONG = "rope_factors_long.weight"
SHORT = "rope_factors_short.weight"
DIVISORS = frozenset((FREQS, LONG, SHORT))  # the tensors that an extension may write
TELLING_SIZE = 100_000_000  # bytes of a file whose copy is worth a sentence


@dataclass(frozen=True)
class GgufFile(Snapshot):
    """A GGUF model as it was found: one file, or the parts of a split one."""

    architecture: str = field(default="", kw_only=True)  # decides what it can carry
    parts: tuple[GgufHeader, ...] = field(default=(), kw_only=True)

    @property
    def is_gguf(self) -> bool:
        return True

    @property
    def kind(self) -> str:
        return f"a GGUF of {self.architecture}"

    @property
    def head(self) -> GgufHeader:
        """The part with the model's keys."""
        return self.parts[0]

    @property
    def quantisation(self) -> str | None:
        """The quantiser's name for the whole file, or the type of most of its bytes."""
        name = FILE_TYPES.get(self.head.whole("general.file_type", 0) or -1)
        if name is None:
            name = self._commonest_type()
        return f"{name} (GGUF)"

    def _commonest_type(self) -> str:
        """Return the type of most bytes."""
        sizes = dict[int, int]()
        for part in self.parts:
            for tensor in part.tensors:
                sizes[tensor.kind] = sizes.get(tensor.kind, 0) + tensor.size
        most = max(sizes, key=lambda kind: sizes[kind], default=-1)
        if most not in TYPES:
            return f"type {most}"
        name: str = TYPES[most][0]
        return name

    @property
    def weight_bytes(self) -> int:
        """The bytes of all tensors."""
        return sum(tensor.size for part in self.parts for tensor in part.tensors)

    @property
    def short_name(self) -> str:
        if self.name.startswith(bundled.OLLAMA):
            return self.name
        return self.head.path.name

    @property
    def file_name(self) -> str:
        """What an extended copy is called in a directory; Ollama names a blob by its hash."""
        path = self.head.path
        if path.suffix.lower() == ".gguf":
            return f"{path.stem}.gguf"  # by this ending a directory is known as a GGUF
        return "model.gguf"

    def path(self, name: str) -> Path:
        return self.head.path.parent / name

    def remarks(self) -> tuple[str, ...]:
        remarks = list[str]()
        projector = bundled.find_projector(self.name, self.directory)
        if projector is not None:
            remarks.append(
                f"[projector] {projector} beside it is a part for images or sound, which an "
                "extension leaves as it is; give it to the runner as before (llama-server --mmproj)"
            )
        size = sum(part.end for part in self.parts)
        if size > TELLING_SIZE:
            remarks.append(
                f"[disk] the copy has {size / 1e9:.1f} GB; `ollama create` makes a second one as "
                "large"
            )
        return tuple(remarks)

    def require_weights(self) -> None:
        """They are in the file."""

    def stands_for(self, directory: Snapshot) -> Snapshot:
        # Its keys are no more in the directory, but what they can carry still decides.
        carries = partial(GgufCarrier, architecture=self.architecture)
        return replace(super().stands_for(directory), carries=carries)


def _single(head: GgufHeader, key: str) -> int | None:
    """A number that llama.cpp also takes as a list by layer; of a list, the one of most layers."""
    entry = head.entries.get(key)
    if entry is None or entry.value is not None:
        return head.whole(key, 0)
    listed = head.numbers(key) or (0,)
    return max(set(listed), key=listed.count)


def as_file(snapshot: Snapshot) -> GgufFile:
    """The GGUF file that a snapshot is; who asks knows that it is one."""
    assert isinstance(snapshot, GgufFile)
    return snapshot


def config_of(parts: Sequence[GgufHeader], row: Architecture) -> dict[str, Json]:
    """Return the config that transformers would have, as far as positions go."""
    head = parts[0]
    key = f"{row.name}.{{}}".format
    drafting = head.whole(key("nextn_predict_layers"), 0, MOST_LAYERS) or 0
    layers = head.whole(key("block_count"), 1, MOST_LAYERS) or 0
    layers -= drafting
    hidden = head.whole(key("embedding_length"))
    context = head.whole(key("context_length"))
    heads = _single(head, key("attention.head_count"))
    if not (layers > 0 and hidden and context and heads):
        raise head.wrong("it lacks block_count, embedding_length, context_length or head_count")
    dim, head_dim = sizes(head, row)
    window, kinds = _windows(head, row, layers)
    if window and row.windowed:
        row = replace(row, type=row.windowed)
    elif head.whole(key("expert_count"), 0) and row.experts:
        row = replace(row, type=row.experts)
    uses_windows = None  # as the class has it
    if not window:
        uses_windows = False
    interval = head.whole(key("full_attention_interval")) or row.interval
    rope = rope_of(parts, row, dim, context)
    config: dict[str, Json] = {
        "model_type": row.type,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": _single(head, key("attention.head_count_kv")) or heads,
        "head_dim": head_dim,
        "max_position_embeddings": context,
        "vocab_size": head.whole(key("vocab_size")) or _tokens(head),
        "rope_theta": rope.freq_base,
        "rope_scaling": _params(rope, row, dim, context, _original(head, row)),
        "sliding_window": window,
        "layer_types": kinds,
        "max_window_layers": layers,
        "use_sliding_window": uses_windows,
        "full_attention_interval": interval or None,
        "num_nextn_predict_layers": drafting or None,
    }
    if row.partial:
        config[row.partial] = dim / head_dim
    elif dim != head_dim and row.name != "deepseek2":
        raise head.wrong(f"it rotates {dim} of {head_dim} channels, where {row.name} turns all")
    config |= _of_family(head, row, dim, config)
    return {name: value for name, value in config.items() if value is not None}


def _tokens(head: GgufHeader) -> int | None:
    """Return how many tokens the file lists, if it does."""
    tokens = head.entries.get("tokenizer.ggml.tokens")
    if tokens is None:
        return None
    return tokens.items


def sizes(head: GgufHeader, row: Architecture) -> tuple[int, int]:
    """The channels of a head that rotate, and all of them, in the layers that see all tokens."""
    key = f"{row.name}.{{}}".format
    hidden = head.whole(key("embedding_length"))
    heads = _single(head, key("attention.head_count"))
    derived = 0
    if hidden and heads:
        derived = hidden // heads
    head_dim = head.whole(key("attention.key_length"), 1, 1 << 20) or derived
    dim = head.whole(key("rope.dimension_count"), 2, MOST_ROTARY) or head_dim
    if row.halves:
        dim //= 2
    if dim < 2 or dim % 2 or (dim > head_dim and row.name != "deepseek2"):
        raise head.wrong(f"it rotates {dim} of {head_dim} channels, which is not possible")
    return dim, head_dim


def _windows(
    head: GgufHeader, row: Architecture, layers: int
) -> tuple[int | None, list[str] | None]:
    """The window and the type of each layer, as llama.cpp's load_swa_pattern has them."""
    key = f"{row.name}.attention.sliding_window"
    window: int | None = row.window
    if key in head.entries:
        window = head.whole(key, 0)
    if not row.every or not window:
        if family(row.type).labels:
            return None, ["full_attention"] * layers
        return None, None
    kinds = list[str]()
    for is_windowed in _windowed_layers(head, row, layers):
        if is_windowed:
            kinds.append("sliding_attention")
        else:
            kinds.append("full_attention")
    return window, kinds


def _windowed_layers(head: GgufHeader, row: Architecture, layers: int) -> list[bool]:
    """Return which layers see a window, by the file's pattern or the architecture's own."""
    key = f"{row.name}.attention.sliding_window_pattern"
    entry = head.entries.get(key)
    if entry is not None and entry.value is None:
        listed = [bool(number) for number in head.numbers(key) or ()]
        missing = max(0, layers - len(listed))
        return listed[:layers] + [False] * missing
    every: int | None = row.every
    if entry is not None:
        every = head.whole(key, 0)
    if not every:
        return [True] * layers
    first = 1
    if row.dense_first:
        first = 0
    return [(layer + first) % every != 0 for layer in range(layers)]


def _of_family(
    head: GgufHeader, row: Architecture, dim: int, config: JsonObject
) -> dict[str, Json]:
    """Return what single families keep elsewhere."""
    if row.name == "deepseek2":
        if config["rope_scaling"] != {"rope_type": "default"}:
            raise UnsupportedModel(
                f"{head.path} is a scaled model of latent attention (deepseek2), for which "
                "llama.cpp scales the softmax differently; extend the Hugging Face checkpoint"
            )
        latent = head.whole(f"{row.name}.attention.kv_lora_rank")
        return {"qk_rope_head_dim": dim, "kv_lora_rank": latent, "head_dim": None}
    labels = family(row.type).labels
    if labels:
        return _by_layer_type(head, row, labels, config)
    beta = None
    if row.name == "mistral3":
        beta = known_key(head, row, "attention.temperature_scale")
    if not beta:
        return {}
    scaling = dict(config["rope_scaling"])
    original = _original(head, row) or config["max_position_embeddings"]
    scaling["original_max_position_embeddings"] = original
    scaling["llama_4_scaling_beta"] = beta
    return {"rope_scaling": scaling}


def _by_layer_type(
    head: GgufHeader, row: Architecture, labels: tuple[Label, ...], config: JsonObject
) -> dict[str, Json]:
    """Return the rope dicts of windowed and of other layers, whose heads may differ, too. A key
    with the value None is left out of the config."""
    key = f"{row.name}.{{}}".format
    whole = config["head_dim"]
    local = head.whole(key("attention.key_length_swa"), 1, 1 << 20) or whole
    theta = known_key(head, row, "rope.freq_base_swa") or row.local or config["rope_theta"]
    full = {"rope_theta": config["rope_theta"]}
    windowed = {"rope_type": "default", "rope_theta": theta}
    turning = head.whole(key("rope.dimension_count_swa"))
    turning = turning or head.whole(key("rope.dimension_count")) or local
    if row.partial:
        full[row.partial] = config[row.partial]
        windowed[row.partial] = min(1.0, turning / local)
    full |= config["rope_scaling"]
    rows = dict[str, Json]()
    for label in labels:
        if label.windowed:
            rows[label.name] = windowed
        else:
            rows[label.name] = full
    by_kind = _kv_heads_by_kind(head, row, config["layer_types"])
    changed: dict[str, Json] = {
        "num_key_value_heads": by_kind.get("sliding_attention", config["num_key_value_heads"]),
        "num_global_key_value_heads": by_kind.get("full_attention"),
    }
    if by_kind:
        changed["attention_k_eq_v"] = True  # or stock reads no heads of their own
    changed["num_kv_shared_layers"] = head.whole(key("attention.shared_kv_layers"), 0)
    changed["head_dim"] = local
    changed["global_head_dim"] = whole
    changed["rope_parameters"] = rows
    for moved in ("rope_theta", "rope_scaling", row.partial):
        changed[moved] = None
    return changed


def _kv_heads_by_kind(head: GgufHeader, row: Architecture, kinds: Sequence[str]) -> dict[str, int]:
    """Return the heads of keys and values by type of layer, where the file lists them by layer."""
    key = f"{row.name}.attention.head_count_kv"
    entry = head.entries.get(key)
    if entry is None or entry.value is not None:
        return {}
    return dict(zip(kinds, head.numbers(key) or (), strict=False))


def _original(head: GgufHeader, row: Architecture) -> int | None:
    return head.whole(f"{row.name}.rope.scaling.original_context_length", 0) or None


def known_key(head: GgufHeader, row: Architecture, key: str) -> float | None:
    """A number under llama.cpp's name, or under that of Ollama's converter."""
    value = head.decimal(f"{row.name}.{key}")
    older = older_names(row.name).get(key)
    if value is None and older:
        return head.decimal(f"{row.name}.{older}")
    return value


def part_with(parts: Sequence[GgufHeader], name: str) -> GgufHeader | None:
    """The part that holds a tensor: of a split model not always the first, which may hold none."""
    for part in parts:
        if part.tensor(name) is not None:
            return part
    return None


def _factors(parts: Sequence[GgufHeader], name: str) -> tuple[float, ...]:
    """The rope factors of a name; none where no part has it."""
    part = part_with(parts, name)
    if part is None:
        return ()
    return part.floats(name)


def rope_of(
    parts: Sequence[GgufHeader], row: Architecture, dim: int, context: int, *, ollama: bool = True
) -> GgufRope:
    """Return what the file's keys and tensors say of its rotary embedding, as llama.cpp takes them,
    from `ollama` or as they stand."""
    head = parts[0]
    names = set(head.entries)
    for part in parts:
        names.update(tensor.name for tensor in part.tensors)
    given: JsonObject = {}
    if ollama:
        given = given_by_ollama(row.name, names, context)

    def at(key: str, default: float, least: float = 0.0) -> float:
        place = f"{row.name}.rope.{key}"
        value = head.decimal(place)
        if ollama:
            value = known_key(head, row, f"rope.{key}")
        if value is None:
            value = given.get(key, default)
        if value != default and not least < value < forms.LARGEST_THETA:
            raise head.wrong(f"{place} is {value:g}, which is out of range")
        return value

    scaling = head.text(f"{row.name}.rope.scaling.type") or given.get("scaling.type", "linear")
    if scaling not in ("none", "linear", "yarn", "longrope"):
        raise head.wrong(f"rope.scaling.type is {named(scaling)}, which llama.cpp does not know")
    factor_key = "scale_linear"
    if "scaling.factor" in given or f"{row.name}.rope.scaling.factor" in names:
        factor_key = "scaling.factor"
    factor = at(factor_key, 0.0) or 1.0
    if scaling == "longrope" or row.name == "phi3":
        divisors = _factors(parts, LONG)
        short = _factors(parts, SHORT)
    else:
        divisors = _factors(parts, FREQS)
        short = divisors
    if row.halves:  # a row for the windowed layers, of which the others read the first half
        divisors = divisors[: dim // 2]
        short = short[: dim // 2]
    sizes_told = {len(divisors), len(short)}
    if sizes_told not in ({0}, {dim // 2}):
        raise head.wrong(f"its rope factors are not one number for each of {dim // 2} pairs")
    base = at("freq_base", 10000.0, 1.0)
    attention = at("scaling.attn_factor", 1.0)
    rope = GgufRope(base, scaling, factor, _original(head, row) or context, attention)
    if "betas" in row.adds:
        fast = at("scaling.yarn_beta_fast", 0.0)
        slow = at("scaling.yarn_beta_slow", 0.0)
        rope = replace(rope, beta_fast=fast or rope.beta_fast, beta_slow=slow or rope.beta_slow)
    if "log" in row.adds:
        rope = replace(rope, log_multiplier=at("scaling.yarn_log_multiplier", 0.0))
    if factor == 1 and scaling in ("linear", "yarn"):
        rope = replace(rope, scaling="none")
    return replace(rope, divisors=divisors, short=short)


def _params(
    rope: GgufRope, row: Architecture, dim: int, context: int, original: int | None
) -> dict[str, Json]:
    """Return a stock dict of the same spectrum."""
    allowed = family(row.type).forms
    has_no_divisors = not rope.divisors or set(rope.divisors + rope.short) == {1.0}
    is_scaled = rope.scaling != "none" and rope.factor != 1
    if has_no_divisors and rope.attn_factor == 1 and not is_scaled:
        return {"rope_type": "default"}
    is_linear = rope.scaling == "linear" and rope.attn_factor == 1
    if has_no_divisors and is_linear and "linear" in allowed:
        linear: dict[str, Json] = {"rope_type": "linear", "factor": rope.factor}
        if original:
            linear["original_max_position_embeddings"] = original
        return linear
    if has_no_divisors and rope.scaling == "yarn" and "yarn" in allowed:
        return _yarn(rope, dim)
    if rope.scaling == "none" and rope.attn_factor == 1 and "llama3" in allowed:
        llama3 = _llama3(rope, dim)
        if llama3 is not None:
            return llama3
    plain_rope = Rope(dim, rope.freq_base, context, original or context)
    for params in forms.candidates(plain_rope, ggml_read(rope, dim), context):
        if params["rope_type"] in ("proportional", "longrope"):
            return params
    raise NotExpressible("no stock rope type that is allowed here carries this spectrum exactly")


def _yarn(rope: GgufRope, dim: int) -> dict[str, Json]:
    out: dict[str, Json] = {"rope_type": "yarn", "factor": rope.factor}
    out["original_max_position_embeddings"] = rope.original
    if (rope.beta_fast, rope.beta_slow) != (forms.BETA_FAST, forms.BETA_SLOW):
        out |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow}
    if rope.log_multiplier:
        out |= {"mscale": 1.0, "mscale_all_dim": rope.log_multiplier}
    if rope.attn_factor != 1:
        out["attention_factor"] = ggml_read(rope, dim).attention_factor
    return out


def _llama3(rope: GgufRope, dim: int) -> dict[str, Json] | None:
    """Return Llama 3.1's own form, if the divisors are of it: its slowest pair is divided by the
    whole factor, and one in its ramp tells the original length (low 1, high 4, as all releases
    have)."""
    plain = plain_inv_freq(dim, rope.freq_base)
    factor = round(rope.divisors[-1], 4)
    ramp = list[tuple[float, float]]()  # a divisor, and the frequency that it divides
    for divisor, frequency in zip(rope.divisors, plain, strict=True):
        if 1.01 < divisor < factor * 0.99:
            ramp.append((divisor, frequency))
    if not ramp or factor <= 1:
        return None
    divisor, frequency = ramp[len(ramp) // 2]
    gamma = (1 / divisor - 1 / factor) / (1 - 1 / factor)
    original = round((1 + 3 * gamma) * 2 * math.pi / frequency)
    wanted = forms.llama3_pair_factors(plain, original, factor, 1.0, 4.0)
    # The ramp divides by nearly nothing in float32; a wrong length is off by more than this.
    if any(abs(a / b - 1) > 64 * STORED for a, b in zip(wanted, rope.divisors, strict=True)):
        return None
    out = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return out | {"original_max_position_embeddings": original}
