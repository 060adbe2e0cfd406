"""What a model has: the geometry and the spectrum of one rotary embedding, or another position
scheme. Pure float64, no files.

A pair of channels i in 0..dim/2-1 turns by the angle m * inv_freq[i] at position m; its wavelength
is 2*pi/inv_freq[i] tokens. Plain RoPE has inv_freq[i] = theta^(-2i/dim) (Su et al. 2021, eq. 15).

A learned table holds one row per position: position p reads row `offset + p` (OPT and RoBERTa keep
two rows in front of the first). Every other scheme is computed from a length or from the distance
of two tokens, and no weight holds it.
"""

import hashlib
import math
import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

Params = dict[str, Any]  # a rope dict in transformers-5 names


@dataclass(frozen=True)
class Spectrum:
    """Everything about a rotary embedding that scaling can change."""

    inv_freq: tuple[float, ...]
    attention_factor: float = 1.0  # multiplies cos and sin, so logits scale by its square
    softmax_factor: float = 1.0  # multiplies the softmax scale (DeepSeek's mscale_all_dim, squared)
    # A second set that stock longrope uses for inputs of at most short_context tokens.
    short_inv_freq: tuple[float, ...] | None = None
    short_context: int = 0

    @property
    def wavelengths(self) -> tuple[float, ...]:
        """Return the tokens per full turn of each rotary pair; infinite for a pair that does not
        turn."""
        return tuple(2 * math.pi / f if f else math.inf for f in self.inv_freq)

    def digest(self) -> str:
        """Return the SHA-256 of a spectrum's float64 values, by which two plans can be compared."""
        values = list(self.inv_freq)
        values += [self.attention_factor, self.softmax_factor]
        if self.short_inv_freq is not None:
            values += self.short_inv_freq
        values.append(float(self.short_context))
        return hashlib.sha256(struct.pack(f"<{len(values)}d", *values)).hexdigest()


def divided(inv_freq: Iterable[float], factors: Iterable[float]) -> tuple[float, ...]:
    """Return RoPE frequencies divided by one factor per rotary pair."""
    return tuple(f / p for f, p in zip(inv_freq, factors, strict=True))


def divisors(inv_freq: Iterable[float], wanted: Iterable[float]) -> tuple[float, ...]:
    """Return the pair factors that divide RoPE frequencies into the wanted ones. A pair that must
    not turn has infinity, and a pair that does not turn already has 1."""
    pairs = zip(inv_freq, wanted, strict=True)
    return tuple(now / new if new else (1.0 if not now else math.inf) for now, new in pairs)


