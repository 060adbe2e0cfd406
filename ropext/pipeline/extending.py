"""Plan, write and verify one extended checkpoint. Nothing here imports torch."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ropext.base import guard
from ropext.base.errors import InputError
from ropext.base.inputs import read_text
from ropext.base.jsontext import Json, JsonObject
from ropext.base.locks import check_unlocked
from ropext.base.narration import Call, Say, Show, file_progress
from ropext.base.staging import check_output
from ropext.families.loaders import Serving
from ropext.files.checkpoint import Snapshot, provenance, with_weights
from ropext.files.checkpoint.card import Card, card_of
from ropext.files.checkpoint.provenance import (
    TRAINED_ON,
    Record,
    record_in,
    record_of,
    with_training,
)
from ropext.files.checkpoint.snapshot import INDEX, NoWeights
from ropext.files.checkpoint.writing import (
    DirectorySource,
    OutputSource,
    WriteOptions,
    Written,
    write,
)
from ropext.files.inspecting import open_model, planned
from ropext.options.extend import Extend, Writing, parse_extend
from ropext.options.fields import places_read
from ropext.planning import ExtensionPlan
from ropext.results.report.text import serving_text
from ropext.scaling.tables import Growth
from ropext.verifying import proof


@dataclass(frozen=True, repr=False, eq=False)
class MadeExtension:
    """The files that an extension wrote, how to serve them, and its plan."""

    written: Written
    serving: tuple[Serving, ...]
    planned: ExtensionPlan | None  # None if the output was opened

    @property
    def output(self) -> Path:
        """Return the path of the extended output."""
        return self.written.output

    @property
    def plan(self) -> ExtensionPlan:
        """Return the plan of the extension. Raise InputError if the output was opened."""
        if self.planned is None:
            raise InputError(
                f"{self.output} was opened and has no plan; .written.record has the recorded "
                "one, and ropext.plan makes a new one"
            )
        return self.planned

    def to_json(self) -> dict[str, Json]:
        """Return what `ropext extend --json` prints."""
        written = self.written
        return {
            "output": str(written.output),
            "files": list(written.files),
            "proof": written.proof,
            "notes": list(written.notes),
            "left": dict(written.left),
            "serving": [asdict(line) for line in self.serving],
            "record": provenance.to_json(written.record),
        }


@dataclass(frozen=True)
class ExtensionJob:
    """A planned extension. It writes all or nothing, so it cannot be resumed."""

    snapshot: Snapshot
    plan: ExtensionPlan
    writing: Writing

    def check(self, output: Path, call: Call) -> None:
        """Refuse an output that `extend` may not write."""
        snapshot = self.snapshot
        is_here = not snapshot.is_on_hub or bool(snapshot.weight_files)
        if is_here:  # else the weights are fetched first
            with _or_without_a_copy(self.plan):
                snapshot.require_weights()
                source = output_source_of(snapshot, self.plan, call)
                check_output(source.check(output, WriteOptions(self.writing.link, call.force)))

    def counts(self) -> ExtensionPlan:
        """Return the plan of `extend`, which says what would be written."""
        return self.plan

    def make(self, output: Path, call: Call) -> MadeExtension:
        """Write an extended checkpoint and verify it."""
        self.plan.raise_if_refused()  # before weights are fetched
        self.plan.require_training()
        with _or_without_a_copy(self.plan):
            whole = with_weights(self.snapshot)
        plan = tell_plan_warnings(self.plan, call.hooks.say)
        return write_extension(whole, plan, output, self.writing, call)


def prepare_extension(
    model: str, given: Mapping[str, Any], output: Path | None, revision: str | None = None
) -> ExtensionJob:
    """Open a model and plan its extension by the fields of Extend and Writing.

    Refuse an output that is, contains or is inside an input. `given` may name pair factors by their
    file.
    """
    wish, how = split_extend_options(given)
    options = parse_extend(wish, read_text)
    check_unlocked(output)
    snapshot = open_model(model, revision=revision)
    guard.check({"MODEL": snapshot.directory, **places_read(wish, Extend)}, {"--output": output})
    return ExtensionJob(snapshot, planned(snapshot, model, options), how)


def split_extend_options(given: Mapping[str, Any]) -> tuple[dict[str, Any], Writing]:
    """Split the given options of a whole command such as `extend` for its steps: the wish, which
    decides the plan, and the writing."""
    writing = dict[str, Any]()
    wish = dict[str, Any]()
    for name, value in given.items():
        if name in Writing.model_fields:
            writing[name] = value
        else:
            wish[name] = value
    return wish, Writing(**writing)


@contextmanager
def _or_without_a_copy(plan: ExtensionPlan) -> Iterator[None]:
    """Run a step of the command `extend`. If it ends because the weights are missing, add to its
    error the commands that serve the base model extended."""
    try:
        yield
    except NoWeights as error:
        if lines := plan.overrides():
            raise InputError(f"{error}:\n{serving_text(lines)}") from None
        raise


def tell_plan_warnings(plan: ExtensionPlan, say: Say) -> ExtensionPlan:
    """Do the step between the planning and the writing of a command such as `extend`: report the
    plan's warnings, and return the plan. Raise an error if an extension does not help."""
    plan.raise_if_refused()
    for remark in plan.remarks():
        say(remark)
    return plan


