"""Fit a spectrum: its numbers move, the weights are frozen, and the best step is written."""

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from torch import nn

from ropext.base.narration import Show
from ropext.evaluation.forward import NanInLogits
from ropext.evaluation.variants import Variant, applied
from ropext.evaluation.workload import Workload
from ropext.files.checkpoint.writing import WriteOptions
from ropext.models import processes
from ropext.options.training import Fit
from ropext.planning import Plan
from ropext.results import BASE, EXTENDED, FITTED, START, rules
from ropext.results.measurement import MeasuredModel, Measurement, Store
from ropext.tasks import Item
from ropext.training import fit_report, loss, models, spectrum, trainer
from ropext.training.fit_choice import SpectrumChoice, notes_on_written, why_start_stays
from ropext.training.fit_writing import write_fitted
from ropext.training.judge import (
    JudgedSteps,
    base_can_answer,
    fit_numbers,
    read_in_training,
)
from ropext.training.objective import COPIES, Finish, TrainedPart, TrainingObjective
from ropext.training.result import Fitted
from ropext.training.rows import FitQuestions, RowsWithShortWindows
from ropext.training.starts import plan_by_method

if TYPE_CHECKING:
    from transformers import PreTrainedModel

STEP = "step"  # label of a step that is judged on the way


@dataclass(kw_only=True, eq=False, repr=False)
class FitObjective(TrainingObjective[Fitted]):
    """A fit of pair factors and attention factor; the step that surely beats the start is
    written."""

    command = "fit"
    kind = Fitted
    out_of_memory = (
        "out of memory; three options help most: --micro-rows 1, --dtype bfloat16, and a smaller "
        "--factor. The last checkpoint is kept"
    )

    options: Fit
    judge: Workload
    within: str  # the form that may move
    starts: Mapping[str, Plan]  # the closed forms inside of it, by their methods
    near: Sequence[Item] = ()  # questions inside the context, of the base
    far: Sequence[Item] = ()  # questions at the target, before and after
    finish: Finish | None = None  # adds to OUT, before that has its name
    model: "PreTrainedModel" = field(init=False)
    closed: Measurement = field(init=False)  # of every closed form to start from
    # The closed form that the steps begin at, and that one of them has to beat.
    start: str = field(init=False)
    steps: JudgedSteps = field(init=False)

    def __post_init__(self) -> None:
        """Set the title, the questions, the training rows and the empty history of a fit."""
        self.facts = {"within": self.within, "starts": list(self.starts)}
        start = ", ".join(self.starts)
        if len(self.starts) > 1:
            start = f"the best of {start}"
        self.title = f"from {self.context} to {self.target} tokens, starting from {start}"
        per_step = self.settings.rows.value
        questions = self.rows.questions
        count = self.options.retrieval_items
        if count and isinstance(questions, FitQuestions):
            self.near = questions.measured_questions(self.context, count)
            self.far = questions.measured_questions(self.target, count)
        documents = self.data.documents
        self.mixed = RowsWithShortWindows(
            self.rows, per_step, documents, self.context, self.options
        )
        self.history = trainer.TrainingHistory()

    @property
    def forward_tokens(self) -> int:
        """Return the number of tokens that a fit will read without gradients."""
        settings = self.settings
        target = self.target
        judged = self.judging_count
        judgements = -(-settings.steps.value // settings.between)
        questions = 2 * len(self.far) * target + len(self.near) * self.context
        passes = len(self.starts) + judgements + 1
        return int(passes * judged * target + self._base_tokens + questions)

    @property
    def _base_tokens(self) -> int:
        """Return the tokens of the held-out documents that the base of a fit reads in its short
        windows."""
        return self.judge.tokens(Variant(BASE, BASE, self.snapshot))

    def _tokens_read(self, judgements: int) -> int:
        """Count the tokens that a fit read without gradients until now, by all processes and
        earlier runs."""
        passes = len(self.starts) + judgements + (FITTED in self.models)
        asked = len(self.models[BASE].items) * self.context
        for label in {START, FITTED} & self.models.keys():
            asked += len(self.models[label].items) * self.target
        return passes * self.judging_count * self.target + self._base_tokens + asked

    def trained_part(self, model: "PreTrainedModel") -> TrainedPart:
        """Return the numbers of the spectrum that a fit trains."""
        count = 0
        size = 0
        for numbers in self.learned_spectrum(next(iter(self.starts))).parameters():
            count += numbers.numel()
            size += numbers.nbytes
        return TrainedPart((f"the spectrum ({self.within})",), count, COPIES * size)

    def learned_spectrum(self, start: str) -> spectrum.LearnedSpectrum:
        """Return the spectrum that a fit trains, beginning at a closed form."""
        plan = self.starts[start]
        return spectrum.learned_spectrum(
            self.within, plan.main, self.target, self.options.ceiling * plan.factor
        )

    def variant(self, label: str, plan: Plan) -> Variant:
        """Return the variant of the model to fit that reads by a plan's spectrum."""
        return Variant(label, EXTENDED, self.snapshot, plan.config)

    def measure(self, pause: Show) -> None:
        """Read the base of a fit through its short window and every closed form, find the best
        of these, and ask base and start."""
        lineage = self.lineage(self.overlap_before)
        for sentence in filter(None, (*self.remarks, lineage)):
            self.note(sentence)
        self.model = models.load_to_train(self.snapshot, self.options)
        self.model.requires_grad_(False)
        self._read_closed_forms(pause)
        self._ask_before(pause)

    def _read_closed_forms(self, pause: Show) -> None:
        """Read the held-out documents with the base and every closed form, and choose the start
        of the fit."""
        base = [Variant(BASE, BASE, self.snapshot)]
        forms = [self.variant(method, plan) for method, plan in self.starts.items()]
        said = f"evaluating the base on {self.judging_count} held-out documents"
        self.models |= self._measure(said, base, pause)
        closed = self._measure("evaluating {} on the same documents", forms, pause)
        self.closed = replace(self.measured, models=closed)
        losses = {method: rules.fit_loss(self.closed, method) for method in self.starts}
        inside = {}
        for method, lost in losses.items():
            if self.learned_spectrum(method).outside() is None:
                inside[method] = lost
        allowed = inside or losses  # else all are outside of the guards
        self.start = min(allowed, key=lambda method: allowed[method])
        if len(losses) > 1:
            shown = ", ".join(f"{method} {loss:.4f}" for method, loss in losses.items())
            self.say(f"second half and tail, nats per token: {shown}; starting from {self.start}")
        self.models[START] = closed[self.start]

    def _measure(
        self,
        sentence: str,
        variants: Sequence[Variant],
        pause: Show,
        items: Sequence[Item] | None = None,
    ) -> Mapping[str, MeasuredModel]:
        """Read held-out documents, or ask questions, by stock arithmetic from the variants'
        configs. Print the sentence of a fit, with the label, if no earlier run has done it."""

        @contextmanager
        def computing(variant: Variant) -> Iterator["PreTrainedModel"]:
            """Print the sentence of a fit, and yield its model with a variant's spectrum."""
            self.say(sentence.format(variant.label))
            with applied(self.model, variant) as model:
                yield model

        return self.read(computing, variants, pause, items)

    def _ask_before(self, pause: Show) -> None:
        """Ask the base of a fit inside its own context, and the start at the target. If the base
        cannot answer, ask nothing at the target: there is nothing to lose there, and wrong
        answers would teach nothing about distance."""
        self._ask(Variant(BASE, EXTENDED, self.snapshot), self.near, pause)
        if not base_can_answer(self.models[BASE].items):
            self.far = ()
            self.rows.questions = None
            self.note(
                "no questions at the target: the base does not answer them inside its own context"
            )
        self._ask(self.variant(START, self.starts[self.start]), self.far, pause)

    def _ask(self, variant: Variant, items: Sequence[Item], pause: Show) -> None:
        """Ask a variant of a fit its questions, and keep the answers next to its reading."""
        sentence = f"asking {{}} {len(items)} questions"
        label = variant.label
        answers = self._measure(sentence, [variant], pause, items)[label].items
        self.models[label] = replace(self.models[label], items=answers)

    def learn(self) -> None:
        """Train the spectrum from its start. If a guard or a loss that is not finite ends the
        training, the steps judged before stay."""
        settings = self.settings
        model = self.model
        plan = self.starts[self.start]
        learned = self.learned_spectrum(self.start)
        label = f"{FITTED}-{self.start}"
        place = self.folder / "steps" / self.start
        self.steps = JudgedSteps(place, self.judge, self.variant(STEP, plan))
        start_plan = plan_by_method(self.snapshot, self.options, learned.method, learned.knobs())
        here = self.variant(label, start_plan)
        with applied(model, here):
            reason = loss.why_not_sliced(model)
            if reason is not None:
                self.note(f"the loss needs whole logits: {reason}")
            self.check_pose_jumps(model)
            spectrum.install_learned_spectrum(model, plan.sites, self.target, learned)
            tail = self.judge.frame.tail_span(self.target)[0]
            learner = spectrum.SpectrumLearner(model, learned, sliced=reason is None, tail=tail)
            self.say(
                f"fitting {self.part.moving} numbers from {self.start}: "
                f"{settings.steps.value} steps of {settings.step_tokens} tokens"
            )
            judged = f"(from {self.start}); the steps judged before count"
            try:
                job = trainer.Optimisation(
                    training=self,
                    model=learner,
                    rows=self.mixed,
                    folder=self.folder / label,
                    recompute=self.needs.recompute,
                    rows_per_step=settings.per_step,
                    row_tokens=settings.longest,
                    stopping=trainer.Stopping(
                        partial(self._evaluate, learned), is_whole=self.steps.is_whole
                    ),
                )
                self.history = trainer.run_trainer(job, self.say)
                return
            except spectrum.LeftGuards as error:
                self.note(f"stopped: {error} {judged}")
            except trainer.LossNotFinite as error:
                lower = "(a lower --learning-rate may go further)"
                self.note(f"stopped: {error.where} {judged} {lower}")
            finally:
                spectrum.remove_learned_spectrum(model)
                del learner
                gc.collect()
        last = trainer.last_checkpoint(self.folder / label)
        if last is not None:
            self.history = trainer.history_in(last, 0)

    def _evaluate(
        self, learned: spectrum.LearnedSpectrum, _: nn.Module, step: int
    ) -> tuple[float, float]:
        """Read the held-out documents by the learned spectrum, and keep it with its reading.
        Return the loss that the fit lowers, and the loss of the tail."""
        left = learned.outside()
        if left is not None:
            raise spectrum.LeftGuards(left)
        store = Store()
        self.model.eval()
        done = read_in_training(self.model, self.steps.variant, self.judge, store, self.show)
        if processes.is_main():
            self.steps.keep(step, learned.knobs(), store)
        return rules.fit_loss(done, STEP), rules.tail_loss(done, STEP)

    def choose(self, pause: Show) -> Fitted | None:
        """Return the result of the fit: the step of the lowest loss, if it surely beats the start
        and loses no retrieval, else the start. Only the first process returns it."""
        if not processes.is_main():
            return None
        judged = self.steps.models()
        choice = self._choose_step(pause, judged)
        plan = choice.plan
        self.note(choice.reason)
        written = FITTED if choice.step else START
        measured = self.measured
        ceiling = self.learned_spectrum(self.start).ceiling
        yarn = self.starts.get("yarn")
        distance = 0.0
        if yarn is not None:
            distance = rules.far_loss(self.closed, "yarn") - rules.far_loss(measured, written)
        for sentence in notes_on_written(choice, measured, ceiling):
            self.note(sentence)
        if readers := fit_report.readers_note(plan, yarn, distance):
            self.note(readers)
        change = rules.far_change(measured, FITTED, START) if FITTED in self.models else None
        history = self.history
        steps = replace(measured, models=judged)
        return Fitted(
            output=self.output,
            counted=self.to_json(),
            work=self,
            measurement=measured,
            written=plan,
            kept=written,
            reason=choice.reason,
            start=self.start,
            step=choice.step,
            tokens=self.settings.step_tokens * history.steps,
            forward_tokens=self._tokens_read(len(judged)),
            method=plan.method,
            pair_factors=choice.pair_factors,
            attention_factor=plan.main.wanted.attention_factor,
            change=change,
            numbers=fit_numbers(measured),
            by_step=history.losses,
            closed_forms={form: rules.far_loss(self.closed, form) for form in self.starts},
            judgements={int(step): rules.far_loss(steps, step) for step in steps.models},
            notes=self.notes,
        )

    def _choose_step(self, pause: Show, steps: dict[str, MeasuredModel]) -> SpectrumChoice:
        """Return which step of a fit is written, why, and its plan; step 0 is the start."""

        def keep_start(sentence: str) -> SpectrumChoice:
            """Return the choice of the start, with the reason."""
            return SpectrumChoice(0, f"{sentence}: the start is written", self.starts[self.start])

        if not steps:
            return keep_start("nothing was found to judge")
        everything = replace(self.measured, models=self.models | steps)
        step = int(rules.best_fit_step(everything, steps, START))
        # Once more, by stock arithmetic from the config that is written.
        method = self.learned_spectrum(self.start).method
        plan = plan_by_method(self.snapshot, self.options, method, self.steps.knobs(step))
        variant = self.variant(FITTED, plan)
        said = f"evaluating the RoPE frequencies of step {step}, from the written config"
        try:
            self.models |= self._measure(said, [variant], pause)
        except NanInLogits as error:
            return keep_start(f"step {step}: {error}")
        self._ask(variant, self.far, pause)
        why = why_start_stays(self.measured, self.start)
        if why is not None:
            return keep_start(why)
        change = fit_report.change_text(rules.far_change(self.measured, FITTED, START))
        return SpectrumChoice(step, f"step {step} is kept: {change}", plan)

    def result_text(self, result: Fitted) -> str:
        """Return the text that `fit` prints at its end."""
        return fit_report.fit_result(result)

    def write(self, result: Fitted, manner: WriteOptions) -> None:
        """Write OUT with the chosen spectrum, and the files of OUT/fit."""
        files = fit_report.fit_files(result, self.kept_json(result))
        for name, content in self.first_steps_log().items():
            files[f"fit/{name}"] = content
        finish = None
        if self.finish is not None:
            finish = partial(self.finish, self.output, self.call)
        story = fit_report.fit_summary(result, self.within)
        write_fitted(result, files, story, self.call.command, manner, finish)
