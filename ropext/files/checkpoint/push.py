"""Send a finished checkpoint to the hub: its files, its card, and its numbers in the card's front
matter.

One commit holds everything, so a repository is unchanged or complete. The hub knows the files of an
interrupted upload by their hashes, and they are not sent again. The token is huggingface_hub's own
(HF_TOKEN, or from `hf auth login`), never an option and never in a message.
"""

import hashlib
import json
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ropext.base import guard
from ropext.base.errors import InputError, RopextError, Stopped, UsageError
from ropext.base.inputs import CONFIG_LIMIT, read_bytes
from ropext.base.jsontext import Json, dump, parse_object
from ropext.base.narration import SILENT, Hooks, Say, kept_after_interrupt, scrub
from ropext.families.loaders import Serving
from ropext.files.checkpoint import card, provenance
from ropext.files.checkpoint.hub import hub_errors
from ropext.files.checkpoint.snapshot import Snapshot, open_snapshot, take_inventory
from ropext.files.checkpoint.weights import identify_weights

if TYPE_CHECKING:
    from huggingface_hub import HfApi, ModelCard, ModelInfo

REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
# Records of how it was made. `adapter` and `base` are not uploaded: the adapter needs the base,
# which would double the download.
RECORD_FOLDERS = ("training", "fit")
Contents = Mapping[str, Path | bytes]  # the files to upload, by their names on the hub
KEPT_THERE = frozenset((".gitattributes",))  # the hub writes it into every new repository
MESSAGE = "Upload with ropext"
TOGETHER = 5  # files; as many as huggingface_hub sends at once

OUT_OF_REACH = (
    "the hub cannot be reached, or the connection broke (no network, or HF_ENDPOINT is wrong); "
    "{repository} is unchanged; run the same command to resume"
)
MEANWHILE = "{repository} was changed by someone else meanwhile; push again"
PUSHING: dict[str, tuple[type[RopextError], str]] = {
    "status 401": (
        UsageError,
        "the hub does not know this token: set HF_TOKEN anew, or log in with `hf auth login`",
    ),
    "status 403": (
        UsageError,
        "this token may not write to {repository}: take one with write access to {owner}, or push "
        "to an ORG/NAME of yours",
    ),
    "status 409": (Stopped, MEANWHILE),
    "status 412": (Stopped, MEANWHILE),
    "status": (
        Stopped,
        "the hub answered with HTTP status {status}; {repository} is unchanged; run the same "
        "command to resume",
    ),
    "offline": (Stopped, OUT_OF_REACH),
    "network": (Stopped, OUT_OF_REACH),
    "file": (InputError, "{file} cannot be read: {reason}"),
}
# An absolute path of two parts at least: neither "</s>" nor "and/or" nor a URL is one.
_PLACE = re.compile(r"(?<![\w:/.~<\\-])(?:~|[A-Za-z]:)?(?:[\\/][^\s\"'\\/,;:=]+){2,}")


def _without_places(value: Json, inside: bool) -> Json:
    """Return JSON for the hub in which only the last part of each path of this machine is left.
    `inside` also cuts paths within longer texts."""
    if isinstance(value, dict):
        return {key: _without_places(item, inside) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_places(item, inside) for item in value]
    if not isinstance(value, str):
        return value
    if _PLACE.match(value) and "\n" not in value:
        return re.split(r"[\\/]", value.rstrip("\\/"))[-1]
    return _PLACE.sub(lambda place: re.split(r"[\\/]", place[0])[-1], value) if inside else value


@dataclass(frozen=True)
class Head:
    """The additions to the front matter and the commands of a card that is uploaded."""

    figures: Sequence[card.Figure] = ()
    serving: Sequence[Serving] = ()  # commands with the repository's name
    license: str | None = None
    base_model: str | None = None

    def put_into(self, text: str, repository: str) -> "ModelCard":
        """Return the model card to upload to the hub. Raise InputError if its front matter cannot
        be read."""
        import yaml  # late: only a push needs it
        from huggingface_hub import ModelCard

        try:
            merged = ModelCard(card.with_serving(text, self.serving))
        except (ValueError, yaml.YAMLError) as error:
            reason = " ".join(str(error).split())[:200]
            raise InputError(f"the head of {card.README} cannot be read: {reason}") from None
        for key in ASKED:
            if value := getattr(self, key):
                merged.data[key] = value
        if self.figures:
            merged.data["model_name"] = repository.partition("/")[2]
            merged.data["eval_results"] = [figure.result() for figure in self.figures]
        return merged


ASKED = {"license": "--license ID", "base_model": "--base-model ORG/NAME"}  # keys of a card's head


@dataclass(frozen=True)
class Pushed:
    """The state of the hub after an upload, or the state after a dry run would be one: then it has
    no commit."""

    repository: str
    url: str
    commit: str | None
    private: bool
    files: Mapping[str, int]  # bytes by name
    figures: int
    changed: bool
    card: str = field(repr=False)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Destination:
    """The repository on the hub that receives an output."""

    repository: str  # ORG/NAME
    private: bool = True  # if ropext has to create it
    force: bool = False  # replace any other content


