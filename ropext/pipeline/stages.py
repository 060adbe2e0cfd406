"""Define the stages of a run before its report, and list them in their order."""

from pathlib import Path

from ropext.base.atomic import write_bytes
from ropext.base.jsontext import JsonObject, digest, dump
from ropext.base.lengths import doubling_grid, lengths_text
from ropext.base.locks import release
from ropext.base.workdir import Flat
from ropext.files.checkpoint.provenance import installed
from ropext.options.evaluate import Evaluate
from ropext.options.fields import EVALUATE, EXTEND, FINETUNE, FIT
from ropext.options.training import Finetune, Fit, TrainingOptions
from ropext.pipeline.extending import tell_plan_warnings, write_extension
from ropext.pipeline.recipe import PLAN
from ropext.pipeline.run_context import RunContext
from ropext.pipeline.stage import CheckpointStage, Stage, section_key
from ropext.results.metrics import TEXT_METRICS, WHOLE_METRICS
from ropext.results.report.text import bytes_text
from ropext.scaling import is_function
from ropext.tasks import OwnTask


class PlanStage(Stage):
    """The stage that writes the plan."""

    name = PLAN
    schema = 1

    @property
    def path(self) -> Path:
        """Return the path of the plan."""
        return self.work.folder / "plan.json"

    def key(self) -> Flat:
        """Return everything that decides the plan of a run: the base's config and the options."""
        wish = self.work.recipe.extend_options().model_dump(exclude_none=True)
        values = {f"extend.{name}": value for name, value in wish.items()}
        if is_function(str(wish.get("method"))):  # the code of the function may have changed
            spectra = [site.wanted.digest() for site in self.work.plan.sites]
            values["extend.method.spectra"] = digest(spectra)
        return {"config": digest(self.work.base.config)} | values

    def look(self) -> Flat | None:
        """Return the digest of the run's plan.json, or None if it is missing."""
        return {"plan": self.work.digests.of(self.path)} if self.path.is_file() else None

    def do(self) -> None:
        """Write the plan of a run, and print its warnings."""
        tell_plan_warnings(self.work.plan, self.work.say)
        write_bytes(self.path, dump(self.work.plan.to_json()))

    def clear(self) -> None:
        """Delete the plan that an earlier run of the recipe wrote."""
        self.path.unlink(missing_ok=True)

    def counts(self) -> JsonObject:
        """Return the entry of the plan in a dry run: method, context, target and factor. Print the
        plan's warnings."""
        plan = self.work.plan
        tell_plan_warnings(plan, self.work.call.hooks.say)
        what = f"{plan.method}: {plan.context:,} to {plan.target:,} tokens (factor {plan.factor:g})"
        return {"what": what, "context": plan.context, "target": plan.target, "method": plan.method}


class ExtendStage(CheckpointStage):
    """The stage that writes the extended checkpoint."""

    name = EXTEND

    def content(self) -> Flat:
        """Return everything that decides the extended checkpoint of a run."""
        work = self.work
        writing = work.recipe.extend
        return {
            "base": work.digests.of_model(work.whole_base),
            "config": digest(work.plan.config),
            "extend.link": writing.link,
            "extend.no_verify": writing.no_verify,
            "extend.hash": writing.hash,
            "output": work.output.name,
        }

    def write(self) -> None:
        """Write the extended checkpoint of a run."""
        work = self.work
        write_extension(
            work.whole_base, work.plan, self.place, work.recipe.extend, work.call_of_stages
        )

    def counts(self) -> JsonObject:
        """Return the entry of the extension in a dry run. It has the bytes of weights, how they are
        written, and whether the result is verified."""
        base = self.work.base
        total = sum(base.files[file] for file in base.weight_files)
        if not total:
            return {"what": "the weights, fetched from the hub first"}
        writing = self.work.recipe.extend
        how = {"copy": "copied", "hard": "hard-linked", "symlink": "linked"}[writing.link]
        proof = "not verified" if writing.no_verify else "verified with transformers"
        return {"what": f"{bytes_text(total)} of weights {how}, {proof}", "bytes": total}


class FitStage(CheckpointStage):
    """The stage that writes the checkpoint with a fitted spectrum."""

    name = FIT
    schema = Fit.key_schema
    everyone = True

    @property
    def options(self) -> Fit:
        """Return the fit's options, completed by the options of the extension."""
        return self.work.recipe.fit_options()

    def content(self) -> Flat:
        """Return everything that decides the fitted checkpoint of a run."""
        work = self.work
        base = {"base": work.digests.of_model(work.whole_base)}
        base |= section_key(FIT, self.options, work.digests)
        return self.section() | base | {"config": digest(work.base.config)}

    def write(self) -> None:
        """Run the fit stage of a recipe, and write its checkpoint."""
        from ropext.training.request import TrainingRequest

        base = self.work.base
        revision = base.commit if base.is_on_hub else None
        data = str(self.work.recipe.options(FIT)["data"])
        call = self.work.call_of_stages
        request = TrainingRequest(base.name, data, self.options, revision)
        with request.prepared(self.place, call) as training:
            training.make(self.place, call)

    def counts(self) -> JsonObject:
        """Return the entry of the fit in a dry run: its steps, and the tokens of each step."""
        assert self.work.recipe.fit is not None
        return _training_counts(self.work.recipe.fit)


