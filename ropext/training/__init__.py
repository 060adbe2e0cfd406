"""One training with two objectives, on transformers.Trainer: a LoRA of an extended checkpoint, or
the spectrum itself with the weights frozen (a fit).

The parts, from the bottom: `defaults`, `rows` (what a model reads) and `data` (which documents),
`judge`, `loss`, `models` (loaded, with a LoRA), `spectrum` (what a fit moves),
`origin` (where each begins); `training`, `trainer`, `objective` (the order), `report`, `writing`,
and the two objectives, `finetune` and `fit`.
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ropext import guard
from ropext.narration import NOBODY, SILENT, Call, Say, told_of_files
from ropext.options.fields import FIT, Texts, TextsOrPlace, as_place, reads
from ropext.options.training import Finetune, Fit
from ropext.workdir import Workdir, beside, differences, read, release

if TYPE_CHECKING:
    from ropext.training.objective import Objective


def count_training(
    kind: str,
    model: str | Path,
    data: TextsOrPlace,
    output: str | Path | None = None,
    call: Call = NOBODY,
    *,
    revision: str | None = None,
    **options: Any,
) -> Any:
    """What `train` would do, and what that would take; what it would refuse is refused."""
    return train(kind, model, data, output, call, revision=revision, counts_only=True, **options)


def train(
    kind: str,
    model: str | Path,
    data: TextsOrPlace,
    output: str | Path | None,
    call: Call = NOBODY,
    *,
    revision: str | None = None,
    counts_only: bool = False,
    finish: Callable[[Path], None] | None = None,
    **options: Any,
) -> Any:
    """Fine-tune an extended checkpoint (kind "finetune"), or fit the spectrum of a model, of a GGUF
    on its dequantised weights (kind "fit"): everything, from the last checkpoint on where the same
    run was interrupted. `options` are the fields of options.training's Finetune and Fit.

    A fit's processes but the first have no result; with `counts_only` it is the objective. `finish`
    adds to what a fit writes, before that has its name.
    """
    from ropext.dequantising import directory_of
    from ropext.models.load import silenced
    from ropext.models.processes import is_main, rank_and_count

    say = call.hooks.say
    source = as_place(data)
    name = str(model)
    given = Fit(**options) if kind == FIT else Finetune(**options)
    if output is not None:
        subject = "MODEL" if kind == FIT else "DIR"
        documents = None if isinstance(source, Texts) else source
        read = {subject: model, "--data": documents, **reads(options, type(given))}
        places = {"--output": output, "where the run works": beside(Path(output))}
        guard.check(read, places)
    # A fine-tuning refuses a GGUF.
    with silenced(), directory_of(name, say) if kind == FIT else nullcontext(name) as place:
        from ropext.training import finetune, fit

        objective: Objective
        if isinstance(given, Fit):
            objective = fit.prepare(place, source, given, revision, named=name)
            objective.finish = finish
        else:
            objective = finetune.prepare(place, source, given)
        if output is None or counts_only:
            if output is not None:
                _workdir(objective, Path(output), call).check(call.force)
            objective.count()
            return objective
        work = _workdir(objective, Path(output), call, recovers=is_main())
        objective.count()
        rank, world = rank_and_count()
        with work.claimed(call.force, rank, world, say):
            if not is_main():
                call = replace(call, hooks=SILENT)
            return objective.run(work.folder, Path(output), call)


def _workdir(objective: "Objective", output: Path, call: Call, recovers: bool = False) -> Workdir:
    """Where a run keeps what is not finished, beside an output that may be written. `recovers`
    first clears away what a kill left, which may have come when all was written."""
    from ropext.checkpoint.provenance import read_record, versions
    from ropext.checkpoint.staging import check_output, check_space, settle_output
    from ropext.training.writing import room_for

    say = call.hooks.say
    manifest = objective.manifest(told_of_files(say))
    now = versions()
    place = Workdir(output, objective.command, manifest, {"versions": now})
    if place.has_begun():
        _say_versions(place.folder, now, say)
    settle = settle_output if recovers else check_output
    snapshot = objective.snapshot
    record = read_record(snapshot.directory)
    base = [str(record.base.get("name") or "")] if record else []
    try:
        settle(output, force=call.force, inputs=[snapshot.directory, *base])
        check_space(output, room_for(snapshot, objective.training.options))  # before hours of work
    finally:
        if recovers:
            release(place.folder, output)
    return place


def _say_versions(folder: Path, now: Mapping[str, str], say: Say) -> None:
    """Say which libraries are others than those that a run was begun with."""
    before = (read(folder) or {}).get("versions")
    if not isinstance(before, dict):
        return
    changed = differences(before, now)
    then = ", ".join(f"{name} {before.get(name, 'absent')}" for name in changed)
    here = ", ".join(f"{name} {now.get(name, 'absent')}" for name in changed)
    if changed:
        say(f"{folder} was begun with {then}, and goes on with {here}")
