"""Run transformers.Trainer on ropext's rows, with its loss, its evaluations, and its reasons to
stop.

Nothing here is distributed by itself: DDP, FSDP2 and context parallelism come from accelerate.
"""

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from operator import itemgetter
from pathlib import Path

import torch
import transformers
from torch import nn
from transformers import TrainerControl, TrainerState, TrainingArguments

from ropext.base import guard
from ropext.base.errors import InputError, Interrupted, NothingKept, RopextError, Stopped
from ropext.base.jsontext import Json, JsonObject, read_object, write_json
from ropext.base.narration import Pace, Say, interruptible
from ropext.base.workdir import CHECKPOINT, USED, remove
from ropext.evaluation.forward import NanInLogits
from ropext.files.checkpoint.adapter import WEIGHTS
from ropext.models.adapter import copy_adapter_weights
from ropext.models.load import report_memory_used
from ropext.models.processes import (
    WAITING,
    from_first,
    is_main,
    keep_float32,
    readers,
    wait_for_everyone,
)
from ropext.training import defaults, models
from ropext.training.data import Training
from ropext.training.rows import RowCollator, TrainingRow

# Keys of an evaluation, in Trainer's log and its trackers; the first compares weights.
WATCHED = "eval_held_out"
TAIL = "eval_tail_nll"
MOST = 3  # checkpoints that are kept
# Written into a checkpoint after all else, with the digests of its files; without it a kill came
# first.
COMPLETE = "complete"
LARGEST_SEED = 2**32

# returns both numbers, for a model after so many steps
Evaluate = Callable[[nn.Module, int], tuple[float, float]]
Batch = dict[str, torch.Tensor]


@dataclass
class TrainingHistory:
    """The losses and evaluations of a run, step by step; the same after an interrupt as without
    one."""

    losses: list[dict[str, float]] = field(default_factory=list)
    evaluations: list[dict[str, float]] = field(default_factory=list)
    steps: int = 0
    stopped_early: bool = False
    checkpoint: Path | None = None  # holds the weights that count

    @property
    def counted(self) -> int:
        """Return the number of optimiser steps in the weights that count."""
        return self.steps if self.checkpoint is None else _checkpoint_step(self.checkpoint)

    @property
    def best_checkpoint(self) -> Path:
        """Return Trainer's checkpoint of the weights that count."""
        if self.checkpoint is None:
            raise Stopped("no checkpoint was kept")
        return self.checkpoint


class LossNotFinite(Stopped):
    """Raised if a loss becomes infinite or not-a-number; `where` names the step and the loss."""

    def __init__(self, where: str) -> None:
        """Build the error of a training's loss that is not finite: the optimiser step, and options
        that may help."""
        self.where = where
        super().__init__(
            f"{where}; the checkpoints before it are kept: lower --learning-rate, or lengthen "
            "--warmup, and give another -o or --force"
        )


