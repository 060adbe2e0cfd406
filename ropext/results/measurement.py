"""Hold the readings and answers of all models in one record, from which all numbers follow.

Models are compared on the same tokens and the same questions. Documents are paired by the hash of
their tokens up to the longest common length: a paired difference has an error bar several times
smaller than the difference of two unpaired numbers.
"""

import io
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ropext.base import guard
from ropext.base.atomic import write_whole
from ropext.base.errors import InputError, UsageError
from ropext.base.jsontext import Json, JsonObject, digest, dump, fields_of, values_json
from ropext.base.lengths import length_text
from ropext.results import BASE, EXTENDED, FOUND, SCHEMA
from ropext.results.gates import Outcome
from ropext.results.metrics import (
    DOCUMENTS,
    ReadText,
    gate_rules_of,
    text_differences,
    text_values,
)
from ropext.results.numbers import EvaluationFacts, ModelNumbers, ModelSource
from ropext.results.overlap import Overlap
from ropext.results.perplexity import (
    LossStatistics,
    MeasuredDocuments,
    Reading,
    Span,
    strided_values,
)
from ropext.results.retrieval import (
    ItemScore,
    difference_of_answers,
    haystack_numbers,
    mean_over_haystacks,
    retrieval_values,
    ruler_means,
    sign_test,
)
from ropext.results.values import Bootstrap, Value
from ropext.tasks import RULER


@dataclass(frozen=True)
class MeasuredModel:
    """One model with its losses and its answers; `numbers` come from a whole evaluation."""

    kind: str = EXTENDED  # as `Variant.kind`
    reading: Reading | None = None
    items: tuple[ItemScore, ...] = ()
    overlap: Overlap | None = None  # with the documents of its training
    strides: Mapping[int, Sequence[Any]] | None = None  # by window, of the strided loop
    # Per token, at the ends of lengths: nats from the base's next token, and the same first choice.
    divergence: Reading | None = None
    agreement: Reading | None = None
    unrounded: str = ""  # label of the same model without rounding, if this one rounds its KV cache
    source: ModelSource = field(default=ModelSource(), repr=False)
    numbers: ModelNumbers | None = field(default=None, repr=False)

    def mark_at(self, name: str) -> str:
        """Return the mark next to a metric in a table or a gate, such as "3 of 8 trained on"."""
        return self.mark(questions=gate_rules_of(name).unit != DOCUMENTS)

    def mark(self, *, questions: bool = False) -> str:
        """Return the mark of numbers over documents; with `questions`, of questions about these
        documents."""
        if self.overlap is None:
            return ""
        if questions and not self.overlap.questions:
            return ""
        return self.overlap.mark

    def is_unread(self, metric: str) -> bool:
        """Return True if a measured share has no number because a server cut or refused all its
        prompts."""
        name, _, length = metric.partition("@")
        asked = [item for item in self.items if str(item.length) == length]
        if name not in (FOUND, RULER):
            asked = [item for item in asked if item.task == name]
        return bool(asked) and not any(item.is_read for item in asked)

    def to_json(self) -> dict[str, Json]:
        """Return a model's entry under `variants` in results.json."""
        written: dict[str, Json] = {"kind": self.kind, "overlap": self.overlap}
        if self.unrounded:
            written["unrounded"] = self.unrounded
        return written | self.source.to_json() | fields_of(self.numbers or ModelNumbers())


