"""One evaluation from beginning to end: prepare, read, assemble. Only here is the order known."""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ropext.errors import UsageError
from ropext.evaluation import borrowing, costs, harness, loading
from ropext.evaluation.assembling import assemble
from ropext.evaluation.estimating import MIB, asked_lengths, work_of
from ropext.evaluation.forward import Manner, TokenScorer
from ropext.evaluation.pinning import pass_lengths
from ropext.evaluation.preparing import workdir_of
from ropext.evaluation.reading import Reader, Unit
from ropext.evaluation.setting import Setting, settle
from ropext.evaluation.variants import Lineup, Variant, applied, fetched
from ropext.evaluation.work import Progress, Worker, processes, wait_for
from ropext.narration import Say, Show, silent, unseen
from ropext.report.evaluation import write_report
from ropext.results import rundir
from ropext.results.gates import Gate
from ropext.workdir import MANIFEST, Workdir


@dataclass(frozen=True)
class Hooks:
    """How an evaluation speaks with whoever started it."""

    say: Say = silent
    show: Show = unseen
    stop: Callable[[], bool] = lambda: False


SILENT = Hooks()


@dataclass(frozen=True)
class Evaluation:
    """What came out; `path` is None where nothing was kept."""

    path: Path | None
    results: Mapping[str, Any]
    run: rundir.Run | None  # None in all processes but the first
    resumed: int = 0


def evaluate(
    model: str,
    output: str | Path | None = None,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    force: bool = False,
    command: Sequence[str] = (),
    hooks: Hooks = SILENT,
    lineup: Lineup | None = None,
    earlier: Sequence[Path] = (),
    gates: Sequence[Gate] = (),
    **values: Any,
) -> Evaluation:
    """Measure a model on long text and by retrieval; `values` are the fields of Options.

    With `output` every finished piece is kept there, and the same call goes on where it stopped.
    `lineup` names the models to be read, where they are not those that follow from `model`; what
    an `earlier` run directory has of the same model on the same tokens is not read again. `gates`
    will be held against the result: one about what is not measured is refused here.
    """
    rank, world = processes()
    if output is None and world > 1:
        raise UsageError("several processes share their work through a directory; give -o RUN")
    setting = settle(model, revision, trust_remote_code, values, lineup, gates)
    for warning in setting.prepared.warnings if rank == 0 else ():
        hooks.say(f"warning: {warning}")
    setting = replace(setting, lineup=fetched(setting.lineup))
    with _claimed(setting, output, command, force) as place, loading.silenced():
        path = place.folder
        if rank == 0:
            for other in earlier:
                borrowing.borrow(path, place.decides, other)
        else:
            wait_for(path / MANIFEST, place.has_begun, hooks.stop)
        worker = Worker(
            Progress(_expected_tokens(setting), hooks.show if rank == 0 else Hooks.show),
            hooks.stop,
            Path(output) if output is not None else None,
        )
        passes, more = _read_all(setting, path, worker, hooks)
        if rank != 0:
            return Evaluation(Path(output) if output else None, {}, None)
        worker.wait_for_others()
        results = _assembled(setting, path, passes, more)
        run = rundir.read_run(path)
        if output is None:
            return Evaluation(None, results, run, worker.resumed)
        write_report(run)
        return Evaluation(path, results, run, worker.resumed)


def _assembled(
    setting: Setting, path: Path, passes: dict[str, dict[str, int]], more: Mapping[str, Any]
) -> dict[str, Any]:
    """Everything is read: from the files of the units to the results."""
    prepared = setting.prepared
    if prepared.documents is not None:
        rundir.write_documents(path, prepared.documents, prepared.frame.longest)
    return assemble(path, setting.lineup, setting.options, prepared, passes, more)


@contextmanager
def _claimed(
    setting: Setting, output: str | Path | None, command: Sequence[str], force: bool
) -> Iterator[Workdir]:
    """The folder of the run; one that goes away with it where none is asked for."""
    with tempfile.TemporaryDirectory(prefix="ropext-eval-") as room:
        place = workdir_of(
            Path(output or f"{room}/run"),
            setting.lineup,
            setting.options,
            setting.prepared,
            setting.tokenizer,
            command,
        )
        with place.claimed(force, *processes()):
            yield place


