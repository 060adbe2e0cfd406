"""All of an evaluation that is decided before weights are loaded, and the key of its folder."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ropext.checkpoint import provenance
from ropext.checkpoint.digests import Digests
from ropext.corpus import Corpus, DocumentEncoder
from ropext.evaluation.lineup import Lineup
from ropext.evaluation.reads import Reads
from ropext.jsontext import digest
from ropext.models.processes import is_main
from ropext.narration import Say, Show, clean_command, unseen
from ropext.options.evaluate import Evaluate
from ropext.options.fields import CONTENT, NEUTRAL, NUMBERS
from ropext.results import SCHEMA
from ropext.results.overlap import Overlap
from ropext.results.perplexity import SHORT_WINDOW, Frame, Protocol
from ropext.workdir import Workdir

COMPUTING = ("torch", "transformers", "peft", "accelerate", "ropext")
PREPARING = ("tokenizers", "numpy")  # what makes numbers of a text before a model reads it
LIBRARIES = COMPUTING + PREPARING
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
            "questions_sha256": digest(items),
            "tokenizer_sha256": digest([vocabulary, template]),
            "bos": reads.bos,
            "short_window": SHORT_WINDOW,
            "versions": provenance.installed(LIBRARIES),
        }
        decides |= reads.prediction.key()
        about = {
            "words": list(clean_command(command)),
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
            key = digest([contents[variant.label], variant.config, rest])
            names[variant.label] = f"{variant.label}-{key[:16]}"
        return names
