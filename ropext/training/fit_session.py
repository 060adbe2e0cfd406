"""One fit, once everything about it is settled: measure the starts, fit, judge, write."""

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ropext.checkpoint.staging import check_output
from ropext.errors import Interrupted
from ropext.evaluation.forward import NanInLogits
from ropext.evaluation.loading import memory_errors
from ropext.narration import Say, Show, pausing, told, told_of_files
from ropext.patching import apply_config, unpatch
from ropext.planning import Plan, make_plan
from ropext.results.perplexity import Reading
from ropext.results.retrieval import ItemScore
from ropext.results.values import Value
from ropext.training import (
    engine,
    evaluating,
    fit_showing,
    fit_writing,
    loading,
    searching,
    spectrum,
)
from ropext.training.engine import History, Job, LossNotFinite
from ropext.training.fit_judging import Steps, Verdict, keep_scores, kept_scores, read_long
from ropext.training.fit_writing import BASE, FITTED, START, Fitted
from ropext.training.fitting import PlannedFit, engine_options
from ropext.training.learner import Learner, LeftGuards
from ropext.training.loss import why_not_sliced
from ropext.training.run import is_main
from ropext.training.session import writing_errors

OUT_OF_MEMORY = (
    "out of memory; three options help most: --micro-rows 1, --dtype bfloat16, and a smaller "
    "--factor. The last checkpoint is kept"
)


# Base, start, which is kept, what was fitted, the plan that is written, how the training went.
Found = tuple[Reading, str, Verdict, Reading | None, Plan, History]


