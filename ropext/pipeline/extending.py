"""Plan, write, prove: one extended checkpoint. Nothing here imports torch."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ropext import guard, proof
from ropext.checkpoint import Snapshot, provenance, with_weights
from ropext.checkpoint.provenance import inherited_training
from ropext.checkpoint.snapshot import INDEX
from ropext.checkpoint.writing import Written, check_writable, write_checkpoint
from ropext.inspecting import card_of, card_of_table, open_model, planned, record_of
from ropext.narration import SILENT, Hooks, Say, silent, told_of_files
from ropext.options.fields import Link, reads
from ropext.planning import Plan, TablePlan, require_help

if TYPE_CHECKING:
    from ropext.evaluation.session import Evaluation
    from ropext.report.evaluation import Compared


@dataclass(frozen=True)
class Extended:
    """What `extend` did."""

    plan: Plan | TablePlan
    written: Written = field(repr=False)

    @property
    def output(self) -> Path:
        return self.written.output

    def to_json(self) -> dict[str, Any]:
        notes = list(self.written.notes)
        serving = self.plan.serving(str(self.output)) if isinstance(self.plan, Plan) else ()
        return {
            "output": str(self.output),
            "proof": self.written.proof,
            "notes": notes,
            "left": dict(self.written.left),
            "serving": [asdict(line) for line in serving],
            "record": provenance.to_json(self.written.record),
        }


@dataclass(frozen=True)
class WriteOptions:
    """How a checkpoint is written, whatever its plan."""

    link: Link = "copy"
    force: bool = False
    prove: bool = True
    hash_weights: bool = False
    trust_remote_code: bool = False
    command: Sequence[str] = ()
    say: Say = silent


def extend(
    model: str | Path,
    output: str | Path,
    *,
    revision: str | None = None,
    link: Link = "copy",
    force: bool = False,
    prove: bool = True,
    hash_weights: bool = False,
    trust_remote_code: bool = False,
    command: Sequence[str] = (),
    say: Say = silent,
    beside: bool = False,
    **options: Any,
) -> Extended:
    """Write an extended checkpoint and prove it; `options` are the fields of a Recipe."""
    snapshot = open_model(model, revision=revision)
    # What was fitted on a GGUF is written into a GGUF inside of the fit.
    read = {k: v for k, v in options.items() if not (k == "like" and beside)}
    guard.check(_reads(snapshot, read), {"--output": output})
    made = planned(snapshot, str(model), options)
    if isinstance(made, Plan):
        require_help(made)
    for warning in made.warnings:
        say(f"warning: {warning}")
    how = WriteOptions(link, force, prove, hash_weights, trust_remote_code, command, say)
    whole = snapshot if snapshot.container else with_weights(snapshot)
    return write_extension(whole, made, Path(output), how)


def plan_extend(
    model: str | Path,
    output: str | Path | None = None,
    *,
    revision: str | None = None,
    link: Link = "copy",
    force: bool = False,
    **options: Any,
) -> Plan | TablePlan:
    """What `extend` would write; an output that it would refuse is refused."""
    snapshot = open_model(model, revision=revision)
    if output is not None:
        guard.check(_reads(snapshot, options), {"--output": output})
    made = planned(snapshot, str(model), options)
    if output is not None and snapshot.container:
        from ropext.gguf import GgufFile, writing

        assert isinstance(snapshot, GgufFile)
        writing.check_writable(snapshot, Path(output), link=link, force=force)
        return made
    is_here = snapshot.hub_id != snapshot.name or bool(snapshot.weight_files)
    if output is not None and is_here:  # else the weights are fetched first
        check_writable(snapshot, Path(output), link=link, force=force)
    return made


def _reads(snapshot: Snapshot, options: Mapping[str, Any]) -> dict[str, Any]:
    return {"MODEL": snapshot.directory, **reads(options)}


def write_extension(
    snapshot: Snapshot, made: Plan | TablePlan, output: Path, how: WriteOptions
) -> Extended:
    """Write what a plan says, proved before it gets its name."""
    record = record_of(made, provenance.base_of(snapshot), how.command)
    record = replace(record, more=inherited_training(snapshot))
    show, trusted = told_of_files(how.say), how.trust_remote_code
    common: dict[str, Any] = {
        "record": record,
        "link": how.link,
        "force": how.force,
        "hash_weights": how.hash_weights,
        "show": show,
    }
    if isinstance(made, TablePlan):
        return Extended(made, _write_table(snapshot, made, output, how, common))
    if snapshot.container:
        from ropext.gguf import GgufFile, writing

        assert isinstance(snapshot, GgufFile)
        file = writing.write_gguf(snapshot, output, plan=made, prove=how.prove, **common)
        return Extended(made, file)

    def run_proof(directory: Path) -> dict[str, Any]:
        how.say("proving: stock transformers builds the model from the written config")
        return proof.prove_plan(directory, made, snapshot.config, trust_remote_code=trusted)

    written = write_checkpoint(
        snapshot,
        output,
        config=made.config,
        card=lambda proved: card_of(made, snapshot, output.name, proved),
        prove=run_proof if how.prove else None,
        **common,
    )
    return Extended(made, written)


def _write_table(
    snapshot: Snapshot, made: TablePlan, output: Path, how: WriteOptions, common: Mapping[str, Any]
) -> Written:
    """Write a checkpoint that rotates nothing: with a longer position table, or another key."""
    from ropext.checkpoint import tables  # late: no rotary model needs it

    found = tables.find_tables(snapshot, made.positions)
    growth = made.growth

    def write_anew(directory: Path) -> list[str]:
        stale = tables.grow_files(snapshot, directory, growth, found, common["show"])
        said = "left out, a buffer of the old length that stock makes anew"
        return [f"{name}: {said}" for name in stale]

    def run_proof(directory: Path) -> dict[str, Any]:
        how.say("proving: every other tensor's bytes, then stock transformers loads the result")
        compared = tables.compare_tables(snapshot, directory, growth, found)
        return compared | proof.prove_table(
            directory, growth.extended, trust_remote_code=how.trust_remote_code
        )

    files = list(dict.fromkeys(table.file for table in found))
    files += [INDEX] if files and snapshot.index is not None else []
    return write_checkpoint(
        snapshot,
        output,
        config=made.config,
        card=lambda proved: card_of_table(made, snapshot, output.name, proved),
        prove=run_proof if how.prove else None,
        anew=files,
        write_anew=write_anew if files else None,
        **common,
    )


def check_evaluation(model: str, output: str | Path | None, options: Mapping[str, Any]) -> None:
    """Refuse to write an evaluation over, into or around what it reads."""
    from ropext.results.gates import split_spec  # late: extend judges nothing

    runs = [split_spec(gate.run)[0] for gate in options.get("gates", ()) if gate.run]
    losses = Path(options["losses"]) if options.get("losses") else None
    read = {"MODEL": model, "--fail-if": runs, **reads(options)}
    guard.check(read, {"--output": output, "--losses": losses})
    guard.check_file(losses, "--losses", guard.LOSSES)


def evaluate(
    model: str | Path, output: str | Path | None = None, *, hooks: Hooks = SILENT, **options: Any
) -> "Evaluation":
    """Measure a model on long text and by retrieval, and with `output` write the report there too;
    `options` are those of evaluation.session.evaluate."""
    from ropext.evaluation import session
    from ropext.evaluation.variants import line_up_as
    from ropext.proof.dequantising import directory_of
    from ropext.report.evaluation import write_report

    model = str(model)
    check_evaluation(model, output, options)
    with directory_of(model, hooks.say) as place:
        if place != model:
            options["lineup"] = line_up_as(place, model, options)
        return session.evaluate(place, output, hooks=hooks, report=write_report, **options)


def compare(*runs: str | Path, output: str | Path | None = None) -> "Compared":
    """Set finished evaluations side by side, paired on the same tokens: a run directory, or
    RUN:VARIANT; with `output` write the report there too."""
    from ropext.report.evaluation import compare_runs

    return compare_runs([str(run) for run in runs], None if output is None else Path(output))[1]
