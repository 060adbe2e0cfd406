"""Report the progress of long work, and stop it; this module prints nothing itself."""

import os
import re
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from ropext.base.errors import Interrupted

Say = Callable[[str], None]  # a sentence
# Units done, all units, and their name. The first call, when the work begins, starts the clock.
Show = Callable[[int, int, str], None]
Clock = Callable[[], float]

_TOKEN = re.compile(r"\b(hf_|sk-|ghp_|github_pat_)[A-Za-z0-9]{16,}")  # not a folder hf_checkpoints
_USERINFO = re.compile(r"(\w{2,}:/{1,2})[^/@\s]+@")  # a path has lost one of the slashes
# The last word of an option: --hf-token, and not --batch-tokens or --tokenizer.
_SECRET_OPTION = re.compile(r"--?([\w-]*[-_])?(token|secret|password|api[-_]?key)", re.IGNORECASE)
HIDDEN = "***"
LEAST_KEY = 12  # characters; a shorter one may be a word, as EMPTY or lm-studio

SECONDS = 30.0  # between two lines of a log
RECENT = 60.0  # the seconds whose speed gives the remaining time
FILES_PATIENCE = 5.0  # seconds of copying or hashing before the first one


def scrub(text: str) -> str:
    """Replace secrets in a text by ***, before it is printed, logged or stored: tokens in the
    environment, tokens of a known shape, and passwords inside a URL."""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACE_HUB_TOKEN"):
        token = os.environ.get(name)
        if token:
            text = text.replace(token, HIDDEN)
    key = os.environ.get("ROPEXT_ENDPOINT_KEY", "")
    if len(key) >= LEAST_KEY:  # a server may repeat it in an error
        text = text.replace(key, HIDDEN)
    return _USERINFO.sub(rf"\1{HIDDEN}@", _TOKEN.sub(HIDDEN, text))


def clean_command(argv: Sequence[str]) -> tuple[str, ...]:
    """Return the words of the command line to record: the program's bare name, and no secret in any
    word. Return nothing for a call from Python."""
    if not argv:
        return ()
    words = ["ropext"]
    hide = False
    for word in argv[1:]:
        option, equals, _ = word.partition("=")
        secret = bool(_SECRET_OPTION.fullmatch(option))
        if hide:
            words.append(HIDDEN)
        elif secret and equals:
            words.append(f"{option}={HIDDEN}")
        else:
            words.append(scrub(word))
        hide = secret and not equals
    return tuple(words)


def join_for_shells(*words: str) -> str:
    """Join the words of a command line so that POSIX shells, cmd and PowerShell all read them, if
    the characters allow it."""
    slash, marks = (r"\\", "") if sys.platform == "win32" else ("", r"\\$`!")
    bare = re.compile(rf"[\w./:=+{slash}-]+", re.ASCII)
    plain = re.compile(rf'[^"{marks}]+')
    if slash:  # a program there takes \" for a quote, and backslashes before a quote by twos
        # Between quotes PowerShell runs $(...) and ends at “, ” and „, unless a ` escapes them.
        said = [re.sub("[$`“”„]", r"`\g<0>", word) for word in words]
        said = [re.sub(r'(\\*)"', r'\1\1\\"', f'{word}"')[:-2] for word in said]
        said = [f'"{word}"' for word in said]
    else:
        said = [f'"{word}"' if plain.fullmatch(word) else shlex.quote(word) for word in words]
    return " ".join(a if bare.fullmatch(a) else b for a, b in zip(words, said, strict=True))


def continued(command: str, width: int) -> list[str]:
    """Break a command line in any output between words, into lines that a POSIX shell, or Python
    inside brackets, joins again. A JSON argument stays in one line, whatever its length."""
    if sys.platform == "win32" or len(command) <= width:
        return [command]
    lines = [""]
    python = re.match(r"[\w.]+\(", command)
    for word in re.findall(r"""(?:'[^']*'|"[^"]*"|[^\s'"])+""", command):
        if lines[-1] and len(f"{lines[-1]} {word} \\") > width:
            lines[-1] += "" if python else " \\"
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".lstrip()
    return lines


def no_messages(sentence: str) -> None:
    """Ignore a sentence; a `Say` without output."""


def no_progress(done: int, total: int, what: str) -> None:
    """Ignore a count of progress; a `Show` without output."""


@dataclass(frozen=True)
class Hooks:
    """The caller's functions through which long work reports its progress and learns that it must
    stop."""

    say: Say = no_messages
    show: Show = no_progress
    stop: Callable[[], bool] = lambda: False


SILENT = Hooks()


@dataclass(frozen=True)
class Call:
    """How work was started, from the command line or from Python. Nothing in it changes a
    number."""

    hooks: Hooks = SILENT
    command: tuple[str, ...] = ()  # the words of the command line; none from Python
    force: bool = False  # files that ropext wrote may be replaced
    trust_remote_code: bool = False  # a model's own code may run
    keep_previous: bool = False  # a run keeps the files that it replaces next to them


NOBODY = Call()  # nobody listens, and nothing is replaced


# For sentences of calls without Hooks, however deep: reading a config may start a child.
_LISTENER: ContextVar[Say] = ContextVar("listener", default=no_messages)


@contextmanager
def heard_by(say: Say) -> Iterator[None]:
    """Inside this block, send each sentence of `tell_listener` to `say`."""
    token = _LISTENER.set(say)
    try:
        yield
    finally:
        _LISTENER.reset(token)