@dataclass
class FitSession:
    """The state of one process of a fit."""

    planned: PlannedFit
    folder: Path
    output: Path
    force: bool
    command: Sequence[str]
    say: Say

    def __post_init__(self) -> None:
        self.prepared = self.planned.prepared
        self.options = engine_options(self.prepared.options)
        self.judge = self.prepared.judge
        self.notes: list[str] = []
        self.show = told(self.say)
        self.steps = Steps(self.folder / "steps")
        self.closed: dict[str, Reading] = {}
        self.scores: dict[str, list[ItemScore]] = {}
        self.trials: list[searching.Trial] = []
        overlap = self.prepared.overlap
        for note in (*self.prepared.notes, *([overlap.sentence] if overlap else [])):
            if note:
                self._note(note)

    def _note(self, sentence: str) -> None:
        self.notes.append(sentence)
        self.say(sentence)

    def run(self) -> Fitted | None:
        """The result; None in all processes but the first."""
        try:
            with memory_errors(OUT_OF_MEMORY), writing_errors(self.folder):
                found = self._found()
        except KeyboardInterrupt:
            raise Interrupted(
                f"interrupted; what is finished is kept in {self.folder}, and the same command "
                "goes on from there"
            ) from None
        if found is None:
            return None
        with writing_errors(self.output):
            return self._finish(*found)

    def _found(self) -> Found | None:
        """All that decides what is written; None in all processes but the first."""
        model = loading.load(self.prepared.base.snapshot, self.options)
        model.requires_grad_(False)
        with pausing(self.say, self.show) as pause:
            base, start = self._before(model, pause)
            searched = self._search(model, start, pause) if self.planned.search else None
        history = searched or self._fit(model, start)
        if not is_main():
            return None
        with pausing(self.say, self.show) as pause:
            return base, start, *self._decide(model, start, history, pause), history

    def _before(self, model: Any, pause: Show) -> tuple[Reading, str]:
        """The base through its short window, every start, and the best of these."""
        judge, folder = self.judge, self.folder / "readings"
        count = len(judge.judge.documents)
        base = evaluating.kept(folder, BASE)
        if base is None:
            self.say(f"reading {count} held-out documents by the base")
            with torch.no_grad():
                base = judge.judge.read_short(model, BASE, pause)
            self._keep(folder, base)
        for method, plan in self.prepared.starts.items():
            found = evaluating.kept(folder, method)
            if found is None:
                self.say(f"reading them by {method}")
                apply_config(model, plan.config)
                found = read_long(judge, model, method, pause)
                self._keep(folder, found)
            self.closed[method] = found
        losses = {method: judge.loss(reading) for method, reading in self.closed.items()}
        allowed = {m: loss for m, loss in losses.items() if self._outside(m) is None} or losses
        start = min(allowed, key=lambda method: allowed[method])
        if len(losses) > 1:
            shown = ", ".join(f"{method} {loss:.4f}" for method, loss in losses.items())
            self.say(f"far half, nats a token: {shown}; starting from {start}")
        unpatch(model)
        self._ask(BASE, model, judge.near, pause)
        self._without_answers()
        apply_config(model, self.prepared.starts[start].config)
        self._ask(START, model, self.judge.far, pause)
        return base, start

    def _keep(self, folder: Path, reading: Reading) -> None:
        if is_main():
            evaluating.keep(folder, reading)

    def _outside(self, method: str) -> str | None:
        """Why a closed form cannot be the start: it lies outside of the guards."""
        prepared = self.prepared
        space = spectrum.space_of(
            prepared.within, prepared.starts[method].main, prepared.plan.target, prepared.ceiling
        )
        return space.outside()

    def _ask(self, label: str, model: Any, items: Sequence[Any], pause: Show) -> None:
        path = self.folder / "readings" / f"{label}-items.json"
        found = kept_scores(path)
        if found is None:
            if items:
                self.say(f"asking {label} {len(items)} questions")
            with torch.no_grad():
                found = self.judge.ask(model, items, pause)
            if is_main():
                keep_scores(path, found)
        self.scores[label] = found

    def _search(self, model: Any, start: str, pause: Show) -> History:
        """Try knobs on the documents to fit on; the best of them is judged as a step would be."""
        space, file = self._space_method(start), self.folder / "trials.json"
        passages = searching.passages(self.prepared.documents.fitted, self.prepared.plan.target)
        search = searching.Search(space, passages, self.judge.frame.bootstrap, file, self.say)
        scorer = self.judge.judge.scorer(model)

        def apply(knobs: Mapping[str, Any]) -> None:
            apply_config(model, self._plan(space.method, dict(knobs)).config)

        self.trials = search.run(searching.measuring(scorer, apply, passages, pause))
        self._note(search.summary())
        step = max(k for k, trial in enumerate(self.trials) if trial.taken)
        if step:
            apply(space.knobs())
            reading = read_long(self.judge, model, "step", pause)
            if is_main():
                self.steps.keep(step, space.knobs(), reading)
        return History()

    def _fit(self, model: Any, start: str) -> History:
        """Train the spectrum; stopped at a guard or at a loss that is no number, what was judged
        before that stays."""
        prepared = self.prepared
        plan = prepared.starts[start]
        space = spectrum.space_of(prepared.within, plan.main, plan.target, prepared.ceiling)
        apply_config(model, self._plan_of(space).config)
        reason = why_not_sliced(model)
        if reason is not None:
            self._note(f"the loss needs whole logits: {reason}")
        spectrum.make_live(model, plan.sites, plan.target, space)
        learner = Learner(model, space, sliced=reason is None)
        job = Job(
            model=learner,
            rows=prepared.rows,
            rows_per_step=prepared.rows.per_step,
            row_tokens=plan.target,
            padding=prepared.padding,
            settings=prepared.settings,
            options=self.options,
            folder=self.folder / FITTED,
            dtype=loading.dtype(self.options, loading.device(self.options)),
            evaluate=self._evaluation(learner),
            recompute=self.planned.estimate.recompute,
        )
        settings = prepared.settings
        self.say(
            f"fitting {self.planned.moving} numbers from {start}: {settings.steps.value} steps of "
            f"{prepared.rows.tokens // settings.steps.value} tokens"
        )
        try:
            return engine.train(job, self.say)
        except LeftGuards as error:
            self._note(f"stopped: {error}; the steps judged before count")
        except LossNotFinite as error:
            self._note(
                f"stopped: {error.where}; the steps judged before count (a lower --learning-rate "
                "may go further)"
            )
        finally:
            spectrum.remove(model)
            del job, learner
            gc.collect()
        last = engine.last_checkpoint(self.folder / FITTED)
        return History() if last is None else engine.history_in(last, 0)

    def _without_answers(self) -> None:
        """A base that cannot answer inside its own context is not asked at the target: it has
        nothing to lose there, and its wrong answers would teach nothing about distance."""
        if not self.judge.near or self.judge.answers(self.scores[BASE]):
            return
        self.judge = replace(self.judge, far=())
        self.prepared.rows.questions = None
        self._note(
            "no questions at the target: the base does not answer them inside its own context"
        )

    def _plan_of(self, space: spectrum.Space) -> Plan:
        return self._plan(space.method, space.knobs())

    def _plan(self, method: str, knobs: dict[str, Any]) -> Plan:
        base = self.prepared.base
        options = self.prepared.options.extend(method, **knobs)
        return make_plan(base.snapshot.config, options, base.snapshot.name)

    def _evaluation(self, learner: Learner) -> engine.Evaluate:
        def evaluate(model: Any, step: int) -> float:
            reason = learner.space.outside()
            if reason is not None:
                raise LeftGuards(reason)
            learner.model.eval()
            reading = read_long(self.judge, learner.model, "step", self.show)
            if is_main():
                self.steps.keep(step, learner.space.knobs(), reading)
            return self.judge.loss(reading)

        return evaluate

    def _decide(
        self, model: Any, start: str, history: History, pause: Show
    ) -> tuple[Verdict, Reading | None, Plan]:
        """The lowest step, if it beats the start surely and loses no retrieval."""
        judge, before = self.judge, self.closed[start]
        closed = self.prepared.starts[start]
        found = self.steps.found()
        if not found:
            sentence = "nothing was found to judge: the start is written"
            return Verdict(START, 0, sentence), None, closed
        step = min(found, key=lambda number: judge.loss(found[number]))
        space = self._space_method(start)
        plan = self._plan(space.method, self.steps.knobs(step))
        # Once more, by stock arithmetic from the config that is written.
        apply_config(model, plan.config)
        what = "setting" if self.planned.search else "step"
        self.say(f"reading them by the spectrum of {what} {step}, as its config says")
        try:
            fitted = read_long(judge, model, FITTED, pause)
        except NanInLogits as error:
            return Verdict(START, 0, f"{what} {step}: {error}: the start is written"), None, closed
        self._ask(FITTED, model, judge.far, pause)
        change = judge.change(fitted, before)
        said = fit_showing.change_text(change)
        if not judge.better(fitted, before):
            sentence = f"no {what} is surely better than {start} ({said}): the start is written"
            return Verdict(START, 0, sentence), fitted, closed
        lost = judge.lost(self.scores[FITTED], self.scores[START])
        if lost is not None:
            sentence = (
                f"the fit answers fewer questions than {start} ({fit_showing.share_text(lost)}): "
                "the start is written"
            )
            return Verdict(START, 0, sentence), fitted, closed
        return Verdict(FITTED, step, f"{what} {step} is kept: {said}"), fitted, plan

    def _space_method(self, start: str) -> spectrum.Space:
        prepared = self.prepared
        plan = prepared.starts[start]
        return spectrum.space_of(prepared.within, plan.main, plan.target, prepared.ceiling)

    def _finish(
        self,
        base: Reading,
        start: str,
        verdict: Verdict,
        fitted: Reading | None,
        plan: Plan,
        history: History,
    ) -> Fitted:
        self._note(verdict.reason)
        held = spectrum.held(fit_showing.pair_factors(plan.main), self.prepared.ceiling)
        if verdict.kept == FITTED and held:
            self._note(f"held at a guard: pair {', '.join(map(str, held))}")
        readings = {BASE: base, START: self.closed[start]}
        if fitted is not None:
            readings[FITTED] = fitted
        done = self._fitted(readings, start, verdict, plan, history)
        self._write(done, fit_showing.files(done, self.judge, readings, self.closed))
        return done

    def _fitted(
        self,
        readings: Mapping[str, Reading],
        start: str,
        verdict: Verdict,
        plan: Plan,
        history: History,
    ) -> Fitted:
        """What was done, with its numbers."""
        judge = self.judge
        numbers = {
            label: judge.values(reading, readings[BASE], self.scores.get(label, ()))
            for label, reading in readings.items()
        }
        change: Value | None = None
        if FITTED in readings:
            change = judge.change(readings[FITTED], readings[START])
        return Fitted(
            output=self.output,
            plan=plan,
            kept=verdict.kept,
            reason=verdict.reason,
            start=start,
            steps=verdict.step,
            tokens=self.prepared.rows.tokens * history.steps // self.prepared.options.steps,
            numbers=numbers,
            change=None if change is None else change.to_json(),
            pair_factors=fit_showing.pair_factors(plan.main),
            attention_factor=plan.main.wanted.attention_factor,
            notes=tuple(self.notes),
            planned=self.planned,
            losses=tuple(history.losses),
            judgements={k: judge.loss(own) for k, own in self.steps.found().items()},
            trials=tuple(self.trials),
        )

    def _write(self, done: Fitted, extras: dict[str, bytes]) -> None:
        check_output(self.output, force=self.force, inputs=[self.prepared.base.snapshot.directory])
        self.say("writing, and proving what stock transformers builds from it")
        try:
            fit_writing.write(
                done, extras, self.command, force=self.force, show=told_of_files(self.say)
            )
        except KeyboardInterrupt as error:
            raise Interrupted(
                f"interrupted; the fit is kept in {self.folder}, and the same command writes it"
            ) from error
