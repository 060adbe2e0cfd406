"""Define one run: its plan, its paths, and the state of its stages."""

import time
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from ropext.base.atomic import os_errors
from ropext.base.lengths import doubling_grid
from ropext.base.locks import run_folder
from ropext.base.narration import NOBODY, Call, file_progress, scrub
from ropext.base.workdir import MANIFEST, Flat
from ropext.files.checkpoint import Snapshot, open_snapshot, with_weights
from ropext.files.checkpoint.digests import check_code
from ropext.files.inspecting import plan_of, with_untrained_results
from ropext.models.processes import is_main
from ropext.options.fields import EVALUATE, EXTEND, FINETUNE, FIT
from ropext.pipeline.checked_recipe import placed_gates
from ropext.pipeline.recipe import Recipe
from ropext.pipeline.run_digests import RunDigests
from ropext.planning import Plan
from ropext.results import BASE, CONTROL, EXTENDED, FITTED, TUNED, UNTOUCHED
from ropext.results.gates import Gate, GateMetrics
from ropext.results.measurement import MeasuredModel

if TYPE_CHECKING:
    from ropext.evaluation.lineup import Lineup

# The folder of each stage's checkpoint, which is also its label in the evaluation.
LABELS = {EXTEND: EXTENDED, FIT: FITTED, FINETUNE: TUNED}
EVALUATION = "evaluation"
LOG = "log.txt"
# Every run evaluates these models and its checkpoints.
READ_ALWAYS = (BASE, UNTOUCHED)
USED = "documents_used"  # documents for the choice, documents for the verdict


@dataclass(frozen=True)
class RunContext:
    """One run: its recipe, its model, the plan of its extension, and its paths."""

    recipe: Recipe
    base: Snapshot
    plan: Plan
    output: Path  # the finished checkpoint
    call: Call = NOBODY

    @property
    def checkpoint_stages(self) -> tuple[str, ...]:
        """Return the stages of this run that make a checkpoint, in their order."""
        return tuple(name for name in self.recipe.stages if name in LABELS)

    @property
    def stage_labels(self) -> tuple[str, ...]:
        """Return the labels of the checkpoints, in the order in which they are made."""
        return tuple(LABELS[name] for name in self.checkpoint_stages)

    @property
    def final(self) -> str:
        """Return the label of the checkpoint that becomes the output."""
        return self.stage_labels[-1]

    @property
    def labels(self) -> tuple[str, ...]:
        """Return the labels of the models to evaluate."""
        if self.has_control:
            return (*READ_ALWAYS, CONTROL, *self.stage_labels)
        return READ_ALWAYS + self.stage_labels

    @property
    def has_control(self) -> bool:
        """Return whether the recipe of a run trains a control, too."""
        return self.recipe.finetune is not None and self.recipe.finetune.control

    @property
    def gates(self) -> tuple[Gate, ...]:
        """Return the recipe's gates, each with its model."""
        return placed_gates(self.recipe, self.labels, self.final)

    def check_gates(self) -> None:
        """Refuse a gate about a number that will not be measured, before hours of other work.

        If no lengths are given, short documents may remove lengths later; that is checked later.
        """
        if self.recipe.evaluate is None:
            return
        options = self.recipe.evaluate_options()
        grid = options.lengths or doubling_grid(self.plan.context, self.plan.target)
        with self.recipe.source.naming(EVALUATE):
            models = dict.fromkeys(self.labels, MeasuredModel())
            GateMetrics(options, models, grid).check(self.gates)

    @property
    def folder(self) -> Path:
        """Return OUT.run, the folder of all other files of the run."""
        return run_folder(self.output)

    @cached_property
    def digests(self) -> RunDigests:
        """Return the digests of files that the stages of a run share."""
        return RunDigests(file_progress(self.call.hooks.say))

    def say(self, sentence: str) -> None:
        """Print a sentence, and write it to the log with its time."""
        if is_main():
            self.call.hooks.say(sentence)
        self.note(sentence)

    @cached_property
    def call_of_stages(self) -> Call:
        """Return the call for a stage: it replaces files of this run, and its messages go to the
        log."""
        return replace(self.call, hooks=replace(self.call.hooks, say=self.say), force=True)

    def note(self, sentence: str) -> None:
        """Write a sentence to the log alone. Only the log holds times; a dry run has no log."""
        if is_main() and (self.folder / MANIFEST).is_file():
            stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            log = self.folder / LOG
            with os_errors(log), log.open("a", encoding="utf-8") as stream:
                stream.write(f"{stamp} {scrub(sentence)}\n")

    def checkpoint(self, stage: str) -> Path:
        """Return the path of a stage's checkpoint.

        The folder has the name of the finished one, so that its card and commands name the output.
        """
        return self.folder / LABELS[stage] / self.output.name

    @property
    def checkpoints(self) -> dict[str, Path]:
        """Return the directory of each checkpoint by its label, in the order of the stages."""
        return {label: self.folder / label / self.output.name for label in self.stage_labels}

    @property
    def control(self) -> Path:
        """Return the path of the control's adapter, inside the tuned checkpoint."""
        return self.checkpoint(FINETUNE) / CONTROL

    @property
    def evaluation(self) -> Path:
        """Return the folder of the evaluation inside the folder of a run."""
        return self.folder / EVALUATION

    @cached_property
    def whole_base(self) -> Snapshot:
        """Return the base model with all its weights on disk."""
        return with_weights(self.base)

    def checkpoint_digest(self, stage: str) -> Flat | None:
        """Return the digest of a stage's checkpoint by its label; None if there is none."""
        content = self.digests.of_tree(self.checkpoint(stage))
        return None if content is None else {LABELS[stage]: content}

    def contents(self) -> dict[str, str]:
        """Return the digests of all bytes of the base and of each checkpoint, by label."""
        made = {
            label: str(self.digests.of_tree(place)) for label, place in self.checkpoints.items()
        }
        if self.has_control:
            made[CONTROL] = str(self.digests.of_tree(self.control))
        return {"base": self.digests.of_model(self.whole_base)} | made

    def contents_key(self) -> Flat:
        """Return the digests of `contents` as a part of a stage's key."""
        return {f"checkpoint.{label}": content for label, content in self.contents().items()}

    def lineup(self) -> "Lineup":
        """Return the models to evaluate."""
        from ropext.evaluation.lineup import line_up_checkpoints

        return line_up_checkpoints(
            self.whole_base,
            {label: open_snapshot(str(place)) for label, place in self.checkpoints.items()},
            context=self.plan.context,
            limit=self.plan.target,
            contents=self.contents(),
            control=self.control if self.has_control else None,
        )


def plan_run(recipe: Recipe, output: Path, call: Call = NOBODY) -> RunContext:
    """Open the model of a recipe and plan its extension.

    Refuse a local model without weights, a gate that will not be measured, and model code that
    cannot be verified.
    """
    base = open_snapshot(recipe.model, revision=recipe.revision)
    if not base.is_on_hub:
        base.require_weights()
    plan = plan_of(base, recipe.extend_options(), base.name)
    plan.raise_if_refused()
    if not recipe.trains:
        plan = with_untrained_results(plan)
        plan.require_training()
    work = RunContext(recipe, base, plan, output, call)
    work.check_gates()
    if call.trust_remote_code:  # refused now, not after hours of other work
        check_code(base)
    return work
