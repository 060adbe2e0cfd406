"""The perplexity of a server that reports a prompt's losses equals `eval` of the same model on the
same texts."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from command_line import run
from fake_server import Fake, serving

import ropext
from ropext.endpoint import perplexity
from ropext.endpoint.remote_model import RemoteModel
from ropext.endpoint.server import server_at
from ropext.results.report import evaluation
from ropext.results.rundir import read_run

LENGTHS = "128,512"
DOCS = 4
READ = ("--data", "ropext://held-out", "--lengths", LENGTHS, "--max-docs", DOCS, "--items", "1")
TOLD = ("tail", "tail_nll", "in_window", "gain", "cumulative", "bpb")
Stock = Callable[[tuple[int, ...]], tuple[float, ...]]


@pytest.fixture(scope="module")
def of_directory(tmp_path_factory) -> Path:
    """Evaluate the bundled model itself."""
    folder = tmp_path_factory.mktemp("perplexity") / "directory"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluation, "draw_evaluation", lambda measured: {})
        ropext.evaluate(
            "ropext://demo", folder, data="ropext://held-out", lengths=LENGTHS, max_docs=DOCS
        )
    return folder


@pytest.fixture(scope="module")
def stock() -> Stock:
    """Return the losses of token ids by stock transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    from ropext.base import bundled

    model = AutoModelForCausalLM.from_pretrained(bundled.MODELS["ropext://demo"]).eval()

    @cache
    def read(ids: tuple[int, ...]) -> tuple[float, ...]:
        with torch.inference_mode():
            rows = model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
        return tuple(rows[torch.arange(len(ids) - 1), list(ids[1:])].tolist())

    return read


@pytest.fixture(scope="module")
def of_port(stock, tmp_path_factory) -> Path:
    """Evaluate a server that reports stock transformers' losses as vLLM does, and a plain one.

    float32 in JSON is exact.
    """
    folder = tmp_path_factory.mktemp("perplexity") / "port"
    with (
        serving(Fake(limit=4096, losses=stock)) as url,
        serving(Fake(limit=257, losses=stock)) as other,
    ):
        words = ("--against", "ropext://demo", "--plain", other, "-o", folder)
        code, _ = run("eval", "--endpoint", url, *READ, *words)
    assert code == 0
    return folder


def test_a_server_has_the_perplexity_of_its_directory(of_directory, of_port) -> None:
    wanted = read_run(of_directory).results["variants"]
    variants = read_run(of_port).results["variants"]
    for name in TOLD:
        for length in (128, 512):
            value = variants["port"]["metrics"][f"{name}@{length}"]
            right = wanted["untouched"]["metrics"][f"{name}@{length}"]
            assert value["value"] == pytest.approx(right["value"], abs=2e-5), name
            assert value["ci95"] == pytest.approx(right["ci95"], abs=2e-5)
    for name in ("short_tax", "effective_context"):
        value = variants["port"]["metrics"][name]["value"]
        right = wanted["untouched"]["metrics"][name]["value"]
        assert value == pytest.approx(right, abs=2e-5)
    base = variants["base"]["metrics"]["tail@512"]["value"]
    assert base == pytest.approx(wanted["base"]["metrics"]["tail@512"]["value"], abs=2e-5)
    report = (of_port / "report.md").read_text("utf-8")
    assert "Tail perplexity" in report
    assert "Found, by length" in report


@pytest.mark.parametrize("by_ids", [True, False])
def test_each_engine_tells_every_loss_of_a_prompt(by_ids, stock) -> None:
    """As many as the short window has, which begin with another token."""
    ids = (np.arange(600, dtype=np.int32) * 7) % 900 + 3
    with serving(Fake(limit=4096, losses=stock, by_ids=by_ids)) as url:
        told = perplexity.losses_of(RemoteModel(server_at(url), "fake", 4096))
        assert told is not None
        whole = told.read(ids[:128])
        short = told.read_short(ids, 256, bos=0)
    assert np.isnan(whole[0])
    assert whole[1:] == pytest.approx(-np.array(stock(tuple(ids[:128].tolist()))), abs=1e-6)
    # Windows of 256 every 128: the last 128 of the second one are its losses.
    second = (0, *ids[129:384].tolist())
    assert short[256:384] == pytest.approx(-np.array(stock(second))[127:], abs=1e-6)


