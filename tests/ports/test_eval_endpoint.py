"""`ropext eval --endpoint` asks a server in words, and each answer is one of five.

The server looks its answers up in the text that it receives. The part of a prompt that it keeps
decides which needles it finds, and how many tokens it reads.
"""

import json
import os
import re
import signal
import threading
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest
from command_line import run
from fake_server import Fake, looked_up, serving, words
from json_schema import check_file

from ropext.base.narration import Call, Hooks, progress_lines
from ropext.endpoint.plan import quick_lengths
from ropext.endpoint.remote_model import error_text
from ropext.pipeline.server_evaluation import evaluate_server, plan_server_evaluation
from ropext.results.rundir import read_run

LENGTHS = ("--lengths", "256,1024", "--items", "2")


def evaluated(capsys, url: str, *options: object) -> tuple[int, dict, str]:
    code, told = run("eval", "--endpoint", url, *options, "--json", capsys=capsys)
    return code, json.loads(told.out) if told.out else {}, told.err


def counts(results: dict, label: str = "port") -> dict[int, dict[str, int]]:
    return {row["length"]: row["counts"] for row in results["variants"][label]["outcomes"]}


def test_a_server_that_reads_everything_finds_everything(tmp_path, capsys) -> None:
    fake = Fake(limit=4096)
    with serving(fake) as url:
        code, told, err = evaluated(capsys, url, *LENGTHS, "--context", "256", "-o", tmp_path / "o")
    assert code == 0, err
    assert {length: row["found"] for length, row in counts(told).items()} == {
        256: 10,
        1024: 10,
    }
    found = told["variants"]["port"]["metrics"]["found@1024"]
    assert found["value"] == 1.0
    assert found["n"] == 10
    # The length includes room for the answer, and the prompt fills nearly all of it.
    sizes = [len(words(body["messages"][0]["content"])) + 4 for _, body in fake.asked]
    assert 1024 - 32 - 30 < max(sizes) <= 1024 - 32
    # The cost is announced: the server's row, and the cut row's questions of 1,024.
    asked = int(
        re.search(r"the server is asked 30 questions: ([\d,]+) tokens", err)[1].replace(",", "")
    )
    assert asked == sum(sizes)
    assert all(body["temperature"] == 0 for _, body in fake.asked)
    assert told["variants"]["port"]["reached"]["by_point"] == 1024
    # Ten questions cannot put the lower end of an interval at 90 %.
    assert told["variants"]["port"]["reached"]["by_interval"] == 0


def test_the_truncated_baseline_of_a_server_answers_the_same_questions(tmp_path, capsys) -> None:
    """Of five depths in 1,024 tokens the window of 256 keeps those at the end: 0.75 is at its edge,
    and 1 inside."""
    fake = Fake(limit=4096)
    with serving(fake) as url:
        options = (*LENGTHS, "--context", "256", "--depths", "0,0.5,1", "-o", tmp_path / "o")
        code, told, err = evaluated(capsys, url, *options)
    assert code == 0, err
    cut = told["variants"]["cut"]["metrics"]
    assert cut["found@256"]["value"] == 1.0
    assert cut["found@1024"]["value"] == pytest.approx(1 / 3)
    prompts = [body["messages"][0]["content"] for _, body in fake.asked]
    assert max(len(words(prompt)) for prompt in prompts) > 900
    # A truncated prompt keeps the instruction, the end of the text, and the question.
    whole = [prompt for prompt in prompts if len(words(prompt)) > 900]
    ends = 0
    for prompt in prompts:
        instruction, text = prompt.split("\n\n", 1)
        assert instruction.endswith("a question about one of them follows.")
        ends += prompt not in whole and any(longer.endswith(f" {text}") for longer in whole)
    assert ends == len(whole) == 6
    # At 256 the two rows are one, and no question repeats.
    assert len(fake.asked) == 12 + 6
    assert "truncated to 256, on this server" in Path(tmp_path / "o/report.md").read_text("utf-8")


def test_a_plain_server_reads_the_cut_text(tmp_path, capsys) -> None:
    fake, plain = Fake(limit=4096), Fake(limit=256, refuses=256)
    with serving(fake) as url, serving(plain) as other:
        options = (*LENGTHS, "--context", "256", "--plain", other)
        code, told, err = evaluated(capsys, url, *options)
    assert code == 0, err
    assert len(plain.asked) == 20
    assert len(fake.asked) == 20
    assert counts(told, "cut")[1024]["refused"] == 0


