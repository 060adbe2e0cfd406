"""Choose how to write and verify an output: a directory or a GGUF file."""

from collections.abc import Callable
from pathlib import Path

from ropext import proof
from ropext.base.jsontext import JsonObject
from ropext.base.narration import Call, Show
from ropext.files.checkpoint import Snapshot
from ropext.files.checkpoint.card import BaseName, Card, card_of
from ropext.files.checkpoint.snapshot import INDEX
from ropext.files.checkpoint.writing import DirectorySource, OutputSource
from ropext.planning import ExtensionPlan
from ropext.scaling.tables import Growth


def source_of(snapshot: Snapshot, plan: ExtensionPlan, title: str, call: Call) -> OutputSource:
    """Return how the output `title` of a plan is written and then proved.

    A GGUF gives a file, proved by ggml's formula; any other snapshot gives a directory, proved by
    transformers in a child process. The directory has grown tables if the plan grows them.
    """
    if snapshot.is_gguf:
        from ropext.files.gguf import as_file  # late: a directory needs none of it
        from ropext.files.gguf.writing import FileSource

        return FileSource(as_file(snapshot), plan.main, plan.target)

    def card(proved: JsonObject | None) -> Card:
        """Return the model card of the output with the result of transformers' proof."""
        return card_of(plan, BaseName.of(snapshot), title, proved)

    growth = plan.growth
    if growth is not None:
        return _table_source(snapshot, plan, growth, card, call)

    def prove(directory: Path) -> JsonObject:
        """Prove a written directory: compare the model that transformers builds from it with the
        plan."""
        call.hooks.say("verifying: transformers builds the model from the written config")
        own_code = call.trust_remote_code
        return proof.prove_plan(directory, plan, snapshot.config, trust_remote_code=own_code)

    return DirectorySource(snapshot, plan.config, prove, card)


def _table_source(
    snapshot: Snapshot,
    plan: ExtensionPlan,
    growth: Growth,
    card: Callable[[JsonObject | None], Card],
    call: Call,
) -> DirectorySource:
    """Return how the checkpoint of a model that rotates nothing is written and then proved by
    transformers."""
    from ropext.files.schemes import growing  # late: no rotary model needs it

    position_tables = growing.find_tables(snapshot, growth.positions)

    def prove(directory: Path) -> JsonObject:
        """Prove a written directory: compare the bytes of its other tensors with the base's, then
        the model that transformers builds with the plan."""
        call.hooks.say(
            "verifying: the bytes of all other tensors are compared, then transformers loads "
            "the result"
        )
        compared = growing.compare_tables(snapshot, directory, growth, position_tables)
        proved = proof.prove_table(
            directory, growth.extended, trust_remote_code=call.trust_remote_code
        )
        return {**compared, **proved}

    def write_anew(directory: Path, show: Show) -> list[str]:
        """Write the weight files with grown position tables; return notes about tensors that are
        left out."""
        stale = growing.grow_files(snapshot, directory, growth, position_tables, show)
        why = "left out; transformers builds this buffer itself, at the new length"
        return [f"{name}: {why}" for name in stale]

    anew = list(dict.fromkeys(table.file for table in position_tables))
    if anew and snapshot.index is not None:
        anew.append(INDEX)
    write = write_anew if anew else None
    return DirectorySource(snapshot, plan.config, prove, card, anew=anew, write_anew=write)
