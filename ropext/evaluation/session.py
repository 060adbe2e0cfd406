"""One evaluation as a job: read what is not there yet, assemble, report."""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ropext import guard, workdir
from ropext.checkpoint import Snapshot
from ropext.errors import NothingKept, UsageError
from ropext.evaluation import harness
from ropext.evaluation.assembling import assembled
from ropext.evaluation.costs import Costs, check_models, count_evaluation
from ropext.evaluation.lineup import fetched
from ropext.evaluation.plan import Evaluation
from ropext.evaluation.reader import Models, Progress, Reader
from ropext.evaluation.variants import adapter_digest
from ropext.models.load import (
    device_of,
    load_model,
    loading_of,
    memory_errors,
    out_of_memory,
    silenced,
    tell_used,
)
from ropext.models.processes import rank_and_count, wait_for_everyone
from ropext.narration import Call, Hooks, told_of_files, unseen
from ropext.report.evaluation import write_report
from ropext.results import BASE, rundir
from ropext.results.gates import Gate
from ropext.results.measurement import Measurement, Store
from ropext.workdir import USED, Workdir

NOTHING_KEPT = "interrupted; nothing was kept (-o RUN keeps what is finished)"
LIVE_KEPT_NOTHING = (
    "interrupted; nothing was kept (results of a model in memory are kept only when complete)"
)


@dataclass(frozen=True)
class EvaluationJob:
    """An evaluation that is prepared."""

    evaluation: Evaluation
    gates: Sequence[Gate] = ()  # shown in the report
    losses: Path | None = None  # a parquet file for the loss of every token

    def check(self, output: Path, call: Call) -> None:
        """Refuse an output that holds something else."""
        for variant in self.evaluation.lineup.variants:
            if not variant.snapshot.weight_files:
                return  # fetched first, and part of what says which run it is
        self.evaluation.workdir(output).check(call.force)

    def counts(self) -> Costs:
        """Count passes, tokens and bytes; models that cannot be read as asked are refused."""
        check_models(self.evaluation)
        return count_evaluation(self.evaluation)

    def make(self, output: Path | None, call: Call) -> Measurement:
        """Measure. With an output every finished piece is kept there, the same call resumes where
        it stopped, and the report is written while nobody else may write into the folder. Without
        one, no weight is hashed. Of a model in memory the output gets its results at the end."""
        hooks = call.hooks
        rank, world = rank_and_count()
        if output is None and world > 1:
            raise UsageError("several processes share their work through a directory; give -o RUN")
        if world > 1 and self.evaluation.lineup.held is not None:
            raise UsageError(
                "several processes share their work through a directory, and a model in memory "
                "writes none; ropext.save it and evaluate what that wrote"
            )
        wait_for_everyone()  # so that one that is refused is noticed by the others
        _check_stop(hooks)
        evaluation = replace(self.evaluation, lineup=fetched(self.evaluation.lineup))
        _check_stop(hooks)
        read = {"MODEL": [variant.snapshot.directory for variant in evaluation.lineup.variants]}
        guard.check(read, {"--output": output})
        with ExitStack() as stack:
            place = None
            if output is not None:
                place = evaluation.workdir(output, call.command, told_of_files(hooks.say))
                stack.enter_context(place.claimed(call.force, rank, world, hooks.say))
            stack.enter_context(silenced())
            done = _measure(evaluation, place, hooks)
            if rank == 0:
                self._write(done)
        return done

    def _write(self, done: Measurement) -> None:
        """Write what goes with the results."""
        corpus = self.evaluation.corpus
        if self.losses is not None and corpus is not None:
            texts = ((document.name, document.ids) for document in corpus.documents)
            rundir.write_losses(self.losses, texts, done)
        if done.path is not None:
            write_report(done, self.gates)


def _check_stop(hooks: Hooks) -> None:
    """End where that was asked for while documents were read or weights fetched."""
    if hooks.stop():
        raise NothingKept("interrupted before the first measurement")


