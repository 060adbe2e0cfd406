"""What judges a training: ropext's own evaluator on held-out documents, before, during and after;
of a fit also questions."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ropext import corpus
from ropext.evaluation.forward import TokenScorer
from ropext.evaluation.reader import Progress, Reader
from ropext.evaluation.reading import Masking
from ropext.evaluation.reads import Reads
from ropext.evaluation.variants import Computing, Variant
from ropext.files import values_json
from ropext.lengths import tail_tokens
from ropext.narration import Hooks, Show, unseen
from ropext.options.evaluate import DocumentOptions
from ropext.results import BASE
from ropext.results.measurement import MeasuredModel, Measurement
from ropext.results.perplexity import MASK_STRIDE, Frame, Reading, Span, text_values
from ropext.results.retrieval import ItemScore, grouped, share_of
from ropext.results.stores import Store
from ropext.results.values import FEWEST_DOCUMENTS, Bootstrap, Value
from ropext.tasks import Item
from ropext.training.rows import MEASURED

Numbers = dict[str, dict[str, Any]]  # label -> values as JSON
# The numbers that a training reports, out of all that a reading gives.
REPORTED = ("tail@", "tail_nll@", "in_window@", "in_window_nll@", "gain@", "short_tax")
# A base that answers fewer of the questions inside its own context has nothing to lose, and its
# wrong answers say nothing about distance.
ANSWERS = 0.1
# Nats a token that two routes to the same spectrum may differ by.
ROUNDING = 1e-5
KNOBS = "knobs.json"  # of a judged step


@dataclass(frozen=True)
class Judge:
    """What is read, from where in it the numbers come, and a fit's questions."""

    reads: Reads
    near: tuple[Item, ...] = ()  # inside the context, for the base
    far: tuple[Item, ...] = ()  # at the target

    @property
    def documents(self) -> tuple[corpus.Document, ...]:
        return self.reads.documents

    @property
    def frame(self) -> Frame:
        return self.reads.frame

    @property
    def tokens(self) -> int:
        """Read through windows of the target's length."""
        return len(self.documents) * self.frame.longest * (self.frame.mask_stride or 1)

    def measure(
        self,
        computing: Computing,
        variants: Iterable[Variant],
        store: Callable[[str], Store] = lambda label: Store(),
        pause: Show = unseen,
        items: Sequence[Item] | None = None,
    ) -> Measurement:
        """Have variants read the documents, or answer `items`, each by itself, in their place."""
        reads, everyone = self.reads, tuple(variants)
        if items is not None:
            reads = replace(reads, documents=(), questions=tuple((item,) for item in items))
        stores = {variant.label: store(variant.label) for variant in everyone}
        progress = Progress(hooks=Hooks(show=pause))
        return self._reader(computing).measure(everyone, reads, stores, progress)

    def read(
        self, model: Any, variant: Variant, store: Store | None = None, pause: Show = unseen
    ) -> Reading:
        """Read by a model as it computes now."""
        kept = store or Store()
        done = self.measure(lambda _: nullcontext(model), [variant], lambda _: kept, pause)
        return done.readings[variant.label]

    def scorer(self, model: Any) -> TokenScorer:
        return self._reader(nullcontext).scorer(model, self.frame.longest)

    def _reader(self, computing: Computing) -> Reader:
        options = DocumentOptions(chunk=self.frame.longest) if self.reads.masking else None
        return Reader(computing, options)

    def measured(self, models: Mapping[str, MeasuredModel]) -> Measurement:
        """Gather what was measured in parts."""
        return Measurement(self.frame, models, self.reads.described)

    def numbers(self, measured: Measurement) -> Numbers:
        """Return what a training reports of each model; the base is held against itself too."""
        readings, numbers = measured.readings, Numbers()
        for label, reading in readings.items():
            values = text_values(self.frame, measured.documents, reading, readings.get(BASE))
            reported = {name: value for name, value in values.items() if name.startswith(REPORTED)}
            numbers[label] = values_json(reported)
        return numbers

    def tail(self, reading: Reading) -> float:
        """Nats per token of the last N tokens before the target."""
        return self._mean(reading, self.frame.tail_span(self.frame.longest))

    def _mean(self, reading: Reading, span: Span) -> float:
        sums, counts = reading.sums(*span)
        return float(sums.sum() / counts.sum())

    @property
    def far_half(self) -> tuple[int, int]:
        """Positions of which a fit's windows take their loss, and by which a fine-tuning stops."""
        return self.frame.longest // 2, self.frame.longest

    def loss(self, reading: Reading) -> float:
        """Nats a token over the far half."""
        return self._mean(reading, self.far_half)

    # Of a fit.

    def objective(self, reading: Reading) -> float:
        """What a fit lowers: the losses over the far half and over the tail, in equal parts."""
        return (self.loss(reading) + self.tail(reading)) / 2

    def change(self, reading: Reading, start: Reading) -> Value:
        """The same tokens read by both: nats a token over the far half, negative = better."""
        return self.frame.difference(reading, start, self.far_half)

    def lower(self, reading: Reading, start: Reading) -> bool:
        """Whether it lies below the start in what a fit lowers, and in what it is kept by: surely,
        where there is an interval."""
        if self.objective(reading) >= self.objective(start):
            return False
        change = self.change(reading, start)
        return change.value < 0 if change.ci95 is None else self.better(reading, start)

    def lowest(self, steps: Mapping[int, Reading], start: Reading) -> int:
        """Return the lowest of the steps that surely beat the start; where none does, of all."""
        sure = [step for step, reading in steps.items() if self.better(reading, start)]
        return min(sure or steps, key=lambda step: self.objective(steps[step]))

    def better(self, reading: Reading, start: Reading) -> bool:
        """Whether it beats the start by more than the paired interval; never without one."""
        change = self.change(reading, start)
        return change.ci95 is not None and change.ci95[1] < -ROUNDING

    def fit_numbers(self, measured: Measurement) -> Numbers:
        """Return the same of spectra, with their far half and the share of right answers."""
        numbers = self.numbers(measured)
        for label, reading in measured.readings.items():
            far = self.frame.bootstrap.ratio(*reading.sums(*self.far_half))
            values = {f"far_half_nll@{self.frame.longest}": far}
            for length, items in sorted(grouped(measured.models[label].items, "length").items()):
                values[f"{MEASURED}@{length}"] = share_of(items)
            numbers[label] |= values_json(values)
        return numbers

    def answers(self, scores: Sequence[ItemScore]) -> bool:
        """Whether a model answers often enough for questions to teach it anything."""
        return bool(scores) and sum(s.exact for s in scores) >= ANSWERS * len(scores)

    def lost(self, fitted: Sequence[ItemScore], start: Sequence[ItemScore]) -> Value | None:
        """The change in the share of right answers where it is surely a loss, else None."""
        if not fitted:
            return None
        pairs = zip(fitted, start, strict=True)
        change = self.frame.bootstrap.mean([float(a.exact) - float(b.exact) for a, b in pairs])
        return change if change.ci95 is not None and change.ci95[1] < 0 else None