@dataclass(frozen=True)
class Measurement:
    """Models by their labels, on the same documents and questions. `path` is None if nothing was
    kept. Of several processes only the first has the models' numbers."""

    frame: LossStatistics = field(repr=False)
    models: Mapping[str, MeasuredModel] = field(repr=False)
    documents: MeasuredDocuments | None = field(default=None, repr=False)
    facts: EvaluationFacts = field(default=EvaluationFacts(), repr=False)
    manifest: JsonObject = field(default_factory=dict, repr=False)
    path: Path | None = None
    resumed: int = 0
    own_base: str = field(default="", repr=False)  # in a comparison that shows its base
    gates: Sequence[Outcome] = field(default=(), repr=False)  # judged on these numbers

    @property
    def readings(self) -> dict[str, Reading]:
        """Return the token losses of every measured model that read documents, by its label."""
        readings = dict[str, Reading]()
        for label, model in self.models.items():
            if model.reading is not None:
                readings[label] = model.reading
        return readings

    @property
    def key(self) -> str:
        """Return the SHA-256 of everything in run.json that decides the numbers; reports call it
        the run key."""
        return digest(self.manifest["decides"])

    @property
    def tasks(self) -> list[str]:
        """Return the names of the retrieval tasks that at least one measured model answered."""
        names = dict[str, None]()
        for model in self.models.values():
            if model.numbers is not None:
                names |= dict.fromkeys(model.numbers.retrieval)
        return list(names)

    @property
    def results(self) -> dict[str, Json]:
        """Return the content of results.json."""
        frame = self.frame
        written = {
            "schema": SCHEMA,
            "context": frame.context,
            "lengths": frame.lengths,
            "tail_tokens": frame.tail,
        }
        written |= fields_of(frame.bootstrap) | fields_of(frame.scoring) | fields_of(self.facts)
        results: dict[str, Json] = values_json(written | {"variants": self.models})
        return results

    def labels(self, *kinds: str) -> list[str]:
        """Return the labels of the measured models of these kinds, such as base or extended."""
        return [label for label, model in self.models.items() if model.kind in kinds]

    def only(self, label: str, name: str = "") -> "Measurement":
        """Return a measurement that holds one of the models alone, under a name."""
        return replace(self, models={name or label: self.model(label)})

    def model(self, label: str) -> MeasuredModel:
        """Return the measured model of a label; raise UsageError for a label that does not
        exist."""
        if label not in self.models:
            raise UsageError(f"there is no model {label!r}; there are {', '.join(self.models)}")
        return self.models[label]

    def without(self, tasks: Collection[str]) -> "Measurement":
        """Return the measurement without the answers of some retrieval tasks."""
        models = dict[str, MeasuredModel]()
        for label, model in self.models.items():
            items = tuple(item for item in model.items if item.task not in tasks)
            models[label] = replace(model, items=items)
        return replace(self, models=models)

    def base(self, label: str) -> Reading | None:
        """Return the token losses of the base, with which a measured model is compared; None for
        the base itself, and if no base read documents."""
        return None if self.models[label].kind == BASE else self.readings.get(BASE)

    def values(self, label: str) -> dict[str, Value]:
        """Return every number of one model with its interval, by the names in results.json: on
        text, then by retrieval."""
        model = self.model(label)
        if model.numbers is not None:
            return dict(model.numbers.metrics)
        values = dict[str, Value]()
        if model.reading is not None:
            text = ReadText(
                self.frame,
                model.reading,
                self.base(label),
                self.documents,
                divergence=model.divergence,
                agreement=model.agreement,
                unrounded=self.readings.get(model.unrounded),
            )
            values = text_values(text)
        if model.strides is not None:
            values |= strided_values(self.frame, model.strides)
        if model.items:
            values |= retrieval_values(model.items, self.frame.context, self.frame.bootstrap)
        return values

    def loss_difference(self, label: str, start: str, span: Span) -> Value:
        """Return the loss of one measured model minus the loss of another on the same tokens of a
        span, in nats per token with its paired interval."""
        return self.frame.difference(self.readings[label], self.readings[start], span)

    def difference(self, label: str, other: "Measurement") -> dict[str, Value]:
        """Return every paired difference of a model to the only one of another measurement, for
        `vs RUN` gates: perplexities in nats per token, shares in points, answer NLL in nats."""
        own = self.model(label).items
        values = dict[str, Value]()
        (reference,) = other.models
        if label in self.readings and other.readings:
            named = other.only(reference, f"{reference} (reference)")
            both = join_measurements([self.only(label), named])
            first, second = both.readings.values()
            values = text_differences(both.frame, first, second)
        theirs = other.models[reference].items
        return values | item_differences(own, theirs, self.frame.bootstrap)


