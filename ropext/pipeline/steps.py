"""The stages of a run: what decides each, what it leaves, how it is done, and what it takes."""

import time
from abc import abstractmethod
from dataclasses import replace
from pathlib import Path
from typing import Any

from ropext.atomic import write_bytes
from ropext.checkpoint.provenance import (
    TRAINED_ON,
    digest,
    read_record,
    rewrite,
)
from ropext.checkpoint.staging import recover, remove_output
from ropext.jsontext import JsonObject, dump
from ropext.lengths import doubling_grid, lengths_text
from ropext.options.evaluate import Evaluate
from ropext.options.extend import Extend
from ropext.options.fields import (
    CONTENT,
    EVALUATE,
    EXTEND,
    FILES,
    FINETUNE,
    FIT,
    NUMBERS,
    Options,
)
from ropext.options.recipe import PLAN
from ropext.options.training import Finetune, Fit, TrainingOptions
from ropext.pipeline.extending import warned, write_extension
from ropext.pipeline.hashes import Hashes
from ropext.pipeline.work import USED, Work
from ropext.report.text import size
from ropext.results.metrics import TEXT_METRICS, WHOLE_METRICS
from ropext.results.overlap import both, from_json, trained_in
from ropext.scaling import is_function
from ropext.workdir import Flat, Step, beside, release, remove


def section_key(name: str, options: Options | None, hashes: Hashes, *words: str) -> Flat:
    """What a section decides (if not said otherwise numbers and files), by dotted key; of what it
    names the content."""
    if options is None:
        return {}
    how: dict[str, Any] = {"mode": "json", "by_alias": True, "exclude_none": True}
    key = options.deciding(*words or (NUMBERS, FILES), **how)
    key |= {k: hashes.of_data(place) for k, place in options.deciding(CONTENT, **how).items()}
    return {f"{name}.{k}": value for k, value in key.items() if value != []}


class Stage(Step):
    """A stage of a run."""

    def __init__(self, work: Work) -> None:
        self.work = work

    @abstractmethod
    def counts(self) -> JsonObject:
        """Count what it takes, by the options alone: a sentence under `what`, the numbers behind
        it."""

    @abstractmethod
    def do(self) -> None:
        """Do it, and leave what `look` finds."""

    def make(self) -> None:
        """Do it, and log how long it took."""
        begun = time.monotonic()
        self.do()
        self.work.note(f"{self.name}: took {time.monotonic() - begun:.1f} s")

    def section(self) -> Flat:
        """What the section of this name decides."""
        return section_key(self.name, getattr(self.work.recipe, self.name), self.work.hashes)


class PlanStage(Stage):
    """The plan."""

    name = PLAN
    schema = 1

    @property
    def path(self) -> Path:
        """Where it lies."""
        return self.work.folder / "plan.json"

    def key(self) -> Flat:
        wish = Extend(**self.work.recipe.request).model_dump(exclude_none=True)
        values = {f"extend.{name}": value for name, value in wish.items()}
        if is_function(str(wish.get("method"))):  # what it computes now
            spectra = [site.wanted.digest() for site in self.work.plan.sites]
            values["extend.method.spectra"] = digest(spectra)
        return {"config": digest(self.work.base.config)} | values

    def look(self) -> Flat | None:
        return {"plan": self.work.hashes.of(self.path)} if self.path.is_file() else None

    def do(self) -> None:
        warned(self.work.plan, self.work.say)
        write_bytes(self.path, dump(self.work.plan.to_json()))

    def clear(self) -> None:
        self.path.unlink(missing_ok=True)

    def counts(self) -> JsonObject:
        plan = self.work.plan
        warned(plan, self.work.call.hooks.say)
        what = f"{plan.method}: {plan.context:,} to {plan.target:,} tokens (factor {plan.factor:g})"
        return {"what": what, "context": plan.context, "target": plan.target, "method": plan.method}


class CheckpointStage(Stage):
    """A stage that makes a checkpoint. After a choice of the method its record holds which
    documents chose, and which will give the verdict."""

    schema = 1

    @property
    def place(self) -> Path:
        """Where its checkpoint is."""
        return self.work.checkpoint(self.name)

    @abstractmethod
    def content(self) -> Flat:
        """What decides the checkpoint."""

    @abstractmethod
    def write(self) -> None:
        """Make it."""

    @property
    def used(self) -> Any:
        """Which documents a choice used."""
        choice = self.work.recipe.source.choice
        return choice and choice[USED]

    def key(self) -> Flat:
        if self.used:
            return self.content() | {USED: digest(self.used)}
        return self.content()

    def look(self) -> Flat | None:
        return self.work.left(self.name)

    def do(self) -> None:
        self.write()
        if self.used and (record := read_record(self.place)) is not None:
            known = both(trained_in(record), from_json(self.used))
            more = dict(record.more) | {TRAINED_ON: known and known.to_json()}
            rewrite(replace(record, more=more), self.place)

    def clear(self) -> None:
        remove(beside(self.place))  # a training's own checkpoints, of other weights or settings
        remove_output(self.place)

    def tidy(self) -> None:
        remove(beside(self.place))
        release(beside(self.place), self.place)
        recover(self.place)


