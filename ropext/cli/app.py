"""Assembly of the commands, and the one place where errors become sentences and exit codes."""

import signal
import sys
from importlib import metadata
from types import FrameType
from typing import Annotated

import typer

from ropext.cli import compare, extend, finetune, inspect, methods, plan, verify
from ropext.cli import eval as evaluation
from ropext.cli.output import fail
from ropext.errors import RopextError
from ropext.version import __version__

app = typer.Typer(
    name="ropext",
    help="Extend the context window of pretrained Hugging Face models, and prove that it works.",
    no_args_is_help=True,
    rich_markup_mode=None,  # rich doubles the start-up time
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

for module in (inspect, plan, extend, verify, finetune, evaluation, compare, methods):
    app.command(module.NAME)(module.command)


class Interrupted(BaseException):
    """Ctrl-C; not KeyboardInterrupt, which the option parser would turn into exit code 1."""


def _on_interrupt(signum: int, frame: FrameType | None) -> None:
    """Say so at once, clean up on the way out; a second Ctrl-C ends now."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    fail("interrupted; cleaning up (Ctrl-C again ends at once)")
    raise Interrupted


def _print_version(wanted: bool) -> None:
    if not wanted:
        return
    lines = [f"ropext {__version__}"]
    for package in ("torch", "transformers"):
        try:
            lines.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            lines.append(f"{package} is not installed")
    sys.stdout.write("\n".join(lines) + "\n")
    raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="versions of ropext, torch and transformers",
        ),
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line; a user's mistake is one sentence, a bug keeps its traceback."""
    signal.signal(signal.SIGINT, _on_interrupt)
    try:
        app()
    except RopextError as error:
        fail(str(error))
        sys.exit(error.exit_code)
    except Interrupted:
        sys.exit(130)
    except BrokenPipeError:
        # The reader of stdout went away (`ropext plan … | head`); Python would complain at exit.
        sys.stdout = None  # type: ignore[assignment]
        sys.exit(0)
