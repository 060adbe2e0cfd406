"""Compute the RoPE frequencies that llama.cpp uses for a GGUF, and the keys and tensors that carry
a spectrum.

The table gguf.json lists the keys that each architecture reads. `read` is ggml's formula in
float64. `candidates` finds the keys and divisors that give the wanted spectrum in an architecture.
ropext.files.gguf does the writing.
"""

import json
import math
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from ropext.base.errors import UnsupportedModel
from ropext.families.loaders.lookup import LoaderReading, reading_in
from ropext.families.loaders.table import readers as programs
from ropext.scaling import forms
from ropext.scaling.forms import Params
from ropext.scaling.rope import Rope, Spectrum, divisors, plain_inv_freq

# Keys and divisors are float32: half a unit in the last place, twice (a factor and a divisor).
STORED = 2.0**-22
# Gemma 4's divisor of a non-rotating pair, as a float32; STILL and more count as that.
STANDS = 1000000015047466219876688855040.0
STILL = 1e20
# keys that yarn's options express
_YARN = {"context_length", "type", "factor", "original_context_length"}


@dataclass(frozen=True)
class Architecture:
    """One row of the table: a GGUF architecture."""

    name: str
    type: str  # the model type in transformers that has its geometry
    adds: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()
    also: tuple[str, ...] = ()  # other types that are converted to it
    partial: str = ""  # the key under which that type keeps the share of a head that rotates
    interval: int = 0  # of so many layers one attends, if full_attention_interval is absent
    every: int = 0  # of so many layers one sees all tokens; 0 = llama.cpp knows no windows in it
    dense_first: bool = False
    window: int = 0  # if no key states it
    windowed: str = ""  # the model type if a key does
    experts: str = ""  # the model type if there are experts
    local: float = 0.0  # theta of windowed layers without a key; 0 = the theta of the others
    halves: bool = False  # full layers rotate half of dimension_count
    only: str = ""  # the one program that knows it
    evidence: str = "engine"

    @property
    def divisors(self) -> bool:
        """Return whether llama.cpp reads one divisor per pair in this GGUF architecture."""
        return "freqs" in self.adds or "factors" in self.adds


_FILE = Path(__file__).parents[2] / "loaders/gguf.json"


@cache
def _table() -> dict[str, Any]:
    """Return gguf.json, the table of GGUF architectures."""
    table: dict[str, Any] = json.loads(_FILE.read_text("utf-8"))
    return table


def architecture(name: str) -> Architecture:
    """Return the row of a GGUF architecture; raise UnsupportedModel if it is unknown or cannot be
    extended."""
    row = _table()["architectures"].get(name)
    if row is not None:
        experts = _table()["experts"].get(name, "")  # another type, of the same positions
        values = {"name": name, "experts": experts} | row
        for key in ("adds", "lacks", "also"):
            values[key] = tuple(row.get(key, ()))
        if experts:
            values["also"] += (experts,)
        return Architecture(**values)
    for reason, names in _table()["refused"].items():
        if name in names:
            raise UnsupportedModel(f"the GGUF architecture {name} {reason}")
    advice = _CHECKPOINTS.get(name, "extend the Hugging Face checkpoint and convert the result")
    raise UnsupportedModel(
        f"the GGUF architecture {name[:60]!r} is not in ropext's table of what llama.cpp "
        f"{programs('gguf_readers')[0].versions} reads; {advice}"
    )


# The checkpoints of these are refused too, in all sizes or some.
_CHECKPOINTS = {
    "exaone4": "the 1.2B of EXAONE 4 is extended as a Hugging Face checkpoint and converted; no "
    "scaling helps the 32B, whose layers that see all tokens do not rotate",
    "granitehybrid": "nor does a Hugging Face checkpoint help: Granite 4 H rotates nothing "
    "(position_embedding_type nope), so there is nothing to scale",
}


def alike(name: str, text_type: str) -> bool:
    """Return whether a GGUF of this architecture may have been converted from a model type in
    transformers."""
    row = architecture(name)
    return text_type == row.type or text_type in row.also


def converted_to(text_type: str) -> Architecture | None:
    """Return the architecture of a GGUF converted from a model type in transformers; None if it has
    none."""
    experts = _table()["experts"]
    for name, row in _table()["architectures"].items():
        if text_type in (row["type"], experts.get(name)) or text_type in row.get("also", ()):
            return architecture(name)
    return None