def check_labels(labels: Mapping[str, str], names: Iterable[str]) -> None:
    """Raise UsageError if a user's labels rename a model that a measured result or comparison does
    not have."""
    known = list(names)
    for name in labels:
        if name not in known:
            raise UsageError(f"labels: there is no model {name!r}; there are {', '.join(known)}")


def join_measurements(parts: Sequence[Measurement]) -> Measurement:
    """Return the measurement of all models on the documents that the parts have in common, in one
    order.

    Measurements of other tokens are refused: their numbers do not compare.
    """
    frames = [part.frame for part in parts]
    common = _common_lengths(parts)
    if len({frame.scored_tokens for frame in frames}) > 1:
        raise InputError("the runs mask different tokens; give both the same --lengths")
    places = [_document_places(part, max(common)) for part in parts]
    # Hash order is the same whichever run comes first, so the seeded draws are too.
    shared = sorted(set(places[0]).intersection(*places[1:]))
    if not shared:
        names = [", ".join(part.models) for part in parts]
        raise InputError(
            f"the runs {', '.join(names)} read different tokens (no document has the same token "
            "hash); evaluate both on the same --data with the same tokenizer"
        )
    orders = [[place[key] for key in shared] for place in places]
    models = dict[str, MeasuredModel]()
    for part, order in zip(parts, orders, strict=True):
        for label, model in part.models.items():
            models[label] = replace(
                model,
                reading=model.reading and model.reading.subset(order),
                divergence=model.divergence and model.divergence.subset(order),
                agreement=model.agreement and model.agreement.subset(order),
                # The numbers of the whole evaluation do not hold for these documents.
                numbers=None,
            )
    frame = replace(
        frames[0],
        lengths=tuple(sorted(common)),
        tail=min(frame.tail for frame in frames),
        context=min(frame.context for frame in frames),
    )
    documents = parts[0].documents and parts[0].documents.subset(orders[0])
    return Measurement(frame, models, documents)


def _common_lengths(parts: Sequence[Measurement]) -> set[int]:
    """Return the lengths that all compared runs measured; raise InputError if there are none."""
    common = set(parts[0].frame.lengths)
    lists = list[str]()
    for part in parts:
        common &= set(part.frame.lengths)
        lengths = ",".join(map(length_text, part.frame.lengths))
        lists.append(f"{', '.join(part.models)} {lengths}")
    if not common:
        raise InputError(
            f"these runs have no length in common ({'; '.join(lists)}); give both one --lengths"
        )
    return common


def _document_places(part: Measurement, length: int) -> dict[str, int]:
    """Return the position of each document of a run in documents.json, by its hash."""
    if part.documents is None:
        raise InputError(f"{', '.join(part.models)} holds no perplexity to compare")
    return {hashes[length]: k for k, hashes in enumerate(part.documents.prefix_hashes)}


def item_differences(
    left: Sequence[ItemScore], right: Sequence[ItemScore], bootstrap: Bootstrap
) -> dict[str, Value]:
    """Return `TASK@C` and `TASK_nll@C` as differences over the questions that both models answered;
    for servers also `found@C`, over all tasks."""
    pairs = pair_answers(left, right)
    values = dict[str, Value]()
    for (task, length), group in sorted(_group_pairs(pairs, "task", "length").items()):
        first = [a for a, _ in group]
        values[f"{task}@{length}"] = difference_of_answers(_point_gaps(group), first, bootstrap)
        losses = list[float]()
        scored = list[ItemScore]()  # a server tells no loss of an answer
        for a, b in group:
            if a.answer_nll is not None and b.answer_nll is not None:
                losses.append(a.answer_nll - b.answer_nll)
                scored.append(a)
        if losses:
            values[f"{task}_nll@{length}"] = mean_over_haystacks(losses, scored, bootstrap)
    asked = [pair for pair in pairs if pair[0].outcome is not None]
    for length, group in sorted(_group_pairs(asked, "length").items()):
        first = [a for a, _ in group]
        values[f"{FOUND}@{length}"] = difference_of_answers(_point_gaps(group), first, bootstrap)
    return values | ruler_means(values)


