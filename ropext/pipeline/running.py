"""A whole run, from a recipe to the finished checkpoint: in order, skipping what is done; and what
it would take, by its options alone (no weight and no document is read for that).

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
from typing import TYPE_CHECKING, Protocol

from ropext import guard
from ropext.atomic import os_errors, write_text
from ropext.checkpoint import provenance
from ropext.checkpoint.staging import check_place, recover
from ropext.errors import OutputExists, UsageError
from ropext.inputs import from_home
from ropext.jobs import Job
from ropext.jsontext import JsonObject
from ropext.models.processes import from_first, rank_and_count, wait_for_everyone
from ropext.narration import Call, clean_command, scrub
from ropext.options.fields import EVALUATE, FIT
from ropext.options.recipe import REPORT, STAGES, Recipe
from ropext.pipeline import job, outcome
from ropext.pipeline.evidence import Evidence, evidence_of
from ropext.pipeline.ran import DONE, Ran
from ropext.pipeline.stage import Stage, resumable
from ropext.pipeline.steps import stages_of
from ropext.pipeline.work import LABELS, PlannedRun, Work, plan_run
from ropext.workdir import Workdir

if TYPE_CHECKING:
    from ropext.pipeline.prospect import Prospect

RECIPE = "recipe.yaml"
SKIPPED = "skipped"


@dataclass(frozen=True)
class Stages:
    """Which stages are asked for: from `begin` on again, `only` one, or all that are not done."""

    begin: str | None = None
    only: str | None = None

    def check(self, known: Sequence[str]) -> None:
        """Refuse a stage that is none of these."""
        if self.begin and self.only:
            raise UsageError("--from and --only exclude each other; give one")
        for flag, name in (("--from", self.begin), ("--only", self.only)):
            if name is not None and name not in known:
                why = "the recipe has no such section" if name in STAGES else "no such stage"
                raise UsageError(
                    f"{flag} {name}: {why}; the stages of this run are {', '.join(known)}"
                )


NOT_DONE = Stages()


def run(recipe: Recipe, output: str | Path | None, call: Call, stages: Stages = NOT_DONE) -> Ran:
    """Do what a recipe says; a stage whose inputs did not change is skipped."""
    wait_for_everyone()  # so that one that is refused is noticed by the others
    request = RunRequest(recipe, stages)
    place = request.place(output)
    if place is None:
        raise UsageError(f"{recipe.source.name} names no output; add output: DIR, or give -o OUT")
    return request.prepared(place, call).make(place, call)


@dataclass(frozen=True)
class RunRequest:
    """A recipe that is to be run."""

    recipe: Recipe
    stages: Stages = NOT_DONE

    def place(self, output: str | Path | None) -> Path | None:
        """Where the finished checkpoint is to be."""
        given = output or self.recipe.output
        return None if given is None else from_home(given)

    def prepared(self, output: Path | None, call: Call) -> Job["Forecast", Ran]:
        """Open the model and plan; of `--method auto` that comes after the choice. To write over,
        into or around what is read is refused."""
        recipe = self.recipe
        if output is not None:
            job.check_places(recipe, output, call.keep_previous)
        if recipe.is_auto:
            self.stages.check(STAGES)  # before a choice of hours
            job.check_data(recipe)
            return AutoJob(self, call)
        self.stages.check(recipe.stages)
        job.check_data(recipe)
        planned = plan_run(recipe)
        if call.trust_remote_code:  # refused now, not after hours of other work
            provenance.check_code(planned.base)
        return RunJob(planned, self.stages, output, call)


class Forecast(Protocol):
    """What a dry run tells of a run."""

    def rows(self) -> list[tuple[str, str]]:
        """Each stage with what it would take, in a sentence."""

    def to_json(self) -> JsonObject: ...


@dataclass(frozen=True)
class RunCounts:
    """What each stage of a run that is asked for would take."""

    model: str
    stages: Mapping[str, JsonObject]  # a sentence under `what`, the numbers behind it

    def rows(self) -> list[tuple[str, str]]:
        """Each stage with its sentence."""
        return [(name, stage["what"]) for name, stage in self.stages.items()]

    def to_json(self) -> JsonObject:
        return {"model": self.model, "stages": self.stages}


@dataclass(frozen=True)
class AutoJob:
    """A run whose method is chosen first, by measurement."""

    request: RunRequest
    call: Call  # who hears what counting finds

    def check(self, output: Path, call: Call) -> None:
        """Refuse an output, or a folder of the run, that holds something else."""
        from ropext.pipeline import choosing

        choosing.check(output, call)

    def counts(self) -> "Prospect":
        """Read the config and the documents, and count what would be tried on them."""
        from ropext.pipeline.prospect import prospect

        return prospect(self.request.recipe, self.call)

    def make(self, output: Path, call: Call) -> Ran:
        """Choose, unless that was done before, and run what was chosen."""
        from ropext.pipeline import choosing

        with resumable(output):
            self.check(output, call)
            recipe = choosing.choose(self.request.recipe, output, call)
            chosen = RunRequest(recipe, self.request.stages)
            return chosen.prepared(output, call).make(output, call)


@dataclass(frozen=True)
class RunJob:
    """A run that is planned."""

    planned: PlannedRun
    stages: Stages
    place: Path | None  # where counting looks for what is done
    call: Call  # who hears what counting finds

    def work(self, output: Path, call: Call) -> Work:
        """Set it to work."""
        planned = self.planned
        return Work(planned.recipe, planned.base, planned.plan, output, call)

    def check(self, output: Path, call: Call) -> None:
        """Refuse an output, or a folder of the run, that holds something else."""
        WholeRun(self.work(output, call), self.stages).check()

    def counts(self) -> RunCounts:
        """Count every stage that would be done, by its options: no weight and no document is
        read."""
        with tempfile.TemporaryDirectory(prefix="ropext-count-") as nothing_is_done:
            place = self.place or Path(nothing_is_done, "OUT")
            run = WholeRun(self.work(place, self.call), self.stages)
            counts = dict[str, JsonObject]()
            for stage, is_kept in _coming(run):
                if is_kept:
                    counts[stage.name] = {"what": "done before, skipped", "skipped": True}
                else:
                    counts[stage.name] = stage.counts()
        return RunCounts(self.planned.recipe.model, counts)

    def make(self, output: Path, call: Call) -> Ran:
        """Do all stages that are asked for and were not done."""
        with resumable(output):
            return WholeRun(self.work(output, call), self.stages).go()


class WholeRun:
    """One run, stage by stage."""

    def __init__(self, work: Work, stages: Stages) -> None:
        self.work = work
        self.begin = stages.begin
        self.only = stages.only
        self.rank, self.world = rank_and_count()
        about = {
            "recipe": work.recipe.source.name,
            "resolved": work.recipe.resolved(),
            "words": list(clean_command(work.call.command)),
            "versions": provenance.versions(),
        }
        # What decides the numbers says the folder of each stage.
        self.workdir = Workdir(work.output, "run", {}, about)
        self.recipe = work.folder / RECIPE

    def go(self) -> Ran:
        """Do all stages."""
        work = self.work
        self.check()
        with self.workdir.claimed(work.call.force, self.rank, self.world):
            text = work.recipe.source.text
            if self.rank == 0:
                recover(work.output)  # where all is done, nothing else sweeps up beside it
                with os_errors(self.recipe):
                    self.recipe.unlink(missing_ok=True)
                if text is not None:  # the file as it is, beside the manifest
                    write_text(self.recipe, guard.signed(scrub(text)))
            wait_for_everyone()
            words = clean_command(work.call.command)
            work.note(f"begin: {' '.join(words) or 'from Python'}")
            try:
                return self._all(work)
            finally:
                if self.rank == 0:
                    work.note("end")

    def check(self) -> None:
        """Refuse an output, or a folder of the run, that holds something else."""
        work = self.work
        if self.rank == 0:
            self.workdir.check(work.call.force)
            if self.recipe.is_file():
                text = self.recipe.read_text(encoding="utf-8")
                if guard.signed(text) != text:
                    raise OutputExists(f"{self.recipe} is not as ropext wrote it; {guard.MOVE}")
        check_place(work.output)
        if self.rank == 0:
            outcome.check_free(work)

    def _all(self, work: Work) -> Ran:
        done: dict[str, str] = {}
        for step in self.steps():
            again = self.does_again(step.name)
            made = work.place_of(step).do(work.say, again, self.rank, from_first)
            done[step.name] = DONE if made else SKIPPED
        measured = REPORT in done or EVALUATE in done
        evidence = evidence_of(work) if measured else Evidence(None, ())
        output = work.output if REPORT in done and evidence.passed else None
        return Ran(output, work.folder, work.final, done, work.output, evidence)

    def does_again(self, name: str) -> bool:
        """Whether a stage is done even where nothing changed."""
        if self.only is not None:
            return name == self.only
        return self.begin is not None and STAGES.index(name) >= STAGES.index(self.begin)

    def steps(self) -> Iterator[Stage]:
        """Those that are asked for. With --only, the ones before must be done; those after are left
        as they are."""
        work = self.work
        only = self.only
        stages = stages_of(work)
        stages.append(outcome.ReportStage(work))
        for step in stages:
            if only in (None, step.name):
                yield step
                continue
            is_before = STAGES.index(step.name) < STAGES.index(only)
            if is_before and not work.has_done(step):
                raise UsageError(
                    f"--only {only} needs {step.name}, which is not done with this recipe; run "
                    f"without --only, or --only {step.name} first"
                )


def _coming(run: WholeRun) -> list[tuple[Stage, bool]]:
    """The stages that are asked for, and whether each would be skipped."""
    coming = list[tuple[Stage, bool]]()
    changed = False  # a checkpoint that later stages start from
    for step in run.steps():
        starts_anew = changed and step.name != FIT  # a fit starts from the base
        again = run.does_again(step.name) or starts_anew
        is_kept = not again and run.work.has_done(step)
        coming.append((step, is_kept))
        changed = changed or (step.name in LABELS and not is_kept)
    return coming
