"""Run the lines of docs/deploy.md for a machine without a network.

    python scripts/airgap.py FOLDER

FOLDER must not exist. The lines of the first block run in a clone with a network; a bundled model
takes the place of the one on the hub. Those of the second block run in an environment without
packages, with copies of `wheels` and `model` alone, in a network namespace without a route. There
also run: an extension with its verification, and the recipe `smoke-test`, which trains and
evaluates. What this needs: Linux, and the right to make a user namespace (`unshare`).
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from slow_results import blocks

ROOT = Path(__file__).parents[1]
SECTION = "\n## Without a network\n"
FETCH = "hf download "
MORE = (
    "ropext extend ./model --factor 4 --method yarn -o model-4x",
    "ropext verify ./model-4x --deep --against ./model",
    "ropext run smoke-test -o smoke",
)
# Ends with 1 if an address outside of this machine can be reached. Nothing leaves it: the kernel
# knows no way to send it.
NO_ROUTE = """
import socket
try:
    socket.create_connection(("192.0.2.1", 443), 5)
except OSError as error:
    raise SystemExit(0 if "unreachable" in str(error) else f"not refused by the kernel: {error}")
raise SystemExit("a machine outside was reached")
"""


def section(text: str) -> list[list[str]]:
    """Return the lines of each block of the section."""
    part = text.partition(SECTION)[2].partition("\n## ")[0]
    return [lines.splitlines() for _, lines in blocks(part)]


def run(lines: list[str], folder: Path, python: Path, *, isolated: bool = False) -> None:
    """Run lines of a shell in a folder, with the programs of an environment first."""
    keep = ("PATH", "LANG", "OMP_NUM_THREADS")
    environment = {name: os.environ[name] for name in keep if name in os.environ}
    if not isolated:  # how this machine reaches its index
        environment |= {key: value for key, value in os.environ.items() if key.startswith("PIP_")}
    environment |= {"HOME": str(folder), "PATH": f"{python.parent}:{environment['PATH']}"}
    words = ["bash", "-exuo", "pipefail", "-c", "\n".join(lines)]
    if isolated:
        words = ["unshare", "--net", "--map-root-user", *words]
    sys.stdout.flush()
    subprocess.run(words, cwd=folder, env=environment, check=True)


def bare(folder: Path) -> Path:
    """Make an environment without packages."""
    subprocess.run([sys.executable, "-P", "-m", "venv", folder], check=True)
    return folder / "bin/python"


def main() -> None:
    folder = Path(sys.argv[1]).resolve()
    clone = folder / "clone"
    away = folder / "away"
    away.mkdir(parents=True)
    subprocess.run(["git", "clone", "-q", ROOT, clone], check=True)
    online, offline = section((clone / "docs/deploy.md").read_text("utf-8"))[:2]
    fetching = [line for line in online if line.startswith(FETCH)]
    assert len(fetching) == 1, online
    run([line for line in online if line not in fetching], clone, bare(folder / "online"))
    shutil.copytree(clone / "wheels", away / "wheels")
    shutil.copytree(clone / "ropext/demo/checkpoint", away / "model")
    shutil.rmtree(clone)
    python = bare(folder / "offline")
    run([f"python -c '{NO_ROUTE}'", *offline, *MORE], away, python, isolated=True)
    print(f"{len(offline) + len(MORE)} lines ran without a route")


if __name__ == "__main__":
    main()
