"""One evaluation from beginning to end: prepare, read, assemble. Only here is the order known."""

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from ropext import guard
from ropext.errors import UsageError
from ropext.evaluation import harness, loading
from ropext.evaluation.forward import Manner
from ropext.evaluation.manifest import stores_of, workdir_of
from ropext.evaluation.preparing import Settled, settle
from ropext.evaluation.reader import Progress, Reader
from ropext.evaluation.variants import Lineup, Variant, applied, fetched
from ropext.evaluation.work import processes, wait_for_everyone
from ropext.files import write_json, write_text
from ropext.narration import SILENT, Hooks, Say, unseen
from ropext.results import rundir
from ropext.results.gates import Gate
from ropext.results.losses import write_losses
from ropext.results.overlap import marked
from ropext.results.perplexity import (
    Reading,
    by_position,
    strided_values,
    text_values,
    verdicts,
)
from ropext.results.retrieval import (
    RULERS,
    ItemScore,
    heat_map,
    not_measurable,
    retrieval_values,
    ruler_tasks,
)
from ropext.results.stores import Store
from ropext.results.values import Value, values_json
from ropext.workdir import USED, Workdir

NOTHING_KEPT = "interrupted; nothing was kept (-o RUN keeps what is finished)"


@dataclass(frozen=True)
class Evaluation:
    """What came out; `path` is None where nothing was kept."""

    path: Path | None
    results: Mapping[str, Any] = field(repr=False)
    run: rundir.Run | None = field(repr=False)  # None in all processes but the first
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
    gates: Sequence[Gate] = (),
    losses: str | Path | None = None,
    report: Callable[[rundir.Run], None] = lambda run: None,
    **values: Any,
) -> Evaluation:
    """Measure a model on long text and by retrieval; `values` are the fields of Options.

    With `output` every finished piece is kept there, and the same call goes on where it stopped.
    `lineup` names the models to be read, where they are not those that follow from `model`.
    `gates` will be held against the result: one about what is not measured is refused here.
    `losses` is a parquet file for the loss of every token. `report` is given the run that was kept,
    while nobody else may write into its folder.
    """
    rank, world = processes()
    if output is None and world > 1:
        raise UsageError("several processes share their work through a directory; give -o RUN")
    wait_for_everyone()  # so that one that is refused is noticed by the others
    settled = settle(model, revision, trust_remote_code, values, lineup, gates)
    if losses is not None and settled.corpus is None:
        raise UsageError("--losses writes the loss of every token of --data; give documents")
    for warning in settled.warnings if rank == 0 else ():
        hooks.say(f"warning: {warning}")
    settled = replace(settled, lineup=fetched(settled.lineup))
    read = {"MODEL": [own.snapshot.directory for own in settled.lineup.variants]}
    guard.check(read, {"--output": output})
    with _claimed(settled, output, command, force, hooks.say) as place, loading.silenced():
        path = place.folder
        stores = {
            label: rundir.store(path, own) for label, own in stores_of(place, settled).items()
        }
        wait_for_everyone()  # the first one has claimed the folder
        kept_in = None if output is None else Path(output)
        seen = hooks if rank == 0 else replace(hooks, show=unseen)
        total = sum(settled.reads.tokens(own) for own in settled.lineup.variants)
        device = loading.device_of(settled.options)
        used = partial(loading.tell_used, path / USED, hooks.say, device)
        progress = Progress(total, seen, kept_in, NOTHING_KEPT, rank, world, used)
        more = _read_all(settled, stores, progress, hooks.say)
        wait_for_everyone()
        if rank != 0:
            return Evaluation(kept_in, {}, None)
        rundir.keep_only(path, _files(settled, stores))
        results = assemble(settled, path, stores, more)
        run = rundir.read_run(path)
        if losses is not None and settled.corpus is not None:
            texts = ((document.name, document.ids) for document in settled.corpus.documents)
            write_losses(Path(losses), texts, run.contenders)
        if output is None:
            return Evaluation(None, results, run, progress.resumed)
        report(run)
        return Evaluation(path, results, run, progress.resumed)


@contextmanager
def _claimed(
    settled: Settled, output: str | Path | None, command: Sequence[str], force: bool, say: Say
) -> Iterator[Workdir]:
    """The folder of the run; one that goes away with it where none is asked for."""
    with tempfile.TemporaryDirectory(prefix="ropext-eval-") as room:
        place = workdir_of(Path(output or f"{room}/run"), settled, command)
        with place.claimed(force, *processes(), say):
            yield place


def _read_all(
    settled: Settled, stores: Mapping[str, Store], progress: Progress, say: Say
) -> dict[str, Any]:
    """Every unit of every variant, one loaded model at a time; what else was measured."""
    more, longest = dict[str, Any](), settled.frame.longest
    manner: Manner | None = None
    for others in _by_weights(settled.lineup):
        own = others[0]
        what = f"the weights of {own.snapshot.name}"
        with loading.memory_errors(loading.out_of_memory(what)):
            say(f"loading {own.snapshot.name}")
            loaded = loading.load_model(
                own.snapshot, settled.options, settled.trust_remote_code, settled.lineup.masked
            )
        for variant in others:
            if variant.adapter is not None and not hasattr(loaded, "disable_adapter"):
                loaded = loading.add_adapter(loaded, variant.adapter)
            with applied(loaded, variant):
                reader = Reader(loaded, longest, settled.options, manner)
                manner = manner or reader.manner
                if not reader.is_split:
                    say(f"{variant.label}: this architecture is read whole, in chunks")
                _say_passes(settled, variant, say)
                reader.read(
                    settled.reads.units(variant), stores[variant.label], progress, _out_of_memory
                )
        if settled.options.lm_eval and progress.rank == 0:
            found = harness.run_tasks(
                loaded, settled.encoder.tokenizer, settled.options, longest, others, stores
            )
            more["lm_eval"] = more.get("lm_eval", {}) | found
    return more


