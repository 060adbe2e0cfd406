"""Find how each loader reads a model without an extension, and the commands that run it."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ropext.base.errors import GateFailed, NotMeasured
from ropext.base.jsontext import values_json
from ropext.families import Model, loaders
from ropext.files.checkpoint import Snapshot
from ropext.files.checkpoint.provenance import Record, record_in, scaling_in_words
from ropext.files.inspecting.model import naming_config, open_model
from ropext.files.schemes import read_positions
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

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object that `ropext plan --json` prints for a model that is served
        unchanged."""
        return {
            "directory": self.directory,
            "method": self.record and self.record.method,
            "context": self.record and self.record.context,
            "target": self.model.context,
            "loaders": [values_json(reading) for reading in self.readings],
            "serving": [asdict(line) for line in self.serving],
        }


def read_again(snapshot: Snapshot) -> Served:
    """Return how each loader reads a config unchanged, and how to serve it."""
    with naming_config(snapshot):
        model, conflicts = snapshot.interpret()
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
        disagrees=bool(conflicts),
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
        """Raise GateFailed if one of them misreads it, or NotMeasured if that was not measured."""
        if self.passed is None:
            raise NotMeasured(self.sentence)
        if not self.passed:
            raise GateFailed(self.sentence)


def gate(served: Served, names: Sequence[str]) -> LoaderGate:
    """Return the verdict on these loaders for a model; each name may have a version, as in
    --for."""
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
    """Return the readings of these loaders as a clause."""
    parts = []
    for reading in readings:
        why = f" ({reading.why})" if reading.why else ""
        parts.append(f"{reading.loader} {reading.versions}: {reading.verdict}{why}")
    return "; ".join(parts)


def read_unextended(model: str, *, revision: str | None = None) -> Served | None:
    """Return how each loader reads anybody's model; None if it does not rotate."""
    snapshot = open_model(model, revision=revision)
    return None if read_positions(snapshot.config) is not None else read_again(snapshot)


def serving(model: str, *, revision: str | None = None) -> Served | None:
    """Return how each loader reads an extended directory; None if it is not one."""
    snapshot = open_model(model, revision=revision)
    if read_positions(snapshot.config) is not None:
        return None
    served = read_again(snapshot)
    return served if served.record or scaling_in_words(served.model) else None
