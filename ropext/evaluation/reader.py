"""The one measurement: variants read what their stores have not, shared out over processes,
resumable and interruptible between any two units; what the stores have then is gathered."""

import copy
import gc
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ropext.checkpoint import Snapshot
from ropext.errors import InputError, Interrupted, NothingKept
from ropext.evaluation.costs import manner_of
from ropext.evaluation.divergence import OPTION, Against
from ropext.evaluation.forward import Manner, NanInLogits, TokenScorer
from ropext.evaluation.live import held_by
from ropext.evaluation.reads import Reads, Unit
from ropext.evaluation.variants import Computing, Variant, adapter_digest, applied
from ropext.models.adapter import add_adapter
from ropext.models.load import memory_errors, out_of_memory
from ropext.models.processes import wait_for_everyone
from ropext.narration import SILENT, Hooks
from ropext.options.evaluate import DocumentOptions
from ropext.results import BASE
from ropext.results.measurement import Measurement, Store


@dataclass
class Progress:
    """How far a measurement has come, over all models that it reads."""

    total: int = 0  # forward tokens of this process
    hooks: Hooks = SILENT
    kept_in: Path | None = None
    nothing_kept: str = "interrupted; a measurement keeps nothing"
    rank: int = 0  # of the processes that share the units
    world: int = 1
    used: Callable[[str, float], None] = lambda what, seconds: None  # told of the first unit
    # Surrounds each unit, by what it is.
    guard: Callable[[str], AbstractContextManager[None]] = lambda what: nullcontext()
    done: int = 0  # forward tokens
    finished: int = 0  # units
    resumed: int = 0  # units that an earlier run had finished
    begun: float = field(default_factory=time.time)
    last: float = 0.0  # when the last unit began

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
            self.used(f"the first pass ({unit.what})", time.monotonic() - self.last)
        self.done += unit.tokens
        self.show(unit.what)

    def stopped(self) -> Interrupted:
        """Return the error of an interrupt, with what was kept."""
        count = self.finished + self.resumed
        if self.kept_in is None or not count:
            return NothingKept(self.nothing_kept)
        return Interrupted(
            f"interrupted; {count} finished pieces are kept in {self.kept_in}; run the same "
            "command again to resume"
        )


class Models:
    """The model in memory: loaded when a variant asks for it, and again for other weights or
    another adapter. `adapters` are the digests that adapters must have."""

    def __init__(
        self, load: Callable[[Snapshot], Any], adapters: Mapping[str, str] | None = None
    ) -> None:
        self.load = load
        self.adapters = adapters or {}
        self.model = None
        self.directory: Path | None = None
        self.adapter: str | None = None

    @contextmanager
    def computing(self, variant: Variant) -> Iterator[Any]:
        """While this lasts, the model computes as the variant says."""
        held = held_by(variant.snapshot)
        if held is not None:
            with applied(held.copied(), variant) as model:
                yield model
            return
        directory = variant.snapshot.directory
        adapter = variant.adapter
        if self.directory != directory or (adapter and self.adapter not in (None, adapter)):
            self.model = None
            gc.collect()  # two of them may not fit
            self.model = self.load(variant.snapshot)
            self.directory = directory
            self.adapter = None
        if adapter and self.adapter is None:
            self.model = add_adapter(self.model, adapter)
            if self.adapters.get(adapter) not in (None, adapter_digest(adapter)):
                raise InputError(f"{adapter} (--adapter) was changed while it was evaluated")
            self.adapter = adapter
        with applied(self.model, variant) as model:
            yield model


