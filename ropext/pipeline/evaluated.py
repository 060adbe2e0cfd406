"""Give the caller of `evaluate` its measurement with tables."""

from collections.abc import Sequence
from dataclasses import dataclass

from ropext.base.jsontext import Json
from ropext.base.table import Table, with_rows
from ropext.options.door import worded_for_python
from ropext.results import rundir
from ropext.results.gates import Gate, Outcome, read_gates
from ropext.results.measurement import Measurement
from ropext.results.report import tables
from ropext.results.report.gates import gate_table
from ropext.results.report.result import Result


@dataclass(frozen=True, repr=False, eq=False)
class Evaluated(Result, Measurement):
    """The measurement that `evaluate` returns, with its tables and the verdicts of its gates."""

    gates: Sequence[Outcome] = ()

    @classmethod
    def of(cls, measured: Measurement, gates: Sequence[Outcome] = ()) -> "Evaluated":
        """Return a measurement with tables and verdicts."""
        return cls(
            measured.frame,
            measured.models,
            measured.documents,
            measured.facts,
            measured.manifest,
            measured.path,
            measured.resumed,
            measured.own_base,
            gates,
        )

    @worded_for_python
    def judge(self, gates: Sequence[str | Gate]) -> list[Outcome]:
        """Return the verdicts of other gates on these numbers."""
        return rundir.judge_gates(self, read_gates(gates))

    def raise_if_failed(self) -> None:
        """Raise GateFailed if a gate failed, or NotMeasured if a gate is not known."""
        rundir.raise_if_gates_failed(self.gates)

    @property
    def title(self) -> str:
        """Return the names of the models, and the folder of the run."""
        kept = "" if self.path is None else f" in {self.path}"
        return f"<Evaluated{kept}: {', '.join(self.models)}>"

    @property
    def tables(self) -> list[Table]:
        """Return the tables that a terminal shows."""
        if self.facts.endpoint is None:
            shown = tables.main_tables(self)
            shown.append(gate_table(self.gates))
            return with_rows(shown)
        from ropext.endpoint.report import server_tables

        return server_tables(self)

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
        """Return this measurement, whose models all read the same documents."""
        return self
