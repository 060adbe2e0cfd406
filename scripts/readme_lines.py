"""Run every line of the README unchanged, in a fresh clone and then in an empty folder.

    python scripts/readme_lines.py FOLDER

FOLDER must not exist. The lines that install come first and run in a clone. All others run in an
empty folder next to it that holds a copy of the bundled model as ./model. Uploads, lines for a
container engine, and the line of the tests, which .ci/run is, are left out by name.
"""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from slow_results import ROOT, blocks

LEFT_OUT = {
    "$ ": "needs a model of the hub or another program; the README shows the output, too",
    "ropext push": "uploads to an account",
    "docker ": "wants a container engine",
    "pytest": "is what .ci/run runs",
}
MODEL = """\
import ropext
import transformers
model = transformers.AutoModelForCausalLM.from_pretrained("./model")
"""


def run(command: list[str], folder: Path, path: str) -> None:
    """Run one command and time it; if it failed, print the end of its output."""
    began = time.monotonic()
    environment = os.environ | {"PATH": path, "HF_HUB_OFFLINE": "1"}
    environment.pop("VIRTUAL_ENV", None)
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    said = command[-1].strip().replace("\n", "; ")
    print(f"{done.returncode}  {time.monotonic() - began:5.0f} s  {said}", flush=True)
    if done.returncode:
        raise SystemExit((done.stdout + done.stderr)[-3000:])


def main(folder: Path) -> None:
    clone, empty = folder / "clone", folder / "empty"
    empty.mkdir(parents=True)
    subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
    shutil.copytree(ROOT / "ropext/demo/checkpoint", empty / "model")
    path = f"{clone / '.venv/bin'}{os.pathsep}{os.environ['PATH']}"
    readme = (ROOT / "README.md").read_text("utf-8")
    lines = [
        (language, line)
        for language, text in blocks(readme)
        if language != "bibtex"
        for line in (text.splitlines() if language == "sh" else [text])
    ]
    for language, line in sorted(lines, key=lambda own: "pip install" not in own[1]):
        reason = next((why for word, why in LEFT_OUT.items() if word in line), None)
        if reason:
            print(f"-  not run: {line.splitlines()[0]} ({reason})", flush=True)
        elif language == "python":
            script = MODEL + line if "(model" in line else line
            shutil.rmtree(empty / "model-4x", ignore_errors=True)
            run([str(clone / ".venv/bin/python"), "-c", script], empty, path)
        else:
            run(["bash", "-euc", line], clone if "pip install" in line else empty, path)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
