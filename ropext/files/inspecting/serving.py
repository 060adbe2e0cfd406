"""Find how each loader reads a model without an extension, and the commands that run it."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ropext.base.errors import GateFailed, NotMeasured
from ropext.base.jsontext import values_json
from ropext.families import Model, loaders
from ropext.families.schemes import read_positions
from ropext.files.checkpoint import Snapshot
from ropext.files.checkpoint.provenance import Record, record_in, scaling_in_words
from ropext.files.inspecting.model import naming_config
from ropext.planning.carrier import Carrier, UnextendedModel


@dataclass(frozen=True)
class Served:
    """The readings of a model by each loader, and the commands that run it."""

    directory: str
    carrier: Carrier
    record: Record | None
    readings: tuple[loaders.LoaderReading, ...]
    serving: tuple[loaders.Serving, ...]

    @property
    def model(self) -> Model:
        """The model that its config describes."""
        return self.carrier.model

    @property
    def is_extended(self) -> bool:
        """Return True if ropext.json or the config in the inspected model's files states an
        extension."""
        return self.record is not None or bool(scaling_in_words(self.model))

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object that `ropext plan --json` prints for a checkpoint or GGUF file
        served unchanged."""
        return {
            "directory": self.directory,
            "method": self.record and self.record.method,
            "context": self.record and self.record.context,
            "target": self.model.context,
            "loaders": [values_json(reading) for reading in self.readings],
            "serving": [asdict(line) for line in self.serving],
        }


def read_unchanged(snapshot: Snapshot) -> Served | None:
    """Return how each loader reads a checkpoint or GGUF file unchanged, and how to serve it. Return
    None if the model does not rotate."""
    if read_positions(snapshot.config) is not None:
        return None
    with naming_config(snapshot):
        model = snapshot.as_read()
    record = record_in(snapshot)
    context = model.scaled_sites[0].rope.original_context
    if record is not None:
        context = record.context
    carrier = snapshot.carries(model)
    unextended = UnextendedModel(
        snapshot.place,
        snapshot.config,
        context,
        on_hub=snapshot.is_on_hub,
    )
    readings, lines = carrier.read_unextended(unextended)
    return Served(snapshot.name, carrier, record, readings, lines)


@dataclass(frozen=True)
class LoaderGate:
    """The verdict whether the loaders of --for read a model as its config means."""

    loaders: tuple[str, ...]
    passed: bool | None  # None: not measured
    sentence: str

    def raise_if_failed(self) -> None:
        """Raise GateFailed if a loader of --for misreads the inspected checkpoint. Raise
        NotMeasured if that was not measured."""
        if self.passed is None:
            raise NotMeasured(self.sentence)
        if not self.passed:
            raise GateFailed(self.sentence)


def gate(served: Served, names: Sequence[str]) -> LoaderGate:
    """Return the verdict on these loaders for an inspected checkpoint. Each name may have a
    version, as in --for."""
    readings = list[loaders.LoaderReading]()
    for name in names:
        readings += served.carrier.of_loader(name, served.readings)
    wrong = [reading for reading in readings if reading.verdict in loaders.WRONG]
    unknown = [reading for reading in readings if reading.verdict == "not measured"]
    asked = f"--for {','.join(names)}"
    if wrong:
        sentence = f"{served.directory} is not read as its config means: {_told(wrong)}"
        return LoaderGate(tuple(names), False, f"{asked}: {sentence}")
    if unknown:
        sentence = f"{served.directory}: how it is read was not measured: {_told(unknown)}"
        return LoaderGate(tuple(names), None, f"{asked}: {sentence}")
    return LoaderGate(tuple(names), True, f"{asked}: read as its config means")


def _told(readings: Sequence[loaders.LoaderReading]) -> str:
    """Return how these loaders read an inspected checkpoint or GGUF file, as a clause."""
    parts = []
    for reading in readings:
        why = f" ({reading.why})" if reading.why else ""
        parts.append(f"{reading.loader} {reading.versions}: {reading.verdict}{why}")
    return "; ".join(parts)