Pair = tuple[ItemScore, ItemScore]


def pair_answers(left: Sequence[ItemScore], right: Sequence[ItemScore]) -> list[Pair]:
    """Return the answers of two models to the same questions in pairs. A server's question is known
    by its words, any other by its tokens."""
    in_words = _of_server(left) or _of_server(right)

    def key(item: ItemScore) -> object:
        """Return the identity of a question, by which the answers of two models are paired."""
        return item.text_hash if in_words else (item.prompt_hash, item.answer)

    others = {key(item): item for item in right if item.is_read}
    pairs = list[Pair]()
    for item in left:
        other = others.get(key(item))
        if item.is_read and other is not None:
            pairs.append((item, other))
    return pairs


@dataclass(frozen=True)
class Discordance:
    """Texts for which one of two models found more than the other. If each text has its own
    question, this is McNemar's table."""

    more: int
    fewer: int
    alike: int
    p: float  # p-value of the exact sign test


def discordances(
    left: Sequence[ItemScore], right: Sequence[ItemScore]
) -> dict[tuple[str, int], Discordance]:
    """Return by task and length how many texts one of two models answers better; questions over one
    text count as one, because they are not independent."""
    out = dict[tuple[str, int], Discordance]()
    for place, group in sorted(_group_pairs(pair_answers(left, right), "task", "length").items()):
        numbers = haystack_numbers([item for item, _ in group])
        sums = np.bincount(numbers, _point_gaps(group))
        more = int((sums > 0).sum())
        fewer = int((sums < 0).sum())
        alike = len(sums) - more - fewer
        out[place] = Discordance(more, fewer, alike, sign_test(more, fewer))
    return out


def check_same_questions(
    left: Sequence[ItemScore], right: Sequence[ItemScore], names: Sequence[str]
) -> None:
    """Raise InputError if the answers of two compared runs cannot be paired: at least one run
    measured a server, and their questions had other texts."""
    has_server = _of_server(left) or _of_server(right)
    if not has_server or not left or not right or pair_answers(left, right):
        return
    first = {item.text_hash for item in left if item.text_hash}
    second = {item.text_hash for item in right if item.text_hash}
    if first & second:
        return  # the same questions, of which none was read by both
    reason = "the texts of their questions differ"
    if not (first and second):
        reason = "one run used token ids, the server's run used text"
    raise InputError(
        f"{names[0]} and {names[1]} cannot be paired: {reason} (no question has the same words). "
        "Servers of one tokenizer and template get the same questions from the same options; a "
        "directory gets them with --api completions of the server, and a task in words"
    )


def _of_server(items: Sequence[ItemScore]) -> bool:
    """Return whether a server gave any of these answers."""
    return any(item.outcome is not None for item in items)


def _point_gaps(pairs: Sequence[Pair]) -> list[float]:
    """Return the difference of the points of each pair of answers."""
    return [a.points - b.points for a, b in pairs]


def _group_pairs(pairs: Sequence[Pair], *names: str) -> dict[Any, list[Pair]]:
    """Return pairs of answers, grouped by some of their fields."""
    place = attrgetter(*names)
    groups = dict[Any, list[Pair]]()
    for pair in pairs:
        groups.setdefault(place(pair[0]), []).append(pair)
    return groups


def write_piece(path: Path, result: Any) -> None:
    """Write the losses (.npy) or answers (.json) of one unit of work, with the digest by which a
    resumed run knows that they were neither edited nor damaged. Unlike .npz, .npy holds no date."""
    sign = guard.sign_of_piece(path)
    mark = sign.begin + sign.blank
    if path.suffix == ".npy":
        array = io.BytesIO()  # numpy does not name the error of a file that it writes itself
        np.save(array, np.asarray(result), allow_pickle=False)
        content = array.getvalue() + mark  # numpy reads no further than the array
    else:
        content = dump({CONTENT: result, "made": mark.decode()})

    def write(stream: BinaryIO) -> None:
        """Write the content of one unit of work, then its digest."""
        stream.write(content)
        guard.put_digest(stream, sign)

    write_whole(path, write)


