"""Plan, write, prove: one extended checkpoint. Nothing here imports torch."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ropext import guard, proof
from ropext.checkpoint import Snapshot, provenance, with_weights
from ropext.checkpoint.card import card_of
from ropext.checkpoint.provenance import inherited_training, record_of
from ropext.checkpoint.snapshot import INDEX, NoWeights
from ropext.checkpoint.writing import Written, check_writable, write_checkpoint
from ropext.errors import InputError
from ropext.inspecting import open_model, planned
from ropext.narration import Call, Say, told_of_files
from ropext.options.extend import Extend, Writing
from ropext.options.fields import reads
from ropext.planning import ExtensionPlan
from ropext.report.text import serving_text
from ropext.scaling.tables import Growth

# Holds a finished but unnamed directory against its plan.
Proof = Callable[[Path], dict[str, Any]]


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


def extend(
    model: str,
    output: Path,
    options: Mapping[str, Any],
    call: Call,
    revision: str | None = None,
) -> Extended:
    """Write an extended checkpoint and prove it; `options` are the fields of options.extend's
    Extend and Writing."""
    snapshot, plan, writing = _read(model, output, options, revision)
    plan.require_help()  # before weights are fetched
    with _or_without_a_copy(plan):
        whole = snapshot if snapshot.container else with_weights(snapshot)
    return write_extension(whole, warned(plan, call.hooks.say), output, writing, call)


def plan_extend(
    model: str,
    output: Path | None,
    options: Mapping[str, Any],
    call: Call,
    revision: str | None = None,
) -> ExtensionPlan:
    """What `extend` would write; an output that it would refuse is refused."""
    snapshot, plan, manner = _read(model, output, options, revision)
    if output is not None and snapshot.container:
        from ropext.gguf import GgufFile, writing

        assert isinstance(snapshot, GgufFile)
        writing.check_writable(snapshot, output, link=manner.link, force=call.force)
        return plan
    is_here = snapshot.hub_id != snapshot.name or bool(snapshot.weight_files)
    if output is not None and is_here:  # else the weights are fetched first
        with _or_without_a_copy(plan):
            check_writable(snapshot, output, link=manner.link, force=call.force)
    return plan


@contextmanager
def _or_without_a_copy(plan: ExtensionPlan) -> Iterator[None]:
    """Where the weights are not here, show the lines that serve the base's own weights so."""
    try:
        yield
    except NoWeights as error:
        if lines := plan.overrides():
            raise InputError(f"{error}:\n{serving_text(lines)}") from None
        raise


def _read(
    model: str, output: Path | None, options: Mapping[str, Any], revision: str | None
) -> tuple[Snapshot, ExtensionPlan, Writing]:
    """The model, its plan, and how that is written; an output over, in or around what is read is
    refused."""
    writing = {name: options[name] for name in Writing.model_fields if name in options}
    snapshot = open_model(model, revision=revision)
    guard.check({"MODEL": snapshot.directory, **reads(options, Extend)}, {"--output": output})
    wish = {name: value for name, value in options.items() if name not in writing}
    return snapshot, planned(snapshot, model, wish), Writing(**writing)


def warned(plan: ExtensionPlan, say: Say) -> ExtensionPlan:
    """The plan, where an extension helps, its warnings said."""
    plan.require_help()
    for remark in plan.remarks():
        say(remark)
    return plan


def write_extension(
    snapshot: Snapshot,
    made: ExtensionPlan,
    output: Path,
    how: Writing,
    call: Call,
) -> Extended:
    """Write what a plan says, proved before it gets its name."""
    say = call.hooks.say
    record = record_of(made, provenance.base_of(snapshot), call.command)
    record = replace(record, more=inherited_training(snapshot))
    show = told_of_files(say)
    common: dict[str, Any] = {"record": record, "link": how.link, "force": call.force}
    common |= {"hash_weights": how.hash, "show": show}
    if snapshot.container:
        from ropext.gguf import GgufFile, writing

        assert isinstance(snapshot, GgufFile)
        file = writing.write_gguf(snapshot, output, plan=made, prove=not how.no_verify, **common)
        return Extended(made, file)

    def prove_spectrum(directory: Path) -> dict[str, Any]:
        say("proving: stock transformers builds the model from the written config")
        return proof.prove_plan(
            directory, made, snapshot.config, trust_remote_code=call.trust_remote_code
        )

    prove: Proof = prove_spectrum
    if made.growth is not None:
        prove, rewriting = _with_tables(snapshot, made.growth, call)
        common |= rewriting
    written = write_checkpoint(
        snapshot,
        output,
        config=made.config,
        card=lambda proved: card_of(made, snapshot, output.name, proved),
        prove=None if how.no_verify else prove,
        **common,
    )
    return Extended(made, written)


def _with_tables(snapshot: Snapshot, growth: Growth, call: Call) -> tuple[Proof, dict[str, Any]]:
    """The proof of a checkpoint that rotates nothing, and how its files with a position table, if
    it has one, are written anew."""
    from ropext.checkpoint import tables  # late: no rotary model needs it

    position_tables = tables.find_tables(snapshot, growth.positions)
    say = call.hooks.say
    show = told_of_files(say)

    def write_anew(directory: Path) -> list[str]:
        stale = tables.grow_files(snapshot, directory, growth, position_tables, show)
        said = "left out, a buffer of the old length that stock makes anew"
        return [f"{name}: {said}" for name in stale]

    def prove(directory: Path) -> dict[str, Any]:
        say("proving: every other tensor's bytes, then stock transformers loads the result")
        compared = tables.compare_tables(snapshot, directory, growth, position_tables)
        return compared | proof.prove_table(
            directory, growth.extended, trust_remote_code=call.trust_remote_code
        )

    files = list(dict.fromkeys(table.file for table in position_tables))
    if not files:
        return prove, {}
    files += [] if snapshot.index is None else [INDEX]
    return prove, {"anew": files, "write_anew": write_anew}
