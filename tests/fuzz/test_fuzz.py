"""Hostile files: a seeded part of the campaign that `python -m tests.fuzz` runs at length."""

import json
from random import Random

import pytest
from fuzz import campaign, mutating, oracle, seeds
from fuzz.campaign import Tally, make_input, run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ropext import families
from ropext.checkpoint.snapshot import INDEX, INDEX_LIMIT
from ropext.errors import InputError, RopextError
from ropext.inputs import CONFIG_LIMIT

INPUTS, ROUNDS = 2400, 4


@pytest.fixture(scope="module")
def tally():
    return Tally()


@pytest.mark.slow
@pytest.mark.parametrize("part", range(ROUNDS))
def test_every_input_gives_a_result_or_a_sentence(tmp_path, tally, part):
    for number in range(part, INPUTS, ROUNDS):
        run(make_input(Random(number), number), tmp_path, tally)


@pytest.mark.slow
def test_a_quarter_gets_as_far_as_a_plan(tally, capsys):
    if sum(tally.outcomes.values()) < INPUTS:
        pytest.skip("only a part of the inputs was run")
    planned = sum(n for name, n in tally.outcomes.items() if ": planned" in name)
    with capsys.disabled():
        print(f"\nfuzz: {planned} of {INPUTS} planned, {len(tally.sentences)} kinds of sentences")
    assert planned >= INPUTS / 4
    assert len(tally.sentences) >= 30


@pytest.mark.slow
def test_stock_builds_what_was_read_and_planned(tally, capsys):
    """At least a hundred configs and plans; .ci/slow judges more of other inputs."""
    if sum(tally.outcomes.values()) < INPUTS:
        pytest.skip("only a part of the inputs was run")
    verdicts = oracle.judge(tally.planned, 100)
    with capsys.disabled():
        print(f"\nfuzz: stock transformers has {verdicts.equal} spectra equal")
    assert not verdicts.wrong, "\n".join(verdicts.wrong)
    assert verdicts.equal >= 100


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.randoms(use_true_random=False), st.sampled_from(seeds.rotary_configs()))
def test_a_config_in_memory_gives_a_model_or_a_sentence(random, config):
    """The same mutations where hypothesis can shrink what it finds."""
    spoiled = mutating.spoiled(config, random)
    try:
        families.read(spoiled)
    except RopextError as error:
        campaign.check_sentence(str(error))
    for problem in families.check_spellings(spoiled):
        campaign.check_sentence(problem.sentence)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("config.json", b'{"model_type":"llama"' + b" " * CONFIG_LIMIT + b"}"),
        ("config.json", b'{"a":' + b"[" * 10**6 + b"]" * 10**6 + b"}"),
        ("config.json", b'{"model_type":"llama","x":[' + b"[]," * 10**6 + b"1]}"),
        ("generation_config.json", b'{"a":' * 10**5 + b"1" + b"}" * 10**5),
        ("tokenizer_config.json", b'{"model_max_length":1' + b"0" * 5000 + b"}"),
    ],
)
def test_bombs_are_refused(tmp_path, name, data):
    item = campaign.Input(0, name, data, {"factor": 4.0}, extend=True)
    assert "refused (InputError)" in run(item, tmp_path, Tally())


def test_an_index_that_is_too_large_is_refused_before_it_is_read(tmp_path):
    item = campaign.Input(0, INDEX, b"{}", {"factor": 4.0}, extend=False)
    campaign.lay_out(tmp_path / "base", item)
    with open(tmp_path / "base" / INDEX, "r+b") as file:
        file.truncate(INDEX_LIMIT + 1)
    with pytest.raises(InputError, match="more than the 128 MB"):
        campaign.open_snapshot(str(tmp_path / "base"))


def test_the_fuzzer_notices_what_it_looks_for(tmp_path, monkeypatch):
    """Each part of the promise, broken on purpose."""
    good = campaign.Input(7, "config.json", json.dumps(seeds.SMALL_LLAMA).encode(), {}, True)
    good.options = {"factor": 4.0}

    def broken(error):
        def step(*args, **kwargs):
            raise error

        return step

    for error in (KeyError("x"), InputError("two\nlines"), InputError("x" * 500)):
        with monkeypatch.context() as patch:
            patch.setattr(campaign.inspecting, "inspect", broken(error))
            with pytest.raises((KeyError, campaign.Broken)):
                run(good, tmp_path, Tally())

    def stray(directory, **options):
        (tmp_path / "stray").write_text("x")
        raise InputError("no")

    monkeypatch.setattr(campaign.inspecting, "inspect", stray)
    with pytest.raises(campaign.Broken, match="beside the output"):
        run(good, tmp_path, Tally())