def tell_listener(sentence: str) -> None:
    """Send a sentence to the listener that started the command; a call from Python has none."""
    _LISTENER.get()(sentence)


@dataclass
class Pace:
    """The times at which long work reports its progress: after its first unit, then at
    intervals.

    The remaining time follows from the speed of the last minute. By the mean speed since the
    beginning it would grow for a long time after the work became slower.
    """

    pause: float = SECONDS
    clock: Clock = time.monotonic
    patience: float = 0.0
    called: float | None = field(default=None, init=False)  # when the first piece of work began
    # Times with the units done then: where the clock was started, and recent reports.
    marks: list[tuple[float, int]] = field(default_factory=list, init=False)
    done: int = field(default=-1, init=False)  # units at the last call
    reported: float | None = field(default=None, init=False)

    def left(self, done: int, total: int) -> str | None:
        """Return the remaining time if a progress line is due now, else None. If there are fewer
        units than before, another piece of work began, and the clock starts again."""
        now = self.clock()
        self.called = now if self.called is None else self.called
        if not self.marks or done < self.done or done == self.marks[0][1]:
            self.marks = [(now, done)]
            self.done = done
            return None
        self.done = done
        if self.reported is None and now - self.called < self.patience:
            return None  # short work reports nothing
        if self.reported is not None and now - self.reported < self.pause:
            return None
        self.reported = now
        while len(self.marks) > 1 and self.marks[1][0] <= now - RECENT and self.marks[1][1] < done:
            del self.marks[0]
        before, done_before = self.marks[0]
        self.marks.append((now, done))
        return duration((now - before) * (total - done) / (done - done_before))


def in_tokens(done: int, total: int) -> str:
    """Format the units of a progress line as tokens."""
    return f"{done:,} of {total:,} tokens"


def in_gigabytes(done: int, total: int) -> str:
    """Format the units of a progress line as gigabytes."""
    return f"{done / 1e9:.1f} of {total / 1e9:.1f} GB"


def in_bytes(count: int) -> str:
    """Format a number of bytes for a message in disk units: below a gigabyte in megabytes, so that
    small sizes are not 0.00."""
    return f"{count / 1e9:.2f} GB" if count >= 10**9 else f"{count / 1e6:.2f} MB"


def progress_lines(
    say: Say,
    clock: Clock = time.monotonic,
    amount: Callable[[int, int], str] = in_tokens,
    patience: float = 0.0,
) -> Show:
    """Return a `Show` that reports progress in lines of text, for output without a progress bar."""
    pace = Pace(clock=clock, patience=patience)

    def show(done: int, total: int, what: str) -> None:
        """Write a progress line with the remaining time, if one is due."""
        left = pace.left(done, total)
        if left is not None and done < total:
            say(f"{100 * done // total} % ({amount(done, total)}), about {left} left: {what}")

    return show


def file_progress(say: Say, clock: Clock = time.monotonic) -> Show:
    """Return a `Show` that reports progress in lines of text while files are copied, hashed or
    compared; units are bytes."""
    return progress_lines(say, clock, in_gigabytes, patience=FILES_PATIENCE)


def duration(seconds: float) -> str:
    """Format a duration for a progress line, in a suitable unit."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


@contextmanager
def interruptible(
    say: Say, sentence: str, *, at_once: bool = False
) -> Iterator[Callable[[], bool]]:
    """Answer the first Ctrl-C, or a scheduler's SIGTERM, with a sentence, and yield a function that
    tells whether it came; a second one ends the process now.

    With `at_once` it is raised as a KeyboardInterrupt; else the work asks after each of its units.
    """
    caught: list[int] = []

    def answer(number: int, frame: Any) -> None:
        """Note a signal to stop long work, and send the sentence to `say`. The next signal has its
        default effect."""
        signal.signal(number, signal.SIG_DFL)
        caught.append(number)
        with suppress(RuntimeError):  # it came while a line was being written: no other fits in
            say(sentence)
        if at_once:
            raise KeyboardInterrupt

    before: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        kinds = (signal.SIGINT, signal.SIGTERM)
        before = {kind: signal.getsignal(kind) for kind in kinds}
    for kind, handler in before.items():
        if handler is not signal.SIG_IGN:  # as a script's background has Ctrl-C
            signal.signal(kind, answer)
    try:
        yield lambda: bool(caught)
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)


@contextmanager
def kept_after_interrupt(
    sentence: str, has_kept: Callable[[], bool] = lambda: True
) -> Iterator[None]:
    """Turn a KeyboardInterrupt into an error that names the kept work; let it pass if nothing is
    kept."""
    try:
        yield
    except KeyboardInterrupt:
        if not has_kept():
            raise
        raise Interrupted(f"interrupted; {sentence}") from None


@contextmanager
def pausing(say: Say, show: Show = no_progress) -> Iterator[Show]:
    """Yield a `Show` that reports the progress of any long work, and stops it if Ctrl-C came: it
    raises KeyboardInterrupt after the document in hand."""
    sentence = "stopping after the current document (Ctrl-C again ends at once)"
    with interruptible(say, sentence) as stopping:

        def pause(done: int, total: int, what: str) -> None:
            """Report the progress of long work, and raise KeyboardInterrupt if Ctrl-C came."""
            show(done, total, what)
            if stopping():
                raise KeyboardInterrupt("interrupted; nothing was kept")

        yield pause
        if stopping():
            raise KeyboardInterrupt("interrupted; nothing was kept")
