"""Read and write an evaluation's files in its folder, which `workdir` owns: arrays, items and
results.

    documents.json                         names, token hashes by length
    documents/HASH.npy                     bytes of text per token
    variants/STORE/pass-LENGTH/HASH.npy    NLL of every token, one pass of that length
    variants/STORE/short/HASH.npy          NLL through the short window
    variants/STORE/stride-LENGTH/HASH.npy  weighted sum and weight of the strided loop
    variants/STORE/items/UNIT.json         retrieval scores
    items.jsonl, results.json, report.md, report.html, plots/*.png

A unit of work is one file under variants/. It is written under a temporary name and renamed, so an
existing file is complete. It holds its own digest, and a resumed run does not use it if it was
edited or damaged since. A store's name holds the label of its variant and a digest of everything
that decides its units, so its files never belong to another model. No file here holds a time.
"""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import BinaryIO, TypeVar

import numpy as np
import numpy.typing as npt

from ropext.base import guard, workdir
from ropext.base.atomic import write_text, write_whole
from ropext.base.errors import GateFailed, InputError, NotMeasured, UsageError
from ropext.base.jsontext import (
    JsonObject,
    fields_of,
    read_json,
    read_values,
    values_json,
    write_json,
)
from ropext.base.workdir import STORES
from ropext.results import BASE, EXTENDED, SCHEMA, SHORT, UNTOUCHED
from ropext.results.gates import (
    Gate,
    Outcome,
    check_gate,
    concerned_labels,
    split_run_spec,
    why_no_model,
)
from ropext.results.measurement import (
    MeasuredModel,
    Measurement,
    Store,
    check_labels,
    join_measurements,
    loss_file_name,
)
from ropext.results.numbers import EvaluationFacts, ModelNumbers, ModelSource
from ropext.results.overlap import read_overlap
from ropext.results.perplexity import SHORT_WINDOW, LossStatistics, MeasuredDocuments, Scoring
from ropext.results.retrieval import ItemScore
from ropext.results.values import Bootstrap

DOCUMENTS = "documents.json"
ITEMS = "items.jsonl"
RESULTS = "results.json"
READ = (DOCUMENTS, ITEMS, RESULTS, "documents/", STORES)  # the files that are read; a report is not
AGAIN = "; evaluate again"
Part = TypeVar("Part", EvaluationFacts, ModelSource, ModelNumbers)
# The keys of a model in results.json besides its extension.
_OF_A_MODEL = {part.name for part in fields(ModelSource) + fields(ModelNumbers)}
_OF_A_MODEL |= {"kind", "unrounded", "overlap"}
Texts = Iterable[tuple[str, npt.NDArray[np.integer]]]  # name and token ids of each document read


def write_documents(path: Path, documents: MeasuredDocuments, longest: int) -> None:
    """Write documents.json of a run, and the bytes per token of each document."""
    rows = []
    for name, hashes, counts in zip(
        documents.names, documents.prefix_hashes, documents.token_bytes, strict=True
    ):
        by_length = {str(length): digest for length, digest in hashes.items()}
        rows.append({"name": name, "hashes": by_length})
        write = partial(np.save, arr=counts.astype(np.int32), allow_pickle=False)
        write_whole(path / _bytes_file_name(hashes[longest]), write)
    write_json(path / DOCUMENTS, rows)


def write_losses(path: Path, texts: Texts, measured: Measurement) -> None:
    """Write a run's token losses as the parquet table of --losses. It has a row for each token that
    a variant scored, as read at the longest length."""
    import pyarrow
    from pyarrow import parquet

    names = pyarrow.dictionary(pyarrow.int32(), pyarrow.string())
    schema = pyarrow.schema(
        {
            "document": names,
            "position": pyarrow.int32(),
            "token": pyarrow.int32(),
            "loss": pyarrow.float32(),
            "variant": names,
        }
    )
    texts = list(texts)

    def write(stream: BinaryIO) -> None:
        """Write the table of --losses: the token losses of all variants, then the sign of
        ropext."""
        with parquet.ParquetWriter(stream, schema) as writer:
            for label, reading in measured.readings.items():
                losses = reading.tokens(0, measured.frame.longest)  # from position 1 on
                for (name, ids), nll in zip(texts, losses, strict=True):
                    scored = np.flatnonzero(np.isfinite(nll))
                    columns = [
                        [name] * len(scored),
                        scored + 1,
                        ids[scored + 1],
                        nll[scored],
                        [label] * len(scored),
                    ]
                    writer.write_table(pyarrow.table(columns, schema=schema))
            sign = guard.LOSSES
            writer.add_key_value_metadata({"made": sign.begin + sign.blank})
        guard.put_digest(stream, sign)

    write_whole(path, write)


