"""What a fine-tuning run is asked to do. A field's name is its flag."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ropext.errors import UsageError
from ropext.wishes import (
    LARGEST,
    LARGEST_SEED,
    Ranges,
    check_choices,
    check_positive,
    check_ranges,
    check_share,
    known_values,
)

STRATEGIES = ("full", "pose")
PACKINGS = ("documents", "glued")
SCHEDULES = ("linear", "constant", "cosine")
DTYPES = ("auto", "float32", "bfloat16")
DEVICES = ("auto", "cpu", "cuda")
# Documents held out: DATA, which may be a stream without an end, is read until there are as many.
MOST_JUDGING = 10_000


def _field(default: Any, help_text: str) -> Any:
    return field(default=default, metadata={"help": help_text})


@dataclass(frozen=True)
class Options:
    """One run; None means the default for this model and factor (`--dry-run` shows it)."""

    strategy: str = _field(
        "full",
        "full: rows of the target length; pose: rows of --window tokens whose positions skip "
        "ahead, up to the target",
    )
    window: int | None = _field(
        None, "pose: tokens of a row [twice the context, at most 2048 and half the target]"
    )
    packing: str = _field(
        "documents",
        "documents: a row comes from one document; glued: documents joined, attention crossing",
    )
    steps: int | None = _field(
        None, "optimiser steps [at most two passes over the data, and 200; below 100M 60]"
    )
    epochs: float | None = _field(None, "passes over the data, in the place of --steps")
    batch_tokens: int | None = _field(
        None, "tokens of one optimiser step, rounded to whole rows [by size: 8k or 256k]"
    )
    micro_rows: int | None = _field(
        None, "rows that one device reads at once [what 8192 tokens hold]"
    )
    learning_rate: float | None = _field(None, "peak learning rate [by size: 2e-3 to 1e-4]")
    warmup: int | None = _field(
        None, "steps of linear warm-up [20, pose 10; at most a twentieth of all]"
    )
    schedule: str | None = _field(None, "after the warm-up: " + ", ".join(SCHEDULES) + " [linear]")
    rank: int | None = _field(None, "rank of the LoRA [16]")
    alpha: int | None = _field(
        None, "LoRA's alpha; updates are scaled by alpha/rank [twice the rank]"
    )
    dropout: float = _field(0.0, "dropout in front of the LoRA")
    targets: tuple[str, ...] = _field(
        (), "names of the linear layers that get a LoRA, e.g. q_proj,v_proj [all in the layers]"
    )
    train_norms: bool = _field(False, "train the norms too (LongLoRA)")
    train_embeddings: bool = _field(False, "train the token embeddings too (LongLoRA)")
    train_spectrum: bool = _field(
        False,
        "fit the spectrum together with the LoRA: every pair and the attention factor; the base "
        "beside the adapter then carries the final one",
    )
    qlora: bool = _field(
        False, "hold the frozen weights in 4 bits (needs a GPU and ropext[qlora]; not run yet)"
    )
    retrieval_share: float = _field(
        0.0,
        "share of rows that state keys and ask for them, the loss on the answers alone; without "
        "them, text alone seldom teaches to look far back",
    )
    control: bool = _field(
        False, "also train the unextended base on the same tokens, at its own context"
    )
    evaluate: str | None = _field(None, "data to evaluate on [documents held out of DATA]")
    eval_every: int | None = _field(None, "steps between evaluations [a fifth of the steps]")
    eval_documents: int = _field(8, "documents of an evaluation; 0 turns it off")
    patience: int = _field(3, "stop after so many evaluations without a better one; 0 never stops")
    save_every: int | None = _field(None, "steps between checkpoints [a tenth of the steps]")
    column: str | None = _field(None, "column of the text [text, or messages]")
    split: str | None = _field(None, "split of a dataset on the hub [train]")
    split_documents: str | None = _field(
        None,
        "make several documents of one text: at blank-lines, at a separator, or windows (of the "
        "target's length)",
    )
    seed: int = _field(0, "seed of rows, LoRA and dropout")
    dtype: str = _field("auto", "of the frozen weights: auto, float32, bfloat16")
    device: str = _field("auto", "auto, cpu, cuda")
    attn_implementation: str | None = _field(
        None, "eager, sdpa, flash_attention_2 ... [sdpa, or eager where a model has none]"
    )
    report_to: str = _field("none", "tensorboard, wandb or trackio")
    ignore_memory: bool = _field(
        False, "train also where the estimate says that the memory is not enough"
    )
    link: str = _field("copy", "how the weights get to OUT/base: copy, hard, symlink")

    def __post_init__(self) -> None:
        check_choices(self, _CHOICES)
        check_ranges(self, RANGES)
        check_positive(self, "learning_rate")
        check_positive(self, "epochs")
        if self.epochs is not None and self.steps is not None:
            raise UsageError("--epochs and --steps both say how long to train; give one of them")
        check_share(self, "retrieval_share")
        check_share(self, "dropout")
        if self.window is not None and self.strategy != "pose":
            raise UsageError("--window is for --strategy pose; full rows have the target's length")
        if self.packing == "glued" and self.strategy == "pose":
            raise UsageError("--packing glued is for --strategy full; pose rows fit any document")


_CHOICES = {
    "strategy": STRATEGIES,
    "packing": PACKINGS,
    "schedule": SCHEDULES,
    "dtype": DTYPES,
    "device": DEVICES,
    "link": ("copy", "hard", "symlink"),
}


# Those that --strategy, --data or a layer's size bounds further are told so where these are known.
RANGES: Ranges = {
    "steps": (1, LARGEST),
    "batch_tokens": (1, LARGEST),
    "micro_rows": (1, 2**16),
    "rank": (1, LARGEST),
    "alpha": (1, LARGEST),
    "eval_every": (1, LARGEST),
    "save_every": (1, LARGEST),
    "window": (4, LARGEST),
    "warmup": (0, LARGEST),
    "eval_documents": (0, MOST_JUDGING),
    "patience": (0, LARGEST),
    "seed": (0, LARGEST_SEED),
}


def build(values: Mapping[str, Any]) -> Options:
    """Options from their values; a key that is none of them is refused with those that are."""
    given = known_values(Options, values)
    if isinstance(given.get("targets"), list):
        given["targets"] = tuple(given["targets"])
    return Options(**given)
