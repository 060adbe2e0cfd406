"""What a run leaves in the end: the finished checkpoint with its evidence, and the report.

The checkpoint is the last one of the run under the name that was asked for: weights by hard link,
card and record with what was measured. Where a gate failed it does not get its name.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ropext.atomic import os_errors
from ropext.checkpoint import card, provenance
from ropext.checkpoint.provenance import digest, read_record
from ropext.checkpoint.staging import check_output, recover, staged
from ropext.checkpoint.writing import copy_file, place
from ropext.errors import GateFailed, OutputExists
from ropext.jsontext import JsonObject, read_json, read_object, values_json, write_json
from ropext.options.recipe import REPORT
from ropext.pipeline.hashes import Hashes
from ropext.pipeline.stage import Stage
from ropext.pipeline.work import EVALUATION, USED, Work
from ropext.report import html, tables
from ropext.report.gates import failures, gate_table
from ropext.report.text import how_to_serve
from ropext.results import BASE, CONTROL, FITTED, TUNED, rundir
from ropext.results.gates import Outcome
from ropext.results.measurement import Measurement
from ropext.results.rules import AutoVerdict, verdict
from ropext.table import Table, verdict_first, with_rows
from ropext.workdir import STEPS, Flat, beside, step_record

SECTION = "run"  # of ropext.json
PLOTS = {
    "nll-by-position": "Loss by position",
    "gain": "Context gain by position",
}
PUSHED = (card.README, provenance.NAME)  # a push alters them
OWNED = "output.json"  # digests of the outputs that this run has written


@dataclass(frozen=True)
class Evidence:
    """What was measured."""

    measured: Measurement | None  # by the evaluation
    gates: tuple[Outcome, ...]
    verdict: AutoVerdict | None = None  # of `--method auto`
    control: tuple[str, ...] = ()  # what the control says, where there is one

    @property
    def passed(self) -> bool:
        return all(gate.passed for gate in self.gates)


def evidence_of(work: Work) -> Evidence:
    """Read back from the run directory; a gate that names no variant is about the finished one."""
    if not (work.evaluation / "results.json").is_file():
        return Evidence(None, ())
    run = rundir.read_run(work.evaluation)
    choice = work.recipe.source.choice
    reached = None
    if choice:
        reached = verdict(choice, run, work.final, fit_is_kept=_is_fit_kept(work))
    # How much of the gain is adaptation to the text.
    control_lines = list[str]()
    target = work.plan.target
    numbers = {label: run.values(label) for label in run.models}
    read = {label for label, values in numbers.items() if f"tail_nll@{target}" in values}
    if read >= {BASE, CONTROL, TUNED}:
        from ropext.training import tuned_report

        control_lines = tuned_report.verdict(numbers, target)
    gates = tuple(rundir.judge(run, work.gates))
    return Evidence(run, gates, reached, tuple(control_lines))


def _is_fit_kept(work: Work) -> bool:
    """Whether there is a fit, and what it wrote is not the form from which it began."""
    if FITTED not in work.checkpoints:
        return False
    record = read_object(work.checkpoints[FITTED] / provenance.NAME)
    kept: str = record["fit"]["kept"]
    return kept == FITTED


class ReportStage(Stage):
    """The last stage: the finished checkpoint and the report."""

    name = REPORT
    schema = 2

    @property
    def page(self) -> Path:
        """The report."""
        return self.work.folder / "report.html"

    def key(self) -> Flat:
        work = self.work
        results = work.evaluation / "results.json"
        contents = {f"checkpoint.{label}": content for label, content in work.contents().items()}
        return {
            "recipe": digest(work.recipe.source.text),
            "resolved": digest(work.recipe.resolved()),
            "gates": list(work.recipe.evaluate.fail_if) if work.recipe.evaluate else [],
            "output": work.output.name,
            **contents,
            "results": work.hashes.of(results) if results.is_file() else None,
        }

    def look(self) -> Flat | None:
        if not self.page.is_file():
            return None
        output = self.work.hashes.of_tree(self.work.output, but=PUSHED)
        return {"report": self.work.hashes.of(self.page), "output": output}

    def do(self) -> None:
        evidence = evidence_of(self.work)
        if evidence.passed:
            write_output(self.work, evidence)
        write_report(self.work, evidence)

    def clear(self) -> None:
        self.page.unlink(missing_ok=True)

    def counts(self) -> JsonObject:
        return {"what": "the report, and the weights once more by hard link"}


def previous(output: Path) -> Path:
    """OUT.previous: the output that the last run replaced, where that was asked for."""
    return output.with_name(f"{output.name}.previous")


def _keep_previous(output: Path) -> None:
    """Keep an output under its other name, weights by link, in place of the one before it."""
    with staged(previous(output), force=True, inputs=[output]) as stage, os_errors(output):
        _carry(output, stage.directory)
        for name in (card.README, provenance.NAME):
            copy_file(output / name, stage.directory / name)


def check_free(work: Work) -> None:
    """An output that is there may be replaced with --force, or when this run wrote it; so may the
    one before it."""
    if not os.path.lexists(work.output):
        return
    if work.call.keep_previous:
        check_output(previous(work.output), force=True)
    note = work.folder / STEPS / OWNED
    owned = read_json(note) if note.is_file() else []
    if work.hashes.of_tree(work.output) in owned:
        return
    if not work.call.force:
        raise OutputExists(
            f"{work.output} (--output) exists and is not what a run of this recipe left; --force "
            "replaces it if ropext wrote all of it"
        )
    check_output(work.output, force=True)


def owner(output: Path) -> Path | None:
    """The note of the run that left an output as it is now."""
    note = beside(output) / STEPS / OWNED
    is_owned = note.is_file() and Hashes().of_tree(output) in read_json(note)
    return note if is_owned else None


def claim(note: Path, output: Path) -> None:
    """Also as it is now it is that run's: a push has altered its card."""
    write_json(note, [*read_json(note), Hashes().of_tree(output)])


