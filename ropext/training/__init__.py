"""One training with two objectives, on transformers.Trainer: a LoRA of an extended checkpoint, or
the spectrum itself with the weights frozen (a fit).

The parts, from the bottom: options and `defaults`, `rows` (what a model reads) and `data` (which
documents), `judge`, `loss`, `models` (loaded, with a LoRA), `spectrum` and `attention` (what
a fit moves); `run` (the order), `finetune` and `fit` (each prepared and planned),
`trainer`, `report`, `writing`, and `session`, which does it.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ropext.narration import Say, silent
from ropext.options.fields import TextsOrPlace, as_place, reads

if TYPE_CHECKING:
    from ropext.training.finetune import Finetuned, PreparedFinetune
    from ropext.training.fit import Fitted, PreparedFit
    from ropext.training.run import Planned


def run_finetune(
    directory: str | Path,
    data: TextsOrPlace,
    output: str | Path,
    *,
    force: bool = False,
    say: Say = silent,
    **options: Any,
) -> "Finetuned":
    """Fine-tune an extended checkpoint; `options` are the fields of options.training.Finetune."""
    from ropext.options.training import Finetune
    from ropext.training import finetune, run

    def work(planned: "Planned[PreparedFinetune]", folder: Path, say: Say) -> "Finetuned":
        from ropext.training.session import FinetuneSession

        return FinetuneSession(planned, folder, Path(output), force, say).run()

    prepare = partial(finetune.prepare, str(directory), as_place(data), Finetune(**options))
    read = {"DIR": directory, **reads({"data": as_place(data), **options})}
    return run.train(prepare, finetune.plan, work, Path(output), say, force, read)


def plan_finetune(
    directory: str | Path,
    data: TextsOrPlace,
    output: str | Path | None = None,
    *,
    force: bool = False,
    **options: Any,
) -> "Planned[PreparedFinetune]":
    """What `run_finetune` would do, and what that would take; what it would refuse is refused."""
    from ropext.options.training import Finetune
    from ropext.training import finetune, run

    prepare = partial(finetune.prepare, str(directory), as_place(data), Finetune(**options))
    read = {"DIR": directory, **reads({"data": as_place(data), **options})}
    return run.dry_run(prepare, finetune.plan, output, force, read)


def run_fit(
    model: str | Path,
    data: TextsOrPlace,
    output: str | Path,
    *,
    revision: str | None = None,
    force: bool = False,
    command: Sequence[str] = (),
    say: Say = silent,
    **options: Any,
) -> "Fitted | None":
    """Fit a spectrum with the weights frozen; `options` are the fields of options.training.Fit. Of
    a GGUF it is fitted on the dequantised weights.

    Under `accelerate launch` the first process has the result, the others None.
    """
    from ropext.dequantising import directory_of
    from ropext.options.training import Fit
    from ropext.training import fit, run

    def work(planned: "Planned[PreparedFit]", folder: Path, say: Say) -> "Fitted | None":
        from ropext.training.session import FitSession

        return FitSession(planned, folder, Path(output), force, say).run(command)

    read = {"MODEL": model, **reads({"data": as_place(data), **options})}
    run.check_places(read, Path(output))
    with directory_of(str(model), say) as place:
        prepare = partial(
            fit.prepare, place, as_place(data), Fit(**options), revision, named=str(model)
        )
        return run.train(prepare, fit.plan, work, Path(output), say, force, read)


def plan_fit(
    model: str | Path,
    data: TextsOrPlace,
    output: str | Path | None = None,
    *,
    revision: str | None = None,
    force: bool = False,
    **options: Any,
) -> "Planned[PreparedFit]":
    """What `run_fit` would do, and what that would take; what it would refuse is refused."""
    from ropext.dequantising import directory_of
    from ropext.options.training import Fit
    from ropext.training import fit, run

    read = {"MODEL": model, **reads({"data": as_place(data), **options})}
    with directory_of(str(model)) as place:
        prepare = partial(
            fit.prepare, place, as_place(data), Fit(**options), revision, named=str(model)
        )
        return run.dry_run(prepare, fit.plan, output, force, read)
