"""Write the output of a run: the finished checkpoint with its evidence, and the report.

The output is the last checkpoint of the run under the requested name. Its weights are hard links;
its card and record have the measurements. If a gate failed, the output is not written.
"""

import os
from dataclasses import replace
from pathlib import Path

from ropext.base import guard
from ropext.base.atomic import os_errors
from ropext.base.errors import InputError, OutputExists
from ropext.base.jsontext import JsonObject, digest, read_json, write_json
from ropext.base.locks import run_folder
from ropext.base.narration import clean_command
from ropext.base.staging import Output, check_output, recover, staged
from ropext.base.table import with_rows
from ropext.base.workdir import STEPS, Flat
from ropext.files.checkpoint import card, provenance
from ropext.files.checkpoint.provenance import Record, read_record
from ropext.files.checkpoint.writing import copy_file, place
from ropext.pipeline.checked_recipe import previous_output
from ropext.pipeline.evidence import SECTION, Evidence, compared_runs_key, evidence_of, run_section
from ropext.pipeline.python_results import OUTCOME, write_outcome
from ropext.pipeline.recipe import REPORT
from ropext.pipeline.report_page import write_report
from ropext.pipeline.run_context import RunContext
from ropext.pipeline.run_digests import RunDigests
from ropext.pipeline.stage import Stage
from ropext.results.report import tables
from ropext.results.report.gates import gate_table

PUSHED = (card.README, provenance.NAME)  # written for each output; a push alters them
OWNED = "output.json"  # digests of the outputs that this run has written


class ReportStage(Stage):
    """The last stage, which writes the finished checkpoint and the report."""

    name = REPORT
    schema = 2

    @property
    def starts_from(self) -> tuple[str, ...]:
        """Return the stages whose checkpoints the report of a run is about."""
        return self.work.checkpoint_stages

    @property
    def page(self) -> Path:
        """Return the path of the report."""
        return self.work.folder / "report.html"

    def key(self) -> Flat:
        """Return everything that decides the report and the output of a run."""
        work = self.work
        results = work.evaluation / "results.json"
        return {
            "recipe": digest(work.recipe.source.text),
            "resolved": digest(work.recipe.resolved()),
            "gates": list(work.recipe.evaluate.fail_if) if work.recipe.evaluate else [],
            "output": work.output.name,
            **work.contents_key(),
            "results": work.digests.of(results) if results.is_file() else None,
            **compared_runs_key(work),
        }

    def look(self) -> Flat | None:
        """Return the digests of the run's report and of its output; without an output the second
        is null. Return None if report.html or outcome.json is missing."""
        if not self.page.is_file() or not (self.work.folder / OUTCOME).is_file():
            return None
        output = self.work.digests.of_tree(self.work.output, but=PUSHED)
        return {"report": self.work.digests.of(self.page), "output": output}

    def do(self) -> None:
        """Write the output of a run if its gates passed, then outcome.json and the report."""
        evidence = evidence_of(self.work)
        if evidence.passed:
            write_output(self.work, evidence)
        write_outcome(self.work, evidence)
        write_report(self.work, evidence)

    def clear(self) -> None:
        """Delete the report and outcome.json that an earlier run of the recipe wrote."""
        self.page.unlink(missing_ok=True)
        (self.work.folder / OUTCOME).unlink(missing_ok=True)

    def counts(self) -> JsonObject:
        """Return the entry of the report stage in a dry run, which has no numbers."""
        return {"what": "the report; the output, whose weights are hard links"}


def _keep_previous(output: Path) -> None:
    """Copy an output to OUT.previous, its weights as links, and replace the older OUT.previous."""
    kept = Output(previous_output(output), force=True, reads=[output])
    with staged(kept) as stage, os_errors(output):
        _carry(output, stage.directory)
        for name in PUSHED:
            copy_file(output / name, stage.directory / name)


def _is_checkpoint_in_output(work: RunContext, source: Path) -> bool:
    """Return True if the output is already this checkpoint.

    Then OUT.previous is kept, and only the report is written again.
    """
    before = work.digests.of_tree(work.output, but=PUSHED)
    return before == work.digests.of_tree(source, but=PUSHED)


def check_output_is_free(work: RunContext) -> None:
    """Refuse to replace an output that this run did not write, unless --force is given.

    With --keep-previous, OUT.previous must be replaceable too.
    """
    if not os.path.lexists(work.output):
        return
    if work.call.keep_previous:
        check_output(Output(previous_output(work.output), force=True))
    owned = _read_output_digests(work.folder / STEPS / OWNED)
    if work.digests.of_tree(work.output) in owned:
        return
    if not work.call.force:
        why = "exists, and this recipe did not write it"
        if owned:
            changed = guard.shown(_changed_files(work.output))
            why = f"changed since this recipe wrote it: {changed}"
        raise OutputExists(
            f"{work.output} (--output) {why}; --force replaces it if ropext wrote all of it"
        )
    check_output(Output(work.output, force=True))


