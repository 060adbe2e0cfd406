"""What carries a spectrum: the config of a directory, or the keys and tensors of a GGUF file.

Who plans, shows or checks an extension asks the carrier, and does not know which of the two it is.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Protocol

from ropext.carriers.config import (
    DIRECTORY,
    CacheRules,
    ConfigCarrier,
    PlannedExtension,
    Programs,
    StandingModel,
    Words,
)
from ropext.families import Model
from ropext.forms import Params
from ropext.jsontext import JsonObject
from ropext.loaders import LoaderReading, OverrideLine, Serving
from ropext.rope import Edit, RopeSite

__all__ = [
    "DIRECTORY",
    "CacheRules",
    "Carrier",
    "ConfigCarrier",
    "PlannedExtension",
    "Programs",
    "StandingModel",
    "Words",
    "carry",
]


class Carrier(Protocol):
    """A place where a spectrum is written, and the programs that read it there.

    A rope dict of stock transformers stands for what is written in either of them.
    """

    @property
    def model(self) -> Model:
        """The model whose spectrum it carries."""

    @property
    def architecture(self) -> str:
        """The GGUF architecture; "" of a config."""

    @property
    def words(self) -> Words:
        """What people read of it."""

    @property
    def in_transformers(self) -> bool:
        """Whether transformers loads the result."""

    @property
    def three_axes(self) -> bool:
        """Whether who reads the result turns images by three axes (mRoPE)."""

    @property
    def cache(self) -> CacheRules:
        """How the programs that run it lay out a KV cache."""

    @property
    def where(self) -> str:
        """What would have to carry a spectrum, in words."""

    def offers(self, site: RopeSite, native: Params | None, target: int) -> Iterator[Params]:
        """Yield each dict that says exactly what a site wants, the most widely read first. The
        site's own dict is the one that stands there now; `native` is the method's."""

    def are_exact(self, names: Sequence[str], site: RopeSite, *, even_so: bool = False) -> bool:
        """Whether these loaders read a site as it wants; one that was not measured does
        `even_so`."""

    def readings(self, site: RopeSite, target: int) -> tuple[LoaderReading, ...]:
        """Return who reads a site how."""

    def edits(
        self, site: RopeSite, target: int, before: JsonObject, after: JsonObject
    ) -> tuple[Edit, ...]:
        """Return what a planned site and length change; `before` and `after` are the configs."""

    def misread(self, name: str, params: Params) -> str:
        """Say what a loader makes of a dict where that is known to be something else, else ""."""

    def unmeasured(self, name: str, site: RopeSite) -> str:
        """Say what of a site is not known in a loader, and what is; "" where nothing is known."""

    def nearest(self, loader: str, params: Params, target: int) -> str:
        """Return the options whose result a loader reads exactly, "" where there are none."""

    def serving(self, extension: PlannedExtension, place: str) -> tuple[Serving, ...]:
        """Return how to run an extension in each program, once it lies at a place."""

    def overrides(self, extension: PlannedExtension) -> tuple[OverrideLine, ...]:
        """Return how to run the base itself so, in each program that is known to read it."""

    def usual(self, lines: Sequence[Serving]) -> list[Serving]:
        """Return those of the lines that most users need."""

    def as_it_stands(self, standing: StandingModel) -> Programs:
        """Return who reads a model as it stands how, and how to run it."""

    def of_loader(self, name: str, readings: Sequence[LoaderReading]) -> list[LoaderReading]:
        """Return those of the readings that a name of --for means."""


def carry(
    carrier: Carrier,
    site: RopeSite,
    native: Params | None,
    target: int,
    names: Sequence[str],
    even_so: bool,
) -> Params | None:
    """The first dict that says what a site wants, exactly, and that the loaders of these names read
    so; None where there is none."""
    for params in carrier.offers(site, native, target):
        if carrier.are_exact(names, replace(site, params=params), even_so=even_so):
            return params
    return None
