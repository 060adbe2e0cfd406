"""Finished work, opened: what a folder holds is given as by the call that left it there."""

from dataclasses import dataclass
from pathlib import Path

from ropext import workdir
from ropext.errors import InputError
from ropext.inputs import from_home
from ropext.jsontext import Json
from ropext.options.door import public
from ropext.pipeline.ran import Ran, opened_run
from ropext.report import tables
from ropext.report.compared import Compared, compared_in
from ropext.report.result import Result
from ropext.results import rundir
from ropext.results.measurement import Measurement
from ropext.table import Table


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
        from ropext.ports.tables import port_tables

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


@public()
def open(run: str | Path) -> Evaluated | Compared | Ran:
    """Open a folder that `evaluate`, `compare` or `run` left, or the command of that name: the
    answer is the one of that call. Of a run it is the output, or the folder beside it."""
    folder = from_home(run)
    manifest = workdir.read(folder)
    if manifest is None and workdir.beside(folder).is_dir():
        folder = workdir.beside(folder)
        manifest = workdir.read(folder)
    command = None if manifest is None else manifest["command"]
    if manifest is not None and command == "compare":
        return compared_in(folder, manifest)
    if command == "eval":
        return Evaluated.of(rundir.read_run(folder))
    if command == "run":
        return opened_run(folder)
    if command is None:
        raise InputError(
            f"{folder} holds no result of ropext; give the folder that `ropext eval`, "
            "`compare` or `run` wrote as its -o"
        )
    raise InputError(f"{folder} holds an unfinished run of ropext {command}; complete it first")
