"""Plan, write, prove: one extended checkpoint. Nothing here imports torch."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ropext import guard
from ropext.checkpoint import Snapshot, provenance, with_weights
from ropext.checkpoint.provenance import inherited_training, record_of
from ropext.checkpoint.snapshot import NoWeights
from ropext.checkpoint.source import WriteManner, Written, check_writable, write
from ropext.errors import InputError
from ropext.inspecting import open_model, planned
from ropext.narration import Call, Say, told_of_files
from ropext.options.extend import Extend, Writing
from ropext.options.fields import reads
from ropext.planning import ExtensionPlan
from ropext.report.text import serving_text
from ropext.sources import source_of


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
            "files": list(self.written.files),
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
        whole = with_weights(snapshot)
    return write_extension(whole, warned(plan, call.hooks.say), output, writing, call)


def plan_extend(
    model: str,
    output: Path | None,
    options: Mapping[str, Any],
    call: Call,
    revision: str | None = None,
) -> ExtensionPlan:
    """What `extend` would write; an output that it would refuse is refused."""
    snapshot, plan, how = _read(model, output, options, revision)
    is_here = snapshot.hub_id != snapshot.name or bool(snapshot.weight_files)
    if output is not None and is_here:  # else the weights are fetched first
        with _or_without_a_copy(plan):
            snapshot.require_weights()
            source = source_of(snapshot, plan, output.name, call)
            check_writable(source, output, _manner(how, call))
    return plan


def _manner(how: Writing, call: Call) -> WriteManner:
    show = told_of_files(call.hooks.say)
    return WriteManner(how.link, call.force, how.hash, how.no_verify, show)


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
    record = record_of(made, provenance.base_of(snapshot), call.command)
    record = replace(record, more=inherited_training(snapshot))
    source = source_of(snapshot, made, output.name, call)
    return Extended(made, write(source, output, record, _manner(how, call)))
