"""Check weight files: which exist, and whether they are the base's."""

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path

from ropext.base.errors import UsageError
from ropext.base.jsontext import read_object
from ropext.base.narration import Show
from ropext.files.checkpoint import OTHER_SET, VARIANT, Snapshot, provenance
from ropext.files.checkpoint.weights import (
    WeightFile,
    compare_weights,
    content_digest,
    identify_weights,
)
from ropext.verifying.checks import Check, Subject
from ropext.verifying.config import LISTED

CONSOLIDATED = re.compile(r"consolidated[\w.-]*\.safetensors")
EQUAL = {
    "same file": "of the base (the same file)",
    "bytes": "equal to the base's, byte for byte",
    "sha256": "with the recorded SHA-256",
    "header and size": "with the right header and size (--deep compares the bytes)",
}


def check_other_sets(snapshot: Snapshot) -> Iterable[Check]:
    """Check that each tensor is stored once, in the weight file that the index names."""
    for sentence in islice(snapshot.misplaced(), LISTED):
        yield Check("weights", False, f"{sentence}: engines disagree on which tensor they load")
    if unloaded := snapshot.unloaded:
        said = "transformers does not load them, and other engines may"
        yield Check("weights", True, f"{', '.join(unloaded[:LISTED])}: {said}")
    notes = []
    for name, reason in snapshot.left.items():
        if reason == OTHER_SET:
            said = "engines disagree on which set they load; move one of the two sets away"
            yield Check("weights", False, f"{name} is {reason}: {said}")
        elif reason == VARIANT or name == "original/" or CONSOLIDATED.fullmatch(name):
            notes.append(name)
    if notes:
        more = f" and {len(notes) - LISTED} more" if len(notes) > LISTED else ""
        said = "other copies of the weights, for programs that use them; not checked"
        yield Check("weights", True, f"{', '.join(notes[:LISTED])}{more}: {said}")


def check_weights(subject: Subject) -> Iterator[Check]:
    """Check that the weight files equal the base's or the record's."""
    snapshot = subject.snapshot
    record = subject.record
    base = subject.base
    depth = subject.depth
    deep = depth.deep
    show = depth.show
    if depth.keep and record is None:
        raise UsageError(
            f"--record writes into ropext.json, and {snapshot.name} has none; --against BASE "
            "--deep compares its weights with the base's"
        )
    source: Mapping[str, Path | WeightFile]
    if base is not None:
        source = base.weight_paths
    elif record is not None:
        source = record.weights
    elif deep:
        source = {name: identify_weights(snapshot.path(name)) for name in snapshot.weight_files}
    else:
        return
    findings = compare_weights(source, snapshot.directory, deep=deep or depth.keep, show=show)
    if deep and base is not None and record is not None:  # the recorded files are read all the same
        hashed = {name: file for name, file in record.weights.items() if file.sha256}
        findings += tuple(
            finding
            for finding in compare_weights(hashed, snapshot.directory, deep=True, show=show)
            if finding.file in hashed
        )
    bad = [finding for finding in findings if finding.same is False]
    for finding in bad:
        yield Check("weights", False, finding.sentence)
    for how, words in EQUAL.items():
        count = sum(finding.same is True and finding.how == how for finding in findings)
        if count:
            yield Check("weights", True, f"{_count_of_files(count)} {words}")
    unknown = [finding for finding in findings if finding.same is None]
    if depth.keep and not bad:
        names = _record_digests(snapshot, show)
        yield Check("weights", True, f"recorded the SHA-256 of {_count_of_files(len(names))}")
    elif unknown:
        more = f" (and {len(unknown) - 1} more)" if len(unknown) > 1 else ""
        advice = "--against BASE compares them with the base's"
        if record is not None:
            advice += (
                f"; `ropext verify {snapshot.name} --record` records them as they are now, and"
                " `extend --hash` does so at once"
            )
        said = f"so --deep has nothing to compare with: {advice}"
        yield Check("weights", None, f"{unknown[0].sentence}{more}, {said}")


def _count_of_files(count: int) -> str:
    """Return the number of checked weight files in words: "1 weight file", "2 weight files"."""
    return f"{count} weight file" if count == 1 else f"{count} weight files"


def _record_digests(snapshot: Snapshot, show: Show) -> list[str]:
    """Write into ropext.json the SHA-256 of each weight file that has none there, for `verify
    --record`. Return the files' names."""
    weights = read_object(snapshot.path(provenance.NAME))["weights"]
    missing = [name for name, file in weights.items() if not file.get("sha256")]
    for name in missing:
        weights[name]["sha256"] = content_digest(snapshot.path(name), show)
    if missing:
        provenance.replace_section(snapshot.directory, "weights", weights)
    return missing