def _changed_files(output: Path) -> list[str]:
    """Return the files that were added, edited or deleted since a run wrote this output; its
    ropext.json if that file lists all others as they are."""
    files = guard.files_in(output)
    if files is None:
        return [guard.RECORD]
    others = set(files).union(guard.listing(output)) - {guard.RECORD}
    return sorted(others - guard.unchanged(output, files)) or [guard.RECORD]


def find_output_list(output: Path) -> Path | None:
    """Return the file in which the run of a recipe lists its outputs, if that run wrote the output
    as it is now."""
    note = run_folder(output) / STEPS / OWNED
    owned = _read_output_digests(note)
    if owned and RunDigests().of_tree(output) in owned:
        return note
    return None


def _read_output_digests(note: Path) -> list[str]:
    """Read the digests of the outputs that a run has written; an empty list if it wrote none."""
    if not note.is_file():
        return []
    remedy = "delete it; --force then replaces the output, if ropext wrote all of it"
    try:
        owned = read_json(note)
    except InputError as error:
        raise InputError(f"{error}: this list of the run's files is damaged; {remedy}") from None
    if not isinstance(owned, list) or not all(isinstance(one, str) for one in owned):
        raise InputError(f"{note}: this list of the run's files is damaged; {remedy}")
    return owned


def add_to_output_list(note: Path, output: Path) -> None:
    """Add the output's present content to the run's list, because a push changed its card."""
    content = RunDigests().of_tree(output)
    if content is not None:
        owned = _read_output_digests(note)
        owned.append(content)
        write_json(note, owned)


def write_output(work: RunContext, evidence: Evidence) -> None:
    """Write OUT completely or not at all."""
    source = work.checkpoints[work.final]
    recover(work.output)
    check_output_is_free(work)  # again: hours may have passed
    force = os.path.lexists(work.output)
    if force and work.call.keep_previous and not _is_checkpoint_in_output(work, source):
        _keep_previous(work.output)
    with staged(Output(work.output, force, [source])) as stage:
        with os_errors(work.output):
            digests = _carry(source, stage.directory)
        record = _finished_record(work, evidence, source)
        text = _finished_card(evidence, source)
        with os_errors(work.output):
            (stage.directory / card.README).write_text(text, encoding="utf-8")
            provenance.write(record, stage.directory, digests)
        _note_output(work, stage.directory)


def _finished_record(work: RunContext, evidence: Evidence, source: Path) -> Record:
    """Return the record of the last checkpoint, with a section about the whole run."""
    record = read_record(source)
    assert record is not None  # every stage writes one
    return replace(
        record,
        command=clean_command(work.call.command),
        more=dict(record.more) | {SECTION: run_section(work, evidence)},
    )


def _finished_card(evidence: Evidence, source: Path) -> str:
    """Return the card of the last checkpoint, with the measurements."""
    text = (source / card.README).read_text(encoding="utf-8")
    sentences = list[str]()
    if evidence.verdict is not None:
        sentences.append(f"{evidence.verdict.sentence}.")
    numbers = with_rows([gate_table(evidence.gates)])
    measured = evidence.measured
    if measured is not None:
        shown = [tables.headline_table(measured), tables.summary_table(measured)]
        shown += tables.retrieval_tables(measured)
        numbers += with_rows(shown)
        for label, model in measured.models.items():
            overlap = model.overlap
            # it was trained on its evaluation documents
            if overlap is not None and overlap.sentence:
                sentences.append(f"{label}: {overlap.sentence}.")
    if not sentences and not numbers:
        return text
    return card.with_evidence(text, sentences, numbers)


def _note_output(work: RunContext, staged_output: Path) -> None:
    """Add the output to the run's list before it gets its name.

    Then the run recognises its output even if it was killed in between.
    """
    before = work.digests.of_tree(work.output)
    after = work.digests.of_tree(staged_output)
    owned = [content for content in (before, after) if content]
    write_json(work.folder / STEPS / OWNED, owned)


def _carry(source: Path, target: Path) -> dict[str, str]:
    """Copy all files except card and record, and return the known SHA-256 digests by name.

    Weights are links, so that a run stores its weights once.
    """
    digests = dict[str, str]()
    for folder, _, names in os.walk(source):
        for name in sorted(names):
            file = Path(folder, name)
            name_there = file.relative_to(source).as_posix()
            if name_there in PUSHED:
                continue
            copy = target / name_there
            copy.parent.mkdir(parents=True, exist_ok=True)
            if file.is_symlink():
                os.symlink(os.readlink(file), copy)
            elif name.endswith(".safetensors"):
                sha256 = place(file, copy, "hard").sha256
                if sha256 is not None:
                    digests[name_there] = sha256
            else:
                digests[name_there] = copy_file(file, copy)
    return digests
