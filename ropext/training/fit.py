"""A fit: the numbers of a spectrum move, the weights are frozen, and the best step is written."""

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from ropext import corpus
from ropext.checkpoint import open_snapshot, with_weights
from ropext.checkpoint.provenance import read_record
from ropext.errors import UnsupportedModel, UsageError
from ropext.evaluation.forward import NanInLogits
from ropext.evaluation.reads import Reads
from ropext.evaluation.variants import Variant, applied
from ropext.inspecting import open_model
from ropext.models import processes
from ropext.models.tokenizer import load_tokenizer
from ropext.narration import Show
from ropext.options.training import Fit
from ropext.planning import Plan
from ropext.results import BASE, EXTENDED, FITTED, START, rules
from ropext.results.measurement import MeasuredModel, Measurement, Store
from ropext.results.overlap import kept_out_of
from ropext.results.retrieval import CAN_DO, share_of
from ropext.results.values import MARGIN
from ropext.results.windows import forward_tokens, short_windows
from ropext.rope import compression
from ropext.tasks import Item, check_amount
from ropext.training import (
    data,
    defaults,
    fit_report,
    loss,
    models,
    spectrum,
    trainer,
    writing,
)
from ropext.training.data import TrainingData
from ropext.training.judge import JudgedSteps, few, fit_numbers, judge_of, read_now
from ropext.training.objective import Objective
from ropext.training.origin import check_geometry, choose_starts, plan_with
from ropext.training.result import Fitted
from ropext.training.rows import FitQuestions, Full, Pose, Row, Rows, WithShort, strategy_of
from ropext.training.spectrum import Learner, LeftGuards, Space, space_of
from ropext.training.trainer import History, LossNotFinite
from ropext.training.training import Training

FEWEST = 16  # rows of the target's length that are read of a stream, at least
STEP = "step"  # one that is judged on the way


# Which step is kept (0 = the start), why, and the plan that is written.
Verdict = tuple[int, str, Plan]


