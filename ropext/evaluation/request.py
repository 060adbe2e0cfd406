"""Decide everything about an evaluation that needs no weights."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from ropext.base import guard
from ropext.base.errors import UsageError
from ropext.base.inputs import inner_model_argument, model_name
from ropext.base.locks import check_unlocked
from ropext.base.narration import Call
from ropext.evaluation import harness
from ropext.evaluation.corpus import require_data
from ropext.evaluation.documents import (
    AS_EVAL,
    DocumentWords,
    build_questions,
    encoder_of,
    settle_documents,
    source_of,
)
from ropext.evaluation.evaluation import Evaluation
from ropext.evaluation.lineup import Lineup, line_up, overlaps_of
from ropext.evaluation.workload import NEXT_TOKEN, Prediction, Workload, checked_prediction
from ropext.models.dequantising import dequantised_directory
from ropext.models.patching import base_model
from ropext.options.evaluate import Evaluate
from ropext.options.fields import places_read
from ropext.results import BASE
from ropext.results.gates import Gate, GateMetrics, other_runs
from ropext.results.perplexity import PROTOCOLS
from ropext.results.rundir import read_run

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def named_or_held(model: object) -> "str | PreTrainedModel":
    """Return the name of a model that is to read documents and questions, or the model itself if it
    is in memory."""
    if hasattr(model, "config") or inner_model_argument(model):
        unwrapped = base_model(model, "evaluate")  # raises an error for a wrong type
        if unwrapped.get_output_embeddings() is None:
            raise UsageError(
                f"{type(model).__name__} has no head that predicts tokens; load the model by "
                "AutoModelForCausalLM (or AutoModelForMaskedLM)"
            )
        return cast("PreTrainedModel", model)
    return model_name(cast(str, model))  # raises an error if it is no name either


@dataclass(frozen=True)
class EvaluationRequest:
    """The model, options, gates and files of an evaluation, as the caller gave them."""

    model: "str | PreTrainedModel"  # or a PEFT model around one
    options: Evaluate
    revision: str | None = None
    gates: Sequence[Gate] = ()
    losses: Path | None = None  # a parquet file for the loss of every token
    tokenizer: "PreTrainedTokenizerBase | None" = None  # for a model in memory
    labels: Mapping[str, str] = field(default_factory=dict)  # the user's own, for models

    @contextmanager
    def prepared(self, output: Path | None, call: Call) -> Iterator[Evaluation]:
        """Open the model, read documents and questions, and yield the evaluation.

        A GGUF is converted to a directory of its weights inside the `with` block. Raise an error if
        an output would overwrite, contain or be inside an input.
        """
        options = self.options
        model = self.model
        read = {"MODEL": model if isinstance(model, str) else None}
        self._check_places(read | places_read(dict(options), Evaluate), output)
        check_unlocked(output)
        guard.check_file(self.losses, "--losses", guard.LOSSES)
        if options.data is not None:
            require_data(source_of(options))
        with ExitStack() as stack:
            if isinstance(model, str):
                evaluation = stack.enter_context(self._opened(model, output, call))
            else:
                from ropext.evaluation import holding  # late: no command needs it

                if self.revision is not None:
                    raise UsageError("revision is of a hub id; this model is in memory")
                if output is not None:
                    holding.check_output(output, call.force)
                held = holding.hold(model, self.tokenizer, options)
                lineup = stack.enter_context(holding.opened(held, options))
                evaluation = self._decided(lineup, output, call)
            for variant in evaluation.lineup.variants:
                if not variant.snapshot.is_on_hub:
                    variant.snapshot.require_weights()
            evaluation.tell_warnings(call.hooks.say)
            yield evaluation

    def _check_places(self, read: guard.Named, output: Path | None) -> None:
        """Raise an error if an output of the evaluation would overwrite, contain or be inside an
        input."""
        guard.check(read, {"--output": output, "--losses": self.losses})

    @contextmanager
    def _opened(self, model: str, output: Path | None, call: Call) -> Iterator[Evaluation]:
        """Yield the evaluation, with its variants and documents decided, of a directory, or of a
        GGUF, which is decided before its weights are converted."""
        if self.tokenizer is not None:
            raise UsageError("tokenizer is for a model in memory; a directory has its own")
        options = self.options
        without_weights = list[Evaluation]()

        def decide(place: str) -> None:
            """Choose the lengths, documents and questions of a GGUF's measurement from its
            directory, before the weights are converted."""
            lineup = line_up(place, None, options, model)
            without_weights.append(self._decided(lineup, output, call))

        with dequantised_directory(model, call.hooks.say, decide) as place:
            revision = self.revision if place == model else None
            lineup = line_up(place, revision, options, model)
            if not without_weights:
                yield self._decided(lineup, output, call)
            else:
                yield replace(without_weights[0], lineup=lineup.labelled(self.labels))

    def _decided(self, lineup: Lineup, output: Path | None, call: Call) -> Evaluation:
        """Return the evaluation of a lineup of variants, with its documents, questions and all else
        decided that needs no weights."""
        trust = call.trust_remote_code
        lineup = lineup.labelled(self.labels)
        self._check_places({"--fail-if": other_runs(self.gates, lineup.models)}, output)
        evaluation = prepare(self.options, lineup, trust, self.gates, needs_target=True)
        if self.losses is not None and evaluation.corpus is None:
            raise UsageError("--losses writes the loss of every token of --data; give documents")
        return replace(evaluation, losses=self.losses)


def prepare(
    options: Evaluate,
    lineup: Lineup,
    trust_remote_code: bool = False,
    gates: Sequence[Gate] = (),
    *,
    needs_target: bool = False,
    words: DocumentWords = AS_EVAL,
) -> Evaluation:
    """Choose lengths, documents and questions of an evaluation, and return it.

    Raise an error if a gate is about anything else. With `needs_target`, raise an error if too few
    documents reach the target of an extension.
    """
    if options.lm_eval:
        harness.check(options.lm_eval)
    last = lineup.variants[-1].snapshot
    encoder = encoder_of(last, options, trust_remote_code)
    prediction: Prediction = NEXT_TOKEN
    if lineup.masked:
        prediction = checked_prediction(options, encoder, last.name)
    corpus, grid, warnings = settle_documents(
        lineup, options, encoder, stops=needs_target, words=words
    )
    overlaps, seen = overlaps_of(lineup, corpus, options.haystack == "text")
    questions, left_out = build_questions(options, lineup.context, grid, encoder, corpus)
    models = lineup.models
    if options.kl and BASE not in models:
        raise UsageError("--kl: there is no base to hold models against; name it with --base MODEL")
    GateMetrics(options, models, grid, prediction.scoring).check(gates)
    for other in other_runs(gates, models):
        read_run(other)  # raises an error if the run is missing or incomplete
    if prediction.sees_all:
        options = options.model_copy(update={"chunk": grid[-1]})
    what = Workload(
        prediction.frame(lineup.context, grid, options.seed),
        corpus.documents if corpus else (),
        questions,
        prediction,
        encoder.bos,
        encoder.decode,
        is_strided=options.protocol == "hf-stride",
        against="" if options.kl else None,
    )
    return Evaluation(
        options=options,
        lineup=lineup,
        encoder=encoder,
        trust_remote_code=trust_remote_code,
        corpus=corpus,
        reads=what,
        protocol=PROTOCOLS[prediction.protocol or options.protocol],
        warnings=(*lineup.warnings, *warnings, *seen, *left_out),
        overlaps=overlaps,
        gates=gates,
    )