def variant_store(path: Path, name: str) -> Store:
    """Return the store of one variant's losses and answers in a run."""
    return Store(path / STORES / name)


def write_stores(path: Path, stores: Mapping[str, Store]) -> None:
    """Write the losses and answers behind results.json next to it in a kept run, if they were read
    elsewhere. `stores` gives their names."""
    for name, held in stores.items():
        held.write_files(path / STORES / name)


def remove_unused_units(path: Path, units: Collection[str]) -> None:
    """Delete the losses and answers of an earlier run that this run does not use; `units` are files
    below variants/."""
    names = {STORES + unit for unit in units}

    def stays(name: str) -> bool:
        """Return whether a run keeps a file. It keeps its own losses and answers, files outside
        variants/, and scores of lm-evaluation-harness."""
        return name in names or not name.startswith(STORES) or "/lm-eval/" in name

    workdir.remove(path, stays)


def read_run(path: Path) -> Measurement:
    """Read a finished run directory. Refuse it by name if a file is missing, torn, or not as
    ropext wrote it."""
    measured = read_unchecked_run(path)
    remarks = tuple(no_digest_warnings(path))
    if not remarks:
        _check_digests(path)
    facts = replace(measured.facts, warnings=(*measured.facts.warnings, *remarks))
    return replace(measured, facts=facts)


def _listed_digests(path: Path) -> JsonObject:
    """Return the digests that run.json lists for results.json and other files, by file name."""
    files: JsonObject = (workdir.sealed(path) or {}).get(guard.FILES, {})
    return files


def no_digest_warnings(path: Path) -> Iterator[str]:
    """Yield a warning if the run.json of a run lists no digest of its results.json."""
    if RESULTS not in _listed_digests(path):
        yield (
            f"[no-digest] {path}: {workdir.MANIFEST} lists no digest of {RESULTS}, so ropext "
            "cannot notice an edit; the same ropext eval with --force writes one"
        )


def _check_digests(path: Path) -> None:
    """Raise InputError if a file of a run is not as its run.json lists it."""
    listed = _listed_digests(path)
    there = {name for name in (DOCUMENTS, ITEMS) if (path / name).exists()}
    names = [name for name in sorted({*listed, *there}) if name.startswith(READ)]
    edited = [name for name in names if not guard.is_in_state(path / name, listed.get(name))]
    if edited:
        raise InputError(
            f"{path} holds files that were edited, added or deleted since ropext wrote it: "
            f"{guard.shown(edited)}; restore them, or run the same ropext eval with --force"
        )


def read_unchecked_run(path: Path) -> Measurement:
    """Return a finished run without a check of its files' digests: one that this process has just
    written, or that `read_run` checks. Raise InputError if a part is missing or damaged."""
    workdir.check_seal(path)
    manifest = workdir.read(path)
    if manifest is None or manifest["command"] != "eval":
        raise InputError(
            f"{path} has no results of ropext eval; name a directory that ropext eval -o wrote"
        )
    if not (path / RESULTS).exists():
        raise InputError(f"{path} is not finished; run the same ropext eval again to complete it")
    results = read_json(path / RESULTS)
    if not isinstance(results, dict):
        raise InputError(f"{path / RESULTS} is damaged: it is no JSON object; evaluate again")
    if results.get("schema") != SCHEMA:
        raise InputError(
            f"{path}/results.json has schema {results.get('schema')!r}; this ropext reads {SCHEMA}"
        )
    return _read_measurement(path, manifest, results)


@contextmanager
def _naming_damage(place: Path) -> Iterator[None]:
    """Raise InputError with the path of the run, or of the file in it, if a part is missing or
    damaged."""
    try:
        yield
    except KeyError as error:
        missing = f"the key {error.args[0]!r} is missing"
        raise InputError(f"{place} is damaged: {missing}; evaluate again") from error
    except (AttributeError, TypeError, ValueError, OSError) as error:
        raise InputError(f"{place} is damaged: {error!r}; evaluate again") from error