def test_quick_asks_a_few_questions_at_three_lengths_and_tells_the_cost_first(capsys) -> None:
    """Five needles in one text at each length, and at two of them the truncated baseline."""
    fake = Fake(limit=16384)
    with serving(fake) as url:
        code, told, err = evaluated(capsys, url, "--quick", "--context", "4096")
    assert code == 0, err
    assert {length: sum(row.values()) for length, row in counts(told).items()} == {
        4096: 5,
        8192: 5,
        16384: 5,
    }
    assert told["variants"]["cut"]["metrics"]["found@16384"]["value"] == pytest.approx(0.2)
    most = 5 * (4096 + 8192 + 16384) + 5 * 2 * 4096
    assert f"mkey: 5 questions at each of 4k, 8k, 16k, at most {most:,} tokens" in err
    line = re.search(r"asked 25 questions: ([\d,]+) tokens, about .* to .* by the speed of", err)
    assert 0.95 * most < int(line[1].replace(",", "")) <= most
    # Three short prompts told the speed.
    sizes = [len(words(body["messages"][0]["content"])) for _, body in fake.asked]
    assert max(sizes[:3]) <= 512 < min(sizes[3:])
    assert len(fake.asked) == 3 + 25


def test_quick_leaves_given_lengths_and_items_alone(capsys) -> None:
    with serving(Fake(limit=4096)) as url:
        code, told, err = evaluated(capsys, url, "--quick", *LENGTHS)
    assert code == 0, err
    assert {length: row["found"] for length, row in counts(told).items()} == {256: 10, 1024: 10}
    assert "by the speed" not in err  # so few tokens need no estimate


@pytest.mark.parametrize(
    ("window", "limit", "lengths"),
    [
        (8192, 16384, (8192, 11264, 16384)),
        (4096, 131072, (4096, 22528, 131072)),
        (16384, 16384, (4096, 8192, 16384)),  # the server takes no more than was trained
        (None, 16384, (4096, 8192, 16384)),
        (256, 1024, (256, 512, 1024)),
    ],
)
def test_quick_lengths_are_the_context_the_limit_and_one_between(window, limit, lengths) -> None:
    assert quick_lengths(window, limit) == lengths


def test_without_a_window_there_is_no_truncated_row_but_a_note(capsys) -> None:
    with serving(Fake(limit=4096)) as url:
        code, told = run("eval", "--endpoint", url, *LENGTHS, capsys=capsys)
    assert code == 0
    assert "no row of cut text" in told.out
    assert "truncated to" not in told.out


def test_a_silent_cut_is_seen_by_its_usage(capsys) -> None:
    with serving(Fake(cut=300)) as url:
        code, told, _ = evaluated(capsys, url, *LENGTHS)
    assert code == 0
    assert counts(told)[256]["found"] == 10
    assert counts(told)[1024]["truncated"] == 10
    assert counts(told)[1024]["missed"] == 0
    reason = told["variants"]["port"]["outcomes"][1]["reasons"]["truncated"]
    assert "num_ctx" in reason
    assert "Context Length" in reason
    assert "-c" in reason
    assert "found@1024" not in told["variants"]["port"]["metrics"]
    assert told["variants"]["port"]["reached"]["by_point"] == 256


def test_a_silent_cut_without_usage_is_seen_by_the_first_word(tmp_path, capsys) -> None:
    """Depths of the first half are lost, those behind are answered, the first word is not. What was
    found behind the cut is no share of the length either: a gate on it is not known."""
    with serving(Fake(cut=700, usage=lambda read: None)) as url:
        gate = ("--fail-if", "found@1k < 0.5", "--fail-if", "found@1k.value < 0.1")
        code, told, err = evaluated(capsys, url, *LENGTHS, *gate, "-o", tmp_path / "o")
    assert code == 6, err
    assert "2 of 2 gates are not known" in err
    assert counts(told)[1024] == dict.fromkeys(counts(told)[1024], 0) | {"truncated": 10}
    assert "found@1024" not in told["variants"]["port"]["metrics"]
    assert counts(told)[256]["found"] == 10
    check_file(tmp_path / "o/results.json")


