"""Access to the hub through huggingface_hub, which honours HF_HOME, HF_ENDPOINT, tokens and offline
mode.

Functions here import huggingface_hub late, so only commands with a hub id load it.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from ropext.base.errors import InputError, RopextError

# The names that the hub allows; ropext takes any other for a path.
ID = re.compile(r"(?:[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*", re.ASCII)

NETWORK = {"RequestException", "TransportError", "ConnectionError", "TimeoutError"}
READING = {
    "gated": "{repo} is gated: ask for access on its page on the hub, then log in (hf auth login, "
    "or the environment variable HF_TOKEN)",
    "revision": "{repo} has no revision {revision!r} on the hub (--revision)",
    "repository": "{repo} is neither a local directory nor a model on the hub that can be seen "
    "without logging in (hf auth login, or the environment variable HF_TOKEN)",
    "name": "{repo} is neither a local directory nor a possible hub id",
    "offline": "{at} is no directory here and not in the hub's local cache, and offline mode is "
    "on (HF_HUB_OFFLINE); fetch it once with a network, or name a local directory",
    "status": "{at} is no directory here and not in the hub's local cache, and the hub answered "
    "with HTTP status {status}; try again later",
    "network": "{at} is no directory here and not in the hub's local cache, and the hub cannot "
    "be reached (no network, or HF_ENDPOINT is wrong); try again, or name a local directory",
    "disk": "{at} cannot be stored in the hub's cache: {reason}",
}


def is_id(model: str) -> bool:
    """Return True if a name can be the id of a checkpoint's repository on the hub: `name` or
    `organisation/name`."""
    return bool(ID.fullmatch(model)) and len(model) <= 96 and ".." not in model


def fetch(
    repo: str, revision: str | None, allowed: Sequence[str], ignored: Sequence[str]
) -> tuple[Path, str | None]:
    """Fetch the files of a hub repository that match these patterns. Return (directory in the hub's
    cache, commit)."""
    from huggingface_hub import snapshot_download

    with _sentences(repo, revision):
        place = snapshot_download(
            repo, revision=revision, allow_patterns=list(allowed), ignore_patterns=list(ignored)
        )
    directory = Path(place)
    return directory, directory.name if re.fullmatch("[0-9a-f]{40}", directory.name) else None


def names(repo: str, revision: str | None) -> list[str]:
    """List the files of a repository on the hub without fetching them."""
    from huggingface_hub import HfApi

    with _sentences(repo, revision):
        return HfApi().list_repo_files(repo, revision=revision)


def is_out_of_reach(dataset: str, revision: str | None) -> bool:
    """Return True if huggingface_hub cannot reach the hub, to which ropext also pushes checkpoints.
    Make one request for the dataset. `datasets` would retry."""
    from huggingface_hub import HfApi, constants

    if constants.HF_HUB_OFFLINE:
        return False  # `datasets` looks in its cache at once
    try:
        HfApi().dataset_info(dataset, revision=revision, timeout=10)
    except Exception as error:
        return "network" in dict(_kinds_of(error))
    return False


def _sentences(repo: str, revision: str | None) -> AbstractContextManager[None]:
    """Return the context that turns an error of reading a hub repository into one sentence."""
    at = f"{repo} at revision {revision}" if revision else repo
    kinds = {kind: (InputError, sentence) for kind, sentence in READING.items()}
    return hub_errors(kinds, repo=repo, revision=revision, at=at)


@contextmanager
def hub_errors(
    sentences: Mapping[str, tuple[type[RopextError], str]], **names: object
) -> Iterator[None]:
    """Turn an error of huggingface_hub into one of these sentences, chosen by its kind. Its own
    texts can quote request headers and addresses with tokens in them, so none is passed on."""
    try:
        yield
    except RopextError:
        raise
    except Exception as error:
        for kind, more in _kinds_of(error):
            if kind in sentences:
                error_class, sentence = sentences[kind]
                raise error_class(sentence.format(**names, **more)) from None
        raise


def _kinds_of(error: Exception) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield the kinds of an error of huggingface_hub, the most exact first, each with the values
    that its sentence needs.

    The HTTP client of huggingface_hub (requests in 0.x, httpx in 1.x, httpx2 later) and hf_xet are
    recognized by the names of their errors, because this package depends on neither.
    """
    from huggingface_hub import constants, errors

    for kind, error_class in (
        ("gated", errors.GatedRepoError),
        ("revision", errors.RevisionNotFoundError),
        ("repository", errors.RepositoryNotFoundError),
        ("name", errors.HFValidationError),
        ("offline", errors.OfflineModeIsEnabled),
    ):
        if isinstance(error, error_class):
            yield kind, {}
    causes = [error]  # the cause of a missing file is the error of its fetch
    while isinstance(behind := causes[-1].__cause__, Exception):
        causes.append(behind)
    missing = any(isinstance(cause, errors.LocalEntryNotFoundError) for cause in causes)
    if missing and constants.HF_HUB_OFFLINE:
        yield "offline", {}
    for cause in causes:
        if isinstance(cause, errors.HfHubHTTPError):
            status = getattr(getattr(cause, "response", None), "status_code", None)
            yield f"status {status}", {}
            yield "status", {"status": status}
    kinds = {kind.__name__ for cause in causes for kind in type(cause).__mro__}
    if missing or kinds & NETWORK or type(error).__module__.startswith("hf_xet"):
        yield "network", {}
    if isinstance(error, OSError):
        reason = error.strerror or "input/output"
        if error.filename:
            yield "file", {"file": error.filename, "reason": reason}
        yield "disk", {"reason": reason}
