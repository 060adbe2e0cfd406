"""A server is compared with one of the plain model: scaling on, off, or not known; its noise
decides."""

import json
import math
import random

import pytest
from command_line import run
from test_endpoint import serving

import ropext
from ropext.base.errors import InputError
from ropext.verifying import plain_server


def plain(ids: list[int]) -> list[float]:
    """Return log-probabilities that follow from the prompt alone."""
    draw = random.Random(str(ids))
    weights = [draw.random() + 0.01 for _ in range(64)]
    return [math.log(weight / sum(weights)) for weight in weights]


def scaled(ids: list[int]) -> list[float]:
    """Return another model's: every second candidate is half a nat off."""
    return [value - 0.5 * (token % 2) for token, value in enumerate(plain(ids))]


def noisy(amount: float):
    """Return the plain model on an engine whose numbers vary from call to call."""
    draw = random.Random(5)
    return lambda ids: [value + draw.uniform(-amount, amount) for value in plain(ids)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    out = tmp_path_factory.mktemp("plain_server") / "long"
    ropext.extend("ropext://demo", out, factor=4, no_verify=True)
    return out


def verified(capsys, directory, url: str, *options: object) -> tuple[int, dict, str]:
    words = ("verify", directory, "--endpoint", url, *options, "--json")
    code, told = run(*words, capsys=capsys)
    checks = json.loads(told.out).get("checks", [])
    (check,) = [check for check in checks if check["what"] == "endpoint"] or [{}]
    return code, check, told.err


@pytest.mark.parametrize(
    ("asked", "plain_answers", "wanted", "says"),
    [
        (scaled, plain, True, "a scaling is on"),
        (plain, plain, False, "the scaling is off"),
        (noisy(0.05), noisy(0.05), False, "the scaling is off"),
        (scaled, noisy(0.4), None, "too little to tell the two apart"),
    ],
    ids=["on", "off", "off in noise", "lost in noise"],
)
def test_verify_plain_finds_a_scaling_on_off_or_unknown(
    asked, plain_answers, wanted, says, directory, capsys
) -> None:
    requests: list = []
    with (
        serving("vllm", asked, 4096) as url,
        serving("vllm", plain_answers, 256, requests) as other,
    ):
        _, check, err = verified(capsys, directory, url, "--plain", other)
    assert check["passed"] is wanted, err
    assert says in check["sentence"]
    assert len(requests) == 12  # twice each
    assert max(len(body["prompt"]) for _, body, _ in requests) <= 128  # inside the old context


def test_kept_answers_replace_a_plain_server(directory, tmp_path, capsys) -> None:
    file = tmp_path / "plain.json"
    with serving("vllm", scaled, 4096) as url:
        with serving("vllm", plain, 256) as other:
            verified(capsys, directory, url, "--plain", other, "--fingerprint", file)
            code, _, err = verified(capsys, directory, url, "--plain", other, "--fingerprint", file)
            assert code == 2
            assert "is there already" in err
        _, check, _ = verified(capsys, directory, url, "--fingerprint", file)
        assert check["passed"] is True
    file.write_text("{}")
    with pytest.raises(InputError, match="holds no kept answers"):
        plain_server.read_kept_answers(file)


def test_prompts_are_beyond_the_context_if_shorter_ones_are_unchanged() -> None:
    inside = plain_server.prompt_lengths(4096, 16384, beyond=False)
    beyond = plain_server.prompt_lengths(4096, 16384, beyond=True)
    assert max(inside) <= 2048
    assert 4096 < min(beyond) < max(beyond) <= 8192


def test_a_gap_is_over_all_candidates() -> None:
    left = [(1, -0.5), (2, -1.0), (3, -2.0)]
    right = [(1, -0.7), (3, -2.4), (9, -2.5)]
    assert plain_server.candidates_gap(left, right) == pytest.approx((0.2 + 0.4 + 1.5 + 0.0) / 4)
    nameless = [(None, -0.7), (None, -2.4)]
    assert plain_server.candidates_gap(left, nameless) == pytest.approx((0.2 + 1.4) / 2)


def test_verify_refuses_a_tolerance_without_a_server(directory, capsys) -> None:
    code, told = run("verify", directory, "--tolerance", "0.1", capsys=capsys)
    assert code == 2
    assert "give --endpoint URL too" in told.err
