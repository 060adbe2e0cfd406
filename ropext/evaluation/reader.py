"""A loaded model reads what a store has not: shared out over processes, resumable, interruptible
between any two units."""

import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ropext.errors import Interrupted, NothingKept
from ropext.evaluation.costs import manner_of
from ropext.evaluation.forward import Manner, NanInLogits, TokenScorer
from ropext.evaluation.reads import Reads, Unit
from ropext.evaluation.variants import Variant, applied
from ropext.narration import SILENT, Hooks
from ropext.options.evaluate import DocumentOptions
from ropext.results.perplexity import Reading
from ropext.results.stores import Store


@dataclass
class Progress:
    """How far a measurement has come, over all models that it reads."""

    total: int  # forward tokens of all processes
    hooks: Hooks = SILENT
    kept_in: Path | None = None
    nothing_kept: str = "interrupted; a measurement keeps nothing"
    rank: int = 0  # of the processes that share the units
    world: int = 1
    used: Callable[[str, float], None] = lambda what, seconds: None  # told of the first unit
    done: int = 0  # forward tokens
    finished: int = 0  # units
    resumed: int = 0  # units that an earlier run had finished
    begun: float = field(default_factory=time.time)
    last: float = 0.0  # when the last unit began

    def __post_init__(self) -> None:
        self.total //= self.world

    def show(self, what: str) -> None:
        self.total = max(self.total, self.done)
        self.hooks.show(self.done, self.total, what)

    def skip(self, unit: Unit, store: Store) -> None:
        """Count a unit that is there. What another process finishes meanwhile was not found."""
        self.resumed += store.is_older(unit.name, self.begun)
        self.total -= unit.tokens // self.world

    def begin(self, unit: Unit) -> None:
        if self.hooks.stop():
            raise self.stopped()
        if not self.done:  # the clock of the time left begins
            self.show(unit.what)
        self.last = time.monotonic()

    def finish(self, unit: Unit) -> None:
        self.finished += 1
        if self.finished == 1 and self.rank == 0:
            self.used(f"the first unit ({unit.what})", time.monotonic() - self.last)
        self.done += unit.tokens
        self.show(unit.what)

    def stopped(self) -> Interrupted:
        """Return the error of an interrupt, with what was kept."""
        count = self.finished + self.resumed
        if self.kept_in is None or not count:
            return NothingKept(self.nothing_kept)
        return Interrupted(
            f"interrupted; {count} finished pieces are kept in {self.kept_in}: run the same "
            "command again to go on from there"
        )


class Reader:
    """Reads with a model as it computes at the time; slices are proved once, when it is made."""

    def __init__(
        self,
        model: Any,
        longest: int,
        options: DocumentOptions | None = None,
        manner: Manner | None = None,
    ) -> None:
        import torch

        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        self.manner = manner or manner_of(base, longest, options or DocumentOptions())
        self.scorer = TokenScorer(model, self.manner)
        # Not inference_mode: buffers made in it could not be trained through afterwards.
        with torch.no_grad():
            self.is_split = self.scorer.self_check().split

    def read(
        self,
        units: Iterable[Unit],
        store: Store,
        progress: Progress,
        guard: Callable[[str], AbstractContextManager[None]] = lambda what: nullcontext(),
    ) -> None:
        """Do this process's share of the units that the store has not. `guard` surrounds each, by
        what it is."""
        import torch

        for number, unit in enumerate(units):
            if store.has(unit.name):
                progress.skip(unit, store)
            elif number % progress.world == progress.rank:
                progress.begin(unit)
                with guard(unit.what), torch.no_grad():
                    try:
                        store.put(unit.name, unit.compute(self.scorer))
                    except NanInLogits as error:
                        raise NanInLogits(f"{unit.what}: {error}") from error
                progress.finish(unit)

    def reading(self, variant: Variant, reads: Reads, store: Store, progress: Progress) -> Reading:
        """Read the documents; meanwhile the model computes as the variant says."""
        with applied(self.scorer.model, variant):
            self.read(reads.units(variant), store, progress)
        return reads.reading(variant, store)
