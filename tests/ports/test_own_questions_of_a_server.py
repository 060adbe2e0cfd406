"""`eval --endpoint --tasks FILE.jsonl`: a server gets the file's prompts, and the file's outputs
score its answers."""

import json

import pytest
from command_line import run
from fake_server import Fake, looked_up, serving, words

from ropext.base.errors import InputError
from ropext.base.narration import NOBODY
from ropext.pipeline.server_evaluation import evaluate_server, plan_server_evaluation

KEYS = 6


def prompt(number, size):
    filler = "The grass is green. " * (size // 4)
    return (
        f"The key of door-{number} is {number}7{number}. {filler}What is the key of door-{number}?"
    )


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rows(size=200):
    made = []
    for number in range(KEYS):
        row = {"input": prompt(number, size), "outputs": [f"{number}7{number}", "NEVER"]}
        made.append(row | {"answer_prefix": "\nThe key is"})
    return made


def evaluated(capsys, url, *options):
    code, heard = run("eval", "--endpoint", url, *options, "--json", capsys=capsys)
    return code, json.loads(heard.out) if heard.out else {}, heard.err


def says_to(text):
    """Find the question in the last words, which the prefix follows, and answer it."""
    return looked_up(text.removesuffix("\nThe key is"))


@pytest.mark.parametrize("api", ["chat", "completions"])
def test_a_server_gets_the_prompts_as_they_are(tmp_path, capsys, api):
    fake = Fake(limit=4096, says=says_to)
    path = write(tmp_path / "doors.jsonl", rows())
    with serving(fake) as url:
        code, told, err = evaluated(
            capsys, url, "--tasks", path, "--lengths", "512,1k", "--api", api, "--context", "256"
        )
    assert code == 0, err
    got = {json.dumps(body) for _, body in fake.asked}
    for row in rows():
        whole = json.dumps(row["input"] + row["answer_prefix"])
        assert sum(whole in body for body in got) == 1
    values = told["variants"]["port"]["metrics"]
    assert values["doors@512"]["value"] == 0.5  # one of the two outputs
    assert values["doors@512"]["n"] == KEYS
    assert values["doors@512"]["ci95"] is not None
    assert "doors@1024" not in values
    # Truncated to 256 tokens a prompt keeps its end, and the key at its start is gone.
    assert told["variants"]["cut"]["metrics"]["doors@512"]["value"] == 0.0
    assert f"doors: {KEYS} questions of {path}" in err


def test_a_request_that_is_too_long_gives_a_sentence(tmp_path, capsys):
    path = write(tmp_path / "doors.jsonl", [*rows()[:5], {**rows(1000)[5]}])
    with serving(Fake(limit=4096, says=says_to)) as url:
        code, told, err = evaluated(capsys, url, "--tasks", path, "--lengths", "512")
        assert code == 0, err
        assert told["variants"]["port"]["metrics"]["doors@512"]["n"] == 5
        assert any("1 of 6 questions of doors are left out" in line for line in told["warnings"])
        code, told, err = evaluated(capsys, url, "--tasks", path, "--lengths", "64")
    assert code == 2
    assert "6 of 6 questions of doors are left out" in err


def test_a_changed_file_is_noticed(tmp_path, capsys):
    path = write(tmp_path / "doors.jsonl", rows())
    fake = Fake(limit=4096, says=says_to)
    options = ("--tasks", path, "--lengths", "512", "-o", tmp_path / "run")
    with serving(fake) as url:
        assert evaluated(capsys, url, *options)[0] == 0
        count = len(fake.asked)
        assert evaluated(capsys, url, *options)[0] == 0
        assert len(fake.asked) == count + 1  # asked again, to know the model
        moved = write(tmp_path / "moved.jsonl", rows())
        again = ("--tasks", f"doors={moved}", *options[2:])
        assert evaluated(capsys, url, *again)[0] == 0
        changed = rows()
        changed[0]["outputs"] = ["070"]
        write(path, changed)
        code, _, err = evaluated(capsys, url, *options)
        assert code == 2
        assert "own_questions_sha256" in err
        code, told, err = evaluated(capsys, url, *options, "--force")
    assert code == 0, err
    assert told["variants"]["port"]["metrics"]["doors@512"]["value"] == pytest.approx(7 / 12)


def test_a_server_answers_a_bundled_task_and_a_function(capsys):
    def doors(context, length, seed):
        assert context == 256
        return [(prompt(number, length // 2), [f"{number}7{number}"]) for number in range(3)]

    with serving(Fake(limit=4096)) as url:
        plan = plan_server_evaluation(
            {"endpoint": url, "tasks": [doors, "mkey"], "lengths": "512,1k", "context": "256"}, None
        )
        done = evaluate_server(plan, None, NOBODY)
    values = done.values("port")
    assert values["doors@512"].value == values["doors@1024"].value == 1.0
    assert values["doors@1024"].n == 3
    assert values["mkey@512"].n == 40


def test_a_broken_file_is_refused_before_a_question(tmp_path):
    path = write(tmp_path / "doors.jsonl", [*rows(), {"input": "a"}])
    fake = Fake(limit=4096)
    with serving(fake) as url, pytest.raises(InputError, match="line 7 has no 'outputs'"):
        plan_server_evaluation({"endpoint": url, "tasks": str(path), "lengths": "512"}, None)
    assert not fake.asked
    assert len(words(prompt(1, 200))) > 200


def test_questions_cannot_have_the_name_of_a_servers_number(tmp_path, capsys):
    path = write(tmp_path / "found.jsonl", rows())
    fake = Fake(limit=4096, says=says_to)
    with serving(fake) as url:
        code, _, printed = evaluated(capsys, url, "--tasks", str(path), "--lengths", "1k")
    assert code == 2
    assert f"the questions of {path} would be called found, as another number is" in printed
    assert all(row["input"] not in str(fake.asked) for row in rows())
