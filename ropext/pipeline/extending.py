"""Plan, write, prove: one extended checkpoint. Nothing here imports torch."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ropext import guard, proof
from ropext.checkpoint import Snapshot, provenance, with_weights
from ropext.checkpoint.card import card_of, card_of_table
from ropext.checkpoint.provenance import inherited_training, record_of
from ropext.checkpoint.snapshot import INDEX
from ropext.checkpoint.writing import Written, check_writable, write_checkpoint
from ropext.inspecting import open_model, planned
from ropext.narration import Say, silent, told_of_files
from ropext.options.fields import Link, reads
from ropext.planning import ExtensionPlan, Plan, TablePlan


@dataclass(frozen=True)
class Extended:
    """What `extend` did."""

    plan: ExtensionPlan
    written: Written = field(repr=False)

    @property
    def output(self) -> Path:
        return self.written.output

    def to_json(self) -> dict[str, Any]:
        return {
            "output": str(self.output),
            "proof": self.written.proof,
            "notes": list(self.written.notes),
            "left": dict(self.written.left),
            "serving": [asdict(line) for line in self.plan.serving(str(self.output))],
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
    model: str,
    output: Path,
    options: Mapping[str, Any],
    how: WriteOptions = WriteOptions(),
    *,
    revision: str | None = None,
) -> Extended:
    """Write an extended checkpoint and prove it; `options` are the fields of options.Extend."""
    snapshot, plan = _read(model, output, options, revision)
    whole = snapshot if snapshot.container else with_weights(snapshot)
    return write_extension(whole, warned(plan, how.say), output, how)


def plan_extend(
    model: str,
    output: Path | None,
    options: Mapping[str, Any],
    how: WriteOptions = WriteOptions(),
    *,
    revision: str | None = None,
) -> ExtensionPlan:
    """What `extend` would write; an output that it would refuse is refused."""
    snapshot, plan = _read(model, output, options, revision)
    if output is not None and snapshot.container:
        from ropext.gguf import GgufFile, writing

        assert isinstance(snapshot, GgufFile)
        writing.check_writable(snapshot, output, link=how.link, force=how.force)
        return plan
    is_here = snapshot.hub_id != snapshot.name or bool(snapshot.weight_files)
    if output is not None and is_here:  # else the weights are fetched first
        check_writable(snapshot, output, link=how.link, force=how.force)
    return plan


def _read(
    model: str, output: Path | None, options: Mapping[str, Any], revision: str | None
) -> tuple[Snapshot, ExtensionPlan]:
    """The model and its plan; an output over, in or around what is read is refused."""
    snapshot = open_model(model, revision=revision)
    guard.check({"MODEL": snapshot.directory, **reads(options)}, {"--output": output})
    return snapshot, planned(snapshot, model, options)


def warned(plan: ExtensionPlan, say: Say) -> ExtensionPlan:
    """The plan, where an extension helps, its warnings said."""
    plan.require_help()
    for warning in plan.warnings:
        say(f"warning: {warning}")
    return plan


def write_extension(
    snapshot: Snapshot, made: ExtensionPlan, output: Path, how: WriteOptions
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
    assert isinstance(made, Plan)
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

    position_tables = tables.find_tables(snapshot, made.positions)
    growth = made.growth

    def write_anew(directory: Path) -> list[str]:
        stale = tables.grow_files(snapshot, directory, growth, position_tables, common["show"])
        said = "left out, a buffer of the old length that stock makes anew"
        return [f"{name}: {said}" for name in stale]

    def run_proof(directory: Path) -> dict[str, Any]:
        how.say("proving: every other tensor's bytes, then stock transformers loads the result")
        compared = tables.compare_tables(snapshot, directory, growth, position_tables)
        return compared | proof.prove_table(
            directory, growth.extended, trust_remote_code=how.trust_remote_code
        )

    files = list(dict.fromkeys(table.file for table in position_tables))
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
