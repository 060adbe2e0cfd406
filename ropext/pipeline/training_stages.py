"""Define the stages of a run that train: a fit of the spectrum, and a LoRA."""

from ropext.base.jsontext import JsonObject, digest
from ropext.base.workdir import Flat
from ropext.options.fields import EXTEND, FINETUNE, FIT
from ropext.options.training import Finetune, Fit, TrainingOptions
from ropext.pipeline.stage import CheckpointStage, section_key


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
        base = {"base": work.hashes.of_model(work.whole_base)}
        base |= section_key(FIT, self.options, work.hashes)
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
    """Return the estimated work of a training, by its options alone."""
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
