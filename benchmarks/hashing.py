"""Measure the cost of hashing weights, in seconds per GB, and of remembering the digests.

    python benchmarks/hashing.py FOLDER [FOLDER ...]     1 GB is written into each, and deleted

Whether ropext remembers a digest follows from the file system of a folder (`guard.is_settled`).
"""

import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from ropext.base import systems
from ropext.files.checkpoint.digests import Digests

GB = 10**9
REPEATS = 5
CHUNK = os.urandom(10**6)


def seconds(call: Callable[[], object]) -> float:
    """Return the seconds of one call."""
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def measure(folder: Path) -> str:
    """Return a line with all readings: file in the page cache, file remembered or not."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        file = Path(place) / "weights"
        with open(file, "wb") as stream:
            for _ in range(GB // len(CHUNK)):
                stream.write(CHUNK)
        systems.sync(file)
        memory = Path(place) / "digests.json"
        each = [seconds(lambda: Digests(place=memory).of(file)) for _ in range(REPEATS)]
        looked = [seconds(lambda: systems.keeps_times(file)) for _ in range(REPEATS)]
    kept = "can be remembered" if systems.keeps_times(folder) else "is hashed each time"
    shown = ", ".join(f"{value:.2f}" for value in each)
    return (
        f"{folder}: {kept}; seconds per GB: {shown}; to find that out: {min(looked) * 1e6:.0f} µs"
    )


def main(folders: list[str]) -> None:
    """Print the machine and a line for each folder."""
    model = ""
    if sys.platform == "linux":
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
        model = next((line.partition(": ")[2] for line in lines if "model name" in line), "")
    print(f"Python {platform.python_version()}, {platform.platform()}, {model}, {REPEATS} readings")
    for folder in folders:
        print(measure(Path(folder)))


if __name__ == "__main__":
    main(sys.argv[1:])
