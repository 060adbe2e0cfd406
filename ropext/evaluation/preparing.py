"""What is read, decided before any weight is loaded: documents and questions."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ropext.checkpoint import Snapshot, provenance
from ropext.checkpoint.digests import Digests
from ropext.corpus import Corpus, DocumentEncoder
from ropext.errors import UsageError
from ropext.evaluation import harness
from ropext.evaluation.documents import settle_documents
from ropext.evaluation.lineup import Lineup
from ropext.evaluation.prediction import NEXT_TOKEN, Prediction, checked_prediction
from ropext.evaluation.questions import build_questions
from ropext.evaluation.reads import Reads
from ropext.evaluation.variants import trained_on
from ropext.models.load import silenced
from ropext.models.processes import is_main
from ropext.models.tokenizer import load_tokenizer
from ropext.narration import Say, Show, unseen
from ropext.options.evaluate import Evaluate
from ropext.options.fields import CONTENT, NEUTRAL, NUMBERS
from ropext.results import BASE, SCHEMA
from ropext.results.gates import Gate, Metrics, split_spec
from ropext.results.overlap import Overlap, overlap
from ropext.results.perplexity import SHORT_WINDOW, Frame, Protocol
from ropext.results.rundir import read_run
from ropext.workdir import Workdir

LIBRARIES = ("ropext", "torch", "transformers", "tokenizers", "peft", "numpy")
# What decides the losses and answers of a variant, besides the document or the question.
OF_EVERY_UNIT = (
    "schema",
    "masking",
    "context",
    "tokenizer_sha256",
    "bos",
    "short_window",
    "versions",
)


@dataclass(frozen=True)
class Evaluation:
    """Everything that is decided before weights are loaded: models, documents, questions."""

    options: Evaluate
    lineup: Lineup
    encoder: DocumentEncoder
    trust_remote_code: bool
    corpus: Corpus | None
    reads: Reads
    protocol: Protocol
    warnings: tuple[str, ...]
    overlaps: Mapping[str, Overlap]  # of the variants that were trained, by label

    @property
    def frame(self) -> Frame:
        return self.reads.frame

    def tell_warnings(self, say: Say) -> None:
        """Say what the user is to know before anything is read; one process does."""
        if is_main():
            for warning in self.warnings:
                say(f"warning: {warning}")

    def workdir(self, output: Path, command: Sequence[str] = (), show: Show = unseen) -> Workdir:
        """Where it is kept, and what exactly is run: what must be equal for it to go on there.
        Weights that are not remembered are read for it, which is shown."""
        lineup = self.lineup
        options = self.options
        reads = self.reads
        items = [asdict(item) for group in reads.questions for item in group]
        tokenizer = self.encoder.tokenizer
        vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda entry: entry[1])
        template = str(getattr(tokenizer, "chat_template", None))
        decides = {
            "schema": SCHEMA,
            "protocol": self.protocol.name,
            "protocol_text": self.protocol.text,
            "settings": options.deciding(NUMBERS),
            "context": lineup.context,
            "lengths": list(self.frame.lengths),
            "variants": lineup.contents(Digests(show), self.trust_remote_code),
            "tokens_sha256": list(reads.hashes),
            "questions_sha256": provenance.digest(items),
            "tokenizer_sha256": provenance.digest([vocabulary, template]),
            "bos": reads.bos,
            "short_window": SHORT_WINDOW,
            "versions": provenance.installed(LIBRARIES),
        }
        decides |= reads.prediction.key()
        about = {
            "words": list(provenance.clean_command(command)),
            "names": options.deciding(CONTENT, NEUTRAL)
            | {"models": {variant.label: variant.snapshot.name for variant in lineup.variants}},
        }
        return Workdir(output, "eval", decides, about)

    def stores(self, place: Workdir) -> dict[str, str]:
        """Name the folder of each variant's readings, by its label: it holds what this very model
        reads in this manner, whichever run read it. Documents and questions name the files."""
        rest = {key: value for key, value in place.decides.items() if key in OF_EVERY_UNIT}
        rest["dtype"] = self.options.dtype
        rest["attn_implementation"] = self.options.attn_implementation
        if "masking" in rest:
            rest["lengths"] = place.decides["lengths"]  # the shortest bounds the tail
        contents = place.decides["variants"]
        names = {}
        for variant in self.lineup.variants:
            key = provenance.digest([contents[variant.label], variant.config, rest])
            names[variant.label] = f"{variant.label}-{key[:16]}"
        return names


def prepare(
    options: Evaluate,
    lineup: Lineup,
    trust_remote_code: bool = False,
    gates: Sequence[Gate] = (),
    *,
    needs_target: bool = False,
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
    corpus, grid, warnings = settle_documents(lineup, options, encoder, stops=needs_target)
    overlaps = overlaps_of(lineup, corpus, options.haystack == "text")
    questions, left_out = build_questions(options, grid, encoder, corpus)
    labels = [variant.label for variant in lineup.variants]
    if options.kl and BASE not in labels:
        raise UsageError("--kl: there is no base to hold models against; name it with --base MODEL")
    Metrics(options, labels, grid, lineup.masked).check(gates)
    for other in {gate.run for gate in gates if gate.run is not None} - {*labels}:
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
    with silenced():
        tokenizer = load_tokenizer(snapshot, trust_remote_code)
    config = snapshot.config
    vocabulary = config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")
    encoder = DocumentEncoder(tokenizer, vocabulary, options.seed, options.chat)
    encoder.template_args = options.template_args
    return encoder


def overlaps_of(lineup: Lineup, corpus: Corpus | None, questions: bool) -> dict[str, Overlap]:
    """What each variant that was trained was trained on of the documents that are read; `questions`
    where these are asked about them."""
    read = [document.known_by for document in corpus.documents] if corpus else []
    pairs = ((variant.label, overlap(trained_on(variant), read)) for variant in lineup.variants)
    return {label: replace(it, questions=questions) for label, it in pairs if it is not None}


def _overlap_warnings(overlaps: Mapping[str, Overlap]) -> list[str]:
    by_sentence: dict[str, list[str]] = {}
    for label, each in overlaps.items():
        if each.sentence:
            by_sentence.setdefault(each.sentence, []).append(label)
    return [f"[seen] {', '.join(labels)}: {sentence}" for sentence, labels in by_sentence.items()]