def test_a_cut_that_neither_usage_nor_the_first_word_shows_is_remarked(tmp_path, capsys) -> None:
    """The model repeats no first word, so a needle that the server cut off counts as the model's
    miss."""

    def forgetful(text: str) -> str:
        return "I do not know." if text.endswith("first word of this message?") else looked_up(text)

    remark = "1k: it is not known whether the server truncated these prompts"
    fake = Fake(cut=700, usage=lambda read: None, says=forgetful)
    with serving(fake) as url:
        code, told = run("eval", "--endpoint", url, *LENGTHS, "-o", tmp_path / "o", capsys=capsys)
    assert code == 0, told.err
    assert told.out.count(remark) == 1
    assert "256: it is not known" not in told.out  # nothing was missed there
    assert "the server reported no usage" in told.out
    assert "usage is the server's own" not in told.out
    page = Path(tmp_path / "o/report.md").read_text("utf-8")
    assert "| tokens counted | found |" in page  # no empty column for the server's count
    kept = json.loads((tmp_path / "o/results.json").read_text("utf-8"))
    assert [text.startswith(remark) for text in kept["warnings"]] == [True]
    assert 0 < kept["variants"]["port"]["metrics"]["found@1024"]["value"] < 1


def test_a_server_that_repeats_the_first_word_gets_no_remark(capsys) -> None:
    """It reports no usage and misses the first half of a text that it was given whole."""

    def blind(text: str) -> str:
        if text.endswith("first word of this message?"):
            return looked_up(text)
        return looked_up(" ".join(text.split()[-400:]).replace(". What", ".\n\nWhat"))

    with serving(Fake(usage=lambda read: None, says=blind)) as url:
        code, told, err = evaluated(capsys, url, *LENGTHS)
    assert code == 0, err
    assert counts(told)[1024]["missed"] > 0
    assert told["warnings"] == []


def test_a_failed_gate_outweighs_an_unknown_one(capsys) -> None:
    with serving(Fake(cut=700, says=lambda text: "no")) as url:
        gate = ("--fail-if", "found@1k < 0.5", "--fail-if", "found@256 < 0.5")
        code, _, err = evaluated(capsys, url, *LENGTHS, *gate)
    assert (code, "1 of 2 gates failed" in err) == (3, True)


@pytest.mark.parametrize("cached", [5, 20, 400])
def test_a_cut_is_seen_of_a_server_with_a_prefix_cache(cached, capsys) -> None:
    """It read 500 of some 990 tokens, and had read some of these before."""
    usage = lambda read: {  # noqa: E731
        "prompt_tokens": read,
        "prompt_tokens_details": {"cached_tokens": cached if read == 500 else 0},
    }
    with serving(Fake(cut=500, usage=usage)) as url:
        _, told, err = evaluated(capsys, url, *LENGTHS)
    assert counts(told)[1024]["truncated"] == 10, err


@pytest.mark.parametrize("counts_itself", [True, False])
@pytest.mark.parametrize("lengths", ["1k,4k", "4k"])
def test_a_window_a_little_below_a_round_length_is_seen(counts_itself, lengths, capsys) -> None:
    """As `num_ctx 32000` against questions of 32k: 4,000 against some 4,060, by the server's own
    count, or by its usage. By usage a single length has none below it that says how exact usage is:
    its first word does."""
    with serving(Fake(cut=4000, counts=counts_itself)) as url:
        _, told, err = evaluated(capsys, url, "--lengths", lengths, "--items", "2")
    row = told["variants"]["port"]["outcomes"][-1]
    assert 4016 < row["counted"][0] < 4100, row
    assert counts(told)[4096]["truncated"] == 10, (row, err)
    if lengths == "1k,4k":
        assert counts(told)[1024]["found"] == 10


@pytest.mark.parametrize("left_out", [16, 17])
def test_sixteen_tokens_of_a_template_are_no_cut(left_out, capsys) -> None:
    usage = lambda read: {"prompt_tokens": read - left_out}  # noqa: E731
    with serving(Fake(usage=usage)) as url:
        _, told, _ = evaluated(capsys, url, *LENGTHS)
    outcome = "found" if left_out <= 16 else "truncated"
    assert [row[outcome] for row in counts(told).values()] == [10, 10]


