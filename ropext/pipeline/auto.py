"""Choose the method of `--method auto` by measurement before the run of a recipe begins.

OUT.run/choice/
  choosing.jsonl, verdict.jsonl   the documents, divided by their content
  readings/                       the token losses, from which an interrupted choice resumes
  choice.json                     the methods measured and left out, the choice and its reason
"""

from pathlib import Path

from ropext.base.errors import UsageError
from ropext.base.jsontext import read_json, write_json
from ropext.base.narration import Call, clean_command, file_progress
from ropext.base.staging import Output, check_output
from ropext.base.workdir import Flat, Workdir, remove, remove_damaged
from ropext.files.checkpoint import open_snapshot, with_weights
from ropext.files.checkpoint.digests import check_code
from ropext.models.processes import rank_and_count
from ropext.options.fields import EVALUATE, EXTEND, FINETUNE, FIT, NUMBERS
from ropext.pipeline.auto_choice import AutoChoice
from ropext.pipeline.auto_plan import PlannedChoice, plan_choice
from ropext.pipeline.recipe import Recipe
from ropext.pipeline.run_digests import RunDigests
from ropext.pipeline.stage import Step, section_key, step_record


def check_auto_output(output: Path, call: Call) -> None:
    """Refuse an output that the choice would refuse. Later the run recognises its own files."""
    place = Workdir(output, "run", {})
    place.check(call.force)
    if step_record(place.folder, ChoiceStep.name) is None:
        check_output(Output(output, call.force))


def choose_method(recipe: Recipe, output: Path, call: Call) -> Recipe:
    """Return the recipe with the chosen method and the stages that follow.

    A choice with the same inputs is not repeated.
    """
    if rank_and_count()[1] > 1:
        raise UsageError(
            "--method auto runs in one process: run it without accelerate launch, then launch the "
            "recipe with the method that it chose"
        )
    hooks = call.hooks
    about = {"words": list(clean_command(call.command))}
    place = Workdir(output, "run", {}, about)
    folder = place.folder / "choice"
    digests = RunDigests(file_progress(hooks.say))
    step = ChoiceStep(recipe, folder, call, digests)
    if step.finished_files() is None:
        step.beforehand = plan_choice(recipe, call)  # it refuses before any weight is read
        with place.claimed(call.force):
            step.do_once()
    else:
        hooks.say("choose: done before, skipped")
    return recipe.chosen(read_json(step.path))


class ChoiceStep(Step):
    """The choice as a step, which is skipped if its inputs did not change."""

    name = "choose"
    schema = 1
    beforehand: PlannedChoice  # set only if the choice is to be made

    def __init__(self, recipe: Recipe, folder: Path, call: Call, digests: RunDigests) -> None:
        self.recipe = recipe
        self.run_folder = folder.parent
        self.folder = folder
        self.call = call
        self.digests = digests
        self.path = folder / "choice.json"

    def key(self) -> Flat:
        """Return everything that decides which method `--method auto` chooses in a run."""
        recipe = self.recipe
        snapshot = with_weights(open_snapshot(recipe.model, revision=recipe.revision))
        if self.call.trust_remote_code:
            check_code(snapshot)
        decides = {"base": self.digests.of_model(snapshot)}
        decides |= section_key(EXTEND, recipe.extend, self.digests, NUMBERS)
        for name in (FIT, FINETUNE, EVALUATE):
            decides |= section_key(name, getattr(recipe, name), self.digests)
        return decides

    def look(self) -> Flat | None:
        """Return the digest of choice.json, or None if the run has not chosen a method."""
        return {"choice": self.digests.of(self.path)} if self.path.is_file() else None

    def make(self) -> None:
        """Choose the method of a run with `--method auto`, and write choice.json."""
        remove_damaged(self.folder, self.call.hooks.say)
        write_json(self.path, AutoChoice(self.beforehand, self.folder, self.call).measured_choice())

    def clear(self) -> None:
        """Delete the files of an earlier choice, made by a run with `--method auto`."""
        remove(self.folder)