class FinetuneStage(CheckpointStage):
    """The stage that writes the fine-tuned checkpoint."""

    name = FINETUNE
    schema = Finetune.key_schema
    everyone = True

    @property
    def starts_from(self) -> tuple[str, ...]:
        """Return the stage whose checkpoint the finetune stage of a recipe trains."""
        return (FIT if FIT in self.work.recipe.stages else EXTEND,)

    def content(self) -> Flat:
        """Return everything that decides the fine-tuned checkpoint of a run."""
        (source,) = self.starts_from
        return self.section() | (self.work.checkpoint_digest(source) or {})

    def write(self) -> None:
        """Run the finetune stage of a recipe, and write its checkpoint."""
        from ropext.training.request import TrainingRequest

        data = str(self.work.recipe.options(FINETUNE)["data"])
        call = self.work.call_of_stages
        options = self.work.recipe.finetune_options()
        (source,) = self.starts_from
        request = TrainingRequest(str(self.work.checkpoint(source)), data, options)
        with request.prepared(self.place, call) as training:
            training.make(self.place, call)

    def counts(self) -> JsonObject:
        """Return the entry of the fine-tuning in a dry run: its steps, and the tokens of each
        step."""
        options = self.work.recipe.finetune
        assert options is not None
        return _training_counts(options, options.epochs)


def _training_counts(options: TrainingOptions, epochs: float | None = None) -> JsonObject:
    """Return the estimated work of a recipe's fit or finetune stage, by its options alone."""
    from ropext.training.defaults import MOST_STEPS

    steps = options.steps
    batch = options.batch_tokens
    what = f"{steps} steps"
    if steps is None:
        what = f"at most {MOST_STEPS} steps"
    if epochs is not None:
        what = f"{epochs:g} passes over the data"
    if batch is None:
        what += ", tokens per step by the size of the model"
    else:
        what += f", {batch:,} tokens per step"
    return {"what": what, "steps": steps, "batch_tokens": batch}


class EvaluateStage(Stage):
    """The stage that evaluates all checkpoints."""

    name = EVALUATE
    schema = Evaluate.key_schema + 2  # the base answers too; RULER's examples in cwe and vt
    everyone = True

    @property
    def starts_from(self) -> tuple[str, ...]:
        """Return the stages whose checkpoints a run evaluates."""
        return self.work.checkpoint_stages

    @property
    def results(self) -> Path:
        """Return the path of the results."""
        return self.work.evaluation / "results.json"

    def key(self) -> Flat:
        """Return everything that decides the numbers of a run's evaluation."""
        from ropext.evaluation.evaluation import (
            LIBRARIES,  # late: a recipe without this stage needs none
        )

        work = self.work
        lengths = {"context": work.plan.context, "limit": work.plan.target}
        # A metric that is added later is not in the results of an earlier run.
        names = [metric.name for metric in TEXT_METRICS + WHOLE_METRICS]
        versions = {f"versions.{name}": number for name, number in installed(LIBRARIES).items()}
        key = self.section() | work.contents_key() | lengths | versions
        return key | {"metrics": ",".join(names)}

    def look(self) -> Flat | None:
        """Return the digest of the evaluation's results.json; None if the stage is not complete."""
        whole = self.results.is_file() and (self.work.evaluation / "report.html").is_file()
        return {"results": self.work.digests.of(self.results)} if whole else None

    def do(self) -> None:
        """Evaluate the checkpoints of a run."""
        from ropext.evaluation.request import prepare

        work = self.work
        call = work.call_of_stages
        options = work.recipe.evaluate_options()
        evaluation = prepare(options, work.lineup(), call.trust_remote_code, work.gates)
        evaluation.tell_warnings(work.say)
        evaluation.make(work.evaluation, call)

    def clear(self) -> None:
        """Delete results.json of an earlier evaluation in the run's folder."""
        # The token losses stay: a model that did not change is not read again.
        self.results.unlink(missing_ok=True)

    def tidy(self) -> None:
        """Delete the lock file that a kill left next to the run's evaluation."""
        release(self.work.evaluation, self.work.evaluation)

    def counts(self) -> JsonObject:
        """Return the entry of the evaluation in a dry run: documents, questions, lengths and
        models."""
        work = self.work
        options = work.recipe.evaluate
        assert options is not None
        lengths = options.lengths or doubling_grid(work.plan.context, work.plan.target)
        what = list[str]()
        if options.data:
            what.append(f"at most {options.max_docs} documents")
        questions = "1 question" if options.items == 1 else f"{options.items} questions"
        for task in options.tasks:
            if isinstance(task, OwnTask):
                what.append(f"the questions of {task.source_name}")
            else:
                what.append(f"{questions} of {task} at each depth")
        sentence = f"{', '.join(what)}; at {lengths_text(lengths)}; by {', '.join(work.labels)}"
        return {"what": sentence, "lengths": list(lengths), "models": list(work.labels)}


STAGE_KINDS = (PlanStage, ExtendStage, FitStage, FinetuneStage, EvaluateStage)


def stages_of(work: RunContext) -> list[Stage]:
    """Return all stages of a run but the report, in their order."""
    return [stage(work) for stage in STAGE_KINDS if stage.name in work.recipe.stages]