def _measure(evaluation: Evaluation, place: Workdir | None, hooks: Hooks) -> Measurement:
    """Read what the stores have not, and put the results together; in a folder, keep them."""
    options = evaluation.options
    variants = evaluation.lineup.variants
    names = {variant.label: "" for variant in variants}
    if place is not None:
        names = evaluation.stores(place)
    if options.kl:
        evaluation = replace(evaluation, reads=replace(evaluation.reads, against=names[BASE]))
    reads = evaluation.reads
    resumable = None if evaluation.lineup.held else place
    with _stores(names, resumable, on_disk=options.kl) as stores:
        wait_for_everyone()  # the first one has claimed the folder
        progress = _progress(evaluation, resumable, hooks)
        models = _models(evaluation, place, progress)
        done = Reader(models.computing, options).measure(variants, reads, stores, progress)
        if progress.rank != 0:
            return replace(done, path=progress.kept_in)
        if place is not None:
            units = [(v, unit) for v in variants for unit in reads.units(v)]
            kept = {f"{names[v.label]}/{name}" for v, unit in units for name in unit.files}
            rundir.keep_only(place.folder, kept)
        lm_eval = None
        if options.lm_eval:
            tokenizer = evaluation.encoder.tokenizer
            longest = reads.frame.longest
            lm_eval = harness.run_tasks(
                models.computing, tokenizer, options, longest, variants, stores
            )
        whole = assembled(evaluation, done, names, lm_eval)
        if place is not None:
            place.write_results()
            if resumable is None:
                rundir.write_stores(place.folder, {names[label]: stores[label] for label in names})
            rundir.save_run(place.folder, whole)
    measurable = replace(whole.without(whole.facts.not_measurable), resumed=progress.resumed)
    if place is None:
        return measurable
    manifest = workdir.read(place.folder)
    assert manifest is not None  # written by `write_results`
    return replace(measurable, manifest=manifest, path=place.folder)


@contextmanager
def _stores(
    names: Mapping[str, str], place: Workdir | None, *, on_disk: bool
) -> Iterator[dict[str, Store]]:
    """Yield the store of each variant, by its label: in the folder of a run that is resumed, else
    in memory, or for a while `on_disk` (the base's states are large)."""
    if place is not None:
        yield {label: rundir.store(place.folder, name) for label, name in names.items()}
    elif on_disk:
        # Windows does not delete what a virus scanner still reads.
        with tempfile.TemporaryDirectory(prefix="ropext-", ignore_cleanup_errors=True) as folder:
            yield {label: Store(Path(folder, label)) for label in names}
    else:
        yield {label: Store() for label in names}


def _progress(evaluation: Evaluation, place: Workdir | None, hooks: Hooks) -> Progress:
    """Begin to count; `place` is the folder of a run that can be resumed."""
    rank, world = rank_and_count()
    held = evaluation.lineup.held
    device = str(held.live.device) if held else device_of(evaluation.options)
    log = None if place is None else place.folder / USED
    return Progress(
        hooks=hooks if rank == 0 else replace(hooks, show=unseen),
        kept_in=None if place is None else place.output,
        nothing_kept=LIVE_KEPT_NOTHING if held else NOTHING_KEPT,
        rank=rank,
        world=world,
        used=partial(tell_used, log, hooks.say, device),
        guard=lambda what: memory_errors(out_of_memory(what)),
    )


def _models(evaluation: Evaluation, place: Workdir | None, progress: Progress) -> Models:
    """Return what loads the models of an evaluation, one at a time."""
    hooks = progress.hooks
    lineup = evaluation.lineup
    how = loading_of(evaluation.options, evaluation.trust_remote_code, lineup.masked)

    def load(snapshot: Snapshot) -> Any:
        with memory_errors(out_of_memory(f"the weights of {snapshot.name}")):
            hooks.say(f"loading {snapshot.name}")
            model = load_model(snapshot, how)
        if hooks.stop():  # asked for meanwhile
            raise progress.stopped()
        return model

    digests = dict[str, str]()  # of the adapters, by which a run's folder knows them
    for variant in lineup.variants:
        if variant.adapter is None or lineup.held is not None:
            continue
        if place is None:
            digests[variant.adapter] = adapter_digest(variant.adapter)
        else:
            content = place.decides["variants"][variant.label]
            digests[variant.adapter] = content["adapter_sha256"]
    return Models(load, digests)
