"""`eval --endpoint` of `serve --method self-extend` equals `eval --method self-extend`."""

import json
import re
from dataclasses import replace

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
    from ropext.serving.served import ServeOptions, load_served_model

    wish = parse_extend({"method": "self-extend", "factor": 2})
    served = load_served_model(
        ServeOptions("ropext://demo", "demo", wish), DocumentOptions(device="cpu")
    )
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
    # Questions over one text reuse their common beginning.
    kept = [int(line.split(": ")[1].split()[0]) for line in client.lines if "kept" in line]
    assert max(kept) > 300


@pytest.mark.slow
def test_a_port_that_serves_another_method_is_another_model(tmp_path, capsys):
    """Its address, name and limit are unchanged; a restart alone changes nothing."""
    pytest.importorskip("uvicorn")
    from ropext.serving.served import ServeOptions, load_served_model

    def served(method):
        wish = parse_extend({"method": method, "factor": 2})
        return load_served_model(
            ServeOptions("ropext://demo", "demo", wish), DocumentOptions(device="cpu")
        )

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


TEXTS = ("--data", "ropext://held-out", "--lengths", "256,512", "--max-docs", "6")
TOLD = ("tail", "tail_nll", "cumulative", "gain")


@pytest.mark.slow
def test_the_port_has_the_perplexity_of_eval(tmp_path, capsys):
    """Self-Extend, which no other server computes, with the gain over a server of the base."""
    pytest.importorskip("uvicorn")
    from ropext.serving.served import ServeOptions, load_served_model

    how = DocumentOptions(device="cpu")
    wish = parse_extend({"method": "self-extend", "factor": 2.5})
    extended = load_served_model(ServeOptions("ropext://demo", "demo", wish), how)
    plain = load_served_model(ServeOptions("ropext://demo", "demo"), how)
    plain = replace(plain, limit=257)  # a window of 256 is read with one more token
    with opened(extended) as client, opened(plain) as base:
        urls = [f"http://127.0.0.1:{own.port}" for own in (client, base)]
        asked = ("--endpoint", urls[0], "--against", "ropext://demo", "--api", "completions")
        where = tmp_path / "port"
        code, said = run("eval", *asked, "--plain", urls[1], *TEXTS, "-o", where, capsys=capsys)
        assert code == 0, said.err
    method = ("--method", "self-extend", "--factor", "2.5")
    code, said = run(
        "eval", "ropext://demo", *method, *TEXTS, "-o", tmp_path / "memory", capsys=capsys
    )
    assert code == 0, said.err
    by_port, in_memory = (
        json.loads((tmp_path / name / "results.json").read_text("utf-8"))["variants"]
        for name in ("port", "memory")
    )
    for metric in TOLD:
        for length in (256, 512):
            name = f"{metric}@{length}"
            found = by_port["port"]["metrics"][name]["value"]
            wanted = in_memory["self-extend-2.5x"]["metrics"][name]["value"]
            assert found == pytest.approx(wanted, abs=1e-4), name


@pytest.mark.slow
@pytest.mark.parametrize(("factor", "wanted"), [(4, 0), (2, 3)])
def test_verify_accepts_the_right_server_and_refuses_a_wrong_one(tmp_path, capsys, factor, wanted):
    pytest.importorskip("uvicorn")
    from ropext.serving.served import ServeOptions, load_served_model

    code, said = run(
        "extend",
        "ropext://demo",
        "--method",
        "yarn",
        "--factor",
        "4",
        "-o",
        tmp_path / "demo",
        capsys=capsys,
    )
    assert code == 0, said.err
    wish = parse_extend({"method": "yarn", "factor": factor})
    model = ServeOptions("ropext://demo", "demo", wish)
    if factor == 4:
        model = ServeOptions(str(tmp_path / "demo"), "demo")
    served = load_served_model(model, DocumentOptions(device="cpu"))
    with opened(served) as client:
        url = f"http://127.0.0.1:{client.port}"
        code, said = run("verify", tmp_path / "demo", "--endpoint", url, "--json", capsys=capsys)
    assert code == wanted, said.err
    check = json.loads(said.out)["checks"][-1]
    if wanted == 0:
        assert "1,023 tokens" in check["sentence"]
        found = re.search(r"differ from transformers' by (\S+) in the mean", check["sentence"])
        assert float(found[1]) < 1e-4
    else:
        assert "the server takes 512 tokens" in check["sentence"]
