"""One evaluation from beginning to end: prepare, read, assemble. Only here is the order known."""

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from ropext import guard
from ropext.errors import UsageError
from ropext.evaluation import harness, loading
from ropext.evaluation.costs import manner_of, work_of
from ropext.evaluation.forward import Manner, TokenScorer
from ropext.evaluation.manifest import stores_of, workdir_of
from ropext.evaluation.preparing import Settled, settle
from ropext.evaluation.reading import (
    Unit,
    UnitMaker,
    forward_tokens,
    hf_stride,
    questions_name,
    read_pass,
    read_short,
    read_strided,
    short_windows,
    strided_windows,
)
from ropext.evaluation.variants import Lineup, Variant, applied, fetched
from ropext.evaluation.work import Worker, processes, wait_for
from ropext.files import write_json, write_text
from ropext.narration import SILENT, Hooks, Say
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
from ropext.results.values import Value, values_json
from ropext.workdir import MANIFEST, USED, Workdir


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
    settled = settle(model, revision, trust_remote_code, values, lineup, gates)
    if losses is not None and settled.corpus is None:
        raise UsageError("--losses writes the loss of every token of --data; give documents")
    for warning in settled.warnings if rank == 0 else ():
        hooks.say(f"warning: {warning}")
    settled = replace(settled, lineup=fetched(settled.lineup))
    read = {"MODEL": [own.snapshot.directory for own in settled.lineup.variants]}
    guard.check(read, {"--output": output})
    with _claimed(settled, output, command, force, hooks.say) as place, loading.silenced():
        path, stores = place.folder, stores_of(place, settled.lineup)
        if rank != 0:
            wait_for(path / MANIFEST, place.has_begun, hooks.stop)
        device = loading.device_of(settled.options)
        worker = Worker(
            sum(part.passes * part.tokens for part in work_of(settled)),
            hooks.show if rank == 0 else Hooks.show,
            hooks.stop,
            Path(output) if output is not None else None,
            partial(loading.tell_used, path / USED, hooks.say, device),
        )
        more = _read_all(settled, path, stores, worker, hooks)
        if rank != 0:
            return Evaluation(Path(output) if output else None, {}, None)
        worker.wait_for_others()
        rundir.keep_only(path, worker.units)
        results = assemble(settled, path, stores, more)
        run = rundir.read_run(path)
        if losses is not None and settled.corpus is not None:
            texts = ((document.name, document.ids) for document in settled.corpus.documents)
            write_losses(Path(losses), texts, run.contenders)
        if output is None:
            return Evaluation(None, results, run, worker.resumed)
        report(run)
        return Evaluation(path, results, run, worker.resumed)


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
    settled: Settled, path: Path, stores: Mapping[str, str], worker: Worker, hooks: Hooks
) -> dict[str, Any]:
    """Every unit of every variant, one loaded model at a time; what else was measured."""
    import torch

    more, longest = dict[str, Any](), settled.frame.longest
    manner: Manner | None = None
    for others in _by_weights(settled.lineup):
        own = others[0]
        what = f"the weights of {own.snapshot.name}"
        with loading.memory_errors(loading.out_of_memory(what)):
            hooks.say(f"loading {own.snapshot.name}")
            loaded = loading.load_model(
                own.snapshot, settled.options, settled.trust_remote_code, settled.lineup.masked
            )
        for variant in others:
            if variant.adapter is not None and not hasattr(loaded, "disable_adapter"):
                loaded = loading.add_adapter(loaded, variant.adapter)
            with torch.inference_mode(), applied(loaded, variant):
                manner = manner or manner_of(loaded, longest, settled.options)
                scorer = TokenScorer(loaded, manner)
                if not scorer.self_check().split:
                    hooks.say(f"{variant.label}: this architecture is read whole, in chunks")
                maker = UnitMaker(rundir.store(path, stores[variant.label]), variant.label, scorer)
                worker.do(_units(settled, variant, maker, _passes(settled, variant, hooks)))
        if settled.options.lm_eval and worker.rank == 0 and any(not v.reads_short for v in others):
            places = {own: rundir.store(path, name) for own, name in stores.items()}
            found = harness.run_tasks(
                loaded, settled.encoder.tokenizer, settled.options, longest, others, places
            )
            more["lm_eval"] = more.get("lm_eval", {}) | found
    return more


