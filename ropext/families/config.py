"""Read a config dict: typed values out of untrusted JSON, the census of model types, the place of a
composite's text part, and refusals of keys that load code or files from elsewhere."""

import json
import math
import re
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple, TypeVar

from ropext.base.errors import ConfigError, InputError
from ropext.base.inputs import TRUSTED_KERNEL
from ropext.base.jsontext import Json, JsonObject, untagged_float
from ropext.families.described import Facts, remembered_facts

LONGEST_LIST = 1 << 16  # pairs of a head, or layers of a model: far above any real one
LARGEST = 1 << 40
# Limits for everything that is built from a config, also for parts that nothing here reads. Real
# models have at most 126 layers, 16,384 experts (Doge) and a million tokens.
MOST_BUILT = {
    re.compile(r"(layers?|depths?|blocks)$"): 1 << 10,
    re.compile(r"experts$"): 1 << 16,
    re.compile(r"(labels|classes)$"): 1 << 20,  # stock makes two tables of so many names
    re.compile(r"(sizes?|dims?|_rank|_inner|^d_model|^d_ff|heads|channels)$"): 1 << 24,
    re.compile(r"(patches|codebooks|^n_positions|num_position_embeddings)$"): 1 << 24,
}
MOST = 1e12  # above it a sum with 1 loses the 1 (no factor or length is near)
SMALLEST = 1e-12  # below it a logarithm or a quotient leaves the range of a float
WANTED = {
    str: "a string",
    bool: "true or false",
    dict: "an object",
    list: f"a list of at most {LONGEST_LIST} ",
}
Kind = TypeVar("Kind")


def shown(value: object) -> str:
    """Return the value of a config key, such as rope_theta, for a sentence. It has at most 60
    characters."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def named(key: str) -> str:
    """Return a config key, such as rope_theta, for a sentence. It is unchanged, unless it is long
    or would not print."""
    return key if len(key) <= 60 and key.isprintable() else shown(key)


class Dict:
    """One JSON object of a config, with its path for messages. null counts as absent."""

    def __init__(self, values: Mapping[str, Any], where: str = "") -> None:
        """Hold the values of an object in config.json, and its path `where` for error messages."""
        self.values = values
        self.where = where

    def name(self, key: str) -> str:
        """Return a key of config.json with the path of its object, as sentences name it."""
        return f"{self.where}.{named(key)}" if self.where else named(key)

    def wrong(self, key: str, wanted: str) -> InputError:
        """Return the error for a value of config.json that is not as `wanted`."""
        value = shown(self.values[key])
        return ConfigError(f"{self.name(key)} must be {wanted}, was {value}")

    def at(self, path: str) -> "tuple[Dict, str]":
        """Return the config object that a dotted path leads to (empty if it is missing), and its
        key."""
        here: Dict = self
        *parents, key = path.split(".")
        for parent in parents:
            here = here.object(parent) or Dict({}, here.name(parent))
        return here, key

    def has(self, key: str) -> bool:
        """Return whether a key of config.json is present and not null."""
        return self.values.get(key) is not None

    def get(self, key: str, kind: type[Kind], of: str = "") -> Kind | None:
        """Return a value of config.json of this type, None if it is absent; `of` names the items of
        a list for the error."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, kind) or (isinstance(value, list) and len(value) > LONGEST_LIST):
            raise self.wrong(key, WANTED[kind] + of)
        return value

    def integer(self, key: str, low: int = 1, high: int = LARGEST) -> int | None:
        """Return a whole number of config.json within bounds; a float such as 4.0 counts as an
        integer."""
        value = self.values.get(key)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.wrong(key, f"a whole number of {low} to {high}")
        return value

    def number(
        self,
        key: str,
        *,
        zero: bool = False,
        smallest: float = SMALLEST,
        most: float = MOST,
    ) -> float | None:
        """Return a number of config.json above 0, of `smallest` at least and below `most`; with
        `zero` also 0."""
        value = self.values.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(key, "a number")
        # An integer of hundreds of digits does not fit a float (so no isfinite before the bound);
        # 1e300 does, and breaks powers. NaN fails every comparison.
        good = -most < value < most and float(value) < most  # 10**30 < 1e30 rounds up to it
        good = good and (value >= smallest or (zero and value == 0))
        if not good:
            since = "from" if zero else "above"
            raise self.wrong(key, f"a number {since} 0 and below {most:g}")
        return float(value)

    def object(self, key: str) -> "Dict | None":
        """Return the config object under a key, with its path."""
        value = self.get(key, dict)
        return None if value is None else Dict(value, self.name(key))

    def numbers(self, key: str, *, zero: bool = False, most: float = MOST) -> list[float] | None:
        """Return a list of numbers in config.json; transformers' {"__float__": "Infinity"} counts
        as a number."""
        values = self.get(key, list, "numbers")
        if values is None:
            return None
        out = []
        for i, value in enumerate(values):
            value = untagged_float(value)
            if value == math.inf:
                out.append(math.inf)
                continue
            item = Dict({f"{key}[{i}]": value}, self.where)
            number = item.number(f"{key}[{i}]", zero=zero, most=most)
            if number is None:
                raise self.wrong(key, "a list of numbers without null")
            out.append(number)
        return out


