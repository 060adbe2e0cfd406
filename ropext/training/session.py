"""One run, once everything about it is settled: models are loaded, trained, measured and merged."""

import gc
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

from ropext.errors import InputError, Interrupted, Stopped
from ropext.evaluation.loading import memory_errors
from ropext.inspecting import READ_FROM
from ropext.narration import Say, Show, pausing, told, told_of_files
from ropext.patching import apply_config
from ropext.results.overlap import as_json
from ropext.results.perplexity import Reading
from ropext.results.values import Value
from ropext.training import (
    adapters,
    engine,
    evaluating,
    learner,
    loading,
    loss,
    outcome,
    sharing,
    showing,
)
from ropext.training.engine import History, Job
from ropext.training.evaluating import Judge
from ropext.training.loss import use_sliced_loss
from ropext.training.run import Finetuned, Planned, is_main
from ropext.training.sequences import Pieces, Row

BASE, UNTUNED, TUNED, CONTROL = "base", "untuned", "tuned", "control"

OUT_OF_MEMORY = (
    "out of memory; three options help most: --micro-rows 1, --strategy pose (memory does not "
    "depend on the target), and --dtype bfloat16 (on a GPU also --qlora). The last checkpoint is "
    "kept"
)


@dataclass
class Session:
    """The state of one process of a run."""

    planned: Planned
    folder: Path
    output: Path
    force: bool
    say: Say

    def __post_init__(self) -> None:
        self.prepared = self.planned.prepared
        self.options = self.prepared.options
        self.origin = self.prepared.origin
        self.notes: list[str] = []
        self.show = told(self.say)
        self.judge = self._judge()

    def run(self) -> Finetuned:
        rows = self.prepared.rows
        if self.origin.record.more.get(READ_FROM):
            self._note(
                f"{self.origin.snapshot.name} is {self.origin.told}: the base is these weights "
                "without that scaling"
            )
        overlap = self.prepared.overlap
        if overlap and overlap.sentence:
            self._note(overlap.sentence)
        if rows.passes > 1:
            self._note(f"{showing.passes_text(rows)} (more text is better than the same again)")
        if self.planned.tight is not None:
            self._note(self.planned.tight)
        with memory_errors(OUT_OF_MEMORY), writing_errors(self.folder):
            with self._readings() as pause:
                before = self._before(pause)
            history = self._train(TUNED, rows, 1)
            if self.options.train_spectrum and is_main():
                self._settle_spectrum(history)
            control = self._control(history) if self.options.control else None
            if not is_main():
                return self._result(history, {}, None)
            with self._readings() as pause:
                numbers = self._numbers(history, control, before, pause)
        with memory_errors(OUT_OF_MEMORY), writing_errors(self.output):
            self._write(history, control, numbers)
        return self._result(history, numbers, control)

    @contextmanager
    def _readings(self) -> Iterator[Show]:
        """An interrupt while documents are read stops after the one in hand."""
        try:
            with pausing(self.say, self.show) as pause:
                yield pause
        except KeyboardInterrupt:
            self._stop()

    def _stop(self) -> NoReturn:
        """An interrupt outside of the training; where nothing is kept yet, the caller's to tell."""
        done = engine.last_checkpoint(self.folder / TUNED)
        if done is None:
            raise
        raise Interrupted(
            f"interrupted; the training so far is kept ({done}), and the same command goes on "
            "from there"
        )

    def _judge(self) -> Judge | None:
        if self.prepared.is_unjudged:
            self._note(f"not evaluated: {self.prepared.why_no_judge()}")
        return self.prepared.judge

    def _note(self, sentence: str) -> None:
        self.notes.append(sentence)
        self.say(sentence)

    def _load(self) -> Any:
        torch.manual_seed(self.options.seed)
        return loading.load(self.origin.snapshot, self.options)

    def _before(self, pause: Show) -> dict[str, Reading]:
        """The base through its short window, and the extended model before it is trained."""
        if self.judge is None or not is_main():
            return {}
        folder = self.folder / "readings"
        found = {label: evaluating.kept(folder, label) for label in (BASE, UNTUNED)}
        if None in found.values():
            self.say(f"reading {len(self.judge.documents)} documents before the training")
            with torch.inference_mode():
                model = self._load().eval()
                found[UNTUNED] = self.judge.read_long(model, UNTUNED, pause)
                apply_config(model, self.origin.base_config())
                found[BASE] = self.judge.read_short(model, BASE, pause)
            for reading in found.values():
                if reading is not None:
                    evaluating.keep(folder, reading)
        return {label: reading for label, reading in found.items() if reading is not None}

    def _train(
        self, label: str, rows: Sequence[Row], pieces: int, until: int | None = None
    ) -> History:
        model = self._load()
        if label == CONTROL:
            apply_config(model, self.origin.base_config())
        elif self.options.strategy == "pose":
            self._check_chunks(model)
        reason = use_sliced_loss(model)
        if reason is not None and label == TUNED:
            self._note(f"the loss needs whole logits: {reason}")
        moving = None
        if self.options.train_spectrum and label == TUNED:
            moving = learner.begin(model, self.origin, self.prepared.settings.learning_rate.value)
        torch.manual_seed(self.options.seed)
        joined = adapters.add_adapter(model, self.options, self.prepared.settings)
        if moving is not None:
            moving.join(joined)
        evaluate = self._evaluation() if label == TUNED else None
        settings = self.prepared.settings
        job = Job(
            model=joined,
            rows=rows,
            rows_per_step=settings.rows.value * pieces,
            row_tokens=min(settings.row_tokens.value, self._longest(label)),
            padding=self.prepared.padding,
            settings=settings,
            options=self.options,
            folder=self.folder / label,
            dtype=loading.dtype(self.options, loading.device(self.options)),
            evaluate=evaluate,
            beside=moving,
            recompute=self.planned.estimate.recompute,
            until=until,
        )
        self.say(
            f"training {label}: {job.last_step} steps of "
            f"{settings.rows.value * settings.row_tokens.value} tokens"
        )
        history = engine.train(job, self.say)
        del job, joined, model
        gc.collect()
        return history

    def _check_chunks(self, model: Any) -> None:
        jump = self.origin.target - loss.PROBE
        if not sharing.by_first(lambda: loss.chunks_are_joined(model, jump)):
            raise InputError(
                "--strategy pose: in this model's attention the second chunk of a row sees nothing "
                "of the first, so it would learn nothing; use --strategy full"
            )

    def _settle_spectrum(self, history: History) -> None:
        """From here on the extended checkpoint is the one that carries the trained spectrum."""
        if history.checkpoint is None:
            raise Stopped("no checkpoint was kept")
        rate = self.prepared.settings.learning_rate.value
        self.say("writing the base with its trained spectrum, and proving it")
        settled = learner.settle(self.origin, history.checkpoint, rate, self.folder / "spectrum")
        self._note(learner.moved_text(self.origin, settled))
        self.origin = settled

    def _longest(self, label: str) -> int:
        return self.origin.context if label == CONTROL else self.origin.target

    def _evaluation(self) -> engine.Evaluate | None:
        judge = self.judge
        if judge is None:
            return None

        def evaluate(model: Any, step: int) -> float:
            # Not inference_mode: buffers that a pinned embedding makes anew would be inference
            # tensors, which the next step cannot share among processes.
            with torch.no_grad():
                model.eval()
                return judge.tail(judge.read_long(model, TUNED, self.show))

        return evaluate

    def _control(self, tuned: History) -> History:
        """After an early stop as many steps as are in the weights that count: the same tokens."""
        rows = Pieces(self.prepared.rows, self.origin.context)
        return self._train(CONTROL, rows, rows.per_row, tuned.counted)

    def _numbers(
        self,
        history: History,
        control: History | None,
        before: dict[str, Reading],
        pause: Show,
    ) -> dict[str, dict[str, Value]]:
        """The table: what each model reads at the target, on the same tokens."""
        if self.judge is None:
            return {}
        readings = dict(before)
        with torch.inference_mode():
            model = self._with_adapter(history)
            readings[TUNED] = self.judge.read_long(model, TUNED, pause)
            if control is not None:
                model = self._with_adapter(control)
                apply_config(model, self.origin.base_config())
                readings[CONTROL] = self.judge.read_short(model, CONTROL, pause)
        base = readings[BASE]
        return {label: self.judge.values(own, base) for label, own in readings.items()}

    def _with_adapter(self, history: History) -> Any:
        import peft

        model = self._load()
        return peft.PeftModel.from_pretrained(model, str(history.checkpoint)).eval()

    def _write(
        self, history: History, control: History | None, numbers: dict[str, dict[str, Value]]
    ) -> None:
        if history.checkpoint is None:
            raise Stopped("no checkpoint was kept")
        self.say("merging, and proving what stock transformers builds from it")
        try:
            outcome.write(
                self.origin,
                history.checkpoint,
                showing.files(self.planned, history, control, numbers) | self._trackers_files(),
                showing.story(self.planned, history, control, numbers),
                self.output,
                force=self.force,
                link=self.options.link,
                show=told_of_files(self.say),
            )
        except KeyboardInterrupt:
            self._stop()

    def _trackers_files(self) -> dict[str, bytes]:
        """What --report-to tensorboard wrote."""
        folder = self.folder / TUNED
        found = sorted(path for path in folder.glob("runs/**/*") if path.is_file())
        return {str(path.relative_to(folder)): path.read_bytes() for path in found}

    def _result(
        self,
        history: History,
        numbers: dict[str, dict[str, Value]],
        control: History | None,
    ) -> Finetuned:
        return Finetuned(
            output=self.output,
            planned=self.planned,
            steps=history.steps,
            stopped_early=history.stopped_early,
            losses=tuple(history.losses),
            evaluations=tuple(history.evaluations),
            numbers={label: evaluating.to_json(values) for label, values in numbers.items()},
            overlap=as_json(self.prepared.overlap),
            control=None if control is None else {"steps": control.steps, "losses": control.losses},
            notes=tuple(self.notes),
        )


@contextmanager
def writing_errors(folder: Path) -> Iterator[None]:
    """A full or failing disk becomes a sentence; the checkpoints before it are kept."""
    from safetensors import SafetensorError

    try:
        yield
    except OSError as error:
        if error.errno is None:  # transformers' own, about a model
            raise
        reason = error.strerror or type(error).__name__
    except (SafetensorError, RuntimeError) as error:
        # What safetensors (Rust) and torch.save (C++) make of an error of the file system.
        words = ("os error", "file write failed", "unexpected pos")
        if not any(known in str(error) for known in words):
            raise
        found = re.search(r"[^:]*\(os error \d+\)", str(error))
        reason = found[0].strip() if found else "a file could not be written whole"
    else:
        return
    raise Stopped(
        f"{folder} cannot be written: {reason}; finished checkpoints are kept, and the same "
        "command goes on from there"
    )
