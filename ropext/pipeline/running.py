"""A whole run, from a recipe to the finished checkpoint: in order, skipping what is done.

OUT/              the finished checkpoint (a grid: OUT/CELL)
OUT.run/          recipe.yaml, run.json (resolved, versions, command), log.txt (the time stamps)
  stages/         a record of each stage
  extended/ …     the checkpoints, weights hard-linked to one another
  evaluation/     as `ropext eval -o` writes it
  report.html, report.md
  cells/CELL/     in a grid all of this for each cell; report.html is then the comparison
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from ropext import guard
from ropext.checkpoint import open_snapshot, provenance, with_weights
from ropext.checkpoint.staging import check_place
from ropext.errors import Interrupted, OutputExists, RopextError, UsageError
from ropext.evaluation.work import processes, wait_for
from ropext.files import read_json, write_json, write_text
from ropext.narration import Hooks, Say, Show, silent, told_of_files, unseen
from ropext.options.fields import EVALUATE
from ropext.pipeline import job, outcome, stages
from ropext.pipeline.job import REPORT, STAGES, Recipe
from ropext.pipeline.outcome import CellRan, Choice, Evidence, Ran
from ropext.pipeline.stages import Hashes, Stage, is_done
from ropext.pipeline.steps import EVALUATION, READ_ALWAYS, CellWork
from ropext.report import evaluation
from ropext.results import rundir
from ropext.workdir import MANIFEST, Flat, Ledger, Piece, Workdir


def compare(works: Sequence[CellWork], folder: Path, again: bool) -> dict[str, Any]:
    """comparison.json, report.md and report.html of the grid; the base is the reference. What is
    there of these very evaluations is read back, unless it is to be made again."""
    runs = {work.cell.name: rundir.read_run(work.evaluation) for work in works}
    keys = {work.cell.name: [work.final, runs[work.cell.name].key] for work in works}
    kept = folder / "comparison.json"
    if not again and kept.is_file() and (folder / "report.html").is_file():
        found: dict[str, Any] = read_json(kept)
        if found.get("cells") == keys:
            return found
    first, spectra = next(iter(runs.values())), dict[str, Sequence[float]]()
    everyone = {label: own for label, own in first.contenders.items() if label in READ_ALWAYS}
    for work in works:
        name, run = work.cell.name, runs[work.cell.name]
        everyone[name] = replace(run.contenders[work.final], label=name)
        if inv_freq := run.results["variants"][work.final].get("inv_freq"):
            spectra[name] = inv_freq
    compared = evaluation.compare(everyone)
    compared.write(folder, runs, spectra)
    data = {"cells": keys} | compared.to_json()
    write_json(kept, data)
    return data


LOG, RECIPE = "log.txt", "recipe.yaml"
DONE, SKIPPED = "done", "skipped"


def run(
    recipe: str | Path | Mapping[str, Any] | Recipe,
    output: str | Path | None = None,
    *,
    overrides: Sequence[str] = (),
    trust_remote_code: bool = False,
    begin: str | None = None,
    only: str | None = None,
    force: bool = False,
    command: Sequence[str] = (),
    say: Say = silent,
    show: Show = unseen,
) -> Ran:
    """Do what a recipe says: plan, extend, prove, fit, fine-tune, evaluate, report.

    A stage whose inputs did not change is skipped, so a second run does nothing. `recipe` is a
    file, or its content as a mapping; `overrides` are `key=value`; `begin` and `only` name a stage.
    `Ran.raise_if_failed` turns failed cells and gates into an error. `show` gets the progress of an
    evaluation: what is done, of how much, and what it is.
    """
    asked = asked_for(recipe, overrides)
    asked = replace(asked, trust_remote_code=trust_remote_code or asked.trust_remote_code)
    place = output or asked.output
    if place is None:
        raise UsageError(f"{asked.name} names no output; add output: DIR, or give -o OUT")
    asked.check_places(Path(place))
    if asked.is_auto:
        from ropext.pipeline import choosing

        hooks = Hooks(say, show)
        asked = choosing.settled(asked, Path(place), force=force, command=command, hooks=hooks)
    whole = WholeRun(asked, Path(place), Choice(begin, only), force, command, say, show)
    return whole.go()


def asked_for(recipe: str | Path | Mapping[str, Any] | Recipe, words: Sequence[str] = ()) -> Recipe:
    """The job of whatever `run` takes."""
    if isinstance(recipe, Recipe):
        return recipe
    if isinstance(recipe, Mapping):
        return job.from_mapping(recipe, words)
    return job.from_file(recipe, words)


class WholeRun:
    """One run and its directory."""

    def __init__(
        self,
        asked: Recipe,
        output: Path,
        choice: Choice,
        force: bool,
        command: Sequence[str] = (),
        say: Say = silent,
        show: Show = unseen,
    ) -> None:
        choice.check(asked)
        asked.check_places(output)
        self.job, self.output, self.choice, self.force = asked, output, choice, force
        self.command, self.show = command, show
        self.rank, self.world = processes()
        self._say = say if self.rank == 0 else silent
        if output.name in ("", ".", ".."):
            raise UsageError(f"{output} (--output) does not name a directory of its own")
        about = {
            "recipe": asked.name,
            "resolved": asked.resolved(),
            "words": list(provenance.clean_command(command)) if command else [],
            "versions": provenance.versions(),
        }
        # What decides the numbers says the record of each stage.
        self.workdir = Workdir(output, "run", {}, about)
        self.folder = self.workdir.folder

    def say(self, sentence: str) -> None:
        """Tell the user, and write it to the log with its time."""
        self._say(sentence)
        self.note(sentence)

    def note(self, sentence: str) -> None:
        """Write to the log alone; the one place that holds times."""
        if self.rank == 0:
            stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            with (self.folder / LOG).open("a", encoding="utf-8") as stream:
                stream.write(f"{stamp} {provenance.scrub(sentence)}\n")

    def go(self) -> Ran:
        """Do all cells; one that fails does not keep the others from their end."""
        works, failed = self.ready()
        with self.workdir.claimed(self.force, self.rank, self.world):
            self._keep_recipe()
            self.note(f"begin: {' '.join(provenance.clean_command(self.command))}")
            for name, reason in failed.items():
                self.note(f"{name} failed: {reason}")
            try:
                return self._all(works, failed)
            finally:
                if self.rank == 0:
                    self.hashes.save()
                    self.note("end")

    def ready(self) -> tuple[list[CellWork], dict[str, str]]:
        """Return the cells that can begin, and why the others cannot: all that is refused before
        anything is written, which a dry run refuses too. Alone, a cell's error is the run's."""
        self.job.check_data()
        base = open_snapshot(self.job.model, revision=self.job.value("revision"))
        if base.hub_id != base.name:
            with_weights(base)  # weights that should lie here and do not
        if self.rank == 0:
            self.workdir.check(self.force)
            self._check_recipe()
        self.hashes = Hashes(self.folder / ".hashes.json", told_of_files(self._say))
        works, failed = self._works(base), dict[str, str]()
        for work in works:
            check_place(work.output)
            with self._kept(work, failed, self._say):
                _ = work.plan
                if self.rank == 0:
                    outcome.check_free(work)
        works = [work for work in works if work.cell.name not in failed]
        for work in works:
            work.limit = max(own.plan.target for own in works)
            work.check_gates()
        return works, failed

    def _works(self, base: Any) -> list[CellWork]:
        works = []
        for cell in self.job.cells():
            own = self.folder / "cells" / cell.name if cell.name else self.folder
            works.append(
                CellWork(
                    job=self.job,
                    cell=cell,
                    output=self.output / cell.name if cell.name else self.output,
                    folder=own,
                    base=base,
                    hashes=self.hashes,
                    say=self._cell_say(cell.name),
                    command=self.command,
                    force=self.force,
                    show=self.show,
                )
            )
        return works

    def _cell_say(self, name: str) -> Say:
        return (lambda sentence: self.say(f"{name}: {sentence}")) if name else self.say

    def _all(self, works: list[CellWork], failed: dict[str, str]) -> Ran:
        ran = list[CellRan]()
        for work in works:
            work.siblings = tuple(own.folder / EVALUATION for own in works if own is not work)
            with self._kept(work, failed, self.say):
                ran.append(self._cell(work))
        compared = self._compare([work for work in works if work.cell.name not in failed])
        return Ran(self.output, self.folder, tuple(ran), failed, compared)

    @contextmanager
    def _kept(self, work: CellWork, failed: dict[str, str], say: Say) -> Iterator[None]:
        """In a grid a cell's error is told and kept; alone it is the run's."""
        try:
            yield
        except Interrupted:
            raise  # the end of the run, not of a cell
        except RopextError as error:
            if not work.cell.name:
                raise
            failed[work.cell.name] = str(error)
            say(f"{work.cell.name} failed: {error}")

    def _cell(self, work: CellWork) -> CellRan:
        done: dict[str, str] = {}
        for stage in (*work.stages(), outcome.report_stage(work)):
            if self.choice.only not in (None, stage.name):
                require(stage, work, str(self.choice.only))
                continue
            done[stage.name] = self._stage(stage, work)
        measured = REPORT in done or EVALUATE in done
        found = outcome.evidence_of(work) if measured else Evidence(None, ())
        output = work.output if REPORT in done and found.passed else None
        return CellRan(work.cell.name, output, work.folder, work.final, done, found)

    def _stage(self, stage: Stage, work: CellWork) -> str:
        """Do one stage, or find that it is done."""
        inputs = stage.inputs()
        left = None if self.choice.again(stage.name) else is_done(work.ledger, stage, inputs)
        record = work.ledger.read(stage.name)
        if left is not None and record is not None:
            if record.outputs is None and self.rank == 0:
                stage.tidy()
                stage.write(work.ledger, inputs, left)
            other = stages.other_versions(record)
            hint = f" ({other}; --from {stage.name} does it again)" if other else ""
            work.say(f"{stage.name}: done before, skipped{hint}")
            return SKIPPED
        if self.rank == 0:
            self._prepare(stage, work, inputs)
        if self.rank == 0 or stage.everyone:
            begun = time.monotonic()
            stage.do()
            self.note(f"{stage.name}: took {time.monotonic() - begun:.1f} s")
        if self.rank == 0:
            stage.write(work.ledger, inputs, stage.look())
            self.hashes.save()
        else:
            path = work.ledger.folder / f"{stage.name}.json"
            wait_for(path, lambda: is_finished(work.ledger, stage, inputs), lambda: False)
        return DONE

    def _prepare(self, stage: Stage, work: CellWork, inputs: Flat) -> None:
        """Say what is done and why; begin its record, without what another one left."""
        record = work.ledger.read(stage.name)
        goes_on = record is not None and record.outputs is None
        changed = None if record is None else stage.why_again(record, inputs)
        if goes_on and changed is None and not self.choice.again(stage.name):
            work.say(f"{stage.name}: goes on from where it was interrupted")
        else:
            work.say(f"{stage.name}{self._why(record, stage, changed)}")
            stage.clear()
        stage.write(work.ledger, inputs, None)

    def _why(self, record: Piece | None, stage: Stage, changed: str | None) -> str:
        if record is None:
            return ": begins"
        if self.choice.again(stage.name):
            return ": again, as asked"
        if changed is None:
            return ": again, for what it wrote is gone or was edited"
        return f": again ({changed})"

    def _compare(self, works: list[CellWork]) -> Mapping[str, Any] | None:
        """The end of a grid."""
        evaluated = [work for work in works if (work.evaluation / "results.json").is_file()]
        if self.rank != 0 or self.choice.only not in (None, REPORT) or len(evaluated) < 2:
            return None
        return compare(evaluated, self.folder, self.choice.again(REPORT))

    def _keep_recipe(self) -> None:
        """The file as it is, beside the manifest; the other processes wait for that."""
        if self.rank != 0:
            wait_for(self.folder / MANIFEST, self.workdir.has_begun, lambda: False)
            return
        (self.folder / RECIPE).unlink(missing_ok=True)
        if self.job.text is not None:
            write_text(self.folder / RECIPE, guard.signed(provenance.scrub(self.job.text)))

    def _check_recipe(self) -> None:
        """Refuse to replace a recipe that was edited."""
        kept = self.folder / RECIPE
        if kept.is_file() and guard.signed(text := kept.read_text(encoding="utf-8")) != text:
            raise OutputExists(f"{kept} is not as ropext wrote it; {guard.MOVE}")


def is_finished(ledger: Ledger, stage: Stage, inputs: Flat) -> bool:
    """For the processes that wait for the first one."""
    found = ledger.read(stage.name)
    return found is not None and found.outputs is not None and not stage.why_again(found, inputs)


def require(stage: Stage, work: CellWork, chosen: str) -> None:
    """With --only, the stages before must be done; those after are left as they are."""
    if STAGES.index(stage.name) > STAGES.index(chosen):
        return
    if is_done(work.ledger, stage) is None:
        raise UsageError(
            f"--only {chosen} needs {stage.name}, which is not done with this recipe; run "
            f"without --only, or --only {stage.name} first"
        )