# Why a type cannot be extended: it is not rotary, or no config reaches its rotation.
REFUSALS = {
    "hard-coded": "rotates with a base that is fixed in its code, or with frequencies among its"
    " weights that replace the config's (ESM), so no config can scale it; only its code or those"
    " weights could be changed",
    "own order": "keeps its frequencies in an order of its own (by image axes) and refuses every"
    " scaled rope type; only its code could be changed",
    "twin": "keeps an unscaled rotary embedding beside the scaled one, for the layers that"
    " rope_scaling_layers leaves out, and a plan has one set of frequencies for all layers",
    "learned": "has a learned table of absolute positions; inspect, plan, extend, verify, eval,"
    " finetune and push take it, each as a command of its own; fit, run, plan --measure and"
    " --method auto do not yet",
    "sinusoidal": "adds fixed sinusoids to its embeddings, which no config key changes",
    "alibi": "uses ALiBi: its slopes are hard-coded in transformers and follow from the"
    " number of heads, so that no config and no weight can carry others; it reads any length"
    " as it is (MPT to the max_seq_len of its config, which may be raised by hand), and"
    " ropext.patch and eval --method scale its slopes in memory",
    "buckets": "uses T5's relative buckets; inspect, plan, extend, verify and patch take them",
    "mixed": "mixes absolute with relative positions, and no key lengthens both",
    "disentangled": "uses DeBERTa's relative positions; inspect, plan, extend, verify, patch"
    " and eval take those in buckets",
    "transformer-xl": "uses Transformer-XL's relative positions; plan and extend set clamp_len",
    "recurrent": "keeps its state recurrently and has no positions to scale",
    "none": "rotates nothing, so there is no rotary embedding to scale",
    "not computed": "has no rotary embedding that transformers computes from its config (it may"
    " have positions of another kind)",
    "two towers": "is made of two models with positions of their own; extend the one that reads the"
    " long input as a model by itself",
    "other": "is not a text model with a rotary context window",
}


class Known(NamedTuple):
    """The entry of a model type in the census."""

    scheme: str  # "rotary", "composite" or a key of REFUSALS
    path: tuple[str, ...] = ()  # composite: the path of its text part
    text: str = ""  # composite: the text part's type if its config does not name one


@cache
def packaged_facts(name: str) -> Any:
    """Return a JSON file of facts about model types: types.json, defaults.json,
    published.json and the like."""
    return json.loads((files(__package__) / name).read_text("utf-8"))


def census_version() -> str:
    """Return the transformers version that the census of model types and the defaults were taken
    from."""
    return str(packaged_facts("defaults.json")["transformers"])


@cache
def census() -> dict[str, Known]:
    """Return the census of model types: the position scheme of each type in the transformers
    version that `census_version` returns."""
    out: dict[str, Known] = {}
    for scheme, types in packaged_facts("types.json").items():
        if scheme == "composite":
            for name, (*path, text) in types.items():
                out[name] = Known(scheme, tuple(path), text)
        elif scheme != "transformers":
            out |= {name: Known(scheme) for name in types}
    return out


