"""Do the steps of the Dockerfile one by one without a container engine, in a bare folder.

    python scripts/dockerfile_steps.py FOLDER [--build-arg NAME=VALUE]... -- demo

FOLDER must not exist. It gets a virtual environment in place of the base image, a home of its own,
and only what is copied. The step that adds a user is left out (it needs root), and so is `chown`;
the words behind `--` are given to the entry point. What this does not show: that the image builds.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]


def instructions(text: str) -> Iterator[tuple[str, str]]:
    """(instruction, its text) with continued lines joined and comments left out."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    for line in re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines():
        if line.strip():
            word, _, rest = line.partition(" ")
            yield word, rest.strip()


def copied(text: str) -> list[tuple[list[str], str]]:
    """(sources, target) of every COPY."""
    found = [rest.split() for word, rest in instructions(text) if word == "COPY"]
    return [(words[:-1], words[-1]) for words in found]


def shell(rest: str) -> str:
    """The command of a RUN without its mounts."""
    return re.sub(r"^(--mount=\S+\s+)+", "", rest)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--build-arg", action="append", default=[])
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options, words = parser.parse_args(sys.argv[1:end]), sys.argv[end + 1 :]
    folder = options.folder.resolve()
    given = dict(own.split("=", 1) for own in options.build_arg)
    for name in ("home", "src", "data"):
        (folder / name).mkdir(parents=True)
    subprocess.run([sys.executable, "-P", "-m", "venv", folder / "venv"], check=True)
    environment = {"PATH": f"{folder}/venv/bin:{os.environ['PATH']}", "HOME": str(folder / "home")}
    environment |= {key: value for key, value in os.environ.items() if key.startswith("PIP_")}
    entry: list[str] = []
    for word, rest in instructions((ROOT / "Dockerfile").read_text(encoding="utf-8")):
        sys.stderr.write(f"{word} {rest}\n")
        if word == "ARG":
            name, _, default = rest.partition("=")
            environment[name] = given.get(name, default)
        elif word == "ENV":
            environment |= dict(own.split("=", 1) for own in rest.split())
            environment["HF_HOME"] = str(folder / "home/cache")
        elif word == "COPY":
            *sources, target = rest.split()
            place = folder / "src" / target
            subprocess.run(["cp", "-r", *sources, place], cwd=ROOT, check=True)
        elif word == "RUN" and "useradd" not in rest:
            subprocess.run(
                ["sh", "-ec", shell(rest)], cwd=folder / "src", env=environment, check=True
            )
        elif word == "ENTRYPOINT":
            entry = json.loads(rest)
    done = subprocess.run([*entry, *words], cwd=folder / "data", env=environment)
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