def check_name(repository: str, option: str = "push") -> None:
    """Raise UsageError if this cannot be the ORG/NAME under which `push` uploads a checkpoint to
    the hub."""
    if not REPOSITORY.fullmatch(repository) or ".." in repository or "--" in repository:
        raise UsageError(
            f"{option} wants ORG/NAME (letters, digits, '-', '_', '.'), not {repository[:100]}"
        )


def ready(repository: str, option: str = "push") -> str:
    """Return the user's token for the hub, before ropext computes anything. If something is
    missing, raise UsageError and name the option that needs it."""
    from huggingface_hub import constants, get_token

    check_name(repository, option)
    if constants.HF_HUB_OFFLINE:
        raise UsageError("nothing can be pushed in offline mode; unset HF_HUB_OFFLINE")
    token = get_token()
    if not token:
        raise UsageError(
            f"pushing to {repository} needs a token with write access: set the environment "
            "variable HF_TOKEN, or log in once with `hf auth login`"
        )
    return token


def files_of(snapshot: Snapshot) -> dict[str, Path]:
    """Return the files to upload, by their names on the hub: the checkpoint, its card and record,
    and the records of its training."""
    directory = snapshot.directory
    names = list(snapshot.files)
    names += [name for name in (card.README, provenance.NAME) if (directory / name).is_file()]
    for folder in RECORD_FOLDERS:
        if (directory / folder).is_dir():
            names += [f"{folder}/{name}" for name in take_inventory(directory / folder).files]
    return {name: directory / name for name in sorted(names) if not name.endswith(".log")}


def _public(name: str, path: Path) -> Path | bytes:
    """Return a checkpoint's file as `push` uploads it: JSON that may hold paths loses this
    machine's folders."""
    ours = name.partition("/")[0] in (provenance.NAME, *RECORD_FOLDERS)
    if not name.endswith("config.json") and not (ours and name.endswith(".json")):
        return path
    value = json.loads(read_bytes(path, CONFIG_LIMIT))
    public = _without_places(value, inside=ours)
    return path if public == value else dump(public)


def push(
    directory: str | Path,
    destination: Destination,
    head: Head = Head(),
    *,
    dry_run: bool = False,
    bars: bool = False,
    hooks: Hooks = SILENT,
) -> Pushed:
    """Push the files of a written checkpoint to the hub, and write the uploaded model card into its
    directory too.

    `hooks.stop` is called between files; with `bars`, huggingface_hub shows its own progress bars.
    """
    repository = destination.repository
    private = destination.private
    token = ""
    if not dry_run:
        token = ready(repository)
    if not (Path(directory) / provenance.NAME).is_file():
        raise InputError(f"{directory} is no output of ropext (it has no {provenance.NAME})")
    snapshot = open_snapshot(str(directory), weights=True)
    for name in snapshot.weight_files:
        # raises if it is no safetensors: a link may lead to any file
        identify_weights(snapshot.path(name))
    files = files_of(snapshot)
    contents = {name: _public(name, path) for name, path in files.items()}
    text = (Path(directory) / card.README).read_text("utf-8") if card.README in files else ""
    made = head.put_into(text, repository) if text else None
    text = str(made or "")
    sizes = {name: path.stat().st_size for name, path in files.items()}
    missing = {key: said for key, said in ASKED.items() if made and not made.data.get(key)}
    notes = [f"the card names no {key}; {said} adds it" for key, said in missing.items()]
    if changed := [name for name, content in contents.items() if isinstance(content, bytes)]:
        notes.append(f"paths of this machine in {', '.join(changed)} are cut to their last part")
    contents[provenance.NAME] = _without_files(contents[provenance.NAME])
    sizes |= {name: len(part) for name, part in contents.items() if isinstance(part, bytes)}
    pushed = Pushed(repository, "", None, private, sizes, len(head.figures), False, text)
    if dry_run:
        return replace(pushed, notes=tuple(notes))
    from huggingface_hub import HfApi

    api = HfApi(token=token, library_name="ropext")
    with _quiet_library(bars, hooks.say), _sentences(repository):
        before = _repository(api, repository, private)
        stale = _stale(api, repository, before, contents, destination.force)
        hooks.say(
            f"pushing {len(files)} files, {sum(sizes.values()) / 1e6:,.1f} MB, to {repository}"
        )
        if text:
            contents[card.README] = text.encode()
        commit = _commit(api, repository, before, contents, stale, hooks.stop)
    if text:
        notes += _keep_card(Path(directory), text)
    if before.private and not private:
        notes.append(f"{repository} stays private; its settings on the hub can make it public")
    return replace(
        pushed,
        url=scrub(f"{api.endpoint}/{repository}"),  # HF_ENDPOINT may hold a password
        commit=commit,
        private=bool(before.private),
        changed=commit != before.sha,
        notes=tuple(notes),
    )


