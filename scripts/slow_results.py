"""Results of `.ci/slow`: written with the hashes of the data and pins they cover, and checked.

    python scripts/slow_results.py                  says which parts were not run on what is here
    python scripts/slow_results.py write PART LOG   keeps the end of LOG as the part's dated result
    python scripts/slow_results.py floors           the oldest versions that pyproject.toml allows

A table, a pin or a line of the README cannot change without its parts being run again; code can.
"""

import hashlib
import json
import platform
import re
import sys
import tomllib
from datetime import date
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = "README.md: lines of its blocks"
FLOORS = "pyproject.toml: dependencies"
EXTRAS = "pyproject.toml: extras dev, lm-eval"
IMAGE = "Dockerfile: steps"
PINS = "constraints.txt: versions"
LOCK = "locks/linux-x86_64-py311-cpu.txt: hashes"
CENSUS = "ropext/families/types.json"
DEFAULTS = "ropext/families/defaults.json"
MEASURED = "scripts/loaders/measured.json"
CHECKPOINTS = "scripts/loaders/checkpoints.py"
GGUF = "ropext/loaders/gguf.json: architectures"
KEPT = {"loaders": 400, "port": 250}  # lines of a log
COVERED = {
    "environments": (PINS,),
    "floors": (FLOORS,),
    "lm-eval": (PINS, EXTRAS),
    "encoders": (PINS,),
    "readme": (README, PINS),
    "airgap": (LOCK,),
    "image": (IMAGE,),
    "oracle": (PINS, CENSUS, DEFAULTS),
    "spellings": (PINS, CENSUS, DEFAULTS),
    "loaders": (MEASURED, CHECKPOINTS),
    "gguf": (GGUF,),
    "port": (PINS,),
}


def blocks(text: str) -> list[tuple[str, str]]:
    """Return (language, lines) of each fenced block of a page; "sh" for indented lines, one by
    one."""
    found = r"^```(\w+)\n(.*?)^```$|^    (\S[^\n]*)$"
    return [
        (own[1], own[2]) if own[1] else ("sh", own[3] + "\n")
        for own in re.finditer(found, text, re.M | re.S)
    ]


def content(root: Path, what: str) -> str:
    """Return the data or pins of that name, without comments and prose."""
    file, _, part = what.partition(": ")
    text = (root / file).read_text("utf-8")
    if file == "README.md":
        return "".join(f"{language}\n{lines}" for language, lines in blocks(text))
    if file == "pyproject.toml":
        project = tomllib.loads(text)["project"]
        if part == "dependencies":
            return json.dumps(project[part])
        names = part.removeprefix("extras ").split(", ")
        return json.dumps({name: project["optional-dependencies"][name] for name in names})
    if part == "architectures":
        return json.dumps(json.loads(text)[part])
    # What a script imports may move in the package, and measures the same.
    left_out = ("#", "from ropext", "import ropext") if file.endswith(".py") else ("#",)
    return "\n".join(line for line in text.splitlines() if not line.startswith(left_out))


def digest(root: Path, what: str) -> str:
    return hashlib.sha256(content(root, what).encode()).hexdigest()[:16]


def newest(root: Path, part: str) -> Path | None:
    """Return a part's result; the names end in their dates."""
    found = sorted((root / "benchmarks" / "results").glob(f"slow-{part}-2*.md"))
    return found[-1] if found else None


def stale(root: Path) -> list[str]:
    """Return a sentence for each part whose result has other tables, pins or lines than those
    here."""
    out = []
    for part, covered in COVERED.items():
        file = newest(root, part)
        if file is None:
            continue  # never run: said, and no reason to refuse a change
        told = file.read_text("utf-8")
        changed = [what for what in covered if f"- {what}: {digest(root, what)}\n" not in told]
        if changed:
            out.append(f"run .ci/slow {part} for {', '.join(changed)}: {file.name} is of others")
    return out


def write(root: Path, part: str, log: str) -> Path:
    """Write the dated result of a part, in the place of its last one."""
    lines = [line for line in log.splitlines() if line.strip()][-KEPT.get(part, 60) :]
    covered = [f"- {what}: {digest(root, what)}" for what in COVERED[part]]
    head = f"# .ci/slow {part} ({date.today()})"
    machine = f"Python {platform.python_version()}, {platform.machine()}, {platform.system()}."
    text = [head, "", machine, "Covers:", "", *covered, "", "```", *lines, "```", ""]
    old = newest(root, part)
    new = root / "benchmarks" / "results" / f"slow-{part}-{date.today()}.md"
    new.write_text("\n".join(text), "utf-8")
    if old and old != new:
        old.unlink()
    return new


def floors(root: Path) -> list[str]:
    """Return each dependency, and each of `ropext serve`, at its oldest allowed version."""
    project = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"]
    wishes = list(project["dependencies"])
    # transformers is a dependency already, and pip takes no extra in a constraint.
    wishes += [own for own in project["optional-dependencies"]["serve"] if "[" not in own]
    return [wish.replace(">=", "==") for wish in wishes]


def main(words: list[str]) -> int:
    if words == ["floors"]:
        print("\n".join(floors(ROOT)))
        return 0
    if words[:1] == ["write"]:
        _, part, log = words
        print(f"wrote {write(ROOT, part, Path(log).read_text('utf-8'))}")
        return 0
    told = stale(ROOT)
    print("\n".join(told) or "no result of .ci/slow is older than a table or pin that is here")
    for part in COVERED:
        if newest(ROOT, part) is None:
            print(f".ci/slow {part} was not run yet")
    return 1 if told else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
