"""Run one piece: its cases that are not noted yet, each a line as it comes.

The process ends after a case that failed, for an error on the device can spoil later cases in the
same process; the parent then starts another one.
"""

import gc
import importlib
import importlib.metadata
import platform
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from datetime import date
from typing import Any

from gpu_pieces import Day, LeftOut

SHOWN = ("torch", "transformers", "accelerate", "peft", "numpy", "bitsandbytes", "flash-attn")


def machine(day: Day) -> dict[str, Any]:
    """Return device, driver and versions, as every line has them."""
    versions = {"python": platform.python_version()}
    for name in SHOWN:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    device, driver = f"a CPU ({platform.machine()})", None
    if not day.dry and shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        lines = subprocess.run(query, capture_output=True, text=True, check=True).stdout
        device, driver = lines.splitlines()[0].split(", ")
        device = f"{len(lines.splitlines())} × {device}"
    return {"device": device, "driver": driver, "versions": versions}


def run(case: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the outcome of a case."""
    begun = time.monotonic()
    try:
        result: dict[str, Any] = {"figures": case()}
    except LeftOut as reason:
        result = {"left_out": str(reason)}
    except (Exception, SystemExit):
        result = {"error": traceback.format_exc()}
    return result | {"seconds": round(time.monotonic() - begun, 1)}


def main() -> None:
    name, text = sys.argv[1:]
    day = Day.of(text)
    here = machine(day)
    for case, work in importlib.import_module(f"gpu_pieces.{name}").cases(day).items():
        if case in day.noted(name):
            continue
        day.running.write_text(case, encoding="utf-8")
        line = {"piece": name, "case": case, "dry": day.dry, "date": str(date.today())}
        result = run(work)
        day.append(line | result | here)
        if "error" in result:
            return
        gc.collect()
        if "torch" in sys.modules and not day.dry:
            sys.modules["torch"].cuda.empty_cache()
    day.append({"piece": name, "case": None, "dry": day.dry})


if __name__ == "__main__":
    main()