class SpectrumObjective(Objective[Fitted]):
    """Pair factors and attention factor move; the step that beats the start surely is written."""

    command = "fit"
    plan_key = "planned"
    out_of_memory = (
        "out of memory; three options help most: --micro-rows 1, --dtype bfloat16, and a smaller "
        "--factor. The last checkpoint is kept"
    )
    judge: Reads
    model: Any
    closed: Measurement  # of every closed form to start from
    start: str  # the closed form that the steps begin at, and that one of them has to beat
    steps: JudgedSteps

    def __init__(
        self,
        training: Training,
        options: Fit,
        within: str,
        starts: Mapping[str, Plan],  # the closed forms to choose from
        remarks: Sequence[str],
        near: Sequence[Item] = (),  # questions inside the context, for the base
        far: Sequence[Item] = (),  # at the target
    ) -> None:
        super().__init__(training)
        self.options = options
        self.within = within
        self.starts = starts
        self.documents = training.data.documents
        self.facts = {"within": within, "starts": list(starts)}
        start = ", ".join(starts)
        if len(starts) > 1:
            start = f"the best of {start}"
        self.title = f"from {self.context} to {self.target} tokens, starting from {start}"
        self.remarks = remarks
        self.rows = self._with_short(training.rows)
        self.near = near
        self.far = far
        self.history = History()

    def _with_short(self, rows: Rows) -> Sequence[Row]:
        per_step = self.settings.rows.value
        return WithShort(rows, per_step, self.documents, self.context, self.options)

    @property
    def forward_tokens(self) -> int:
        settings = self.settings
        target = self.target
        judged = self.training.judged
        judgements = -(-settings.steps.value // settings.between)
        questions = 2 * len(self.far) * target + len(self.near) * self.context
        passes = len(self.starts) + judgements + 1
        return int(passes * judged * target + self._base_tokens + questions)

    @property
    def _base_tokens(self) -> int:
        """What the base reads of the held-out documents, in its short windows."""
        return self.training.judged * forward_tokens(short_windows(self.target, self.context))

    def _tokens_read(self, judgements: int) -> int:
        """What was read without gradients until now, by all processes and earlier runs."""
        passes = len(self.starts) + judgements + (FITTED in self.models)
        asked = len(self.models[BASE].items) * self.context
        for label in {START, FITTED} & self.models.keys():
            asked += len(self.models[label].items) * self.target
        return passes * self.training.judged * self.target + self._base_tokens + asked

    def moving(self, model: Any) -> tuple[Sequence[str], int, int]:
        numbers = list(self.space(next(iter(self.starts))).parameters())
        count = sum(n.numel() for n in numbers)
        size = sum(n.nbytes for n in numbers)
        return [f"the spectrum ({self.within})"], count, size

    def space(self, start: str) -> Space:
        """What moves, beginning at a closed form."""
        plan = self.starts[start]
        return space_of(self.within, plan.main, self.target, self.options.ceiling * plan.factor)

    def plan_of(self, method: str, knobs: Mapping[str, Any]) -> Plan:
        """The plan of a spectrum that was learned."""
        return plan_with(self.snapshot, self.options, method, knobs)

    def variant(self, label: str, plan: Plan) -> Variant:
        """A spectrum that is read."""
        return Variant(label, EXTENDED, self.snapshot, plan.config)

    def measure(self, pause: Show) -> None:
        """Read the base through its short window and every closed form, find the best of these, and
        ask base and start."""
        for sentence in filter(None, (*self.remarks, self.training.lineage_before)):
            self.note(sentence)
        self.model = models.load(self.snapshot, self.options)
        self.model.requires_grad_(False)
        self._read_starts(pause)
        self._ask_before(pause)

    def _read_starts(self, pause: Show) -> None:
        base = [Variant(BASE, BASE, self.snapshot)]
        forms = [self.variant(method, plan) for method, plan in self.starts.items()]
        said = f"reading {self.training.judged} held-out documents by the base"
        self.models |= self._measure(said, base, pause)
        closed = self._measure("reading them by {}", forms, pause)
        self.closed = replace(self.measured, models=closed)
        losses = {method: rules.fit_loss(self.closed, method) for method in self.starts}
        inside = {}
        for method, lost in losses.items():
            if self.space(method).outside() is None:
                inside[method] = lost
        allowed = inside or losses  # else all lie outside of the guards
        self.start = min(allowed, key=lambda method: allowed[method])
        if len(losses) > 1:
            shown = ", ".join(f"{method} {loss:.4f}" for method, loss in losses.items())
            self.say(f"far half and tail, nats a token: {shown}; starting from {self.start}")
        self.models[START] = closed[self.start]

    def _measure(
        self,
        sentence: str,
        variants: Sequence[Variant],
        pause: Show,
        items: Sequence[Item] | None = None,
    ) -> Mapping[str, MeasuredModel]:
        """Read documents or ask questions by stock arithmetic, as configs say; the sentence, with
        the label, is said where an earlier run has not done it."""

        @contextmanager
        def computing(variant: Variant) -> Iterator[Any]:
            self.say(sentence.format(variant.label))
            with applied(self.model, variant) as model:
                yield model

        return self.read(computing, variants, pause, items)

    def _ask_before(self, pause: Show) -> None:
        """A base that cannot answer inside its own context is not asked at the target: it has
        nothing to lose there, and its wrong answers would teach nothing about distance."""
        self._ask(Variant(BASE, EXTENDED, self.snapshot), self.near, pause)
        near = self.models[BASE].items
        if near and share_of(near).value < CAN_DO:
            rows = self.training.rows
            plain = Rows(rows.documents, rows.strategy, rows.size, rows.seed, far_half=True)
            self.far, self.rows = (), self._with_short(plain)
            self.note(
                "no questions at the target: the base does not answer them inside its own context"
            )
        self._ask(self.variant(START, self.starts[self.start]), self.far, pause)

    def _ask(self, variant: Variant, items: Sequence[Item], pause: Show) -> None:
        sentence = f"asking {{}} {len(items)} questions"
        label = variant.label
        answers = self._measure(sentence, [variant], pause, items)[label].items
        self.models[label] = replace(self.models[label], items=answers)

    def learn(self) -> None:
        """Train the spectrum from its start. What was judged before a guard, or a loss that is no
        number, stays."""
        settings = self.settings
        model = self.model
        plan = self.starts[self.start]
        space = self.space(self.start)
        label = f"{FITTED}-{self.start}"
        place = self.folder / "steps" / self.start
        self.steps = JudgedSteps(place, self.judge, self.variant(STEP, plan))
        here = self.variant(label, self.plan_of(space.method, space.knobs()))
        with applied(model, here):
            reason = loss.why_not_sliced(model)
            if reason is not None:
                self.note(f"the loss needs whole logits: {reason}")
            self.check_jumps(model)
            spectrum.make_live(model, plan.sites, self.target, space)
            tail = self.judge.frame.tail_span(self.target)[0]
            learner = Learner(model, space, sliced=reason is None, tail=tail)
            self.say(
                f"fitting {self.needs.moving} numbers from {self.start}: "
                f"{settings.steps.value} steps of {settings.step_tokens} tokens"
            )
            judged = f"(from {self.start}); the steps judged before count"
            try:
                self.history = self.optimise(
                    label,
                    learner,
                    self.rows,
                    rows_per_step=settings.per_step,
                    row_tokens=settings.longest,
                    evaluate=partial(self._evaluate, space),
                )
                return
            except LeftGuards as error:
                self.note(f"stopped: {error} {judged}")
            except LossNotFinite as error:
                lower = "(a lower --learning-rate may go further)"
                self.note(f"stopped: {error.where} {judged} {lower}")
            finally:
                spectrum.remove(model)
                del learner
                gc.collect()
        last = trainer.last_checkpoint(self.folder / label)
        if last is not None:
            self.history = trainer.history_in(last, 0)

    def _evaluate(self, space: Space, _: Any, step: int) -> tuple[float, float]:
        """Read the held-out documents by the present spectrum, and keep it with its reading."""
        left = space.outside()
        if left is not None:
            raise LeftGuards(left)
        store = Store()
        self.model.eval()
        done = read_now(self.model, self.steps.variant, self.judge, store, self.show)
        if processes.is_main():
            self.steps.keep(step, space.knobs(), store)
        return rules.fit_loss(done, STEP), rules.tail_loss(done, STEP)

    def choose(self, pause: Show) -> Fitted | None:
        """The lowest step, if it beats the start surely and loses no retrieval."""
        if not processes.is_main():
            return None
        judged = self.steps.models()
        step, reason, plan = self._decide(pause, judged)
        self.note(reason)
        written = self._note_written(step, plan)
        measured = self.measured
        change = rules.far_change(measured, FITTED, START) if FITTED in self.models else None
        history = self.history
        steps = replace(measured, models=judged)
        return Fitted(
            output=self.output,
            objective=self,
            measurement=measured,
            plan=plan,
            kept=written,
            reason=reason,
            start=self.start,
            step=step,
            tokens=self.settings.step_tokens * history.steps,
            forward_tokens=self._tokens_read(len(judged)),
            method=plan.method,
            pair_factors=compression(plan.main.rope.spectrum, plan.main.wanted),
            attention_factor=plan.main.wanted.attention_factor,
            change=change,
            numbers=fit_numbers(measured),
            losses=history.losses,
            closed_forms={form: rules.far_loss(self.closed, form) for form in self.starts},
            judgements={int(step): rules.far_loss(steps, step) for step in steps.models},
            notes=self.notes,
        )

    def _decide(self, pause: Show, steps: dict[str, MeasuredModel]) -> Verdict:
        """Which step is written, why, and the plan of it; 0 is the start."""

        def keep_start(sentence: str) -> Verdict:
            return 0, f"{sentence}: the start is written", self.starts[self.start]

        if not steps:
            return keep_start("nothing was found to judge")
        everything = replace(self.measured, models=self.models | steps)
        step = int(rules.best_step(everything, steps, START))
        # Once more, by stock arithmetic from the config that is written.
        plan = self.plan_of(self.space(self.start).method, self.steps.knobs(step))
        variant = self.variant(FITTED, plan)
        said = f"reading them by the spectrum of step {step}, as its config says"
        try:
            self.models |= self._measure(said, [variant], pause)
        except NanInLogits as error:
            return keep_start(f"step {step}: {error}")
        self._ask(variant, self.far, pause)
        measured = self.measured
        change = fit_report.change_text(rules.far_change(measured, FITTED, START))
        if not rules.is_better(measured, FITTED, START):
            gain = rules.far_change(measured, START, FITTED)
            if gain.gains is None:
                why = f"not known whether a step is better than {self.start}"
                return keep_start(f"{why} over the far half ({gain.why_not_known})")
            why = f"no step is better than {self.start} by {MARGIN} nats a token or more"
            return keep_start(f"{why} ({change})")
        lost = rules.lost(measured, FITTED, START)
        if lost is not None:
            text = fit_report.share_text(lost)
            return keep_start(f"the fit answers fewer questions than {self.start} ({text})")
        return step, f"step {step} is kept: {change}", plan

    def _note_written(self, step: int, plan: Plan) -> str:
        """Tell what is to be known of the spectrum that is written; its label."""
        label = FITTED if step else START
        factors = compression(plan.main.rope.spectrum, plan.main.wanted)
        guarded = spectrum.held(factors, self.space(self.start).ceiling)
        if step and guarded:
            self.note(f"held at a guard: pair {', '.join(map(str, guarded))}")
        behind = rules.far_change(self.measured, label, BASE)
        if behind.ci95 is not None and behind.ci95[0] > 0:
            self.note(
                "truncating the text still beats it: the base, which sees only its last "
                f"{self.context} tokens, predicts the far half {behind.value:.4f} nats a token "
                "better"
            )
        distance = 0.0
        if "yarn" in self.starts:
            distance = rules.far_loss(self.closed, "yarn") - rules.far_loss(self.measured, label)
        if readers := fit_report.readers_note(plan, self.starts.get("yarn"), distance):
            self.note(readers)
        return label

    def write(self, result: Fitted, show: Show) -> None:
        folder = {f"fit/{name}": content for name, content in self.first_steps().items()}
        files = fit_report.fit_files(result) | folder
        writing.write_fitted(result, files, fit_report.fit_story(result), show)


def prepare(
    model: str, source: str, options: Fit, revision: str | None = None, named: str = ""
) -> SpectrumObjective:
    """Read model, tokenizer and data; settle what moves and from where. `named` is what the user
    calls the model, where that is a GGUF and this a directory made of it."""
    if processes.is_fsdp():
        raise UsageError(
            "fit trains a few numbers, so there is nothing to shard; launch it with DDP, not FSDP "
            "(the configs are in ropext.training.launch)"
        )
    snapshot = open_snapshot(model, revision=revision)
    if named not in ("", model):
        snapshot = open_model(named).stands_for(snapshot)
    within, starts = choose_starts(snapshot, options)
    plan = next(iter(starts.values()))
    if plan.model.masked_lm:
        raise UnsupportedModel(
            f"{model} is a masked language model ({plan.model.model_type}); fit reads causal ones"
        )
    plan.require_help()
    check_geometry(plan)
    snapshot = with_weights(snapshot)
    pairs = plan.main.rope.dim // 2
    settings = defaults.fit_settings(options, plan.context, plan.target, pairs)
    length = settings.row_tokens.value
    per_step = settings.rows.value
    processes.check_rows(per_step, length, options.keep_short)
    beyond = plan.main.rope.spectrum.short_context or 0
    strategy = strategy_of(options, length, plan.target, beyond)
    encoder = corpus.DocumentEncoder(
        load_tokenizer(snapshot, False), plan.model.vocab_size, options.seed
    )
    enough = max(options.steps * max(options.batch_tokens, plan.target), FEWEST * plan.target)
    apart = kept_out_of(read_record(snapshot.directory))
    read = data.read_for_fit(source, options, encoder, plan.target, enough, apart)
    questions, (near, far), notes = _questions(encoder, read, options, plan, strategy)
    notes += read.unread
    if warning := few(read.held_out):
        notes.append(warning)
    if options.packing == "glued":
        notes.append(
            f"documents were joined (--packing glued): intervals are over {len(read.held_out)} "
            "windows of joined held-out documents, no two of which share a document"
        )
    count = per_step * options.steps
    training = Training(
        snapshot=snapshot,
        options=options,
        context=plan.context,
        target=plan.target,
        settings=settings,
        data=read,
        encoder=encoder,
        rows=Rows(read.documents, strategy, count, options.seed, questions, far_half=True),
        judge=judge_of(read.held_out, (plan.context, plan.target), options.seed, encoder.bos),
        chooses_step=True,
    )
    return SpectrumObjective(training, options, within, starts, notes, near, far)


def _questions(
    encoder: corpus.DocumentEncoder,
    read: TrainingData,
    options: Fit,
    plan: Plan,
    strategy: Full | Pose,
) -> tuple[FitQuestions | None, list[list[Item]], list[str]]:
    """What rows ask, what is asked before and after (inside the context, and at the target), and
    why nothing is."""
    share = options.retrieval_share
    count = options.retrieval_items
    lengths = plan.context, plan.target
    if not share and not count:
        return None, [[], []], []
    questions = FitQuestions(encoder, read.documents, strategy, options.seed, share)
    if (reason := questions.why_none(min(lengths))) is not None:
        return None, [[], []], [f"retrieval is left out: {reason}"]
    check_amount(count * sum(lengths), "give fewer --retrieval-items")
    return questions, [questions.measured(at, count) if count else [] for at in lengths], []
