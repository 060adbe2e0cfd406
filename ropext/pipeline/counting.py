"""What each stage of a run would take, without writing anything that stays, and whether it would be
refused.

Training and evaluation are counted on a checkpoint whose config is the extended one and whose
weights are links, in a temporary directory.
"""

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ropext.checkpoint import with_weights
from ropext.checkpoint.snapshot import Snapshot
from ropext.errors import RopextError, UsageError
from ropext.narration import Say
from ropext.options.fields import EVALUATE, EXTEND, FINETUNE, FIT
from ropext.options.recipe import PLAN, REPORT, Recipe
from ropext.pipeline.extending import WriteOptions, write_extension
from ropext.pipeline.outcome import Choice, report_stage
from ropext.pipeline.running import WholeRun, require
from ropext.pipeline.stages import is_done
from ropext.pipeline.steps import LABELS, Work
from ropext.report.text import size
from ropext.table import columns
from ropext.workdir import beside

if TYPE_CHECKING:
    from ropext.training.run import Planned

Counts = dict[str, Any]
SKIPPED: Counts = {"what": "done before, skipped", "skipped": True}


def count(
    asked: Recipe,
    output: Path | None,
    say: Say,
    *,
    begin: str | None = None,
    only: str | None = None,
    force: bool = False,
) -> dict[str, Any]:
    """Every stage that would be done: a sentence under `what`, the numbers behind it, and under
    `refused` why it would not get done. What a run refuses at once is refused."""
    choice = Choice(begin, only)
    with tempfile.TemporaryDirectory(prefix="ropext-count-") as room:
        place = Path(output or asked.output or Path(room, "OUT"))
        work = Work(asked, place, beside(place), say, force=force)
        WholeRun(work, choice).check()
        aside = replace(work, folder=Path(room) / "run")
        stages = {
            name: SKIPPED if is_kept else _stage(name, aside)
            for name, is_kept in _coming(work, choice).items()
        }
    return {"model": asked.model, "stages": stages}


def raise_if_refused(found: Mapping[str, Any]) -> None:
    """UsageError where the run would not get through."""
    reasons = [own["refused"] for own in found["stages"].values() if "refused" in own]
    if reasons:
        raise UsageError("; ".join(reasons))


def _coming(work: Work, choice: Choice) -> dict[str, bool]:
    """The stages that are asked for, and whether each would be skipped."""
    found: dict[str, bool] = {}
    changed = False  # a checkpoint that later stages start from
    for stage in (*work.stages(), report_stage(work)):
        if choice.only not in (None, stage.name):
            require(stage, work, str(choice.only))
            continue
        starts_anew = changed and stage.name != FIT  # a fit starts from the base
        again = choice.again(stage.name) or starts_anew
        found[stage.name] = not again and is_done(work.ledger, stage) is not None
        changed = changed or (stage.name in LABELS and not found[stage.name])
    return found


def _stage(name: str, work: Work) -> Counts:
    counts: dict[str, Callable[[Work], Counts]] = {
        PLAN: _plan,
        EXTEND: _extend,
        FIT: _fit,
        FINETUNE: _finetune,
        EVALUATE: _evaluate,
        REPORT: lambda work: {"what": "the report, and the weights once more by hard link"},
    }
    try:
        return counts[name](work)
    except RopextError as error:
        return {"what": "refused, see below", "refused": str(error)}


def _plan(work: Work) -> Counts:
    plan = work.plan
    for warning in plan.warnings:
        work.say(f"warning: {warning}")
    what = f"{plan.method}: {plan.context:,} to {plan.target:,} tokens (factor {plan.factor:g})"
    return {"what": what, "context": plan.context, "target": plan.target, "method": plan.method}


def _weights(snapshot: Snapshot) -> int:
    return sum(snapshot.files[name] for name in snapshot.weight_files)


def _extend(work: Work) -> Counts:
    total, link = _weights(work.base), work.job.extend.link
    if not total and work.base.hub_id != work.base.name:
        with_weights(work.base)  # raises: they are nowhere
    if not total:
        return {"what": "the weights, fetched from the hub first"}
    how = {"copy": "copied", "hard": "hard-linked", "symlink": "linked"}[link]
    proof = "not proved" if work.job.extend.no_verify else "proved by stock transformers"
    return {"what": f"{size(total)} of weights {how}, {proof}", "bytes": total}


NOT_HERE = {"what": "counted once the weights are here (hf download MODEL)"}


def _extended(work: Work) -> Path:
    """The extended checkpoint with linked weights."""
    place = work.checkpoint(EXTEND)
    if not place.is_dir():
        write_extension(work.base, work.plan, place, WriteOptions("symlink", prove=False))
    return place


def _training(found: "Planned[Any]") -> Counts:
    from ropext.training import report

    rows, is_open = found.prepared.rows, found.prepared.settings.is_open
    most = "at most " if is_open else ""
    what = (
        f"{most}{found.prepared.settings.steps.value} steps, {most}{found.tokens:,} tokens with "
        f"gradients, {found.prepared.forward_tokens:,} without"
    )
    counts = {"what": what} | found.to_json()
    if report.too_often(rows.passes) and not is_open:
        counts["said"] = [report.passes_text(rows)]
    return counts


def _fit(work: Work) -> Counts:
    if not _weights(work.base):
        return NOT_HERE
    from ropext.training import plan_fit

    data = str(work.job.options(FIT)["data"])
    found = plan_fit(work.base.name, data, **work.job.fitting)
    return _training(found)


def _finetune(work: Work) -> Counts:
    if not _weights(work.base):
        return NOT_HERE
    from ropext.training import plan_finetune

    data = work.job.options(FINETUNE)["data"]
    found = plan_finetune(_extended(work), data, **work.job.finetuning)
    return _training(found)


def _evaluate(work: Work) -> Counts:
    if not _weights(work.base):
        return NOT_HERE
    from ropext.evaluation.costs import count_evaluation

    place = _extended(work)
    places = dict.fromkeys(work.checkpoints, place)
    _, found = count_evaluation(
        work.job.model,
        lineup=work.lineup(places),
        gates=work.gates,
        **work.job.evaluation,
    )
    weights = size(found.weight_bytes)
    what = f"{found.passes:,} passes, {found.tokens:,} tokens, {weights} of weights"
    return {"what": what} | found.to_json()


def counts_text(found: Mapping[str, Any]) -> str:
    """What --dry-run prints: each stage with what it takes."""
    stages = found["stages"].items()
    said = [f"{name}: {sentence}" for name, own in stages for sentence in own.get("said", ())]
    table = columns(("stage", "what it takes"), [(name, own["what"]) for name, own in stages])
    return "\n".join([table, *(["", *said] if said else [])])
