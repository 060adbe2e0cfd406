"""The whole answers of ten commands, letter by letter, as recorded in transcripts/.

Make an intended change with `python -m tests.golden NAME`; its diff shows the new screens. Numbers
are compared within rounding: see `transcript`.
"""

from pathlib import Path

import pytest

from golden import transcript
from golden.cases import CASES, needed

HERE = Path(__file__).parent / "transcripts"


def test_a_difference_is_seen_and_rounding_is_not():
    wanted = "loss 2.6413 at 512\nwrote OUT\n"
    assert not transcript.differences("loss 2.6414 at 512\nwrote OUT\n", wanted)
    assert transcript.differences("loss 2.6433 at 512\nwrote OUT\n", wanted)
    assert transcript.differences("loss 2.6413 at 513\nwrote OUT\n", wanted)
    assert transcript.differences("loss 2.6413 at 512\nwrote it\n", wanted)
    assert transcript.differences("loss 2.6413 at 512\n", wanted)


def test_a_rewritten_transcript_keeps_lines_that_only_rounding_changed():
    wanted = "loss 2.6413 at 512\nthe old word\nloss 1.5 at 256\n"
    found = "loss 2.6414 at 512\na new word\nand one more\nloss 1.7 at 256\n"
    merged = transcript.merged(found, wanted)
    assert merged == "loss 2.6413 at 512\na new word\nand one more\nloss 1.7 at 256\n"
    assert not transcript.differences(found, merged)


def test_needed_adds_the_transcripts_that_a_transcript_reads():
    assert [case.name for case in needed(["compare"])] == ["extend", "finetune", "eval", "compare"]
    assert needed([]) == list(CASES)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Record the transcript of every case with the present code."""
    folder = tmp_path_factory.mktemp("golden")
    return {case.name: text for case, text in transcript.record(folder)}


@pytest.mark.slow
@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_the_output_of_a_command_equals_its_transcript(found, name):
    wanted = (HERE / f"{name}.txt").read_text("utf-8")
    different = transcript.differences(found[name], wanted)
    assert not different, "\n".join(different[:20])
