"""Hostile files: a seeded part of the campaign that `python -m tests.fuzz` runs at length."""

import inspect
import json
import os
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fuzz import campaign, oracle, seeds, shapes
from fuzz.campaign import Tally, run
from hypothesis import Phase, given, settings
from hypothesis.internal.conjecture import providers
from hypothesis.strategies import SearchStrategy

from ropext import families
from ropext.base.errors import InputError, RopextError
from ropext.base.inputs import CONFIG_LIMIT
from ropext.families import config as families_config
from ropext.families import model, reading, respelling
from ropext.files import inspecting
from ropext.files.checkpoint import provenance
from ropext.files.checkpoint.snapshot import INDEX, INDEX_LIMIT
from ropext.results.report import text
from ropext.verifying import verification

INPUTS = 400
DRAWN_FROM = (campaign, seeds, shapes, families_config, reading, respelling, provenance, text)


@pytest.fixture(scope="module", autouse=True)
def same_inputs_in_any_order():
    """Let Hypothesis draw constants of a few modules.

    By itself it draws constants of every loaded module, so that its inputs would depend on the
    tests that ran before.
    """
    constants = providers.Constants()
    for module in DRAWN_FROM:
        constants |= providers.constants_from_module(module)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(providers, "_get_local_constants", lambda: constants)
        providers.CONSTANTS_CACHE.cache.clear()
        yield
    providers.CONSTANTS_CACHE.cache.clear()


@pytest.fixture(scope="module")
def tally(tmp_path_factory):
    """Check that every input gives a result or a sentence; return their counts."""
    room = tmp_path_factory.mktemp("fuzz")
    found = Tally()

    @settings(campaign.LONG, max_examples=INPUTS, derandomize=True)
    @given(campaign.inputs())
    def one(item):
        run(item, room, found)

    one()
    return found


@pytest.mark.slow
def test_at_least_two_of_five_fuzzed_inputs_are_planned(tally, capsys):
    planned = sum(n for name, n in tally.outcomes.items() if ": planned" in name)
    with capsys.disabled():
        print(f"\nfuzz: {planned} of {INPUTS} planned, {len(tally.sentences)} kinds of sentences")
    assert planned >= 0.4 * INPUTS
    assert len(tally.sentences) >= 30


@pytest.mark.slow
def test_stock_builds_the_read_and_planned_spectrum(tally, capsys):
    """At least seventy configs and plans; .ci/slow judges more of other inputs."""
    verdicts = oracle.judge(tally.planned, 100)
    with capsys.disabled():
        print(f"\nfuzz: stock transformers has {verdicts.equal} spectra equal")
    assert not verdicts.wrong, "\n".join(verdicts.wrong)
    assert verdicts.equal >= 70


def read(spoiled):
    """Read a model without a file, or check the sentence of its refusal."""
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
def test_json_bombs_are_refused(tmp_path, name, data):
    item = campaign.Input(name, data, {"factor": 4.0}, extend=True)
    assert "refused (InputError)" in run(item, tmp_path, Tally())


def test_an_index_that_is_too_large_is_refused_before_it_is_read(tmp_path):
    item = campaign.Input(INDEX, b"{}", {"factor": 4.0}, extend=False)
    campaign.lay_out(tmp_path / "base", item)
    with open(tmp_path / "base" / INDEX, "r+b") as file:
        file.truncate(INDEX_LIMIT + 1)
    with pytest.raises(InputError, match="more than the 128 MB"):
        campaign.open_snapshot(str(tmp_path / "base"))


def test_the_fuzzer_finds_planted_faults(tmp_path, monkeypatch):
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


@dataclass(frozen=True)
class Finding:
    """One error that drawn inputs found: each repaired function with its text after and before, the
    error, the inputs that reach it, and the step that they fail."""

    mends: tuple[tuple[Callable[..., object], str, str], ...]
    error: tuple[type[BaseException], ...]
    drawn: SearchStrategy
    step: Callable[[Any, Path], None]


