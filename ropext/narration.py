"""How a long piece of work speaks with whoever started it; it prints nothing itself."""

from collections.abc import Callable

Say = Callable[[str], None]  # a sentence
Show = Callable[[int, int, str], None]  # what is done, of how much, and what it is


def silent(sentence: str) -> None:
    """A `Say` for those who want to hear nothing."""


def unseen(done: int, total: int, what: str) -> None:
    """A `Show` for those who want to see nothing."""
