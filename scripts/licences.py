"""List the licences of all packages of an installation, from their own metadata.

    python scripts/licences.py [PACKAGE]

It follows the requirements of PACKAGE (default ropext), without extras, through the installed
packages.
"""

import re
import sys
from collections.abc import Iterator
from importlib import metadata

NAME = re.compile(r"[A-Za-z0-9][\w.-]*")
OPEN = re.compile(
    r"apache|mit|bsd|isc|psf|python|mozilla|mpl|zlib|unlicense|hpnd|public domain|0bsd|cc0",
    re.IGNORECASE,
)


def needed(package: str, seen: set[str]) -> Iterator[str]:
    """Yield the package and all packages that it needs, each once; packages that are not installed
    are left out."""
    name = re.sub(r"[-_.]+", "-", package).lower()
    if name in seen:
        return
    seen.add(name)
    try:
        found = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return
    yield name
    for line in found.requires or ():
        if "extra ==" not in line and (match := NAME.match(line)):
            yield from needed(match[0], seen)


def licence(name: str) -> str:
    """Return the licence expression, or the classifiers, or the first line of the free text."""
    found = metadata.metadata(name)
    if expression := found.get("License-Expression"):
        return expression
    marks = [c.rpartition(" :: ")[2] for c in found.get_all("Classifier") or () if "License" in c]
    lines = (found.get("License") or "").strip().splitlines()
    return "; ".join(mark for mark in marks if mark != "OSI Approved") or (
        lines[0] if lines else "not stated"
    )


def main() -> int:
    package = sys.argv[1] if sys.argv[1:] else "ropext"
    rows = [(name, metadata.version(name), licence(name)) for name in needed(package, set())]
    print("| package | version | licence |\n|---|---|---|")
    for row in sorted(rows):
        print("| " + " | ".join(row) + " |")
    unknown = [name for name, _, said in rows if not OPEN.search(said)]
    for name in unknown:
        print(f"not known to be permissive: {name}", file=sys.stderr)
    return 1 if unknown else 0


if __name__ == "__main__":
    sys.exit(main())
