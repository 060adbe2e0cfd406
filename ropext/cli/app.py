"""Assemble the commands, and turn errors into sentences and exit codes, here alone.

Only the module of the command that runs is imported, so start-up pays for one command, not all.
"""

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext, redirect_stderr
from difflib import SequenceMatcher
from importlib.util import find_spec
from itertools import pairwise
from typing import Annotated, Any

import typer

from ropext.base.errors import NothingKept, RopextError, UsageError
from ropext.base.narration import interruptible
from ropext.cli.options import Grouped, command_of
from ropext.cli.output import Out, Timed, fail, fail_as_json

# Name -> the first sentence of its help, which `ropext --help` shows without importing it.
COMMANDS = {
    "inspect": "Show the position settings of a model or GGUF.",
    "plan": "Show what an extension of a model or GGUF would do.",
    "extend": "Write an extended checkpoint or GGUF and verify it.",
    "verify": "Check a directory or GGUF against its plan.",
    "fit": "Learn RoPE frequencies from text; the weights stay the same.",
    "finetune": "Train an extended checkpoint briefly.",
    "run": "Run all steps of a recipe.",
    "recipes": "List the recipes that come with ropext, or print one.",
    "schema": "Print the JSON schema of a recipe.",
    "eval": "Measure a model at long lengths.",
    "compare": "Compare evaluations on the same tokens.",
    "push": "Upload an output to the hub.",
    "serve": "Serve a model in memory through an OpenAI-compatible API.",
    "methods": "List the scaling methods, or show one.",
    "demo": "Run all steps on a small bundled model.",
}
# Commands of many options, whose help is in groups; --help shows what most users need.
GROUPED = ("extend", "plan", "eval", "fit", "finetune", "serve")
HELP_ALL = "--help-all"
# What typer's option parser raises: TyperException, before typer 0.27 click's ClickException.
WRONG_WORDS: type[Any] = typer.BadParameter.mro()[2]
# The packages that a light installation omits (docs/gguf.md).
HEAVY = ("torch", "transformers", "accelerate", "peft", "datasets", "gguf", "matplotlib")


def _unread(summary: str) -> Callable[[], None]:
    """Return a placeholder for a command whose module this run does not need."""

    def command() -> None:
        """Raise AssertionError, because the module of this command was not imported."""
        raise AssertionError("a command ran whose module was not imported")

    command.__doc__ = summary
    return command


def build(wanted: str | None = None, words: Sequence[str] = ()) -> typer.Typer:
    """Return the typer application. It imports the module of `wanted`, or of every command if that
    is None, and groups the help if `words` request it."""
    help_names = ["-h", "--help"]
    app = typer.Typer(
        name="ropext",
        help="Extend the context window of pretrained models, Hugging Face checkpoints and GGUF "
        "files, and verify the result.",
        epilog="Begin with `ropext demo`, or with `ropext inspect` and `ropext plan` on a model of "
        "yours.",
        no_args_is_help=True,
        rich_markup_mode=None,  # rich doubles the start-up time
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": help_names},
    )
    app.callback()(_root)
    is_grouped = wanted in GROUPED and any(word in (*help_names, HELP_ALL) for word in words)
    names = list(COMMANDS)
    # else the words may request the help of all
    if wanted in names and list(words[:1]) == [wanted]:
        names = [wanted]
    for name in names:
        if wanted not in (None, name):
            app.command(name)(_unread(COMMANDS[name]))
        elif is_grouped:
            Grouped.everything = HELP_ALL in words
            settings = {"help_option_names": [*help_names, HELP_ALL]}
            app.command(name, cls=Grouped, context_settings=settings)(command_of(name))
        else:
            app.command(name)(command_of(name))
    return app


def _command_in(words: list[str]) -> str | None:
    """Return the command on the command line. Return "" if there is none, None if completion needs
    all of them."""
    for key in os.environ:
        if key.endswith("_COMPLETE") and "ROPEXT" in key.upper():
            return None
    for word in words:
        if not word.startswith("-"):
            return word
    return ""


def _print_version(wanted: bool) -> None:
    """Print the versions for `ropext --version` and exit at once, so `--verbose` after `--version`
    is looked up in sys.argv."""
    if not wanted:
        return
    from ropext.cli.versions import version_lines

    sys.stdout.write("\n".join(version_lines("--verbose" in sys.argv)) + "\n")
    raise typer.Exit


def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="versions of ropext, torch and transformers",
        ),
    ] = False,
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose", help="with --version: of all packages, Python and the system, for a report"
        ),
    ] = False,
) -> None:
    """Accept --version and --verbose before the name of a command."""


def main() -> None:
    """Run the command line of ropext: a user's mistake prints one sentence, a bug keeps its
    traceback."""
    # Python sets a stream that the caller closed (`>&-`, some daemons) to None. Without the null
    # device, the next file that is opened gets its number, and children write into that file.
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
            mode = "r" if name == "stdin" else "w"
            setattr(sys, name, os.fdopen(number, mode, closefd=False))
    sentence = "interrupted; cleaning up (Ctrl-C again ends at once)"
    words = sys.argv[1:] or ["--help"]
    times = redirect_stderr(Timed(sys.stderr)) if "--log-times" in words else nullcontext()
    with times, interruptible(fail, sentence, at_once=True):
        code = _code_of(words)
    if code:
        # An interrupt that came while `exec` ran a text, as for a dataclass, makes CPython end the
        # process by SIGINT, although it was handled. The next `exec` takes that back.
        exec("")
        sys.exit(code)


