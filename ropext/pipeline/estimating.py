"""What each stage of a run would take, without writing anything that stays.

Training and evaluation are counted on a checkpoint whose config is the extended one and whose
weights are links, in a temporary directory.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ropext.checkpoint import open_snapshot, with_weights
from ropext.checkpoint.snapshot import Snapshot
from ropext.errors import RopextError
from ropext.pipeline.extending import write_extension
from ropext.pipeline.job import PLAN, REPORT, Job
from ropext.pipeline.sections import EVALUATE, EXTEND, FINETUNE, FIT
from ropext.pipeline.stages import Hashes
from ropext.pipeline.steps import Say, Work
from ropext.report.text import size

Estimate = dict[str, Any]


def estimate(asked: Job, output: Path | None, say: Say) -> dict[str, Any]:
    """Every cell, every stage: a sentence under `what`, and the numbers behind it."""
    base = open_snapshot(asked.model, revision=asked.value("revision"))
    place = Path(output or asked.output or "OUT")
    cells = []
    with tempfile.TemporaryDirectory(prefix="ropext-estimate-") as room:
        works = [
            Work(
                job=asked,
                cell=cell,
                output=place / cell.name if cell.name else place,
                folder=Path(room) / (cell.name or "cell"),
                base=base,
                hashes=Hashes(Path(room) / "hashes.json"),
                say=say,
                command=(),
            )
            for cell in asked.cells()
        ]
        limit = max(_target(work) for work in works)
        for work in works:
            work.limit = limit
            cells.append({"cell": work.cell.name or None, "stages": _stages(work)})
    return {"model": asked.model, "cells": cells}


def _target(work: Work) -> int:
    """0 where it cannot be planned, which its stage then says."""
    try:
        return work.plan.target
    except RopextError:
        return 0


def _stages(work: Work) -> dict[str, Estimate]:
    counts: dict[str, Callable[[Work], Estimate]] = {
        PLAN: _plan,
        EXTEND: _extend,
        FIT: _fit,
        FINETUNE: _finetune,
        EVALUATE: _evaluate,
        REPORT: lambda work: {"what": "the report, and the weights once more by hard link"},
    }
    found: dict[str, Estimate] = {}
    for name in work.job.stages:
        try:
            found[name] = counts[name](work)
        except RopextError as error:
            found[name] = {"what": f"not as things are here: {error}", "refused": str(error)}
    return found


def _plan(work: Work) -> Estimate:
    plan = work.plan
    for warning in plan.warnings:
        work.say(f"warning: {warning}")
    what = f"{plan.method}: {plan.context:,} to {plan.target:,} tokens (factor {plan.factor:g})"
    return {"what": what, "context": plan.context, "target": plan.target, "method": plan.method}


def _weights(snapshot: Snapshot) -> int:
    return sum(snapshot.files[name] for name in snapshot.weight_files)


def _extend(work: Work) -> Estimate:
    total, link = _weights(work.base), work.job.writing.link
    if not total and work.base.hub_id != work.base.name:
        with_weights(work.base)  # raises: they are nowhere
    if not total:
        return {"what": "the weights, fetched from the hub first"}
    how = {"copy": "copied", "hard": "hard-linked", "symlink": "linked"}[link]
    proof = "not proved" if work.job.writing.no_verify else "proved by stock transformers"
    return {"what": f"{size(total)} of weights {how}, {proof}", "bytes": total}


NOT_HERE = {"what": "counted once the weights are here (hf download MODEL)"}


def _extended(work: Work) -> Path:
    """The extended checkpoint with linked weights."""
    place = work.checkpoint(EXTEND)
    if not place.is_dir():
        write_extension(
            work.base,
            work.plan,
            place,
            link="symlink",
            force=False,
            prove=False,
            hash_weights=False,
            trust_remote_code=False,
            command=(),
            say=lambda sentence: None,
        )
    return place


def _training(found: Any) -> Estimate:
    estimate = found.estimate
    what = (
        f"{estimate.tokens:,} tokens, {estimate.flops:.2e} FLOPs, about "
        f"{size(estimate.peak_bytes)} of memory on a device"
    )
    return {"what": what} | found.to_json()


def _fit(work: Work) -> Estimate:
    if not _weights(work.base):
        return NOT_HERE
    from ropext.training import plan_fit

    data = str(work.job.given.place("fit.data"))
    return _training(plan_fit(work.base.name, data, **work.job.fitting(work.cell)))


def _finetune(work: Work) -> Estimate:
    if not _weights(work.base):
        return NOT_HERE
    from ropext.training import plan_finetune

    options = work.job.finetuning()
    given = {name: value for name, value in vars(options).items() if value is not None}
    data = str(work.job.given.place("finetune.data"))
    return _training(plan_finetune(_extended(work), data, **given))


def _evaluate(work: Work) -> Estimate:
    if not _weights(work.base):
        return NOT_HERE
    from ropext.evaluation import estimate_evaluation

    place = _extended(work)
    places = dict.fromkeys(work.checkpoints, place)
    _, found = estimate_evaluation(
        work.job.model, lineup=work.lineup(places), **work.job.evaluation()
    )
    what = (
        f"{found.passes:,} passes, {found.tokens:,} tokens, {found.flops:.2e} FLOPs, "
        f"{size(found.peak_bytes)} of memory above the weights"
    )
    return {"what": what} | found.to_json()
