"""Old versions of transformers, each in a directory of its own, on the same torch."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

# What each version needs that clashes with today's; everything else is shared.
PINS = {
    "4.57.6": ("tokenizers==0.22.1", "huggingface_hub==0.36.0"),
    "4.51.3": ("tokenizers==0.21.4", "huggingface_hub==0.36.0"),
}
# huggingface_hub speaks through requests before version 1.
SHARED = ("requests", "urllib3", "idna", "certifi", "charset-normalizer", "regex")


def folder(version):
    """Return the folder that keeps this version between runs."""
    python = f"py{sys.version_info.major}.{sys.version_info.minor}"
    return Path(tempfile.gettempdir()) / "ropext-old-readers" / f"transformers-{version}-{python}"


def install(version):
    """Return the directory to put first on PYTHONPATH, or the reason why there is none."""
    target = folder(version)
    if target.exists():
        return target, ""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as made:
        command = [sys.executable, "-m", "pip", "install", "--target", made, "--no-deps", "-q"]
        command += ["--disable-pip-version-check", f"transformers=={version}"]
        done = subprocess.run(
            [*command, *PINS[version], *SHARED], capture_output=True, text=True, check=False
        )
        if done.returncode:
            return None, (done.stderr.strip().splitlines() or ["pip failed"])[-1]
        try:
            os.rename(made, target)
        except OSError:  # another run was faster
            return target, ""
        os.mkdir(made)  # for the context manager to remove
    return target, ""