class Reader:
    """Reads by models that compute as variants say, all in one manner."""

    def __init__(self, computing: Computing, options: DocumentOptions | None = None) -> None:
        self.computing, self.options = computing, options or DocumentOptions()
        self.manner: Manner | None = None
        self.against: Against | None = None

    def scorer(self, model: Any, reads: Reads) -> TokenScorer:
        """Prove that a model can be read in slices, and in which way."""
        import torch

        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        longest = reads.frame.longest
        options = reads.prediction.options(self.options, longest)
        self.manner = self.manner or manner_of(base, longest, options)
        scorer = TokenScorer(model, self.manner)
        # Not inference_mode: buffers made in it could not be trained through afterwards.
        with memory_errors(out_of_memory("a probe of the model")), torch.no_grad():
            scorer.self_check()
        return scorer

    def measure(
        self,
        variants: Iterable[Variant],
        reads: Reads,
        stores: Mapping[str, Store],
        progress: Progress,
    ) -> Measurement:
        """Read what the stores, by label, have not; of several processes the first one gathers what
        they have then. No model is asked for where nothing is left to read."""
        variants = tuple(variants)
        progress.total += sum(map(reads.tokens, variants)) // progress.world
        places = [variant.snapshot.directory for variant in variants]

        def by_weights(variant: Variant) -> tuple[int, bool]:
            # Adapters last: they change the model object.
            return places.index(variant.snapshot.directory), variant.adapter is not None

        self.against = None
        if reads.against is not None:
            self.against = self._base(variants, reads, stores)
        for variant in sorted(variants, key=by_weights):
            store = stores[variant.label]
            units = list(reads.units(variant))
            if not all(unit.is_in(store) for unit in units):
                self._read(variant, reads, units, store, progress)
            else:
                for unit in units:
                    progress.skip(unit, store)
            if self.against is not None and variant.kind == BASE and progress.world > 1:
                wait_for_everyone()  # its states are there now
        if progress.world > 1:
            wait_for_everyone()
        return reads.measured(variants if progress.rank == 0 else (), stores)

    def _base(
        self, variants: Sequence[Variant], reads: Reads, stores: Mapping[str, Store]
    ) -> Against:
        """The base's states and head. The head is that of the model which is read, where the base
        has the same weights; else it is loaded once, and kept."""
        base = next(variant for variant in variants if variant.kind == BASE)
        kept: Any = None
        if any(self._needs_head(variant, base, reads, stores) for variant in variants):
            with self.computing(base) as model:
                kept = copy.deepcopy(self.scorer(model, reads).head_of_tiles(OPTION))

        def head(scorer: TokenScorer) -> Any:
            return scorer.head_of_tiles(OPTION) if kept is None else kept

        return Against(stores[base.label], head)

    def _needs_head(
        self, variant: Variant, base: Variant, reads: Reads, stores: Mapping[str, Store]
    ) -> bool:
        """Whether a model that is still to be read has another head than the base."""
        same = variant.snapshot.directory == base.snapshot.directory and variant.adapter is None
        if same or variant.reads_short:
            return False
        store = stores[variant.label]
        return not all(unit.is_in(store) for unit in reads.units(variant))

    def _read(
        self, variant: Variant, reads: Reads, units: list[Unit], store: Store, progress: Progress
    ) -> None:
        """Read one variant; no name here holds its model while the next one is loaded."""
        say = progress.hooks.say
        passes = len(variant.passes(reads.frame))
        with self.computing(variant) as model:
            scorer = self.scorer(model, reads)
            if not scorer.manner.split:
                say(f"{variant.label}: its body and head cannot run apart; it is read in chunks")
            if passes > 1 and reads.documents and reads.frame.scoring.scores_all:
                say(
                    f"{variant.label}: its spectrum changes with the length; it is read in "
                    f"{passes} passes, one for each spectrum"
                )
            read_units(scorer, units, store, progress, self.against)


def read_units(
    scorer: TokenScorer,
    units: Iterable[Unit],
    store: Store,
    progress: Progress,
    against: Against | None = None,
) -> None:
    """Do this process's share of the units that the store has not."""
    import torch

    for number, unit in enumerate(units):
        if unit.is_in(store):
            progress.skip(unit, store)
        elif number % progress.world == progress.rank:
            progress.begin(unit)
            with progress.guard(unit.what), torch.no_grad():
                try:
                    for name, content in unit.compute(scorer, against).items():
                        store.put(name, content)
                except NanInLogits as error:
                    hint = "float16 overflows in some models: try --dtype float32"
                    raise NanInLogits(f"{unit.what}: {error} ({hint})") from error
            progress.finish(unit)