class ExtendStage(CheckpointStage):
    """The extended checkpoint."""

    name = EXTEND

    def content(self) -> Flat:
        work = self.work
        writing = work.recipe.extend
        return {
            "base": work.hashes.of_model(work.whole_base),
            "config": digest(work.plan.config),
            "extend.link": writing.link,
            "extend.no_verify": writing.no_verify,
            "extend.hash": writing.hash,
            "output": work.output.name,
        }

    def write(self) -> None:
        work = self.work
        write_extension(
            work.whole_base, work.plan, self.place, work.recipe.extend, work.call_of_stages
        )

    def counts(self) -> JsonObject:
        base = self.work.base
        total = sum(base.files[file] for file in base.weight_files)
        if not total:
            return {"what": "the weights, fetched from the hub first"}
        writing = self.work.recipe.extend
        how = {"copy": "copied", "hard": "hard-linked", "symlink": "linked"}[writing.link]
        proof = "not proved" if writing.no_verify else "proved by stock transformers"
        return {"what": f"{size(total)} of weights {how}, {proof}", "bytes": total}


class FitStage(CheckpointStage):
    """The checkpoint with a fitted spectrum."""

    name = FIT
    schema = 2  # from one start, at one rate
    everyone = True

    @property
    def options(self) -> Fit:
        """With what the extension says of it."""
        return Fit(**self.work.recipe.fitting)

    def content(self) -> Flat:
        work = self.work
        base = {"base": work.hashes.of_model(work.whole_base)}
        base |= section_key(FIT, self.options, work.hashes)
        return self.section() | base | {"config": digest(work.base.config)}

    def write(self) -> None:
        from ropext.training.request import FitRequest

        base = self.work.base
        revision = base.commit if base.is_on_hub else None
        data = str(self.work.recipe.options(FIT)["data"])
        call = self.work.call_of_stages
        request = FitRequest(base.name, data, self.options, revision)
        with request.prepared(self.place, call) as training:
            training.make(self.place, call)

    def counts(self) -> JsonObject:
        assert self.work.recipe.fit is not None
        return _training_takes(self.work.recipe.fit)


class FinetuneStage(CheckpointStage):
    """The tuned checkpoint."""

    name = FINETUNE
    everyone = True

    @property
    def source(self) -> str:
        """The stage whose checkpoint is trained."""
        return FIT if FIT in self.work.recipe.stages else EXTEND

    def content(self) -> Flat:
        return self.section() | (self.work.left(self.source) or {})

    def write(self) -> None:
        from ropext.training.request import FinetuneRequest

        data = str(self.work.recipe.options(FINETUNE)["data"])
        call = self.work.call_of_stages
        options = Finetune(**self.work.recipe.finetuning)
        request = FinetuneRequest(str(self.work.checkpoint(self.source)), data, options)
        with request.prepared(self.place, call) as training:
            training.make(self.place, call)

    def counts(self) -> JsonObject:
        options = self.work.recipe.finetune
        assert options is not None
        return _training_takes(options, options.epochs)


def _training_takes(options: TrainingOptions, epochs: float | None = None) -> JsonObject:
    """Say what a training takes."""
    from ropext.training.defaults import MOST_STEPS

    steps = options.steps
    batch = options.batch_tokens
    what = f"{steps} steps"
    if steps is None:
        what = f"at most {MOST_STEPS} steps"
    if epochs is not None:
        what = f"{epochs:g} passes over the data"
    if batch is None:
        what += ", as many tokens a step as suit the model"
    else:
        what += f", {batch:,} tokens a step"
    return {"what": what, "steps": steps, "batch_tokens": batch}


class EvaluateStage(Stage):
    """The evaluation of all checkpoints."""

    name = EVALUATE
    schema = 2
    everyone = True

    @property
    def results(self) -> Path:
        """What it leaves."""
        return self.work.evaluation / "results.json"

    def key(self) -> Flat:
        work = self.work
        made = work.contents().items()
        contents = {f"checkpoint.{label}": content for label, content in made}
        lengths = {"context": work.plan.context, "limit": work.plan.target}
        # A metric that is added later is not in the results of an earlier run.
        names = [metric.name for metric in TEXT_METRICS + WHOLE_METRICS]
        return self.section() | contents | lengths | {"metrics": ",".join(names)}

    def look(self) -> Flat | None:
        whole = self.results.is_file() and (self.work.evaluation / "report.html").is_file()
        return {"results": self.work.hashes.of(self.results)} if whole else None

    def do(self) -> None:
        from ropext.evaluation.preparing import prepare
        from ropext.evaluation.session import EvaluationJob

        work = self.work
        call = work.call_of_stages
        options = Evaluate(**work.recipe.evaluation)
        evaluation = prepare(options, work.lineup(), call.trust_remote_code, work.gates)
        evaluation.tell_warnings(work.say)
        EvaluationJob(evaluation, work.gates).make(work.evaluation, call)

    def clear(self) -> None:
        # What was read of models that are still the same stays, and is not read again.
        self.results.unlink(missing_ok=True)

    def tidy(self) -> None:
        release(self.work.evaluation, self.work.evaluation)

    def counts(self) -> JsonObject:
        work = self.work
        options = work.recipe.evaluate
        assert options is not None
        lengths = options.lengths or doubling_grid(work.plan.context, work.plan.target)
        what = [f"at most {options.max_docs} documents"] if options.data else []
        what += [f"{options.items} questions of {task} at each depth" for task in options.tasks]
        said = f"{', '.join(what)}; at {lengths_text(lengths)}; by {', '.join(work.labels)}"
        return {"what": said, "lengths": list(lengths), "models": list(work.labels)}


STAGE_KINDS = (PlanStage, ExtendStage, FitStage, FinetuneStage, EvaluateStage)


def stages_of(work: Work) -> list[Stage]:
    """Return all stages of a run but the report, in their order."""
    return [stage(work) for stage in STAGE_KINDS if stage.name in work.recipe.stages]