def test_compare_reads_a_server_and_its_directory_on_the_same_tokens(
    of_directory, of_port, capsys
) -> None:
    words = ("compare", f"{of_directory}:untouched", f"{of_port}:port", "--json")
    code, told = run(*words, capsys=capsys)
    assert code == 0, told.err
    rows = json.loads(told.out)["text"]["lengths"]
    assert abs(rows[-1]["difference"]["port"]["value"]) < 2e-5


def test_without_a_plain_server_there_is_no_gain(stock, capsys) -> None:
    with serving(Fake(limit=4096, losses=stock)) as url:
        words = ("--lengths", "128", "--max-docs", "1", "--against", "ropext://demo", "--json")
        code, told = run("eval", "--endpoint", url, *READ, *words, capsys=capsys)
    assert code == 0, told.err
    results = json.loads(told.out)
    (remark,) = results["endpoint"]["remarks"]
    assert "no gain and no short tax: --plain URL" in remark
    metrics = results["variants"]["port"]["metrics"]
    assert "tail@128" in metrics
    assert "gain@128" not in metrics


def test_a_missing_fact_of_a_server_gives_one_sentence(tmp_path, capsys) -> None:
    """llama-server answers without them."""
    with serving(Fake(limit=4096)) as url:
        code, told = run("eval", "--endpoint", url, *READ, capsys=capsys)
    assert code == 0, told.err
    assert told.out.count("perplexity is not measured") == 1
    assert "found up to" in told.out


def test_a_plain_server_without_room_for_a_window_gives_no_gain(stock, capsys) -> None:
    with (
        serving(Fake(limit=4096, losses=stock)) as url,
        serving(Fake(limit=256, losses=stock)) as other,
    ):
        words = ("--against", "ropext://demo", "--plain", other, "--dry-run")
        code, told = run("eval", "--endpoint", url, *READ, *words, capsys=capsys)
    assert code == 0, told.err
    assert "takes 256 tokens" in told.out
    assert "--max-model-len 257 --hf-overrides '{\"max_position_embeddings\": 257}'" in told.out


def test_texts_need_a_tokenizer_and_room(stock, capsys) -> None:
    with serving(Fake(limit=512, losses=stock)) as url:
        code, told = run("eval", "--endpoint", url, *READ, capsys=capsys)
        assert code == 2
        assert "give --lengths below 512" in told.err
        words = ("--data", "ropext://held-out", "--lengths", "128")
        code, told = run("eval", "--endpoint", url, *words, capsys=capsys)
        assert code == 2
        assert "give --tokenizer DIR" in told.err


def test_another_token_is_no_loss() -> None:
    """A server that reads other ids than it was sent, or tells fewer."""

    def told(names, values):
        answer = {"choices": [{"logprobs": {"tokens": names, "token_logprobs": values}}]}
        return perplexity._losses_in_answer(answer, [4, 5])

    named = ["token_id:4", "token_id:5", "token_id:9"]
    assert told(named, [None, -1.5, -2.0]) == [1.5]
    assert told(["a", "b", "c"], [None, -1.5, -2.0]) == [1.5]
    assert told(["token_id:4", "token_id:6", "token_id:9"], [None, -1.5, -2.0]) is None
    assert told(["<s>", *"abc"], [None, -1.5, -1.0, -2.0]) is None  # one token more
    assert told(named[-1:], [-2.0]) is None  # the answer alone
    assert told(named, [None, None, -2.0]) is None
    assert told(named, [-0.5, -1.5, -2.0]) is None
    assert told(named, [None, -1.5]) is None
    assert perplexity._losses_in_answer({"choices": []}, [4, 5]) is None
