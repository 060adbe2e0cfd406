"""What each stage of a run would take, by its options alone: no weight and no document is read."""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ropext.lengths import doubling_grid, lengths_text
from ropext.narration import Say
from ropext.options.fields import EVALUATE, EXTEND, FINETUNE, FIT
from ropext.options.recipe import PLAN, Recipe
from ropext.options.training import TrainingOptions
from ropext.pipeline.running import WholeRun
from ropext.pipeline.steps import LABELS, Work
from ropext.report.text import size
from ropext.table import columns
from ropext.workdir import beside


def count(
    recipe: Recipe,
    output: Path | None,
    say: Say,
    *,
    begin: str | None = None,
    only: str | None = None,
    force: bool = False,
) -> dict[str, Any]:
    """Every stage that would be done: a sentence under `what`, the numbers behind it. What a run
    refuses at once is refused."""
    with tempfile.TemporaryDirectory(prefix="ropext-count-") as room:
        place = Path(output or recipe.output or Path(room, "OUT"))
        work = Work(recipe, place, beside(place), say, force=force)
        run = WholeRun(work, begin, only)
        run.check()
        stages = {
            name: {"what": "done before, skipped", "skipped": True}
            if is_kept
            else _stage(name, work)
            for name, is_kept in _coming(run).items()
        }
    return {"model": recipe.model, "stages": stages}


def _coming(run: WholeRun) -> dict[str, bool]:
    """The stages that are asked for, and whether each would be skipped."""
    skipped: dict[str, bool] = {}
    changed = False  # a checkpoint that later stages start from
    for step in run.steps():
        starts_anew = changed and step.name != FIT  # a fit starts from the base
        again = run.does_again(step.name) or starts_anew
        skipped[step.name] = not again and run.work.ledger.left(step) is not None
        changed = changed or (step.name in LABELS and not skipped[step.name])
    return skipped


def _stage(name: str, work: Work) -> dict[str, Any]:
    recipe, plan = work.job, work.plan
    if name == PLAN:
        for remark in plan.remarks():
            work.tell(remark)
        what = f"{plan.method}: {plan.context:,} to {plan.target:,} tokens (factor {plan.factor:g})"
        return {"what": what, "context": plan.context, "target": plan.target, "method": plan.method}
    if name == EXTEND:
        total = sum(work.base.files[file] for file in work.base.weight_files)
        if not total:
            return {"what": "the weights, fetched from the hub first"}
        how = {"copy": "copied", "hard": "hard-linked", "symlink": "linked"}[recipe.extend.link]
        proof = "not proved" if recipe.extend.no_verify else "proved by stock transformers"
        return {"what": f"{size(total)} of weights {how}, {proof}", "bytes": total}
    if name == FIT and recipe.fit:
        return _training(recipe.fit)
    if name == FINETUNE and recipe.finetune:
        return _training(recipe.finetune, recipe.finetune.epochs)
    if name == EVALUATE and recipe.evaluate:
        return _evaluate(work)
    return {"what": "the report, and the weights once more by hard link"}


def _training(options: TrainingOptions, epochs: float | None = None) -> dict[str, Any]:
    from ropext.training.defaults import MOST_STEPS

    steps, batch = options.steps, options.batch_tokens
    what = f"at most {MOST_STEPS} steps" if steps is None else f"{steps} steps"
    what = what if epochs is None else f"{epochs:g} passes over the data"
    what += (
        ", as many tokens a step as suit the model"
        if batch is None
        else f", {batch:,} tokens a step"
    )
    return {"what": what, "steps": steps, "batch_tokens": batch}


def _evaluate(work: Work) -> dict[str, Any]:
    options, labels = work.job.evaluate, work.labels
    assert options is not None
    lengths = options.lengths or doubling_grid(work.plan.context, work.plan.target)
    what = [f"at most {options.max_docs} documents"] if options.data else []
    what += [f"{options.items} questions of {task} at each depth" for task in options.tasks]
    said = f"{', '.join(what)}; at {lengths_text(lengths)}; by {', '.join(labels)}"
    return {"what": said, "lengths": lengths, "models": labels}


def counts_text(counts: Mapping[str, Any]) -> str:
    """What --dry-run prints: each stage with what it takes."""
    stages = counts["stages"].items()
    return columns(("stage", "what it takes"), [(name, stage["what"]) for name, stage in stages])