def test_a_model_that_ignores_the_start_is_not_called_truncated_if_usage_is_whole(capsys) -> None:
    def blind(text: str) -> str:
        return looked_up(" ".join(text.split()[-400:]).replace(". What", ".\n\nWhat"))

    with serving(Fake(says=blind)) as url:
        code, told, err = evaluated(capsys, url, *LENGTHS)
    assert code == 0, err
    assert counts(told)[1024]["truncated"] == 0
    assert counts(told)[1024]["missed"] > 0


def test_a_refused_prompt_is_never_missed(capsys) -> None:
    with serving(Fake(refuses=600)) as url:
        code, told, _ = evaluated(capsys, url, *LENGTHS)
    assert code == 0
    assert counts(told)[1024] == {
        "found": 0,
        "missed": 0,
        "refused": 10,
        "truncated": 0,
        "no answer": 0,
    }
    assert "too many" in told["variants"]["port"]["outcomes"][1]["reasons"]["refused"]


def test_a_model_without_a_chat_template_ends_the_run_however_prompts_are_counted(capsys) -> None:
    with serving(Fake(template=False)) as url:
        code, told, _ = evaluated(capsys, url, *LENGTHS)
    assert code == 2
    assert "no chat template" in told["error"]
    assert told["error"].endswith("give --api completions")


def test_a_thinking_model_gets_more_tokens_once(capsys) -> None:
    thinker = Fake(thinks=500)
    with serving(thinker) as url:
        code, told, _ = evaluated(capsys, url, "--lengths", "256", "--items", "1")
    assert code == 0
    assert counts(told)[256]["found"] == 5
    assert [body["max_tokens"] for _, body in thinker.asked[:2]] == [32, 2048]
    endless = Fake(thinks=10**6)
    with serving(endless) as url:
        code, told, _ = evaluated(capsys, url, "--lengths", "256", "--items", "1")
    assert counts(told)[256]["no answer"] == 5
    assert "enable_thinking" in told["variants"]["port"]["outcomes"][0]["reasons"]["no answer"]
    quiet = Fake()
    with serving(quiet) as url:
        options = ("--lengths", "256", "--items", "1", "--chat-args", "enable_thinking=false")
        evaluated(capsys, url, *options)
    assert quiet.asked[0][1]["chat_template_kwargs"] == {"enable_thinking": False}


def test_a_wrong_usage_and_a_cached_prefix_are_no_cut(capsys) -> None:
    wrong = Fake(usage=lambda read: {"prompt_tokens": 7 * read})
    cached = Fake(
        usage=lambda read: {
            "prompt_tokens": read // 9,
            "prompt_tokens_details": {"cached_tokens": read - read // 9},
        }
    )
    for fake in (wrong, cached):
        with serving(fake) as url:
            _, told, err = evaluated(capsys, url, *LENGTHS)
        assert counts(told)[1024]["found"] == 10, err


def test_a_prompt_is_counted_by_usage_if_nothing_else_counts_it(capsys) -> None:
    """A straight line through two answers; the longest prompt is inside its length."""
    fake = Fake(counts=False)
    with serving(fake) as url:
        code, told, err = evaluated(capsys, url, *LENGTHS)
    assert code == 0, err
    assert told["endpoint"]["counted_by"] == "the server's usage of first answers"
    assert counts(told)[1024]["found"] == 10
    low, high = told["variants"]["port"]["outcomes"][1]["used"]
    assert 0.85 * 992 < low <= high <= 992 * 1.08


def test_a_run_resumes_question_by_question(tmp_path, capsys) -> None:
    out, fake = tmp_path / "o", Fake(limit=4096)
    with serving(fake) as url:
        options = (*LENGTHS, "-o", out)
        evaluated(capsys, url, *options)
        every = sorted(out.glob("variants/port-*/*.json"))
        check_file(out / "results.json")
        before = (out / "results.json").read_bytes()
        for path in every[:7]:
            path.unlink()
        fake.asked.clear()
        code, _, err = evaluated(capsys, url, *options)
        assert code == 0
        assert len(fake.asked) == 8  # one of them again: it is the same model
        assert "13 questions were answered before" in err
        assert f"answers of {datetime.now(UTC).date()} are reused" in err
        assert (out / "results.json").read_bytes() == before
        code, told = run("eval", "--endpoint", url, "--lengths", "256", "-o", out, capsys=capsys)
    assert code == 2
    assert "holds another run of ropext eval" in told.err


def test_ctrl_c_keeps_the_answers(tmp_path, capsys) -> None:
    """The signal comes during the third question, which is answered before the run ends."""

    def stopped(text: str) -> str:
        if len(fake.asked) == 3:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.2)
        return looked_up(text)

    fake = Fake(limit=4096, says=stopped)
    out = tmp_path / "o"
    with serving(fake) as url:
        options = ("--endpoint", url, "--lengths", "256", "--items", "2", "-o", out)
        code, told = run("eval", *options, capsys=capsys)
        assert code == 4, told.err
        assert f"the answers so far are kept in {out}" in told.err
        assert not (out / "results.json").exists()
        kept = len(sorted(out.glob("variants/port-*/*.json")))
        assert kept == len(fake.asked)
        assert 3 <= kept < 10
        fake.says = looked_up
        code, told = run("eval", *options, capsys=capsys)
    assert code == 0, told.err
    assert f"{kept} questions were answered before" in told.err
    assert len(fake.asked) == 11