def write_extension(
    snapshot: Snapshot,
    made: ExtensionPlan,
    output: Path,
    how: Writing,
    call: Call,
) -> MadeExtension:
    """Write a planned extension. It is verified before it gets its name."""
    record = record_of(made, provenance.base_of(snapshot), call.command)
    older = record_in(snapshot)
    if older is not None and (trained := with_training(older).get(TRAINED_ON)):
        record = replace(record, more=dict(record.more) | {TRAINED_ON: trained})
    source = output_source_of(snapshot, made, call)
    show = file_progress(call.hooks.say)
    manner = WriteOptions(how.link, call.force, how.hash, how.no_verify, show)
    written = write(source, output, record, manner)
    return MadeExtension(written, made.serving(str(output)), made)


def output_source_of(snapshot: Snapshot, plan: ExtensionPlan, call: Call) -> OutputSource:
    """Return how `extend` writes the output of a plan and then proves it.

    A GGUF gives a file, proved by ggml's formula; any other snapshot gives a directory, proved by
    transformers in a child process. The directory has grown tables if the plan grows them.
    """
    if snapshot.is_gguf:
        from ropext.files.gguf import as_file  # late: a directory needs none of it
        from ropext.files.gguf.writing import FileSource

        return FileSource(as_file(snapshot), plan.main, plan.target)

    card = partial(card_of, plan)
    growth = plan.growth
    if growth is not None:
        return _table_source(snapshot, plan, growth, card, call)

    def prove(directory: Path) -> JsonObject:
        """Do the step of the command `extend` that follows its writing, and report that it begins.
        Compare the model of transformers with the plan."""
        call.hooks.say("verifying: transformers builds the model from the written config")
        own_code = call.trust_remote_code
        return proof.prove_plan(directory, plan, snapshot.config, trust_remote_code=own_code)

    return DirectorySource(snapshot, plan.config, prove, card)


def _table_source(
    snapshot: Snapshot,
    plan: ExtensionPlan,
    growth: Growth,
    card: Callable[[Record, str], Card],
    call: Call,
) -> DirectorySource:
    """Return how `extend` writes and proves the checkpoint of a model that rotates nothing."""
    from ropext.files.schemes import growing  # late: no rotary model needs it

    position_tables = growing.find_tables(snapshot, growth.positions)

    def prove(directory: Path) -> JsonObject:
        """Do the step of the command `extend` that follows its writing of grown tables, and report
        that it begins. Compare the bytes of all other tensors with the base's, then the model that
        transformers builds with the plan."""
        call.hooks.say(
            "verifying: the bytes of all other tensors are compared, then transformers loads "
            "the result"
        )
        compared = growing.compare_tables(snapshot, directory, growth, position_tables)
        proved = proof.prove_table(
            directory, growth.extended, trust_remote_code=call.trust_remote_code
        )
        return {**compared, **proved.to_json()}

    def write_anew(directory: Path, show: Show) -> list[str]:
        """Do the step of the command `extend` that grows the tables in its output. Return the
        command's notes about tensors that are left out."""
        stale = growing.grow_files(snapshot, directory, growth, position_tables, show)
        why = "left out; transformers builds this buffer itself, at the new length"
        return [f"{name}: {why}" for name in stale]

    anew = list(dict.fromkeys(table.file for table in position_tables))
    if anew and snapshot.index is not None:
        anew.append(INDEX)
    write = write_anew if anew else None
    return DirectorySource(snapshot, plan.config, prove, card, anew=anew, write_anew=write)
