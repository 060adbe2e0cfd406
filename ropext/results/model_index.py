"""Collect the measured figures of a checkpoint for its card on the hub.

They come from the sections of its own ropext.json, and from runs of `ropext eval` that read this
very checkpoint: the identity in a run's manifest must equal the directory's.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePath

from ropext.base.bundled import SCHEME
from ropext.base.errors import InputError
from ropext.base.jsontext import Json, read_values
from ropext.files.checkpoint import open_snapshot
from ropext.files.checkpoint.card import Figure
from ropext.files.checkpoint.digests import Digests
from ropext.files.checkpoint.provenance import Record, read_record
from ropext.options.fields import DOCUMENTS, TABLES
from ropext.results import BASE, UNTOUCHED
from ropext.results.gates import split_run_spec
from ropext.results.measurement import Measurement
from ropext.results.overlap import Overlap, marked_name, read_overlap
from ropext.results.retrieval import RULERS
from ropext.results.rundir import read_run
from ropext.results.values import Value, Values
from ropext.tasks import TASKS, THIRTEEN

_METRIC = re.compile(r"([a-z][a-z0-9_-]*)@([0-9]+)")
_DATASET_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
NOT_TRAINED = Overlap(0, 0, 0, (), complete=True)
UNKNOWN = Overlap(0, 0, 0, (), complete=False)  # for a record without this information


def card_figures(directory: str | Path, runs: Sequence[str] = ()) -> list[Figure]:
    """Return the metrics of a measured checkpoint with their intervals, for its model card. They
    come from kept runs, or else from its ropext.json. Raise InputError if these measurements in
    ropext.json are damaged."""
    measured = [figure for spec in runs for figure in _figures_of_run(spec, Path(directory))]
    record = read_record(Path(directory)) if not measured else None
    if record is None:
        return measured
    try:
        return list(_figures_of_record(record))
    except (AttributeError, IndexError, InputError, KeyError, TypeError, ValueError):
        raise InputError(
            f"{directory}: ropext.json is damaged: ropext does not write such measurements; "
            "give the numbers with --results RUN, or copy ropext.json again from the source of the "
            "checkpoint"
        ) from None


def _figures_of_record(record: Record) -> Iterator[Figure]:
    """Yield the measured results, metrics and intervals, that ropext.json keeps for a model card.
    They come from a run's evaluation, else from a fine-tuning. The numbers of a fit are over the
    documents that chose its step."""
    run = record.more.get("run")
    if isinstance(run, Mapping) and isinstance(measured := run.get("evaluation"), Mapping):
        last = list(measured["variants"].values())[-1]
        known = read_overlap(last.get("overlap"), "run") or NOT_TRAINED
        values = read_values(Values, last["metrics"], "run")
        yield from _figures_of_metrics(values, known.of_documents, None, measured["tail_tokens"])
        return
    tuned = record.more.get("finetune")
    numbers = tuned.get("numbers") if isinstance(tuned, Mapping) else None
    if tuned and isinstance(numbers, Mapping) and isinstance(numbers.get("tuned"), Mapping):
        known = read_overlap(tuned.get("overlap"), "finetune") or UNKNOWN
        values = read_values(Values, numbers["tuned"], "finetune")
        yield from _figures_of_metrics(values, known.of_documents, None, None)


def _figures_of_run(spec: str, directory: Path) -> Iterator[Figure]:
    """Yield the tail perplexities and retrieval scores of a kept run (RUN or RUN:VARIANT) with
    their intervals, for a model card. `ropext eval` made the run."""
    path, wanted = split_run_spec(spec)
    run = read_run(path)
    label = _label_of_checkpoint(run, directory, wanted)
    data = run.manifest["names"].get("data")
    shown, dataset_id = _dataset_name(data if isinstance(data, str) else None)
    shown = marked_name(shown, run.models[label].mark())
    yield from _figures_of_metrics(run.values(label), shown, dataset_id, run.frame.tail)


def _label_of_checkpoint(run: Measurement, directory: Path, wanted: str | None) -> str:
    """Return the label in results.json with the metrics of this directory's own config and weights.
    Raise InputError if no label or several remain."""
    content = Digests().of_checkpoint(open_snapshot(str(directory)))
    keys = ("config_sha256", "weights_sha256")
    shown = {model.source.renamed or label: label for label, model in run.models.items()}
    labels = [
        shown[name]
        for name, variant in run.manifest["decides"]["variants"].items()
        # A base in its short window, or files read with an adapter, are another model.
        if variant["kind"] != BASE and not variant.get("adapter_sha256")
        if all(variant["model"][key] == content[key] for key in keys)
    ]
    chosen = [label for label in labels if wanted in (None, label)]
    if not chosen:
        raise InputError(
            f"{run.path} did not measure {directory}{f' as {wanted!r}' if wanted else ''} (its "
            f"config or weights differ); evaluate it: ropext eval {directory} -o RUN"
        )
    if len(chosen) > 1:  # its own files read with the spectrum of before are another model too
        chosen = [label for label in chosen if run.models[label].kind != UNTOUCHED] or chosen
    if len(chosen) > 1:
        raise InputError(
            f"{run.path} measured the same files under several names ({', '.join(chosen)}); say "
            f"which one {directory} is: --results {run.path}:{chosen[-1]}"
        )
    return chosen[0]


def _dataset_name(data: str | None) -> tuple[str, str | None]:
    """Return the name of the documents behind a perplexity for a model card. Return their id, too,
    if the hub has it."""
    if data is None:
        return "retrieval", None
    if data.startswith(SCHEME):
        return data, None
    suffix = PurePath(data).suffix
    is_file = Path(data).exists() or suffix in DOCUMENTS or suffix in TABLES
    if _DATASET_ID.fullmatch(data) and not is_file:
        return data, data
    return PurePath(data).name, None


def _figures_of_metrics(
    values: Mapping[str, Value], dataset: str, dataset_id: str | None, tail: int | None
) -> Iterator[Figure]:
    """Yield the metrics of a model card with intervals: tail perplexities, and retrieval scores."""
    tasks = {task.name: task for task in TASKS}
    for key, value in values.items():
        matched = _METRIC.fullmatch(key)
        if not matched or not math.isfinite(value.value):
            continue
        name = matched[1]
        length = int(matched[2])
        details = dict[str, Json](n=value.n)
        if value.ci95:
            details["ci95"] = list(value.ci95)
        if name == "tail":
            last = "last tokens before"
            if tail:
                last = f"last {min(tail, length)} tokens before"
            title = f"tail perplexity at {length:,} tokens ({last} it)"
            yield Figure(dataset, "perplexity", title, value.value, details, dataset_id)
        elif name in tasks:
            scored = "exact answers"
            if tasks[name].in_words:
                scored = "share of what is asked for that is named"
            if name in THIRTEEN:
                scored += f" ({RULERS})"
            title = f"{name} retrieval at {length:,} tokens, {scored}"
            yield Figure(f"ropext {name}", "accuracy", title, value.value, details)
