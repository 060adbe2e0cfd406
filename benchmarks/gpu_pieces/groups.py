"""Self-Extend's groups that double with distance, compared with the default's one group.

It measures 2, 4 and 8 times the context, on three kinds of text, and before that a layer in bands
against exact scores. Goal: 0.01 nats over the far half on two of the three kinds; else they stay a
benchmark.
"""

from dataclasses import replace
from functools import partial
from typing import Any

from gpu_pieces import STAND_IN, Case, Day, at_least
from gpu_pieces.folding import allow, beside_exact, heads
from gpu_pieces.reading import CODE, MANUALS, NOVELS, documents_of, interval, load, read_by

FACTORS = (2, 4, 8)
MOST_DOCUMENTS = 8
DEFAULT = "self-extend"


def equal(day: Day, dtype: str, bound: float) -> dict[str, Any]:
    """Compare a layer in one band with exact scores, its states at random."""
    import torch
    from self_extend_groups import Band, in_bands

    from ropext.models.patching.self_extend import Rotation

    allow(day)
    layer = heads(day, dtype)
    width = layer.q.shape[-1]
    rates = 10000.0 ** (-torch.arange(0, width, 2) / width)
    rotation = Rotation(rates.to(day.device), False, True)
    band = Band(layer.window, 8, layer.window)
    tokens = layer.k.shape[2]
    positions = torch.arange(tokens, device=day.device)[None]
    queries = positions[:, layer.start :]
    turned = replace(
        layer,
        far_q=rotation.turn(layer.q, queries, band.query_positions(queries)),
        far_k=rotation.turn(layer.k, positions, band.key_positions(positions)),
    )
    return beside_exact(turned, in_bands(layer, (band,), rotation), bound)


def compare(day: Day, factor: int, name: str) -> dict[str, Any]:
    """Return the gain of groups that double, over the far half of the target and over its tail."""
    from self_extend_groups import FIRST_GROUPS, patch_doubling

    from ropext.base.bundled import MODELS
    from ropext.files.checkpoint import open_snapshot
    from ropext.models import patching
    from ropext.results import EXTENDED, rules
    from ropext.results.measurement import Measurement
    from ropext.training.data import judging_workload

    allow(day)
    place = str(MODELS[STAND_IN]) if day.model == STAND_IN else day.model
    snapshot = open_snapshot(place)
    model = load(day, place)
    # A dry run takes a real model for one of a short context.
    context = 256 if day.dry else int(model.config.max_position_embeddings)
    model.config.max_position_embeddings = context
    documents = documents_of(day, name, snapshot, factor * context, MOST_DOCUMENTS)
    judge = judging_workload(documents, (context, factor * context), 0)
    patching.patch(model, method=DEFAULT, factor=factor)
    models = read_by(model, DEFAULT, EXTENDED, snapshot, judge)
    for first in FIRST_GROUPS:
        patch_doubling(model, first, factor)
        models = models | read_by(model, f"from {first}", EXTENDED, snapshot, judge)
    measured = Measurement(judge.frame, models, judge.described)
    figures: dict[str, Any] = {"documents": len(documents)}
    for first in FIRST_GROUPS:
        what = f"default minus groups that double from {first}"
        far = rules.far_change(measured, DEFAULT, f"from {first}")
        readings = measured.readings
        tail = judge.frame.tail_span(judge.frame.longest)
        end = judge.frame.difference(readings[DEFAULT], readings[f"from {first}"], tail)
        figures[f"{what}, far half, nats"] = at_least(far.value, 0.01)
        figures[f"{what}, its 95 % interval"] = interval(far)
        figures[f"{what}, tail, nats"] = end.value
    return figures


def cases(day: Day) -> dict[str, Case]:
    made: dict[str, Case] = {
        "one band, equal to exact scores, float32": partial(equal, day, "float32", 1e-5),
        "one band, equal to exact scores, bfloat16": partial(equal, day, "bfloat16", 2e-3),
    }
    for factor in FACTORS:
        for name in (MANUALS, CODE, NOVELS):
            made[f"{factor} times, {name}"] = partial(compare, day, factor, name)
    return made
