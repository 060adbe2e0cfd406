"""Ctrl-C and SIGTERM while something runs that should end at its next good moment."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ropext.narration import Say, Show, unseen

Pause = Show  # called after each unit of work; may raise to stop


class Signals:
    """Ctrl-C and SIGTERM ask for a stop at the end of a unit of work; a second one ends now."""

    def __init__(self, say: Say, sentence: str = "stopping after this step and saving") -> None:
        self.say, self.sentence, self.caught = say, sentence, False

    @contextmanager
    def listening(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {kind: signal.getsignal(kind) for kind in (signal.SIGINT, signal.SIGTERM)}
        for kind, handler in before.items():
            if handler is not signal.SIG_IGN:  # as a script's background has Ctrl-C
                signal.signal(kind, self._catch)
        try:
            yield
        finally:
            for kind, handler in before.items():
                signal.signal(kind, handler)

    def _catch(self, number: int, frame: Any) -> None:
        signal.signal(number, signal.SIG_DFL)
        self.caught = True
        self.say(f"{self.sentence} (again: ends at once)")

    def asked(self, trainer: Any) -> bool:
        """Whether any process was asked; all of them then stop at the same step."""
        if trainer is None or trainer.accelerator.num_processes == 1:
            return self.caught
        flag = torch.tensor(float(self.caught), device=trainer.accelerator.device)
        return bool(trainer.accelerator.reduce(flag, "sum") > 0)


@contextmanager
def pausing(say: Say, show: Show = unseen) -> Iterator[Pause]:
    """An interrupt while documents are read stops after the one in hand, as KeyboardInterrupt."""
    signals = Signals(say, "stopping after the document in hand")

    def pause(done: int, total: int, what: str) -> None:
        show(done, total, what)
        if signals.caught:
            raise KeyboardInterrupt

    with signals.listening():
        yield pause
        if signals.caught:
            raise KeyboardInterrupt
