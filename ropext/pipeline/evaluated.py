"""What an evaluation measured, as its caller reads it."""

from dataclasses import dataclass

from ropext.base.jsontext import Json
from ropext.base.table import Table
from ropext.results.measurement import Measurement
from ropext.results.report import tables
from ropext.results.report.result import Result


@dataclass(frozen=True, repr=False, eq=False)
class Evaluated(Result, Measurement):
    """What `evaluate` measured, with its tables."""

    @classmethod
    def of(cls, measured: Measurement) -> "Evaluated":
        """Give a measurement its tables."""
        return cls(
            measured.frame,
            measured.models,
            measured.documents,
            measured.facts,
            measured.manifest,
            measured.path,
            measured.resumed,
            measured.own_base,
        )

    @property
    def title(self) -> str:
        """Name the models, and the folder that keeps the run."""
        kept = "" if self.path is None else f" in {self.path}"
        return f"<Evaluated{kept}: {', '.join(self.models)}>"

    @property
    def tables(self) -> list[Table]:
        """Lay out what a terminal shows."""
        if self.facts.endpoint is None:
            return tables.main_tables(self)
        from ropext.endpoint.tables import port_tables

        return port_tables(self)

    @property
    def tidy(self) -> list[Table]:
        """Lay out a row for each length and model; of a server what a terminal shows."""
        if self.facts.endpoint is None:
            return tables.tidy_tables(self)
        return self.tables

    def to_json(self) -> dict[str, Json]:
        """Return what results.json holds."""
        return self.results

    def _same_documents(self) -> Measurement | None:
        return self