def plain_inv_freq(dim: int, theta: float) -> tuple[float, ...]:
    """Return the plain RoPE frequency theta^(-2i/dim) of each rotary pair."""
    return tuple(theta ** (-2 * i / dim) for i in range(dim // 2))


@dataclass(frozen=True)
class Rope:
    """One rotary embedding as the model was trained with it.

    `context` is the number of tokens that the model reads now. `original_context` is that number
    before any scaling that its config already declares. That scaling divides the plain frequencies
    by `pair_factors`: empty means by nothing, and infinite means that the pair never turns, scaled
    or not. `short_pair_factors` is the second set of a longrope, for inputs within
    `original_context`.
    """

    dim: int
    theta: float
    context: int
    original_context: int = 0  # 0 = the same as context
    pair_factors: tuple[float, ...] = ()
    short_pair_factors: tuple[float, ...] = ()
    attention_factor: float = 1.0
    # DeepSeek's pair (0 = absent); families whose softmax reads it set softmax_mscale.
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    softmax_mscale: bool = False
    softmax_factor: float = 1.0
    # The dict of this embedding is inside a per-layer-type dict; stock ignores `truncate` there.
    nested: bool = False

    def __post_init__(self) -> None:
        """Raise ValueError for an impossible rotary dim, theta or number of pair factors; fill
        original_context."""
        if self.dim < 2 or self.dim % 2:
            raise ValueError(f"a rotary dim is even and at least 2, was {self.dim}")
        if not 0 < self.theta < math.inf:
            raise ValueError(f"theta is finite and above 0, was {self.theta}")
        for factors in (self.pair_factors, self.short_pair_factors):
            if factors and len(factors) != self.dim // 2:
                raise ValueError(f"{len(factors)} pair factors for {self.dim // 2} pairs")
        if not self.original_context:
            object.__setattr__(self, "original_context", self.context)

    @property
    def is_scaled(self) -> bool:
        """Return whether a config already changes the plain RoPE frequencies or their
        temperature."""
        return self.attention_factor != 1 or not self.is_geometric

    @property
    def is_geometric(self) -> bool:
        """Return whether every rotary pair that turns does so at theta^(-2i/dim)."""
        factors = self.pair_factors + self.short_pair_factors
        return all(p in (1, math.inf) for p in factors)

    @property
    def has_non_rotating_pairs(self) -> bool:
        """Return whether some rotary pairs do not turn: only the stock form `proportional` can
        express that."""
        return math.inf in self.pair_factors

    @cached_property
    def spectrum(self) -> Spectrum:
        """Return the spectrum of the rotary embedding today, with the scaling that its config
        declares."""
        plain = plain_inv_freq(self.dim, self.theta)
        short = self.short_pair_factors
        return Spectrum(
            divided(plain, self.pair_factors) if self.pair_factors else plain,
            self.attention_factor,
            self.softmax_factor,
            divided(plain, short) if short else None,
            self.original_context if short else 0,
        )

    def original(self) -> "Rope":
        """Return the same rotary embedding before the scaling that its config declares."""
        stopped = tuple(p if p == math.inf else 1.0 for p in self.pair_factors)
        return replace(
            self,
            context=self.original_context,
            pair_factors=stopped if self.has_non_rotating_pairs else (),
            short_pair_factors=(),
            attention_factor=1.0,
            softmax_factor=1.0,
        )


@dataclass(frozen=True)
class Site:
    """One rotary embedding at its place in a config: the spectrum that stock transformers must
    build there, and the rope dict that declares it.

    Plans, records and proofs all refer to sites.
    """

    label: str  # "" if there is only one, else its key inside the nested rope dict
    wanted: Spectrum
    params: Params
    scaled: bool = True  # whether an extension scales it (full attention) or leaves it alone


@dataclass(frozen=True)
class RopeSite(Site):
    """A site with the embedding that was read from a config, which an extension scales.

    Until something is planned, the wanted spectrum equals the embedding's.
    """

    rope: Rope = field(kw_only=True)
    layers: int | None = field(default=None, kw_only=True)  # how many use it, if known

    def of(self, rope: Rope) -> "RopeSite":
        """Return a site of another rope (dim, theta, context): the spectrum computed from it is the
        wanted one."""
        return replace(self, rope=rope, wanted=rope.spectrum)


class Absent:
    """The value of a key that is missing, in contrast to null."""

    def __repr__(self) -> str:
        """Return "absent": a key of a rope or table is missing before or after its scaling, in
        contrast to null."""
        return "absent"


ABSENT = Absent()
CONFIG = "config.json"


@dataclass(frozen=True)
class Edit:
    """One value before and after, in a config, a tokenizer or the metadata of a GGUF."""

    key: str  # dotted if it is nested
    before: Any = ABSENT  # ABSENT if the key is new
    after: Any = ABSENT  # ABSENT if the key is removed
    file: str = CONFIG

    @property
    def path(self) -> tuple[str, ...]:
        """Return the keys, from the outermost on, to a value that the scaling of a rope, the growth
        of a table or a longer context changes."""
        return tuple(self.key.split("."))

    def to_json(self) -> dict[str, Any]:
        """Return the value before and after the scaling of a rope, the growth of a table or a
        longer context, as a dict. The name of its file is left out.

        `before` is left out if the key is new, and `after` if the key is removed.
        """
        out: dict[str, Any] = {"key": self.key}
        if self.before is not ABSENT:
            out["before"] = self.before
        if self.after is not ABSENT:
            out["after"] = self.after
        return out

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> "Edit":
        """Return the value before and after the scaling of a rope, the growth of a table or a
        longer context, from an entry of a plan or a record."""
        before = entry.get("before", ABSENT)
        after = entry.get("after", ABSENT)
        return cls(str(entry["key"]), before, after, entry.get("file", CONFIG))


def turns(spectrum: Spectrum, context: int) -> tuple[float, ...]:
    """Return the full turns of each rotary pair inside `context` tokens (YaRN, eq. 17: r =
    L/lambda)."""
    return tuple(context * f / (2 * math.pi) for f in spectrum.inv_freq)


def phase_ratio(rope: Rope, wanted: Spectrum, target: int) -> tuple[float, ...]:
    """Return each rotary pair's phase needed at `target` over its phase seen in training; above 1
    the pair extrapolates.

    min(2*pi, (T-1)*f') / min(2*pi, (L-1)*f): a pair that has made a full turn has seen every phase.
    """
    full = 2 * math.pi
    ratios = []
    for now, new in zip(rope.spectrum.inv_freq, wanted.inv_freq, strict=True):
        seen = min(full, (rope.context - 1) * now)
        needed = min(full, (target - 1) * new)
        ratios.append(needed / seen if seen else (math.inf if needed else 1.0))
    return tuple(ratios)


@dataclass(frozen=True)
class Explanation:
    """The numbers that explain a method: how far it extrapolates, and how much it compresses."""

    pairs_extrapolated: int
    worst_extrapolation: float
    mean_compression: float  # geometric mean over the pairs that turn


def explain(rope: Rope, wanted: Spectrum, target: int) -> Explanation:
    """Return how many rotary pairs a wanted spectrum pushes beyond their trained phase, how far at
    most, and the mean compression."""
    # 1e-3: (T-1)/(L-1) against T/L makes a fully interpolated pair look extrapolated by 1/L.
    ratios = [r for r in phase_ratio(rope, wanted, target) if r > 1 + 1e-3 + 1 / rope.context]
    now = rope.spectrum.inv_freq
    pairs = zip(divisors(now, wanted.inv_freq), now, strict=True)
    logs = [math.log(factor) for factor, f in pairs if f and factor < math.inf]
    mean = math.exp(sum(logs) / len(logs)) if logs else 1.0
    return Explanation(len(ratios), max(ratios, default=1.0), mean)


SCHEMES = {
    "learned": "a learned table of absolute positions",
    "sinusoidal": "sinusoids added to the embeddings",
    "buckets": "T5's relative buckets",
    "disentangled": "DeBERTa's relative positions",
    "mixed": "absolute and relative positions",
    "alibi": "ALiBi, a slope per head",
    "transformer-xl": "Transformer-XL's relative positions",
}

# Towers of other modalities in a composite, whose tables count patches or frames.
NOT_TEXT = re.compile(r"vision|visual|image|audio|qformer")


@dataclass(frozen=True)
class Positions:
    """The position scheme of a model without rotary embeddings, as its config describes it."""

    model_type: str
    text_type: str
    path: tuple[str, ...]  # the keys that lead to the text part of the config
    kind: str  # of SCHEMES
    context: int  # tokens it reads, or tells apart, now; 0 = its config names no length
    key: str = ""  # the key that an extension raises, as the config spells it; none = no extension
    tensors: tuple[str, ...] = ()  # how the names of its tables end
    offset: int = 0  # the row that position 0 reads
    beyond: int = 0  # number of rows minus the value of the length key
    causal: bool = False  # whether the family predicts the next token
    buckets: int = 0  # into which relative distances fall

    @property
    def carried(self) -> bool:
        """Return whether a stock checkpoint can express that its position scheme was extended."""
        return bool(self.key) and self.kind != "alibi"

    @property
    def rows(self) -> int:
        """Return the number of rows of a learned position table that holds this context."""
        return self.offset + self.context

    def is_table(self, name: str) -> bool:
        """Return whether a tensor of this name is the scheme's position table, whose rows the
        methods of growing tables compute."""
        ends = "|".join(map(re.escape, self.tensors))
        other = self.path and NOT_TEXT.search(name)
        return bool(ends and re.search(rf"(^|\.)({ends})$", name)) and not other
