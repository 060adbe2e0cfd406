"""A scaling method: a pure function, its knobs, and the stock form in which a config carries it."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from ropext.scaling.forms import Params
from ropext.scaling.rope import Rope


@dataclass(frozen=True)
class Scaling:
    """The result of a method, relative to the embedding that the method was given.

    `native` is the stock dict that expresses the same for an embedding that is not scaled yet. If
    the embedding is scaled already, the pair factors multiply and another form carries the product.
    """

    pair_factors: tuple[float, ...]
    attention_factor: float = 1.0
    native: Params | None = None
    short_pair_factors: tuple[float, ...] | None = None


@dataclass(frozen=True)
class NoKnobs:
    """The knobs of a method that factor and target determine completely: none."""


@dataclass(frozen=True)
class Method:
    """One entry of the list of methods; everything a user sees about the method comes from here."""

    name: str
    summary: str  # one line, for `ropext methods`
    paper: str
    carried: str  # one line: the stock form that carries it
    scale: Callable[[Rope, int, Any], Scaling]  # (embedding, target, knobs)
    knobs: type = NoKnobs
    needs: str = ""  # the option that it requires
    competes: bool = True  # whether `plan --measure` and `--method auto` compare it with the others
    fits: tuple[str, ...] = ("longrope",)  # the kinds of fit (--within) that may begin at it
    colour: int | None = None  # its place in the palette of pictures [the next that is free]

    def knob_names(self) -> tuple[str, ...]:
        """Return the names of the knobs of a scaling method."""
        return tuple(f.name for f in fields(self.knobs))
