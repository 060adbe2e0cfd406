"""One evaluation as a job: read what is not there yet, assemble, report."""

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
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
from ropext.evaluation.live import held_by
from ropext.evaluation.plan import Evaluation
from ropext.evaluation.reader import Models, Progress, Reader
from ropext.models.load import device_of, load_model, loading_of, silenced
from ropext.models.memory import memory_errors, out_of_memory, tell_used
from ropext.models.processes import rank_and_count, wait_for_everyone
from ropext.narration import Call, Hooks, told_of_files, unseen
from ropext.report.evaluation import write_report
from ropext.results import BASE, rundir
from ropext.results.gates import Gate
from ropext.results.measurement import Measurement
from ropext.workdir import USED, Workdir

NOTHING_KEPT = "interrupted; nothing was kept (-o RUN keeps what is finished)"


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
        """Measure. With an output every finished piece is kept there, the same call goes on where
        it stopped, and the report is written while nobody else may write into the folder."""
        hooks = call.hooks
        rank, world = rank_and_count()
        if output is None and world > 1:
            raise UsageError("several processes share their work through a directory; give -o RUN")
        wait_for_everyone()  # so that one that is refused is noticed by the others
        _check_stop(hooks)
        evaluation = replace(self.evaluation, lineup=fetched(self.evaluation.lineup))
        _check_stop(hooks)
        read = {"MODEL": [variant.snapshot.directory for variant in evaluation.lineup.variants]}
        guard.check(read, {"--output": output})
        with ExitStack() as stack:
            room = output
            if room is None:
                room = Path(stack.enter_context(_temporary()), "run")
            place = evaluation.workdir(room, call.command, told_of_files(hooks.say))
            place = replace(place, is_temporary=output is None)
            stack.enter_context(place.claimed(call.force, rank, world, hooks.say))
            stack.enter_context(silenced())
            done = _measure(evaluation, place, output, hooks)
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


def _temporary() -> tempfile.TemporaryDirectory[str]:
    """Make a folder for what is not kept. Windows does not delete what a virus scanner still
    reads."""
    return tempfile.TemporaryDirectory(prefix="ropext-", ignore_cleanup_errors=True)


def _check_stop(hooks: Hooks) -> None:
    """End where that was asked for while documents were read or weights fetched."""
    if hooks.stop():
        raise NothingKept("interrupted before a model read anything")


def _measure(
    evaluation: Evaluation, place: Workdir, kept_in: Path | None, hooks: Hooks
) -> Measurement:
    """Read what is not there yet, and write the results beside it."""
    rank, world = rank_and_count()
    path = place.folder
    options = evaluation.options
    variants = evaluation.lineup.variants
    names = evaluation.stores(place)
    if options.kl:
        evaluation = replace(evaluation, reads=replace(evaluation.reads, against=names[BASE]))
    reads = evaluation.reads
    stores = {label: rundir.store(path, name) for label, name in names.items()}
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

    held = held_by(variants[-1].snapshot)
    device = device_of(options) if held is None else str(held.live.device)
    models = Models(load)
    progress = Progress(
        hooks=hooks if rank == 0 else replace(hooks, show=unseen),
        kept_in=kept_in,
        nothing_kept=NOTHING_KEPT,
        rank=rank,
        world=world,
        used=partial(tell_used, path / USED, hooks.say, device),
        guard=lambda what: memory_errors(out_of_memory(what)),
    )
    done = Reader(models.computing, options).measure(variants, reads, stores, progress)
    if rank != 0:
        return replace(done, path=kept_in)
    units = ((variant, unit) for variant in variants for unit in reads.units(variant))
    kept = [stores[variant.label].file(name) for variant, unit in units for name in unit.files]
    rundir.keep_only(path, kept)
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
