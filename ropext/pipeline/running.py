"""Run a recipe from beginning to end, or estimate the work from its options alone.

A stage that is done is skipped. An estimate reads no weight and no document.

OUT/              the finished checkpoint
OUT.run/          recipe.yaml, run.json (resolved, versions, command), log.txt (the time stamps)
  stages/         the folder of each stage
  extended/ …     the checkpoints, weights hard-linked to one another
  evaluation/     as `ropext eval -o` writes it
  report.html, report.md, outcome.json
"""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ropext.base import guard
from ropext.base.atomic import os_errors, write_text
from ropext.base.errors import OutputExists, UsageError
from ropext.base.inputs import from_home
from ropext.base.jsontext import JsonObject
from ropext.base.narration import Call, clean_command, scrub
from ropext.base.staging import check_place, recover
from ropext.base.workdir import Workdir
from ropext.files.checkpoint import provenance
from ropext.models.processes import is_main, rank_and_count, wait_for_everyone
from ropext.options.fields import EVALUATE
from ropext.pipeline import checked_recipe, run_output
from ropext.pipeline.evidence import Evidence, evidence_of
from ropext.pipeline.python_results import DONE, Ran
from ropext.pipeline.recipe import REPORT, STAGES, Recipe
from ropext.pipeline.run_context import RunContext, plan_run
from ropext.pipeline.stage import Stage, resumable_run
from ropext.pipeline.stages import stages_of

if TYPE_CHECKING:
    from ropext.pipeline.auto_plan import PlannedChoice

RECIPE = "recipe.yaml"
SKIPPED = "skipped"


@dataclass(frozen=True)
class WantedStages:
    """The stages that the user wants: from `begin` on again, `only` one, or all unfinished ones."""

    begin: str | None = None
    only: str | None = None

    def check(self, known: Sequence[str]) -> None:
        """Refuse a stage that the run does not have."""
        if self.begin and self.only:
            raise UsageError("--from and --only exclude each other; give one")
        for flag, name in (("--from", self.begin), ("--only", self.only)):
            if name is not None and name not in known:
                why = "the recipe has no such section" if name in STAGES else "no such stage"
                raise UsageError(
                    f"{flag} {name}: {why}; the stages of this run are {', '.join(known)}"
                )

    def repeats(self, name: str) -> bool:
        """Return True if a stage is done again even if nothing changed."""
        if self.only is not None:
            return name == self.only
        return self.begin is not None and STAGES.index(name) >= STAGES.index(self.begin)


UNFINISHED = WantedStages()


def run(
    recipe: Recipe, output: str | Path | None, call: Call, stages: WantedStages = UNFINISHED
) -> Ran:
    """Run a recipe; skip a stage if its inputs did not change. `--method auto` chooses the method
    first, unless that was done before."""
    wait_for_everyone()  # so that the other processes notice if one raises
    place = _place_of(recipe, output)
    if place is None:
        raise UsageError(f"{recipe.source.name} names no output; add output: DIR, or give -o OUT")
    _check_asked(recipe, place, call, stages)
    with resumable_run(place):
        if recipe.is_auto:
            from ropext.pipeline import auto

            auto.check_auto_output(place, call)
            recipe = auto.choose_method(recipe, place, call)
            _check_asked(recipe, place, call, stages)
        return _run_stages(plan_run(recipe, place, call), stages)


def forecast(
    recipe: Recipe, output: str | Path | None, call: Call, stages: WantedStages = UNFINISHED
) -> "RunCounts | PlannedChoice":
    """Return an estimate of the work of each unfinished stage, from its options alone.

    No weight is read. With `--method auto`, return the planned choice, which reads the documents.
    """
    place = _place_of(recipe, output)
    _check_asked(recipe, place, call, stages)
    if recipe.is_auto:
        from ropext.pipeline import auto
        from ropext.pipeline.auto_plan import plan_choice

        if place is not None:
            auto.check_auto_output(place, call)
        return plan_choice(recipe, call)
    with tempfile.TemporaryDirectory(prefix="ropext-count-") as nothing_is_done:
        work = plan_run(recipe, place or Path(nothing_is_done, "OUT"), call)
        if place is not None:
            _check_places(work)
        return _count_stages(work, stages)


def _place_of(recipe: Recipe, output: str | Path | None) -> Path | None:
    """Return the path of the finished checkpoint, which the recipe may name."""
    given = output or recipe.output
    return None if given is None else from_home(given)