def defaults_of(kind: str, facts: Facts, *, composite: bool = False) -> dict[str, Any]:
    """Return the meaning of absent config keys for a rotary model type. For a composite type,
    return the keys that it adds to a text config that omits them."""
    stored = packaged_facts("defaults.json")["composites" if composite else "types"]
    if kind in stored:
        keys: dict[str, Any] = stored[kind]
        return keys
    about = facts.get(kind)
    if about is None:
        return {}
    return dict(about.added if composite else about.defaults)


def auto_class(model_type: str, facts: Facts) -> str:
    """Return the class of transformers that loads a model of this type; "" if none does."""
    for name, types in packaged_facts("classes.json").items():
        if model_type in types:
            return str(name)
    about = facts.get(model_type)
    return "AutoModelForCausalLM" if about is None else about.auto_class


class UnknownType(InputError):
    """A model type that is neither in the census nor described by whoever opened its config."""

    def __init__(self, kind: str) -> None:
        """Build the error for a config's model type that neither the census nor an answer of
        transformers has."""
        super().__init__(unknown_type_message(kind))
        self.kind = kind


def entries(config: Dict) -> Iterator[tuple[Dict, str, Any]]:
    """Yield every key of a config with the object that holds it and its value. The keys of all
    objects inside follow, at any depth, also in lists."""
    for key, value in config.values.items():
        yield config, key, value
    for key, value in config.values.items():
        for item in flat(value):
            if isinstance(item, dict):
                yield from entries(Dict(item, config.name(key)))


def flat(value: Any) -> Iterator[Any]:
    """Yield a value of config.json, or the items of a list and of the lists inside it."""
    if not isinstance(value, list):
        yield value
        return
    for item in value:
        yield from flat(item)


def check_built(config: Dict) -> None:
    """Raise InputError if a config key states a size with which transformers would fill memory or
    time to build the model."""
    for part, key, value in entries(config):
        for kind, most in MOST_BUILT.items():
            if not kind.search(str(key)):
                continue
            if any(type(item) in (int, float) and item > most for item in flat(value)):
                raise part.wrong(key, f"at most {most}")


class Located(NamedTuple):
    """The identity of a config: its model type, and the type and scheme of its text part."""

    model_type: str
    text_type: str
    path: tuple[str, ...]  # to the text part inside the config
    scheme: str  # its scheme in the census


def locate(config: dict[str, Any]) -> Located:
    """Return the place of a config's text part, by the census of model types, else by the
    remembered facts about its types."""
    if not isinstance(config, dict):
        raise InputError(f"config.json must hold an object, held {shown(config)}")
    here = Dict(config)
    check_built(here)
    kind = here.get("model_type", str)
    if not kind:
        raise InputError("config.json has no model_type, so its position scheme is unknown")
    types = list[str]()
    path: tuple[str, ...] = ()
    for _ in range(4):  # the deepest composite has two levels
        # A config may have a model type of its own and the class of a stock type.
        stock, architecture = packaged_facts("renamed.json")["same"].get(kind, (kind, None))
        classes = here.values.get("architectures")
        kind = stock if isinstance(classes, list) and architecture in classes else kind
        types.append(kind)
        known = census().get(kind)
        if known is None:
            if why := _own_code(config, kind):
                raise InputError(why)
            about = remembered_facts(config).get(kind)
            if about is None:
                raise UnknownType(kind)
            known = Known(about.scheme, about.path, about.text)
        if known.scheme != "composite":
            return Located(types[0], kind, path, known.scheme)
        for key in known.path:
            inner = here.object(key)
            if inner is not None:
                here = inner
                path = (*path, key)
            elif known.path != ("text_config",) or not here.has("hidden_size"):
                # transformers 4 kept some text parts at top level
                raise ConfigError(f"{here.name(key)} is missing")
        named = here.get("model_type", str)
        kind = known.text if named is None or here.values is config or named == kind else named
    raise ConfigError(f"model types nest too deeply at {'.'.join(path)}")


