"""One evaluation from beginning to end: prepare, read, assemble. Only here is the order known."""

import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ropext import guard, workdir
from ropext.checkpoint import Snapshot
from ropext.errors import NothingKept, UsageError
from ropext.evaluation import harness
from ropext.evaluation.assembling import assembled
from ropext.evaluation.lineup import Lineup, fetched
from ropext.evaluation.preparing import Evaluation, prepare
from ropext.evaluation.reader import Models, Progress, Reader
from ropext.models.load import device_of, load_model, loading_of, silenced
from ropext.models.memory import memory_errors, out_of_memory, tell_used
from ropext.models.processes import rank_and_count, wait_for_everyone
from ropext.narration import NOBODY, Call, Hooks, told_of_files, unseen
from ropext.results import rundir
from ropext.results.gates import Gate
from ropext.results.measurement import Measurement
from ropext.workdir import USED, Workdir

NOTHING_KEPT = "interrupted; nothing was kept (-o RUN keeps what is finished)"


def evaluate(
    model: str,
    output: str | Path | None = None,
    call: Call = NOBODY,
    *,
    revision: str | None = None,
    lineup: Lineup | None = None,
    gates: Sequence[Gate] = (),
    losses: str | Path | None = None,
    report: Callable[[Measurement], None] = lambda run: None,
    **values: Any,
) -> Measurement:
    """Measure a model on long text and by retrieval; `values` are the fields of Options.

    With `output` every finished piece is kept there, and the same call goes on where it stopped.
    `lineup` names the models to be read, where they are not those that follow from `model`.
    `gates` will be held against the result: one about what is not measured is refused here.
    `losses` is a parquet file for the loss of every token. `report` is given the run that was kept,
    while nobody else may write into its folder.
    """
    hooks = call.hooks
    rank, world = rank_and_count()
    if output is None and world > 1:
        raise UsageError("several processes share their work through a directory; give -o RUN")
    wait_for_everyone()  # so that one that is refused is noticed by the others
    evaluation = prepare(model, revision, call.trust_remote_code, values, lineup, gates)
    if losses is not None and evaluation.corpus is None:
        raise UsageError("--losses writes the loss of every token of --data; give documents")
    for warning in evaluation.warnings if rank == 0 else ():
        hooks.say(f"warning: {warning}")
    _check_stop(hooks)
    evaluation = replace(evaluation, lineup=fetched(evaluation.lineup))
    _check_stop(hooks)
    read = {"MODEL": [variant.snapshot.directory for variant in evaluation.lineup.variants]}
    guard.check(read, {"--output": output})
    with ExitStack() as stack:
        room = output or Path(
            stack.enter_context(  # Windows does not delete what a virus scanner still reads
                tempfile.TemporaryDirectory(prefix="ropext-", ignore_cleanup_errors=True)
            ),
            "run",
        )
        place = evaluation.workdir(Path(room), call.command, told_of_files(hooks.say))
        place = replace(place, is_temporary=output is None)
        stack.enter_context(place.claimed(call.force, rank, world, hooks.say))
        stack.enter_context(silenced())
        done = _measure(evaluation, place, None if output is None else Path(output), hooks)
        if losses is not None and evaluation.corpus is not None and rank == 0:
            texts = ((document.name, document.ids) for document in evaluation.corpus.documents)
            rundir.write_losses(Path(losses), texts, done)
        if output is not None and rank == 0:
            report(done)
    return done


def _check_stop(hooks: Hooks) -> None:
    """End where that was asked for while documents were read or weights fetched."""
    if hooks.stop():
        raise NothingKept("interrupted before a model read anything")


def _measure(
    evaluation: Evaluation, place: Workdir, kept_in: Path | None, hooks: Hooks
) -> Measurement:
    """Read what is not there yet, and write the results beside it."""
    (rank, world), path, options = rank_and_count(), place.folder, evaluation.options
    variants = evaluation.lineup.variants
    reads = evaluation.reads
    stores = {label: rundir.store(path, name) for label, name in evaluation.stores(place).items()}
    wait_for_everyone()  # the first one has claimed the folder

    def load(snapshot: Snapshot) -> Any:
        said = out_of_memory(f"the weights of {snapshot.name}")
        with memory_errors(said):
            hooks.say(f"loading {snapshot.name}")
            how = loading_of(options, evaluation.trust_remote_code, evaluation.lineup.masked)
            model = load_model(snapshot, how)
        if hooks.stop():  # asked for meanwhile
            raise progress.stopped()
        return model

    models = Models(load)
    progress = Progress(
        hooks=hooks if rank == 0 else replace(hooks, show=unseen),
        kept_in=kept_in,
        nothing_kept=NOTHING_KEPT,
        rank=rank,
        world=world,
        used=partial(tell_used, path / USED, hooks.say, device_of(options)),
        guard=lambda what: memory_errors(out_of_memory(what)),
    )
    done = Reader(models.computing, options).measure(variants, reads, stores, progress)
    if rank != 0:
        return replace(done, path=kept_in)
    units = ((variant, unit) for variant in variants for unit in reads.units(variant))
    rundir.keep_only(path, [stores[variant.label].file(unit.name) for variant, unit in units])
    lm_eval = None
    if options.lm_eval:
        tokenizer = evaluation.encoder.tokenizer
        longest = reads.frame.longest
        lm_eval = harness.run_tasks(models.computing, tokenizer, options, longest, variants, stores)
    place.write_results()
    whole = assembled(evaluation, done, stores, lm_eval)
    rundir.save_run(path, whole)
    manifest = workdir.read(path)
    assert manifest is not None  # written by `write_results`
    measurable = whole.without(whole.facts.not_measurable)
    return replace(measurable, manifest=manifest, path=kept_in, resumed=progress.resumed)
