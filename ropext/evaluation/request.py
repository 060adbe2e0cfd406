"""What a command measures, and the job that it becomes."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from ropext import guard
from ropext.corpus import require_data
from ropext.dequantising import directory_of
from ropext.errors import UsageError
from ropext.evaluation.documents import source_of
from ropext.evaluation.lineup import Lineup, line_up
from ropext.evaluation.plan import Evaluation
from ropext.evaluation.preparing import prepare
from ropext.evaluation.session import EvaluationJob
from ropext.inputs import inside_wrapper, model_name
from ropext.narration import Call
from ropext.options.evaluate import Evaluate
from ropext.options.fields import reads
from ropext.patching import base_model
from ropext.results.gates import Gate, split_spec

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def named_or_held(model: object) -> "str | PreTrainedModel":
    """Return the name of a model, or the model itself where it is in memory."""
    if hasattr(model, "config") or inside_wrapper(model):
        unwrapped = base_model(model, "evaluate")  # refuses a wrong type
        if unwrapped.get_output_embeddings() is None:
            raise UsageError(
                f"{type(model).__name__} has no head that predicts tokens; load the model by "
                "AutoModelForCausalLM (or AutoModelForMaskedLM)"
            )
        return cast("PreTrainedModel", model)
    return model_name(cast(str, model))  # which refuses what is neither


@dataclass(frozen=True)
class EvaluationRequest:
    """What is to be measured."""

    model: "str | PreTrainedModel"  # of PEFT around one too
    options: Evaluate
    revision: str | None = None
    gates: Sequence[Gate] = ()
    losses: Path | None = None  # a parquet file for the loss of every token
    tokenizer: "PreTrainedTokenizerBase | None" = None  # of a model in memory

    @contextmanager
    def prepared(self, output: Path | None, call: Call) -> Iterator[EvaluationJob]:
        """Open the model, a GGUF as a directory of its weights while this lasts, and read documents
        and questions. To write over, into or around what is read is refused."""
        options = self.options
        runs = [split_spec(gate.run)[0] for gate in self.gates if gate.run]
        read = {"--fail-if": runs, **reads(dict(options), Evaluate)}
        if isinstance(self.model, str):
            read["MODEL"] = self.model
        guard.check(read, {"--output": output, "--losses": self.losses})
        guard.check_file(self.losses, "--losses", guard.LOSSES)
        if options.data is not None:
            require_data(source_of(options))
        with self._decided(output, call) as evaluation:
            for variant in evaluation.lineup.variants:
                if not variant.snapshot.is_on_hub:
                    variant.snapshot.require_weights()
            evaluation.tell_warnings(call.hooks.say)
            yield EvaluationJob(evaluation, self.gates, self.losses)

    def _evaluation(self, lineup: Lineup, call: Call) -> Evaluation:
        """Decide all that needs no weights."""
        trust = call.trust_remote_code
        evaluation = prepare(self.options, lineup, trust, self.gates, needs_target=True)
        if self.losses is not None and evaluation.corpus is None:
            raise UsageError("--losses writes the loss of every token of --data; give documents")
        return evaluation

    @contextmanager
    def _decided(self, output: Path | None, call: Call) -> Iterator[Evaluation]:
        """Decide all that needs no weights: of a directory, of a GGUF before its weights are made,
        or of a model in memory."""
        options = self.options
        model = self.model
        if not isinstance(model, str):
            if self.revision is not None:
                raise UsageError("revision is of a hub id; this model is in memory")
            from ropext.evaluation import holding  # late: no command needs it

            if output is not None:
                holding.check_output(output, call.force)
            held = holding.hold(model, self.tokenizer, options)
            with holding.opened(held, options) as lineup:
                yield self._evaluation(lineup, call)
            return
        if self.tokenizer is not None:
            raise UsageError("tokenizer is for a model in memory; a directory has its own")

        without_weights: Evaluation | None = None

        def decide(place: str) -> None:
            nonlocal without_weights
            without_weights = self._evaluation(line_up(place, None, options, model), call)

        with directory_of(model, call.hooks.say, decide) as place:
            revision = self.revision if place == model else None
            lineup = line_up(place, revision, options, model)
            if without_weights is None:
                yield self._evaluation(lineup, call)
            else:
                yield replace(without_weights, lineup=lineup)