def judge_of(
    documents: Sequence[corpus.Document],
    lengths: tuple[int, int],
    seed: int,
    near: Sequence[Item] = (),
    far: Sequence[Item] = (),
    bos: int | None = None,
    masking: Masking | None = None,
) -> Judge:
    """Over documents of the target's length; `lengths` are the context and the target."""
    stride = 0 if masking is None else MASK_STRIDE
    frame = Frame(lengths[0], lengths, tail_tokens(lengths[0]), Bootstrap(seed), stride)
    return Judge(Reads(frame, tuple(documents), (), masking, bos), tuple(near), tuple(far))


def few(documents: Sequence[corpus.Document]) -> str | None:
    """The warning where there is no interval."""
    if len(documents) >= FEWEST_DOCUMENTS:
        return None
    return (
        f"[few-documents] only {len(documents)} held-out documents give no interval, so that the "
        f"start is written whatever is found ({FEWEST_DOCUMENTS} give one; more or longer "
        "documents in --data)"
    )


class JudgedSteps:
    """What was judged on the way: each step's spectrum and reading, kept on the disk so that a run
    that goes on knows them, and so that every step can be written in the end."""

    def __init__(self, folder: Path, reads: Reads, variant: Variant) -> None:
        self.folder, self.reads, self.variant = folder, reads, variant

    def keep(self, step: int, knobs: Mapping[str, Any], store: Store) -> None:
        """Write a step; its knobs come last, for a kill may come before them."""
        store.put(KNOBS, dict(knobs))
        store.written(self.folder / str(step))

    def readings(self) -> dict[int, Reading]:
        """Every step that was kept whole, in order."""
        steps = sorted(int(path.parent.name) for path in self.folder.glob(f"*/{KNOBS}"))
        return {step: self.reads.reading(self.variant, self._store(step)) for step in steps}

    def knobs(self, step: int) -> dict[str, Any]:
        knobs = self._store(step).get(KNOBS).items()
        return {key: tuple(value) if isinstance(value, list) else value for key, value in knobs}

    def _store(self, step: int) -> Store:
        return Store(self.folder / str(step))
