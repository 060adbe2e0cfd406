"""Define the mistakes of a user, each kind with its exit code.

Each is one sentence: the given value, the expected one and what to do, with the flag or recipe key.
A bug is never one of these; it keeps its traceback.
"""

import difflib
from collections.abc import Callable, Iterable, Sequence


def listed(words: Sequence[str]) -> str:
    """Join words of an error's sentence as English lists them: a, b and c."""
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} and {words[-1]}"


def class_name(given: object) -> str:
    """Return the name of a value's class with its article, for an error's sentence: a DataParallel,
    an int."""
    name = type(given).__name__
    article = "an" if name.startswith(tuple("AEIOUaeiou")) else "a"
    return f"{article} {name}"


def did_you_mean(word: str, known: Iterable[str], otherwise: str = "") -> str:
    """Return the hint of an error's sentence that names the word which was perhaps meant;
    `otherwise` if no known word is near."""
    near = difflib.get_close_matches(word, list(known), 2, 0.5)
    return f"did you mean {' or '.join(near)}?" if near else otherwise


def first_line(error: Exception) -> str:
    """Return the first line of another library's exception, or the exception's class if it has no
    message."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


class RopextError(Exception):
    """A mistake of the user or in the input, in one sentence."""

    exit_code = 2

    def reword(self, reworded: Callable[[str], str]) -> None:
        """Change the sentence of this error."""
        self.args = (reworded(str(self)),)


class UsageError(RopextError, ValueError):
    """Options or recipe values that do not fit together or are outside their range.

    It is a ValueError, so pydantic adds the place of the field that raised it.
    """


class InputError(RopextError):
    """A model directory, config, data file or hub id that cannot be read."""


class NotWritten(InputError):
    """A file that the file system does not let ropext write, for example because the disk is
    full."""


class ConfigError(InputError):
    """A config that cannot be read. `source` is its name in the sentence; a config that came from
    elsewhere has no file of that name."""

    def __init__(self, sentence: str, source: str = "config.json") -> None:
        """Make this mistake of a user from its sentence. Keep the name of its config apart."""
        super().__init__(sentence, source)
        self.sentence = sentence
        self.source = source

    def reword(self, reworded: Callable[[str], str]) -> None:
        """Change the sentence of this error, without the name of its config."""
        self.sentence = reworded(self.sentence)

    def __str__(self) -> str:
        """Return the sentence of this error with the name of its config in front."""
        return f"{self.source}: {self.sentence}"


class NoServer(InputError):
    """No server answers at an address; nothing was done yet."""

    exit_code = 5


class UnsupportedModel(RopextError):
    """A recognised model that ropext cannot extend; the sentence names the missing part."""


class NotExpressible(RopextError):
    """No stock config holds the wanted spectrum exactly (in the named engines), or the model
    already has it."""


class OutputExists(RopextError):
    """The output exists already, or another run is writing it."""


class OutputLocked(OutputExists):
    """Another command is writing the output now; the same command can be tried again later."""

    exit_code = 7


class ProofFailed(RopextError):
    """transformers builds something else from the written config than the plan states."""

    exit_code = 3
    changed: Sequence[str] | None = None  # config keys that stock reads otherwise than the base's


class FilledTwice(ProofFailed):
    """The weight files hold two tensors for one parameter; their author has to repair them."""

    exit_code = 2


class GateFailed(RopextError):
    """A measured value is on the wrong side of a gate."""

    exit_code = 3


class NotMeasured(RopextError):
    """A gate on a value that was not measured."""

    exit_code = 6


class Stopped(RopextError):
    """Interrupted, out of memory, or a server lost; ropext kept the finished work."""

    exit_code = 4


class Interrupted(Stopped):
    """Ctrl-C or SIGTERM, with a sentence on the kept work. If nothing is kept, it stays Python's
    KeyboardInterrupt."""


class NothingKept(Interrupted):
    """An interrupt before anything was finished, or without a directory to keep it in."""

    exit_code = 130  # the code of a plain KeyboardInterrupt, too
