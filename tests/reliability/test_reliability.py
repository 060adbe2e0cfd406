"""Short campaigns of kills, failing calls and a user's files, in a process of their own.

`python -m tests.reliability` runs the long ones.
"""

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


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """Return each campaign's exit code and output, by its name."""
    folder = tmp_path_factory.mktemp("said")
    done = subprocess.run(
        [sys.executable, "-m", "tests.reliability.short", str(folder)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return {path.stem: path.read_text("utf-8") for path in folder.glob("*.txt")}


def kept(text, capsys):
    """Print a campaign's output on the unchanged code, check it, and return it."""
    with capsys.disabled():
        print("\n" + text)
    assert text.startswith("0\n"), text
    assert "0 promises broken" in text
    return text


def test_killed_or_failing_commands_keep_their_promises(said, capsys):
    text = kept(said["kills"], capsys)
    rows = re.findall(r"^\| all \| (.*) \|$", text, re.MULTILINE)
    assert min(map(int, rows[0].split(" | ")[1:4])) >= 1


def test_no_input_and_nothing_of_a_user_s_is_lost(said, capsys):
    text = kept(said["guard"], capsys)
    assert int(re.findall(r"^(\d+) cases, ", text, re.MULTILINE)[0]) > 100


@pytest.mark.parametrize("fault", ["named before it is written", "what was left is never swept up"])
def test_the_campaign_notices_a_broken_writer(said, fault):
    assert said[fault].startswith("1\n"), said[fault]
    assert "BROKEN " in said[fault]


UNGUARDED = {
    "what is replaced is not checked": (
        "a file is added to OUT|OUT is moved away, and made anew|OUT becomes a link|OUT is edited"
    ),
    "nothing is compared": "is|lies in|holds|links into",
    "places are compared as text": "is, by os.stat|lies in, by os.stat|holds, by os.stat",
}


@pytest.mark.parametrize(("fault", "relations"), UNGUARDED.items())
def test_the_campaign_notices_a_guard_that_is_off(said, fault, relations):
    text = said[fault]
    assert text.startswith("1\n"), text
    for relation in relations.split("|"):
        assert re.search(f"^BROKEN .*, {relation}: it (was done, or|lost )", text, re.MULTILINE), (
            relation,
            text,
        )
