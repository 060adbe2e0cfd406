"""What must be equal for an evaluation to go on in its folder: its manifest."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ropext.checkpoint import provenance
from ropext.evaluation.preparing import Settled
from ropext.results import rundir
from ropext.workdir import Workdir

LIBRARIES = ("ropext", "torch", "transformers", "tokenizers", "peft", "numpy")
# What names an input or a place, and decides no number that the hashes do not decide.
NOT_IN_KEY = (
    "data",
    "passages",
    "base",
    "adapter",
    "device_map",
    "slice_memory",
    "max_document_mib",
    "chunk",
    "device",
)
# What decides the losses and answers of a variant, besides the document or the question.
OF_EVERY_UNIT = ("schema", "masking", "context", "tokenizer_sha256", "bos", "versions")


def workdir_of(output: Path, settled: Settled, command: Sequence[str] = ()) -> Workdir:
    """Where it is kept, and what exactly is run."""
    lineup, options = settled.lineup, settled.options
    settings = {key: value for key, value in dict(options).items() if key not in NOT_IN_KEY}
    reads = settled.reads
    decides = {
        "schema": rundir.SCHEMA,
        "protocol": settled.protocol.name,
        "protocol_text": settled.protocol.text,
        **({"masking": asdict(reads.masking)} if reads.masking else {}),
        "settings": settings,
        "context": lineup.context,
        "lengths": list(settled.frame.lengths),
        "variants": {own.label: own.content for own in lineup.variants},
        "tokens_sha256": list(reads.hashes),
        "questions_sha256": provenance.digest(
            [asdict(item) for group in reads.questions for item in group]
        ),
        "tokenizer_sha256": _tokenizer_digest(settled.encoder.tokenizer),
        "bos": reads.bos,
        "packed": settled.corpus.packed if settled.corpus else False,
        "versions": provenance.installed(LIBRARIES),
    }
    about = {
        "words": list(provenance.clean_command(command)),
        "names": {key: getattr(options, key) for key in NOT_IN_KEY}
        | {"models": {own.label: own.snapshot.name for own in lineup.variants}},
    }
    return Workdir(output, "eval", decides, about)


def stores_of(place: Workdir, settled: Settled) -> dict[str, str]:
    """Name the folder of each variant's readings, by its label, so that it holds what this very
    model reads in this manner, whichever run read it. Documents and questions name the files."""
    rest = {key: own for key, own in place.decides.items() if key in OF_EVERY_UNIT}
    rest |= {key: place.decides["settings"][key] for key in ("dtype", "attn_implementation")}
    if "masking" in rest:
        rest["lengths"] = place.decides["lengths"]  # the shortest bounds the tail
    return {
        own.label: f"{own.label}-{provenance.digest([own.key(), rest])[:16]}"
        for own in settled.lineup.variants
    }


def _tokenizer_digest(tokenizer: Any) -> str:
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda entry: entry[1])
    return provenance.digest([vocabulary, str(getattr(tokenizer, "chat_template", None))])
