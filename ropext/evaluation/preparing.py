"""What is read, decided before any weight is loaded: documents and questions."""

from collections.abc import Mapping, Sequence

from ropext.checkpoint import Snapshot
from ropext.corpus import DocumentEncoder
from ropext.errors import UsageError
from ropext.evaluation import harness
from ropext.evaluation.documents import AS_EVAL, DocumentWords, settle_documents
from ropext.evaluation.lineup import Lineup, overlaps_of
from ropext.evaluation.live import held_by
from ropext.evaluation.plan import Evaluation
from ropext.evaluation.prediction import NEXT_TOKEN, Prediction, checked_prediction
from ropext.evaluation.questions import build_questions
from ropext.evaluation.reads import Reads
from ropext.models.load import silenced
from ropext.models.tokenizer import load_tokenizer
from ropext.options.evaluate import Evaluate
from ropext.results import BASE
from ropext.results.gates import Gate, Metrics, split_spec
from ropext.results.overlap import Overlap
from ropext.results.rundir import read_run


def prepare(
    options: Evaluate,
    lineup: Lineup,
    trust_remote_code: bool = False,
    gates: Sequence[Gate] = (),
    *,
    needs_target: bool = False,
    words: DocumentWords = AS_EVAL,
) -> Evaluation:
    """Choose lengths, documents and questions; gates about anything else are refused, and with
    `needs_target` documents of which too few reach the target of an extension."""
    if options.lm_eval:
        harness.check(options.lm_eval)
    last = lineup.variants[-1].snapshot
    encoder = _encoder_of(last, options, trust_remote_code)
    prediction: Prediction = NEXT_TOKEN
    if lineup.masked:
        prediction = checked_prediction(options, encoder, last.name)
    corpus, grid, warnings = settle_documents(
        lineup, options, encoder, stops=needs_target, words=words
    )
    overlaps = overlaps_of(lineup, corpus, options.haystack == "text")
    questions, left_out = build_questions(options, grid, encoder, corpus)
    labels = [variant.label for variant in lineup.variants]
    if options.kl and BASE not in labels:
        raise UsageError("--kl: there is no base to hold models against; name it with --base MODEL")
    Metrics(options, labels, grid, prediction.scoring).check(gates)
    others = {gate.run for gate in gates if gate.run is not None and gate.run not in labels}
    for other in others:
        read_run(split_spec(other)[0])  # one that is not there, or not whole, is refused
    options = prediction.options(options, grid[-1])
    reads = Reads(
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
        reads=reads,
        protocol=prediction.protocol(options.protocol),
        warnings=(*lineup.warnings, *warnings, *_overlap_warnings(overlaps), *left_out),
        overlaps=overlaps,
    )


def _encoder_of(snapshot: Snapshot, options: Evaluate, trust_remote_code: bool) -> DocumentEncoder:
    """How documents and questions become tokens of a model."""
    held = held_by(snapshot)
    with silenced():
        tokenizer = held.tokenizer if held else load_tokenizer(snapshot, trust_remote_code)
    config = snapshot.config
    vocabulary = config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")
    encoder = DocumentEncoder(tokenizer, vocabulary, options.seed, options.chat)
    encoder.template_args = options.template_args
    return encoder


def _overlap_warnings(overlaps: Mapping[str, Overlap]) -> list[str]:
    by_sentence: dict[str, list[str]] = {}
    for label, each in overlaps.items():
        if each.sentence:
            by_sentence.setdefault(each.sentence, []).append(label)
    return [f"[seen] {', '.join(labels)}: {sentence}" for sentence, labels in by_sentence.items()]
