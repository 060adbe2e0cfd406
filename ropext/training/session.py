"""A training, once all about it is settled: models are loaded, read, trained, judged, written."""

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

from ropext.checkpoint.provenance import READ_FROM
from ropext.errors import InputError, Interrupted, listed
from ropext.evaluation.forward import NanInLogits
from ropext.evaluation.loading import add_adapter, memory_errors
from ropext.evaluation.variants import Variant
from ropext.narration import Say, Show, pausing, told, told_of_files
from ropext.patching import apply_config, unpatch
from ropext.planning import Plan
from ropext.results.perplexity import MASK_STRIDE, Reading
from ropext.results.retrieval import ItemScore
from ropext.results.stores import Store
from ropext.results.values import MARGIN, values_json
from ropext.rope import compression
from ropext.training import (
    attention,
    defaults,
    judge,
    loss,
    models,
    report,
    sharing,
    spectrum,
    trainer,
    writing,
)
from ropext.training.finetune import STOPS, Finetuned, PreparedFinetune
from ropext.training.fit import Fitted, PreparedFit
from ropext.training.loss import use_sliced_loss
from ropext.training.rows import ControlRows, MaskedRows, Row, WithShort
from ropext.training.run import Planned
from ropext.training.sharing import is_main
from ropext.training.spectrum import Learner, LeftGuards, Space
from ropext.training.trainer import Evaluate, History, Job, LossNotFinite
from ropext.training.writing import writing_errors
from ropext.workdir import USED

# The models that are read.
BASE, UNTUNED, TUNED, CONTROL = "base", "untuned", "tuned", "control"
START, FITTED = "start", "fitted"
LAST_KEPT = "The last checkpoint is kept"


@dataclass
class Session:
    """The state of one process of a training."""

    planned: Planned[Any]
    folder: Path
    output: Path
    force: bool
    say: Say

    out_of_memory = "out of memory"

    def __post_init__(self) -> None:
        self.prepared, self.judge = self.planned.prepared, self.planned.prepared.judge
        self.notes: list[str] = []
        self.show = told(self.say)

    def note(self, sentence: str) -> None:
        """Tell, now and in the result."""
        self.notes.append(sentence)
        self.say(sentence)

    @contextmanager
    def guarded(self, folder: Path) -> Iterator[None]:
        """Out of memory, and a full or failing disk, become a sentence; the checkpoints before it
        are kept."""
        with memory_errors(self.out_of_memory), writing_errors(folder):
            yield

    def store(self, label: str) -> Store:
        """Where a reading is kept, so that a run that goes on does not take it again."""
        return Store(self.folder / "readings" / label, writes=is_main())

    def check_jumps(self, model: Any) -> None:
        """Refuse short rows where their second chunk would not see the first."""
        if self.prepared.options.strategy != "pose":
            return
        jump = self.prepared.target - loss.PROBE
        if not sharing.by_first(lambda: loss.chunks_are_joined(model, jump)):
            raise InputError(
                "--strategy pose: in this model's attention the second chunk of a row sees "
                "nothing of the first, so it would learn nothing; use --strategy full"
            )

    def used(self, folder: str) -> dict[str, bytes]:
        """What first steps took, as a file of the result."""
        log = self.folder / USED
        return {f"{folder}{USED}": log.read_bytes()} if log.is_file() else {}

    def train(self, label: str, model: Any, rows: Sequence[Row], **more: Any) -> History:
        """Train what of a model can be trained, from the last checkpoint on."""
        planned = more.pop("planned", self.planned)
        return trainer.train(Job(planned, model, rows, self.folder / label, **more), self.say)


