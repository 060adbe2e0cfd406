"""Collect the measurements of a run for its last stage and for its record."""

from dataclasses import dataclass

from pydantic import InstanceOf

from ropext.base.jsontext import Json, read_object, values_json
from ropext.base.narration import scrub
from ropext.base.workdir import Flat
from ropext.files.checkpoint import provenance
from ropext.pipeline.recipe import REPORT
from ropext.pipeline.run_context import USED, RunContext
from ropext.pipeline.stage import step_record
from ropext.results import BASE, CONTROL, FITTED, TUNED, rundir
from ropext.results.gates import Outcome, other_runs
from ropext.results.measurement import Measurement
from ropext.results.rules import AutoVerdict, auto_verdict

SECTION = "run"  # of ropext.json
# The fields of an evaluation, and of each model in it, that a record repeats.
MEASURED_AS = (
    "protocol",
    "protocol_text",
    "context",
    "lengths",
    "tail_tokens",
    "documents",
    "seed",
)
MEASURED_OF = ("kind", "target", "metrics", "overlap")


@dataclass(frozen=True)
class Evidence:
    """The measurement of a run, with its gates and verdicts."""

    measured: InstanceOf[Measurement] | None  # by the evaluation
    gates: tuple[Outcome, ...]
    verdict: AutoVerdict | None = None  # of `--method auto`
    control: tuple[str, ...] = ()  # sentences about the control, if the run has one

    @property
    def passed(self) -> bool:
        """Return whether the run of a recipe passed all its gates."""
        return all(gate.passed for gate in self.gates)

    def to_json(self) -> dict[str, Json]:
        """Return the gates and verdicts of a recipe's run for outcome.json, without the
        measurement."""
        return {
            "gates": [values_json(vars(gate)) for gate in self.gates],
            "verdict": values_json(self.verdict),
            "control": list(self.control),
        }


def evidence_of(work: RunContext) -> Evidence:
    """Read the evidence from the run directory. A gate that names no variant judges the final
    checkpoint."""
    if not (work.evaluation / "results.json").is_file():
        return Evidence(None, ())
    run = rundir.read_run(work.evaluation)
    choice = work.recipe.source.choice
    reached = None
    if choice:
        reached = auto_verdict(choice, run, work.final, fit_is_kept=_is_fit_kept(work))
    # How much of the gain is adaptation to the text.
    control_lines = list[str]()
    target = work.plan.target
    numbers = {label: run.values(label) for label in run.models}
    read = {label for label, values in numbers.items() if f"tail_nll@{target}" in values}
    if read >= {BASE, CONTROL, TUNED}:
        from ropext.training import tuned_report

        control_lines = tuned_report.finetune_verdict(numbers, target)
    gates = tuple(rundir.judge_gates(run, work.gates))
    return Evidence(run, gates, reached, tuple(control_lines))


def compared_runs_key(work: RunContext) -> Flat:
    """Return the digests of the other runs that gates name, as a part of the report's key.

    If one of these runs changed, the gates are judged again. Raise an error if its results were
    edited.
    """
    found = list[str]()
    for path in other_runs(work.gates, work.labels):
        if path.is_dir():  # else the gate says that it is not there
            rundir.read_run(path)
            found.append(work.digests.of(path / rundir.RESULTS))
    return {"against": found} if found else {}


def _is_fit_kept(work: RunContext) -> bool:
    """Return True if the run has a fit, and the fit kept its learned spectrum, not its starting
    form."""
    if FITTED not in work.checkpoints:
        return False
    record = read_object(work.checkpoints[FITTED] / provenance.NAME)
    kept: str = record["fit"]["kept"]
    return kept == FITTED


def run_section(work: RunContext, evidence: Evidence) -> dict[str, Json]:
    """Return the section of ropext.json about a run, for the record of its output. It has no times,
    and only the paths that the recipe names."""
    stages = dict[str, Json]()
    for name in work.recipe.stages:
        step = step_record(work.folder, name)
        if step is not None and name != REPORT:
            stages[name] = vars(step)
    source = work.recipe.source
    measured = evidence.measured
    content: dict[str, Json] = {
        "recipe": source.text and scrub(source.text),  # as its file has it
        "resolved": work.recipe.resolved(),
        "stages": stages,
        "evaluation": None if measured is None else _numbers(measured),
        "gates": [gate.recorded() for gate in evidence.gates],
    }
    if source.choice is not None:  # the candidates of `--method auto`
        tried = {key: value for key, value in source.choice.items() if key not in ("recipe", USED)}
        content["choice"] = tried | {"verdict": values_json(evidence.verdict)}
    return content


def _numbers(measured: Measurement) -> dict[str, Json]:
    """Return the numbers of a run's evaluation that its output records."""
    results = measured.results
    numbers = dict[str, Json]()
    for name in MEASURED_AS:
        numbers[name] = results[name]
    variants = dict[str, Json]()
    for label, variant in results["variants"].items():
        variants[label] = {name: variant.get(name) for name in MEASURED_OF}
    return numbers | {"variants": variants}
