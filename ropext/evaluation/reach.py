"""How far a model is read: the context that it was trained on, and where its table ends."""

from ropext import families
from ropext.checkpoint import Snapshot
from ropext.errors import UnsupportedModel, UsageError
from ropext.families.lengths import LENGTH_KEYS
from ropext.models.masked import fills_in, is_masked
from ropext.schemes import read_positions

# Schemes that a config or a weight carries, and whose models predict tokens as `eval` asks.
READ = ("learned", "mixed", "disentangled")


def context_of(snapshot: Snapshot, stated: int | None) -> tuple[int, int, bool]:
    """(trained context, longest length the config is made for, whether it fills in masks)."""
    try:
        model = families.read(snapshot.config, context=stated)
    except UnsupportedModel:
        # A model without rotary embeddings can be read all the same.
        scheme = read_positions(snapshot.config)
        if scheme is not None and scheme.carried and scheme.kind not in READ:
            raise
        if scheme is not None and scheme.carried:
            if scheme.tensors and stated is not None and stated > scheme.context:
                raise UsageError(
                    f"--context {stated}: the table of {snapshot.name} has {scheme.context} rows; "
                    "leave the option out"
                ) from None
            return stated or scheme.context, scheme.context, is_masked(snapshot)
        lengths = [snapshot.config.get(key) for key in LENGTH_KEYS]
        stored = next((length for length in lengths if isinstance(length, int)), None)
        stored = scheme.context or stored if scheme is not None else stored
        if stated is None and stored is None:
            if scheme is None or scheme.kind != "alibi":
                raise
            raise UsageError(
                f"the config of {snapshot.name} states no length; give --context N, the tokens it "
                "was trained on"
            ) from None
        context = stated or int(stored or 0)
        limit = int(stored or context)
        return context, limit if is_bounded(snapshot) else max(context, limit), False
    longest = max(model.context, model.stated_context)
    return model.context, longest, fills_in(snapshot, model.masked_lm)


def has_table(snapshot: Snapshot) -> bool:
    """Whether its positions are rows of a learned table, beyond which it reads nothing."""
    scheme = read_positions(snapshot.config)
    return scheme is not None and bool(scheme.tensors)


def is_bounded(snapshot: Snapshot) -> bool:
    """Whether it reads no further than its table, or as an MPT than its config says."""
    scheme = read_positions(snapshot.config)
    return scheme is not None and (bool(scheme.tensors) or scheme.text_type == "mpt")
