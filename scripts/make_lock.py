"""Write the lock of ropext's dependencies for a machine without a network, with hashes.

    python scripts/make_lock.py [--wheels FOLDER]

Run it with CPython 3.11 on Linux x86-64, for which the lock is. pip chooses the versions:
constraints.txt's, and the newest versions of further dependencies. torch's wheel for a CPU comes
from its own index, or from FOLDER.
"""

import argparse
import hashlib
import json
import platform
import subprocess
import sys
import tomllib
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

ROOT = Path(__file__).parents[1]
LOCK = ROOT / "locks/linux-x86_64-py311-cpu.txt"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
HEAD = """\
# The dependencies of ropext on Linux x86-64 with CPython 3.11 and torch for a CPU, with the hashes
# of their wheels. Written by scripts/make_lock.py; docs/deploy.md shows its use.
"""


def chosen(sources: list[str]) -> list[dict]:
    """Return the packages that pip would install into an empty environment."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    words = ["install", "--dry-run", "--ignore-installed", "--quiet", "--only-binary", ":all:"]
    words += ["--report", "-", "--constraint", str(ROOT / "constraints.txt"), *sources]
    command = [sys.executable, "-P", "-m", "pip", *words, *project["dependencies"]]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout)["install"]


def line(wheel: dict) -> str:
    """Return a wheel's name, version and hash, as pip reads them."""
    name, version = wheel["metadata"]["name"], wheel["metadata"]["version"]
    place = urlsplit(wheel["download_info"]["url"])
    if place.scheme == "file":
        digest = hashlib.sha256(Path(url2pathname(place.path)).read_bytes()).hexdigest()
    else:
        digest = wheel["download_info"]["archive_info"]["hashes"]["sha256"]
    return f"{name.lower().replace('_', '-')}=={version} \\\n    --hash=sha256:{digest}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wheels", help="a folder that holds torch's wheel for a CPU")
    wheels = parser.parse_args().wheels
    machine = (sys.implementation.name, sys.version_info[:2], platform.system(), platform.machine())
    if machine != ("cpython", (3, 11), "Linux", "x86_64"):
        sys.exit(f"the lock is for CPython 3.11 on Linux x86-64, and this is {machine}")
    sources = ["--find-links", wheels] if wheels else ["--extra-index-url", CPU_INDEX]
    lines = sorted(map(line, chosen(sources)))
    if not any(one.startswith("torch==") and "+cpu" in one for one in lines):
        sys.exit("pip chose no torch for a CPU")
    LOCK.parent.mkdir(exist_ok=True)
    LOCK.write_text(HEAD + "".join(lines), "utf-8")
    print(f"wrote {LOCK.relative_to(ROOT)}: {len(lines)} wheels")


if __name__ == "__main__":
    main()
