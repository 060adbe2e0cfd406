"""What every test starts from."""

import os
import signal
from collections.abc import Iterator

import proving
import pytest

from ropext import stock

# Files that take a minute or more begin first, in this order: two workers then end together.
LONGEST = (
    *("test_demo", "test_golden", "test_fit", "test_stock", "test_every_command", "test_auto"),
    *("test_simulated_windows", "test_whole_runs", "test_reliability", "test_finetune"),
    *("test_gpu_day", "test_finetune_kinds", "test_deciding_options", "test_strangers"),
    *("test_docs", "test_proof", "test_proof_forward", "test_tables", "test_imports"),
    "test_public",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first, and leave the order inside of each file."""
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs a call or a device that this system lacks: `@pytest.mark.needs("mkfifo")`.
    Proofs have a process of their own in the tests of that process alone."""
    own = item.path.stem.startswith("test_proof")
    stock.ask_child = proving.apart if own else proving.here
    for mark in item.iter_markers("needs"):
        for name in mark.args:
            there = os.path.exists(name) if name.startswith("/") else hasattr(os, name)
            if not there:
                pytest.skip(f"this system has no {name}")


@pytest.fixture(autouse=True)
def own_interrupts() -> Iterator[None]:
    """Ctrl-C as an interpreter begins with it: a test run in the background of a script inherits it
    ignored, which its children would too."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, signal.default_int_handler)