def test_damaged_answers_and_questions_of_an_unfinished_run_are_asked_again(
    tmp_path, capsys
) -> None:
    fake = Fake(limit=4096)
    with serving(fake) as url:
        options = ("--lengths", "256", "--items", "2")
        evaluated(capsys, url, *options, "-o", tmp_path / "whole")
        out = tmp_path / "out"

        def stopped(text: str) -> str:
            if len(fake.asked) == 6:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.2)
            return looked_up(text)

        fake.asked.clear()
        fake.says = stopped
        assert evaluated(capsys, url, *options, "-o", out)[0] == 4
        kept = sorted(out.glob("variants/port-*/*.json"))
        edited, empty, cut, *_ = kept
        edited.write_text(edited.read_text("utf-8").replace('"found"', '"missed"'), "utf-8")
        empty.write_bytes(b"")
        cut.write_bytes(cut.read_bytes()[:-9])
        questions = min(out.glob("variants/questions-*/*.json"))
        questions.write_bytes(b"[]")
        fake.says = looked_up
        code, _, err = evaluated(capsys, url, *options, "-o", out)
    assert code == 0, err
    name = edited.relative_to(out).as_posix()
    assert f"pieces that are not as this version wrote them are computed again: {name}, " in err
    assert f"{len(kept) - 3} questions were answered before" in err
    for name in ("results.json", "items.jsonl"):
        assert (out / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.parametrize("names_it", [True, False])
def test_answers_of_another_model_are_not_reused(names_it, tmp_path, capsys) -> None:
    """The server is started again, under its name and limit, with weights that find nothing."""
    fake = Fake(limit=4096)
    out = tmp_path / "o"
    with serving(fake) as url:
        options = (*LENGTHS, "-o", out)
        evaluated(capsys, url, *options)
        before = (out / "results.json").read_bytes()
        fake.says = lambda text: "I do not know."
        fake.card = {"root": "/models/b"} if names_it else {}
        fake.asked.clear()
        code, _, err = evaluated(capsys, url, *options)
        assert code == 2
        assert "another model answers; give another -o, or --force" in err
        assert ("root was None and is '/models/b'" in err) == names_it
        assert len(fake.asked) == (0 if names_it else 3)
        assert (out / "results.json").read_bytes() == before
        code, told, err = evaluated(capsys, url, *options, "--force")
        assert code == 0, err
    assert counts(told)[1024]["missed"] == counts(told)[256]["missed"] == 10
    assert told["variants"]["port"]["metrics"]["found@1024"]["value"] == 0


def test_an_edited_answer_is_refused(tmp_path, capsys) -> None:
    out = tmp_path / "o"
    with serving(Fake(limit=4096)) as url:
        options = ("--lengths", "256", "--items", "1", "-o", out)
        evaluated(capsys, url, *options)
        (answer, *_) = out.glob("variants/port-*/*.json")
        answer.write_text(answer.read_text("utf-8").replace('"found"', '"missed"'), "utf-8")
        code, _, err = evaluated(capsys, url, *options)
        assert (code, answer.name in err) == (2, True)
        code, told, err = evaluated(capsys, url, *options, "--force")
    assert code == 0
    assert "did not write" not in err
    assert counts(told)[256]["found"] == 5


def test_a_run_resumes_if_one_kept_answer_differs(tmp_path, capsys) -> None:
    """Kernels round differently in other batches, and the new fields of each request are no
    difference either."""
    fake = Fake(limit=4096)
    with serving(fake) as url:
        options = (*LENGTHS, "-o", tmp_path / "o")
        evaluated(capsys, url, *options)
        fake.asked.clear()
        fake.says = lambda text: "Well." if len(fake.asked) < 3 else looked_up(text)
        fake.card = {"created": 7, "permission": [{"id": "other"}]}
        code, _, err = evaluated(capsys, url, *options)
    assert code == 0, err
    assert len(fake.asked) == 3


def test_ctrl_c_without_a_folder_keeps_nothing(capsys) -> None:
    def stopped(text: str) -> str:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)
        return looked_up(text)

    with serving(Fake(limit=4096, says=stopped)) as url:
        code, _, err = evaluated(capsys, url, "--lengths", "256", "--items", "1")
    assert code == 130, err
    assert "nothing was kept" in err


