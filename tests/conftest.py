"""What every test starts from."""

import signal
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def own_interrupts() -> Iterator[None]:
    """`ropext.cli.app.main` answers Ctrl-C to the end of its process, which here is the next
    test's."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)
