"""Short fine-tuning of an extended checkpoint on transformers.Trainer: LoRA, chunked loss, control.

The parts, from the bottom: defaults (what the papers did), sequences (from documents to tensors),
data (which documents, and questions among them), loss (cross-entropy whose logits are never whole),
adapters (which layers), spectrum and learner (what a fit moves), estimates (tokens, memory, FLOPs),
engine (the Trainer), outcome (merged checkpoint and adapter), run and fitting (all of it in order).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ropext.narration import Say, silent

if TYPE_CHECKING:
    from ropext.training.fit_writing import Fitted
    from ropext.training.fitting import PlannedFit
    from ropext.training.run import Finetuned, Planned


def run_finetune(
    directory: str | Path,
    data: str,
    output: str | Path,
    *,
    force: bool = False,
    say: Say = silent,
    **options: Any,
) -> "Finetuned":
    """Fine-tune an extended checkpoint; `options` are the fields of options.training.Finetune."""
    from ropext.options.training import Finetune
    from ropext.training import run

    return run.finetune(str(directory), data, Path(output), Finetune(**options), say, force=force)


def plan_finetune(
    directory: str | Path,
    data: str,
    output: str | Path | None = None,
    *,
    force: bool = False,
    **options: Any,
) -> "Planned":
    """What `run_finetune` would do, and what that would take; what it would refuse is refused."""
    from ropext.options.training import Finetune
    from ropext.training import run

    place = None if output is None else Path(output)
    return run.dry_run(str(directory), data, Finetune(**options), place, force)


def run_fit(
    model: str | Path,
    data: str,
    output: str | Path,
    *,
    revision: str | None = None,
    force: bool = False,
    command: Sequence[str] = (),
    say: Say = silent,
    **options: Any,
) -> "Fitted | None":
    """Fit a spectrum with the weights frozen; `options` are the fields of options.training.Fit.

    Under `accelerate launch` the first process has the result, the others None.
    """
    from ropext.options.training import Fit
    from ropext.training import fitting

    return fitting.fit(
        str(model),
        data,
        Path(output),
        Fit(**options),
        say,
        revision=revision,
        force=force,
        command=command,
    )


def plan_fit(
    model: str | Path,
    data: str,
    output: str | Path | None = None,
    *,
    revision: str | None = None,
    force: bool = False,
    **options: Any,
) -> "PlannedFit":
    """What `run_fit` would do, and what that would take; what it would refuse is refused."""
    from ropext.options.training import Fit
    from ropext.training import fitting

    place = None if output is None else Path(output)
    return fitting.dry_run(str(model), data, Fit(**options), revision, place, force)
