"""Let a spectrum learn: the numbers that may move, and the rotary modules of a model that compute
with them.

The numbers that move are offsets from a start, all zero at first, in float64. The rotary module's
own arithmetic turns them into cos and sin, without the `no_grad` that transformers puts around it.
So gradients arrive, and the result is the same as transformers computes from the same numbers.
"""

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from ropext.base.errors import InputError, Stopped, UnsupportedModel, UsageError
from ropext.base.jsontext import Json
from ropext.models.head import probe_token_ids
from ropext.scaling.forms import LARGEST_THETA, yarn_bounds
from ropext.scaling.rope import RopeSite, divisors
from ropext.training.loss import head_loss, next_token_labels
from ropext.training.rows import IGNORED

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# A pair may end this much faster than the model was trained with: wavelengths of 0.9 and more.
SHORTEST = 0.9
# How far a unit of each offset moves its number. The optimiser moves every offset by about the
# learning rate; as a relative change, that suits a wavelength.
ATTENTION_UNIT = 0.25  # in the logarithm of the attention factor
# pairs, for the ramp's beginning; the logarithm of its width moves by a quarter of this
RAMP_UNIT = 4.0
THETA_UNIT = 4.0  # in the logarithm of theta

Moved = tuple[torch.Tensor, torch.Tensor]


class LearnedSpectrum(nn.Module):
    """The numbers of a spectrum that a fit may move. `forward` returns pair factors and
    attention factor, both float64 and relative to the spectrum that is extended."""

    method: str  # by which the result is planned and written

    def __init__(self, site: RopeSite, ceiling: float) -> None:
        """Begin a learned spectrum at the planned start, with a ceiling on its pair factors."""
        super().__init__()
        self.rope = site.rope
        self.start_factors = divisors(site.rope.spectrum.inv_freq, site.wanted.inv_freq)
        # Limits every pair factor. Frozen dynamic NTK slows the last pair by more than --ceiling's
        # 4 times a large factor, and a start must be inside of its own guards.
        self.ceiling = max(ceiling, *self.start_factors)

    def forward(self) -> Moved:
        """Return the pair factors and the attention factor as the fit has moved them."""
        raise NotImplementedError

    def knobs(self) -> dict[str, Json]:
        """Return the fields of a recipe that plan the spectrum learned by the fit so far."""
        raise NotImplementedError

    def values(self) -> tuple[tuple[float, ...], float]:
        """Return the present pair factors and attention factor of a learned spectrum as plain
        numbers."""
        with torch.no_grad():
            factors, attention = self()
        return tuple(factors.cpu().tolist()), float(attention)

    def outside(self) -> str | None:
        """Return a sentence about the first limit of a fit that the numbers break; None if they
        break none. All numbers must be finite, and the factor of each pair from SHORTEST to the
        ceiling."""
        factors, attention = self.values()
        if not all(map(math.isfinite, (*factors, attention))):
            return "a number of the spectrum is not finite"
        # 1e-9: a start at the bound itself must not fall to rounding.
        for pair, factor in enumerate(factors):
            if factor < SHORTEST * (1 - 1e-9):
                return f"pair {pair} became faster than the model was trained with ({factor:.3f})"
            if factor > self.ceiling * (1 + 1e-9):
                return f"pair {pair} was slowed {factor:.3g} times, beyond {self.ceiling:g}"
        return None


def _trainable_zeros(*shape: int) -> nn.Parameter:
    """Return trainable offsets from the start of a fit, all zero."""
    return nn.Parameter(torch.zeros(shape, dtype=torch.float64))


