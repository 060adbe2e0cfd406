"""Write the report of a run: the checkpoint, its numbers and pictures on one page."""

import json

from ropext.base.jsontext import read_object
from ropext.base.table import Table, with_rows
from ropext.files.checkpoint import provenance
from ropext.files.checkpoint.snapshot import short_name
from ropext.pipeline.evidence import Evidence, run_section
from ropext.pipeline.run_context import RunContext
from ropext.results import TUNED
from ropext.results.report import html, tables
from ropext.results.report.gates import failed_gate_lines, gate_table

PLOTS = {
    "nll-by-position": "Loss by position",
    "gain": "Gain over truncation by position",
}


def write_report(work: RunContext, evidence: Evidence) -> None:
    """Write report.md and report.html with the pictures of the stages."""
    plan = work.plan
    verdicts = failed_gate_lines(evidence.gates)
    if evidence.verdict:
        verdicts.append(evidence.verdict.sentence)
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
        f"{short_name(work.base.name, work.base.hub_id)} extended from {plan.context:,} to "
        f"{plan.target:,} tokens by {plan.method}; stages: {', '.join(work.recipe.stages)}"
    )
    record = run_section(work, evidence) | {"versions": provenance.versions()}
    details = json.dumps(record, indent=1, ensure_ascii=False)
    page = html.Page(title, subtitle, verdicts, warnings, shown, details)
    html.write_page(work.folder, page, _pictures(work, evidence))


def _pictures(work: RunContext, evidence: Evidence) -> dict[str, tuple[str, bytes]]:
    """Return the path of each picture in the folder, its caption and its bytes, the most useful
    first."""
    plots = work.evaluation / "plots"
    files = {caption: plots / f"{name}.png" for name, caption in PLOTS.items()}
    tasks = evidence.measured.tasks if evidence.measured is not None else []
    for task in sorted(tasks):
        files[f"Retrieval: {task}"] = plots / f"retrieval-{task}.png"
    files["Wavelength of each rotary pair"] = plots / "spectra.png"
    if TUNED in work.checkpoints:
        files["Loss of the training"] = work.checkpoints[TUNED] / "training" / "loss.png"
    return {
        file.relative_to(work.folder).as_posix(): (caption, file.read_bytes())
        for caption, file in files.items()
        if file.is_file()
    }


def _facts(work: RunContext) -> Table:
    """Return the table of the plan and the verification, the last one of a run's report."""
    plan = work.plan
    record = read_object(work.checkpoints[work.final] / provenance.NAME)
    proved = record.get("proof")
    rows = [("base", short_name(work.base.name, work.base.hub_id)), ("method", plan.method)]
    for name, value in plan.knobs.items():
        if not isinstance(value, tuple):
            rows.append((name, str(value)))
    rows += [
        ("context", f"{plan.context:,}"),
        ("target", f"{plan.target:,} (factor {plan.factor:g})"),
        ("spectrum (SHA-256)", plan.main.wanted.digest()[:16]),
        ("verified", f"with transformers {proved['transformers']}" if proved else "no"),
    ]
    return Table("What was made", "config.json", ("", ""), tuple(rows))


def _training_table(work: RunContext) -> Table | None:
    """Return the table of the fine-tuning stage in a run's report, or None without one."""
    if TUNED not in work.checkpoints:
        return None
    from ropext.training import tuned_report

    record = read_object(work.checkpoints[TUNED] / provenance.NAME)
    return tuned_report.recorded_finetune_table(record["finetune"], work.plan.target)
