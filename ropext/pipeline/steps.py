"""Define the stages of a run that do not train, and list all stages in their order."""

from pathlib import Path

from ropext.base.atomic import write_bytes
from ropext.base.jsontext import JsonObject, digest, dump
from ropext.base.lengths import doubling_grid, lengths_text
from ropext.base.locks import release
from ropext.base.workdir import Flat
from ropext.files.checkpoint.provenance import installed
from ropext.options.evaluate import Evaluate
from ropext.options.fields import EVALUATE, EXTEND
from ropext.pipeline.extending import warned, write_extension
from ropext.pipeline.recipe import PLAN
from ropext.pipeline.stage import CheckpointStage, Stage
from ropext.pipeline.training_stages import FinetuneStage, FitStage
from ropext.pipeline.work import RunContext
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
        return {"plan": self.work.hashes.of(self.path)} if self.path.is_file() else None

    def do(self) -> None:
        """Write the plan of a run, and print its warnings."""
        warned(self.work.plan, self.work.say)
        write_bytes(self.path, dump(self.work.plan.to_json()))

    def clear(self) -> None:
        """Delete the plan that an earlier run of the recipe wrote."""
        self.path.unlink(missing_ok=True)

    def counts(self) -> JsonObject:
        """Return the entry of the plan in a dry run: method, context, target and factor. Print the
        plan's warnings."""
        plan = self.work.plan
        warned(plan, self.work.call.hooks.say)
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
            "base": work.hashes.of_model(work.whole_base),
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
        """Return the entry of the extension in a dry run: the bytes of weights, how they are
        written, and whether the result is verified."""
        base = self.work.base
        total = sum(base.files[file] for file in base.weight_files)
        if not total:
            return {"what": "the weights, fetched from the hub first"}
        writing = self.work.recipe.extend
        how = {"copy": "copied", "hard": "hard-linked", "symlink": "linked"}[writing.link]
        proof = "not verified" if writing.no_verify else "verified with transformers"
        return {"what": f"{bytes_text(total)} of weights {how}, {proof}", "bytes": total}


class EvaluateStage(Stage):
    """The stage that evaluates all checkpoints."""

    name = EVALUATE
    schema = Evaluate.key_schema + 1  # the base answers the questions, too
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
        return {"results": self.work.hashes.of(self.results)} if whole else None

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
        what = [f"at most {options.max_docs} documents"] if options.data else []
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
