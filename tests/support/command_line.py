"""The command line: in this process, in a fork of it, and in one of its own."""

import json
import os
import signal
import socket
import subprocess
import sys
import traceback
from importlib import import_module

import pytest

# Before DRIVER: the first proof alone has a process of its own, or none has.
FIRST_APART = "from proving import first_apart; first_apart()\n"
NONE_APART = "from proving import none_apart; none_apart()\n"
BLANK_PICTURES = "import pictures; pictures.draw(wholly=False)\n"
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
    """Run `ropext words...` and return (exit code, the output that capsys caught)."""
    from ropext.cli.app import main

    code = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["ropext", *map(str, words)])
        try:
            main()
        except SystemExit as stop:
            code = stop.code or 0
    return code, capsys.readouterr() if capsys else None


class Forked:
    """A call in a fork of this interpreter, which has imported what takes seconds. What it says can
    be read while it runs, and it is killed as any process."""

    def __init__(self, call, folder, **variables):
        for name in ("ropext.training.fit", "ropext.evaluation.evaluation",
                     "ropext.verifying.proof.child", "peft",
                     "transformers.models.llama.modeling_llama"):  # fmt: skip
            import_module(name)
        heard, said = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            _begin(call, folder, variables, said)
        os.close(said)
        self.said = os.fdopen(heard, encoding="utf-8")

    def kill(self, number=signal.SIGKILL):
        os.kill(self.pid, number)

    def wait(self):
        """Wait for the process; return its exit code and the rest of its output."""
        with self.said:
            rest = self.said.read()
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]), rest


def _begin(call, folder, variables, said):
    """Run the call in the child; never return."""
    code = 1
    try:
        import torch
        from accelerate.state import AcceleratorState

        os.dup2(said, 2)
        sys.stdout = sys.stderr = os.fdopen(2, "w", buffering=1, encoding="utf-8")
        os.chdir(folder)
        os.environ |= variables
        AcceleratorState._reset_state(reset_partial_state=True)
        torch.set_num_threads(1)  # a fork has no threads of this interpreter
        told = call()
        code = told if isinstance(told, int) else 0
    except SystemExit as stop:
        code = stop.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def in_two_processes(call, folder):
    """Run a call in two processes; return (exit code, output) of each."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        meet = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free.getsockname()[1])}
    meet |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    ranks = [Forked(call, folder, RANK=own, LOCAL_RANK=own, **meet) for own in "01"]
    return [own.wait() for own in ranks]


def environment(home):
    keep = {key: os.environ[key] for key in ("PATH", "OMP_NUM_THREADS") if key in os.environ}
    own = {"HOME": str(home), "PYTHONPATH": os.pathsep.join(sys.path), "HF_HUB_OFFLINE": "1"}
    return keep | own | {"FORCE_COLOR": "1", "NO_COLOR": "1"}


def drive(folder, lines, before=BLANK_PICTURES, **variables):
    """Run each command line in one interpreter; return (exit code, stdout, stderr) of each.

    Only its first proof has a process of its own. `before` runs in it first.
    """
    done = subprocess.run(
        [sys.executable, "-P", "-c", before + FIRST_APART + DRIVER, json.dumps(lines)],
        cwd=folder,
        env=environment(folder) | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]