class _Trainer(transformers.Trainer):
    """A Trainer with rows in their own order and ropext's evaluations, which stops at the first
    loss that is not finite."""

    job: "Optimisation"
    say: Say

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        """Load Trainer's checkpoint; copy an adapter's weights again, as PEFT may lose some."""
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        if Path(resume_from_checkpoint, WEIGHTS).is_file() and not self.is_fsdp_enabled:
            assert self.model is not None
            copy_adapter_weights(self.model, Path(resume_from_checkpoint))

    def lower_rate(self) -> None:
        """Lower the learning rate from the step after the next one on; checkpoints keep it."""
        schedule = self.lr_scheduler
        assert schedule is not None  # made before the first step
        schedule.base_lrs = [defaults.REDUCED * rate for rate in schedule.base_lrs]

    def get_batch_samples(
        self, epoch_iterator: Iterator[Batch], num_batches: int, device: torch.device
    ) -> tuple[list[Batch], torch.Tensor | int | None]:
        """Return the rows of an optimiser step, and the number of tokens that its loss is the
        mean of. If only the users of conversations speak in all rows, that number is 1 instead
        of 0. The step then teaches nothing, and its loss is not 0 / 0."""
        samples, scored = super().get_batch_samples(epoch_iterator, num_batches, device)
        if isinstance(scored, torch.Tensor):
            scored = torch.where(scored == 0, 1, scored)
        return samples, scored

    def training_step(
        self,
        model: nn.Module,
        inputs: Batch,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor:
        """Do one training step; stop all processes at the first loss that is not finite."""
        loss: torch.Tensor = super().training_step(model, inputs, num_items_in_batch)
        seen = loss.detach().reshape(1)
        if self.args.world_size > 1:  # all stop at the same step, or the others would wait for one
            seen = self.accelerator.gather(seen)
        wrong = seen[~torch.isfinite(seen)]
        if len(wrong):
            step = self.state.global_step + 1
            raise LossNotFinite(f"the loss is {float(wrong[0])} at step {step}")
        return loss

    def evaluate(self, *args: object, **kwargs: object) -> dict[str, float]:
        """Evaluate the model in training; Trainer calls this every eval_steps, after the step's
        log and before its checkpoint."""
        stopping = self.job.stopping
        entries = self.state.log_history
        done = [e for e in entries if WATCHED in e and e["step"] == self.state.global_step]
        if stopping.evaluate is None or done:  # the last step is also the end of the epoch
            return {WATCHED: done[0][WATCHED]} if done else {}
        model = self.model
        assert model is not None
        try:
            value, tail = stopping.evaluate(model, self.state.global_step)
        except NanInLogits as error:  # in every process, for all read the same documents
            raise LossNotFinite(
                f"after step {self.state.global_step} held-out documents cannot be read: {error}"
            ) from error
        value = from_first(value)  # all go on, or all stop
        self.log({WATCHED: value, TAIL: tail})
        # The best of all evaluated weights must be on the disk, also when a later one is worse.
        self.control.should_save = True
        self.say(f"step {self.state.global_step}: held-out loss {value:.4f} nats per token")
        evaluations = evaluations_in(self.state.log_history)
        if stopping.patience and self.state.global_step in steps_without_gain(evaluations):
            self.lower_rate()
        if _stopped_improving(
            [evaluation["held_out"] for evaluation in evaluations], stopping.patience
        ):
            self.say(f"{stopping.patience} evaluations in a row without improvement: stopping")
            self.control.should_training_stop = True
        return {WATCHED: value}


def evaluations_in(log: Sequence[Mapping[str, float]]) -> list[dict[str, float]]:
    """Return the evaluations in Trainer's log."""
    names = {"step": "step", "held_out": WATCHED, "tail_nll": TAIL}
    return [{name: entry[key] for name, key in names.items()} for entry in log if WATCHED in entry]


def steps_without_gain(evaluations: Sequence[Mapping[str, float]]) -> list[float]:
    """Return the optimiser steps of a training whose evaluation was no better than the best before
    it."""
    steps = []
    best = math.inf
    for evaluation in evaluations:
        if evaluation["held_out"] >= best:
            steps.append(evaluation["step"])
        best = min(best, evaluation["held_out"])
    return steps


def _stopped_improving(values: Sequence[float], patience: int) -> bool:
    """Return whether the last `patience` evaluations of a training are no better than the best
    before them."""
    return bool(patience and values and len(values) - 1 - values.index(min(values)) >= patience)


class _TrainerWatch(transformers.TrainerCallback):
    """A callback that narrates, marks checkpoints as complete, and stops on request."""

    def __init__(self, trainer: _Trainer, asked: Callable[[], bool]) -> None:
        """Watch a run of Trainer; `asked` returns whether the user wants to stop the training."""
        self.trainer = trainer
        self.asked = asked  # whether the user wants to stop
        self.pace = Pace()
        self.first: int | None = None  # the step before the first one of this run
        self.since = 0.0

    def on_step_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Note when the first optimiser step of this run begins, and estimate the time from it."""
        if self.first is None:
            self.first = state.global_step
            self.since = time.monotonic()
            self.pace.left(self.first, self.trainer.job.last_step)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, float] | None = None,
        **kwargs: object,
    ) -> None:
        """Print the loss of an optimiser step, and the time left."""
        if not logs or "loss" not in logs:
            return
        job = self.trainer.job
        step = state.global_step
        steps = job.last_step
        left = self.pace.left(step, steps)
        if step < steps and left is None:
            return
        is_first = step - 1 == self.first
        more = ", evaluations not counted" if is_first and job.stopping.evaluate else ""
        most = "at most " if job.stopping.patience and step < steps else ""
        left = f"{most}about {left or '0 s'} left{more}"
        self.trainer.say(f"step {step} of {most}{steps}: loss {logs['loss']:.4f}, {left}")

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> TrainerControl:
        """Log the time and memory of the first optimiser step; lower the learning rate after
        some steps; stop the training on request or at its last step."""
        trainer = self.trainer
        job = trainer.job
        if state.global_step - 1 == self.first and state.is_world_process_zero:
            took = time.monotonic() - self.since
            what = f"the first step ({job.folder.name})"
            report_memory_used(job.folder.parent / USED, trainer.say, args.device, what, took)
        if state.global_step in job.stopping.lowered_after:
            trainer.lower_rate()
        over = job.last_step <= state.global_step < state.max_steps
        stopping = self.asked()
        if trainer.accelerator.num_processes > 1:
            # If any process got a request to stop, all of them stop at the same step.
            flag = torch.tensor(float(stopping), device=trainer.accelerator.device)
            stopping = bool(trainer.accelerator.reduce(flag, "sum") > 0)
        if stopping or over:
            control.should_save = control.should_training_stop = True
        return control

    def on_save(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Mark Trainer's checkpoint as complete, and delete older ones."""
        wait_for_everyone()  # each process writes files of its own
        if state.is_world_process_zero:
            folder = self.trainer.job.folder
            mark_complete(folder / f"checkpoint-{state.global_step}")
            rotate_checkpoints(folder, state.best_model_checkpoint)


@dataclass(frozen=True)
class Stopping:
    """The conditions that end a training, and lower its rate on the way: evaluations, or the steps
    of another training."""

    evaluate: Evaluate | None = None
    patience: int = 0  # evaluations in a row without a better one
    until: int | None = None  # ends after this step, with the schedule of all of them
    lowered_after: Sequence[float] = ()  # steps, in the place of evaluations
    is_whole: Callable[[int], bool] = lambda step: True  # whether an evaluation's files are there


@dataclass(frozen=True)
class Optimisation:
    """Everything that one training needs."""

    training: Training
    model: nn.Module
    rows: Sequence[TrainingRow]
    folder: Path
    recompute: bool  # layers are run again in the backward pass
    rows_per_step: int
    row_tokens: int
    stopping: Stopping
    save_every: int | None = None

    @property
    def last_step(self) -> int:
        """Return the optimiser step at which the training ends."""
        return self.stopping.until or self.training.settings.steps.value


def trainer_arguments(job: Optimisation) -> TrainingArguments:
    """Return the TrainingArguments of transformers' Trainer, made of ropext's settings."""
    settings = job.training.settings
    options = job.training.options
    processes = readers()
    share = job.rows_per_step // processes
    micro = defaults.micro_rows(options, job.row_tokens, share)
    steps = settings.steps.value
    on_cpu = models.training_device(options).type == "cpu"
    dtype = models.training_dtype(options)  # trained parameters are float32 all the same
    recomputing = dict[str, Json]()
    if job.recompute:  # transformers 5.2x renamed the switch
        known = {argument.name for argument in fields(TrainingArguments)}
        kind = "activation" if "activation_checkpointing" in known else "gradient"
        recomputing[f"{kind}_checkpointing"] = True
        recomputing[f"{kind}_checkpointing_kwargs"] = {"use_reentrant": False}
    return TrainingArguments(
        output_dir=str(job.folder),
        max_steps=steps,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=share // micro,
        learning_rate=settings.learning_rate.value,
        warmup_steps=settings.warmup.value,
        lr_scheduler_type=_SCHEDULES[settings.schedule.value],
        adam_beta1=settings.betas.value[0],
        adam_beta2=settings.betas.value[1],
        weight_decay=settings.weight_decay.value,
        max_grad_norm=settings.gradient_norm.value,
        optim="adamw_torch",
        bf16=dtype == torch.bfloat16,
        **recomputing,
        logging_steps=1,
        logging_nan_inf_filter=False,
        save_strategy="steps",
        save_steps=job.save_every or max(1, steps // defaults.CHECKPOINTS),
        metric_for_best_model=WATCHED if job.stopping.evaluate else None,
        greater_is_better=False if job.stopping.evaluate else None,
        eval_strategy="steps" if job.stopping.evaluate else "no",
        eval_steps=settings.between,
        disable_tqdm=True,
        remove_unused_columns=False,
        train_sampling_strategy="sequential",
        label_names=["labels"],
        report_to=options.report_to,
        use_cpu=on_cpu,
        ddp_backend="gloo" if on_cpu and processes > 1 else None,
        ddp_find_unused_parameters=False,
        ddp_timeout=WAITING,
        average_tokens_across_devices=True,
        seed=options.seed % LARGEST_SEED,
    )


_SCHEDULES = {"linear": "linear", "constant": "constant_with_warmup", "cosine": "cosine"}


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the folders of Trainer's checkpoints by their exact names, in the order of their
    steps."""
    named = [path for path in folder.glob("checkpoint-*") if CHECKPOINT.fullmatch(path.name)]
    return sorted((path for path in named if path.is_dir()), key=_checkpoint_step)


def last_checkpoint(folder: Path) -> Path | None:
    """Return Trainer's last checkpoint that was written to its end, or None."""
    complete = [path for path in checkpoints_in(folder) if (path / COMPLETE).exists()]
    return complete[-1] if complete else None


def mark_complete(checkpoint: Path) -> None:
    """Write the digests of its files into a checkpoint of Trainer, which is now complete."""
    write_json(checkpoint / COMPLETE, guard.states(checkpoint))


def _is_as_written(checkpoint: Path) -> bool:
    """Return whether the files of a complete checkpoint of Trainer are those that it listed."""
    with suppress(InputError):
        files = read_object(checkpoint / COMPLETE)
        return bool(files) and files.keys() <= guard.unchanged(checkpoint, files)
    return False


def go_back(job: "Optimisation", say: Say) -> None:
    """Give up the checkpoints of Trainer that were edited or damaged, those of an earlier version,
    which list no digests, and those that depend on one: the training does their steps again."""
    for path in checkpoints_in(job.folder):
        if (path / COMPLETE).exists() and not _is_as_written(path):
            say(f"{path} is not as this version wrote it: its steps are done again")
            (path / COMPLETE).unlink()
    while (last := last_checkpoint(job.folder)) is not None:
        evaluations = history_in(last, job.stopping.patience).evaluations
        is_whole = all(job.stopping.is_whole(int(one["step"])) for one in evaluations)
        if evaluations and job.stopping.patience:
            best = min(evaluations, key=itemgetter("held_out"))
            is_whole &= (job.folder / f"checkpoint-{int(best['step'])}" / COMPLETE).exists()
        if is_whole:
            return
        (last / COMPLETE).unlink()


def rotate_checkpoints(folder: Path, best: str | None) -> None:
    """Keep the last checkpoints and the best one, MOST together. Delete from the others the files
    that Trainer wrote, by their names; Trainer's own rotation would delete whatever begins like a
    checkpoint."""
    best_name = None if best is None else Path(best).name
    others = [path for path in checkpoints_in(folder) if path.name != best_name]
    most = MOST if best is None else MOST - 1
    for path in others[:-most]:
        (path / COMPLETE).unlink(missing_ok=True)  # first: half of one is not taken for a whole
        remove(folder.parent, below=f"{folder.name}/{path.name}")


def _checkpoint_step(path: Path) -> int:
    """Return the optimiser step in the name of Trainer's checkpoint."""
    return int(path.name.rpartition("-")[2])


@contextmanager
def _resume_errors(
    checkpoint: Path | None, begun: Callable[[], bool] = lambda: False
) -> Iterator[None]:
    """Raise one sentence if a training cannot be resumed from a checkpoint: it is cut short, or
    a stranger's, whose pickles torch refuses."""
    try:
        yield
    except (RopextError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if checkpoint is None or begun():
            raise
        raise InputError(
            f"{checkpoint} cannot be resumed ({type(error).__name__}: {str(error)[:60]!r}); "
            "--force starts over"
        ) from error


def _check_trainer_state(state: JsonObject) -> None:
    """Raise ValueError for a stranger's trainer_state.json, over which Trainer would stumble after
    its first step."""
    rest = {key: value for key, value in state.items() if key not in _NO_NUMBERS}
    for entry in (*state["log_history"], rest):
        if wrong := [key for key, value in entry.items() if not isinstance(value, _Number)]:
            raise ValueError(f"{wrong[0]} is no number")
    if not isinstance(state["best_model_checkpoint"], str | None):
        raise ValueError("best_model_checkpoint is no name")
    if [*state["stateful_callbacks"]] != ["TrainerControl"]:
        raise ValueError("a callback is unknown")


_Number = int | float | None
_NO_NUMBERS = ("log_history", "stateful_callbacks", "best_model_checkpoint")


def history_in(checkpoint: Path, patience: int) -> TrainingHistory:
    """Return the training history that a checkpoint's trainer_state.json holds. The weights that
    count are the last ones, or the best ones if evaluations can end the run."""
    with _resume_errors(checkpoint):
        state = json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
        _check_trainer_state(state)
        history = TrainingHistory(steps=int(state["global_step"]), checkpoint=checkpoint)
        for entry in state["log_history"]:
            if "loss" in entry:
                wanted = ("step", "loss", "grad_norm", "learning_rate")
                history.losses.append({k: entry[k] for k in wanted if k in entry})
        history.evaluations = evaluations_in(state["log_history"])
        history.stopped_early = _stopped_improving(
            [e["held_out"] for e in history.evaluations], patience
        )
    if patience and history.evaluations:
        best = checkpoint.parent / f"checkpoint-{state['best_global_step']}"
        history.checkpoint = best if (best / COMPLETE).exists() else checkpoint
    return history


def run_trainer(job: Optimisation, say: Say) -> TrainingHistory:
    """Train on transformers' Trainer, from the last checkpoint on if there is one, and return
    the history."""
    train_args = trainer_arguments(job)
    if is_main():
        go_back(job, say)
    start = last_checkpoint(job.folder)
    # Another process may have looked before the first had cleared away what --force replaces.
    start = from_first(start)
    if start is not None:
        history = history_in(start, job.stopping.patience)
        if _is_finished(history, job):
            return history
        say(f"resuming after step {history.steps}")
    trainer = _Trainer(
        model=job.model,
        args=train_args,
        train_dataset=job.rows,
        eval_dataset=(),  # evaluate() reads whole documents instead
        data_collator=RowCollator(job.training.padding),
        compute_loss_func=job.training.learning.loss,
    )
    keep_float32(getattr(trainer.accelerator.state, "fsdp_plugin", None))
    # Both print to stdout, which is for the result.
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.remove_callback(transformers.trainer_callback.ProgressCallback)
    trainer.job = job
    trainer.say = say
    sentence = "stopping after this step and saving (Ctrl-C again ends at once)"
    with interruptible(say, sentence) as stopped:
        watch = _TrainerWatch(trainer, stopped)
        trainer.add_callback(watch)
        with _resume_errors(start, lambda: watch.first is not None):
            trainer.train(resume_from_checkpoint=str(start) if start else None)
    last = last_checkpoint(job.folder)
    if last is None:
        raise NothingKept("interrupted before the first checkpoint; nothing was kept")
    history = history_in(last, job.stopping.patience)
    if stopped() and not _is_finished(history, job):
        raise Interrupted(
            f"interrupted and saved after step {history.steps} of {job.last_step}; run "
            "the same command to resume"
        )
    return history


def _is_finished(history: TrainingHistory, job: Optimisation) -> bool:
    """Return whether a training reached its last step, or evaluations stopped it."""
    return history.stopped_early or history.steps >= job.last_step
