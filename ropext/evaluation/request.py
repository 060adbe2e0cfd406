"""What a command measures, and the job that it becomes."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ropext import guard
from ropext.dequantising import directory_of
from ropext.errors import UsageError
from ropext.evaluation.lineup import line_up
from ropext.evaluation.preparing import prepare
from ropext.evaluation.session import EvaluationJob
from ropext.narration import Call
from ropext.options.evaluate import Evaluate
from ropext.options.fields import reads
from ropext.results.gates import Gate, split_spec


@dataclass(frozen=True)
class EvaluationRequest:
    """What is to be measured."""

    model: str
    options: Evaluate
    revision: str | None = None
    gates: Sequence[Gate] = ()
    losses: Path | None = None  # a parquet file for the loss of every token

    @contextmanager
    def prepared(self, output: Path | None, call: Call) -> Iterator[EvaluationJob]:
        """Open the model, a GGUF as a directory of its weights while this lasts, and read documents
        and questions. To write over, into or around what is read is refused."""
        options = self.options
        runs = [split_spec(gate.run)[0] for gate in self.gates if gate.run]
        read = {"MODEL": self.model, "--fail-if": runs, **reads(dict(options), Evaluate)}
        guard.check(read, {"--output": output, "--losses": self.losses})
        guard.check_file(self.losses, "--losses", guard.LOSSES)
        with directory_of(self.model, call.hooks.say) as place:
            revision = self.revision if place == self.model else None
            lineup = line_up(place, revision, options, self.model)
            evaluation = prepare(
                options, lineup, call.trust_remote_code, self.gates, needs_target=True
            )
            if self.losses is not None and evaluation.corpus is None:
                raise UsageError(
                    "--losses writes the loss of every token of --data; give documents"
                )
            for variant in lineup.variants:
                if not variant.snapshot.is_on_hub:
                    variant.snapshot.require_weights()
            evaluation.tell_warnings(call.hooks.say)
            yield EvaluationJob(evaluation, self.gates, self.losses)
