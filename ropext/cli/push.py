"""Define `ropext push DIR ORG/NAME`, and `--push-to-hub` of every command that writes a
checkpoint."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ropext.base.errors import RopextError, Stopped
from ropext.base.jsontext import values_json
from ropext.base.narration import join_for_shells
from ropext.cli.options import Given
from ropext.cli.output import Out, stoppable
from ropext.options.push import PushOptions

if TYPE_CHECKING:
    from ropext.files.checkpoint.push import Pushed


@dataclass(frozen=True)
class Push:
    """The destination of a finished output, and the options of its upload."""

    repository: str
    public: bool = False
    results: tuple[str, ...] = ()  # runs of an evaluation, for the card
    license: str | None = None
    base_model: str | None = None
    force: bool = False
    dry_run: bool = False


def requested_push(given: Given) -> Push:
    """Read the flags --push-to-hub and --public that a user typed on a command line. Return the
    push that they request.

    Raise, before anything is computed, if something for it is missing.
    """
    from ropext.files.checkpoint import push

    wanted = PushOptions(**given)
    repository = str(wanted.push_to_hub)
    push.ready(repository, "--push-to-hub")
    return Push(repository, wanted.public)


def upload_output(out: Out, directory: Path, wanted: Push) -> "Pushed":
    """Push a directory with the figures that were measured of it, and print the notes on stderr."""
    from ropext.pipeline.public import push

    with stoppable() as stop:
        done = push(
            directory,
            wanted.repository,
            public=wanted.public,
            results=wanted.results,
            license=wanted.license,
            base_model=wanted.base_model,
            force=wanted.force,
            dry_run=wanted.dry_run,
            bars=out.animated,
            say=out.say,
            stop=stop,
        )
    for note in done.notes:
        out.say(f"note: {note}")
    return done


def print_pushed_result(
    out: Out, text: str, data: Any, directory: Path, wanted: Push | None
) -> None:
    """Print a command's result, after the push if one was requested.

    A push that fails loses nothing: the result is printed, the output is kept, and the error names
    the command that pushes it again.
    """
    if wanted is None:
        out.result(text, data)
        return
    try:
        done = upload_output(out, directory, wanted)
    except RopextError as error:
        out.result(text, {**values_json(data), "pushed": None})
        command = push_command(directory, wanted)
        raise Stopped(f"{error}; {directory} is complete and kept, push it: {command}") from None
    out.result(f"{text}\n{pushed_text(done)}", {**values_json(data), "pushed": done})


def push_command(directory: Path, wanted: Push) -> str:
    """Return the command line `ropext push ...` that a user types in a shell to push this output
    after a failed push. The printed error has it."""
    words = ["ropext", "push", str(directory), wanted.repository]
    if wanted.public:
        words.append("--public")
    for run in wanted.results:
        words += ["--results", run]
    return join_for_shells(*words)


def pushed_text(done: "Pushed") -> str:
    """Return the line that a command prints after a push: the repository as it is on the hub now.

    After a dry run, it has the files and the card.
    """
    kind = "private" if done.private else "public"
    if done.commit is None:
        from ropext.base.table import columns
        from ropext.results.report import text

        rows = [(name, text.bytes_text(size)) for name, size in done.files.items()]
        tree = columns((f"{done.repository} ({kind})", "size"), rows)
        return f"{tree}\n\nREADME.md\n\n{done.card}"
    if not done.changed:
        return f"{done.url} ({kind}) is up to date; nothing was uploaded"
    size = sum(done.files.values()) / 1e6
    figures = f", {done.figures} measured figures in its card" if done.figures else ""
    return f"pushed to {done.url} ({kind}): {len(done.files)} files, {size:,.1f} MB{figures}"


Public = Annotated[bool, typer.Option("--public", help="the pushed repository is public")]
Directory = Annotated[Path, typer.Argument(metavar="DIR", help="a finished output of ropext")]
Repository = Annotated[
    str, typer.Argument(metavar="ORG/NAME", help="the repository; created if it does not exist")
]
Results = Annotated[
    list[str] | None,
    typer.Option(
        "--results", metavar="RUN", help="numbers for the card: a run of ropext eval on DIR"
    ),
]
License = Annotated[
    str | None,
    typer.Option("--license", metavar="ID", help="license in the card's metadata, e.g. apache-2.0"),
]
BaseModel = Annotated[
    str | None,
    typer.Option("--base-model", metavar="ORG/NAME", help="base model in the card's metadata"),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="show the files and the card; upload nothing")
]
Force = Annotated[bool, typer.Option("--force", help="replace files that ropext did not push")]


def command(
    out: Out,
    directory: Directory,
    repository: Repository,
    results: Results = None,
    public: Public = False,
    license: License = None,
    base_model: BaseModel = None,
    force: Force = False,
    dry_run: DryRun = False,
) -> None:
    """Upload an output to the hub. With its card; private unless --public is given."""
    runs = tuple(dict.fromkeys(results or ()))
    wanted = Push(repository, public, runs, license, base_model, force, dry_run)
    done = upload_output(out, directory, wanted)
    out.result(pushed_text(done), done)
