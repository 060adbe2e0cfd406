"""Check a directory, ropext's own or anybody's: spectrum, spellings, lengths, limits, weights."""

from pathlib import Path
from typing import Any

from ropext.base.errors import UsageError
from ropext.base.inputs import model_name
from ropext.base.narration import Say, Show, no_messages, no_progress
from ropext.endpoint.server import require_server
from ropext.families.schemes import read_positions
from ropext.files.checkpoint import Snapshot, open_snapshot, provenance, with_weights
from ropext.files.inspecting import naming_config, open_model, read_unchanged
from ropext.options.door import public
from ropext.options.verify import Reference
from ropext.scaling.rope import Positions
from ropext.verifying.checks import HEADERS_ALONE, Check, Depth, RotarySubject, Verification
from ropext.verifying.claim import claim_of, table_claim
from ropext.verifying.endpoint import AskedServer, check_saved_plan
from ropext.verifying.plain_server import PlainServer
from ropext.verifying.repair import repair, write_config
from ropext.verifying.rotary import check_rotary
from ropext.verifying.weights import check_other_sets

__all__ = [
    "AskedServer",
    "Check",
    "Depth",
    "Verification",
    "check_directory",
    "repair",
    "verify",
    "write_config",
]


@public(Reference)
def verify(
    directory: str | Path,
    *,
    against: str | Path | None = None,
    deep: bool = False,
    record: bool = False,
    endpoint: str | None = None,
    beside: PlainServer | None = None,
    tolerance: float | None = None,
    trust_remote_code: bool = False,
    say: Say = no_messages,
    show: Show = no_progress,
    **options: Any,
) -> Verification:
    """Check a checkpoint directory against its own record, a saved plan, or its base.

    `record` writes the values that `deep` compares with into that record. With `endpoint`, verify
    compares a running server with transformers, which runs with `dtype` and `device`. A saved plan
    in place of the directory checks a server that runs the plan's base by an override. With
    `beside`, a server of the plain model replaces transformers, and no model is loaded. `tolerance`
    is in nats.
    """
    if against is not None:
        against = str(against)
    loading = Reference(**options)
    server = None
    if endpoint is not None:
        server = AskedServer(endpoint, beside, tolerance, loading.dtype, loading.device, say=say)
    depth = Depth(deep, record, trust_remote_code, show)
    return check_directory(directory, against=against, depth=depth, server=server)


def check_directory(
    directory: str | Path,
    *,
    against: str | None = None,
    depth: Depth = HEADERS_ALONE,
    server: AskedServer | None = None,
) -> Verification:
    """Check a directory, a GGUF file or a saved plan as `verify` does, and ask this server too."""
    directory = model_name(directory)
    if server is not None:
        require_server(server.url)
    if server is not None and str(directory).endswith(".json") and Path(directory).is_file():
        if against is not None or depth.deep:
            raise UsageError(f"{directory} is a plan; --against and --deep are for a checkpoint")
        return check_saved_plan(Path(directory), server, depth)
    snapshot = with_weights(open_model(str(directory)))
    positions = read_positions(snapshot.config)
    if positions is not None:
        if server is not None:
            raise UsageError(f"--endpoint is for rotary models, and {directory} rotates nothing")
        return _check_unrotated(snapshot, positions, against, depth)
    subject = _rotary_subject(snapshot, against, depth)
    is_file = snapshot.is_gguf
    if is_file:
        from ropext.verifying.gguf import check_gguf  # late: no directory needs it

        checks = [*check_gguf(subject)]
    else:
        checks = [*check_rotary(subject)]
    if server is not None:
        checks.append(server.check_answers(subject, dequantised=is_file))
    served = None
    if not any(each.passed is False for each in checks):
        served = read_unchanged(snapshot)
    return Verification(snapshot.name, tuple(checks), served)


def _rotary_subject(snapshot: Snapshot, against: str | None, depth: Depth) -> RotarySubject:
    """Return the model that rotates, with the claim and the base to check it against."""
    record = provenance.record_in(snapshot)
    with naming_config(snapshot):
        model = snapshot.as_read()
    claim, base = claim_of(snapshot, model, record, against)
    return RotarySubject(snapshot, record, claim, base, depth, model)


def _check_unrotated(
    snapshot: Snapshot, positions: Positions, against: str | None, depth: Depth
) -> Verification:
    """Run all checks of a directory whose model rotates nothing. Return its verification."""
    from ropext.verifying.tables import TableSubject, check_tables  # late: no rotary model needs it

    record = provenance.record_in(snapshot)
    base = None
    if against is not None:
        base = open_snapshot(against, weights=True)
    claim = table_claim(positions, record, base)
    subject = TableSubject(snapshot, record, claim, base, depth, positions)
    checks = [*check_other_sets(snapshot), *check_tables(subject)]
    return Verification(snapshot.name, tuple(checks), None)
