"""Choose a method: measure the candidates, and write the choice as keys of the recipe."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ropext.base.errors import RopextError
from ropext.base.jsontext import JsonObject
from ropext.base.narration import Call
from ropext.evaluation.dividing import write_documents
from ropext.evaluation.measured_plan import preferred_in_ties
from ropext.options.fields import EVALUATE, EXTEND, FIT
from ropext.pipeline.planned_choice import PLACES, STAYS, TASK, PlannedChoice
from ropext.pipeline.recipe import SECTIONS
from ropext.pipeline.trying import choice_documents_path, measure_candidates
from ropext.pipeline.work import USED
from ropext.results import UNTOUCHED
from ropext.results.overlap import NO_DOCUMENTS, training_documents
from ropext.results.rules import Standing, choice_reason

# Closed forms from which a fit is tried.
STARTS = 3


@dataclass(frozen=True)
class FitKeys:
    """The recipe's keys for a fit; without keys it has the reason why there is no fit."""

    keys: JsonObject
    why_not: str = ""


class AutoChoice:
    """One choice of the method, which measures and then decides."""

    def __init__(self, planned: PlannedChoice, folder: Path, call: Call) -> None:
        self.planned = planned
        self.folder = folder
        self.call = call
        self._verdict_file = folder / "verdict.jsonl"

    def made(self) -> JsonObject:
        """Measure every candidate, and return the content of choice.json."""
        planned = self.planned
        say = self.call.hooks.say
        write_documents(choice_documents_path(self.folder), planned.to_choose)
        write_documents(self._verdict_file, planned.to_judge)
        tried = measure_candidates(planned, self.folder, self.call)
        method = tried.order.take(
            tried.order.alike, [UNTOUCHED, *preferred_in_ties(planned.compared.plans)]
        )
        why = choice_reason(tried.order, method)
        fit = self.fit_of(method, tried.order)
        recipe = {f"{EXTEND}.method": method, **fit.keys, **self._judging()}
        if method == UNTOUCHED:
            stays = planned.compared.plans[UNTOUCHED].recipe
            recipe |= {f"{EXTEND}.{key}": getattr(stays, key) for key in STAYS}
        left_out = {**planned.left_out, **tried.not_finite}
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
            "forward_tokens": tried.tokens,
            "recipe": recipe,
        }

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
        keys[f"{FIT}.data"] = str(choice_documents_path(self.folder))
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