class LearnedPairFactors(LearnedSpectrum):
    """The factor of every pair and the attention factor; a fit writes them as a longrope."""

    method = "longrope"
    start: torch.Tensor

    def __init__(self, site: RopeSite, ceiling: float) -> None:
        """Begin the learned pair factors and attention factor at the planned start of a fit."""
        super().__init__(site, ceiling)
        attention = site.wanted.attention_factor / site.rope.spectrum.attention_factor
        self.register_buffer(
            "start", torch.tensor(self.start_factors, dtype=torch.float64).log(), False
        )
        self.start_attention = math.log(attention)
        self.offsets = _trainable_zeros(len(self.start_factors))
        self.attention = _trainable_zeros()

    def forward(self) -> Moved:
        """Return the learned pair factors, held inside the limits of a fit, and the attention
        factor."""
        held = self.offsets.clamp(
            math.log(SHORTEST) - self.start, math.log(self.ceiling) - self.start
        )
        # Held at a guard, and still moved by the gradient: a pair can come back.
        offsets = self.offsets + (held - self.offsets).detach()
        attention = self.start_attention + ATTENTION_UNIT * self.attention
        return (self.start + offsets).exp(), attention.exp()

    def knobs(self) -> dict[str, Json]:
        """Return the pair factors and the attention factor learned by the fit, as fields of a
        recipe."""
        factors, attention = self.values()
        return {"pair_factors": factors, "attention_factor": attention}