def test_concurrent_questions_have_the_same_answers(tmp_path, capsys) -> None:
    """Two requests are open at once, and the written files equal the files of a serial run."""
    in_hand = [0]
    most = [0]
    lock = threading.Lock()

    def slow(text: str) -> str:
        with lock:
            in_hand[0] += 1
            most[0] = max(most[0], in_hand[0])
        time.sleep(0.02)
        with lock:
            in_hand[0] -= 1
        return looked_up(" ".join(text.split()[-300:]))

    with serving(Fake(limit=4096, says=slow)) as url:
        for at_once in ("1", "2"):
            most[0] = 0
            options = (*LENGTHS, "--context", "256", "--parallel", at_once)
            code, _, err = evaluated(capsys, url, *options, "-o", tmp_path / at_once)
            assert code == 0, err
            assert most[0] == int(at_once)
    for name in ("items.jsonl", "results.json"):
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "2" / name).read_bytes()


@pytest.mark.parametrize(("parallel", "left"), [(1, "4 min"), (2, "2 min")])
def test_the_first_answers_give_an_estimate_of_the_time_left(parallel, left) -> None:
    """Five questions take a minute each, or two of them at once, by a clock set by hand. The server
    is slower than the half second after which ropext looks at the results."""
    now = [0.0]

    def slow(text: str) -> str:
        time.sleep(0.7)
        now[0] += 60 / parallel
        time.sleep(0.7)
        return looked_up(text)

    said = list[str]()
    show = progress_lines(said.append, lambda: now[0])
    with serving(Fake(limit=4096, says=slow)) as url:
        given = {"endpoint": url, "lengths": "256", "items": 1, "parallel": parallel}
        evaluate_server(plan_server_evaluation(given, None, (), None), None, Call(Hooks(show=show)))
    assert f"about {left} left: questions" in said[0]


def test_a_question_refused_in_a_batch_is_repeated_alone(tmp_path, capsys) -> None:
    """llama-server's slots share one cache: two prompts of 256 together exceed 400 tokens, and one
    of 1,024 does so alone."""
    fake = Fake(shared=400)
    with serving(fake) as url:
        options = (*LENGTHS, "--parallel", "2", "-o", tmp_path / "o")
        code, told, err = evaluated(capsys, url, *options)
        assert code == 0, err
        asked = len(fake.asked)
        evaluated(capsys, url, *options)
    assert counts(told)[256]["found"] == 10
    assert counts(told)[1024]["refused"] == 10
    assert 30 <= asked <= 40  # each too long prompt is tried twice, and some of the others
    assert len(fake.asked) == asked + 1  # and a resumed run asks none of them again


def test_gates_look_at_shares(capsys) -> None:
    with serving(Fake(limit=4096, says=lambda text: "no")) as url:
        code, _, err = evaluated(capsys, url, *LENGTHS, "--fail-if", "found@1k < 0.9")
        assert code == 3, err
        code, _, err = evaluated(capsys, url, *LENGTHS, "--fail-if", "mkey@1k.value > 0.9")
        assert code == 0, err
        code, _, err = evaluated(capsys, url, *LENGTHS, "--fail-if", "tail@1k > 9")
        assert code == 2
        assert "found@LENGTH" in err


