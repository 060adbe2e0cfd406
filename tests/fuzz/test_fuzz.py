"""Hostile files: a seeded part of the campaign that `python -m tests.fuzz` runs at length."""

import json

import pytest
from fuzz import campaign, oracle, seeds, shapes
from fuzz.campaign import Tally, run
from hypothesis import Phase, given, settings

from ropext import families
from ropext.checkpoint.snapshot import INDEX, INDEX_LIMIT
from ropext.errors import InputError, RopextError
from ropext.families import reading
from ropext.inputs import CONFIG_LIMIT
from ropext.report import text

INPUTS = 400


@pytest.fixture(scope="module")
def tally(tmp_path_factory):
    """Every input gives a result or a sentence; what came of them."""
    room = tmp_path_factory.mktemp("fuzz")
    found = Tally()

    @settings(campaign.LONG, max_examples=INPUTS, derandomize=True)
    @given(campaign.inputs())
    def one(item):
        run(item, room, found)

    one()
    return found


@pytest.mark.slow
def test_a_quarter_gets_as_far_as_a_plan(tally, capsys):
    planned = sum(n for name, n in tally.outcomes.items() if ": planned" in name)
    with capsys.disabled():
        print(f"\nfuzz: {planned} of {INPUTS} planned, {len(tally.sentences)} kinds of sentences")
    assert planned >= INPUTS / 4
    assert len(tally.sentences) >= 25


@pytest.mark.slow
def test_stock_builds_what_was_read_and_planned(tally, capsys):
    """At least fifty configs and plans; .ci/slow judges more of other inputs."""
    verdicts = oracle.judge(tally.planned, 100)
    with capsys.disabled():
        print(f"\nfuzz: stock transformers has {verdicts.equal} spectra equal")
    assert not verdicts.wrong, "\n".join(verdicts.wrong)
    assert verdicts.equal >= 50


def read(spoiled):
    """A model or a sentence, without a file."""
    try:
        families.read(spoiled)
    except RopextError as error:
        campaign.check_sentence(str(error))
    for problem in families.check_spellings(spoiled):
        campaign.check_sentence(problem.sentence)


@settings(campaign.LONG, max_examples=150, derandomize=True)
@given(campaign.configs())
def test_a_config_in_memory_gives_a_model_or_a_sentence(spoiled):
    read(spoiled)


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
    item = campaign.Input(name, data, {"factor": 4.0}, extend=True)
    assert "refused (InputError)" in run(item, tmp_path, Tally())


def test_an_index_that_is_too_large_is_refused_before_it_is_read(tmp_path):
    item = campaign.Input(INDEX, b"{}", {"factor": 4.0}, extend=False)
    campaign.lay_out(tmp_path / "base", item)
    with open(tmp_path / "base" / INDEX, "r+b") as file:
        file.truncate(INDEX_LIMIT + 1)
    with pytest.raises(InputError, match="more than the 128 MB"):
        campaign.open_snapshot(str(tmp_path / "base"))


def test_the_fuzzer_notices_what_it_looks_for(tmp_path, monkeypatch):
    """Each part of the promise, broken on purpose."""
    good = campaign.Input("config.json", json.dumps(seeds.SMALL_LLAMA).encode(), {}, True)
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


# Guards behind findings of test_findings.py, each to be taken away, and where it was seen.
GUARDS = {
    "an original of one token": (
        "read",
        ZeroDivisionError,
        reading,
        "_check_form",
        lambda *_: None,
    ),
    "a forged line": ("shown", campaign.Broken, text, "named", str),
}


@pytest.mark.slow
@pytest.mark.parametrize("finding", GUARDS)
def test_what_was_found_once_is_found_again(tmp_path, monkeypatch, finding):
    where, error, *guard = GUARDS[finding]
    monkeypatch.setattr(*guard)

    def shown(spoiled):
        (tmp_path / "config.json").write_bytes(shapes.encoded(spoiled))
        campaign.look(tmp_path)

    steps = {"read": read, "shown": shown}

    @settings(campaign.LONG, max_examples=5000, derandomize=True, phases=[Phase.generate])
    @given(campaign.configs())
    def one(spoiled):
        steps[where](spoiled)

    with pytest.raises(error) as caught:
        one()
    print(f"\n{finding}: {caught.value!r:.200}")
