"""Give the caller of a public function its result with tables: of `evaluate`, `extend` or `run`,
new or read from the output."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ropext.base import guard
from ropext.base.errors import GateFailed, InputError, UsageError
from ropext.base.jsontext import Json, read_object, read_values, values_json, write_json
from ropext.base.table import Number, Table, verdict_first, with_rows
from ropext.files.checkpoint.provenance import Record
from ropext.files.checkpoint.writing import Written
from ropext.files.inspecting import open_model, read_unchanged
from ropext.options.door import worded_for_python
from ropext.pipeline.evidence import Evidence
from ropext.pipeline.extending import MadeExtension
from ropext.pipeline.recipe import REPORT
from ropext.pipeline.run_context import EVALUATION, RunContext
from ropext.pipeline.run_digests import RunDigests
from ropext.pipeline.stage import step_record
from ropext.results import rundir
from ropext.results.gates import Gate, Outcome, read_gates
from ropext.results.measurement import Measurement
from ropext.results.report import tables, text
from ropext.results.report.gates import failed_gate_lines, gate_table
from ropext.results.report.result import Result

EDITED = ("file", "key", "before", "after")
OUTCOME = "outcome.json"  # the gates and verdicts
DONE = "done"


@dataclass(frozen=True, repr=False, eq=False)
class Evaluated(Result, Measurement):
    """The measurement that `evaluate` returns, with its tables and the verdicts of its gates."""

    @classmethod
    def of(cls, measured: Measurement) -> "Evaluated":
        """Build the output that the whole command `ropext.evaluate`, or `ropext.open`, returns to
        Python: a measurement with tables and the verdicts of its gates."""
        return cls(
            measured.frame,
            measured.models,
            measured.documents,
            measured.facts,
            measured.manifest,
            measured.path,
            measured.resumed,
            measured.own_base,
            measured.gates,
        )

    @worded_for_python
    def judge(self, gates: Sequence[str | Gate]) -> list[Outcome]:
        """Return the verdicts of other gates on the numbers in an output of the command
        `ropext.evaluate`, new or opened."""
        return rundir.judge_gates(self, read_gates(gates))

    def raise_if_failed(self) -> None:
        """Raise GateFailed if the output of the command `ropext.evaluate` failed a gate, or
        NotMeasured if a gate is not known."""
        rundir.raise_if_gates_failed(self.gates)

    @property
    def title(self) -> str:
        """Return the models' names in the output of `ropext.evaluate`, and the folder of the
        run."""
        kept = "" if self.path is None else f" in {self.path}"
        return f"<Evaluated{kept}: {', '.join(self.models)}>"

    @property
    def tables(self) -> list[Table]:
        """Return the tables in the output of `ropext.evaluate`, as a terminal shows them."""
        if self.facts.endpoint is None:
            shown = tables.main_tables(self)
            shown.append(gate_table(self.gates))
            return with_rows(shown)
        from ropext.endpoint.report import server_tables

        return server_tables(self)

    @property
    def tidy(self) -> list[Table]:
        """Return the tables in the output of `ropext.evaluate` for programs. They have a row for
        each length and model; for a server they are the terminal's."""
        if self.facts.endpoint is None:
            return tables.tidy_tables(self)
        return self.tables

    def to_json(self) -> dict[str, Json]:
        """Return the output of the whole command `ropext.evaluate` as JSON: the content of
        results.json."""
        return self.results

    def _same_documents(self) -> Measurement | None:
        """Return the output of the whole command `ropext.evaluate`. Its models all read the same
        documents."""
        return self


@dataclass(frozen=True, repr=False, eq=False)
class Extended(MadeExtension, Result):
    """The output of `extend`, and the commands that serve it."""

    of_the_call = ("notes", "left", "proof", "serving")  # a GGUF keeps no proof

    @property
    def title(self) -> str:
        """Return the output's path, its original and its extended context."""
        record = self.written.record
        far = f"{record.context:,} -> {record.target:,} tokens by {record.method}"
        return f"<Extended in {self.output}: {far}>"

    @property
    def tables(self) -> list[Table]:
        """Return the table of the keys that `extend` edited."""
        rows = list[tuple[str, ...]]()
        for edit in self.written.record.edits:
            rows.append((edit.file, edit.key, _cell(edit.before), _cell(edit.after)))
        return with_rows([Table("What was edited", "", EDITED, tuple(rows))])

    def _same_documents(self) -> None:
        """Return nothing: `extend` read no document."""


def _cell(item: Json) -> str:
    """Return a config's value as a cell in the output of `ropext.extend`. A number stays a
    number."""
    if isinstance(item, int | float) and not isinstance(item, bool):
        return Number(text.config_value_text(item), item)
    return text.config_value_text(item)


def opened_extension(output: Path, record: Record) -> Extended:
    """Read the extension from the record of an output."""
    served = read_unchanged(open_model(output))
    files = [output.name]
    beside = output.with_name(f"{output.name}.Modelfile")
    if output.is_dir():
        files = sorted(guard.files_in(output) or ())
    elif beside.is_file():
        files.append(beside.name)
    written = Written(output, record, (), {}, record.proof, tuple(files))
    return Extended(written, served.serving if served else (), None)


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
        """Return the tables of a recipe's run: its evaluation and its gates."""
        return self._with_gates(tables.main_tables)

    @property
    def tidy(self) -> list[Table]:
        """Return the same tables of a recipe's run, with a row for each length and model."""
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
        """Raise GateFailed if the run of a recipe failed a gate."""
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
        """Return the output of `run` as text: the results, the state of each stage, the next
        commands."""
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
            parts.append(text.serving_commands(self.output))
        return "\n\n".join(part for part in parts if part)


def measurement_of_result(given: object) -> Measurement | None:
    """Return the measurement in the object that the command `ropext.evaluate`, `run` or `open`
    returned to Python, or None for another value. Refuse a recipe's run without an evaluation."""
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
    measured = None
    evaluated = None
    if results.is_file():
        measured = rundir.read_run(folder / EVALUATION)
        evaluated = RunDigests().of(results)
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
