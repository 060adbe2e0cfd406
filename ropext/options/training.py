"""Options of a fine-tuning, and of a fit of the spectrum."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from ropext.base.errors import UsageError
from ropext.options.extend import Extend, Reach
from ropext.options.fields import (
    ATTENTIONS,
    LARGEST,
    LARGEST_DOCUMENT,
    Attention,
    Content,
    Count,
    CountOrNone,
    Documents,
    DtypeName,
    Files,
    LargestDocument,
    Length,
    Link,
    Neutral,
    Options,
    Panel,
    Positive,
    Seed,
    Share,
    Stored,
    Whole,
    Words,
    wanted,
)
from ropext.tasks import MOST_ITEMS

# Documents held out: DATA, which may be a stream without an end, is read until there are as many.
MOST_JUDGING = 10_000
# The numbers that a fit may move, from most to fewest: every pair and the attention factor; a
# ramp's two ends and the attention factor; theta.
WITHIN = ("longrope", "yarn", "ntk")


class TrainingOptions(Options):
    """Options that a fine-tuning and a fit share."""

    steps: Count | None = wanted(
        None,
        "number of optimiser steps [at most 400, stops when held-out documents no longer improve; "
        "at most 4 passes over the data if none are held out]",
        panel=Panel.TRAINING,
        basic=True,
    )
    batch_tokens: Annotated[Length, Field(ge=1, le=LARGEST)] | None = wanted(
        None,
        "tokens of one optimiser step, rounded to whole rows [by size: 8k or 256k]",
        panel=Panel.TRAINING,
    )
    micro_rows: Files[Annotated[Whole, Field(ge=1, le=2**16)] | None] = wanted(
        None,
        "rows that one device reads at once [what 8192 tokens hold]",
        panel=Panel.TRAINING,
    )
    learning_rate: Positive | None = wanted(
        None,
        "peak learning rate [by size: 2e-3 to 1e-4]",
        panel=Panel.TRAINING,
    )
    retrieval_share: Share = wanted(
        0.0,
        "share of training rows that are synthetic retrieval questions (plain text rarely "
        "teaches long-range lookup)",
        panel=Panel.DATA,
    )
    packing: Literal["documents", "glued"] = wanted(
        "documents",
        "documents: each row from one document; glued: documents joined, with attention across",
        panel=Panel.DATA,
    )
    strategy: Literal["full", "pose"] = wanted(
        "full",
        "full: rows of the target length; pose: rows of --window tokens whose positions skip "
        "ahead, up to the target",
        panel=Panel.METHOD,
        basic=True,
    )
    window: Annotated[Length, Field(ge=4, le=LARGEST)] | None = wanted(
        None,
        "pose: tokens of a row [twice the context, at most 2048 and half the target]",
        panel=Panel.DATA,
    )
    keep_short: CountOrNone = wanted(
        0,
        "rows of the original length in each step, added to those that reach the target",
        panel=Panel.METHOD,
    )
    eval_every: Count | None = wanted(
        None,
        "steps between evaluations [10 or more, a tenth of the cost; with --steps a fifth]",
        panel=Panel.TRAINING,
    )
    column: Stored[str | None] = wanted(
        None,
        "column of the text [text, or messages]",
        "NAME",
        panel=Panel.DATA,
    )
    split: Stored[str | None] = wanted(
        None,
        "split of a dataset, by id or in a folder [train]",
        "NAME",
        panel=Panel.DATA,
    )
    split_documents: Stored[str | None] = wanted(
        None,
        "split each text into documents: at blank-lines, at a separator, or into windows of the "
        "target length [use only the start of each text]",
        "HOW",
        panel=Panel.DATA,
    )
    max_document_mib: Neutral[LargestDocument] = LARGEST_DOCUMENT
    seed: Seed = wanted(
        0,
        "seed of rows, questions, LoRA and dropout",
        panel=Panel.DATA,
    )
    data_seed: Seed | None = wanted(
        None,
        "seed of the documents that are held out, and of the questions and intervals about them; "
        "with one, tables of several --seed have the same documents [--seed]",
        panel=Panel.DATA,
    )
    dtype: Annotated[Literal["auto", "float32", "bfloat16", "fp32", "bf16"], DtypeName] = wanted(
        "auto",
        "type of the frozen weights",
        panel=Panel.LOADING,
    )
    device: Neutral[Literal["auto", "cpu", "cuda"]] = wanted(
        "auto",
        "device that trains the model",
        panel=Panel.LOADING,
    )
    attn_implementation: Attention | None = wanted(
        None,
        f"{ATTENTIONS} [sdpa, or eager if a model lacks it]",
        panel=Panel.LOADING,
    )
    report_to: Neutral[str] = wanted(
        "none",
        "tensorboard, wandb or trackio",
        panel=Panel.OUTPUT,
    )
    link: Files[Link] = wanted(
        "copy",
        "how the weights get to OUT",
        panel=Panel.OUTPUT,
    )

    @property
    def held_out_seed(self) -> int:
        """Return the seed that --data-seed, else --seed, gives the held-out documents."""
        return self.seed if self.data_seed is None else self.data_seed

    @model_validator(mode="after")
    def _check_strategy(self) -> Self:
        """Refuse --window and --packing with a --strategy that has no use for them."""
        if self.window is not None and self.strategy != "pose":
            raise UsageError("--window is for --strategy pose; full rows have the target's length")
        if self.packing == "glued" and self.strategy == "pose":
            raise UsageError("--packing glued is for --strategy full; pose rows fit any document")
        return self


class Finetune(TrainingOptions):
    """One fine-tuning; None means the default for this model and factor (`--dry-run` shows it)."""

    key_schema = 2  # other tokens of a conversation count

    train: Literal["lora", "new-rows", "both"] | None = wanted(
        None,
        "what to train: lora, new-rows (rows added to a position table), or both [lora; new-rows "
        "if there is a position table]",
        panel=Panel.METHOD,
        basic=True,
    )
    epochs: Annotated[Positive, Field(le=LARGEST)] | None = wanted(
        None,
        "passes over the data, instead of --steps",
        panel=Panel.TRAINING,
    )
    warmup: CountOrNone | None = wanted(
        None,
        "steps of linear warm-up [20, pose 10; at most a twentieth of all]",
        panel=Panel.TRAINING,
    )
    schedule: Literal["linear", "constant", "cosine"] | None = wanted(
        None,
        "learning rate after the warm-up [linear]",
        panel=Panel.TRAINING,
    )
    rank: Count | None = wanted(
        None,
        "rank of the LoRA [16]",
        panel=Panel.TRAINING,
        basic=True,
    )
    alpha: Count | None = wanted(
        None,
        "LoRA's alpha; updates are scaled by alpha/rank [twice the rank]",
        panel=Panel.TRAINING,
    )
    dropout: Share = wanted(
        0.0,
        "dropout in front of the LoRA",
        panel=Panel.TRAINING,
    )
    targets: Words = wanted(
        (),
        "names of the linear layers that get a LoRA, e.g. q_proj,v_proj [all in the layers]",
        "NAMES",
        panel=Panel.TRAINING,
    )
    train_norms: bool = wanted(
        False,
        "train the norms too (LongLoRA)",
        panel=Panel.TRAINING,
    )
    train_embeddings: bool = wanted(
        False,
        "train the token embeddings too (LongLoRA)",
        panel=Panel.TRAINING,
    )
    qlora: bool = wanted(
        False,
        "hold the frozen weights in 4 bits (needs a GPU and bitsandbytes; not run yet)",
        panel=Panel.TRAINING,
    )
    control: Files[bool] = wanted(
        False,
        "also train the unextended base on the same tokens, at its own context",
        panel=Panel.TRAINING,
    )
    slim: Files[bool] = wanted(
        False,
        "write only the merged checkpoint, without the folders base and adapter",
        panel=Panel.OUTPUT,
    )
    evaluate: Content[Documents | None] = wanted(
        None,
        "data to evaluate on [documents held out of DATA]",
        "DATA",
        panel=Panel.FOLLOWS,
        basic=True,
    )
    eval_documents: Annotated[Whole, Field(ge=0, le=MOST_JUDGING)] = wanted(
        8,
        "held-out documents per evaluation; 0 turns evaluation off",
        panel=Panel.DATA,
    )
    patience: CountOrNone | None = wanted(
        None,
        "stop after this many evaluations without improvement, and keep the best weights; 0 never "
        "stops [3; with --steps or --epochs 0]",
        panel=Panel.TRAINING,
    )
    save_every: Files[Count | None] = wanted(
        None,
        "steps between checkpoints [a tenth of the steps]",
        panel=Panel.TRAINING,
    )

    @model_validator(mode="after")
    def _check_control(self) -> Self:
        """Refuse --control with --slim, which writes no adapter."""
        if self.slim and self.control:
            raise UsageError(
                "--control writes an adapter for the base next to the result, and --slim writes "
                "no adapter; give one of them"
            )
        return self

    @model_validator(mode="after")
    def _check_epochs(self) -> Self:
        """Refuse --epochs and --steps together."""
        if self.epochs is not None and self.steps is not None:
            raise UsageError("--epochs and --steps both say how long to train; give one of them")
        return self


class FitSettings(TrainingOptions):
    """How a spectrum is fitted. In a recipe, `extend` says how far, and for which engines."""

    key_schema = 3  # from one start, at one rate; other tokens of a conversation count

    within: Literal["longrope", "yarn", "ntk"] | None = wanted(
        None,
        "what the fit may change: longrope (every pair and the attention factor), yarn (the ramp's "
        "ends and the attention factor), ntk (theta) [the most that --for computes exactly]",
        panel=Panel.METHOD,
    )
    start: Words | None = wanted(
        None,
        "method to start from, e.g. yarn; of several (yarn,llama3) the one with the lowest loss on "
        "held-out documents [of all; pose: yarn]",
        "METHOD",
        panel=Panel.METHOD,
        basic=True,
    )
    steps: Count = wanted(
        40,
        "optimiser steps",
        panel=Panel.TRAINING,
        basic=True,
    )
    batch_tokens: Annotated[Length, Field(ge=1, le=LARGEST)] = wanted(
        8192,
        "tokens of one optimiser step, rounded to whole rows",
        panel=Panel.TRAINING,
    )
    learning_rate: Positive | None = wanted(
        None,
        "peak learning rate, in relative change per step "
        "[0.02, from 8 times on 0.03; of fewer than 16 pairs up to 0.1]",
        panel=Panel.TRAINING,
    )
    window: Annotated[Length, Field(ge=4, le=LARGEST)] | None = wanted(
        None,
        "pose: tokens of a row [the context, at most 2048 and half the target]",
        panel=Panel.DATA,
    )
    ceiling: Annotated[float, Field(ge=1)] = wanted(
        4.0,
        "longest allowed wavelength, as a multiple of factor x the original wavelength",
        panel=Panel.METHOD,
    )
    retrieval_share: Share = wanted(
        0.2,
        "share of training rows that are synthetic retrieval questions",
        panel=Panel.DATA,
    )
    retrieval_items: Annotated[Whole, Field(ge=0, le=MOST_ITEMS)] = wanted(
        40,
        "questions asked before and after the fit; 0 measures no retrieval",
        panel=Panel.DATA,
    )
    held_out: Annotated[Whole, Field(ge=1, le=MOST_JUDGING)] = wanted(
        16,
        "held-out documents that judge the fit, at most (a tenth of DATA is held out)",
        panel=Panel.DATA,
    )
    eval_every: Count | None = wanted(
        None,
        "steps between evaluations [an eighth of the steps; pose: one at the end]",
        panel=Panel.TRAINING,
    )


class Fit(FitSettings, Reach):
    """One fit; None means the default, which the help names."""

    def extend(self, method: str, **knobs: Any) -> Extend:
        """Return the options of an extension by one method to the fit's target, for its engines."""
        reach = {name: getattr(self, name) for name in Reach.model_fields}
        return Extend(method=method, **reach, **knobs)
