"""Give the caller of `evaluate` its measurement with tables."""

from dataclasses import dataclass

from ropext.base.jsontext import Json
from ropext.base.table import Table
from ropext.results.measurement import Measurement
from ropext.results.report import tables
from ropext.results.report.result import Result


@dataclass(frozen=True, repr=False, eq=False)
class Evaluated(Result, Measurement):
    """The measurement that `evaluate` returns, with its tables."""

    @classmethod
    def of(cls, measured: Measurement) -> "Evaluated":
        """Return a measurement with tables."""
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
        """Return the names of the models, and the folder of the run."""
        kept = "" if self.path is None else f" in {self.path}"
        return f"<Evaluated{kept}: {', '.join(self.models)}>"

    @property
    def tables(self) -> list[Table]:
        """Return the tables that a terminal shows."""
        if self.facts.endpoint is None:
            return tables.main_tables(self)
        from ropext.endpoint.tables import port_tables

        return port_tables(self)

    @property
    def tidy(self) -> list[Table]:
        """Return tables with a row for each length and model; for a server, the terminal's
        tables."""
        if self.facts.endpoint is None:
            return tables.tidy_tables(self)
        return self.tables

    def to_json(self) -> dict[str, Json]:
        """Return the content of results.json."""
        return self.results

    def _same_documents(self) -> Measurement | None:
        return self