def save_run(path: Path, measured: Measurement) -> None:
    """Write documents.json, items.jsonl and results.json of an evaluation."""
    if measured.documents is not None:
        write_documents(path, measured.documents, measured.frame.longest)
    lines = list[str]()
    for label, model in measured.models.items():
        for item in model.items:
            lines.append(json.dumps({"variant": label} | values_json(item)))
    if lines:
        write_text(path / ITEMS, "\n".join(lines) + "\n")
    write_json(path / RESULTS, measured.results)


def _read_measurement(path: Path, manifest: JsonObject, results: JsonObject) -> Measurement:
    """Return the measurement that the files of a run hold: results.json, documents.json,
    items.jsonl and arrays."""
    written = dict[str, MeasuredModel]()
    with _naming_damage(path / RESULTS):
        frame = _read_statistics(results)
        facts = _read_part(EvaluationFacts, results, path)
        for label, variant in results["variants"].items():
            written[label] = _written_model(variant, path)
    documents = None
    hashes = list[str]()
    if (path / DOCUMENTS).exists():
        documents = _read_documents(path, frame)
        hashes = [prefixes[frame.longest] for prefixes in documents.prefix_hashes]
    with _naming_damage(path / ITEMS):
        items = _read_items(path, facts.not_measurable)
    models = dict[str, MeasuredModel]()
    for label, model in written.items():
        source = model.source
        reading = None
        divergence = None
        agreement = None
        if documents is not None and source.passes:
            kept = variant_store(path, source.store)
            with _naming_damage(path):
                reading = kept.reading(label, source.passes, hashes)
                if source.against:
                    compared = kept.compared(label, source.against, source.passes, hashes)
                    divergence, agreement = compared
        models[label] = replace(
            model,
            reading=reading,
            divergence=divergence,
            agreement=agreement,
            items=tuple(items.get(label, ())),
        )
    return Measurement(frame, models, documents, facts, manifest, path)


def _read_statistics(results: JsonObject) -> LossStatistics:
    """Return the trained context, lengths, tail, bootstrap and scoring of results.json, from which
    its losses become numbers; raise ValueError if it states no lengths."""
    lengths = tuple(int(length) for length in results["lengths"])
    if not lengths:
        raise ValueError("no lengths")
    return LossStatistics(
        context=int(results["context"]),
        lengths=lengths,
        tail=int(results["tail_tokens"]),
        bootstrap=Bootstrap(int(results["seed"]), int(results["resamples"])),
        scoring=Scoring(int(results.get("mask_stride", 0))),
    )


def _written_model(variant: JsonObject, path: Path) -> MeasuredModel:
    """Return a model from its entry under `variants` in results.json."""
    source = _read_part(ModelSource, variant, path)
    info = {key: value for key, value in variant.items() if key not in _OF_A_MODEL}
    return MeasuredModel(
        kind=variant["kind"],
        unrounded=variant.get("unrounded", ""),
        overlap=read_overlap(variant.get("overlap"), path / RESULTS),
        source=replace(source, info=info),
        numbers=_read_part(ModelNumbers, variant, path),
    )


def _read_part(kind: type[Part], data: JsonObject, path: Path) -> Part:
    """Return one dataclass from an object in results.json; raise KeyError if a key is missing that
    the dataclass always writes."""
    part = read_values(kind, data, path / RESULTS, AGAIN)
    for key in fields_of(kind()):
        if key not in data:
            raise KeyError(key)
    return part


def _read_items(path: Path, left_out: Collection[str]) -> dict[str, list[ItemScore]]:
    """Return the answers of each model in items.jsonl, without the answers to some tasks."""
    items = dict[str, list[ItemScore]]()
    if not (path / ITEMS).exists():
        return items
    for line in (path / ITEMS).read_text(encoding="utf-8").splitlines():
        data = json.loads(line)
        if data["task"] not in left_out:
            label = data.pop("variant")
            item = read_values(ItemScore, data, path / ITEMS, AGAIN)
            items.setdefault(label, []).append(item)
    return items