class FinetuneSession(Session):
    """A LoRA is trained, and merged at the end."""

    planned: Planned[PreparedFinetune]
    prepared: PreparedFinetune
    out_of_memory = (
        "out of memory; three options help most: --micro-rows 1, --strategy pose (memory does not "
        f"depend on the target), and --dtype bfloat16 (on a GPU also --qlora). {LAST_KEPT}"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.options, self.settings = self.prepared.options, self.prepared.settings
        self.origin = self.prepared.origin

    def run(self) -> Finetuned:
        self._say_beforehand()
        with self.guarded(self.folder):
            with self._readings() as pause:
                before = self._before(pause)
            tuned = self._train()
            control = self._control(tuned) if self.options.control else None
            if not is_main():
                return self._result(tuned, control, {})
            with self._readings() as pause:
                numbers = self._numbers(tuned, control, before, pause)
        done = self._result(tuned, control, numbers)
        with self.guarded(self.output):
            self._write(done, tuned.kept, None if control is None else control.kept)
        return done

    def _say_beforehand(self) -> None:
        prepared = self.prepared
        if prepared.why_no_judge:
            self.note(f"not evaluated: {prepared.why_no_judge}")
        if self.origin.record.more.get(READ_FROM):
            self.note(
                f"{prepared.snapshot.name} is {self.origin.told}: the base is these weights "
                "without that scaling"
            )
        if prepared.masking is not None:
            self.note(
                "losses on held-out documents are of a pseudo-perplexity: of the last tokens every "
                f"{MASK_STRIDE}th masked in one pass"
            )
        if prepared.lineage:
            self.note(prepared.lineage)
        if prepared.rows.passes > 1 and not self.settings.is_open:
            self.note(report.passes_text(prepared.rows))

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
        done = trainer.last_checkpoint(self.folder / TUNED)
        if done is None:
            raise
        raise Interrupted(
            f"interrupted; the training so far is kept ({done}), and the same command goes on "
            "from there"
        )

    def _load(self) -> Any:
        gc.collect()  # of the model before it
        torch.manual_seed(self.options.seed)
        return models.load(self.origin.snapshot, self.options)

    def _make_base(self, model: Any) -> None:
        """The same weights before the extension, a position table with its rows of then."""
        table = self.origin.table
        apply_config(model, self.origin.base_config(), table.undone() if table else None)

    def _before(self, pause: Show) -> dict[str, Reading]:
        """The base through its short window, and the extended model before it is trained."""
        if self.judge is None or not is_main():
            return {}
        own, stores = self.judge, {label: self.store(label) for label in (BASE, UNTUNED)}
        if not all(own.has(self.variant(label), store) for label, store in stores.items()):
            self.say(f"reading {len(own.documents)} documents before the training")
            model = self._load().eval()
            own.read(model, self.variant(UNTUNED), stores[UNTUNED], pause)
            self._make_base(model)
            own.read(model, self.variant(BASE), stores[BASE], pause)
        return {
            label: own.reads.reading(self.variant(label), store) for label, store in stores.items()
        }

    def variant(self, label: str) -> Variant:
        """A model that is read: the base, and its control, through the short window."""
        if label in (BASE, CONTROL):
            return Variant(label, label, self.origin.snapshot, self.origin.base_config())
        return Variant(label, "extended", self.origin.snapshot)

    def _train(self) -> History:
        model = self._load()
        self.check_jumps(model)
        reason = None if self.prepared.masking else use_sliced_loss(model)
        if reason is not None:
            self.note(f"the loss needs whole logits: {reason}")
        rows, evaluate = self.prepared.rows, self._evaluation()
        return self._train_lora(TUNED, model, rows, 1, evaluate=evaluate)

    def _control(self, tuned: History) -> History:
        """The base on the same tokens; after an early stop as many steps as are in the weights that
        count."""
        model = self._load()
        self._make_base(model)
        if self.prepared.masking is None:
            use_sliced_loss(model)
        rows = ControlRows(self.prepared.rows, self.origin.context)
        more: dict[str, Any] = {"until": tuned.counted}
        if self.settings.patience:
            more["lowered_after"] = trainer.missed(tuned.evaluations)
        return self._train_lora(CONTROL, model, rows, rows.per_row, **more)

    def _train_lora(
        self,
        label: str,
        model: Any,
        rows: Sequence[Row],
        pieces: int,
        **more: Any,
    ) -> History:
        """Train a LoRA on a model; a row is read in so many pieces."""
        settings = self.settings
        torch.manual_seed(self.options.seed)
        joined = models.add_adapter(
            model, self.options, settings.lora, None if label == CONTROL else self.origin.table
        )
        longest = self.origin.context if label == CONTROL else self.origin.target
        until, tokens = more.get("until"), f"of {settings.step_tokens} tokens"
        if settings.is_open and not until:
            tokens += f" at most, {STOPS}"
        self.say(f"training {label}: {until or settings.steps.value} steps {tokens}")
        documents, context = self.prepared.rows.documents, self.origin.context
        mixed = WithShort(rows, settings.rows.value * pieces, documents, context, self.options)
        made: Sequence[Row] = mixed
        if (own := self.prepared.masking) is not None:
            made = MaskedRows(mixed, self.prepared.encoder.tokenizer, own, self.options.seed)
        return self.train(
            label,
            joined,
            made,
            rows_per_step=mixed.per_step,
            row_tokens=min(settings.longest, longest),
            patience=self.settings.patience if label == TUNED else 0,
            save_every=self.options.save_every,
            **more,
        )

    def _evaluation(self) -> Evaluate | None:
        own = self.judge
        if own is None:
            return None

        def evaluate(model: Any, step: int) -> tuple[float, float]:
            model.eval()
            reading = own.read(model, self.variant(TUNED), pause=self.show)
            # The tail alone has few tokens: more steps would look worse by chance.
            return own.loss(reading), own.tail(reading)

        return evaluate

    def _numbers(
        self, tuned: History, control: History | None, readings: dict[str, Reading], pause: Show
    ) -> report.Numbers:
        """The table: what each model reads at the target, on the same tokens."""
        own = self.judge
        if own is None:
            return {}
        model = self._with_adapter(tuned)
        readings[TUNED] = own.read(model, self.variant(TUNED), pause=pause)
        if control is not None:
            model = self._with_adapter(control)
            self._make_base(model)
            readings[CONTROL] = own.read(model, self.variant(CONTROL), pause=pause)
        return {label: own.numbers(read, readings[BASE]) for label, read in readings.items()}

    def _with_adapter(self, history: History) -> Any:
        return add_adapter(self._load(), str(history.kept))

    def _write(self, done: Finetuned, adapter: Path, control: Path | None) -> None:
        self.say("writing, and proving what stock transformers builds from it")
        # What --report-to tensorboard wrote.
        folder = self.folder / TUNED
        written = sorted(path for path in folder.glob("runs/**/*") if path.is_file())
        trackers = {str(path.relative_to(folder)): path.read_bytes() for path in written}
        try:
            writing.write_tuned(
                done,
                self.origin,
                adapter,
                report.finetune_files(done) | trackers | self.used(""),
                report.finetune_story(done),
                control=control,
                force=self.force,
                show=told_of_files(self.say),
            )
        except KeyboardInterrupt:
            self._stop()

    def _result(
        self, tuned: History, control: History | None, numbers: report.Numbers
    ) -> Finetuned:
        done = Finetuned(
            output=self.output,
            planned=self.planned,
            steps=tuned.steps,
            kept_step=tuned.counted,
            stopped_early=tuned.stopped_early,
            losses=tuple(tuned.losses),
            evaluations=tuple(tuned.evaluations),
            numbers=numbers,
            overlap=values_json(self.prepared.overlap),
            control=None if control is None else {"steps": control.steps, "losses": control.losses},
            notes=(),
        )
        if self.settings.is_open and done.passes > 1:
            self.note(f"{done.passes:,.1f} passes over the text{report.too_often(done.passes)}")
        return replace(done, notes=tuple(self.notes))


# Which step is kept (0 = the start), why, and the plan that is written.
Verdict = tuple[int, str, Plan]


class FitSession(Session):
    """The numbers of a spectrum are moved, the weights frozen, and the best step is written."""

    planned: Planned[PreparedFit]
    prepared: PreparedFit
    judge: judge.Judge
    out_of_memory = (
        "out of memory; three options help most: --micro-rows 1, --dtype bfloat16, and a smaller "
        f"--factor. {LAST_KEPT}"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.readings: dict[str, Reading] = {}  # of base, start and what was fitted
        self.closed: dict[str, Reading] = {}  # of every closed form to start from
        self.scores: dict[str, list[ItemScore]] = {}
        self.left_steps = 0  # of starts that were tried and left
        self.back_at = 0  # the step after which a fit went back to the start; 0 = it did not
        for sentence in (*self.prepared.remarks, self.prepared.lineage):
            if sentence:
                self.note(sentence)

    def run(self, command: Sequence[str]) -> Fitted | None:
        """The result; None in all processes but the first."""
        try:
            with self.guarded(self.folder):
                verdict, history = self._fit_and_judge()
        except KeyboardInterrupt:
            raise Interrupted(
                f"interrupted; what is finished is kept in {self.folder}, and the same command "
                "goes on from there"
            ) from None
        if verdict is None:
            return None
        with writing_errors(self.output):
            done = self._result(verdict, history)
            self._write(done, command)
        return done

    def _fit_and_judge(self) -> tuple[Verdict | None, History]:
        """What decides what is written; None in all processes but the first."""
        model = models.load(self.prepared.snapshot, self.prepared.options)
        model.requires_grad_(False)
        with pausing(self.say, self.show) as pause:
            self._read_starts(model, pause)
            self._ask_before(model, pause)
        history = self._fit(model)
        if not is_main():
            return None, history
        with pausing(self.say, self.show) as pause:
            return self._decide(model, pause), history

    def _read_starts(self, model: Any, pause: Show) -> None:
        """The base through its short window, every start, and which of these is the best."""
        own, prepared = self.judge, self.prepared

        base, store = Variant(BASE, BASE, prepared.snapshot), self.store(BASE)
        if not own.has(base, store):
            self.say(f"reading {len(own.documents)} held-out documents by the base")
        self.readings[BASE] = own.read(model, base, store, pause)
        for method, plan in prepared.starts.items():
            form, store = self.variant(method, plan), self.store(method)
            if not own.has(form, store):
                self.say(f"reading them by {method}")
                apply_config(model, plan.config)
            self.closed[method] = own.read(model, form, store, pause)
        losses = {method: own.objective(reading) for method, reading in self.closed.items()}
        allowed = {m: loss for m, loss in losses.items() if prepared.space(m).outside() is None}
        allowed = allowed or losses  # else all lie outside of the guards
        lowest = sorted(allowed, key=lambda method: allowed[method])
        self.start = next(iter(losses)) if prepared.options.start else lowest[0]
        count, self.begun = prepared.settings.rivals, self.start
        self.rivals = lowest[:count] if count > 1 else [self.start]
        if len(losses) > 1:
            shown = ", ".join(f"{method} {loss:.4f}" for method, loss in losses.items())
            self.say(
                f"far half and tail, nats a token: {shown}; starting from {listed(self.rivals)}"
            )
        self.readings[START] = self.closed[self.start]

    def variant(self, label: str, plan: Plan) -> Variant:
        """A spectrum that is read."""
        return Variant(label, "extended", self.prepared.snapshot, plan.config)

    def _ask_before(self, model: Any, pause: Show) -> None:
        """Questions to base and start. A base that cannot answer inside its own context is not
        asked at the target: it has nothing to lose there, and its wrong answers would teach nothing
        about distance."""
        unpatch(model)
        self._ask(BASE, model, pause)
        if self.judge.near and not self.judge.answers(self.scores[BASE]):
            self.judge = replace(self.judge, far=())
            self.prepared.rows.questions = None
            self.note(
                "no questions at the target: the base does not answer them inside its own context"
            )
        apply_config(model, self.prepared.starts[self.start].config)
        self._ask(START, model, pause)

    def _ask(self, label: str, model: Any, pause: Show) -> None:
        items = self.judge.near if label == BASE else self.judge.far
        variant, store = Variant(label, "extended", self.prepared.snapshot), self.store(label)
        if not self.judge.has(variant, store, self.judge.asked(items)):
            self.say(f"asking {label} {len(items)} questions")
        self.scores[label] = self.judge.ask(model, variant, items, store, pause)

    def _apply(self, model: Any, method: str, knobs: Mapping[str, Any]) -> Plan:
        """Make the model compute, by stock arithmetic, as a plan with these knobs says."""
        plan = self.prepared.planned(method, knobs)
        apply_config(model, plan.config)
        return plan

    def _judge_step(self, model: Any, step: int, space: Space, pause: Show) -> Reading:
        """Read the held-out documents by the present spectrum, and keep it with its reading."""
        store = Store()
        reading = self.judge.read(model, self.steps.variant, store, pause)
        if is_main():
            self.steps.keep(step, space.knobs(), store)
        return reading

    def _fit(self, model: Any) -> History:
        """Train the spectrum, from the start that is lowest after a few steps."""
        trial = self.prepared.settings.between
        if len(self.rivals) > 1:
            found = {own: self._train_from(model, own, trial) for own in self.rivals}
            ends = {
                own: entry["held_out"]
                for own, history in found.items()
                for entry in history.evaluations
                if entry["step"] == trial
            }
            self.begun = min(ends, key=lambda own: ends[own], default=self.start)
            shown = ", ".join(f"from {own} {loss:.4f}" for own, loss in ends.items())
            self.left_steps = (len(self.rivals) - 1) * trial
            self.note(f"after {trial} steps {shown} nats a token: going on from {self.begun}")
        history, half = self._train_from(model, self.begun), self.prepared.settings.half
        if history.steps >= half:
            return history
        self.back_at = max([history.steps, *(own for own in self.steps.found() if own <= half)])
        self.note(
            f"after {self.back_at} steps no better than {self.start}: going back to it, for the "
            "other half with a third of the learning rate"
        )
        return self._train_from(model, self.start, slower=True)

    def _train_from(
        self, model: Any, start: str, until: int | None = None, slower: bool = False
    ) -> History:
        """Train the spectrum from a start, up to half of the steps where these gain nothing. What
        was judged before a guard, or a loss that is no number, stays. `slower`: the other half."""
        prepared, space, label = self.prepared, self.prepared.space(start), f"{FITTED}-{start}"
        half, own = prepared.settings.half, self.judge
        if slower:
            prepared = replace(prepared, settings=defaults.slower(prepared.settings))
            label += "-slower"
        else:
            place, read = (
                self.folder / "steps" / start,
                self.variant("step", prepared.starts[start]),
            )
            self.steps = judge.JudgedSteps(place, own.reads, read)
        settings = prepared.settings
        self._apply(model, space.method, space.knobs())
        reason = loss.why_not_sliced(model)
        if reason is not None and not until:
            self.note(f"the loss needs whole logits: {reason}")
        self.check_jumps(model)
        spectrum.make_live(model, prepared.starts[start].sites, prepared.target, space)
        tail = self.judge.frame.tail_span(prepared.target)[0]
        learner = Learner(model, space, sliced=reason is None, tail=tail)

        def evaluate(_: Any, step: int) -> tuple[float, float]:
            if (left := space.outside()) is not None:
                raise LeftGuards(left)
            model.eval()
            with self._attention_set(model, space):
                reading = self._judge_step(model, step + slower * half, space, self.show)
            gains = step != half or slower or own.lower(reading, self.readings[START])
            if not sharing.from_first(gains):
                raise LeftGuards  # of what is worth its cost
            return own.objective(reading), own.tail(reading)

        self.say(
            f"fitting {self.planned.moving} numbers from {start}: "
            f"{until or settings.steps.value} steps of {settings.step_tokens} tokens"
        )
        try:
            return self.train(
                label,
                learner,
                prepared.mixed,
                rows_per_step=settings.per_step,
                row_tokens=settings.longest,
                evaluate=evaluate,
                until=until,
                planned=replace(self.planned, prepared=prepared),
            )
        except LeftGuards as error:
            if str(error):
                self.note(f"stopped: {error} (from {start}); the steps judged before count")
        except LossNotFinite as error:
            self.note(
                f"stopped: {error.where} (from {start}); the steps judged before count (a lower "
                "--learning-rate may go further)"
            )
        finally:
            spectrum.remove(model)
            del learner
            gc.collect()
        last = trainer.last_checkpoint(self.folder / label)
        return History() if last is None else trainer.history_in(last, 0)

    @contextmanager
    def _attention_set(self, model: Any, space: Space) -> Iterator[None]:
        """Short rows ask for another attention factor than long ones, whose softmax is over more
        keys: while it is judged, a fit in short rows has the one that reads best at full length."""
        value, target = getattr(space, "attention", None), self.prepared.target
        if self.prepared.options.strategy != "pose" or value is None:
            yield
            return
        trained, before = value.detach().clone(), space.knobs()["attention_factor"]
        windows = attention.windows_of(self.prepared.data.documents, target)
        read = partial(attention.far_losses, self.judge.scorer(model), windows, self.show)
        counts = np.array([float(scored.sum()) for _, scored in windows])
        trials = attention.line_search(value, read, counts, self.judge.frame.bootstrap)
        now, passes = space.knobs()["attention_factor"], trials * len(windows)
        self.note(
            f"attention factor {before:.4f} in short rows, set to {now:.4f} by {passes} passes of "
            f"{target} tokens"
        )
        yield
        value.data.copy_(trained)

    def _decide(self, model: Any, pause: Show) -> Verdict:
        """The lowest step, if it beats the start surely and loses no retrieval."""
        own, before, found = self.judge, self.readings[START], self.steps.found()

        def keep_start(sentence: str) -> Verdict:
            plan = self.prepared.starts[self.start]
            return 0, f"{sentence}: the start is written", plan

        if not found:
            return keep_start("nothing was found to judge")
        step = min(found, key=lambda number: own.objective(found[number]))
        # Once more, by stock arithmetic from the config that is written.
        method = self.prepared.space(self.start).method
        plan = self._apply(model, method, self.steps.knobs(step))
        self.say(f"reading them by the spectrum of step {step}, as its config says")
        try:
            fitted = own.read(model, self.variant(FITTED, plan), pause=pause)
        except NanInLogits as error:
            return keep_start(f"step {step}: {error}")
        self.readings[FITTED] = fitted
        self._ask(FITTED, model, pause)
        said = report.change_text(own.change(fitted, before))
        if not own.better(fitted, before):
            gain = own.change(before, fitted)
            if gain.gains is None:
                why = f"not known whether a step is better than {self.start}"
                return keep_start(f"{why} over the far half ({gain.why_not_known})")
            why = f"no step is better than {self.start} by {MARGIN} nats a token or more"
            return keep_start(f"{why} ({said})")
        lost = own.lost(self.scores[FITTED], self.scores[START])
        if lost is not None:
            text = report.share_text(lost)
            return keep_start(f"the fit answers fewer questions than {self.start} ({text})")
        return step, f"step {step} is kept: {said}", plan

    def _result(self, verdict: Verdict, history: History) -> Fitted:
        """What was done, with its numbers."""
        own, prepared, base = self.judge, self.prepared, self.readings[BASE]
        step, reason, plan = verdict
        if self.back_at and step > self.back_at:
            self.begun = self.start
        self.note(reason)
        factors = compression(plan.main.rope.spectrum, plan.main.wanted)
        held = spectrum.held(factors, prepared.space(self.begun).ceiling)
        if step and held:
            self.note(f"held at a guard: pair {', '.join(map(str, held))}")
        label = FITTED if step else START
        kept, yarn = self.readings[label], self.closed.get("yarn")
        behind = own.change(kept, base)
        if behind.ci95 is not None and behind.ci95[0] > 0:
            self.note(
                "truncating the text still beats it: the base, which sees only its last "
                f"{prepared.context} tokens, predicts the far half {behind.value:.4f} nats a token "
                "better"
            )
        distance = 0.0 if yarn is None else own.loss(yarn) - own.loss(kept)
        if readers := report.readers_note(plan, prepared.starts.get("yarn"), distance):
            self.note(readers)
        fitted = self.readings.get(FITTED)
        change = None if fitted is None else own.change(fitted, self.readings[START])
        return Fitted(
            output=self.output,
            planned=self.planned,
            plan=plan,
            kept=label,
            reason=reason,
            start=self.start,
            begun=self.begun,
            steps=step,
            tokens=prepared.settings.step_tokens * (history.steps + self.left_steps + self.back_at),
            numbers={
                label: own.fit_numbers(reading, base, self.scores.get(label, ()))
                for label, reading in self.readings.items()
            },
            change=values_json(change),
            losses=tuple(history.losses),
            judgements={step: own.loss(reading) for step, reading in self.steps.found().items()},
            notes=tuple(self.notes),
        )

    def _write(self, done: Fitted, command: Sequence[str]) -> None:
        files = report.fit_files(done, self.judge, self.readings, self.closed) | self.used("fit/")
        self.say("writing, and proving what stock transformers builds from it")
        story = report.fit_story(done)
        try:
            show = told_of_files(self.say)
            writing.write_fitted(done, files, story, command=command, force=self.force, show=show)
        except KeyboardInterrupt as error:
            raise Interrupted(
                f"interrupted; the fit is kept in {self.folder}, and the same command writes it"
            ) from error
