"""Print the result to stdout and narration to stderr, and nothing elsewhere."""

import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from ropext.base.errors import InputError, UsageError
from ropext.base.jsontext import values_json
from ropext.base.narration import (
    SILENT,
    Call,
    Clock,
    Hooks,
    Pace,
    interruptible,
    progress_lines,
    scrub,
)

if TYPE_CHECKING:
    from ropext.base.table import Format, Table
    from ropext.files.inspecting import Inspection
    from ropext.files.schemes.inspection import PositionFacts
    from ropext.planning import ExtensionPlan


def visible(text: str) -> str:
    """Return a text for the terminal without tokens, because logs are kept.

    Characters that a terminal would obey or could not encode are escaped, because untrusted people
    write configs. This imports nothing: a signal may arrive in the middle of an import.
    """
    text = scrub(text)
    if _prints(text.replace("\n", "")):
        return text
    return "".join(
        c if c in "\n\t" or _prints(c) else c.encode("unicode_escape").decode() for c in text
    )


def _prints(text: str) -> bool:
    """Return whether stdout can print every character of a command's text, also in the encoding of
    a redirection."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return text.isprintable() and text.encode(encoding, "ignore").decode(encoding) == text


def as_json(data: Any) -> str:
    """Return the JSON that a command prints on stdout for --json. If stdout cannot print a
    character, every non-ASCII one is escaped."""
    data = values_json(data)
    text = json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False)
    if _prints(text.replace("\n", "")):
        return text
    return json.dumps(data, indent=2, allow_nan=False)


class Timed:
    """A stderr that puts the time, in UTC, in front of each line, also of lines that libraries
    write. It is no terminal, so progress comes in lines."""

    def __init__(self, stream: TextIO) -> None:
        """Wrap stderr for --log-times; the next text begins a line."""
        self.stream = stream
        self.begins_line = True

    def write(self, text: str) -> int:
        """Write text to stderr with the time in front of each line, for --log-times."""
        for line in text.splitlines(keepends=True):
            if self.begins_line:
                self.stream.write(datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ "))
            self.stream.write(line)
            self.begins_line = line.endswith("\n")
        return len(text)

    def isatty(self) -> bool:
        """Return False, so that progress on stderr comes in lines."""
        return False

    def __getattr__(self, name: str) -> Any:
        """Return any other attribute of the wrapped stderr, for --log-times."""
        return getattr(self.stream, name)


SHORT = {"-m": "--method", "-o": "--output", "-q": "--quiet"}


class Out:
    """The output of one command: its result, narration, pictures and summary."""

    has_result = False  # in this process: stdout must hold one JSON document, not two

    def __init__(self, as_json: bool = False, quiet: bool = False) -> None:
        """Keep whether --json and --quiet were given to the command."""
        self.as_json = as_json
        self.quiet = quiet

    def result(self, text: str, data: Any) -> None:
        """Print the result of a command on stdout: text for people, or one JSON document with
        --json."""
        body = as_json(data) if self.as_json else visible(text)
        Out.has_result = True
        try:
            sys.stdout.write(body.rstrip("\n") + "\n")
            sys.stdout.flush()
        except OSError as error:
            sys.stdout = None  # or Python complains again at exit
            if isinstance(error, BrokenPipeError):
                return  # the reader had enough (`ropext plan ... | head`)
            raise InputError(f"the result cannot be printed: {error.strerror}") from None

    def tables(self, tables: "Iterable[Table]", lines: Iterable[str], wanted: "Format") -> None:
        """Print only the tables of a command, in the format of --format; the sentences that belong
        to them are printed on stderr."""
        from ropext.base.table import in_format  # late: not every result is a table

        self.result(in_format(tables, wanted), None)
        for line in lines:
            self.say(line)

    def check_format(self, wanted: "Format | None") -> None:
        """Raise UsageError if both --format and --json were given."""
        if wanted is not None and self.as_json:
            raise UsageError(f"--format {wanted} and --json are two forms of the result; give one")

    def picture(self, path: Path, of: "ExtensionPlan | Inspection | PositionFacts") -> None:
        """Write the picture of --plot, and print its path on stderr."""
        from ropext.results.report import plots  # late: it loads matplotlib

        try:
            plots.write_plot(of, path)
        except OSError as error:
            raise InputError(f"--plot {path} cannot be written: {error.strerror}") from None
        self.say(f"wrote {path}")

    def say(self, sentence: str) -> None:
        """Print a command's narration on stderr, unless --quiet was given."""
        if not self.quiet:
            sys.stderr.write(visible(sentence).rstrip("\n") + "\n")
            sys.stderr.flush()

    def summarise(self, markdown: str) -> None:
        """Append a command's Markdown to the summary of the GitHub job, if this runs in one."""
        summary = os.environ.get("GITHUB_STEP_SUMMARY")
        if not summary:
            return
        try:
            with Path(summary).open("a", encoding="utf-8") as stream:
                stream.write(markdown)
        except OSError as error:  # the measurement counts all the same
            self.say(f"note: GITHUB_STEP_SUMMARY={summary} cannot be written: {error.strerror}")

    @property
    def animated(self) -> bool:
        """Return whether the command draws progress bars: only if a person watches a terminal."""
        return not self.quiet and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


