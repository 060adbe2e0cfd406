"""Which models fill in masked tokens, and that they have a head for it."""

from ropext.checkpoint import Snapshot
from ropext.errors import UnsupportedModel
from ropext.schemes import read_positions

# How the names of classes end that predict masked tokens.
MASKED_HEADS = ("ForMaskedLM", "ForPreTraining", "WithLMHeadModel")


def headless(snapshot: Snapshot) -> UnsupportedModel:
    """The error of a model that predicts no tokens."""
    what = ", ".join(snapshot.config.get("architectures") or ["by its weights"])
    return UnsupportedModel(
        f"{snapshot.name} has no head that predicts masked tokens ({what}); a sentence encoder is "
        f"measured by MTEB (pip install mteb): mteb run -m {snapshot.name} -b LongEmbed"
    )


def fills_in(snapshot: Snapshot, masked: bool) -> bool:
    """Whether it is a masked language model, as its family is; without a head it is refused."""
    names = snapshot.config.get("architectures") or ()
    if masked and names and not any(name.endswith(MASKED_HEADS) for name in names):
        raise headless(snapshot)
    return masked


def is_masked(snapshot: Snapshot) -> bool:
    """Whether a model that does not rotate fills in masked tokens."""
    scheme = read_positions(snapshot.config)
    return fills_in(snapshot, scheme is not None and scheme.carried and not scheme.causal)