def _code_of(words: list[str]) -> int:
    """Run one command line; return its exit code."""
    # Libraries draw progress bars even into a file, unless these are set before their import.
    if "--quiet" in words or "-q" in words or not sys.stderr.isatty():
        for library in ("HF_HUB", "HF_DATASETS"):
            os.environ.setdefault(f"{library}_DISABLE_PROGRESS_BARS", "1")
    Out.has_result = False
    try:
        _check_words(words)
        # The name also under `python -m ropext`: completion scripts are made from it.
        return (
            build(_command_in(words), words)(words, prog_name="ropext", standalone_mode=False) or 0
        )
    except NothingKept as error:
        return _interrupted(str(error), words)
    except RopextError as error:
        return _failed(str(error), error.exit_code, words)
    except ModuleNotFoundError as error:
        missing = [name for name in HEAVY if find_spec(name) is None]
        if error.name not in missing:
            raise
        sentence = f"this needs {error.name}, which is not installed: pip install"
        return _failed(f"{sentence} {' '.join(missing)}", UsageError.exit_code, words)
    except WRONG_WORDS as error:
        return _failed(_parser_error_sentence(error, words), UsageError.exit_code, words)
    except KeyboardInterrupt as interrupt:
        return _interrupted(" ".join(interrupt.args), words)
    except typer.Abort as error:
        # The option parser turns an interrupt into this.
        if not isinstance(error.__cause__, KeyboardInterrupt):
            raise
        return _interrupted(" ".join(error.__cause__.args), words)
    except SystemExit as error:  # by a model's own code, say: no success, whatever its code
        raise RuntimeError("code that ropext called ended the process") from error


def _failed(sentence: str, exit_code: int, words: list[str]) -> int:
    """Print on stderr why the command failed, with --json also on stdout for a program; return the
    exit code."""
    fail(sentence)
    if "--json" in words:
        fail_as_json(sentence, exit_code, words)
    return exit_code


def _interrupted(sentence: str, words: list[str]) -> int:
    """Print on stderr the state that an interrupted command leaves behind; return the exit code. An
    empty sentence is printed only as JSON, because the person read it when the interrupt came."""
    if sentence:
        return _failed(sentence, NothingKept.exit_code, words)
    if "--json" in words:
        fail_as_json("interrupted", NothingKept.exit_code, words)
    return NothingKept.exit_code


def _check_words(words: list[str]) -> None:
    """Raise UsageError for an empty word of the command line, which a shell makes from "$OUT" if
    OUT is not set. As a path it would be the working directory."""
    for before, word in pairwise(["ropext", *words]):
        if word == "" and not before.startswith("-"):
            raise UsageError(
                f"an argument of {_command_in(words) or before} is empty; give it a value"
            )
        if word == "" or (word.startswith("--") and word.endswith("=")):
            named = word.removesuffix("=") or before
            raise UsageError(f"{named} is empty; give it a value, or leave it out")


def _parser_error_sentence(error: Any, words: list[str]) -> str:
    """Return the parser's objection to the command line as a sentence, and the options that were
    perhaps meant."""
    context = getattr(error, "ctx", None)
    path = context.command_path if context else f"ropext {_command_in(words) or ''}".strip()
    help_hint = f"see {path} --help"
    possibilities = getattr(error, "possibilities", ()) or ()
    name = ""
    if hasattr(error, "possibilities"):  # an unknown option, in place of which others may be meant
        name = getattr(error, "option_name", "")
    if not name:
        message = error.format_message().rstrip(".").replace("Value error, ", "")
        message = message.partition(", unable to parse")[0]
        message = f"{message[:1].lower()}{message[1:]}"
        for option in getattr(getattr(error, "param", None), "opts", ()):
            value = _value_of(option, words)
            if value not in message and value != "...":
                message += f", was {value!r}"
        return f"{message}; {help_hint}"
    message = f"no such option: {name.rstrip('.')}"
    if path.split()[-1] in ("extend", "run"):
        stages = _of_a_stage(name, words)
        if stages:
            return f"{message}; set it for a later step: {' or '.join(stages)}"
    near = [other for other in possibilities if _is_near(other, name)]
    if near:
        return f"{message}; did you mean {' or '.join(near)}?; {help_hint}"
    return f"{message}; {help_hint}"


def _is_near(option: str, name: str) -> bool:
    """Return whether one option of the command line begins with the other, or few letters differ.
    Typer also offers options in which many differ."""
    if option.startswith(name) or name.startswith(option):
        return True
    return SequenceMatcher(None, option, name).ratio() > 0.8


def _of_a_stage(name: str, words: list[str]) -> list[str]:
    """Return an option of fit, finetune or eval as KEY=VALUE words of a run. They are for the steps
    that the command line requests, else for all steps that have the option."""
    from ropext.options.fields import EVALUATE, FINETUNE, FIT, flag
    from ropext.pipeline.recipe import options_by_key

    value = _value_of(name, words)
    asked = list[str]()
    others = list[str]()
    for stage, option in ((FIT, "--fit"), (FINETUNE, "--finetune"), (EVALUATE, "--eval")):
        for key, field in options_by_key(stage).items():
            if flag(field) != name:
                continue
            if option in words:
                asked.append(f"{stage}.{key}={value}")
            else:
                others.append(f"{stage}.{key}={value}")
    return asked or others


def _value_of(option: str, words: list[str]) -> str:
    """Return the value of an option on the command line; "..." if it has none."""
    for before, word in pairwise(words):
        if before == option:
            return "..." if word.startswith("-") else word
    for word in words:
        name, _, value = word.partition("=")
        if name == option and value and not value.startswith("-"):
            return value
    return "..."