def takes_divisors(text_type: str) -> bool:
    """Return whether a GGUF of this model type in transformers can carry any spectrum."""
    row = converted_to(text_type)
    return row is not None and row.divisors


def reorders_keys(text_type: str) -> bool:
    """Return whether the converter reorders the heads of this model type in transformers. Then the
    two channels of a rotary pair are neighbours in a GGUF and half a head apart in a checkpoint."""
    row = converted_to(text_type)
    return row is not None and row.name in _table()["reordered"]


@dataclass(frozen=True)
class GgufRope:
    """A rotary embedding as llama.cpp's keys and tensors describe it."""

    freq_base: float
    scaling: str = "none"  # or linear, yarn, longrope
    factor: float = 1.0
    original: int = 0
    attn_factor: float = 1.0
    beta_fast: float = forms.BETA_FAST
    beta_slow: float = forms.BETA_SLOW
    log_multiplier: float = 0.0
    divisors: tuple[float, ...] = ()  # rope_freqs.weight, or rope_factors_long.weight
    short: tuple[float, ...] = ()  # rope_factors_short.weight


def read(rope: GgufRope, dim: int) -> Spectrum:
    """Return the RoPE frequencies that the engine llama.cpp computes from these GGUF keys. They are
    the angle of each pair at position 1 and the factor on cos and sin.

    It follows rope_yarn and ggml_rope_cache_init of ggml-cpu/ops.cpp, after llama_context's
    constructor, in float64. ggml itself multiplies float32 powers of the base, which drift by some
    1e-6.
    """
    freq_scale = 1.0
    if rope.scaling != "none":
        freq_scale = 1.0 / rope.factor
    mscale = 1.0  # yarn_attn_factor
    if rope.scaling == "yarn":
        factor = 1.0 / freq_scale
        mscale = forms.mscale(factor, 1.0)
        if rope.log_multiplier:
            mscale /= forms.mscale(factor, rope.log_multiplier)
        mscale *= 1.0 / (1.0 + 0.1 * math.log(factor))
    mscale *= rope.attn_factor
    if rope.scaling == "yarn":
        mscale *= 1.0 + 0.1 * math.log(1.0 / freq_scale)
    inv_freq = _pair_angles(rope, dim, freq_scale, rope.divisors)
    if not rope.short or rope.short == rope.divisors:
        return Spectrum(inv_freq, mscale)
    short = _pair_angles(rope, dim, freq_scale, rope.short)
    return Spectrum(inv_freq, mscale, 1.0, short, rope.original)


