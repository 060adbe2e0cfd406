"""`--method auto`: which method, found by measurement before the run of a recipe begins.

OUT.run/choice/
  choosing.jsonl, verdict.jsonl   the documents, divided by their content
  readings/                       what was read, so that an interrupted choice goes on
  choice.json                     what was tried and left out, what was taken and why
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ropext.checkpoint import open_snapshot, provenance, with_weights
from ropext.checkpoint.staging import check_output
from ropext.errors import RopextError, UsageError
from ropext.evaluation.contenders import preference
from ropext.jsontext import JsonObject, read_json, write_json
from ropext.models.processes import rank_and_count
from ropext.narration import Call, told_of_files
from ropext.options.fields import EVALUATE, EXTEND, FINETUNE, FIT, NUMBERS
from ropext.options.recipe import SECTIONS, Recipe
from ropext.pipeline.dividing import write_documents
from ropext.pipeline.hashes import Hashes
from ropext.pipeline.job import check_data
from ropext.pipeline.prospect import PLACES, STAYS, TASK, Prospect, prospect
from ropext.pipeline.steps import section_key
from ropext.pipeline.trying import choosing_file, read_forms
from ropext.pipeline.work import USED
from ropext.results import UNTOUCHED
from ropext.results.overlap import NO_DOCUMENTS, trained
from ropext.results.rules import Standing, because
from ropext.workdir import Flat, Step, StepDir, Workdir, remove, step_record

# Closed forms from which a fit is tried.
STARTS = 3


@dataclass(frozen=True)
class FitKeys:
    """The keys of a fit in the recipe that was chosen; none, with the reason, where there is no
    fit."""

    keys: JsonObject
    why_not: str = ""


def check(recipe: Recipe, output: Path, call: Call) -> None:
    """Refuse what a choice would refuse at once; later the run knows what it has written itself."""
    check_data(recipe)
    place = Workdir(output, "run", {})
    place.check(call.force)
    if step_record(place.folder, ChoiceStep.name) is None:
        check_output(output, force=call.force, inputs=[])


def choose(recipe: Recipe, output: Path, call: Call) -> Recipe:
    """The recipe with the method that measurement took and the stages that follow; a choice that
    was made before with all the same is not made again."""
    if rank_and_count()[1] > 1:
        raise UsageError(
            "--method auto runs in one process: run it without accelerate launch, then launch the "
            "recipe with the method that it chose"
        )
    check(recipe, output, call)
    hooks = call.hooks
    words = {"words": list(provenance.clean_command(call.command))} if call.command else {}
    place = Workdir(output, "run", {}, words)
    folder = place.folder / "choice"
    hashes = Hashes(told_of_files(hooks.say))
    step = ChoiceStep(recipe, folder, call, hashes)
    own = StepDir.of(step, place.folder, provenance.versions())
    if own.left() is None:
        step.beforehand = prospect(recipe, call)
        with place.claimed(call.force):
            own.do()
    else:
        hooks.say("choose: done before, skipped")
    return recipe.chosen(read_json(step.path))


class ChoiceStep(Step):
    """The choice, which is not made twice."""

    name = "choose"
    schema = 1
    beforehand: Prospect  # where the choice is to be made

    def __init__(self, recipe: Recipe, folder: Path, call: Call, hashes: Hashes) -> None:
        self.recipe = recipe
        self.folder = folder
        self.call = call
        self.hashes = hashes
        self.path = folder / "choice.json"

    def key(self) -> Flat:
        recipe = self.recipe
        snapshot = with_weights(open_snapshot(recipe.model, revision=recipe.revision))
        decides = {"base": self.hashes.of_model(snapshot)}
        decides |= section_key(EXTEND, recipe.extend, self.hashes, NUMBERS)
        for name in (FIT, FINETUNE, EVALUATE):
            decides |= section_key(name, getattr(recipe, name), self.hashes)
        return decides

    def look(self) -> Flat | None:
        return {"choice": self.hashes.of(self.path)} if self.path.is_file() else None

    def make(self) -> None:
        write_json(self.path, AutoChoice(self.beforehand, self.folder, self.call).made())

    def clear(self) -> None:
        remove(self.folder)


class AutoChoice:
    """A choice at work."""

    def __init__(self, prospect: Prospect, folder: Path, call: Call) -> None:
        self.prospect = prospect
        self.folder = folder
        self.call = call
        self._verdict_file = folder / "verdict.jsonl"

    def made(self) -> JsonObject:
        """Measure, and tell what came of it."""
        prospect = self.prospect
        say = self.call.hooks.say
        write_documents(choosing_file(self.folder), prospect.to_choose)
        write_documents(self._verdict_file, prospect.to_judge)
        tried = read_forms(prospect, self.folder, self.call)
        method = tried.order.take(tried.order.alike, [UNTOUCHED, *preference(prospect.plans)])
        why = because(tried.order, method)
        fit = self.fit_of(method, tried.order)
        recipe = {f"{EXTEND}.method": method, **fit.keys, **self._judging()}
        if method == UNTOUCHED:
            stays = prospect.plans[UNTOUCHED].recipe
            recipe |= {f"{EXTEND}.{key}": getattr(stays, key) for key in STAYS}
        left_out = {**prospect.left_out, **tried.not_finite}
        if fit.why_not:
            left_out[FIT] = fit.why_not
        say(f"choose: {method}: {why}")
        for sentence in tried.in_memory:
            say(f"choose: {sentence}")
        for name, reason in left_out.items():
            say(f"left out: {name}: {reason}")
        judged = trained(
            document.cut(prospect.target).known_by[1:] for document in prospect.to_judge
        )
        return {
            "taken": method,
            "because": why,
            "target": prospect.target,
            "documents": prospect.able,
            "verdict_documents": len(prospect.to_judge),
            USED: replace(NO_DOCUMENTS, chose=tried.chose, judged=judged).to_json(),
            "in_memory": list(tried.in_memory),
            "standing": tried.order.to_json(),
            "fits": not fit.why_not,
            "left_out": left_out,
            "forward_tokens": tried.tokens,
            "recipe": recipe,
        }

    def fit_of(self, method: str, order: Standing) -> FitKeys:
        """A fit that starts from the closed forms with the lowest loss, or from the one that was
        taken where it cannot start from all of them."""
        prospect = self.prospect
        if method == UNTOUCHED:
            return FitKeys({}, "the model untouched is as good as the best closed form")
        lowest = [label for label in order.behind if label not in (method, UNTOUCHED)]
        starts = [",".join([method, *lowest[: STARTS - 1]]), method]
        if prospect.recipe.fit and prospect.recipe.fit.start:
            starts = [",".join(prospect.recipe.fit.start)]
        why_not = ""
        for start in dict.fromkeys(starts):
            keys = self._keys_of_a_fit(start)
            try:
                few_documents = self._lacks(method, keys)
            except RopextError as error:
                why_not = str(error)
                continue
            return FitKeys({}, few_documents) if few_documents else FitKeys(keys)
        return FitKeys({}, why_not)

    def _keys_of_a_fit(self, start: str) -> JsonObject:
        """What the recipe says of a fit that begins at a closed form, or at the best of several."""
        keys = dict[str, Any]()
        for key, value in SECTIONS[FIT].unstored().items():
            keys[f"{FIT}.{key}"] = value
        keys[f"{FIT}.data"] = str(choosing_file(self.folder))
        keys[f"{FIT}.start"] = start
        if self.prospect.recipe.extend.within:
            keys[f"{FIT}.within"] = self.prospect.recipe.extend.within
        return keys

    def _lacks(self, method: str, keys: JsonObject) -> str:
        """Why so few documents give a fit no interval, "" where they do; a fit that cannot be done
        is refused as the fit itself would."""
        from ropext.options.training import Fit
        from ropext.training import judge
        from ropext.training.request import FitRequest

        prospect = self.prospect
        recipe = {f"{EXTEND}.method": method, **keys, **self._judging()}
        chosen = prospect.recipe.chosen({"recipe": recipe, "fits": True})
        request = FitRequest(
            model=prospect.snapshot.name,
            data=str(keys[f"{FIT}.data"]),
            options=Fit(**chosen.fitting),
            revision=prospect.recipe.revision,
        )
        with request.prepared(None, self.call) as job:
            judged = job.counts().judge
        assert judged is not None  # a fit is always judged
        return judge.few(judged.documents) or ""

    def _judging(self) -> JsonObject:
        """The keys of the evaluation on documents that took no part."""
        prospect = self.prospect
        keys = dict[str, Any]()
        if prospect.to_judge:
            keys |= {"data": str(self._verdict_file)} | prospect.reading.unstored()
        given = prospect.recipe.evaluation
        if not given.get("lengths"):
            keys["lengths"] = (prospect.target,)
        if "tasks" not in given:
            keys |= {"tasks": (TASK,), "depths": PLACES}
        return {f"{EVALUATE}.{key}": value for key, value in keys.items()}
