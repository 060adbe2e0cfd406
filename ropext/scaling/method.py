"""What a scaling method is: a pure function, its knobs, and how a stock config carries it."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from ropext.scaling.forms import Params
from ropext.scaling.rope import Rope


@dataclass(frozen=True)
class Scaling:
    """What a method asks for, relative to the embedding that it was given.

    `native` is the stock dict that says the same of an embedding that is not scaled yet; where the
    embedding is scaled already, the pair factors multiply and another form carries the product.
    """

    pair_factors: tuple[float, ...]
    attention_factor: float = 1.0
    native: Params | None = None
    short_pair_factors: tuple[float, ...] | None = None


@dataclass(frozen=True)
class NoKnobs:
    """A method that factor and target determine completely."""


@dataclass(frozen=True)
class Method:
    """One entry of the list of methods; everything a user sees about it comes from here."""

    name: str
    summary: str  # one line, for `ropext methods`
    paper: str
    carried: str  # one line: which stock form says it
    scale: Callable[[Rope, int, Any], Scaling]  # (embedding, target, knobs)
    knobs: type = NoKnobs
    needs: str = ""  # the option without which it says nothing
    competes: bool = True  # `plan --measure` and `--method auto` read it beside the others
    fits: tuple[str, ...] = ("longrope",)  # what moves in a fit (--within) that may begin at it
    colour: int | None = None  # its place in the palette of pictures [the next that is free]

    def knob_names(self) -> tuple[str, ...]:
        return tuple(f.name for f in fields(self.knobs))