def _pair_angles(
    rope: GgufRope, dim: int, freq_scale: float, divisors: tuple[float, ...]
) -> tuple[float, ...]:
    """Return the angle of each pair at position 1 as the engine llama.cpp reads it from GGUF keys
    and divisors."""
    is_yarn = rope.scaling == "yarn"
    low = 0.0
    high = 0.0
    if is_yarn:  # ggml_rope_yarn_corr_dims of ggml.c
        bounds = list[float]()
        for turns in (rope.beta_fast, rope.beta_slow):
            wave = math.log(rope.original / (turns * math.tau))
            bounds.append(dim * wave / (2 * math.log(rope.freq_base)))
        low = max(0, math.floor(bounds[0]))
        high = min(dim - 1, math.ceil(bounds[1]))
    angles = list[float]()
    for i in range(dim // 2):
        divisor = 1.0
        if divisors:
            divisor = divisors[i]
        extrapolated = 0.0
        if divisor < STILL:
            extrapolated = rope.freq_base ** (-2 * i / dim) / divisor
        interpolated = freq_scale * extrapolated
        theta = interpolated
        if is_yarn:
            y = (i - low) / max(0.001, high - low)
            mix = 1 - min(1.0, max(0.0, y))
            theta = interpolated * (1 - mix) + extrapolated * mix
        angles.append(theta)
    return tuple(angles)


def farthest(one: Spectrum, other: Spectrum) -> float:
    """Return the largest relative difference of a spectrum, as llama.cpp reads it from a GGUF, from
    the wanted one. Return infinity if they are of two kinds."""
    if (one.short_inv_freq is None) != (other.short_inv_freq is None):
        return math.inf
    if len(one.inv_freq) != len(other.inv_freq) or one.short_context != other.short_context:
        return math.inf
    pairs = list(zip(one.inv_freq, other.inv_freq, strict=True))
    pairs += zip(one.short_inv_freq or (), other.short_inv_freq or (), strict=True)
    pairs.append((one.attention_factor, other.attention_factor))
    pairs.append((one.softmax_factor, other.softmax_factor))
    return max(_relative_difference(a, b) for a, b in pairs)


def _relative_difference(a: float, b: float) -> float:
    """Return the relative difference of a number, as llama.cpp reads it from a GGUF, from the
    wanted one. Return infinity if only the latter is 0."""
    if b:
        return abs(a / b - 1)
    if a == b:
        return 0.0
    return math.inf


def _offered_ropes(
    row: Architecture, rope: Rope, wanted: Spectrum, params: Params
) -> Iterator[GgufRope]:
    """Yield the spellings that llama.cpp may read as the wanted spectrum in this GGUF architecture:
    keys and divisors. The most widely read are first."""
    original = int(params.get("original_max_position_embeddings") or rope.original_context)
    plain = plain_inv_freq(rope.dim, rope.theta)
    factors = divisors(plain, wanted.inv_freq)
    held = tuple(min(factor, STANDS) for factor in factors)  # as float32 numbers in a file
    theta = forms.theta_form(rope, factors, wanted, 0)
    if theta is not None:
        yield GgufRope(theta["rope_theta"], original=original)
    linear = forms.linear_form(rope, factors, wanted, 0)
    if linear is not None:
        yield GgufRope(linear["rope_theta"], "linear", linear["factor"], original)
    if params["rope_type"] in ("linear", "proportional"):
        scaling = "linear"
        if params["factor"] == 1:
            scaling = "none"
        yield GgufRope(params["rope_theta"], scaling, params["factor"], original)
    # A yarn over non-rotating pairs has the form of a longrope.
    if params["rope_type"] == "yarn" or (
        rope.has_non_rotating_pairs and params["rope_type"] == "longrope"
    ):
        offer = GgufRope(params["rope_theta"], "yarn", params["factor"], original)
        if "log" in row.adds:
            offer = replace(offer, log_multiplier=rope.mscale_all_dim)
        if "betas" in row.adds:
            fast = params.get("beta_fast") or offer.beta_fast
            slow = params.get("beta_slow") or offer.beta_slow
            offer = replace(offer, beta_fast=fast, beta_slow=slow)
        yield offer
    if "freqs" in row.adds:
        yield GgufRope(rope.theta, original=original, divisors=held)
    if "factors" in row.adds:
        short = factors
        if wanted.short_inv_freq is not None:
            short = divisors(plain, wanted.short_inv_freq)
            original = wanted.short_context
        yield GgufRope(rope.theta, "longrope", 1.0, original, divisors=held, short=short)


def candidates(name: str, rope: Rope, wanted: Spectrum, params: Params) -> Iterator[GgufRope]:
    """Yield every set of keys and divisors from which llama.cpp computes `wanted` in this
    architecture, the most widely read first. `params` is a stock rope dict of that spectrum. Pairs
    that do not rotate in the base do not rotate in the result."""
    row = architecture(name)
    fixed_theta = "theta" in row.lacks and rope.nested  # its windowed layers would follow
    for offer in _offered_ropes(row, rope, wanted, params):
        if offer.scaling in row.lacks:
            continue
        if fixed_theta and abs(offer.freq_base / rope.theta - 1) > forms.EXACT:
            continue
        if rope.has_non_rotating_pairs and not offer.divisors:
            offer = replace(offer, divisors=_stopping_divisors(rope))
        ratio = wanted.attention_factor / read(offer, rope.dim).attention_factor
        if not forms.agree(ratio, 1):
            offer = replace(offer, attn_factor=ratio)
        if "attn" in row.lacks and offer.attn_factor != 1:
            continue
        if forms.same(read(offer, rope.dim), wanted):
            yield offer


def _stopping_divisors(rope: Rope) -> tuple[float, ...]:
    """Return a divisor per pair: the engine llama.cpp reads it as a stop if the pair does not
    rotate in the base, else as no change."""
    divisors = list[float]()
    for factor in rope.pair_factors:
        if factor == math.inf:
            divisors.append(STANDS)
        else:
            divisors.append(1.0)
    return tuple(divisors)


def keys_of(name: str, rope: GgufRope, target: int) -> dict[str, int | float | str]:
    """Return all keys that state a rotary embedding and its length to engines, such as llama.cpp,
    in this GGUF architecture."""
    scaling = f"{name}.rope.scaling"
    keys: dict[str, int | float | str] = {
        f"{name}.context_length": target,
        f"{name}.rope.freq_base": float(rope.freq_base),
        f"{scaling}.type": rope.scaling,
        f"{scaling}.factor": float(rope.factor),
        f"{scaling}.original_context_length": rope.original,
        f"{scaling}.attn_factor": float(rope.attn_factor),
    }
    if rope.scaling == "yarn" and "betas" in architecture(name).adds:
        keys[f"{scaling}.yarn_beta_fast"] = float(rope.beta_fast)
        keys[f"{scaling}.yarn_beta_slow"] = float(rope.beta_slow)
    return keys


def flags(name: str, rope: GgufRope, keys: Mapping[str, int | float | str]) -> str:
    """Return GGUF `keys` in the spelling of llama-server's flags, which this engine reads in place
    of a GGUF's own. Only a yarn's options also raise its limit. Windowed layers do not follow
    them."""
    last = {key.rpartition(".")[2] for key in keys}
    if rope.scaling == "yarn" and last <= _YARN and not architecture(name).every:
        return f"--rope-scaling yarn --rope-scale {rope.factor:.9g} --yarn-orig-ctx {rope.original}"
    types = {int: "int", float: "float", str: "str"}
    return "--override-kv " + ",".join(f"{k}={types[type(v)]}:{v}" for k, v in keys.items())


def is_given_scaling(name: str) -> bool:
    """Return whether Ollama scales some GGUF files of this architecture if no key names a scaling,
    so that a key must."""
    return name in _table()["ollama"]


def older_names(name: str) -> Mapping[str, str]:
    """Return llama.cpp's keys by their names in Ollama's converter. The engine Ollama alone reads
    these names."""
    older: Mapping[str, str] = _table()["older"].get(name, {})
    return older


def given_by_ollama(name: str, names: Collection[str], context: int) -> dict[str, Any]:
    """Return the rope keys that Ollama adds to a GGUF of its own; `names` are all its keys and
    tensors."""
    rule: dict[str, Any] = _table()["ollama"].get(name, {})
    if not rule:
        return {}
    marks = tuple(rule.get("marks", ()))
    lacks = rule.get("lacks")
    if marks and lacks in names and not any(one.startswith(marks) for one in names):
        return {}
    given = dict(rule["keys"])
    if context >= rule["from"]:
        given |= rule["long"]
    return given


def _kind_of_gguf(rope: GgufRope | None) -> str:
    """Return the way in which a GGUF carries its spectrum, as the loader table names it. A yarn of
    Gemma 4 has divisors too."""
    if rope is None or (rope.scaling == "none" and not rope.divisors):
        return "theta"
    if rope.scaling in ("linear", "yarn"):
        return rope.scaling
    if rope.short:
        return "factors"
    return "freqs"


def environment(params: Params, target: int) -> str:
    """Return the way to run a GGUF without an extension: raise only the length, and set the scaling
    in the environment of a program that starts llama-server. Return "" if its flags do not express
    it exactly."""
    names = _table()["environment"].get(params.get("rope_type"), {})
    line = "export LLAMA_ARG_{}={}"
    anew = "restarted"
    if sys.platform == "win32":
        line = "setx LLAMA_ARG_{} {}"
        anew = "in a new terminal"
    assignments = [line.format(name, params[key]) for name, key in names.items() if params.get(key)]
    if not assignments or params.get("attention_factor") or params.get("mscale"):
        return ""
    why = f"(or raise the length alone, and scale every file by Ollama's environment, {anew}:)"
    make = f"ropext extend MODEL.gguf --length-only --target {target} -o OUT.gguf"
    return "\n".join(["", why, make, *assignments])


def readings(name: str, rope: GgufRope | None, text_type: str) -> tuple[LoaderReading, ...]:
    """Return how llama.cpp, and the programs that were read, handle a GGUF with these keys, by the
    table of GGUF readers."""
    kind = _kind_of_gguf(rope)
    if rope is not None and rope.attn_factor != 1:
        kind += "-attn"
    listed = list[LoaderReading]()
    for reader in programs("gguf_readers"):
        listed.append(reading_in(reader, reader.known(text_type, name), {}, (kind,)))
    return tuple(listed)
