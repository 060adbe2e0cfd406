"""Where words go: the result to stdout, narration to stderr, nothing else anywhere."""

import json
import math
import os
import sys
from typing import Any


def _plain(value: Any) -> Any:
    """JSON has no infinity and no NaN; they become null, as RFC 8259 readers expect."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


class Out:
    """One command's voice."""

    def __init__(self, as_json: bool = False, quiet: bool = False) -> None:
        self.as_json = as_json
        self.quiet = quiet

    def result(self, text: str, data: Any) -> None:
        """The result: text for people, or one JSON document with --json."""
        body = json.dumps(_plain(data), indent=2, ensure_ascii=False) if self.as_json else text
        sys.stdout.write(body.rstrip("\n") + "\n")
        sys.stdout.flush()

    def say(self, sentence: str) -> None:
        """Narration; --quiet silences it."""
        if not self.quiet:
            sys.stderr.write(sentence.rstrip("\n") + "\n")
            sys.stderr.flush()

    @property
    def animated(self) -> bool:
        """Progress bars only where a person looks on."""
        return not self.quiet and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


def fail(sentence: str) -> None:
    """The last word of a command that did not succeed; said also with --quiet."""
    sys.stderr.write(f"error: {sentence}\n")
    sys.stderr.flush()
