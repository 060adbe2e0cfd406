"""Check a GGUF file: the frequencies that ggml computes from its keys, and its tensors."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from ropext.base.errors import ProofFailed
from ropext.files.checkpoint.weights import WeightFile
from ropext.files.gguf import as_file, proving
from ropext.verifying.checks import Check, RotarySubject


def check_gguf(subject: RotarySubject) -> Iterator[Check]:
    """Run all checks of a written GGUF file."""
    yield from check_spectrum(subject)
    yield from check_tensors(subject)


def check_spectrum(subject: RotarySubject) -> Iterable[Check]:
    """Check that ggml computes the claimed frequencies from the keys of a GGUF file."""
    claim = subject.claim
    near = claim.context
    if subject.record is not None:
        recorded = [site.wanted for site in subject.record.sites if site.scaled]
        if recorded:
            near = recorded[0].short_context
    wanted = next(site.wanted for site in claim.sites if site.scaled)
    if not wanted.short_inv_freq:
        near = 0
    try:
        file = as_file(subject.snapshot)
        done = proving.compare(file, replace(wanted, short_context=near), claim.target)
    except ProofFailed as failed:
        yield Check("spectrum", False, str(failed))
        return
    sentence = (
        f"the RoPE frequencies of {done.pairs} pairs, by ggml's formula, match the plan (largest "
        f"relative error {done.error:.1e})"
    )
    yield Check("spectrum", True, sentence)


def check_tensors(subject: RotarySubject) -> Iterable[Check]:
    """Check that the tensors of a GGUF file equal the base's or the record's."""
    file = as_file(subject.snapshot)
    known = _known_tensors(subject)
    deep = subject.depth.deep and bool(known)
    content = deep and any(part.sha256 for part in known.values())  # else nobody can compare it
    weights = proving.identify_parts(file, content=content, show=subject.depth.show)
    wrong = None
    if known:
        wrong = _first_difference(weights, known, deep)
    if wrong is not None:
        return [wrong]
    count = sum(len(part.tensors) for part in file.parts)
    against = "complete; there is no record to compare with"
    if deep:
        against = "equal to the base's, byte for byte"
    elif known:
        against = "equal to the base's in name, type, shape and size"
    return [Check("tensors", True, f"{count} tensors, {against}")]


def _known_tensors(subject: RotarySubject) -> Mapping[str, WeightFile]:
    """Return the identities of the tensors to check a GGUF file against; nothing if they are not
    known."""
    if subject.base is not None:  # another kind is refused with the claim
        depth = subject.depth
        return proving.identify_parts(as_file(subject.base), content=depth.deep, show=depth.show)
    if subject.record is not None:
        return subject.record.weights
    return {}


def _first_difference(
    weights: Mapping[str, WeightFile], known: Mapping[str, WeightFile], deep: bool
) -> Check | None:
    """Return the check of the first part of a GGUF file whose tensors differ, or whose bytes were
    not recorded. Return None if there is none."""
    for name, file in weights.items():
        wanted = known.get(name)
        if wanted is None or (wanted.size, wanted.header_sha256) != (
            file.size,
            file.header_sha256,
        ):
            return Check("tensors", False, "names, types, shapes or sizes differ from the base's")
        if deep and wanted.sha256 is None:
            return Check(
                "tensors",
                None,
                "their bytes were not recorded; give --against BASE (or --hash to extend)",
            )
        if deep and wanted.sha256 != file.sha256:
            return Check("tensors", False, "their bytes differ from the base's")
    return None