def write_output(work: Work, evidence: Evidence) -> None:
    """OUT, as a whole or not at all."""
    source = work.checkpoints[work.final]
    recover(work.output)
    check_free(work)  # again: hours may have passed
    force = os.path.lexists(work.output)
    if force and work.call.keep_previous:
        _keep_previous(work.output)
    with staged(work.output, force=force, inputs=[source]) as stage:
        with os_errors(work.output):
            digests = _carry(source, stage.directory)
        record = read_record(source)
        assert record is not None  # every stage writes one
        record = replace(
            record,
            command=provenance.clean_command(work.call.command) if work.call.command else (),
            more=dict(record.more) | {SECTION: section(work, evidence)},
        )
        text = (source / card.README).read_text(encoding="utf-8")
        sentences = [f"{evidence.verdict.sentence}."] if evidence.verdict else []
        numbers = with_rows([gate_table(evidence.gates)])
        if (measured := evidence.measured) is not None:
            text_tables = [tables.headline(measured), tables.summary(measured)]
            numbers += with_rows([*text_tables, *tables.retrieval_tables(measured)])
            for label, model in measured.models.items():
                overlap = model.overlap
                if overlap and overlap.sentence:  # trained on what it is measured on
                    sentences.append(f"{label}: {overlap.sentence}.")
        with os_errors(work.output):
            if sentences or numbers:
                text = card.with_evidence(text, sentences, numbers)
            (stage.directory / card.README).write_text(text, encoding="utf-8")
            provenance.write(record, stage.directory, digests)
        # Known before it has its name: after a kill in between it is still known as ours.
        before = work.hashes.of_tree(work.output)
        owned = [content for content in (before, work.hashes.of_tree(stage.directory)) if content]
        write_json(work.folder / STEPS / OWNED, owned)


