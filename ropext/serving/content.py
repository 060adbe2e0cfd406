"""Compute one digest of everything that decides the answers of a served model."""

from dataclasses import asdict

from ropext.base.jsontext import Json, digest
from ropext.evaluation.variants import Variant
from ropext.files.checkpoint import Snapshot
from ropext.files.checkpoint.digests import Digests
from ropext.files.checkpoint.provenance import identity
from ropext.planning import ExtensionPlan
from ropext.results import EXTENDED


def content_digest(
    snapshot: Snapshot,
    plan: ExtensionPlan | None,
    adapter: str | None,
    dtype: str,
    trust_remote_code: bool,
) -> str:
    """Return a digest of everything that decides the answers of a served model: weights, config,
    adapter, method and dtype."""
    model = identity(snapshot, Digests(), trust_remote_code)
    info: dict[str, Json] = {"dtype": dtype}
    if plan is not None:
        info |= {"config": plan.config, "fold": plan.fold and asdict(plan.fold)}
    served = Variant("served", EXTENDED, snapshot, adapter=adapter, info=info)
    return digest(served.content(model))