def _own_code(config: Mapping[str, Any], kind: str) -> str:
    """Return why ropext does not ask transformers about a model type: it has code of its own.
    Return "" if ropext does."""
    if differs := packaged_facts("renamed.json")["differs"].get(kind):
        return f"config.json: {kind} has its own code, which differs from {differs} in transformers"
    if config.get("auto_map"):
        return (
            f"config.json: model_type {shown(kind)} comes with code of its own (auto_map), which"
            " ropext cannot verify; it extends only model types of transformers"
        )
    return ""


def unknown_type_message(kind: str, lacks: str = "") -> str:
    """Return the sentence that a model type is unknown; `lacks` is a clause about the installed
    transformers."""
    beside = f" ({lacks})" * bool(lacks)
    return (
        f"config.json: model_type {shown(kind)} is not among the model types that this ropext"
        f" knows, those of transformers {census_version()}{beside}; check the spelling, or install"
        " a transformers that knows it"
    )


def text_part(config: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    """Return the text part of a config, inside the keys of a path."""
    part: dict[str, Any] = config
    for key in path:
        part = part[key]
    return part


IMPLEMENTATION = re.compile(r"_?(attn|experts)_implementation(_internal)?")
# Stock's own names; transformers 5 added the implementations of experts.
STOCK_NAMES = re.compile(
    r"(paged\|)?(eager|sdpa|flash_attention_[2-9]|flex_attention)"
    r"|(eager|sdpa)_paged|grouped_mm|batched_mm|deepgemm|sonicmoe"
)
WEIGHTS_KEY = "transformers_weights"  # stock loads this file in place of model.safetensors
# Keys that stock passes to timm, which opens the named files (a pickle, before timm 1.0.26) or
# fetches weights.
HANDED_ON = ("checkpoint_path", "pretrained_cfg", "pretrained_cfg_overlay", "backbone_kwargs")
FETCHES = ("use_pretrained_backbone",)
# Stock passes this to timm too. PerceptionLM needs it, so shapes are allowed and names refused.
SHAPES = "model_args"
ARCHITECTURE = "architecture"  # timm loads a folder or a repository if the name has a colon


def check_foreign_parts(config: JsonObject, where: str) -> None:
    """Raise InputError if transformers reads a config key as a request for code or files that do
    not belong to the checkpoint."""
    for part, key, value in entries(Dict(config)):
        if IMPLEMENTATION.fullmatch(key):
            _check_implementation(value, f"{where}: {part.name(key)}")
        elif key == WEIGHTS_KEY and value is not None:
            raise InputError(
                f"{where}: {part.name(key)} {shown(value)} has transformers load another file "
                "than model.safetensors and its index; remove the key"
            )
        elif _hands_on(key, value):
            raise InputError(
                f"{where}: {part.name(key)} {shown(value)} is handed on to another library "
                "(timm), which may open files or fetch weights by it; remove the key"
            )


def _check_implementation(value: Json, key: str) -> None:
    """Raise InputError if transformers reads a config key as an implementation of attention or
    experts that is neither its own nor a kernel of kernels-community. The value is a name, or a
    dict of names by part."""
    names = value.values() if isinstance(value, dict) else [value]
    for name in names:
        if not isinstance(name, str) or STOCK_NAMES.fullmatch(name) or TRUSTED_KERNEL.match(name):
            continue
        if "/" in name:
            raise InputError(
                f"{key} {shown(name)} names a kernel on the hub, which transformers would fetch "
                "and run; remove the key"
            )
        raise InputError(
            f"{key} {shown(name)} is no implementation of transformers' own; remove the key"
        )


def _hands_on(key: str, value: Json) -> bool:
    """Return True if transformers passes this config key to timm. timm may open files or fetch
    weights by its value."""
    if key in HANDED_ON:
        return bool(value)
    if key in FETCHES:
        return value is not None and value is not False
    if key == ARCHITECTURE:
        return isinstance(value, str) and ":" in value
    if key == SHAPES:
        return not _is_shape(value)
    return False


def _is_shape(arguments: Json) -> bool:
    """Return True if the config key model_args, which transformers passes to timm, names no file.
    It then holds only numbers, booleans or empty values."""
    if arguments is None:
        return True
    if not isinstance(arguments, dict):
        return False
    values = [item for value in arguments.values() for item in flat(value)]
    return all(item in ("", None) or isinstance(item, int | float) for item in values)
