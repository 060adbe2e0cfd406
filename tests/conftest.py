"""What every test starts from."""

import gc
import os
import signal
import socket
from collections.abc import Iterator
from typing import Any

import pictures
import proving
import pytest

from ropext.families import stock

# Files that take a minute or more begin first, in this order: two workers then end together.
LONGEST = (
    *("test_reliability", "test_stock", "test_fit", "test_auto", "test_demo", "test_finetune"),
    *("test_simulated_windows", "test_whole_runs", "test_session", "test_gpu_day", "test_golden"),
    *("test_distributed", "test_finetune_kinds", "test_fuzz", "test_mutations", "test_docs"),
    *("test_deciding_options", "test_every_command", "test_strangers", "test_proof", "test_public"),
    *("test_proof_forward", "test_tables", "test_imports", "test_printed_lines", "test_secrets"),
)


HERE = ("localhost", "127.0.0.1", "::1", "", None)
_look_up = socket.getaddrinfo


def _look_up_here(host: str | bytes | None, *args: Any, **options: Any) -> Any:
    """Fail the test that asks another machine: it would wait for a network, or depend on one."""
    if host not in HERE:
        pytest.fail(f"the test asks {host!r}; set HF_HUB_OFFLINE, or HF_ENDPOINT to a server here")
    return _look_up(host, *args, **options)


socket.getaddrinfo = _look_up_here
gc.disable()  # until all is imported and collected: a third of that time goes to it


def pytest_collection_finish() -> None:
    """Keep all present objects to the end, so that the garbage collector skips them."""
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first, and leave the order inside of each file."""
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs a call or a device that this system lacks: `@pytest.mark.needs("mkfifo")`.
    Proofs have a process of their own in the tests of that process alone, and pictures more than
    one pixel in the tests that look at them."""
    own = item.path.stem.startswith("test_proof")
    stock.ask_child = proving.apart if own else proving.here
    pictures.draw(wholly=item.path.stem in pictures.LOOKING)
    for mark in item.iter_markers("needs"):
        for name in mark.args:
            there = os.path.exists(name) if name.startswith("/") else hasattr(os, name)
            if not there:
                pytest.skip(f"this system has no {name}")


@pytest.fixture(autouse=True)
def own_interrupts() -> Iterator[None]:
    """Restore Ctrl-C: a test run in the background of a script inherits it ignored, and so would
    its children."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, signal.default_int_handler)