class LearnedYarnRamp(LearnedSpectrum):
    """YaRN's two ramp ends and the attention factor; a fit writes them as a yarn with its own
    betas.

    The ramp is linear in the pair index from `low` to `high`, not rounded to whole pairs, as
    `truncate: false` reads it. The start is the default YaRN, whose ends are whole.
    """

    method = "yarn"

    def __init__(self, site: RopeSite, target: int, ceiling: float) -> None:
        """Begin both ends of the learned YaRN ramp, and the attention factor, at the planned start
        of a fit."""
        super().__init__(site, ceiling)
        rope = site.rope
        params = site.params
        self.s = target / rope.context
        self.low, high = yarn_bounds(
            rope.dim,
            rope.theta,
            rope.context,
            params.get("beta_fast") or 32.0,
            params.get("beta_slow") or 1.0,
            params.get("truncate") is not False,
        )
        self.width = max(high - self.low, 1.0)
        self.start_attention = math.log(site.wanted.attention_factor)
        self.ends = _trainable_zeros(2)  # the beginning, and the logarithm of the width
        self.attention = _trainable_zeros()

    def _ends(self) -> Moved:
        """Return both ends of the fit's YaRN ramp, as indices of pairs."""
        low = self.low + RAMP_UNIT * self.ends[0]
        return low, low + self.width * self.ends[1].exp()

    def forward(self) -> Moved:
        """Return the pair factors of the fit's YaRN ramp, and the attention factor."""
        low, high = self._ends()
        # Stock clamps both ends to 0 .. dim - 1.
        low = low.clamp(min=0.0)
        high = high.clamp(max=self.rope.dim - 1.0)
        pairs = torch.arange(self.rope.dim // 2, dtype=torch.float64, device=self.ends.device)
        ramp = ((pairs - low) / (high - low)).clamp(0.0, 1.0)
        attention = self.start_attention + ATTENTION_UNIT * self.attention
        return 1 / (ramp / self.s + 1 - ramp), attention.exp()

    def outside(self) -> str | None:
        """Return a sentence about the first limit of a fit that the learned YaRN ramp breaks, or
        None."""
        with torch.no_grad():
            low, high = self._ends()
        if not max(float(low), 0.0) < min(float(high), self.rope.dim - 1):
            return "the ramp's two ends crossed"
        return super().outside()

    def knobs(self) -> dict[str, Json]:
        """Return the betas and the attention factor learned by the fit, as fields of a recipe."""
        with torch.no_grad():
            low, high = (float(end) for end in self._ends())

        def beta(index: float) -> float:
            """Return the beta of a ramp's end: the turns, inside the context, of the pair at an
            index. This is the inverse of yarn_bounds."""
            wavelength: float = 2 * math.pi * self.rope.theta ** (2 * index / self.rope.dim)
            return self.rope.context / wavelength

        return {
            "beta_fast": beta(low),
            "beta_slow": beta(high),
            "truncate": False,
            "attention_factor": self.values()[1],
        }


class LearnedTheta(LearnedSpectrum):
    """Theta alone, upwards from the model's own; a fit writes it as another theta."""

    method = "abf"

    def __init__(self, site: RopeSite, ceiling: float) -> None:
        """Begin the learned theta at the planned start of a fit."""
        super().__init__(site, ceiling)
        self.start = math.log(float(site.params["rope_theta"]) / site.rope.theta)
        self.offset = _trainable_zeros()

    def _shift(self) -> torch.Tensor:
        """Return the logarithm of the fit's theta over the model's own theta."""
        return self.start + THETA_UNIT * self.offset

    def forward(self) -> Moved:
        """Return the pair factors of the fit's theta, and an attention factor of 1."""
        dim = self.rope.dim
        index = torch.arange(0, dim, 2, dtype=torch.float64, device=self.offset.device)
        shift = self._shift()
        return (shift * index / dim).exp(), torch.ones_like(shift)

    def outside(self) -> str | None:
        """Return a sentence about the first limit of a fit that the theta breaks, or None."""
        shift = float(self._shift().detach())
        if shift < 0:
            return "theta fell below the model's own"
        if self.rope.theta * math.exp(min(shift, 700.0)) >= LARGEST_THETA:
            return f"theta reached {LARGEST_THETA:g}, beyond which no config is read"
        return super().outside()

    def knobs(self) -> dict[str, Json]:
        """Return the theta learned by the fit, as the field of a recipe."""
        return {"theta": self.rope.theta * math.exp(float(self._shift().detach()))}


def learned_spectrum(within: str, site: RopeSite, target: int, ceiling: float) -> LearnedSpectrum:
    """Return the learned spectrum of the form `within` (--within), which a fit moves from a
    planned start."""
    wanted = {"yarn": "yarn", "ntk": "default"}.get(within)
    if wanted is not None and site.params["rope_type"] != wanted:
        raise UsageError(
            f"--within {within} needs a start that is written as one {wanted} rope dict, and this "
            f"one is written as {site.params['rope_type']}; a model that is scaled already needs "
            "--within longrope or --from-original"
        )
    if within == "yarn":
        return LearnedYarnRamp(site, target, ceiling)
    return LearnedTheta(site, ceiling) if within == "ntk" else LearnedPairFactors(site, ceiling)


class _FittedRotary:
    """A replacement for a rotary module's forward during a fit: the module's own arithmetic, on
    moving numbers."""

    def __init__(self, module: nn.Module, site: RopeSite, learned: LearnedSpectrum) -> None:
        """Keep a rotary module's own forward, and the learned spectrum that replaces its
        frequencies during a fit."""
        self.module = module
        self.learned = learned
        self.label = site.label
        self.own = module.forward
        self.arithmetic = inspect.unwrap(type(module).forward)
        now = site.rope.spectrum
        self.inv_freq = torch.tensor(now.inv_freq, dtype=torch.float64)
        self.attention_factor = now.attention_factor
        # Up to this length a longrope of two sets reads the other one, which does not move.
        self.beyond = now.short_context

    def __call__(
        self, x: torch.Tensor, position_ids: torch.Tensor, *args: object, **kwargs: object
    ) -> Moved:
        """Return cos and sin of the learned spectrum, with gradients.

        Return the module's own for another layer type, and for positions that a longrope of two
        sets reads by the short one.
        """
        layer_type = kwargs.get("layer_type", args[0] if args else None)
        other = layer_type is not None and self.label and layer_type != self.label
        if other or (self.beyond and int(position_ids.max()) < self.beyond):
            stock: Moved = self.own(x, position_ids, *args, **kwargs)
            return stock
        factors, attention = self.learned()
        inv_freq = (self.inv_freq.to(factors.device) / factors).float()
        prefix = f"{self.label}_" if self.label else ""
        frequency = f"{prefix}inv_freq"
        scaling = f"{prefix}attention_scaling"
        buffers = self.module._buffers
        before = getattr(self.module, scaling)
        held = buffers[frequency]
        buffers[frequency] = inv_freq.to(x.device)
        setattr(self.module, scaling, (self.attention_factor * attention).float().to(x.device))
        try:
            moved: Moved = self.arithmetic(self.module, x, position_ids, *args, **kwargs)
            return moved
        finally:
            buffers[frequency] = held
            setattr(self.module, scaling, before)


def _holds_planned_frequencies(module: nn.Module, site: RopeSite) -> bool:
    """Return whether a module of the model to fit is rotary, with the frequencies of a planned
    site."""
    prefix = f"{site.label}_" if site.label else ""
    buffer = module._buffers.get(f"{prefix}inv_freq")
    if not site.scaled or buffer is None or not hasattr(module, f"{prefix}attention_scaling"):
        return False
    sets = (site.wanted.inv_freq, site.wanted.short_inv_freq)
    return any(
        inv_freq is not None
        and buffer.numel() == len(inv_freq)
        and np.allclose(buffer.double().cpu().numpy(), inv_freq, rtol=1e-4)
        for inv_freq in sets
    )


def pairs_at_limit(factors: Sequence[float], ceiling: float) -> tuple[int, ...]:
    """Return the pairs that a guard of the fit holds back."""
    return tuple(
        pair
        for pair, factor in enumerate(factors)
        if math.isclose(factor, SHORTEST, rel_tol=1e-6)
        or math.isclose(factor, ceiling, rel_tol=1e-6)
    )


def remove_learned_spectrum(model: nn.Module) -> None:
    """Restore the own forwards of the rotary modules after a fit."""
    for module in model.modules():
        if isinstance(module.__dict__.get("forward"), _FittedRotary):
            del module.forward


def install_learned_spectrum(
    model: "PreTrainedModel", sites: Sequence[RopeSite], target: int, learned: LearnedSpectrum
) -> None:
    """Install in the rotary modules the spectrum that a fit trains. Check on the model itself
    that it computes the same as before, and that a gradient arrives."""
    with torch.no_grad():
        before = _probe_logits(model, target)
    kind = model.config.model_type
    # A module is rotary if it holds the plan's numbers, before anything has moved.
    matches = [
        (m, site) for m in model.modules() for site in sites if _holds_planned_frequencies(m, site)
    ]
    for module, site in matches:
        module.forward = _FittedRotary(module, site, learned)
    if not matches:
        raise UnsupportedModel(
            f"{kind}: no rotary module holds the planned frequencies, so they cannot be "
            "fitted; extend it by a method (ropext extend)"
        )
    learned.to(before.device)
    after = _probe_logits(model, target)
    difference = float((after.detach() - before).abs().max())
    bound = 1e-3 if model.get_input_embeddings().weight.dtype == torch.float32 else 5e-2
    if not difference <= bound * max(1.0, float(before.abs().max())):
        raise UnsupportedModel(
            f"{kind}: its rotary modules compute something else from the same frequencies "
            f"(logits differ by {difference:.2g}), so that they cannot be fitted"
        )
    wanted = [parameter for parameter in learned.parameters() if parameter.requires_grad]
    gradients: Sequence[torch.Tensor | None] = ()
    if after.requires_grad:
        gradients = torch.autograd.grad(after.float().square().mean(), wanted, allow_unused=True)
    if not any(gradient is not None and bool(gradient.abs().sum() > 0) for gradient in gradients):
        packed = getattr(model, "hf_quantizer", None)
        named = f"{kind}, {type(packed).__name__}" if packed is not None else kind
        raise InputError(
            f"no gradient reaches the frequencies of this model ({named}); fit "
            "the unquantised model, or take a closed form with ropext extend"
        )


def _probe_logits(model: "PreTrainedModel", target: int) -> torch.Tensor:
    """Return the logits of random tokens at the far end of the target, by the spectrum that the
    model to fit has now."""
    ids = probe_token_ids(model)
    positions = torch.arange(target - ids.shape[1], target, device=ids.device)[None]
    inputs = {"attention_mask": torch.ones_like(ids), "position_ids": positions}
    logits: torch.Tensor = model(input_ids=ids, use_cache=False, **inputs).logits
    return logits


class LeftGuards(Stopped):
    """Raised if the spectrum moves outside of its guards."""


class SpectrumLearner(nn.Module):
    """The module that Trainer trains in a fit. Its state is the spectrum's alone, so that a
    checkpoint holds a few numbers.

    Windows weigh the same, however many of their tokens are scored; questions weigh less
    (TrainingRow.weight). A mean over a row's far half hides the losses at its end. So the tokens
    from `tail` on weigh as much as all scored tokens of a row; no row shorter than the target has
    such tokens.
    """

    accepts_loss_kwargs = False  # Trainer then divides the mean by the accumulation steps

    def __init__(
        self, model: "PreTrainedModel", learned: LearnedSpectrum, *, sliced: bool, tail: int
    ) -> None:
        """Hold the frozen model and the learned spectrum, for the loss of a fit."""
        super().__init__()
        self.model = model
        self.learned = learned
        self.sliced = sliced
        self.tail = tail

    def forward(
        self,
        input_ids: torch.Tensor,
        labels: torch.Tensor,
        row_weights: torch.Tensor | None = None,
        **inputs: torch.Tensor,
    ) -> dict[str, torch.Tensor]:
        """Return the loss of a training batch of a fit; raise LeftGuards if the spectrum is outside
        of its guards."""
        reason = self.learned.outside()
        if reason is not None:
            raise LeftGuards(reason)
        model = self.model.base_model if self.sliced else self.model
        read = model(input_ids=input_ids, use_cache=False, **inputs)
        each = read.last_hidden_state if self.sliced else read.logits
        rows = torch.stack(
            [
                self._row_loss(row, wanted)
                for row, wanted in zip(each, next_token_labels(labels), strict=True)
            ]
        )
        return {"loss": (rows if row_weights is None else rows * row_weights).mean()}

    def _row_loss(self, row: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of a training row of a fit and of its tail, in equal parts; 0 if
        nothing is scored. Only scored tokens go through the head: half of a window, a few tokens
        of an item."""
        scored = (wanted != IGNORED).nonzero()[:, 0]
        tail = scored[scored >= self.tail - 1]  # the label at a position is the next token
        parts = [scored, tail] if len(tail) else [scored]
        means = []
        for at in parts:
            if self.sliced:
                loss = head_loss(self.model, row[at], wanted[at])
            else:
                loss = functional.cross_entropy(row[at].float(), wanted[at], reduction="sum")
            means.append(loss / max(1, len(at)))
        return torch.stack(means).mean()

    def state_dict(  # type: ignore[override]
        self, *args: object, **kwargs: object
    ) -> dict[str, torch.Tensor]:
        """Return the state of the spectrum alone, which Trainer's checkpoints keep."""
        return self.learned.state_dict()

    def load_state_dict(
        self, state_dict: Mapping[str, torch.Tensor], strict: bool = True, assign: bool = False
    ) -> object:
        """Load the state of the spectrum from Trainer's checkpoint."""
        return self.learned.load_state_dict(dict(state_dict))

    def get_input_embeddings(self) -> nn.Module:
        """Return the fitted model's input embeddings, which Trainer asks for."""
        return self.model.get_input_embeddings()

    def activation_checkpointing_enable(self, **options: Json) -> None:
        """Let the fitted model's layers run again in the backward pass."""
        self.model.activation_checkpointing_enable(**options)

    def gradient_checkpointing_enable(self, **options: Json) -> None:
        """Let the fitted model's layers run again in the backward pass, under transformers'
        older name."""
        self.model.gradient_checkpointing_enable(**options)
