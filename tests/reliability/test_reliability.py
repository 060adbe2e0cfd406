"""A short campaign of kills and failing calls, in a process of its own; the long one by command."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="forks, and reads /proc"),
]


def campaign(*words, **more):
    return subprocess.run(
        [sys.executable, "-m", "tests.reliability", *words],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | more,
        capture_output=True,
        text=True,
        check=False,
    )


def test_killed_or_failing_commands_keep_their_promises(capsys):
    done = campaign("--kills", "24", "--faults", "4", "--wanted", "1")
    with capsys.disabled():
        print("\n" + done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "0 promises broken" in done.stdout
    rows = re.findall(r"^\| all \| (.*) \|$", done.stdout, re.MULTILINE)
    assert min(map(int, rows[0].split(" | ")[1:4])) >= 1


def test_no_input_and_nothing_of_a_user_s_is_lost(capsys):
    done = campaign("--guard", "part")
    with capsys.disabled():
        print("\n" + done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    cases, broken = re.findall(r"^(\d+) cases, (\d+) promises broken", done.stdout, re.MULTILINE)[0]
    assert (int(cases) > 100, int(broken)) == (True, 0)


BREAK = """
import sys
sys.path[:0] = ["tests", "tests/support"]
from ropext import guard
from ropext.checkpoint import staging
import os
{fault}
sys.argv = ["tests.reliability", *{words!r}]
import runpy
runpy.run_module("tests.reliability", run_name="__main__")
"""
FAULTS = {
    "named before it is written": (
        "def staged(output, **_):\n"
        "    from contextlib import nullcontext\n"
        "    from pathlib import Path\n"
        "    Path(output).mkdir()\n"
        "    return nullcontext(staging.Staged(Path(output)))\n"
        "import ropext.checkpoint.source as source\n"
        "source.staged = staged\n"
    ),
    "what was left is never swept up": "staging._recover = lambda *about: None\n",
}
UNGUARDED = {
    "what is replaced is not checked": (
        "staging._Target.check_taken = lambda *about: None",
        "a file is added to OUT|OUT is moved away, and made anew|OUT becomes a link|OUT is edited",
    ),
    "nothing is compared": ("guard.check = lambda *about: None", "is|lies in|holds|links into"),
    "places are compared as text": (
        "guard.identity = lambda path: os.path.exists(path) and os.path.realpath(path) or None",
        "is, by os.stat|lies in, by os.stat|holds, by os.stat",
    ),
}


def broken(fault, *words):
    done = subprocess.run(
        [sys.executable, "-c", BREAK.format(fault=fault, words=words)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "BROKEN " in done.stdout, done.stdout + done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_the_campaign_notices_a_broken_writer(fault):
    broken(fault, "--kills", "60", "--faults", "0", "--only", "extend")


@pytest.mark.parametrize(("fault", "relations"), UNGUARDED.values(), ids=UNGUARDED)
def test_the_campaign_notices_a_guard_that_is_off(fault, relations):
    said = broken(fault, "--guard", "quick")
    for relation in relations.split("|"):
        assert re.search(f"^BROKEN .*, {relation}: it (was done, or|lost )", said, re.MULTILINE), (
            relation,
            said,
        )