def _read_documents(path: Path, frame: LossStatistics) -> MeasuredDocuments:
    """Return the documents of documents.json with the number of bytes of each of their tokens."""
    names = list[str]()
    prefix_hashes = list[Mapping[int, str]]()
    files = list[str]()
    with _naming_damage(path / DOCUMENTS):
        for row in read_json(path / DOCUMENTS):
            hashes = {int(length): digest for length, digest in row["hashes"].items()}
            names.append(row["name"])
            prefix_hashes.append(hashes)
            files.append(_bytes_file_name(hashes[frame.longest]))
    token_bytes = list[npt.NDArray[np.int64]]()
    with _naming_damage(path):
        for file in files:
            token_bytes.append(Store(path).get(file).astype(np.int64))
    return MeasuredDocuments(tuple(names), tuple(prefix_hashes), tuple(token_bytes))


def _bytes_file_name(document_hash: str) -> str:
    """Return the name in a run of the .npy file with the number of bytes of each token of a
    document."""
    return loss_file_name("documents", document_hash)


@dataclass(frozen=True)
class _ComparedModel:
    """One model of a comparison, with its run."""

    run: Measurement
    label: str
    place: str  # path of the run; the number of a result that has none
    base: int  # number of the first run with the same base
    own_base: str = ""  # its name in the comparison, if that shows it

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of a model in `ropext compare`, the shortest first: variant,
        run:variant, path:variant."""
        return self.label, f"{Path(self.place).name}:{self.label}", f"{self.place}:{self.label}"


@dataclass(frozen=True)
class OpenedRuns:
    """The runs of a comparison in their order, and the models that it compares by their names."""

    runs: Sequence[Measurement]
    models: Mapping[str, _ComparedModel]

    @property
    def alone(self) -> dict[str, Measurement]:
        """Return each compared model alone under its name."""
        alone = dict[str, Measurement]()
        for name, each in self.models.items():
            alone[name] = replace(each.run.only(each.label, name), own_base=each.own_base)
        return alone

    @property
    def variants(self) -> set[str]:
        """Return the labels of all variants of the runs that a comparison opened."""
        return {label for run in self.runs for label in run.models}

    def judge(self, gates: Sequence[Gate]) -> list[Outcome]:
        """Judge gates on the compared models, each under its name. A gate without a variant is
        about the extended models that are compared of each run, else the untouched."""
        named = dict[object, tuple[Measurement, dict[str, str]]]()
        for name, each in self.models.items():
            names = named.setdefault(_place(each.run) or id(each.run), (each.run, {}))[1]
            names.setdefault(each.label, name)
        return _judge_named(list(named.values()), gates)


def open_runs_to_compare(
    given: Sequence[str | Measurement], labels: Mapping[str, str] | None = None
) -> OpenedRuns:
    """Open the runs, and give each of their models a label that identifies it.

    Runs of one base share its short window, and one row shows it. Another base has its own row, and
    its models are compared with it. `labels` are the user's own, by the labels that models get
    without them.
    """
    runs = list[Measurement]()
    everyone = list[_ComparedModel]()
    bases = list[int]()  # of each run
    has_base = set[int]()  # the bases that a run brought
    read_short = list[Measurement]()
    for number, each in enumerate(given, 1):
        run, wanted = _open_run(each)
        same = (bases[place] for place, other in enumerate(runs) if _have_same_base(run, other))
        base = next(same, number)
        runs.append(run)
        bases.append(base)
        for label in _chosen_variants(run, wanted):
            if run.models[label].kind in SHORT:
                read_short.append(run)
            is_base = run.models[label].kind == BASE
            if not (is_base and base in has_base and wanted is None):
                everyone.append(_ComparedModel(run, label, str(run.path or number), base))
            if is_base:
                has_base.add(base)
    _check_short_windows(read_short)
    models = _labelled_models(everyone, labels or {})
    if len(models) < 2:
        raise UsageError("compare needs two models at least: name another RUN")
    opened = OpenedRuns(runs, models)
    alone = opened.alone
    first, *others = alone
    strange = [name for name in others if alone[name].readings and not alone[name].own_base]
    if alone[first].own_base == first and strange:
        raise UsageError(
            f"{strange[0]} was extended from another base than {first}; name its RUN without a "
            "variant (that shows its base too), or name first a model that is not a base"
        )
    return opened


def _open_run(given: str | Measurement) -> tuple[Measurement, str | None]:
    """Return the measured run behind a comparison's RUN or RUN:VARIANT, and the name of the variant
    if there is one."""
    if isinstance(given, Measurement):
        return given, None
    path, wanted = split_run_spec(given)
    return read_run(path), wanted


def _labelled_models(
    everyone: Sequence[_ComparedModel], labels: Mapping[str, str]
) -> dict[str, _ComparedModel]:
    """Return each compared model under the shortest name that nobody else has, or under the user's
    label for it."""
    models = dict[str, _ComparedModel]()
    shown = dict[int, str]()  # names of the bases
    names = list[str]()
    for each in everyone:
        name = _shortest_name(each, everyone)
        names.append(name)
        name = labels.get(name, name)
        if name in models:
            raise UsageError(f"compare names {name} twice")
        if each.run.models[each.label].kind == BASE:
            shown.setdefault(each.base, name)
        models[name] = replace(each, own_base=shown.get(each.base, ""))
    check_labels(labels, names)
    return models


def _check_short_windows(runs: Sequence[Measurement]) -> None:
    """Raise InputError if compared runs read their bases by two definitions of the short window."""
    by_version = dict[int, object]()
    for run in runs:
        decides = run.manifest.get("decides", {})
        # Without a BOS all versions are the same. A result that was not kept is of this version.
        version = SHORT_WINDOW if decides.get("bos") is None else decides.get("short_window", 1)
        by_version.setdefault(version, run.path or "the result in memory")
    if len(by_version) > 1:
        old = min(by_version)
        new = max(by_version)
        raise InputError(
            f"{by_version[old]} truncates its base by version {old} and "
            f"{by_version[new]} by version {new} (2 begins every window with a BOS), so they do "
            f"not compare. Evaluate {by_version[old]} again, or name models other than base and "
            "control (RUN:VARIANT)"
        )


def _have_same_base(run: Measurement, other: Measurement) -> bool:
    """Return whether two runs have the same base. Results that were not kept have no digest of
    their weights: their bases are the same if the losses of all tokens are equal."""
    bases = run.labels(BASE)[:1] + other.labels(BASE)[:1]
    if len(bases) < 2 or run.frame.context != other.frame.context:
        return False
    if run.manifest and other.manifest:
        return _base_identity(run, bases[0]) == _base_identity(other, bases[1])
    try:
        both = join_measurements([run.only(bases[0], "first"), other.only(bases[1], "second")])
    except InputError:
        return False  # no token in common
    first, second = (reading.tokens(0, both.frame.longest) for reading in both.readings.values())
    return all(map(np.array_equal, first, second))


def _base_identity(run: Measurement, label: str) -> object:
    """Return the identity of a run's base in run.json: its weights and its spectrum."""
    identity = run.manifest["decides"]["variants"].get(label)
    if identity is None:  # somebody renamed it
        return None
    model = identity["model"]
    weights = (model["weights_sha256"], model.get("code_sha256"))
    return weights, identity["adapter_sha256"], identity.get("inv_freq")


