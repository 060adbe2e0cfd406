"""Where a training works and what it writes: whether both may be taken, and its small files."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from ropext.atomic import reason_of
from ropext.checkpoint import Snapshot
from ropext.checkpoint.provenance import read_record
from ropext.checkpoint.staging import Output, check_output, check_space, recover, settle_output
from ropext.errors import Stopped
from ropext.narration import Call, Say
from ropext.options.training import Finetune, TrainingOptions
from ropext.training.training import Training
from ropext.workdir import beside, differences, read, release


def check_output_of(training: Training, output: Path, call: Call) -> None:
    """Refuse an output that holds something else, or has no room; change nothing."""
    check_output(Output(output, call.force, _reads(training)))
    check_space(output, room_for(training.snapshot, training.options))


def settle_output_of(training: Training, output: Path, call: Call) -> None:
    """Clear away what a kill left, which may have come when all was written, and refuse the same
    before hours of work."""
    try:
        settle_output(Output(output, call.force, _reads(training)))
        check_space(output, room_for(training.snapshot, training.options))
    finally:
        release(beside(output), output)


def settle_done(output: Path) -> None:
    """Clear away what a kill left that came when the output was written and had its name."""
    recover(output, refused=True)
    release(beside(output), output)


def _reads(training: Training) -> list[Path | str]:
    """List the directories that are read."""
    snapshot = training.snapshot
    record = read_record(snapshot.directory)
    places: list[Path | str] = [snapshot.directory]
    if record is not None:
        places.append(str(record.base.get("name") or ""))
    return places


def room_for(snapshot: Snapshot, options: TrainingOptions) -> int:
    """Count the bytes of OUT's weights: the tuned ones, and those that are copied from the base."""
    is_tuned = isinstance(options, Finetune)
    is_slim = isinstance(options, Finetune) and options.slim
    copies = 0
    if is_tuned:
        copies += 1
    if options.link == "copy" and not is_slim:
        copies += 1
    return copies * sum(snapshot.files[name] for name in snapshot.weight_files)


def say_versions(folder: Path, now: Mapping[str, str], say: Say) -> None:
    """Say which libraries are others than those that a run was begun with."""
    before = (read(folder) or {}).get("versions")
    if not isinstance(before, dict):
        return
    changed = differences(before, now)
    then = ", ".join(f"{name} {before.get(name, 'absent')}" for name in changed)
    here = ", ".join(f"{name} {now.get(name, 'absent')}" for name in changed)
    if changed:
        say(f"{folder}: started with {then}, resumes with {here}")


def write_files(folder: Path, contents: Mapping[str, bytes]) -> None:
    """Write files below a folder, by their relative paths."""
    for name, content in contents.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


@contextmanager
def writing_errors(folder: Path) -> Iterator[None]:
    """A full or failing disk becomes a sentence; the checkpoints before it are kept."""
    try:
        yield
    except Exception as error:
        reason = reason_of(error)
        if reason is None:
            raise
    else:
        return
    raise Stopped(
        f"{folder} cannot be written: {reason}; finished checkpoints are kept; run the same "
        "command to resume"
    )