def _out_of_memory(what: str) -> AbstractContextManager[None]:
    return loading.memory_errors(loading.out_of_memory(what))


def _by_weights(lineup: Lineup) -> list[list[Variant]]:
    """Variants grouped by the weights they need, adapters last (they change the model object)."""
    groups: dict[str, list[Variant]] = {}
    for own in lineup.variants:
        groups.setdefault(str(own.snapshot.directory), []).append(own)
    return [sorted(group, key=lambda own: own.adapter is not None) for group in groups.values()]


def _say_passes(settled: Settled, variant: Variant, say: Say) -> None:
    passes = len(variant.passes(settled.frame))
    if passes > 1 and settled.corpus is not None and settled.reads.masking is None:
        say(
            f"{variant.label}: its spectrum depends on the length; it is read in {passes} passes, "
            "each with the rotation held still"
        )


def _files(settled: Settled, stores: Mapping[str, Store]) -> list[Path]:
    """The files of all units."""
    return [
        stores[own.label].file(unit.name)
        for own in settled.lineup.variants
        for unit in settled.reads.units(own)
    ]


def assemble(
    settled: Settled, path: Path, stores: Mapping[str, Store], more: Mapping[str, Any]
) -> dict[str, Any]:
    """Write items.jsonl and results.json; the numbers depend on the units' files alone."""
    lineup, reads, frame = settled.lineup, settled.reads, settled.frame
    readings = dict[str, Reading]()
    if reads.documents:
        rundir.write_documents(path, reads.described, frame.longest)
        readings = {own.label: reads.reading(own, stores[own.label]) for own in lineup.variants}
    items = {own.label: reads.answers(own, stores[own.label]) for own in lineup.variants}
    if any(items.values()):
        _write_items(path, items)
    left_out = not_measurable(items, frame.context)
    items = {
        label: [own for own in scores if own.task not in left_out]
        for label, scores in items.items()
    }
    results = {
        "schema": rundir.SCHEMA,
        "protocol": settled.protocol.name,
        "protocol_text": settled.protocol.text,
        "headline": settled.protocol.headline,
        **({"mask_stride": frame.mask_stride} if frame.mask_stride else {}),
        "context": frame.context,
        "lengths": list(frame.lengths),
        "tail_tokens": frame.tail,
        "seed": settled.options.seed,
        "resamples": frame.bootstrap.resamples,
        "documents": settled.corpus.to_json() if settled.corpus else None,
        "warnings": [*settled.warnings, *left_out.values()],
        **({"not_measurable": left_out} if left_out else {}),
        **_ruler(items),
        "variants": {
            own.label: {"kind": own.kind, "model": own.snapshot.name, "target": own.target}
            | {"adapter": own.adapter}
            | {key: value for key, value in own.info.items() if key != "target"}
            | {"store": stores[own.label].file().name}
            | {"passes": own.regimes(frame) if reads.documents else {}}
            | _measured(settled, own, readings, items[own.label], stores[own.label])
            for own in lineup.variants
        },
        **more,
    }
    write_json(path / "results.json", results)
    return results


def _ruler(items: Mapping[str, Sequence[ItemScore]]) -> dict[str, Any]:
    """Of which of RULER's tasks `ruler@C` is the mean, and what it does not compare with."""
    names = {f"{own.task}@{own.length}": None for scores in items.values() for own in scores}
    tasks, left_out = ruler_tasks(names)
    return {"ruler": {"tasks": tasks, "left_out": left_out, "note": RULERS}} if tasks else {}


def _write_items(path: Path, items: Mapping[str, list[ItemScore]]) -> None:
    lines = [
        json.dumps({"variant": label} | score.to_json(), ensure_ascii=True)
        for label, scores in items.items()
        for score in scores
    ]
    write_text(path / "items.jsonl", "\n".join(lines) + "\n")


def _measured(
    settled: Settled,
    own: Variant,
    readings: Mapping[str, Reading],
    scores: Sequence[ItemScore],
    store: Store,
) -> dict[str, Any]:
    """All numbers of one variant."""
    reads, frame, values = settled.reads, settled.frame, dict[str, Value]()
    positions: list[dict[str, Any]] = []
    if reads.documents:
        reading, base = readings[own.label], None if own.kind == "base" else readings.get("base")
        values = text_values(frame, reads.described, reading, base)
        positions = by_position(frame, reading, base)
        if reads.is_strided and not own.reads_short:
            values |= strided_values(frame, reads.strides(store))
    overlap, in_text = settled.overlaps.get(own.label), settled.options.haystack == "text"
    name = marked(own.label, overlap.mark if overlap else "")
    values |= retrieval_values(scores, frame.context, frame.bootstrap) if scores else {}
    return {
        "metrics": values_json(values),
        "positions": values_json(positions),
        "retrieval": values_json(heat_map(scores)),
        "overlap": None if overlap is None else overlap.to_json() | {"questions": in_text},
        "verdicts": [] if own.reads_short else verdicts(frame, values, name),
    }