def _check_asked(recipe: Recipe, output: Path | None, call: Call, stages: WantedStages) -> None:
    """Refuse to write over, into or around an input.

    Also refuse a stage that the run does not have, and missing documents.
    """
    if output is not None:
        checked_recipe.check_places(recipe, output, call.keep_previous)
    stages.check(STAGES if recipe.is_auto else recipe.stages)  # before a choice of hours
    checked_recipe.check_data(recipe)


@dataclass(frozen=True)
class RunCounts:
    """The estimated work of each requested stage of a run."""

    model: str
    stages: Mapping[str, JsonObject]  # a sentence under `what`, the numbers behind it

    def rows(self) -> list[tuple[str, str]]:
        """Return each stage with its sentence."""
        return [(name, stage["what"]) for name, stage in self.stages.items()]

    def to_json(self) -> JsonObject:
        """Return what `ropext run --dry-run --json` prints."""
        return {"model": self.model, "stages": self.stages}


def _workdir_of(work: RunContext) -> Workdir:
    """Return the folder of a run, OUT.run. Its run.json records the recipe, the command and the
    versions. The folder of each stage records the inputs that decide its numbers."""
    about = {
        "recipe": work.recipe.source.name,
        "resolved": work.recipe.resolved(),
        "words": list(clean_command(work.call.command)),
        "versions": provenance.versions(),
    }
    return Workdir(work.output, "run", {}, about)


def _count_stages(work: RunContext, wanted: WantedStages) -> RunCounts:
    """Count every stage that a run would do. If a stage would be done again, so would every stage
    that starts from its checkpoint."""
    counts = dict[str, JsonObject]()
    remade = set[str]()
    for stage in _requested_stages(work, wanted):
        again = wanted.repeats(stage.name) or not remade.isdisjoint(stage.starts_from)
        if not again and stage.finished_files() is not None:
            counts[stage.name] = {"what": "done before, skipped", "skipped": True}
        else:
            remade.add(stage.name)
            counts[stage.name] = stage.counts()
    return RunCounts(work.recipe.model, counts)


def _run_stages(work: RunContext, wanted: WantedStages) -> Ran:
    """Do all requested stages that are not done, in the folder of the run, which no other process
    may enter meanwhile."""
    _check_places(work)
    rank, world = rank_and_count()
    with _workdir_of(work).claimed(work.call.force, rank, world):
        text = work.recipe.source.text
        if is_main():
            recover(work.output)  # if all stages are done, nothing else recovers the output
            recipe = work.folder / RECIPE
            with os_errors(recipe):
                recipe.unlink(missing_ok=True)
            if text is not None:  # the recipe's own text, in the folder of the manifest
                write_text(recipe, guard.signed(scrub(text)))
        wait_for_everyone()
        words = clean_command(work.call.command)
        work.note(f"begin: {' '.join(words) or 'from Python'}")
        try:
            return _do_stages(work, wanted)
        finally:
            work.note("end")


def _check_places(work: RunContext) -> None:
    """Refuse an output, or a folder of the run, that holds something else."""
    if is_main():
        _workdir_of(work).check(work.call.force)
        recipe = work.folder / RECIPE
        if recipe.is_file() and not guard.is_signed(recipe):
            raise OutputExists(f"{recipe} is not as ropext wrote it; {guard.MOVE}")
    check_place(work.output)
    if is_main():
        run_output.check_output_is_free(work)


def _do_stages(work: RunContext, wanted: WantedStages) -> Ran:
    """Do the requested stages, and return the result of the run."""
    done = dict[str, str]()
    for stage in _requested_stages(work, wanted):
        made = stage.do_once(work.say, wanted.repeats(stage.name))
        done[stage.name] = DONE if made else SKIPPED
    measured = REPORT in done or EVALUATE in done
    evidence = evidence_of(work) if measured else Evidence(None, ())
    output = work.output if REPORT in done and evidence.passed else None
    return Ran(output, work.folder, work.final, done, work.output, evidence)


def _requested_stages(work: RunContext, wanted: WantedStages) -> Iterator[Stage]:
    """Yield the requested stages of a run. With --only, skip the other stages.

    Raise UsageError if a stage before the only one is not done.
    """
    only = wanted.only
    for stage in (*stages_of(work), run_output.ReportStage(work)):
        if only in (None, stage.name):
            yield stage
            continue
        is_before = STAGES.index(stage.name) < STAGES.index(only)
        if is_before and stage.finished_files() is None:
            raise UsageError(
                f"--only {only} needs {stage.name}, which is not done with this recipe; run "
                f"without --only, or --only {stage.name} first"
            )
