"""How a long command shows that it goes on, and how it is stopped."""

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from ropext.cli.output import Out, fail
from ropext.narration import Clock, Pace, told


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
    """Progress with the time that is left: on one line of a terminal, elsewhere in sentences."""

    SECONDS = 0.2  # between two pictures of it

    def __init__(self, out: Out, clock: Clock = time.monotonic) -> None:
        self.out, self.pace = out, Pace(self.SECONDS, clock)
        self.tell = told(out.say, clock)

    def show(self, done: int, total: int, what: str) -> None:
        if not self.out.animated:
            self.tell(done, total, what)
            return
        left, finished = self.pace.left(done, total), done >= total
        if left is None and not finished:
            return
        text = f"{100 * done / max(total, 1):3.0f} %  about {left or '0 s'} left  {what}"
        sys.stderr.write(f"\r\x1b[2K{text[:100]}" + ("\n" if finished else ""))
        sys.stderr.flush()
