"""Hub ids: through huggingface_hub, which honours HF_HOME, HF_ENDPOINT, tokens and offline mode.

The only module here that imports it, and only when a hub id is used.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import NoReturn

from ropext.checkpoint import snapshot
from ropext.errors import InputError, RopextError

# What the hub allows in a name; anything else is taken for a path.
ID = re.compile(r"(?:[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*", re.ASCII)

SMALL = [f"*{suffix}" for suffix in snapshot.SMALL_SUFFIXES]
IGNORED = [f"{folder}/*" for folder in snapshot.FOLDERS_LEFT] + ["consolidated*", "params.json"]


NETWORK = {"RequestException", "TransportError", "ConnectionError", "TimeoutError"}
READING = {
    "gated": "{repo} is gated: ask for access on its page on the hub, then log in (hf auth login, "
    "or the environment variable HF_TOKEN)",
    "revision": "{repo} has no revision {revision!r} on the hub (--revision)",
    "repository": "{repo} is neither a local directory nor a model on the hub that can be seen "
    "without logging in (hf auth login, or the environment variable HF_TOKEN)",
    "name": "{repo} is neither a local directory nor a possible hub id",
    "offline": "{at} is not in the local cache, and offline mode is on (HF_HUB_OFFLINE); fetch it "
    "once with a network, or name a local directory",
    "status": "{at} is not in the local cache, and the hub answered with HTTP status {status}; try "
    "again later",
    "network": "{at} is not in the local cache, and the hub cannot be reached (no network, or "
    "HF_ENDPOINT is wrong); try again, or name a local directory",
    "disk": "{at} cannot be stored in the hub's cache: {reason}",
}


def is_id(model: str) -> bool:
    """Whether a name can be a hub id: `name` or `organisation/name`."""
    return bool(ID.fullmatch(model)) and len(model) <= 96 and ".." not in model


def fetch(repo: str, revision: str | None, *, weights: bool) -> tuple[Path, str | None]:
    """(directory in the hub's cache, commit) with the small files, and with `weights` all."""
    from huggingface_hub import snapshot_download

    from ropext.checkpoint.snapshot import no_config, no_weights

    allowed = [*SMALL, "*.safetensors"] if weights else SMALL
    with _sentences(repo, revision):
        found = snapshot_download(
            repo, revision=revision, allow_patterns=allowed, ignore_patterns=IGNORED
        )
    directory = Path(found)
    if not (directory / "config.json").exists():
        _refuse(repo, revision, no_config)
    if weights and not any(directory.glob("*.safetensors")):
        _refuse(repo, revision, no_weights)
    commit = directory.name if re.fullmatch("[0-9a-f]{40}", directory.name) else None
    return directory, commit


def _sentences(repo: str, revision: str | None) -> AbstractContextManager[None]:
    at = f"{repo} at revision {revision}" if revision else repo
    told = {kind: (InputError, sentence) for kind, sentence in READING.items()}
    return hub_errors(told, repo=repo, revision=revision, at=at)


def _refuse(
    repo: str, revision: str | None, sentence: Callable[[str, Iterable[str]], str]
) -> NoReturn:
    """Say what the repository holds instead: pickles and GGUF are never fetched, only listed."""
    from huggingface_hub import HfApi

    with _sentences(repo, revision):
        names = HfApi().list_repo_files(repo, revision=revision)
    raise InputError(sentence(repo, names))


@contextmanager
def hub_errors(
    sentences: Mapping[str, tuple[type[RopextError], str]], **names: object
) -> Iterator[None]:
    """Turn what huggingface_hub raises into one of these sentences, by what went wrong. Its own
    texts can quote request headers and addresses with tokens in them, so none is passed on."""
    try:
        yield
    except RopextError:
        raise
    except Exception as error:
        for kind, more in _kinds_of(error):
            if kind in sentences:
                told, sentence = sentences[kind]
                raise told(sentence.format(**names, **more)) from None
        raise


def _kinds_of(error: Exception) -> Iterator[tuple[str, dict[str, object]]]:
    """What an error of the hub is, the most exact first, each with what a sentence may say of it.

    The HTTP client behind huggingface_hub (requests in 0.x, httpx in 1.x, httpx2 later) is known by
    the names of its errors, and hf_xet by its own: this package depends on neither.
    """
    from huggingface_hub import constants, errors

    for kind, found in (
        ("gated", errors.GatedRepoError),
        ("revision", errors.RevisionNotFoundError),
        ("repository", errors.RepositoryNotFoundError),
        ("name", errors.HFValidationError),
        ("offline", errors.OfflineModeIsEnabled),
    ):
        if isinstance(error, found):
            yield kind, {}
    causes = [error]  # behind a file that is not cached stands why it could not be fetched
    while isinstance(cause := causes[-1].__cause__, Exception):
        causes.append(cause)
    missing = any(isinstance(own, errors.LocalEntryNotFoundError) for own in causes)
    if missing and constants.HF_HUB_OFFLINE:
        yield "offline", {}
    for own in causes:
        if isinstance(own, errors.HfHubHTTPError):
            status = getattr(getattr(own, "response", None), "status_code", None)
            yield f"status {status}", {}
            yield "status", {"status": status}
    names = {kind.__name__ for own in causes for kind in type(own).__mro__}
    if missing or names & NETWORK or type(error).__module__.startswith("hf_xet"):
        yield "network", {}
    if isinstance(error, OSError):
        reason = error.strerror or "input/output"
        if error.filename:
            yield "file", {"file": error.filename, "reason": reason}
        yield "disk", {"reason": reason}
