"""Give the caller of `run` its result, and read the result from a folder."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ropext.base.errors import GateFailed, InputError, UsageError
from ropext.base.jsontext import Json, read_object, read_values, values_json, write_json
from ropext.base.table import Table, verdict_first, with_rows
from ropext.pipeline.evidence import Evidence
from ropext.pipeline.hashes import Hashes
from ropext.pipeline.recipe import REPORT
from ropext.pipeline.step import step_record
from ropext.pipeline.work import EVALUATION, RunContext
from ropext.results import rundir
from ropext.results.measurement import Measurement
from ropext.results.report import tables
from ropext.results.report.gates import failed_gate_lines, gate_table
from ropext.results.report.result import Result
from ropext.results.report.text import serving_commands

OUTCOME = "outcome.json"  # the gates and verdicts
DONE = "done"


@dataclass(frozen=True, repr=False, eq=False)
class Ran(Result):
    """The result of a run."""

    of_the_call = ("stages",)

    output: Path | None  # None if a gate failed or the call did not include all stages
    folder: Path
    label: str  # the finished checkpoint's label in the evaluation
    stages: Mapping[str, str]  # name -> done or skipped, in this call alone
    place: Path = field(repr=False)  # the path of the output, even if it does not exist
    evidence: Evidence = field(repr=False)

    def to_json(self) -> dict[str, Json]:
        """Return what `ropext run --json` prints."""
        measured = self.evidence.measured
        return {
            "output": None if self.output is None else str(self.output),
            "folder": str(self.folder),
            "stages": dict(self.stages),
            "evaluation": measured and {"variants": measured.results["variants"]},
            "gates": [values_json(gate.recorded()) for gate in self.evidence.gates],
            "verdict": values_json(self.evidence.verdict),
        }

    @property
    def title(self) -> str:
        """Return the output's path, and the state of each stage."""
        stages = [f"{name} {state}" for name, state in self.stages.items()]
        return f"<Ran: {self.output or self.folder}; {', '.join(stages)}>"

    @property
    def tables(self) -> list[Table]:
        """Return the tables of the evaluation and of the gates."""
        return self._with_gates(tables.main_tables)

    @property
    def tidy(self) -> list[Table]:
        """Return the same tables with a row for each length and model."""
        return self._with_gates(tables.tidy_tables)

    def _with_gates(self, lay_out: Callable[[Measurement], list[Table]]) -> list[Table]:
        """Return tables of a run's evaluation, with the table of its gates."""
        shown = list[Table]()
        if self.evidence.measured is not None:
            shown += lay_out(self.evidence.measured)
        shown.append(gate_table(self.evidence.gates))
        return with_rows(shown)

    def _same_documents(self) -> Measurement | None:
        """Return the measurement of the run's evaluation; None if the run has no evaluation."""
        return self.evidence.measured

    @property
    def measured(self) -> tuple[str, ...]:
        """Return the output's evaluation in the form that `ropext push --results` takes."""
        is_there = self.evidence.measured is not None
        return (f"{self.folder / EVALUATION}:{self.label}",) if is_there else ()

    def raise_if_failed(self) -> None:
        """Raise GateFailed if a gate failed."""
        try:
            rundir.raise_if_gates_failed(self.evidence.gates)
        except GateFailed as error:
            there = ""
            if os.path.lexists(self.place):
                there = f"; {self.place} is from an earlier run"
            raise GateFailed(
                f"{error}; the checkpoint that did not pass is kept in {self.folder}, not under "
                f"the output's name{there}"
            ) from None

    def to_text(self) -> str:
        """Return the results, the state of each stage, and the next commands as text."""
        measured = self.evidence.measured
        gates = self.evidence.gates
        lines = failed_gate_lines(gates)
        if self.evidence.verdict:
            lines.append(self.evidence.verdict.sentence)
        if measured is not None:
            lines += tables.verdict_lines(measured, self.label)
            lines += self.evidence.control
        parts = [verdict_first(lines, self.tables)]
        stages = [f"{name} {state}" for name, state in self.stages.items()]
        parts.append(f"stages: {', '.join(stages)}")
        if self.output is not None:
            parts[-1] += f"\nwrote {self.output}\nreport: {self.folder / 'report.html'}"
            parts[-1] += f"\nnext: ropext verify {self.output}"
            parts.append(serving_commands(self.output))
        return "\n\n".join(part for part in parts if part)


def measured_in(given: object) -> Measurement | None:
    """Return the measurement of a result; None if the value is no result. Refuse a run without an
    evaluation."""
    if not isinstance(given, Ran):
        return given if isinstance(given, Measurement) else None
    if given.evidence.measured is None:
        raise UsageError(f"{given.title} has no evaluation to compare")
    return given.evidence.measured


def write_outcome(work: RunContext, evidence: Evidence) -> None:
    """Write outcome.json, which `open` needs in addition to the evaluation."""
    kept = {"label": work.final, "stages": list(work.recipe.stages)}
    write_json(work.folder / OUTCOME, kept | evidence.to_json())


def opened_run(folder: Path) -> Ran:
    """Read the result of `ropext run` from the run's folder. Raise InputError if its report is
    missing or older."""
    report = step_record(folder, REPORT)
    results = folder / EVALUATION / rundir.RESULTS
    is_measured = results.is_file()
    measured = rundir.read_run(folder / EVALUATION) if is_measured else None
    evaluated = Hashes().of(results) if is_measured else None
    if report is None or report.outputs is None or report.inputs["results"] != evaluated:
        raise InputError(f"{folder} is not finished; run the same command again to complete it")
    kept = read_object(folder / OUTCOME)
    try:
        evidence = read_values(Evidence, kept | {"measured": measured}, folder / OUTCOME)
        stages = dict.fromkeys(kept["stages"], DONE)
        label = kept["label"]
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{folder / OUTCOME} is damaged: {error!r}; run it again") from error
    place = folder.with_name(folder.name.removesuffix(".run"))
    output = place if evidence.passed else None
    return Ran(output, folder, label, stages, place, evidence)
