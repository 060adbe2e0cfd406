"""`eval --endpoint` of `serve --method self-extend` beside `eval --method self-extend`."""

import json

import pytest
from command_line import run
from serving.conftest import opened

from ropext.options.evaluate import DocumentOptions
from ropext.options.extend import parse_extend

ITEMS = ("--lengths", "512", "--depths", "0.5,1", "--items", "1")


def rows(folder, variant):
    lines = (folder / "items.jsonl").read_text("utf-8").splitlines()
    return [row for row in map(json.loads, lines) if row["variant"] == variant]


@pytest.mark.slow
def test_the_port_gives_the_answers_of_eval_on_the_same_items(tmp_path, capsys):
    """Two windows long; and keys are found there, of which the base in its window sees none."""
    pytest.importorskip("uvicorn")
    from ropext.serving.served import ServeOptions, load

    wish = parse_extend({"method": "self-extend", "factor": 2})
    served = load(ServeOptions("ropext://demo", "demo", wish), DocumentOptions(device="cpu"))
    with opened(served) as client:
        url = f"http://127.0.0.1:{client.port}"
        asked = ("--endpoint", url, "--api", "completions", "--tasks", "niah_single_1,mkey")
        code, said = run("eval", *asked, *ITEMS, "-o", tmp_path / "port", capsys=capsys)
        assert code == 0, said.err
    method = ("--method", "self-extend", "--factor", "2", "--tasks", "niah_single_1")
    code, said = run(
        "eval", "ropext://demo", *method, *ITEMS, "-o", tmp_path / "memory", capsys=capsys
    )
    assert code == 0, said.err
    by_port = rows(tmp_path / "port", "port")
    same = [row for row in by_port if row["task"] == "niah_single_1"]
    in_memory = rows(tmp_path / "memory", "self-extend-2x")
    answers = [
        {row["text_hash"]: (row["said"].strip(), row["score"]) for row in found}
        for found in (same, in_memory)
    ]
    assert len(answers[0]) == 2
    assert answers[0] == answers[1]
    assert any(row["score"] == 1 for row in by_port if row["task"] == "mkey")
    # Questions over one text are read on from what they share.
    kept = [int(line.split(": ")[1].split()[0]) for line in client.lines if "kept" in line]
    assert max(kept) > 300


@pytest.mark.slow
def test_a_port_that_serves_another_method_is_another_model(tmp_path, capsys):
    """Its address, name and limit are those of before; a restart alone changes nothing."""
    pytest.importorskip("uvicorn")
    from ropext.serving.served import ServeOptions, load

    def served(method):
        wish = parse_extend({"method": method, "factor": 2})
        return load(ServeOptions("ropext://demo", "demo", wish), DocumentOptions(device="cpu"))

    asked = ("--api", "completions", "--lengths", "256", "--depths", "1", "--items", "1")
    port = 0
    for method, wanted in (("yarn", 0), ("yarn", 0), ("pi", 2)):
        with opened(served(method), port=port) as client:
            port = client.port
            url = f"http://127.0.0.1:{port}"
            code, said = run("eval", "--endpoint", url, *asked, "-o", tmp_path / "o", capsys=capsys)
        assert code == wanted, said.err
    assert (
        "another model answers; give another -o, or --force (meta: content_sha256 was" in said.err
    )
