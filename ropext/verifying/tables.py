"""Check a directory that rotates nothing: its lengths, its rows, its other tensors."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from ropext.base.errors import InputError, ProofFailed, UnsupportedModel, UsageError
from ropext.families.schemes import read_positions, refusal
from ropext.files.checkpoint import Snapshot, provenance
from ropext.files.checkpoint.weights import compare_weights
from ropext.scaling.rope import Positions
from ropext.scaling.tables import METHODS, growth
from ropext.verifying import proof
from ropext.verifying.checks import Check, Subject
from ropext.verifying.config import check_limits, check_proof
from ropext.verifying.weights import check_weights


@dataclass(frozen=True)
class TableSubject(Subject):
    """A model that rotates nothing to check."""

    positions: Positions


def check_tables(subject: TableSubject) -> Iterator[Check]:
    """Run all checks of a written directory whose model rotates nothing.

    Skip each check that needs tables which differ from the config.
    """
    positions = subject.positions
    if not positions.carried:
        raise UnsupportedModel(refusal(positions))
    yield _check_length(subject)
    rows = _check_rows(subject)
    if rows is not None:
        yield rows
        if not rows.passed:
            return
    yield from check_limits(subject.snapshot, subject.claim)
    if subject.base is not None:
        yield from _check_against(subject, subject.base)
    yield from _check_other_weights(subject)
    yield from _check_tensors(subject)


def _check_length(subject: TableSubject) -> Check:
    """Check that the length in config.json is the claimed target."""
    positions = subject.positions
    target = subject.claim.target
    sentence = f"{positions.key} gives {positions.context} tokens"
    right = positions.context == target
    if not right:
        sentence += f", but ropext.json states {target}"
    return Check("length", right, sentence)


def _check_rows(subject: TableSubject) -> Check | None:
    """Check that the position tables have as many rows as the config states. Return None if the
    model has none."""
    from ropext.files.schemes import growing  # late: no rotary model needs it

    try:
        position_tables = growing.find_tables(subject.snapshot, subject.positions)
    except InputError as error:
        return Check("rows", False, str(error))
    if not position_tables:
        return None
    names = ", ".join(f"{table.name} {table.shape[0]}" for table in position_tables)
    front = f"{subject.positions.offset} of them before the first position"
    return Check("rows", True, f"{names}, {front}")


def _check_against(subject: TableSubject, base: Snapshot) -> Iterator[Check]:
    """Check that the old rows of the position tables, and all other tensors, are the base's."""
    from ropext.files.schemes import growing  # late: no rotary model needs it

    directory = subject.snapshot.directory
    record = subject.record
    if record is None or record.method not in METHODS:
        raise UsageError(f"--against needs a ropext.json, which {subject.snapshot.name} lacks")
    before = read_positions(base.config)
    if before is None or before.context != record.context:
        raise UsageError(f"--against {base.name} is not the base that ropext.json names")
    old = growing.find_tables(base, before)
    how = growth(before, record.method, record.target)
    trained = any(record.more.get(name) for name in (*provenance.TRAININGS, provenance.SAVED))
    if trained:  # of equal rows the first is the old one
        how = replace(how, kept={new: row for row, new in how.old_rows.items()})
    try:
        same = growing.compare_tables(base, directory, how, old, trained=trained)
    except ProofFailed as failed:
        yield Check("base", False, str(failed))
        return
    if old:
        sentence = f"{same['rows_bit_exact']} old rows are unchanged, bit for bit"
        if not trained:
            sentence += f"; the others of {how.rows} are as extend made them"
        others = f"{same['tensors_unchanged']} other tensors are unchanged"
        yield Check("base", True, f"{sentence}; {others}")
    grown = {table.file for table in old}
    for finding in compare_weights(
        base.weight_paths, directory, deep=subject.depth.deep, show=subject.depth.show
    ):
        if finding.file not in grown:
            yield Check("base", finding.same, finding.sentence)


def _check_other_weights(subject: TableSubject) -> Iterator[Check]:
    """Check the weight files against the record.

    If the base is here, that was done already, except for recorded digests.
    """
    record = subject.record
    hashed = False
    if record is not None:
        hashed = any(file.sha256 for file in record.weights.values())
    deep = subject.depth.deep and (subject.base is None or hashed)
    yield from check_weights(replace(subject, base=None, depth=replace(subject.depth, deep=deep)))


def _check_tensors(subject: TableSubject) -> Iterator[Check]:
    """Check that transformers loads every tensor of a model without rotation, and reads up to its
    last position."""
    claim = subject.claim
    prove = partial(
        proof.prove_table,
        subject.snapshot.directory,
        replace(subject.positions, context=claim.target),
        base=claim.base,
        trust_remote_code=subject.depth.trust_remote_code,
    )
    yield from check_proof(subject, "tensors", prove)