def _shortest_name(one: _ComparedModel, everyone: Sequence[_ComparedModel]) -> str:
    """Return the shortest name of a model in `ropext compare` that nobody else has."""
    for place, name in enumerate(one.names):
        if sum(other.names[place] == name for other in everyone) == 1:
            return name
    return one.names[-1]


def _chosen_variants(run: Measurement, wanted: str | None) -> list[str]:
    """Return the labels that RUN or RUN:VARIANT names; raise InputError if results.json lacks the
    variant."""
    if wanted is not None and wanted not in run.models:
        raise InputError(f"{run.path} holds no variant {wanted!r}; it has {', '.join(run.models)}")
    if wanted is None:
        return list(run.models)
    return [wanted]


def judge_gates(run: Measurement, gates: Sequence[Gate]) -> list[Outcome]:
    """Judge every gate on every model of a run that it is about.

    A gate without an answer fails, so that the measured numbers are still shown. Raise UsageError
    for a gate that judges no model, or compares models only with themselves.
    """
    return _judge_named([(run, {label: label for label in run.models})], gates)


def _judge_named(
    named: Sequence[tuple[Measurement, Mapping[str, str]]], gates: Sequence[Gate]
) -> list[Outcome]:
    """Judge every gate on the models of several runs that it is about. Each run comes with the
    models to judge, by their labels, and the names that outcomes use for them."""
    outcomes = list[Outcome]()
    for gate in gates:
        concerned = list[str]()
        judged = list[Outcome]()
        for run, names in named:
            models = {label: run.models[label] for label in names}
            for label in concerned_labels(gate, models):
                concerned.append(names[label])
                outcome = _judge_gate(run, gate, label)
                if outcome is not None:
                    judged.append(replace(outcome, variant=names[label]))
        if not judged:
            there = [name for _, names in named for name in names.values()]
            reason = why_no_model(gate, concerned, there)
            raise UsageError(f"--fail-if {gate.text!r}: {reason}")
        outcomes += judged
    return outcomes