def fail(sentence: str) -> None:
    """Print on stderr the error of a command that did not succeed, also with --quiet."""
    sys.stderr.write(f"error: {visible(sentence)}\n")
    sys.stderr.flush()


def fail_as_json(sentence: str, exit_code: int, words: Sequence[str]) -> None:
    """Print a command's error on stdout as JSON, unless a result was printed there. Its `option` is
    the option that the sentence is about, as the command line has it, or the missing one."""
    if Out.has_result or os.environ.get("RANK", "0") != "0":
        return
    named = re.findall(r"--[a-z][a-z-]*", sentence)
    option = None
    if sentence.startswith("missing option "):
        option = named[0]
    for word in reversed(words):
        name = word.partition("=")[0]
        name = SHORT.get(name, name)
        if name in named:
            option = name
    error = {"error": visible(sentence), "exit_code": exit_code, "option": option}
    Out(as_json=True).result("", error)


class Bar:
    """Progress with the remaining time: on one line of a terminal, elsewhere in sentences."""

    SECONDS = 0.2  # between two pictures of it

    def __init__(self, out: Out, clock: Clock = time.monotonic) -> None:
        """Keep the output on which the progress of a command is printed, and its clock."""
        self.out, self.pace = out, Pace(self.SECONDS, clock)
        self.tell = progress_lines(out.say, clock)

    def show(self, done: int, total: int, what: str) -> None:
        """Print the progress of a command on stderr, with the time that is left."""
        if not self.out.animated:
            self.tell(done, total, what)
            return
        left = self.pace.left(done, total)
        finished = done >= total
        if left is None and not finished:
            return
        text = f"{100 * done / max(total, 1):3.0f} %  about {left or '0 s'} left  {what}"
        sys.stderr.write(f"\r\x1b[2K{text[:100]}" + ("\n" if finished else ""))
        sys.stderr.flush()


def call_of(
    out: Out,
    *,
    force: bool = False,
    trust_remote_code: bool = False,
    keep_previous: bool = False,
    stop: Callable[[], bool] = SILENT.stop,
) -> Call:
    """Return how this command was called on the command line: its words and options, with `out` as
    its listener."""
    hooks = Hooks(out.say, Bar(out).show, stop)
    return Call(hooks, tuple(sys.argv), force, trust_remote_code, keep_previous)


def stoppable() -> AbstractContextManager[Callable[[], bool]]:
    """Return a context in which Ctrl-C stops the command's work after its current piece. It prints
    a sentence on stderr."""
    return interruptible(
        fail, "interrupted; stopping after the current piece (Ctrl-C again ends at once)"
    )
