"""Request a training, and turn the request into its objective."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ropext.base import guard
from ropext.base.locks import check_unlocked, run_folder
from ropext.base.narration import Call
from ropext.evaluation.corpus import Source, require_data
from ropext.models.dequantising import dequantised_directory
from ropext.models.load import silenced
from ropext.options.fields import Texts, places_read
from ropext.options.training import Finetune, Fit

if TYPE_CHECKING:  # at run time only one objective is imported
    from ropext.training.objective import Finish, TrainingObjective


@dataclass(frozen=True)
class TrainingRequest:
    """The wanted training: of an extended checkpoint (finetune), or of a model's spectrum (fit)."""

    model: str
    data: str  # a place, or the texts themselves
    options: Finetune | Fit
    revision: str | None = None
    finish: "Finish | None" = None  # adds to the output of a fit, before that has its name

    @contextmanager
    def prepared(self, output: Path | None, call: Call) -> Iterator["TrainingObjective[Any]"]:
        """Open the model to train, read the documents, choose the settings, and yield the
        objective. A fit opens a GGUF as a temporary directory of its weights. Refuse an output
        that would write over, into or around an input, or that another command is writing."""
        options = self.options
        if output is not None:
            subject = "DIR"
            if isinstance(options, Fit):
                subject = "MODEL"
            documents = None if isinstance(self.data, Texts) else self.data
            named = places_read(dict(options), type(options))
            guard.check(
                {subject: self.model, "--data": documents, **named},
                {"--output": output, "where the run works": run_folder(output)},
            )
            check_unlocked(output)
        require_data(Source(self.data))
        if isinstance(options, Fit):
            from ropext.training import fit  # late: a wrong path is refused before torch is loaded

            with silenced(), dequantised_directory(self.model, call.hooks.say) as place:
                objective = fit.prepare_fit(
                    place, self.data, options, self.revision, named=self.model
                )
                objective.finish = self.finish
                yield objective
            return
        if options.evaluate is not None:
            require_data(Source(options.evaluate, flag="--eval"))
        from ropext.training import finetune  # late, as above

        with silenced():
            yield finetune.prepare_finetune(self.model, self.data, options)
