"""What every test starts from."""

import signal
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def own_interrupts() -> Iterator[None]:
    """Ctrl-C as an interpreter begins with it: a test run in the background of a script inherits it
    ignored, which its children would too."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, signal.default_int_handler)