def _carry(source: Path, target: Path) -> dict[str, str]:
    """All files, and the SHA-256 of those where it is known: weights by link, so that a run takes
    the room of its weights once."""
    digests = dict[str, str]()
    for folder, _, names in os.walk(source):
        for name in sorted(names):
            file = Path(folder, name)
            copy = target / file.relative_to(source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            if name in (card.README, provenance.NAME) and folder == str(source):
                continue
            if file.is_symlink():
                os.symlink(os.readlink(file), copy)
            elif name.endswith(".safetensors"):
                digest = place(file, copy, "hard").sha256
                digests |= {} if digest is None else {file.relative_to(source).as_posix(): digest}
            else:
                digests[file.relative_to(source).as_posix()] = copy_file(file, copy)
    return digests


def section(work: Work, evidence: Evidence) -> dict[str, Any]:
    """What ropext.json says of the run: no time, no path but those that the recipe names."""
    stages = {}
    for name in work.recipe.stages:
        record = step_record(work.folder, name)
        if record is not None and name != REPORT:
            stages[name] = {"inputs": record.inputs, "outputs": record.outputs}
    content = {
        "recipe": work.recipe.source.text and provenance.scrub(work.recipe.source.text),
        "resolved": work.recipe.resolved(),
        "stages": stages,
        "evaluation": None if evidence.measured is None else _numbers(evidence.measured),
        "gates": [gate.recorded() for gate in evidence.gates],
    }
    if (choice := work.recipe.source.choice) is not None:
        tried = {key: value for key, value in choice.items() if key not in ("recipe", USED)}
        content["choice"] = tried | {"verdict": values_json(evidence.verdict)}
    return content


def _numbers(measured: Measurement) -> dict[str, Any]:
    results = measured.results
    names = ("protocol", "protocol_text", "context", "lengths", "tail_tokens", "documents", "seed")
    return {name: results[name] for name in names} | {
        "variants": {
            label: {name: variant.get(name) for name in ("kind", "target", "metrics", "overlap")}
            for label, variant in results["variants"].items()
        }
    }


def write_report(work: Work, evidence: Evidence) -> None:
    """report.md and report.html; the pictures are those of the stages."""
    plan = work.plan
    verdicts = [evidence.verdict.sentence] if evidence.verdict else []
    verdicts = [*failures(evidence.gates), *verdicts]
    shown = with_rows([gate_table(evidence.gates)])
    warnings = list(plan.warnings)
    if evidence.measured is not None:
        shown += tables.evaluation_tables(evidence.measured)
        verdicts += tables.verdict_lines(evidence.measured)
        warnings += evidence.measured.facts.warnings
    if trained := _training_table(work):
        shown.append(trained)
    shown.append(_facts(work))
    title = f"ropext run: {work.output.name}"
    subtitle = (
        f"{work.base.short_name} extended from {plan.context:,} to {plan.target:,} tokens by "
        f"{plan.method}; stages: {', '.join(work.recipe.stages)}"
    )
    details = json.dumps(
        section(work, evidence) | {"versions": provenance.versions()}, indent=1, ensure_ascii=False
    )
    page = html.Page(title, subtitle, verdicts, warnings, shown, details)
    html.write(work.folder, page, _pictures(work))


def _pictures(work: Work) -> dict[str, tuple[str, bytes]]:
    """Each picture's place in the folder, its caption and its bytes, what says most first."""
    plots = work.evaluation / "plots"
    files = {caption: plots / f"{name}.png" for name, caption in PLOTS.items()}
    for file in sorted(plots.glob("retrieval-*.png")):
        files[f"Retrieval: {file.stem.removeprefix('retrieval-')}"] = file
    files["Wavelength of each rotary pair"] = plots / "spectra.png"
    if TUNED in work.checkpoints:
        files["Loss of the training"] = work.checkpoints[TUNED] / "training" / "loss.png"
    return {
        file.relative_to(work.folder).as_posix(): (caption, file.read_bytes())
        for caption, file in files.items()
        if file.is_file()
    }


def _facts(work: Work) -> Table:
    plan = work.plan
    record = read_object(work.checkpoints[work.final] / provenance.NAME)
    proved = record.get("proof")
    rows: Sequence[tuple[str, str]] = (
        ("base", work.base.short_name),
        ("method", plan.method),
        *((name, str(v)) for name, v in plan.knobs.items() if not isinstance(v, tuple)),
        ("context", f"{plan.context:,}"),
        ("target", f"{plan.target:,} (factor {plan.factor:g})"),
        ("spectrum (SHA-256)", plan.main.wanted.digest()[:16]),
        ("proved", f"with transformers {proved['transformers']}" if proved else "no"),
    )
    return Table("What was made", "config.json carries it", ("", ""), tuple(rows))


def _training_table(work: Work) -> Table | None:
    if TUNED not in work.checkpoints:
        return None
    from ropext.training import tuned_report

    record = read_object(work.checkpoints[TUNED] / provenance.NAME)
    return tuned_report.recorded_table(record["finetune"], work.plan.target)


@dataclass(frozen=True)
class Ran:
    """What a run did."""

    output: Path | None  # None where a gate failed, or not all stages were asked for
    folder: Path
    label: str  # of the finished checkpoint in the evaluation
    stages: Mapping[str, str]  # name -> done, skipped
    evidence: Evidence = field(repr=False)

    def to_json(self) -> dict[str, Any]:
        measured = self.evidence.measured
        return {
            "output": None if self.output is None else str(self.output),
            "folder": str(self.folder),
            "stages": dict(self.stages),
            "evaluation": measured and {"variants": measured.results["variants"]},
            "gates": [gate.recorded() for gate in self.evidence.gates],
            "verdict": values_json(self.evidence.verdict),
        }

    @property
    def measured(self) -> tuple[str, ...]:
        """What was measured of the output, as `ropext push --results` takes it."""
        is_there = self.evidence.measured is not None
        return (f"{self.folder / EVALUATION}:{self.label}",) if is_there else ()

    def raise_if_failed(self) -> None:
        """GateFailed where a gate did."""
        try:
            rundir.raise_if_failed(self.evidence.gates)
        except GateFailed as error:
            output = self.folder.with_name(self.folder.name.removesuffix(".run"))
            there = f"; {output} is from an earlier run" if os.path.lexists(output) else ""
            raise GateFailed(
                f"{error}; the checkpoint that did not pass is kept in {self.folder}, not under "
                f"the output's name{there}"
            ) from None

    def to_text(self) -> str:
        """What was measured, what became of the stages, what to do next."""
        measured = self.evidence.measured
        gates = self.evidence.gates
        lines = failures(gates)
        if self.evidence.verdict:
            lines.append(self.evidence.verdict.sentence)
        shown = list[Table]()
        if measured is not None:
            lines += [*tables.verdict_lines(measured, self.label), *self.evidence.control]
            shown = tables.main_tables(measured)
        parts = [verdict_first(lines, with_rows([*shown, gate_table(gates)]))]
        stages = [f"{name} {state}" for name, state in self.stages.items()]
        parts.append(f"stages: {', '.join(stages)}")
        if self.output is not None:
            parts[-1] += f"\nwrote {self.output}\nreport: {self.folder / 'report.html'}"
            parts[-1] += f"\nnext: ropext verify {self.output}"
            parts.append(how_to_serve(self.output))
        return "\n\n".join(part for part in parts if part)
