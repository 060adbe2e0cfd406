"""What can go wrong on the user's side, each kind with its exit code.

One sentence each: what was asked, what was found, what to do, with the flag or recipe key named.
A bug is never one of these; it keeps its traceback.
"""

import difflib
from collections.abc import Iterable, Sequence


def listed(words: Sequence[str]) -> str:
    """Words as a sentence lists them: a, b and c."""
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} and {words[-1]}"


def class_of(given: object) -> str:
    """Return the name of a value's class with its article: a DataParallel, an int."""
    name = type(given).__name__
    article = "an" if name.startswith(tuple("AEIOUaeiou")) else "a"
    return f"{article} {name}"


def did_you_mean(word: str, known: Iterable[str], otherwise: str = "") -> str:
    """Which of the known names was perhaps meant; where none is near, what to say otherwise."""
    near = difflib.get_close_matches(word, list(known), 2, 0.5)
    return f"did you mean {' or '.join(near)}?" if near else otherwise


def first_line(error: Exception) -> str:
    """The first line of another library's message, or the error's class where it has none."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


class RopextError(Exception):
    """A mistake of the user's or of their input, told in one sentence."""

    exit_code = 2


class UsageError(RopextError, ValueError):
    """Options or recipe values that do not fit together or lie outside their range. Being a
    ValueError, one that a field raises gets its place from pydantic."""


class InputError(RopextError):
    """A model directory, config, data file or hub id that cannot be read as asked."""


class ConfigError(InputError):
    """A config that cannot be read as asked. `source` is what the sentence calls it, which is no
    file of this name where it was read from elsewhere."""

    def __init__(self, sentence: str, source: str = "config.json") -> None:
        super().__init__(sentence, source)
        self.sentence = sentence
        self.source = source

    def __str__(self) -> str:
        return f"{self.source}: {self.sentence}"


class NoServer(InputError):
    """No server answers at an address, before anything was done."""

    exit_code = 5


class UnsupportedModel(RopextError):
    """The model is recognised, and what it would take to extend it is said."""


class NotExpressible(RopextError):
    """No stock config carries the wanted spectrum exactly (in the loaders that were named), or it
    is the one that the model has."""


class OutputExists(RopextError):
    """The output is there already, or another run is writing it."""


class ProofFailed(RopextError):
    """What stock transformers builds from the written config is not what the plan said."""

    exit_code = 3
    changed: Sequence[str] | None = None  # config keys that stock reads otherwise than the base's


class FilledTwice(ProofFailed):
    """The weight files hold two tensors for one parameter; their author has to mend that."""

    exit_code = 2


class GateFailed(RopextError):
    """A measured value is on the wrong side of a gate."""

    exit_code = 3


class NotMeasured(RopextError):
    """A gate on something of which nobody knows the answer."""

    exit_code = 6


class Stopped(RopextError):
    """Interrupted, out of memory, or a server lost: what was finished is kept."""

    exit_code = 4


class Interrupted(Stopped):
    """Ctrl-C, or SIGTERM, where the sentence says what is kept; where nothing is, it stays the
    KeyboardInterrupt that it is everywhere in Python."""


class NothingKept(Interrupted):
    """An interrupt before anything was finished, or with no directory to keep it in."""

    exit_code = 130  # of a plain KeyboardInterrupt too
