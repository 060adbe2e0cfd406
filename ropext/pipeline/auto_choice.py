"""Measure the candidates of `--method auto` on the same documents, and decide.

The result is the content of choice.json. It holds the choice as keys of the recipe.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ropext.base.errors import InputError, RopextError
from ropext.base.jsontext import JsonObject
from ropext.base.lengths import length_text
from ropext.base.narration import Call
from ropext.evaluation import corpus
from ropext.evaluation.dividing import write_documents
from ropext.evaluation.documents import read_corpus
from ropext.evaluation.forward import NanInLogits
from ropext.evaluation.measured_plan import preferred_in_ties
from ropext.evaluation.reader import Progress, Reader
from ropext.evaluation.variants import Variant, applied
from ropext.evaluation.workload import Workload
from ropext.files.checkpoint import with_weights
from ropext.models.load import load_model, loading_of, memory_errors, out_of_memory, silenced
from ropext.options.fields import EVALUATE, EXTEND, FIT
from ropext.pipeline.auto_plan import PLACES, STAYS, TASK, PlannedChoice
from ropext.pipeline.recipe import SECTIONS
from ropext.pipeline.run_context import USED
from ropext.results import UNTOUCHED
from ropext.results.measurement import Store
from ropext.results.overlap import NO_DOCUMENTS, TrainingDocuments, training_documents
from ropext.results.rules import (
    Standing,
    choice_reason,
    in_memory_sentence,
    loss_standing,
    tail_above,
)
from ropext.results.values import FEWEST_DOCUMENTS

# Closed forms from which a fit is tried.
STARTS = 3


@dataclass(frozen=True)
class FitKeys:
    """The recipe's keys for a fit; without keys it has the reason why there is no fit."""

    keys: JsonObject
    why_not: str = ""


@dataclass(frozen=True)
class CandidateResults:
    """The measurement of all candidates."""

    order: Standing
    chose: TrainingDocuments  # the documents
    in_memory: tuple[str, ...]  # a sentence for each method that no checkpoint holds


