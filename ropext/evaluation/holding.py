"""Check a model in memory before an evaluation, and line it up like a directory."""

import copy
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ropext.base import workdir
from ropext.base.errors import OutputExists, RopextError, UsageError
from ropext.base.jsontext import write_json
from ropext.evaluation.lineup import Lineup, line_up_patched, line_up_snapshot
from ropext.evaluation.variants import InMemoryModel, InMemorySnapshot, Variant
from ropext.files.checkpoint import Snapshot, open_snapshot
from ropext.models.patching import (
    base_model,
    check_rotation,
    config_before_patch,
    config_of_loaded,
    name_of_loaded,
    plan_of_patched,
)
from ropext.models.tokenizer import load_tokenizer
from ropext.options.evaluate import Evaluate
from ropext.results import EXTENDED, SHORT
from ropext.scaling.rope import CONFIG

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Options that say how to load weights, or that name a directory.
LOADING = ("dtype", "device", "device_map", "attn_implementation", "adapter")
ADAPTER = "in memory"  # the place of a variant's adapter


def check_output(output: Path, force: bool | None) -> None:
    """Raise OutputExists if the output for an evaluation of a model in memory holds results of a
    measurement, because they may be of another model."""
    if not force and workdir.read(output) is not None and workdir.has_work(output):
        raise OutputExists(
            f"{output} holds results, and results of a model in memory are never resumed; give "
            "another output, force=True, or ropext.save the model and evaluate the directory"
        )


def hold(model: "PreTrainedModel", tokenizer: object, options: Evaluate) -> InMemoryModel:
    """Check a model in memory and its evaluation options, and return it as a held model."""
    live = base_model(model)
    for name in LOADING:
        if getattr(options, name) != Evaluate.model_fields[name].default:
            raise UsageError(f"{name} is about a model that ropext loads; this one is in memory")
    if any(parameter.is_meta for parameter in model.parameters()):
        raise UsageError("weights of this model are not in memory (offloaded); name its directory")
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        raise UsageError("an adapter that puts tokens before the text moves all positions")
    if options.method and plan_of_patched(live) is not None:
        raise UsageError(
            "method extends a model as it was trained, and this one is patched; give no method, or "
            "call ropext.models.patching.unpatch(model) first"
        )
    merged = _merged_adapters(model)
    if merged:
        raise UsageError(
            f"the adapter {merged} is merged into this model's weights, which reading them without "
            "it would change; call unmerge_adapter() first, or give what merge_and_unload makes"
        )
    from ropext.models.patching.intact import changed_weight  # late: it loads torch

    check_rotation(live)
    changed = "" if options.base else changed_weight(live)
    if changed:
        name = name_of_loaded(live)
        given = f"base={name!r}, from which it was loaded" if name else "the checkpoint by base="
        raise UsageError(
            f"the weights of this model changed since ropext.patch ({changed}), so that without "
            f"its scaling it is not the model before its extension; give {given}"
        )
    return InMemoryModel(model, live, _tokenizer(live, tokenizer))


def _merged_adapters(model: "PreTrainedModel") -> str:
    """Return the names of the adapters that PEFT has merged in place into the model of an
    evaluation, so that no variant can read documents without them."""
    names = dict[str, None]()
    for module in model.modules():
        for name in getattr(module, "merged_adapters", ()):
            names[name] = None
    return ", ".join(names)


def _tokenizer(live: "PreTrainedModel", given: object) -> Any:
    """Return the tokenizer for the documents of a measured model in memory: a copy of the given
    one, else loaded from the model's own directory."""
    if given is not None:
        return copy.deepcopy(given)
    name = name_of_loaded(live)
    try:
        return load_tokenizer(open_snapshot(name), trust_remote_code=False)
    except RopextError as error:
        raise UsageError(f"give tokenizer=; the model's own directory has none ({error})") from None


def _origin(live: "PreTrainedModel") -> Snapshot | None:
    """Open, for the evaluation of a model in memory, the checkpoint from which it was loaded, if
    transformers keeps its name; else return None."""
    name = name_of_loaded(live)
    commit = getattr(live.config, "_commit_hash", None)
    is_directory = name != "" and Path(name, CONFIG).is_file()
    if not is_directory and commit is None:
        return None
    try:
        return open_snapshot(name, revision=commit)
    except RopextError:
        return None  # moved or deleted since


@contextmanager
def opened(held: InMemoryModel, options: Evaluate) -> Iterator[Lineup]:
    """Yield the lineup of a model in memory, with its small files in a temporary folder."""
    live = held.live
    with tempfile.TemporaryDirectory(prefix="ropext-live-", ignore_cleanup_errors=True) as folder:
        place = Path(folder)
        write_json(
            place / CONFIG, config_of_loaded(live) | {"architectures": [type(live).__name__]}
        )
        name = name_of_loaded(live) or type(live).__name__
        origin = _origin(live)
        files = vars(open_snapshot(place)) | {"name": name}
        snapshot = InMemorySnapshot(**files, held=held, origin=origin)
        plan = plan_of_patched(live)
        if plan is None:
            lineup = line_up_snapshot(snapshot, options)
        else:
            lineup = line_up_patched(snapshot, plan, config_before_patch(live), options)
        variants = list(lineup.variants) + _with_its_adapter(held, lineup.variants)
        yield replace(lineup, variants=tuple(variants))


def _with_its_adapter(held: InMemoryModel, variants: Sequence[Variant]) -> list[Variant]:
    """Return the variants that a PEFT model in memory computes with its adapter; all other variants
    are without it."""
    if held.model is held.live:
        return []
    long = [variant for variant in variants if variant.kind == EXTENDED]
    if not long:
        long = [variant for variant in variants if variant.kind not in SHORT]
    rows = list[Variant]()
    for variant in long:
        label = f"{variant.label}+adapter"
        unrounded = variant.unrounded and f"{variant.unrounded}+adapter"
        rows.append(
            replace(variant, label=label, kind=EXTENDED, adapter=ADAPTER, unrounded=unrounded)
        )
    return rows