def take_back(monkeypatch, place, mended, before):
    """Compile a mended function as it was before, in its own module."""
    source = textwrap.dedent(inspect.getsource(place))
    assert source.count(mended) == 1, place
    older = dict[str, Callable[..., object]]()
    exec(source.replace(mended, before), vars(sys.modules[place.__module__]), older)
    for name, module in list(sys.modules.items()):  # wherever it is imported by its name
        if name.startswith("ropext") and vars(module).get(place.__name__) is place:
            monkeypatch.setattr(module, place.__name__, older[place.__name__])


def in_memory(spoiled, folder):
    read(spoiled)


def shown(spoiled, folder):
    (folder / "config.json").write_bytes(shapes.encoded(spoiled))
    campaign.look(folder)


def recorded(spoiled, folder):
    """Put a record into a folder whose config is right, and look at it, plan it and repair it."""
    (folder / "config.json").write_text(json.dumps(seeds.SMALL_LLAMA))
    (folder / "ropext.json").write_bytes(shapes.encoded(spoiled))
    campaign.look(folder)
    campaign.attempt(inspecting.plan, folder, factor=2.0, from_original=True)
    campaign.attempt(verification.repair, folder)


def limited(spoiled, folder):
    """Put a limit of generation into a folder whose config is right, and look at it."""
    (folder / "config.json").write_text(json.dumps(seeds.SMALL_LLAMA))
    (folder / "generation_config.json").write_bytes(shapes.encoded(spoiled))
    campaign.look(folder)


FINDINGS = {
    "an original of one token": Finding(
        (
            (
                model.rope_from,
                'kind == "longrope" and params[ORIGINAL] < 2',
                "False",
            ),
        ),
        (ZeroDivisionError,),
        campaign.configs(),
        in_memory,
    ),
    "a forged line": Finding(
        ((families_config.named, "key.isprintable()", "True"),),
        (campaign.Broken,),
        campaign.configs(),
        shown,
    ),
    "a record whose chain was altered": Finding(
        ((provenance._record, "TypeAdapter(KeptLink).validate_json(text, strict=True)", "None"),),
        (AttributeError, KeyError, TypeError, ValueError),
        shapes.records(),
        recorded,
    ),
    "a rope dict of a record that nothing can be written from": Finding(
        (
            (respelling.respell, 'for key in ("rope_type", "rope_theta")', "for key in ()"),
            (verification.repair, "(KeyError, TypeError, ValueError)", "()"),
        ),
        (KeyError, TypeError, ValueError),
        shapes.records(),
        recorded,
    ),
    "a limit that begins a line of its own": Finding(
        ((text._limit_facts, "named(str(limit))", "str(limit)"),),
        (campaign.Broken,),
        shapes.reshaped(seeds.OTHERS["generation_config.json"]),
        limited,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FINDINGS)
def test_a_found_result_is_found_again(tmp_path, monkeypatch, name):
    finding = FINDINGS[name]
    for mend in finding.mends:
        take_back(monkeypatch, *mend)
    drawn = 0

    @settings(campaign.LONG, max_examples=20_000, derandomize=True, phases=[Phase.generate])
    @given(finding.drawn)
    def one(spoiled):
        nonlocal drawn
        drawn += 1
        finding.step(spoiled, tmp_path)

    with pytest.raises(finding.error) as caught:
        one()
    print(f"\n{name}: input {drawn}: {caught.value!r:.200}")


def compute(folder):
    while True:
        pass


def sleep(folder):
    time.sleep(60)


def wait(folder):
    os.mkfifo(folder / "fifo")
    (folder / "fifo").read_bytes()  # nobody writes to it


@pytest.mark.skipif(not campaign.SCHEDULED.exists(), reason="reads what Linux counts")
@pytest.mark.parametrize("hang", [compute, sleep, wait])
def test_a_hang_of_each_kind_is_reported(tmp_path, monkeypatch, hang):
    monkeypatch.setattr(campaign, "HANGS", 0.2)
    monkeypatch.setattr(campaign, "WAITS", 0.2)
    monkeypatch.setattr(campaign, "ASLEEP", 0.7)
    with campaign.guarded():
        pass  # what ends leaves no clock behind
    told = "it took 0.2 CPU seconds" if hang is compute else r"it slept for 0\.\d seconds"
    with pytest.raises(campaign.Broken, match=told), campaign.guarded():
        hang(tmp_path)
