"""How far a model reads: to any length, to the length that its config states, or to the last row of
a position table. Which models are compared follows from it."""

from dataclasses import dataclass

from ropext import families
from ropext.checkpoint import Snapshot
from ropext.checkpoint.provenance import Record
from ropext.errors import UnsupportedModel, UsageError
from ropext.evaluation.variants import Variant, base_variant
from ropext.families.model import LENGTH_KEYS
from ropext.models.load import fills_in, is_masked
from ropext.planning import InMemory
from ropext.rope import Positions
from ropext.schemes import read_positions

# Schemes that a config or a weight carries, and whose models predict tokens as `eval` asks.
READ = ("learned", "mixed", "disentangled")


@dataclass(frozen=True)
class ModelReach:
    """How far a model reads; without a mark it reads texts of any length, well or badly."""

    context: int  # tokens that it was trained on
    limit: int  # the longest length that its config is made for
    masked: bool = False  # it fills in masked tokens, where others predict the next
    # Stock transformers reads no more than the length in its config, as of an MPT, or than its
    # table has rows.
    stops: bool = False
    has_table: bool = False  # each position is a row of a table

    def base_of(self, extended: Snapshot, record: Record) -> Variant | None:
        """Return the model before its recorded extension, of weights that nothing trained since,
        with the old rows of its table; None if not all of these were kept."""
        if not self.has_table:
            return base_variant(extended, record.base["config"])
        from ropext.schemes.plan import growth_of  # late: no rotary model needs it

        rows = growth_of(extended, record).undone()
        if rows is None:
            return None
        return base_variant(extended, record.base["config"], InMemory(rows))


def reach_of(snapshot: Snapshot, stated: int | None) -> ModelReach:
    """Read how far a model reads from its config; `stated` is the trained context as the user says
    it."""
    try:
        model = families.read(snapshot.config, context=stated)
    except UnsupportedModel:
        # A model without rotary embeddings can be read all the same.
        scheme = read_positions(snapshot.config)
        if scheme is not None and scheme.carried and scheme.kind not in READ:
            raise
        if scheme is not None and scheme.carried:
            return _carried(snapshot, scheme, stated)
        if stated is None and _stored_length(snapshot, scheme) is None:
            if scheme is None or scheme.kind != "alibi":
                raise
            raise UsageError(
                f"the config of {snapshot.name} states no length; give --context N, the tokens it "
                "was trained on"
            ) from None
        return _uncarried(snapshot, scheme, stated)
    longest = max(model.context, model.stated_context)
    return ModelReach(model.context, longest, fills_in(snapshot, model.masked_lm))


def _carried(snapshot: Snapshot, scheme: Positions, stated: int | None) -> ModelReach:
    """Read a scheme that a config or a table carries."""
    has_table = bool(scheme.tensors)
    if has_table and stated is not None and stated > scheme.context:
        raise UsageError(
            f"--context {stated}: the table of {snapshot.name} has {scheme.context} rows; "
            "leave the option out"
        )
    return ModelReach(
        stated or scheme.context, scheme.context, is_masked(snapshot), has_table, has_table
    )


def _stored_length(snapshot: Snapshot, scheme: Positions | None) -> int | None:
    """Read the length in the config of a model that nothing rotates; None where there is none."""
    if scheme is not None and scheme.context:
        return scheme.context
    for key in LENGTH_KEYS:
        length = snapshot.config.get(key)
        if isinstance(length, int):
            return length
    return None


def _uncarried(snapshot: Snapshot, scheme: Positions | None, stated: int | None) -> ModelReach:
    """Read a scheme that no config extends, as slopes are."""
    stored = _stored_length(snapshot, scheme)
    context = stated or int(stored or 0)
    limit = int(stored or context)
    if scheme is not None and scheme.text_type == "mpt":
        return ModelReach(context, limit, stops=True)
    return ModelReach(context, max(context, limit))
