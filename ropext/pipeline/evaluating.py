"""One evaluation of a model, a GGUF too: what is read may not be written, and a report is left."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ropext import guard
from ropext.narration import Call
from ropext.options.evaluate import Evaluate
from ropext.options.fields import reads
from ropext.results.gates import Gate, split_spec
from ropext.results.measurement import Measurement

if TYPE_CHECKING:
    from ropext.evaluation.costs import Costs


@dataclass(frozen=True)
class EvaluationRequest:
    """What is to be measured."""

    model: str
    options: Mapping[str, Any]  # the fields of Evaluate that were given
    revision: str | None = None
    gates: Sequence[Gate] = ()
    losses: Path | None = None  # a parquet file for the loss of every token


def evaluate(asked: EvaluationRequest, output: Path | None, call: Call) -> Measurement:
    """Measure, and with `output` write the report there too."""
    from ropext.evaluation import session
    from ropext.report.evaluation import write_report

    with _readable(asked, output, call) as place:
        lineup = None
        if place != asked.model:
            from ropext.evaluation.lineup import line_up

            lineup = line_up(place, None, Evaluate(**asked.options), asked.model)
        return session.evaluate(
            place,
            output,
            call,
            revision=asked.revision,
            lineup=lineup,
            gates=asked.gates,
            losses=asked.losses,
            report=partial(write_report, gates=asked.gates),
            **asked.options,
        )


def count_evaluation(asked: EvaluationRequest, output: Path | None, call: Call) -> "Costs":
    """What `evaluate` would read; what it would refuse is refused."""
    from ropext.evaluation import costs

    with _readable(asked, output, call) as place:
        evaluation, count = costs.count_evaluation(
            place, output, call, revision=asked.revision, gates=asked.gates, **asked.options
        )
    for warning in evaluation.warnings:
        call.hooks.say(f"warning: {warning}")
    return count


@contextmanager
def _readable(asked: EvaluationRequest, output: Path | None, call: Call) -> Iterator[str]:
    """The directory that is read: of a GGUF, one of its weights while this lasts. To write over,
    into or around what is read is refused."""
    from ropext.dequantising import directory_of

    runs = [split_spec(gate.run)[0] for gate in asked.gates if gate.run]
    read = {"MODEL": asked.model, "--fail-if": runs, **reads(asked.options, Evaluate)}
    guard.check(read, {"--output": output, "--losses": asked.losses})
    guard.check_file(asked.losses, "--losses", guard.LOSSES)
    with directory_of(asked.model, call.hooks.say) as place:
        yield place
