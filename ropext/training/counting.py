"""What a training takes, counted on a model without weights."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ropext.models import processes
from ropext.models.load import free_memory, skeleton
from ropext.training import defaults, models
from ropext.training.training import Training

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Layers are run again in the backward pass unless what they keep for it takes less than this share
# of the free memory, which saves a quarter of the time. Kept are so many bytes for each token and
# hidden channel of a layer (Korthikanti et al. 2022, section 4.1, without the square of scores).
KEPT_BYTES = 34
PLENTY = 0.125
# Copies of each trained number: itself, its gradient, and AdamW's two moments.
COPIES = 4


@dataclass(frozen=True)
class Moving:
    """What is trained of a model."""

    names: tuple[str, ...]  # layers that get a LoRA, or the spectrum
    count: int  # parameters
    size: int  # their bytes
    new_rows: tuple[str, ...] = ()  # of position tables, in words


@dataclass(frozen=True)
class Needs:
    """What a training takes."""

    targets: tuple[str, ...]  # what is trained, new rows of tables among it
    new_rows: tuple[str, ...]
    moving: int  # parameters in it
    moving_bytes: int  # with gradients and the optimiser's state
    weight_bytes: int  # of the model that is read, in all devices together
    recompute: bool  # layers are run again in the backward pass
    sliced: str | None  # why the loss is not sliced


def count_needs(training: Training, moving: Callable[["PreTrainedModel"], Moving]) -> Needs:
    """Count on a model without weights; what cannot be trained is refused."""
    settings = training.settings
    options = training.options
    models.check_tracker(options.report_to)
    model = skeleton(training.snapshot)
    share = settings.per_step // processes.readers()
    rows = defaults.micro_rows(options, settings.longest, share)
    config = model.config.get_text_config()
    size = models.dtype(options).itemsize
    # Of each row, what one process reads.
    tokens = rows * settings.longest // processes.of_each_row()
    activations = KEPT_BYTES * tokens * config.hidden_size * config.num_hidden_layers
    weight_bytes = size * sum(parameter.numel() for parameter in model.parameters())
    moved = moving(model)
    return Needs(
        targets=moved.names + moved.new_rows,
        new_rows=moved.new_rows,
        moving=moved.count,
        moving_bytes=COPIES * moved.size,
        weight_bytes=weight_bytes,
        recompute=activations > PLENTY * free_memory(models.device(options)),
        sliced=training.learning.why_whole(model),
    )