class AutoChoice:
    """One choice of the method: it measures every candidate on the same documents, then decides."""

    def __init__(self, planned: PlannedChoice, folder: Path, call: Call) -> None:
        self.planned = planned
        self.folder = folder
        self.call = call
        self._choice_file = folder / "choosing.jsonl"
        self._verdict_file = folder / "verdict.jsonl"
        self.stores = dict[str, Store]()
        for label in planned.compared.labels:
            self.stores[label] = Store(folder / "readings" / label)
        self.not_finite = dict[str, str]()  # candidate -> why its logits count for nothing
        self.tokens = 0  # read forward

    def measured_choice(self) -> JsonObject:
        """Measure every candidate, and return the content of choice.json."""
        planned = self.planned
        say = self.call.hooks.say
        write_documents(self._choice_file, planned.to_choose)
        write_documents(self._verdict_file, planned.to_judge)
        tried = self._measure_candidates()
        method = tried.order.take(
            tried.order.alike, [UNTOUCHED, *preferred_in_ties(planned.compared.plans)]
        )
        why = choice_reason(tried.order, method)
        fit = self.fit_of(method, tried.order)
        recipe = {f"{EXTEND}.method": method, **fit.keys, **self._judging()}
        if method == UNTOUCHED:
            stays = planned.compared.plans[UNTOUCHED].recipe
            recipe |= {f"{EXTEND}.{key}": getattr(stays, key) for key in STAYS}
        left_out = {**planned.left_out, **self.not_finite}
        if fit.why_not:
            left_out[FIT] = fit.why_not
        say(f"choose: {method}: {why}")
        for sentence in tried.in_memory:
            say(f"choose: {sentence}")
        for name, reason in left_out.items():
            say(f"left out: {name}: {reason}")
        judged = training_documents(
            document.cut(planned.target).known_by[1:] for document in planned.to_judge
        )
        return {
            "taken": method,
            "because": why,
            "target": planned.target,
            "documents": planned.able,
            "verdict_documents": len(planned.to_judge),
            USED: replace(NO_DOCUMENTS, chose=tried.chose, judged=judged).to_json(),
            "in_memory": list(tried.in_memory),
            "standing": tried.order.to_json(),
            "fits": not fit.why_not,
            "left_out": left_out,
            "forward_tokens": self.tokens,
            "recipe": recipe,
        }

    def _measure_candidates(self) -> CandidateResults:
        """Measure every candidate on the documents for the choice. An interrupted choice keeps the
        losses of the tokens that it read."""
        planned = self.planned
        say = self.call.hooks.say
        say(
            f"choosing among {', '.join(planned.compared.plans)} at "
            f"{length_text(planned.target)} on {planned.documents} documents"
        )
        if planned.documents < FEWEST_DOCUMENTS:
            say(
                f"warning: [few-documents] only {planned.documents} documents to choose by: "
                "no intervals (eight or more give them); ropext takes the lowest"
            )
        said = out_of_memory(planned.recipe.model, "what was read is kept")
        with silenced(), memory_errors(said):
            return self._read_candidates()

    def _read_candidates(self) -> CandidateResults:
        """Load the model and measure it with each candidate that a checkpoint can hold; then
        compare the others with the lowest candidate."""
        planned = self.planned
        values = planned.reading.unstored()
        values["data"] = str(self._choice_file)
        files = planned.reading.changed(**values)
        wanted = corpus.Wanted((planned.target,), True, files.max_docs)
        documents = read_corpus(files, planned.encoder, wanted).documents
        loading = loading_of(files, self.call.trust_remote_code)
        model = load_model(with_weights(planned.compared.snapshot), loading)
        reader = Reader(partial(applied, model), files)
        reads = Workload(planned.frame, documents)
        finite = self._finite_variants(reader, planned.compared.variants_of_plans, reads)
        if not finite:
            raise InputError(f"every method gives logits that are not finite: {self.not_finite}")
        order = loss_standing(reads.measured(finite, self.stores))
        (lowest,) = (variant for variant in finite if variant.label == order.lowest)
        sentences = list[str]()
        beside = planned.compared.readable(reader.computing).beside
        for variant in self._finite_variants(reader, beside, reads):
            both = reads.measured([lowest, variant], self.stores)
            above = tail_above(both, variant.label, lowest.label)
            sentences.append(in_memory_sentence(variant.label, above, lowest.label))
        chose = training_documents(document.known_by[1:] for document in documents)
        return CandidateResults(order, chose, tuple(sentences))

    def _finite_variants(
        self, reader: Reader, variants: Iterable[Variant], reads: Workload
    ) -> list[Variant]:
        """Measure the variants that were not measured before; return the variants with finite
        logits."""
        finite = list[Variant]()
        for variant in variants:
            self.tokens += reads.tokens(variant)
            progress = Progress(hooks=self.call.hooks, kept_in=self.folder)
            try:
                reader.measure([variant], reads, self.stores, progress)
            except NanInLogits as error:
                self.not_finite[variant.label] = str(error)
            else:
                finite.append(variant)
        return finite

    def fit_of(self, method: str, order: Standing) -> FitKeys:
        """Return the keys of a fit that starts from the closed forms with the lowest loss.

        If the fit cannot start from all of them, it starts from the chosen method alone.
        """
        planned = self.planned
        if method == UNTOUCHED:
            return FitKeys({}, "the model untouched is as good as the best closed form")
        lowest = [label for label in order.behind if label not in (method, UNTOUCHED)]
        starts = [",".join([method, *lowest[: STARTS - 1]]), method]
        if planned.recipe.fit and planned.recipe.fit.start:
            starts = [",".join(planned.recipe.fit.start)]
        why_not = ""
        for start in dict.fromkeys(starts):
            keys = self._keys_of_a_fit(start)
            try:
                few_documents = self._few_documents_for_fit(method, keys)
            except RopextError as error:
                why_not = str(error)
                continue
            return FitKeys({}, few_documents) if few_documents else FitKeys(keys)
        return FitKeys({}, why_not)

    def _keys_of_a_fit(self, start: str) -> JsonObject:
        """Return the recipe's keys for a fit. `start` is a closed form, or several of which the
        best is used."""
        keys = dict[str, Any]()
        for key, value in SECTIONS[FIT].unstored().items():
            keys[f"{FIT}.{key}"] = value
        keys[f"{FIT}.data"] = str(self._choice_file)
        keys[f"{FIT}.start"] = start
        if self.planned.recipe.extend.within:
            keys[f"{FIT}.within"] = self.planned.recipe.extend.within
        return keys

    def _few_documents_for_fit(self, method: str, keys: JsonObject) -> str:
        """Return why there are too few documents for a confidence interval; "" if there are enough.

        Raise the error of the fit if the fit is impossible.
        """
        from ropext.training import judge
        from ropext.training.request import TrainingRequest

        planned = self.planned
        recipe = {f"{EXTEND}.method": method, **keys, **self._judging()}
        chosen = planned.recipe.chosen({"recipe": recipe, "fits": True})
        request = TrainingRequest(
            model=planned.compared.snapshot.name,
            data=str(keys[f"{FIT}.data"]),
            options=chosen.fit_options(),
            revision=planned.recipe.revision,
        )
        with request.prepared(None, self.call) as job:
            judged = job.counts().judge
        assert judged is not None  # a fit is always judged
        return judge.few_documents_warning(judged.documents) or ""

    def _judging(self) -> JsonObject:
        """Return the keys of the evaluation on the documents that were not used for the choice."""
        planned = self.planned
        keys = dict[str, Any]()
        if planned.to_judge:
            keys |= {"data": str(self._verdict_file)} | planned.reading.unstored()
        given = planned.recipe.options(EVALUATE)
        if not given.get("lengths"):
            keys["lengths"] = (planned.target,)
        if "tasks" not in given:
            keys |= {"tasks": (TASK,), "depths": PLACES}
        return {f"{EVALUATE}.{key}": value for key, value in keys.items()}
