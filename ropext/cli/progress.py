"""How a long command shows that it goes on, and how it is stopped."""

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from ropext.cli.output import Out, fail


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """The first Ctrl-C asks for a stop at the next unit of work; a second one ends now."""
    asked: list[bool] = []

    def on_interrupt(signum: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        fail("interrupted; stopping after the piece in hand (Ctrl-C again ends at once)")
        asked.append(True)

    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield lambda: bool(asked)
    finally:
        signal.signal(signal.SIGINT, before)


class Bar:
    """Progress with the time that is left, on one line of a terminal; elsewhere a sentence now and
    then, or with logs=False nothing."""

    SECONDS = 0.2
    SECONDS_IN_LOGS = 30.0

    def __init__(self, out: Out, logs: bool = True) -> None:
        self.out, self.logs = out, logs
        self.done: int | None = None  # at the last call
        self.begun = self.last = 0.0
        self.first = 0  # done when the clock began

    def show(self, done: int, total: int, what: str) -> None:
        now = time.monotonic()
        if self.done is None or done < self.done:  # a new piece of work: a run has several
            self.begun = self.last = now
            self.first = done
        self.done = done
        pause = self.SECONDS if self.out.animated else self.SECONDS_IN_LOGS
        finished = done >= total
        if self.out.quiet or (now - self.last < pause and not (finished and self.out.animated)):
            return
        self.last = now
        left = (now - self.begun) * (total - done) / max(done - self.first, 1)
        text = f"{100 * done / max(total, 1):3.0f} %  about {_time(left)} left  {what}"
        if self.out.animated:
            sys.stderr.write(f"\r\x1b[2K{text[:100]}" + ("\n" if finished else ""))
            sys.stderr.flush()
        elif self.logs:
            self.out.say(text)


def _time(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
