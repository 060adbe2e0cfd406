"""Where words go: the result to stdout, narration to stderr, nothing else anywhere."""

import json
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ropext.errors import InputError

if TYPE_CHECKING:
    from ropext.rope import Rope, Spectrum


def _plain(value: Any) -> Any:
    """JSON has no infinity and no NaN; they become null, as RFC 8259 readers expect."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def visible(text: str) -> str:
    """Without what a terminal would obey or could not encode: a config is written by strangers."""
    if text.replace("\n", "").isprintable():
        return text
    return "".join(
        c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text
    )


def as_json(data: Any) -> str:
    """One JSON document; where a character would not print, all but ASCII is escaped."""
    text = json.dumps(_plain(data), indent=2, ensure_ascii=False, allow_nan=False)
    if text.replace("\n", "").isprintable():
        return text
    return json.dumps(_plain(data), indent=2, allow_nan=False)


class Out:
    """One command's voice."""

    def __init__(self, as_json: bool = False, quiet: bool = False) -> None:
        self.as_json = as_json
        self.quiet = quiet

    def result(self, text: str, data: Any) -> None:
        """The result: text for people, or one JSON document with --json."""
        body = as_json(data) if self.as_json else visible(text)
        try:
            sys.stdout.write(body.rstrip("\n") + "\n")
            sys.stdout.flush()
        except OSError as error:
            sys.stdout = None  # or Python complains again at exit
            if isinstance(error, BrokenPipeError):
                return  # the reader had enough (`ropext plan ... | head`)
            raise InputError(f"the result cannot be printed: {error.strerror}") from None

    def picture(
        self,
        path: Path,
        rope: "Rope",
        spectra: "Mapping[str, Spectrum]",
        target: int,
        title: str,
    ) -> None:
        """The file that --plot asks for."""
        from ropext.report import spectra as pictures  # late: it loads matplotlib

        try:
            pictures.plot(rope, spectra, target, path, title=title)
        except OSError as error:
            raise InputError(f"--plot {path} cannot be written: {error.strerror}") from None
        self.say(f"wrote {path}")

    def say(self, sentence: str) -> None:
        """Narration; --quiet silences it."""
        if not self.quiet:
            sys.stderr.write(visible(sentence).rstrip("\n") + "\n")
            sys.stderr.flush()

    @property
    def animated(self) -> bool:
        """Progress bars only where a person looks on."""
        return not self.quiet and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


def fail(sentence: str) -> None:
    """The last word of a command that did not succeed; said also with --quiet."""
    sys.stderr.write(f"error: {visible(sentence)}\n")
    sys.stderr.flush()
