"""Hub ids: through huggingface_hub, which honours HF_HOME, HF_ENDPOINT, tokens and offline mode.

The only module here that imports it, and only when a hub id is used.
"""

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NoReturn

from ropext.checkpoint import snapshot
from ropext.errors import InputError

# What the hub allows in a name; anything else is taken for a path.
ID = re.compile(r"(?:[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*", re.ASCII)

SMALL = [f"*{suffix}" for suffix in snapshot.SMALL_SUFFIXES]
IGNORED = [f"{folder}/*" for folder in snapshot.FOLDERS_LEFT] + ["consolidated*", "params.json"]


def is_id(model: str) -> bool:
    """Whether a name can be a hub id: `name` or `organisation/name`."""
    return bool(ID.fullmatch(model)) and len(model) <= 96 and ".." not in model


def fetch(repo: str, revision: str | None, *, weights: bool) -> tuple[Path, str | None]:
    """(directory in the hub's cache, commit) with the small files, and with `weights` all."""
    from huggingface_hub import snapshot_download

    from ropext.checkpoint.snapshot import no_config, no_weights

    allowed = [*SMALL, "*.safetensors"] if weights else SMALL
    with _Sentences(repo, revision):
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


def _refuse(
    repo: str, revision: str | None, sentence: Callable[[str, Iterable[str]], str]
) -> NoReturn:
    """Say what the repository holds instead: pickles and GGUF are never fetched, only listed."""
    from huggingface_hub import HfApi

    with _Sentences(repo, revision):
        names = HfApi().list_repo_files(repo, revision=revision)
    raise InputError(sentence(repo, names))


class _Sentences:
    """Turn what huggingface_hub raises into one sentence. Its own texts can quote request headers
    and addresses with tokens in them, so none is passed on."""

    def __init__(self, repo: str, revision: str | None) -> None:
        self.repo = repo
        self.revision = revision

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, InputError):
            sentence = self.sentence(error)
            if sentence:
                raise InputError(sentence) from None

    def sentence(self, error: Exception) -> str | None:
        from huggingface_hub import errors

        at = f"{self.repo} at revision {self.revision}" if self.revision else self.repo
        if isinstance(error, errors.GatedRepoError):
            return (
                f"{self.repo} is gated: ask for access on its page on the hub, then log in "
                "(hf auth login, or the environment variable HF_TOKEN)"
            )
        if isinstance(error, errors.RevisionNotFoundError):
            return f"{self.repo} has no revision {self.revision!r} on the hub (--revision)"
        if isinstance(error, errors.RepositoryNotFoundError):
            return (
                f"{self.repo} is neither a local directory nor a model on the hub that can be seen "
                "without logging in (hf auth login, or the environment variable HF_TOKEN)"
            )
        if isinstance(error, errors.HFValidationError):
            return f"{self.repo} is neither a local directory nor a possible hub id"
        if isinstance(error, errors.OfflineModeIsEnabled) or is_offline(error):
            return (
                f"{at} is not in the local cache, and offline mode is on (HF_HUB_OFFLINE); fetch "
                "it once with a network, or name a local directory"
            )
        # A file that is not cached: the reason why it could not be fetched stands behind it.
        cause = error.__cause__ if isinstance(error, errors.LocalEntryNotFoundError) else error
        if isinstance(cause, errors.HfHubHTTPError):
            status = getattr(getattr(cause, "response", None), "status_code", None)
            return (
                f"{at} is not in the local cache, and the hub answered with HTTP status {status}; "
                "try again later"
            )
        if isinstance(error, errors.LocalEntryNotFoundError) or is_network(error):
            return (
                f"{at} is not in the local cache, and the hub cannot be reached (no network, or "
                "HF_ENDPOINT is wrong); try again, or name a local directory"
            )
        if isinstance(error, OSError):
            return f"{at} cannot be stored in the hub's cache: {error.strerror or 'input/output'}"
        return None


def is_offline(error: Exception) -> bool:
    """Whether a file was missing because offline mode is on."""
    from huggingface_hub import constants, errors

    return isinstance(error, errors.LocalEntryNotFoundError) and bool(constants.HF_HUB_OFFLINE)


def is_network(error: Exception) -> bool:
    """Whether an exception comes from the HTTP client that huggingface_hub uses (requests in 0.x,
    httpx in 1.x, httpx2 later), which this package does not depend on by name."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return bool(names & {"RequestException", "TransportError", "ConnectionError", "TimeoutError"})