@pytest.mark.parametrize(
    ("fake", "says", "wanted"),
    [
        (Fake(body=b"<html>no</html>"), "no valid JSON|is not JSON|JSON", 2),
        (Fake(body=b"x" * (5 << 20)), "more than 4 MiB", 2),
        (Fake(drips=True), "gave no answer", 4),
        (Fake(body=b"{}"), "", 0),
    ],
    ids=["html", "huge", "drips", "nothing"],
)
def test_an_answer_of_nonsense_is_one_sentence(fake, says, wanted, capsys) -> None:

    with serving(fake) as url:
        deadline = "1" if fake.drips else "600"
        options = ("--lengths", "256", "--items", "1", "--deadline", deadline)
        code, told, err = evaluated(capsys, url, *options)
    assert code == wanted, err
    assert re.search(says, err)
    if not wanted:
        assert counts(told)[256]["refused"] == 5


def test_missing_texts_are_refused_before_any_request(tmp_path, capsys) -> None:
    code, _, err = evaluated(
        capsys, "http://127.0.0.1:9/v1", *LENGTHS, "--data", tmp_path / "nothing.txt"
    )
    assert (code, "nothing.txt: there is no such file or folder" in err) == (2, True)


def test_no_file_keeps_an_api_key_that_the_server_repeats(tmp_path, capsys, monkeypatch) -> None:
    """Neither an answer, even if the kept limit cuts the key, nor an error stores it."""
    key = "CaNaRy-of-a-key-of-a-server"
    monkeypatch.setenv("ROPEXT_ENDPOINT_KEY", key)
    output = tmp_path / "o"
    with serving(Fake(says=lambda text: f"{key} {'y' * 1960} {key}")) as url:
        code, told = run("eval", "--endpoint", url, *LENGTHS, "-o", output, capsys=capsys)
    assert code == 0
    files = [path.read_bytes() for path in output.rglob("*") if path.is_file()]
    every = b"".join(files).decode(errors="replace")
    assert '"said": "*** yyy' in every
    for text in (every, told.out, told.err, error_text(400, f"no access: {key}".encode())):
        assert key[:8] not in text


def test_no_server_at_all_is_exit_code_5(capsys) -> None:
    code, _, err = evaluated(capsys, "http://127.0.0.1:9/v1", *LENGTHS)
    assert code == 5
    assert "no answer from the server" in err


def test_an_answer_is_text_and_nothing_else(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("ROPEXT_ENDPOINT_KEY", "secret-key")
    nasty = "<script>alert(1)</script>\x1b[31m" + "y" * 5000
    with serving(Fake(refuses=300, says=lambda text: nasty)) as url:
        code, told = run("eval", "--endpoint", url, *LENGTHS, "-o", tmp_path / "o", capsys=capsys)
    assert code == 0
    assert "\x1b" not in told.out
    page = (tmp_path / "o/report.html").read_text("utf-8")
    assert "<script>" not in page
    assert "<b>" not in page
    kept = [item.said for item in read_run(tmp_path / "o").models["port"].items]
    assert max(len(said or "") for said in kept) == 2000
    every = b"".join(path.read_bytes() for path in (tmp_path / "o").rglob("*") if path.is_file())
    assert b"secret-key" not in every


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--dtype", "float16"), "--dtype is about a model that ropext loads"),
        (("--tasks", "copy"), "copy consists of token ids"),
        (("--haystack", "text"), "--haystack text needs --data"),
    ],
)
def test_options_of_a_loaded_model_are_refused(options, says, capsys) -> None:
    code, _, err = evaluated(capsys, "http://127.0.0.1:9", *options)
    assert code == 2
    assert says in err
    code, told = run("eval", "ropext://demo", "--plain", "http://x", capsys=capsys)
    assert code == 2
    assert "give --endpoint URL too" in told.err


def test_the_plan_says_how_many_questions_could_decide(capsys) -> None:
    fake = Fake(limit=4096)
    with serving(fake) as url:
        code, told = run("eval", "--endpoint", url, *LENGTHS, "--dry-run", capsys=capsys)
        assert code == 0
        assert "no answer can put the interval above 90%: 35 questions could" in told.out
        code, told = run("eval", "--endpoint", url, "--dry-run", capsys=capsys)
        assert "40 questions at each of" in told.out
    assert not fake.asked
