"""What a fit is asked to do. A field's name is its flag."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ropext.errors import UsageError
from ropext.recipe import Recipe
from ropext.tasks import MOST_ITEMS
from ropext.training.options import DEVICES, DTYPES, MOST_JUDGING, PACKINGS, RANGES
from ropext.wishes import (
    LARGEST,
    Ranges,
    check_choices,
    check_positive,
    check_ranges,
    check_share,
    known_values,
)

# From the widest to the narrowest: every pair and the attention factor; a ramp's two ends and the
# attention factor; a theta.
WITHIN = ("longrope", "yarn", "ntk")


def _field(default: Any, help_text: str) -> Any:
    return field(default=default, metadata={"help": help_text})


@dataclass(frozen=True)
class FitOptions:
    """One fit; None means the default, which the help names."""

    factor: float | None = _field(None, "how many times the context, e.g. 4 (or give the target)")
    target: int | None = _field(None, "tokens wanted, e.g. 131072 (or give the factor)")
    context: int | None = _field(
        None, "tokens the model was trained on, where its config misstates it"
    )
    original_context: int | None = _field(
        None, "tokens before the scaling that a config declares, where it does not say (linear)"
    )
    from_original: bool = _field(
        False, "extend an already scaled model from its original spectrum and context"
    )
    even_so: bool = _field(
        False, "go on where scaling cannot help, or where a named loader was not measured"
    )
    for_loaders: tuple[str, ...] = _field(
        (), "write what these loaders read exactly, e.g. vllm,llama.cpp"
    )
    within: str | None = _field(
        None,
        "what may move: longrope (every pair and the attention factor), yarn (the ramp's ends and "
        "the attention factor), ntk (theta) [the widest that --for reads exactly]",
    )
    start: str | None = _field(
        None, "the closed form to start from, e.g. yarn [the best one on held-out documents]"
    )
    search: bool = _field(
        False,
        "explore the knobs of --within yarn or ntk by forward passes alone, for models through "
        "which no gradient flows",
    )
    steps: int = _field(40, "optimiser steps")
    batch_tokens: int = _field(8192, "tokens of one optimiser step, rounded to whole rows")
    micro_rows: int | None = _field(
        None, "rows that one device reads at once [what 8192 tokens hold]"
    )
    learning_rate: float | None = _field(
        None, "peak learning rate, in relative change per step [0.02]"
    )
    ceiling: float = _field(
        4.0, "no wavelength may become longer than so many times the factor times its own"
    )
    keep_short: int = _field(
        0, "windows of the original length in each step, beside those of the target's length"
    )
    retrieval_share: float = _field(
        0.2, "share of rows that are retrieval items, the loss on their answers alone"
    )
    retrieval_items: int = _field(
        40, "questions asked before and after the fit; 0 measures no retrieval"
    )
    held_out: int = _field(
        16, "documents that judge the fit at most, of those held out of DATA (a tenth)"
    )
    eval_every: int | None = _field(None, "steps between judgements [an eighth of the steps]")
    packing: str = _field(
        "documents",
        "documents: a window comes from one document; glued: documents joined, attention crossing",
    )
    column: str | None = _field(None, "column of the text [text, or messages]")
    split: str | None = _field(None, "split of a dataset on the hub [train]")
    split_documents: str | None = _field(
        None,
        "make several documents of one text: at blank-lines, at a separator, or windows (of the "
        "target's length)",
    )
    seed: int = _field(0, "seed of windows, questions and intervals")
    dtype: str = _field("auto", "of the frozen weights: auto, float32, bfloat16")
    device: str = _field("auto", "auto, cpu, cuda")
    attn_implementation: str | None = _field(
        None, "eager, sdpa, flash_attention_2 ... [sdpa, or eager where a model has none]"
    )
    report_to: str = _field("none", "tensorboard, wandb or trackio")
    ignore_memory: bool = _field(
        False, "train also where the estimate says that the memory is not enough"
    )
    link: str = _field("copy", "how the weights get to OUT: copy, hard, symlink")

    def __post_init__(self) -> None:
        check_choices(self, _CHOICES)
        check_ranges(self, _RANGES)
        if self.search and self.within == "longrope":
            raise UsageError("--search explores --within yarn or ntk; longrope has too many knobs")
        check_positive(self, "learning_rate")
        if not 1 <= self.ceiling < math.inf:
            raise UsageError(f"--ceiling must be finite and at least 1, was {self.ceiling:g}")
        check_share(self, "retrieval_share")

    def recipe(self, method: str, **knobs: Any) -> Recipe:
        """The plan of one method at this target, for these loaders."""
        return Recipe(
            method=method,
            factor=self.factor,
            target=self.target,
            context=self.context,
            original_context=self.original_context,
            from_original=self.from_original,
            even_so=self.even_so,
            for_loaders=self.for_loaders,
            **knobs,
        )


_CHOICES = {
    "within": WITHIN,
    "packing": PACKINGS,
    "dtype": DTYPES,
    "device": DEVICES,
    "link": ("copy", "hard", "symlink"),
}
_SHARED = ("steps", "batch_tokens", "micro_rows", "eval_every", "seed")
_RANGES: Ranges = {name: RANGES[name] for name in _SHARED} | {
    "keep_short": (0, LARGEST),
    "retrieval_items": (0, MOST_ITEMS),
    "held_out": (1, MOST_JUDGING),
}


def build(values: Mapping[str, Any]) -> FitOptions:
    """Options from their values; a key that is none of them is refused with those that are."""
    given = known_values(FitOptions, values)
    if isinstance(given.get("for_loaders"), list):
        given["for_loaders"] = tuple(given["for_loaders"])
    return FitOptions(**given)
