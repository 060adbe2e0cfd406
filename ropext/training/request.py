"""Request a training, and turn the request into its objective."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ropext.base import guard
from ropext.base.narration import Call
from ropext.base.workdir import beside, check_unlocked
from ropext.evaluation.corpus import Source, require_data
from ropext.models.dequantising import directory_of
from ropext.models.load import silenced
from ropext.options.fields import Texts, reads
from ropext.options.training import Finetune, Fit

if TYPE_CHECKING:  # at run time only one of the two is imported
    from ropext.training.finetune import AdapterObjective
    from ropext.training.objective import Finish
    from ropext.training.spectrum_objective import SpectrumObjective


@dataclass(frozen=True)
class FinetuneRequest:
    """An extended checkpoint that is to be trained."""

    directory: str
    data: str  # a place, or the texts themselves
    options: Finetune

    @contextmanager
    def prepared(self, output: Path | None, call: Call) -> Iterator["AdapterObjective"]:
        """Open the checkpoint to fine-tune, read the documents, choose the settings, and yield
        the objective."""
        _check_output_guard({"DIR": self.directory}, self.data, self.options, output)
        require_data(Source(self.data))
        if self.options.evaluate is not None:
            require_data(Source(self.options.evaluate, flag="--eval"))
        from ropext.training import finetune  # late: a wrong path is refused before torch is loaded

        with silenced():
            yield finetune.prepare_finetune(self.directory, self.data, self.options)


@dataclass(frozen=True)
class FitRequest:
    """A model whose spectrum is to be fitted."""

    model: str
    data: str  # a place, or the texts themselves
    options: Fit
    revision: str | None = None
    finish: "Finish | None" = None  # adds to the output, before that has its name

    @contextmanager
    def prepared(self, output: Path | None, call: Call) -> Iterator["SpectrumObjective"]:
        """Open the model to fit, read the documents, choose the settings, and yield the
        objective. A GGUF is opened as a temporary directory of its weights."""
        _check_output_guard({"MODEL": self.model}, self.data, self.options, output)
        require_data(Source(self.data))
        from ropext.training import fit  # late, as above

        with silenced(), directory_of(self.model, call.hooks.say) as place:
            objective = fit.prepare_fit(
                place, self.data, self.options, self.revision, named=self.model
            )
            objective.finish = self.finish
            yield objective


def _check_output_guard(
    subject: guard.Named, data: str, options: Finetune | Fit, output: Path | None
) -> None:
    """Refuse an output of `finetune` or `fit` that would write over, into or around one of its
    inputs."""
    if output is None:
        return
    documents = None if isinstance(data, Texts) else data
    named = reads(dict(options), type(options))
    guard.check(
        {**subject, "--data": documents, **named},
        {"--output": output, "where the run works": beside(output)},
    )
    check_unlocked(output)