CONTENT = "content"  # in a .json file of a store, next to the digest

# Folders of a store.
DIVERGENCE = "kl"
AGREEMENT = "agreement"


def comparison_folder(kind: str, key: str, regime: str) -> str:
    """Return the name of a store's folder for the KL divergence from a base, or for the agreement
    with it (`kind`), in one regime; `key` identifies the base."""
    return f"{kind}-{key}-{regime}"


def loss_file_name(regime: str, document_hash: str) -> str:
    """Return the name in a store of the .npy file with a document's token losses: in the folder of
    its regime."""
    return f"{regime}/{document_hash[:32]}.npy"


@dataclass(frozen=True)
class Store:
    """The losses and answers of one variant, one file for each unit of work, in a folder or only in
    memory.

    A file is written under another name and renamed, so a file that exists is complete. A run that
    resumes first deletes the files that were edited or damaged (`workdir.remove_damaged`).
    If several processes read the same, one writes the folder, and the others keep their arrays in
    memory.
    """

    folder: Path | None = None
    writes: bool = True
    held: dict[str, Any] = field(default_factory=dict)

    def file(self, name: str = "") -> Path:
        """Return the path of a file of losses or answers below variants/ of a run."""
        assert self.folder is not None, "a store in memory has no files"
        return self.folder / name

    def has(self, name: str) -> bool:
        """Return whether a unit's losses or answers, from which metrics follow, are kept in a run
        or in memory."""
        return name in self.held or (self.folder is not None and self.file(name).exists())

    def is_older(self, name: str, time: float) -> bool:
        """Return whether the file of a variant's losses or answers was written before a time."""
        return self.folder is not None and self.file(name).stat().st_mtime < time

    def put(self, name: str, result: Any) -> None:
        """Keep losses (.npy) or answers (.json) in a run's folder or in memory. Metrics follow from
        them."""
        if self.folder is None or not self.writes:
            self.held[name] = result
        else:
            write_piece(self.file(name), result)

    def get(self, name: str) -> Any:
        """Return kept losses (.npy) or answers (.json) of a run's folder or of memory. Metrics
        follow from them."""
        if name in self.held or self.folder is None:
            return self.held[name]
        if name.endswith(".npy"):
            # Mapped: a header that claims more than its file holds is refused, not allocated.
            return np.array(np.load(self.file(name), "r", allow_pickle=False))
        return json.loads(self.file(name).read_text(encoding="utf-8"))[CONTENT]

    def write_files(self, folder: Path) -> None:
        """Write a variant's losses and answers as the files of a finished run: .npy and .json below
        a folder of variants/."""
        names = [] if self.folder is None else guard.listing(self.folder)
        for name in (*names, *self.held):
            Store(folder).put(name, self.get(name))

    def reading(self, label: str, regimes: Mapping[str, int], hashes: Sequence[str]) -> Reading:
        """Return the token losses, kept in a run or in memory, from which a variant's perplexities
        are computed. They are by the pass length of each regime and by document."""
        passes = {
            length: [self.get(loss_file_name(regime, each)) for each in hashes]
            for regime, length in regimes.items()
        }
        return Reading(label, passes)

    def compared(
        self, label: str, key: str, regimes: Mapping[str, int], hashes: Sequence[str]
    ) -> tuple[Reading, Reading]:
        """Return a variant's KL divergence from the base, and its agreement with it, per token. The
        metrics kl and agreement follow from them."""
        found = list[Reading]()
        for kind in (DIVERGENCE, AGREEMENT):
            folders = {
                comparison_folder(kind, key, regime): length for regime, length in regimes.items()
            }
            found.append(self.reading(label, folders, hashes))
        divergence, agreement = found
        return divergence, agreement
