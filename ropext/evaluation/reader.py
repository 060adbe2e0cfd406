"""Run the measurement: let the variants read the units that their stores lack, and gather the
results.

Processes share the units. A run can be interrupted and resumed between any two units.
"""

import copy
import gc
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from ropext.base.errors import InputError, Interrupted, NothingKept
from ropext.base.narration import SILENT, Hooks
from ropext.evaluation.divergence import OPTION, Against
from ropext.evaluation.forward import (
    HEAD_BYTES,
    TILE_BYTES,
    TILE_COLUMNS,
    TILE_TOKENS,
    NanInLogits,
    ReadingMode,
    TokenScorer,
    slice_for,
)
from ropext.evaluation.variants import (
    Computing,
    Variant,
    applied,
    in_memory_model_of,
)
from ropext.evaluation.workload import Unit, Workload, read_unit
from ropext.files.checkpoint import Snapshot
from ropext.files.checkpoint.digests import adapter_digest
from ropext.models.adapter import add_adapter
from ropext.models.head import predicted_head_problem
from ropext.models.load import free_memory, memory_errors, out_of_memory
from ropext.models.processes import wait_for_everyone
from ropext.options.evaluate import DocumentOptions
from ropext.results import BASE
from ropext.results.measurement import Measurement, Store


@dataclass
class Progress:
    """The progress of a measurement, over all models that it reads."""

    total: int = 0  # forward tokens of this process
    hooks: Hooks = SILENT
    kept_in: Path | None = None
    nothing_kept: str = "interrupted; a measurement keeps nothing"
    rank: int = 0  # among the processes that share the units
    world: int = 1
    used: Callable[[str, float], None] = lambda what, seconds: None  # called after the first unit
    # A context for each unit, made from its text for messages.
    guard: Callable[[str], AbstractContextManager[None]] = lambda what: nullcontext()
    done: int = 0  # forward tokens
    finished: int = 0  # units
    resumed: int = 0  # units that an earlier run had finished
    begun: float = field(default_factory=time.time)
    last: float = 0.0  # when the last unit began

    def show(self, what: str) -> None:
        """Show how many of its forward tokens this process has read."""
        self.total = max(self.total, self.done)
        self.hooks.show(self.done, self.total, what)

    def skip(self, unit: Unit, store: Store) -> None:
        """Count a document or group of questions whose files exist in the store. If another process
        finishes it during this run, it does not count as resumed."""
        self.resumed += store.is_older(unit.name, self.begun)
        self.total -= unit.tokens // self.world

    def begin(self, unit: Unit) -> None:
        """Begin a document or a haystack of questions; raise an error if the user interrupted."""
        if self.hooks.stop():
            raise self.stopped()
        if not self.done:  # the estimate of the time left begins
            self.show(unit.what)
        self.last = time.monotonic()

    def finish(self, unit: Unit) -> None:
        """Count a document or a haystack of questions that the model has read."""
        self.finished += 1
        if self.finished == 1 and self.rank == 0:
            self.used(f"the first pass ({unit.what})", time.monotonic() - self.last)
        self.done += unit.tokens
        self.show(unit.what)

    def stopped(self) -> Interrupted:
        """Return the error of an interrupted measurement, with the number of documents and groups
        of questions that are kept."""
        count = self.finished + self.resumed
        if self.kept_in is None or not count:
            return NothingKept(self.nothing_kept)
        return Interrupted(
            f"interrupted; {count} finished pieces are kept in {self.kept_in}; run the same "
            "command again to resume"
        )


# Chunks shorter than this cost more time than they save memory.
SHORTEST_CHUNK = 1024
LONGEST_CHUNK = 16384
MIB = 1 << 20
# Share of the free memory that a pass may plan to take.
USABLE = 0.8


