"""Choose the settings of a fine-tuning, and below those for a fit, each with the paper or
measurement behind it.

Every published recipe trains all weights of 7B models or larger on clusters. The optimiser and the
warm-up carry over. Steps and batch are cut to the amount that one GPU trains in hours, and to the
amount of data. The learning rate is LoRA's.
"""

from dataclasses import dataclass
from functools import partial
from math import ceil, inf
from typing import Any

from ropext.options.fields import flag
from ropext.options.training import Finetune, Fit, TrainingOptions

YARN = "YaRN (Peng et al. 2023, section 4.1)"
POSE = "PoSE (Zhu et al. 2023, section 4.1)"
LORA = "LoRA at 7B: QLoRA (Dettmers et al. 2023, appendix B)"
QLORA_LARGE = "LoRA at 33B and above: QLoRA (Dettmers et al. 2023, appendix B)"
LONGQLORA = "LongQLoRA (Yang 2023): 0.13B tokens on one GPU"
ON_DEMO = "measured on the bundled model (docs/reference/training.md)"
OPEN = "at most, as YaRN (section 4.1); stops when held-out documents no longer improve"
BETWEEN = "between LoRA at 7B and the bundled model; a choice of ropext"
ALPHA = "alpha = 2 rank: LongLoRA (Chen et al. 2023)"
ASKED = "asked for"

BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.0
GRADIENT_NORM = 1.0
WARMUP_SHARE = 20  # YaRN warms up for 20 of 400 steps; PI for 20 and PoSE for 10 of 1,000
# Limits if neither steps nor epochs are given: steps if held-out documents end a training, passes
# over the data if no document is held out.
MOST_STEPS = 400
PASSES = 4
# Evaluations in a row without improvement before a training stops, and the factor by which each of
# them multiplies the learning rate (benchmarks/finetune_steps.py).
PATIENCE = 3
REDUCED = 0.5
# If the data holds few rows, a step gets fewer, until FEWEST_STEPS steps take `SHARED` passes.
FEWEST_STEPS = 20
SHARED = 2
# Rows shorter than this are read several at once.
MICRO_TOKENS = 8192
# All steps are divided by these: into evaluations, judgements of a fit, and checkpoints.
EVALUATIONS = 5
JUDGEMENTS = 8
CHECKPOINTS = 10
# If evaluations end a training: fewest steps between two, and their largest share of its cost.
FEWEST_BETWEEN = 10
EVALUATION_SHARE = 0.1
WITH_GRADIENTS = 3

TINY = 100e6  # parameters
LEARNING_RATES = (  # of models with fewer parameters than this
    (TINY, 2e-3, ON_DEMO),
    (1e9, 5e-4, BETWEEN),
    (30e9, 2e-4, LORA),
    (inf, 1e-4, QLORA_LARGE),
)


@dataclass(frozen=True)
class Setting:
    """A value and where it comes from."""

    value: Any
    source: str


@dataclass(frozen=True)
class Settings:
    """All settings of a training that decide the learned weights or frequencies."""

    row_tokens: Setting
    rows: Setting  # rows in one optimiser step
    steps: Setting
    learning_rate: Setting
    warmup: Setting
    schedule: Setting
    rank: Setting | None  # None if no LoRA is trained
    alpha: Setting | None
    betas: Setting
    weight_decay: Setting
    gradient_norm: Setting
    # Windows of the original length in each step, added to its rows, and the tokens of each window.
    keep_short: int = 0
    context: int = 0
    between: int = 1  # steps from one evaluation, or judgement of a fit, to the next
    patience: int = 0  # evaluations in a row without improvement that end the training
    is_open: bool = False  # steps are the most there will be

    @property
    def step_tokens(self) -> int:
        """Return the number of tokens of one optimiser step of the training."""
        return int(self.row_tokens.value * self.rows.value + self.context * self.keep_short)

    @property
    def tokens(self) -> int:
        """Return the number of tokens in all steps of the training."""
        return self.step_tokens * int(self.steps.value)

    @property
    def per_step(self) -> int:
        """Return the rows of one optimiser step of the training: long ones, and windows of
        --keep-short."""
        return int(self.rows.value) + self.keep_short

    @property
    def longest(self) -> int:
        """Return the tokens of the longest training row."""
        return max(int(self.row_tokens.value), self.context if self.keep_short else 0)

    @property
    def named(self) -> dict[str, Setting]:
        """Return each setting of a training by its name."""
        return {k: v for k, v in vars(self).items() if isinstance(v, Setting)}


