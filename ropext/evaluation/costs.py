"""Count the passes, tokens and bytes of an evaluation from configs, before it starts."""

from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ropext import families
from ropext.base.errors import RopextError
from ropext.evaluation.divergence import OPTION
from ropext.evaluation.forward import no_matrix
from ropext.evaluation.lineup import Lineup
from ropext.evaluation.reader import MIB, choose_reading_mode, shape_of
from ropext.evaluation.workload import Workload
from ropext.files.checkpoint import Snapshot
from ropext.models.head import predicted_head_problem
from ropext.models.load import (
    device_of,
    free_memory,
    loading_errors,
    loading_of,
    model_without_weights,
    with_attention,
)
from ropext.options.evaluate import Evaluate

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Passes:
    """A number of passes of one kind, and the tokens of one pass."""

    what: str
    passes: int
    tokens: int  # of one pass


@dataclass(frozen=True)
class Costs:
    """The costs of a whole evaluation."""

    work: tuple[Passes, ...]
    passes: int
    tokens: int
    weight_bytes: int
    cache_bytes: int | None  # for one row of the longest length; None if unknown
    chunk: int | None
    slice_tokens: int
    columns: int | None


def empty_model(
    snapshot: Snapshot, options: Evaluate, masked: bool, trust_remote_code: bool
) -> "PreTrainedModel":
    """Build a model as an evaluation would load it, but without weights, to check it and to count
    the costs of its forward passes."""
    how = loading_of(options, trust_remote_code=trust_remote_code, masked=masked)
    build = partial(
        model_without_weights,
        snapshot,
        trust_remote_code=trust_remote_code,
        masked=masked,
        dtype=None if isinstance(how.dtype, str) else how.dtype,  # "auto" is the config's
    )
    with loading_errors(snapshot, how):
        model: PreTrainedModel = with_attention(how.attention, build)
    return model


def check_models(lineup: Lineup, options: Evaluate, trust_remote_code: bool) -> None:
    """Raise an error if --kl or --kv cannot be measured on a model, as far as class and config
    show."""
    variants = lineup.variants
    if options.kl:
        for snapshot in {one.snapshot.directory: one.snapshot for one in variants}.values():
            model = empty_model(snapshot, options, lineup.masked, trust_remote_code)
            if predicted_head_problem(model) is not None:
                raise no_matrix(OPTION)
    for variant in variants:
        if variant.cache is not None:
            from ropext.models.patching.rounding import kept_layers  # late: it loads torch

            kept_layers(variant.snapshot.config)


def count_evaluation(
    lineup: Lineup, options: Evaluate, reads: Workload, trust_remote_code: bool
) -> Costs:
    """Count the costs of an evaluation, without reading a weight."""
    import torch

    snapshot = lineup.variants[-1].snapshot
    longest = reads.frame.longest
    device = torch.device(device_of(options.device))
    model = empty_model(snapshot, options, lineup.masked, trust_remote_code)
    shape = replace(shape_of(model), device=device.type)
    weight_bytes = num_parameters(model) * shape.dtype_bytes
    free = free_memory(device) - weight_bytes
    slice_bytes = options.slice_memory * MIB
    manner = choose_reading_mode(shape, longest, free, options.chunk, slice_bytes)
    work = work_of(lineup, reads)
    cache = None
    with suppress(RopextError):  # the model has no rotary embeddings
        cache = families.as_read(snapshot.config).kv_bytes(longest, shape.dtype_bytes)
    return Costs(
        work=tuple(work),
        passes=sum(part.passes for part in work),
        tokens=sum(map(reads.tokens, lineup.variants)),
        weight_bytes=weight_bytes,
        cache_bytes=cache,
        chunk=manner.chunk,
        slice_tokens=manner.slice_tokens,
        columns=manner.columns,
    )


def work_of(lineup: Lineup, reads: Workload) -> list[Passes]:
    """Count the passes of an evaluation by kind, from configs alone, with questions last; variants
    with the short window answer the same questions on truncated text."""
    variants = lineup.variants
    parts = dict[Any, Passes]()
    readers = [variant.label for variant in variants if not variant.reads_short]
    everyone = readers[0] if len(readers) == 1 else f"each of {len(readers)} variants"
    for variant in variants:
        for unit in reads.units(variant):
            reader = variant.label
            if unit.asks and not variant.reads_short:
                reader = everyone
            what = f"{reader}, {unit.kind}"
            key = unit.asks, what, not unit.asks and unit.longest
            before = parts.get(key, Passes(what, 0, 0))
            parts[key] = Passes(
                what, before.passes + len(unit.sizes), max(before.tokens, unit.longest)
            )
    return [parts[key] for key in sorted(parts, key=lambda key: key[0])]


def num_parameters(model: Any) -> int:
    """Count the weights of a model, loaded or on the meta device, for the costs of an evaluation's
    forward passes."""
    count = 0
    for parameter in model.parameters():
        # bitsandbytes packs two 4-bit weights into a byte.
        packed = type(parameter).__name__ == "Params4bit"
        count += int(parameter.numel()) * (2 if packed else 1)
    return count
