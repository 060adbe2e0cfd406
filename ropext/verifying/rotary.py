"""Check a directory with rotary embeddings."""

from collections.abc import Iterable, Iterator
from functools import partial

from ropext import families
from ropext.base.errors import listed
from ropext.base.jsontext import Json
from ropext.families import Model, loaders
from ropext.verifying import proof
from ropext.verifying.checks import Check, RotarySubject
from ropext.verifying.config import check_limits, check_proof
from ropext.verifying.weights import check_other_sets, check_weights


def check_rotary(subject: RotarySubject) -> Iterator[Check]:
    """Run all checks of a written directory whose model rotates."""
    snapshot = subject.snapshot
    yield from check_other_sets(snapshot)
    recorded = subject.record is not None
    yield from check_spellings(snapshot.config, subject.model, recorded)
    yield from check_lengths(subject)
    yield from check_spectrum(subject)
    yield from check_weights(subject)


def check_spellings(config: dict[str, Json], model: Model, recorded: bool) -> Iterable[Check]:
    """Check that all spellings of the rope dict in config.json state the same.

    A key that a save by transformers 5 leaves out is an error if an engine of the table, in its
    newest version, loses the extension by it; else it is a note.
    """
    problems = families.check_spellings(config)
    extended = recorded or any(site.rope.is_scaled for site in model.scaled_sites)
    readers = _misled_engines(model)
    notes = [p for p in problems if p.dropped and not (extended and readers)]
    wrong = [problem for problem in problems if problem not in notes]
    for problem in wrong:
        fix = "; --fix repairs it" if problem.fixable else ""
        if problem.disputed:
            way = "from ropext.json" if recorded else "from the key that --trust names"
            fix += f", {way}"
        yield Check("spellings", False, problem.sentence + fix)
    if wrong:
        return
    said = "all keys that engines read for RoPE agree"
    for problem in notes:
        said += f"; note: {problem.sentence} (--fix writes it for those engines)"
    if notes and readers:
        said += f"; among the newest engines measured: {listed(readers)}"
    yield Check("spellings", True, said)


def _misled_engines(model: Model) -> list[str]:
    """Return the engines by which the check judges a spelling that is left out: their newest
    measured version reads rope_parameters alone differently."""
    params = model.scaled_sites[0].params
    read = partial(
        loaders.readings,
        model.text_type,
        params,
        model_type=model.model_type,
        length=model.stated_context,
    )
    both = read()
    alone = read(v5_only=True)
    misled = []
    seen = set()
    for plain, modern in zip(both, alone, strict=True):
        if plain.loader in seen:
            continue  # the newest comes first
        seen.add(plain.loader)
        if plain.verdict == "same" and modern.verdict in loaders.WRONG:
            misled.append(modern.loader)
    return misled


def check_lengths(subject: RotarySubject) -> Iterable[Check]:
    """Check that max_position_embeddings equals the claimed target, and that no other file limits
    the length."""
    stated = subject.model.stated_context
    claim = subject.claim
    target = claim.target
    if stated != target:
        said = f"max_position_embeddings is {stated}, the target is {target}"
        yield Check("length", False, said)
    else:
        yield Check("length", True, f"max_position_embeddings equals the target, {target}")
    yield from check_limits(subject.snapshot, claim)


def check_spectrum(subject: RotarySubject) -> Iterator[Check]:
    """Check that transformers builds the claimed frequencies, and every tensor, from a written
    directory."""
    claim = subject.claim
    request = proof.BuildRequest(
        subject.snapshot.directory,
        subject.model.path,
        claim.base,
        proof.ExpectedRotary(claim.sites, claim.target / claim.context),
        claim.context,
        max(claim.target, claim.context),
    )
    prove = partial(proof.prove, request, trust_remote_code=subject.depth.trust_remote_code)
    yield from check_proof(subject, "spectrum and tensors", prove)
