"""The command line: in this process, and in one of its own."""

import json
import os
import subprocess
import sys

import pytest

# Before DRIVER: the first proof alone has a process of its own.
FIRST_APART = "from proving import first_apart; first_apart()\n"
DRIVER = """
import json, os, sys, traceback
from ropext.cli.app import main
for number, words in enumerate(json.loads(sys.argv[1])):
    saved = os.dup(1), os.dup(2)
    for stream in (1, 2):
        file = os.open(f"said-{stream}", os.O_CREAT | os.O_TRUNC | os.O_RDWR)
        os.dup2(file, stream)
        os.close(file)
    sys.argv, code = ["ropext", *words], 0
    try:
        main()
    except SystemExit as stop:
        code = stop.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    for stream in (1, 2):
        (sys.stdout, sys.stderr)[stream - 1].flush()
        os.dup2(saved[stream - 1], stream)
        os.close(saved[stream - 1])
    said = [open(f"said-{stream}", encoding="utf-8", newline="").read() for stream in (1, 2)]
    print(json.dumps([code, *said]), flush=True)
"""


def run(*words, capsys=None):
    """(exit code, what capsys heard) of `ropext words...`."""
    from ropext.cli.app import main

    code = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["ropext", *map(str, words)])
        try:
            main()
        except SystemExit as stop:
            code = stop.code or 0
    return code, capsys.readouterr() if capsys else None


def environment(home):
    keep = {key: os.environ[key] for key in ("PATH", "OMP_NUM_THREADS") if key in os.environ}
    own = {"HOME": str(home), "PYTHONPATH": os.pathsep.join(sys.path), "HF_HUB_OFFLINE": "1"}
    return keep | own | {"FORCE_COLOR": "1", "NO_COLOR": "1"}


def drive(folder, lines):
    """(exit code, stdout, stderr) of each command line, all in one interpreter; its first proof
    alone has a process of its own."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", FIRST_APART + DRIVER, json.dumps(lines)],
        cwd=folder,
        env=environment(folder),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]
