"""Servers are compared question by question, and only with models that had the same questions."""

import json
import math

import pytest
from command_line import run
from fake_server import Fake, looked_up, serving

import ropext
from ropext.base.bundled import MODELS
from ropext.evaluation import assembling
from ropext.results.measurement import discordances
from ropext.results.retrieval import ItemScore, sign_test
from ropext.results.rundir import read_run

ASKED = ("--lengths", "256,512", "--items", "4", "--tasks", "passkey", "--context", "256")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Evaluate a server that reads everything, and a server that loses the start beyond 300
    words."""
    room = tmp_path_factory.mktemp("ports")

    def blind(text: str) -> str:
        return looked_up(" ".join(text.split()[-300:]))

    for name, says in (("whole", looked_up), ("blind", blind)):
        with serving(Fake(limit=4096, says=says)) as url:
            code, _ = run("eval", "--endpoint", url, *ASKED, "-o", room / name)
        assert code == 0
    return room


def test_the_same_questions_are_paired(runs, capsys) -> None:
    code, told = run("compare", runs / "whole", runs / "blind", capsys=capsys)
    assert code == 0, told.err
    left = read_run(runs / "blind").models["port"].items
    right = read_run(runs / "whole").models["port"].items
    split = discordances(left, right)
    lost = sum(item.outcome == "missed" for item in left if item.length == 512)
    assert 0 < lost < 20
    at = split["passkey", 512]
    assert (at.more, at.fewer, at.alike) == (0, lost, 20 - lost)
    assert at.p == pytest.approx(min(1.0, 2 * 0.5**lost))
    assert split["passkey", 256].p == 1.0
    assert "blind:port" in told.out
    assert "found@512" in told.out


def test_a_gate_on_a_difference_of_shares(runs, capsys) -> None:
    words = ("compare", runs / "blind", runs / "whole", "--fail-if")
    code, _ = run(*words, f"found@512 < -0.1 vs {runs / 'whole'}:port", capsys=capsys)
    assert code == 3


def test_the_exact_sign_test() -> None:
    """By hand: of 10 differing answers 2 or fewer on one side, twice (1 + 10 + 45) / 1024."""
    assert sign_test(2, 8) == pytest.approx(2 * 56 / 1024)
    assert sign_test(0, 0) == 1.0
    assert sign_test(5, 5) == 1.0
    assert sign_test(0, 6) == pytest.approx(2 / 64)
    assert math.isclose(sign_test(8, 2), sign_test(2, 8))


def test_questions_over_one_text_count_as_one() -> None:
    def answers(points: list[float]) -> list[ItemScore]:
        return [
            ItemScore(
                *("mkey", 64, 0.0, number // 3, None, 0, point == 1, f"{number}", (), (), point),
                text_hash=f"{number}",
                outcome="found" if point else "missed",
            )
            for number, point in enumerate(points)
        ]

    split = discordances(answers([1, 1, 1, 0, 0, 1]), answers([0, 0, 0, 1, 0, 0]))
    one = split["mkey", 64]
    assert (one.more, one.fewer, one.alike) == (1, 0, 1)


def test_refused_questions_are_left_out_of_the_pairs(tmp_path, capsys) -> None:
    for name, fake in (("all", Fake(limit=4096)), ("short", Fake(refuses=300))):
        with serving(fake) as url:
            run("eval", "--endpoint", url, *ASKED, "-o", tmp_path / name)
    code, told = run("compare", tmp_path / "all", tmp_path / "short", capsys=capsys)
    assert code == 0, told.err
    row = next(line for line in told.out.splitlines() if line.startswith("short:port"))
    assert "found@512" in told.out
    assert row.split()[-1] == "-"


def test_other_questions_are_refused_with_the_reason(runs, tmp_path, capsys) -> None:
    with serving(Fake(limit=4096)) as url:
        run("eval", "--endpoint", url, *ASKED, "--seed", "7", "-o", tmp_path / "seed")
    code, told = run("compare", runs / "whole", tmp_path / "seed", capsys=capsys)
    assert code == 2
    assert "the texts of their questions differ" in told.err


def test_a_directory_is_paired_by_the_words_of_its_questions(runs, tmp_path, capsys) -> None:
    """The bundled model gets passkeys in token ids: nothing to pair."""
    ropext.evaluate("ropext://demo", tmp_path / "demo", tasks="passkey", lengths="256", items=1)
    code, told = run("compare", runs / "whole", tmp_path / "demo", capsys=capsys)
    assert code == 2
    assert "one run used token ids" in told.err


def test_a_directory_with_the_same_questions_is_paired(tmp_path, capsys, monkeypatch) -> None:
    """A task in words whose answers have the same room for both, counted by the directory's own
    tokenizer: a server that completes texts gets the prompts of a directory's run."""
    asked = ("--tasks", "niah_single_1", "--lengths", "512", "--items", "1")
    asked += ("--depths", "0,1")
    # The bundled model answers nothing in words; which questions are alike is what counts here.
    monkeypatch.setattr(assembling, "unmeasurable_tasks", lambda items, context: {})
    code, told = run("eval", "ropext://demo", *asked, "-o", tmp_path / "demo", capsys=capsys)
    assert code == 0, told.err
    place = MODELS["ropext://demo"]
    own = ("--api", "completions", "--tokenizer", place, "-o", tmp_path / "port")
    with serving(Fake(limit=4096, usage=lambda read: None)) as url:
        code, told = run("eval", "--endpoint", url, *asked, *own, capsys=capsys)
    assert code == 0, told.err
    left = {item.text_hash for item in read_run(tmp_path / "port").models["port"].items}
    right = {item.text_hash for item in read_run(tmp_path / "demo").models["untouched"].items}
    assert left == right
    assert len(left) == 2
    runs = (f"{tmp_path / 'demo'}:untouched", f"{tmp_path / 'port'}:port")
    code, told = run("compare", *runs, "--json", capsys=capsys)
    assert code == 0, told.err
    (difference,) = json.loads(told.out)["retrieval"].values()
    assert difference["niah_single_1@512"]["n"] == 2
