"""Ctrl-C and SIGTERM while something runs that should end at its next good moment."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

Say = Callable[[str], None]


class Signals:
    """Ctrl-C and SIGTERM ask for a stop at the end of a unit of work; a second one ends now."""

    def __init__(self, say: Say, sentence: str = "stopping after this step and saving") -> None:
        self.say, self.sentence, self.caught = say, sentence, False

    @contextmanager
    def listening(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        kinds = (signal.SIGINT, signal.SIGTERM)
        old = [signal.signal(kind, self._catch) for kind in kinds]
        try:
            yield
        finally:
            for kind, handler in zip(kinds, old, strict=True):
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