def _repository(api: "HfApi", repository: str, private: bool) -> "ModelInfo":
    """Return the state of the repository on the hub. Create it if it does not exist."""
    from huggingface_hub import errors

    try:
        info = api.model_info(repository)
    except errors.RepositoryNotFoundError:
        api.create_repo(repository, private=private, exist_ok=True)
        info = api.model_info(repository)
    if private and info.private is False:
        raise UsageError(
            f"{repository} is a public repository; give --public to publish there, or "
            "another ORG/NAME"
        )
    return info


def _stale(
    api: "HfApi", repository: str, before: "ModelInfo", contents: Contents, force: bool
) -> list[str]:
    """Return the files of the hub's repository that this commit removes. Without `force`, raise
    UsageError if it has other content."""
    there = {file.rfilename for file in before.siblings or ()} - KEPT_THERE
    if not there or _same_record(api, repository, before, contents):
        return []
    if not force:
        shown = ", ".join(sorted(there)[:3]) + (", ..." if len(there) > 3 else "")
        raise UsageError(
            f"{repository} holds something else already ({shown}); push to another ORG/NAME, or "
            "replace it with `ropext push DIR ORG/NAME --force` (its history keeps the old files)"
        )
    return sorted(there - set(contents))


def _same_record(api: "HfApi", repository: str, before: "ModelInfo", contents: Contents) -> bool:
    """Return True if the repository on the hub has this very ropext.json, by its git hash."""
    content = contents[provenance.NAME]
    content = content if isinstance(content, bytes) else content.read_bytes()
    digest = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    listed = api.get_paths_info(repository, [provenance.NAME], revision=before.sha)
    return any(getattr(entry, "blob_id", None) == digest for entry in listed)


def _commit(
    api: "HfApi",
    repository: str,
    before: "ModelInfo",
    contents: Contents,
    stale: Sequence[str],
    stop: Callable[[], bool],
) -> str:
    """Commit the files and the new card to the hub on top of the state that was read, and return
    the commit.

    If nothing changed, the hub makes no commit. An interrupt is raised only between files: inside
    the library it can leave the sending threads waiting for one another for ever.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    more = [CommitOperationAdd(name, content) for name, content in contents.items()]
    for first in range(0, len(more), TOGETHER):
        if not stop():
            api.preupload_lfs_files(repository, more[first : first + TOGETHER])
    if stop():
        raise KeyboardInterrupt
    less = [CommitOperationDelete(name) for name in stale]
    done = api.create_commit(
        repository, less + more, commit_message=MESSAGE, parent_commit=before.sha
    )
    return str(done.oid)


def _without_files(record: Path | bytes) -> bytes:
    """Return ropext.json for the hub, without its list of local files: the card in that list
    changes."""
    content = record if isinstance(record, bytes) else read_bytes(record, CONFIG_LIMIT)
    value = parse_object(content, provenance.NAME)
    return dump({key: item for key, item in value.items() if key != guard.FILES})


def _keep_card(directory: Path, text: str) -> list[str]:
    """Write the card that was uploaded to the hub into the directory. Return a note if that
    fails."""
    try:
        provenance.replace_listed(directory, card.README, text.encode())
    except InputError as error:
        cause = error.__cause__
        reason = cause.strerror if isinstance(cause, OSError) else error
        return [f"{directory / card.README} could not be updated to the hub's name ({reason})"]
    return []


@contextmanager
def _quiet_library(bars: bool, say: Say) -> Iterator[None]:
    """Silence the bars and logs of huggingface_hub meanwhile, and pass its warnings to `say`."""
    from huggingface_hub.utils.tqdm import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    logger = logging.getLogger("huggingface_hub")
    without = are_progress_bars_disabled()
    level = logger.level
    logger.setLevel(logging.ERROR)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if not bars:
            disable_progress_bars()
        try:
            yield
        finally:
            logger.setLevel(level)
            if not (bars or without):
                enable_progress_bars()
    for warning in caught:
        say(f"the hub says: {scrub(' '.join(str(warning.message).split()))[:300]}")


@contextmanager
def _sentences(repository: str) -> Iterator[None]:
    """Turn each error of an upload to the hub into one sentence."""
    owner = repository.partition("/")[0]
    left = f"{repository} is unchanged; the same command does not upload again what is there"
    errors = hub_errors(PUSHING, repository=repository, owner=owner)
    with kept_after_interrupt(left), errors, _card_errors():
        yield


@contextmanager
def _card_errors() -> Iterator[None]:
    """Pass on the hub's complaint about the model card. It is the only text of the hub that ropext
    quotes, because it names the key."""
    try:
        yield
    except ValueError as error:
        if "README.md" not in str(error):
            raise
        reason = " ".join(scrub(str(error)).split())[:300]
        raise InputError(f"the hub refuses the head of the card: {reason}") from None
