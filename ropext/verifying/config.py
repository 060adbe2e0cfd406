"""Check config.json and the other small files of models of every scheme."""

from collections.abc import Callable, Iterable, Iterator

from ropext import families
from ropext.base.errors import ProofFailed, listed
from ropext.base.jsontext import JsonObject
from ropext.files.checkpoint import Snapshot
from ropext.files.checkpoint.tokenizer import length_edits
from ropext.scaling.rope import ABSENT
from ropext.verifying.checks import Check, Subject
from ropext.verifying.claim import Claim
from ropext.verifying.proof import Proof

LISTED = 5  # names shown of a longer list


def check_config(
    config: JsonObject, claim: Claim, changed: Iterable[str] | None
) -> Iterable[Check]:
    """Check that every key of config.json except the edits equals the base's.

    `changed` holds the keys that transformers now reads differently, or None if that is not known.
    """
    if claim.base is None:
        return

    def within_keys(key: str, keys: Iterable[str]) -> bool:
        """Return whether a key of config.json that the check compares with the base is one of these
        keys, contains one, or is inside one."""
        return any(f"{key}.".startswith(f"{k}.") or f"{k}.".startswith(f"{key}.") for k in keys)

    edits = {edit.key: edit for edit in families.diff(claim.base, config)}
    others = {key: edit for key, edit in edits.items() if not within_keys(key, claim.edited)}
    both = [key for key, e in others.items() if ABSENT not in (e.before, e.after)]
    differing = both if changed is None else [key for key in others if within_keys(key, changed)]
    wrong = [key for key in differing if key.rpartition(".")[2] not in families.FREE_KEYS]
    for key in wrong:
        was, now = (repr(v)[:60] for v in (others[key].before, others[key].after))
        yield Check("config", False, f"config.json: {key} is {now}, the base's {was}")
    if wrong or changed is None:
        return
    shown = list(others)[:LISTED]
    if len(others) > LISTED:
        shown.append(f"{len(others) - LISTED} more")
    exception = ""
    if others:
        exception = f", except {listed(shown)}, with which transformers builds the same"
    yield Check("config", True, f"all other keys equal the base's{exception}")


def check_proof(subject: Subject, what: str, prove: Callable[[], Proof]) -> Iterator[Check]:
    """Check that transformers builds the claimed model from a written directory, with the config
    keys and the tied tensors that the proof names. `what` is the name of the check."""
    config = subject.snapshot.config
    try:
        proved = prove()
    except ProofFailed as failed:
        yield Check(what, False, str(failed))
        yield from check_config(config, subject.claim, failed.changed)
        return
    yield from check_config(config, subject.claim, proved.changed)
    yield from check_tied(proved.untied)
    yield Check(what, True, proved.sentence)
    yield Check("forward", True, proved.forward)
    if proved.base:
        yield Check("base", True if proved.base_was_built else None, proved.base)


def check_limits(snapshot: Snapshot, claim: Claim) -> Iterable[Check]:
    """Check that no limit of the tokenizer or generation config is below the claimed target."""
    target = claim.target
    edits, _ = length_edits(snapshot, claim.context, target)
    for edit in edits:
        length = edit.before
        if edit.after is None:  # a stored truncation, of which the length counts
            length = f"{edit.before.get('max_length')} tokens"
        said = f"{edit.file}: {edit.key} of {length} limits the model below its target of {target}"
        yield Check("limits", False, said)
    if not edits:
        yield Check(
            "limits", True, "no limit of the tokenizer or generation config is below the target"
        )


def check_tied(pairs: Iterable[str]) -> Iterable[Check]:
    """Yield a failed check for each pair of stored tensors that the config ties although they
    differ."""
    for pair in pairs:
        yield Check(
            "tied weights",
            False,
            f"config.json ties {pair} (tie_word_embeddings, stated or the class default), but the"
            " two stored tensors differ: engines disagree on which one they load",
        )