def _expected_tokens(setting: Setting) -> int:
    return sum(part.passes * part.tokens for part in work_of(setting))


def _read_all(
    setting: Setting, path: Path, worker: Worker, hooks: Hooks
) -> tuple[dict[str, dict[str, int]], dict[str, Any]]:
    """Every unit of every variant, one loaded model at a time."""
    import torch

    passes, more = dict[str, dict[str, int]](), dict[str, Any]()
    longest = setting.prepared.frame.longest
    manner: Manner | None = None
    for own, others in _by_weights(setting.lineup):
        what = f"the weights of {own.snapshot.name}"
        with loading.memory_errors(loading.out_of_memory(what)):
            hooks.say(f"loading {own.snapshot.name}")
            loaded = loading.load_model(own.snapshot, setting.options, setting.trust_remote_code)
        for variant in others:
            if variant.adapter is not None and not hasattr(loaded, "disable_adapter"):
                loaded = loading.add_adapter(loaded, variant.adapter)
            with torch.inference_mode(), applied(loaded, variant):
                manner = manner or _manner(setting, loaded)
                scorer = TokenScorer(loaded, manner)
                if not scorer.self_check().split:
                    hooks.say(f"{variant.label}: this architecture is read whole, in chunks")
                reader = Reader(path, variant.label, loaded, scorer)
                passes[variant.label] = _passes(setting, variant, loaded, hooks)
                worker.do(_units(setting, variant, reader, passes[variant.label]))
        if setting.options.lm_eval and worker.rank == 0 and any(not v.is_base for v in others):
            found = harness.run_tasks(
                loaded, setting.tokenizer, setting.options, longest, others, path
            )
            more["lm_eval"] = more.get("lm_eval", {}) | found
    ordered = {own.label: passes[own.label] for own in setting.lineup.variants}
    return ordered, more


def _by_weights(lineup: Lineup) -> list[tuple[Variant, list[Variant]]]:
    """Variants grouped by the weights they need, adapters last (they change the model object)."""
    groups: dict[str, list[Variant]] = {}
    for own in lineup.variants:
        groups.setdefault(str(own.snapshot.directory), []).append(own)
    return [
        (group[0], sorted(group, key=lambda own: own.adapter is not None))
        for group in groups.values()
    ]


def _manner(setting: Setting, loaded: Any) -> Manner:
    options = setting.options
    return costs.choose_manner(
        costs.shape_of(loaded),
        setting.prepared.frame.longest,
        loading.free_memory(loaded.get_input_embeddings().weight.device),
        options.chunk,
        options.slice_memory * MIB,
    )


def _passes(setting: Setting, variant: Variant, loaded: Any, hooks: Hooks) -> dict[str, int]:
    """The regimes of a variant, each with its pass length."""
    frame = setting.prepared.frame
    if setting.prepared.documents is None:
        return {}
    if variant.is_base:
        return {"short": frame.longest}
    lengths = pass_lengths(loaded, asked_lengths(frame))
    if len(lengths) > 1:
        hooks.say(
            f"{variant.label}: its spectrum depends on the length; it is read in "
            f"{len(lengths)} passes, each with the rotation held still"
        )
    return {f"pass-{length}": length for length in lengths}


def _units(
    setting: Setting, variant: Variant, reader: Reader, passes: Mapping[str, int]
) -> Iterator[Unit]:
    frame, corpus = setting.prepared.frame, setting.prepared.corpus
    for document in corpus.documents if corpus else ():
        if variant.is_base:
            yield reader.short(document, frame.context)
            continue
        for length in passes.values():
            yield reader.whole(document, length)
        if setting.options.protocol == "hf-stride":
            for length in frame.lengths:
                yield reader.strided(document, length)
    if not variant.is_base:
        for group in setting.prepared.questions:
            yield reader.questions(group, setting.prepared.bos)
