"""What an evaluation will take, from configs alone: its passes, and what they cost."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ropext.checkpoint import with_weights
from ropext.evaluation import costs, loading
from ropext.evaluation.pinning import LENGTH_DEPENDENT, pass_lengths
from ropext.evaluation.preparing import workdir_of
from ropext.evaluation.setting import Setting, settle
from ropext.evaluation.variants import Lineup, Variant
from ropext.evaluation.windows import hf_stride, short_windows, strided_windows
from ropext.lengths import length_text
from ropext.patching import apply_config, unpatch
from ropext.results.gates import Gate
from ropext.results.perplexity import Frame

MIB = 1 << 20


def estimate_evaluation(
    model: str,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    lineup: Lineup | None = None,
    gates: Sequence[Gate] = (),
    output: Path | None = None,
    force: bool = False,
    **values: Any,
) -> tuple[Setting, costs.Estimate]:
    """What `evaluate` would take; no weight is read, and what it would refuse is refused."""
    import torch
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM

    setting = settle(model, revision, trust_remote_code, values, lineup, gates)
    _check_places(setting, output, force)
    snapshot, options = setting.lineup.variants[-1].snapshot, setting.options
    config = AutoConfig.from_pretrained(snapshot.directory, trust_remote_code=trust_remote_code)
    dtype = config.dtype if options.dtype == "auto" else getattr(torch, options.dtype)
    with init_empty_weights(include_buffers=False):
        skeleton = loading.with_attention(
            options.attn_implementation,
            lambda kind: AutoModelForCausalLM.from_config(
                config,
                dtype=dtype or torch.float32,
                trust_remote_code=trust_remote_code,
                attn_implementation=kind,
            ),
        )
    device = torch.device(loading.device_of(options))
    shape = replace(costs.shape_of(skeleton), device=device.type)
    free = loading.free_memory(device)
    manner = costs.choose_manner(
        shape,
        setting.prepared.frame.longest,
        free - shape.all_parameters * shape.dtype_bytes,
        options.chunk,
        options.slice_memory * MIB,
    )
    return setting, costs.estimate(shape, work_of(setting, skeleton), manner)


def _check_places(setting: Setting, output: Path | None, force: bool) -> None:
    """Weights that should lie here and do not; an output that holds something else."""
    for own in setting.lineup.variants:
        if own.snapshot.hub_id != own.snapshot.name:
            with_weights(own.snapshot)
        elif not own.snapshot.weight_files:
            return  # fetched first, and part of what says which run it is
    if output is not None:
        lineup, options, prepared = setting.lineup, setting.options, setting.prepared
        workdir_of(output, lineup, options, prepared, setting.tokenizer).check(force)


def _pass_lengths(setting: Setting, own: Variant, skeleton: Any) -> tuple[int, ...]:
    """The passes of a variant; without a skeleton to ask, one."""
    frame, config = setting.prepared.frame, own.config or own.snapshot.config
    if skeleton is None or not any(f'"{kind}"' in json.dumps(config) for kind in LENGTH_DEPENDENT):
        return (frame.longest,)
    apply_config(skeleton, config)
    try:
        return pass_lengths(skeleton, asked_lengths(frame))
    finally:
        unpatch(skeleton)


def asked_lengths(frame: Frame) -> list[int]:
    """The lengths that are read, the trained context among them for the short tax."""
    return [*frame.lengths, *([frame.context] if frame.context < frame.longest else [])]


def work_of(setting: Setting, skeleton: Any = None) -> list[costs.Work]:
    """Passes by kind, from configs alone."""
    frame, options = setting.prepared.frame, setting.options
    num = len(setting.prepared.documents or ())
    work = list[costs.Work]()
    for own in setting.lineup.variants if num else ():
        if own.is_base:
            windows = sum(1 for _ in short_windows(frame.longest, frame.context))
            size = min(frame.context, frame.longest)
            work.append(costs.Work("base, short window", num * windows, size))
            continue
        for length in _pass_lengths(setting, own, skeleton):
            work.append(costs.Work(f"{own.label}, whole", num, length))
        for length in frame.lengths if options.protocol == "hf-stride" else ():
            count = sum(1 for _ in strided_windows(frame.longest, length, hf_stride(length)))
            work.append(costs.Work(f"{own.label}, strided at {length}", num * count, length))
    return work + _questions_work(setting)


def _questions_work(setting: Setting) -> list[costs.Work]:
    """One entry for all questions of a task and length; every variant but the base answers them."""
    readers = [own.label for own in setting.lineup.variants if not own.is_base]
    who = readers[0] if len(readers) == 1 else f"each of {len(readers)} variants"
    counts, extra = Counter[tuple[str, int]](), 0 if setting.prepared.bos is None else 1
    for group in setting.prepared.questions:
        length = length_text(group[0].length + extra)
        shared = group[0].shared if len(group) > 1 else 0
        tokens = shared + sum(item.length - shared for item in group)
        counts[f"{who}, {group[0].task} at {length}", tokens] += len(readers)
    return [costs.Work(what, passes, tokens) for (what, tokens), passes in counts.items()]
