"""Write a GGUF as a directory of dequantised weights, extended or as it is.

A fit of a GGUF also adds the GGUF with the learned spectrum to its output. This needs torch and
transformers, which read the file's weights.
"""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ropext.base import bundled, guard
from ropext.base.errors import UsageError
from ropext.base.inputs import read_text
from ropext.base.locks import check_unlocked
from ropext.base.narration import Call, Say, no_messages
from ropext.base.staging import Output, check_output, finish_tree, staged
from ropext.files.checkpoint import Snapshot, open_snapshot, provenance
from ropext.files.gguf import GgufFile, as_file
from ropext.files.inspecting import open_model, planned
from ropext.options.extend import Extend, Writing, parse_extend
from ropext.options.fields import places_read
from ropext.options.training import Fit
from ropext.pipeline.extending import (
    MadeExtension,
    split_extend_options,
    tell_plan_warnings,
    write_extension,
)
from ropext.planning import ExtensionPlan, Plan

if TYPE_CHECKING:
    from ropext.training.request import TrainingRequest

DIRECTORY = "directory"  # the value of --as


@dataclass(frozen=True)
class Converted:
    """A directory that has the weights and the positions of a GGUF."""

    output: Path
    files: tuple[str, ...]

    def to_text(self) -> str:
        """Return the printed text of `ropext extend --as directory`."""
        return (
            f"wrote {self.output}: the weights in float32, the positions as in the file\n"
            f"to extend it: ropext extend {self.output} --factor 4 -o OUT"
        )


@dataclass(frozen=True)
class GgufJob:
    """A planned extension of a GGUF, which is written as a directory."""

    gguf: GgufFile
    plan: ExtensionPlan
    options: Extend
    writing: Writing

    def check(self, output: Path, call: Call) -> None:
        """Refuse an output that `extend --as directory` may not write."""
        check_output(Output(output, call.force, [self.gguf.directory]))

    def counts(self) -> ExtensionPlan:
        """Return the plan of `extend --as directory`, which says what would be written."""
        return self.plan

    def make(self, output: Path, call: Call) -> MadeExtension:
        """Do `extend --as directory`. Dequantise the weights, then write and verify the
        directory."""
        from ropext.models.dequantising import dequantise

        self.plan.raise_if_refused()  # before the weights, which take long
        self.plan.require_training()
        self.check(output, call)
        with tempfile.TemporaryDirectory(prefix="ropext-gguf-", ignore_cleanup_errors=True) as room:
            place = dequantise(self.gguf, Path(room) / self.gguf.head.path.stem, call.hooks.say)
            finish_tree(place)  # the links to its files have their modes
            snapshot = _open_under_gguf_name(self.gguf, place)
            plan = tell_plan_warnings(
                _plan_with_weights_note(snapshot, self.gguf, self.options), call.hooks.say
            )
            return write_extension(snapshot, plan, output, self.writing, call)


def prepare_gguf_extension(model: str, given: Mapping[str, Any], output: Path | None) -> GgufJob:
    """Prepare `extend --as directory`: open the GGUF, and plan the extension of its directory by
    the config and tokenizer that transformers reads."""
    from ropext.models.dequantising import write_gguf_without_weights

    wish, writing = split_extend_options(given)
    if writing.link != Writing().link:
        raise UsageError(
            f"--link {writing.link} shares weight files with the base, and a directory made of a "
            "GGUF has weights of its own; leave it out"
        )
    options = parse_extend(wish, read_text)
    gguf = _open_readable_gguf(model, output, wish)
    with tempfile.TemporaryDirectory(prefix="ropext-gguf-", ignore_cleanup_errors=True) as room:
        place = Path(room) / gguf.head.path.stem
        write_gguf_without_weights(gguf, place)
        plan = _plan_with_weights_note(_open_under_gguf_name(gguf, place), gguf, options)
    # The temporary files have no other name than the ones that are renamed.
    return GgufJob(gguf, plan, options, writing.changed(link="hard"))


def asks_for_extension(given: Mapping[str, Any]) -> bool:
    """Return whether a call of the command `extend --as directory` does the steps of an extension,
    or only converts the GGUF."""
    return bool(split_extend_options(given)[0])


def convert_gguf(model: str, output: Path, force: bool, say: Say = no_messages) -> Converted:
    """Do `extend --as directory` without an extension: write a GGUF as a directory."""
    from ropext.models.dequantising import dequantise

    gguf = _open_readable_gguf(model, output, {})
    with staged(Output(output, force, [gguf.directory])) as stage:
        dequantise(gguf, stage.directory, say)
        files = stage.names()
    return Converted(output, tuple(files))


def _open_readable_gguf(model: str, output: Path | None, wish: Mapping[str, Any]) -> GgufFile:
    """Open the GGUF for `extend --as directory`, if transformers can read it. Refuse an output that
    equals, contains or is inside an input."""
    from ropext.models.dequantising import check_gguf_is_readable

    if bundled.find_gguf(model) is None:
        raise UsageError(f"--as directory makes a directory of a GGUF, and {model} is no GGUF")
    check_unlocked(output)
    gguf = as_file(open_model(model))
    guard.check({"MODEL": gguf.head.path, **places_read(wish, Extend)}, {"--output": output})
    check_gguf_is_readable(gguf)
    return gguf


def _open_under_gguf_name(gguf: GgufFile, place: Path) -> Snapshot:
    """Open the directory that `extend --as directory` made, under the name of its GGUF. The record
    names its base by it."""
    return replace(open_snapshot(str(place)), name=gguf.name)


def _plan_with_weights_note(snapshot: Snapshot, gguf: GgufFile, options: Extend) -> ExtensionPlan:
    """Do the planning step of the command `extend --as directory`. Return its plan, with a note
    that the weights are a GGUF's, dequantised to float32."""
    plan = planned(snapshot, gguf.name, options)
    name = gguf.head.path.name
    note = f"the weights are those of {name}, dequantised from {gguf.quantisation} to float32"
    return replace(plan, notes=(*plan.notes, note))


def fit_request(
    model: str, data: str, options: Fit, revision: str | None = None
) -> "TrainingRequest":
    """Prepare the command `fit` and return its request. For a GGUF the output also gets the fitted
    GGUF."""
    from ropext.training.request import TrainingRequest

    finish = None
    gguf = bundled.find_gguf(model)
    if gguf is not None:
        finish = partial(_add_gguf, model, f"{gguf.stem}-long.gguf")
    return TrainingRequest(model, data, options, revision, finish)


def _add_gguf(model: str, name: str, output: Path, call: Call, directory: Path) -> None:
    """Write the GGUF with a directory's spectrum into that directory, and add it to the list of
    files.

    `directory` is renamed to `output` later, so the record has the name `output`.
    """
    snapshot = open_model(model)
    plan = tell_plan_warnings(planned(snapshot, model, Extend(like=str(directory))), call.hooks.say)
    assert isinstance(plan, Plan)  # a GGUF rotates
    plan = replace(plan, recipe=plan.recipe.changed(like=str(output)))
    before = guard.listing(directory)
    nothing_is_there = replace(call, force=False)
    write_extension(snapshot, plan, directory / name, Writing(), nothing_is_there)
    for file in guard.listing(directory):
        if file not in before:
            provenance.relist(directory, file)
    call.hooks.say(
        f"{output / name} is the GGUF with the fitted frequencies; the same folder has the weights "
        "in float32"
    )