def _by_weights(lineup: Lineup) -> list[list[Variant]]:
    """Variants grouped by the weights they need, adapters last (they change the model object)."""
    groups: dict[str, list[Variant]] = {}
    for own in lineup.variants:
        groups.setdefault(str(own.snapshot.directory), []).append(own)
    return [sorted(group, key=lambda own: own.adapter is not None) for group in groups.values()]


def _passes(settled: Settled, variant: Variant, hooks: Hooks) -> dict[str, int]:
    """The regimes of a variant, each with its pass length."""
    if settled.documents is None:
        return {}
    found = variant.regimes(settled.frame)
    if len(found) > 1 and settled.masking is None:
        hooks.say(
            f"{variant.label}: its spectrum depends on the length; it is read in "
            f"{len(found)} passes, each with the rotation held still"
        )
    return found


def _units(
    settled: Settled, variant: Variant, maker: UnitMaker, passes: Mapping[str, int]
) -> Iterator[Unit]:
    frame, masking = settled.frame, settled.masking
    for document in settled.corpus.documents if settled.corpus else ():
        if variant.reads_short and masking is None:
            tokens = forward_tokens(short_windows(frame.longest, frame.context))
            yield maker.array(document, "short", tokens, read_short, frame.context)
            continue
        for regime, length in passes.items():
            tokens = length * (frame.mask_stride or 1)
            yield maker.array(document, regime, tokens, read_pass, length, masking, frame.tail)
        for size in frame.lengths if settled.options.protocol == "hf-stride" else ():
            tokens = forward_tokens(strided_windows(frame.longest, size, hf_stride(size)))
            yield maker.array(document, f"stride-{size}", tokens, read_strided, size)
    for group in settled.questions if not variant.reads_short else ():
        yield maker.questions(group, settled.encoder.bos, settled.encoder.decode)


def read_items(settled: Settled, store: Path) -> list[ItemScore]:
    """All scored questions of a variant, in a fixed order."""
    names = [questions_name(group, settled.encoder.bos) for group in settled.questions]
    rows = [
        ItemScore.from_json(row)
        for name in names
        for row in json.loads((store / "items" / name).read_text(encoding="utf-8"))
    ]
    return sorted(rows, key=lambda own: (own.task, own.length, own.index, own.depth or 0.0))


def assemble(
    settled: Settled,
    path: Path,
    stores: Mapping[str, str],
    more: Mapping[str, Any],
) -> dict[str, Any]:
    """Write items.jsonl and results.json; the numbers depend on the units' files alone."""
    lineup, frame = settled.lineup, settled.frame
    readings, passes = dict[str, Reading](), dict[str, dict[str, int]]()
    if (documents := settled.documents) is not None:
        rundir.write_documents(path, documents, frame.longest)
        passes = {own.label: own.regimes(frame) for own in lineup.variants}
        readings = {
            label: rundir.read_reading(path, stores[label], label, documents, own, frame.longest)
            for label, own in passes.items()
        }
    items = {
        own.label: []
        if own.reads_short
        else read_items(settled, rundir.store(path, stores[own.label]))
        for own in lineup.variants
    }
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
            | {"store": stores[own.label], "passes": passes.get(own.label, {})}
            | _measured(settled, path, own, readings, items[own.label], stores[own.label])
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
    path: Path,
    own: Variant,
    readings: Mapping[str, Reading],
    scores: Sequence[ItemScore],
    store: str,
) -> dict[str, Any]:
    """All numbers of one variant."""
    frame, options, values = settled.frame, settled.options, dict[str, Value]()
    positions: list[dict[str, Any]] = []
    if settled.documents is not None:
        reading, base = readings[own.label], None if own.kind == "base" else readings.get("base")
        values = text_values(frame, settled.documents, reading, base)
        positions = by_position(frame, reading, base)
        if options.protocol == "hf-stride" and not own.reads_short:
            regimes = {f"stride-{length}": length for length in frame.lengths}
            strides = rundir.read_reading(
                path, store, own.label, settled.documents, regimes, frame.longest
            )
            values |= strided_values(frame, strides.passes)
    overlap, in_text = settled.overlaps.get(own.label), options.haystack == "text"
    name = marked(own.label, overlap.mark if overlap else "")
    values |= retrieval_values(scores, frame.context, frame.bootstrap) if scores else {}
    return {
        "metrics": values_json(values),
        "positions": values_json(positions),
        "retrieval": values_json(heat_map(scores)),
        "overlap": None if overlap is None else overlap.to_json() | {"questions": in_text},
        "verdicts": [] if own.reads_short else verdicts(frame, values, name),
    }