def _judge_gate(run: Measurement, gate: Gate, label: str) -> Outcome | None:
    """Return the outcome of a gate on one model; None if it would compare the model with itself."""
    try:
        opponent = None if gate.run is None else _opponent_of_gate(run, gate, label)
        if opponent is not None and label in opponent.models and _place(opponent) == _place(run):
            return None
        return _compared_by_gate(run, gate, label, opponent)
    except (UsageError, InputError) as error:
        return gate.unanswered(label, str(error))


def _place(run: Measurement) -> Path | None:
    """Return the path by which a run is known whatever its name; None if it was not kept."""
    return run.path and run.path.resolve()


def _compared_by_gate(
    run: Measurement, gate: Gate, label: str, opponent: Measurement | None
) -> Outcome:
    """Return the outcome of a gate on one model. Its reason has the marks of the compared models,
    and a warning if the opponent's run.json lists no digest of results.json."""
    reason = run.facts.not_measurable.get(gate.task)
    if reason is not None:
        return gate.unanswered(label, reason)
    compared = [(label, run.models[label])]
    if opponent is None:
        values = run.values(label)
    else:
        compared += opponent.models.items()
        values = run.difference(label, opponent)
    for name, model in compared:
        if model.is_unread(gate.metric):
            reason = f"the server read no question of {name} at this length"
            return gate.unanswered(label, reason, is_measured=False)
    outcome = check_gate(gate, label, values)
    marks = list[str]()
    if opponent is not None and opponent.path is not None and opponent.path != run.path:
        marks += no_digest_warnings(opponent.path)
    for name, model in compared:
        mark = model.mark_at(gate.task)
        if mark:
            marks.append(f"{name}: {mark}")
    if not marks:
        return outcome
    return replace(outcome, reason=f"{outcome.reason} ({', '.join(marks)})")


def _opponent_of_gate(run: Measurement, gate: Gate, label: str) -> Measurement:
    """Return the model of a gate's `vs RUN`: another variant of this run, or the variant of a run
    directory (the same label, else its only one)."""
    name = gate.run or ""
    if name in run.models:
        return run.only(name)
    path, variant = split_run_spec(name)
    if not path.is_dir():
        raise UsageError(
            f"--fail-if {gate.text!r}: {name!r} is neither a run directory nor a variant "
            f"({', '.join(run.models)})"
        )
    other = read_run(path)
    if variant is not None:
        (chosen,) = _chosen_variants(other, variant)
        if other.models[chosen].kind in SHORT:
            _check_short_windows([run, other])
        return other.only(chosen)
    readers = other.labels(EXTENDED, UNTOUCHED)
    if label not in readers and len(readers) != 1:
        raise UsageError(
            f"--fail-if {gate.text!r}: {name} holds several models ({', '.join(readers)}); write "
            f"vs {name}:{readers[0] if readers else 'VARIANT'}"
        )
    return other.only(label if label in readers else readers[0])


def raise_if_gates_failed(outcomes: Sequence[Outcome]) -> None:
    """Raise GateFailed with every gate that did not hold, or NotMeasured if no more is known."""
    failed = [outcome for outcome in outcomes if not outcome.passed and outcome.is_measured]
    if failed:
        gates = "; ".join(map(_failed_gate_text, failed))
        raise GateFailed(f"{len(failed)} of {len(outcomes)} gates failed: {gates}")
    unknown = [outcome for outcome in outcomes if not outcome.is_measured]
    if unknown:
        gates = "; ".join(map(_failed_gate_text, unknown))
        raise NotMeasured(f"{len(unknown)} of {len(outcomes)} gates are not known: {gates}")


def _failed_gate_text(outcome: Outcome) -> str:
    """Write a gate that failed or is not known, with its model and the number that it looked
    at."""
    number = "nothing"
    if outcome.looked_at is not None:
        number = f"{outcome.looked_at:.4g}"
    return f"{outcome.gate} ({outcome.variant}: {number})"
