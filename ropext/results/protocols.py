"""Named ways to take a perplexity. Numbers from different ones do not compare."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Protocol:
    """How a perplexity was taken: its name, the key of its headline, and what it is in words."""

    name: str
    headline: str
    text: str


PROTOCOLS = {
    p.name: p
    for p in (
        Protocol(
            "ropext",
            "tail",
            "token-weighted perplexity of the last N tokens before each length; one document is "
            "one sequence with BOS once; error bars over documents",
        ),
        Protocol(
            "yarn",
            "yarn",
            "as the YaRN repository's eval/perplexity.py --truncate: one window per document cut "
            "at the length, exp of the mean over documents of each one's mean NLL",
        ),
        Protocol(
            "hf-stride",
            "hf_stride",
            "as the loop in the transformers documentation: windows of the length, stride 512 (or "
            "half a shorter window), new tokens scored, its token weights; each document by itself",
        ),
    )
}