@dataclass(frozen=True)
class ModelSize:
    """The model that is trained, and the lengths that it is extended from and to."""

    parameters: int
    context: int
    target: int


@dataclass(frozen=True)
class DataAmount:
    """How much there is to read, and how many processes share it."""

    per_pass: int = 0  # rows that the data holds; 0 if it is not read yet
    processes: int = 1
    judging: int = 1  # tokens that an evaluation reads; 0 if no document is held out


UNREAD = DataAmount()


def finetune_settings(options: Finetune, size: ModelSize, amount: DataAmount = UNREAD) -> Settings:
    """Return the settings of a fine-tuning. Before the data is read, the steps are the most that
    the run may take."""

    chosen = partial(_option_setting, options)
    judging = amount.judging
    is_open = judging > 0 and options.steps is None and options.epochs is None
    is_open = is_open and options.patience != 0
    patience = options.patience
    if patience is None:
        patience = PATIENCE if is_open else 0
    steps = chosen("steps", MOST_STEPS, OPEN)
    usual = 2**18
    why_usual = LONGQLORA
    if size.parameters < TINY:
        usual = 8192
        why_usual = ON_DEMO
    batch = chosen("batch_tokens", max(usual, size.target), why_usual)
    row = _row_tokens(options, size.context, size.target)
    rows = Setting(max(1, round(batch.value / row.value)), f"batch tokens: {batch.source}")
    if amount.per_pass and options.steps is None:
        rows = _rows_of_data(options, rows, amount)
        if not is_open:
            steps = _steps_of_data(options, rows.value, amount.per_pass)
    _, rate, why_rate = next(row for row in LEARNING_RATES if size.parameters < row[0])
    rank = chosen("rank", 16, "YaRN's released LoRA script")
    warmup, why = (10, POSE) if options.strategy == "pose" else (20, YARN)
    # A fifth of 60 steps ends no lower than a twentieth (benchmarks/finetune_quality.py).
    if warmup > steps.value // WARMUP_SHARE:
        warmup = steps.value // WARMUP_SHARE
        why = f"{why}, at most its share of YaRN's 400 steps"
    between = max(1, steps.value // EVALUATIONS)
    if is_open:
        trained = WITH_GRADIENTS * rows.value * row.value
        between = max(FEWEST_BETWEEN, ceil(judging / (EVALUATION_SHARE * trained)))
    return Settings(
        row_tokens=row,
        rows=rows,
        steps=steps,
        learning_rate=chosen("learning_rate", rate, why_rate),
        warmup=chosen("warmup", warmup, why),
        schedule=chosen("schedule", "linear", "YaRN's released script"),
        rank=rank,
        alpha=chosen("alpha", 2 * rank.value, ALPHA),
        betas=Setting(BETAS, YARN),
        weight_decay=Setting(WEIGHT_DECAY, YARN),
        gradient_norm=Setting(GRADIENT_NORM, "usual; YaRN's script means to clip and does not"),
        keep_short=options.keep_short,
        context=size.context,
        between=options.eval_every or between,
        patience=patience if judging else 0,
        is_open=is_open,
    )


def _option_setting(options: TrainingOptions, name: str, default: Any, source: str) -> Setting:
    """Return a training setting: the option's value if it is given, else the default with its
    source."""
    value = getattr(options, name)
    return Setting(default, source) if value is None else Setting(value, ASKED)


def _row_tokens(options: TrainingOptions, context: int, target: int) -> Setting:
    """Return the length of a training row: the target, or the window of short rows (pose)."""
    if options.strategy == "full":
        return Setting(target, "the target")
    if options.window is not None:
        return Setting(min(options.window, target), ASKED)
    if isinstance(options, Fit):
        window = min(context, 2048, max(4, target // 2))
        return Setting(window, "the context, at most 2048 and half the target")
    # Short contexts need more: windows of the context alone end 3 % behind full rows at 8 times
    # a context of 256, windows of twice the context do not (benchmarks/finetune_quality.py).
    window = min(2 * context, 2048, max(4, target // 2))
    return Setting(window, f"twice the context, at most 2048 ({POSE}) and half the target")


def _rows_of_data(options: Finetune, rows: Setting, amount: DataAmount) -> Setting:
    """Return the rows of an optimiser step: fewer if the training data holds few."""
    wanted = max(1, int((options.epochs or SHARED) * amount.per_pass))
    if options.batch_tokens is not None or wanted >= FEWEST_STEPS * rows.value:
        return rows
    share = max(1, min(rows.value, wanted // FEWEST_STEPS) // amount.processes)
    fewer = share * amount.processes
    if fewer >= rows.value:
        return rows
    return Setting(fewer, f"fewer, for {FEWEST_STEPS} steps of this data (--batch-tokens)")


def _steps_of_data(options: Finetune, rows: int, per_pass: int) -> Setting:
    """Return the optimiser steps if the amount of data, or --epochs, limits the rows."""
    of_data = max(1, int((options.epochs or PASSES) * per_pass) // rows)
    if options.epochs is not None:
        return Setting(of_data, "--epochs")
    why = f"at most {PASSES} passes: no held-out document says when to stop (--epochs, --steps)"
    return Setting(min(of_data, MOST_STEPS), why)


def micro_rows(options: TrainingOptions, row_tokens: int, share: int) -> int:
    """Return the training rows that one device reads at once (--micro-rows): a divisor of its
    share of a step."""
    wanted = min(share, options.micro_rows or max(1, MICRO_TOKENS // row_tokens))
    return max(size for size in range(1, wanted + 1) if share % size == 0)


# A fit, measured on the bundled model (docs/fitting.md): the peak of a cosine after a short
# warm-up. Steps and tokens of a step are the options' own defaults.
FIT_LEARNING_RATE = 0.02  # of 16 pairs and more
# The rate is this, divided by the number of pairs. If fewer pairs turn, the noise that all add in a
# step is less, and each has further to go. From 8 times on, all pairs have further to go.
FEW_PAIRS = 16
OF_FEW_PAIRS = 0.4
MOST_FIT_LEARNING_RATE = 0.1
FAR_FACTOR = 8
FAR_SHARE = 1.5
FIT_WARMUP_SHARE = 10  # of all steps, one in so many
FIT_SCHEDULE = "cosine"
FIT_MEASURED = "measured on the bundled model (docs/fitting.md)"


def fit_settings(options: Fit, context: int, target: int, pairs: int) -> Settings:
    """Return the settings of a fit of the spectrum, in windows of the target's length or in
    short rows."""
    # A fit in short rows is judged only at its end: judging takes passes of the target's length.
    parts = 1 if options.strategy == "pose" else JUDGEMENTS
    until = options.eval_every or max(1, options.steps // parts)
    row = _row_tokens(options, context, target)

    def source_of(name: str) -> str:
        """Return the source of a setting of a fit: its option, or a measurement."""
        return flag(name) if name in options.model_fields_set else FIT_MEASURED

    rate = FIT_LEARNING_RATE
    why = FIT_MEASURED
    if pairs < FEW_PAIRS:
        rate = OF_FEW_PAIRS / pairs
        why = f"only {pairs} pairs rotate (docs/fitting.md)"
    rate = min(MOST_FIT_LEARNING_RATE, rate * (FAR_SHARE if target >= FAR_FACTOR * context else 1))
    return Settings(
        row_tokens=row,
        rows=Setting(max(1, round(options.batch_tokens / row.value)), source_of("batch_tokens")),
        steps=Setting(options.steps, source_of("steps")),
        learning_rate=_option_setting(options, "learning_rate", rate, why),
        warmup=Setting(max(1, options.steps // FIT_WARMUP_SHARE), FIT_MEASURED),
        schedule=Setting(FIT_SCHEDULE, FIT_MEASURED),
        rank=None,
        alpha=None,
        betas=Setting(BETAS, FIT_MEASURED),
        weight_decay=Setting(WEIGHT_DECAY, "the start is no origin"),
        gradient_norm=Setting(GRADIENT_NORM, "usual"),
        keep_short=options.keep_short,
        context=context,
        between=until,
    )