@dataclass(frozen=True)
class Shape:
    """The sizes of a model that decide its costs."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    feed_forward: int
    vocabulary: int
    dtype_bytes: int
    eager: bool = False
    plain_head: bool = True
    device: str = "cpu"  # its type
    window: int | None = None  # the attention window, if layers have one
    masks: bool = True  # masks if a window is narrower than a row; flash attention needs none

    def peak_bytes(self, num_tokens: int, manner: ReadingMode) -> int:
        """Return the memory that a measurement's forward pass over a document takes above the
        weights, in bytes at its widest moment."""
        at_once = min(num_tokens, manner.chunk or num_tokens)
        attention = 2 * self.hidden + (3 * self.heads + 4 * self.kv_heads) * self.head_dim
        widest = max(attention, 2 * self.hidden + 3 * self.feed_forward)
        activations = at_once * self.dtype_bytes * widest
        scores = self.heads * at_once * num_tokens * (self.dtype_bytes + 4) if self.eager else 0
        cache = mask = 0
        if at_once < num_tokens:
            values = 2 * self.kv_heads * self.head_dim * num_tokens * self.dtype_bytes
            # A layer's cache grows by concatenation, which holds the old and the new one.
            cache = values * (self.layers + 1)
        windowed = self.masks and self.window is not None and self.window <= num_tokens
        if at_once < num_tokens or windowed:
            # Booleans, and the numbers that SDPA adds to the logits in their place.
            mask = at_once * num_tokens * (1 + self.dtype_bytes)
            # With a mask, SDPA repeats keys and values for every query head.
            cache += 2 * self.heads * self.head_dim * num_tokens * self.dtype_bytes
        hidden = at_once * self.hidden * self.dtype_bytes
        if manner.columns is None:  # slices of whole rows of logits
            rows = min(manner.slice_tokens, at_once)
            head = int(HEAD_BYTES * rows * self.vocabulary)
        else:  # tiles, in the dtype of the weights, and in float32 if that is another one
            entry = self.dtype_bytes if self.dtype_bytes == 4 else self.dtype_bytes + 4
            head = entry * min(TILE_TOKENS, at_once) * min(manner.columns, self.vocabulary)
        return cache + max(activations + scores + mask, hidden + head)


def shape_of(model: Any) -> Shape:
    """Return the sizes that decide the memory of a measurement's forward passes over documents, for
    a model that is loaded or on the meta device."""
    config = model.config.get_text_config()
    heads = int(config.num_attention_heads)
    hidden = int(config.hidden_size)
    embedding = model.get_input_embeddings().weight
    width = getattr(config, "intermediate_size", None) or 4 * hidden
    # The window of the layers that have one; without a list of types all layers have it.
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds and "sliding_attention" not in kinds:
        window = None
    return Shape(
        layers=int(config.num_hidden_layers),
        hidden=hidden,
        heads=heads,
        kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        head_dim=int(getattr(config, "head_dim", None) or hidden // heads),
        feed_forward=int(max(width) if isinstance(width, list | tuple) else width),
        vocabulary=int(config.vocab_size),
        dtype_bytes=int(embedding.element_size()),
        eager=getattr(model.config, "_attn_implementation", "") == "eager",
        plain_head=predicted_head_problem(model) is None,
        device=embedding.device.type,
        window=int(window) if window else None,
        masks=getattr(model.config, "_attn_implementation", "sdpa") == "sdpa",
    )


def choose_reading_mode(
    shape: Shape, longest: int, free: int, chunk: int | None, slice_bytes: int
) -> ReadingMode:
    """Choose how a measurement's forward passes read documents: whole if that fits into the free
    memory, otherwise in the longest chunks that fit.

    If nothing fits, choose the manner that takes least memory.
    """
    columns: int | None = None
    if shape.plain_head:
        columns = TILE_COLUMNS  # these fit in a processor's cache
        if shape.device != "cpu":  # as many as the budget allows
            columns = max(columns, slice_bytes // (TILE_BYTES * TILE_TOKENS))
    whole = ReadingMode(None, slice_for(slice_bytes, shape.vocabulary), columns=columns)
    if chunk is not None:
        return replace(whole, chunk=chunk) if chunk < longest else whole
    ways = [whole]
    size = LONGEST_CHUNK
    while size >= SHORTEST_CHUNK:
        if size < longest:
            ways.append(replace(whole, chunk=size))
        size //= 2
    fitting = [way for way in ways if shape.peak_bytes(longest, way) <= USABLE * free]
    # A chunk's mask over all earlier tokens can be larger than the memory that it saves.
    return fitting[0] if fitting else min(ways, key=lambda way: shape.peak_bytes(longest, way))


@dataclass
class Models:
    """The model in memory: loaded when a variant needs it, and again for other weights or another
    adapter."""

    load: Callable[[Snapshot], Any]
    adapters: Mapping[str, str] = field(default_factory=dict)  # their expected digests
    model: Any = None
    directory: Path | None = None
    adapter: str | None = None

    @contextmanager
    def computing(self, variant: Variant) -> Iterator[Any]:
        """Yield a model that computes as the variant says, inside the `with` block."""
        held = in_memory_model_of(variant.snapshot)
        if held is not None:
            with applied(held.copied(), variant) as model:
                yield model
            return
        directory = variant.snapshot.directory
        adapter = variant.adapter
        if self.directory != directory or (adapter and self.adapter not in (None, adapter)):
            self.model = None
            gc.collect()  # two models may not fit
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


@dataclass
class Reader:
    """Measures models that compute as variants say, all in one manner."""

    computing: Computing
    options: DocumentOptions = field(default_factory=DocumentOptions)
    manner: ReadingMode | None = None
    against: Against | None = None

    def scorer(self, model: Any, reads: Workload) -> TokenScorer:
        """Return a scorer of documents for a model, after a check that the model can be read in
        slices.

        The free memory at the first call decides the manner for all models.
        """
        import torch

        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        if self.manner is None:
            longest = reads.frame.longest
            free = free_memory(base.get_input_embeddings().weight.device)
            chunk = longest if reads.prediction.sees_all else self.options.chunk
            slice_bytes = self.options.slice_memory * MIB
            self.manner = choose_reading_mode(shape_of(base), longest, free, chunk, slice_bytes)
        scorer = TokenScorer(model, self.manner)
        # Not inference_mode: buffers made in it could not be trained through afterwards.
        with memory_errors(out_of_memory("a probe of the model")), torch.no_grad():
            scorer.self_check()
        return scorer

    def measure(
        self,
        variants: Iterable[Variant],
        reads: Workload,
        stores: Mapping[str, Store],
        progress: Progress,
    ) -> Measurement:
        """Read the documents and questions that the stores, by label, lack, and return the
        measurement.

        Among several processes the first one gathers all results. A model whose units are all in
        its store is not loaded.
        """
        variants = tuple(variants)
        units = {variant.label: list(reads.units(variant)) for variant in variants}
        tokens = sum(unit.tokens for own in units.values() for unit in own)
        progress.total += tokens // progress.world
        self.against = None
        if reads.against is not None:
            self.against = self._base(variants, reads, units, stores)
        places = dict.fromkeys(variant.snapshot.directory for variant in variants)
        for place, has_adapter in itertools.product(places, (False, True)):
            # Adapters last: they change the model object.
            for variant in variants:
                own = variant.snapshot.directory, variant.adapter is not None
                if own == (place, has_adapter):
                    self._read(variant, reads, units[variant.label], stores, progress)
        if progress.world > 1:
            wait_for_everyone()
        return reads.measured(variants if progress.rank == 0 else (), stores)

    def _base(
        self,
        variants: Sequence[Variant],
        reads: Workload,
        units: Mapping[str, Sequence[Unit]],
        stores: Mapping[str, Store],
    ) -> Against:
        """Return the base's states and head, for --kl.

        The head is the head of the model that is read, if the base has the same weights; otherwise
        the base is loaded once, and its head kept.
        """
        base = next(variant for variant in variants if variant.kind == BASE)
        kept: Any = None
        for variant in variants:
            same = variant.snapshot.directory == base.snapshot.directory
            if variant.reads_short or (same and variant.adapter is None):
                continue
            store = stores[variant.label]
            if kept is None and not all(unit.is_in(store) for unit in units[variant.label]):
                with self.computing(base) as model:
                    kept = copy.deepcopy(self.scorer(model, reads).head_of_tiles(OPTION))

        def head(scorer: TokenScorer) -> Any:
            """Return the base's head for --kl: the kept copy, or the head of the model that is
            read."""
            return scorer.head_of_tiles(OPTION) if kept is None else kept

        return Against(stores[base.label], head)

    def _read(
        self,
        variant: Variant,
        reads: Workload,
        units: Sequence[Unit],
        stores: Mapping[str, Store],
        progress: Progress,
    ) -> None:
        """Read the documents and questions with one variant. No name here may hold its model while
        the next model is loaded."""
        store = stores[variant.label]
        if all(unit.is_in(store) for unit in units):
            for unit in units:
                progress.skip(unit, store)
        else:
            passes = len(variant.regimes(reads.frame))
            with self.computing(variant) as model:
                scorer = self.scorer(model, reads)
                say = progress.hooks.say
                if not scorer.manner.split:
                    say(
                        f"{variant.label}: its body and head cannot run apart; it is read in chunks"
                    )
                if passes > 1 and reads.documents and reads.frame.scoring.scores_all:
                    say(
                        f"{variant.label}: its spectrum changes with the length; it is read in "
                        f"{passes} passes, one for each spectrum"
                    )
                read = partial(read_unit, reads=reads, scorer=scorer, against=self.against)
                read_units(read, units, store, progress)
        if self.against is not None and variant.kind == BASE and progress.world > 1:
            wait_for_everyone()  # its states are in the store now


def read_units(
    read: Callable[[Unit], Mapping[str, Any]],
    units: Iterable[Unit],
    store: Store,
    progress: Progress,
) -> None:
    """Do this process's share of the documents and questions that the store lacks; `read` returns
    the content of each file of a unit."""
    import torch

    for number, unit in enumerate(units):
        if unit.is_in(store):
            progress.skip(unit, store)
        elif number % progress.world == progress.rank:
            progress.begin(unit)
            with progress.guard(unit.what), torch.no_grad():
                try:
                    for name, content in read(unit).items():
                        store.put(name, content)
                except NanInLogits as error:
                    hint = "float16 overflows in some models: try --dtype float32"
                    raise NanInLogits(f"{unit.what}: {error} ({hint})") from error
            progress.finish(unit)
