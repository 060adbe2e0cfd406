"""Open finished work: return the result of the call that wrote a folder."""

from pathlib import Path
from typing import TYPE_CHECKING

from ropext.base import locks, workdir
from ropext.base.errors import InputError
from ropext.base.inputs import from_home
from ropext.base.jsontext import JsonObject
from ropext.files.checkpoint.provenance import TRAININGS, Record, read_record, record_in
from ropext.files.inspecting import open_model
from ropext.options.door import public
from ropext.pipeline.evidence import SECTION
from ropext.pipeline.python_results import Evaluated, Extended, Ran, opened_extension, opened_run
from ropext.results import rundir
from ropext.results.report.compared import Compared, reopen_comparison

if TYPE_CHECKING:
    from ropext.training.result import Finetuned, Fitted


@public()
def open(run: str | Path) -> "Evaluated | Compared | Ran | Extended | Finetuned | Fitted":
    """Open the folder of `evaluate` or `compare`, or the output of `extend`, `fit`, `finetune` or
    `run`.

    The folder OUT.run next to an output opens too. The result equals the result of the call.
    """
    folder = from_home(run)
    manifest = workdir.read(folder)
    if manifest is not None:
        return _opened_folder(folder, manifest)
    place = locks.run_folder(folder)
    manifest = workdir.read(place)
    record = _record_in(folder)
    is_replaced = record is not None and SECTION not in record.more  # by another command
    if manifest is not None and manifest["command"] == "run" and not is_replaced:
        return opened_run(place)
    if record is not None:
        return _opened_training(folder, record) or opened_extension(folder, record)
    if manifest is not None:
        return _opened_folder(place, manifest)
    workdir.check_seal(folder)
    workdir.check_seal(place)
    raise InputError(
        f"{folder} holds no result of ropext; give what `ropext extend`, `fit`, `finetune`, "
        "`eval`, `compare` or `run` wrote as its -o"
    )


def _opened_folder(folder: Path, manifest: JsonObject) -> Evaluated | Compared | Ran:
    """Open the folder of a run. Raise InputError if the run is unfinished."""
    command = manifest["command"]
    if command == "compare":
        return reopen_comparison(folder, manifest)
    if command == "eval":
        return Evaluated.of(rundir.read_run(folder))
    if command == "run":
        return opened_run(folder)
    raise InputError(
        f"{folder} holds an unfinished run of ropext {command}; run the same command again to "
        "complete it"
    )


def _record_in(output: Path) -> Record | None:
    """Read the record of an output for `ropext.open`, which returns the finished command's result
    again; None if there is no record."""
    if output.is_file() and output.suffix == ".gguf":
        return record_in(open_model(output))
    return read_record(output) if output.is_dir() else None


def _opened_training(output: Path, record: Record) -> "Finetuned | Fitted | None":
    """Read the result of a training from its output; None if no training wrote it."""
    if not any(record.more.get(training) for training in TRAININGS):
        return None
    from ropext.training.result import read_training_result  # late: it needs torch

    return read_training_result(output)
