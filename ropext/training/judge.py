"""Judge a training by ropext's own evaluator on held-out documents, before, during and after it;
judge a fit by questions too."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

from ropext.base.jsontext import Json, JsonObject
from ropext.base.narration import Hooks, Show, no_progress
from ropext.evaluation import corpus
from ropext.evaluation.reader import Progress, Reader
from ropext.evaluation.variants import Variant
from ropext.evaluation.workload import Workload
from ropext.results import BASE, CONTROL, TUNED
from ropext.results.measurement import MeasuredModel, Measurement, Store
from ropext.results.metrics import ReadText, text_values
from ropext.results.retrieval import CAN_DO, ItemScore, group_answers, share_of_answers
from ropext.results.values import FEWEST_DOCUMENTS, Value
from ropext.training.rows import FIT_TASK

Numbers = Mapping[str, Mapping[str, Value]]  # the numbers of each model, by its label
GAIN = "gain@"  # nats per token below the base, by the length behind it
BEYOND_CONTROL = "gain_beyond_control@"  # nats per token below the control
# The numbers that a training reports, out of all that a reading gives.
REPORTED = ("tail@", "tail_nll@", "in_window@", "in_window_nll@", GAIN, "short_tax")
KNOBS = "knobs.json"  # the knobs of a judged step


def read_in_training(
    model: nn.Module,
    variant: Variant,
    reads: Workload,
    store: Store | None = None,
    pause: Show = no_progress,
) -> Measurement:
    """Judge a fine-tuning or a fit. Read held-out documents with the model as it computes after its
    last step."""
    stores = {variant.label: store or Store()}
    progress = Progress(hooks=Hooks(show=pause))
    return Reader(lambda _: nullcontext(model)).measure([variant], reads, stores, progress)


def base_can_answer(items: Sequence[ItemScore]) -> bool:
    """Return whether the base of a fit answers its questions inside its own context; True if
    there are none."""
    return not items or share_of_answers(items).value >= CAN_DO


def training_numbers(measured: Measurement) -> dict[str, dict[str, Value]]:
    """Return the numbers that a training reports of each model, by its label; the base is
    compared with itself too."""
    readings = measured.readings
    base = readings.get(BASE)
    numbers = dict[str, dict[str, Value]]()
    for label, reading in readings.items():
        values = text_values(ReadText(measured.frame, reading, base, measured.documents))
        numbers[label] = {name: v for name, v in values.items() if name.startswith(REPORTED)}
    if CONTROL in readings and TUNED in readings:
        frame = measured.frame
        beyond = frame.difference(
            readings[CONTROL], readings[TUNED], frame.tail_span(frame.longest)
        )
        numbers[TUNED][f"{BEYOND_CONTROL}{frame.longest}"] = beyond
    return numbers


def fit_numbers(measured: Measurement) -> dict[str, dict[str, Value]]:
    """Return the numbers that a training reports, of each spectrum of a fit, with its far half
    and the share of right answers."""
    numbers = training_numbers(measured)
    frame = measured.frame
    for label, reading in measured.readings.items():
        values = numbers[label]
        values[f"far_half_nll@{frame.longest}"] = frame.nll(reading, frame.far_half)
        for length, items in sorted(group_answers(measured.models[label].items, "length").items()):
            values[f"{FIT_TASK}@{length}"] = share_of_answers(items)
    return numbers


def few_documents_warning(documents: Sequence[corpus.Document]) -> str | None:
    """Return the warning that the held-out documents of a fit are too few for an interval, if
    they are."""
    if len(documents) >= FEWEST_DOCUMENTS:
        return None
    return (
        f"[few-documents] only {len(documents)} held-out documents give no interval, so that the "
        f"start is written whatever is found ({FEWEST_DOCUMENTS} give one; more or longer "
        "documents in --data)"
    )


@dataclass(frozen=True)
class JudgedSteps:
    """The steps of a fit that were judged on the way. Each step's spectrum and reading are kept
    on the disk, so that a resumed run knows them and any step can be written in the end."""

    folder: Path
    reads: Workload
    variant: Variant

    def keep(self, step: int, knobs: JsonObject, store: Store) -> None:
        """Write a judged step of a fit; write its knobs last, since a kill may come before them."""
        store.put(KNOBS, dict(knobs))
        store.write_files(self.folder / str(step))

    def is_whole(self, step: int) -> bool:
        """Return whether a judged step of a fit has its knobs and its whole reading. Neither is
        there if it was damaged: the run that resumes has deleted it."""
        store = Store(self.folder / str(step))
        return store.has(KNOBS) and all(
            unit.is_in(store) for unit in self.reads.units(self.variant)
        )

    def models(self) -> dict[str, MeasuredModel]:
        """Return the readings of every judged step of a fit that was kept whole, by its number,
        in order."""
        steps = [int(path.parent.name) for path in self.folder.glob(f"*/{KNOBS}")]
        names = [str(step) for step in sorted(steps) if self.is_whole(step)]
        variants = [replace(self.variant, label=name) for name in names]
        stores = {name: Store(self.folder / name) for name in names}
        return dict(self.reads.measured(variants, stores).models)

    def knobs(self, step: int) -> dict[str, Json]:
        """Return the fields of a recipe that plan the spectrum of a judged step."""
        knobs: dict[str, Json] = Store(self.folder / str(step)).get(KNOBS)
        return knobs
