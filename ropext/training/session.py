"""One run, once everything about it is settled: models are loaded, trained, measured and merged."""

import gc
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ropext.errors import InputError, Stopped
from ropext.patching import patch
from ropext.results.readings import Reading
from ropext.results.values import Value
from ropext.training import adapters, engine, evaluating, loading, outcome, probes, showing
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
    say: Callable[[str], None]

    def __post_init__(self) -> None:
        self.prepared = self.planned.prepared
        self.options = self.prepared.options
        self.origin = self.prepared.origin
        self.notes: list[str] = []
        self.judge = self._judge()

    def run(self) -> Finetuned:
        with memory_errors():
            before = self._before()
            history = self._train(TUNED, self.prepared.rows, 1)
            control = self._control() if self.options.control else None
            if not is_main():
                return self._result(history, {}, None)
            numbers = self._numbers(history, control, before)
        self._write(history, control, numbers)
        return self._result(history, numbers, control)

    def _judge(self) -> Judge | None:
        if not self.options.eval_documents:
            return None
        try:
            return evaluating.judge_of(
                self.prepared.judged,
                self.prepared.encoder,
                self.origin.context,
                self.origin.target,
                self.options.eval_documents,
                self.options.seed,
            )
        except InputError as error:
            if self.options.evaluate is not None:
                raise
            self._note(f"not evaluated: {error}")
            return None

    def _note(self, sentence: str) -> None:
        self.notes.append(sentence)
        self.say(sentence)

    def _load(self) -> Any:
        torch.manual_seed(self.options.seed)
        return loading.load(self.origin, self.options)

    def _before(self) -> dict[str, Reading]:
        """The base through its short window, and the extended model before it is trained."""
        if self.judge is None or not is_main():
            return {}
        folder = self.folder / "readings"
        found = {label: evaluating.kept(folder, label) for label in (BASE, UNTUNED)}
        if None in found.values():
            self.say(f"reading {len(self.judge.documents)} documents before the training")
            with torch.inference_mode():
                model = self._load().eval()
                found[UNTUNED] = self.judge.read_long(model, UNTUNED)
                patch(model, self.origin.base_config())
                found[BASE] = self.judge.read_short(model, BASE)
            for reading in found.values():
                if reading is not None:
                    evaluating.keep(folder, reading)
        return {label: reading for label, reading in found.items() if reading is not None}

    def _train(self, label: str, rows: Sequence[Row], pieces: int) -> History:
        model = self._load()
        if label == CONTROL:
            patch(model, self.origin.base_config())
        elif self.options.strategy == "pose" and not probes.chunks_are_joined(
            model, self.origin.target - probes.PROBE
        ):
            raise InputError(
                "--strategy pose: in this model's attention the second chunk of a row sees nothing "
                "of the first, so it would learn nothing; use --strategy full"
            )
        reason = use_sliced_loss(model)
        if reason is not None and label == TUNED:
            self._note(f"the loss needs whole logits: {reason}")
        if self.options.qlora:
            import peft

            model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
        torch.manual_seed(self.options.seed)
        joined = adapters.add_adapter(model, self.options, self.prepared.settings)
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
            evaluate=evaluate,
            recompute=self.planned.estimate.recompute,
        )
        self.say(
            f"training {label}: {settings.steps.value} steps of "
            f"{settings.rows.value * settings.row_tokens.value} tokens"
        )
        history = engine.train(job, self.prepared.processes, self.say)
        del job, joined, model
        gc.collect()
        return history

    def _longest(self, label: str) -> int:
        return self.origin.context if label == CONTROL else self.origin.target

    def _evaluation(self) -> engine.Evaluate | None:
        judge = self.judge
        if judge is None:
            return None
        if engine.is_fsdp():
            self._note("under FSDP the model is evaluated before and after the training only")
            return None

        def evaluate(model: Any) -> float:
            with torch.inference_mode():
                model.eval()
                return judge.tail(judge.read_long(model, TUNED))

        return evaluate

    def _control(self) -> History:
        rows = Pieces(self.prepared.rows, self.origin.context)
        return self._train(CONTROL, rows, rows.per_row)

    def _numbers(
        self, history: History, control: History | None, before: dict[str, Reading]
    ) -> dict[str, dict[str, Value]]:
        """The table: what each model reads at the target, on the same tokens."""
        if self.judge is None:
            return {}
        readings = dict(before)
        with torch.inference_mode():
            model = self._with_adapter(history)
            readings[TUNED] = self.judge.read_long(model, TUNED)
            if control is not None:
                model = self._with_adapter(control)
                patch(model, self.origin.base_config())
                readings[CONTROL] = self.judge.read_short(model, CONTROL)
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
        outcome.write(
            self.origin,
            history.checkpoint,
            showing.files(self.planned, history, control, numbers),
            showing.story(self.planned, history, control, numbers),
            self.output,
            force=self.force,
            link=self.options.link,
        )
        logs = self.folder / TUNED / "runs"  # what --report-to tensorboard wrote
        if logs.is_dir():
            shutil.copytree(logs, self.output / outcome.TRAINING / "runs")
        shutil.rmtree(self.folder, ignore_errors=True)

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
            control=None if control is None else {"steps": control.steps, "losses": control.losses},
            notes=tuple(self.notes),
        )


@contextmanager
def memory_errors() -> Iterator[None]:
    """Out of memory becomes a sentence with the options that help."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise Stopped(OUT_OF_MEMORY) from error
    except RuntimeError as error:
        # The CPU allocator raises a bare RuntimeError.
        if "can't allocate memory" not in str(error):
            raise
        raise Stopped(OUT_OF_MEMORY) from error
