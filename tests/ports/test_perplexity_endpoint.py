"""The perplexity of a server that tells the losses of a prompt: numbers equal to those of `eval` of
the same model on the same texts."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from command_line import run
from fake_server import Fake, serving

import ropext
from ropext.ports import losses
from ropext.results.rundir import read_run

LENGTHS = "128,512"
READ = ("--data", "ropext://held-out", "--lengths", LENGTHS, "--max-docs", "8", "--items", "1")
TOLD = ("tail", "tail_nll", "in_window", "gain", "cumulative", "bpb")


@pytest.fixture(scope="module")
def of_directory(tmp_path_factory) -> Path:
    """The bundled model's own evaluation."""
    folder = tmp_path_factory.mktemp("perplexity") / "directory"
    ropext.evaluate("ropext://demo", folder, data="ropext://held-out", lengths=LENGTHS, max_docs=8)
    return folder


@pytest.fixture(scope="module")
def stock() -> Callable[[tuple[int, ...]], tuple[float, ...]]:
    """The losses of token ids by stock transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    from ropext import bundled

    model = AutoModelForCausalLM.from_pretrained(bundled.find_model("ropext://demo")).eval()

    @cache
    def read(ids: tuple[int, ...]) -> tuple[float, ...]:
        with torch.inference_mode():
            rows = model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
        return tuple(rows[torch.arange(len(ids) - 1), list(ids[1:])].tolist())

    return read


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_server_has_the_perplexity_of_its_directory(
    engine, of_directory, stock, tmp_path, capsys
) -> None:
    """Stock transformers answers for the server; float32 in JSON is exact."""
    wanted = read_run(of_directory).results["variants"]
    fake = Fake(limit=4096, losses=stock, engine=engine)
    plain = Fake(limit=257, losses=stock, engine=engine)
    with serving(fake) as url, serving(plain) as other:
        words = ("--against", "ropext://demo", "--plain", other, "-o", tmp_path / "o")
        code, told = run("eval", "--endpoint", url, *READ, *words, capsys=capsys)
    assert code == 0, told.err
    results = read_run(tmp_path / "o").results
    for name in TOLD:
        for length in (128, 512):
            value = results["variants"]["port"]["metrics"][f"{name}@{length}"]
            right = wanted["untouched"]["metrics"][f"{name}@{length}"]
            assert value["value"] == pytest.approx(right["value"], abs=2e-5), name
            assert value["ci95"] == pytest.approx(right["ci95"], abs=2e-5)
    for name in ("short_tax", "effective_context"):
        value = results["variants"]["port"]["metrics"][name]
        assert value["value"] == pytest.approx(
            wanted["untouched"]["metrics"][name]["value"], abs=2e-5
        )
    base = results["variants"]["base"]["metrics"]["tail@512"]
    assert base["value"] == pytest.approx(wanted["base"]["metrics"]["tail@512"]["value"], abs=2e-5)
    assert "Tail perplexity" in told.out
    assert "Found, by length" in told.out


def test_it_is_compared_with_the_directory_on_the_same_tokens(
    of_directory, stock, tmp_path, capsys
) -> None:
    with serving(Fake(limit=4096, losses=stock)) as url:
        words = ("--against", "ropext://demo", "-o", tmp_path / "o")
        code, told = run("eval", "--endpoint", url, *READ, *words, capsys=capsys)
    assert code == 0, told.err
    assert "no gain and no short tax: --plain URL" in told.out
    assert "gain@512" not in read_run(tmp_path / "o").results["variants"]["port"]["metrics"]
    words = ("compare", f"{of_directory}:untouched", f"{tmp_path / 'o'}:port", "--json")
    code, told = run(*words, capsys=capsys)
    assert code == 0, told.err
    rows = json.loads(told.out)["text"]["lengths"]
    assert abs(rows[-1]["difference"]["port"]["value"]) < 2e-5


def test_what_a_server_does_not_tell_is_one_sentence(tmp_path, capsys) -> None:
    """llama-server answers without them, and no path of SGLang's."""
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
        words = ("--against", "ropext://demo", "--plain", other, "--json")
        code, told = run("eval", "--endpoint", url, *READ, *words, capsys=capsys)
    assert code == 0, told.err
    (remark,) = json.loads(told.out)["endpoint"]["remarks"]
    assert "takes 256 tokens" in remark


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
    vllm = {"choices": [{"prompt_logprobs": [None, {"5": {"logprob": -1.5}}]}]}
    assert losses._losses(losses.VLLM, vllm, [4, 5]) == [1.5]
    assert losses._losses(losses.VLLM, vllm, [4, 6]) is None
    assert losses._losses(losses.VLLM, vllm, [4, 5, 5]) is None
    sglang = {"meta_info": {"input_token_logprobs": [[None, 4], [-1.5, 5]]}}
    assert losses._losses(losses.SGLANG, sglang, [4, 5]) == [1.5]
    assert losses._losses(losses.SGLANG, sglang, [4, 6]) is None
    sglang["meta_info"]["input_token_logprobs"][1][0] = None
    assert losses._losses(losses.SGLANG, sglang, [4, 5]) is None
    assert losses._losses(losses.VLLM, {"choices": []}, [4, 5]) is None
