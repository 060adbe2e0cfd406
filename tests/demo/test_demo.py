"""`ropext demo`, for real, once, without a network; everything is asserted from that one run.

Less is trained and read here, so that all of it takes minutes on one core; the bounds are looser
for that.
"""

import json
import re
import shlex
import socket
import sys
from pathlib import PureWindowsPath

import pytest
import typer
from command_line import run
from report.pages import check

from ropext import bundled, demo
from ropext.cli.app import build
from ropext.demo import EXTENDED, FITTED, TUNED
from ropext.errors import Interrupted
from ropext.narration import pasted
from ropext.pipeline import job

WINDOW, TARGET = 256, 1024


class Network:
    """Stands for one that is switched off; it remembers who asked."""

    def __init__(self):
        self.asked = []

    def refuse(self, *arguments, **options):
        self.asked.append(arguments)
        raise OSError("the network is switched off")


@pytest.fixture(scope="module")
def network():
    off = Network()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("connect", "connect_ex", "sendto"):
            patch.setattr(socket.socket, name, off.refuse)
        for name in ("create_connection", "getaddrinfo", "gethostbyname"):
            patch.setattr(socket, name, off.refuse)
        patch.delenv("HF_HUB_OFFLINE", raising=False)
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)  # read from it once
        yield off


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    """The recipe on less."""
    text = bundled.find_recipe(demo.RECIPE).read_text("utf-8")
    for own, less in (
        ("steps: 60\n  warmup: 12\n", "steps: 16\n  warmup: 3\n"),
        ("items: 8\n", "items: 4\n"),
    ):
        assert text.count(own) == 1
        text = text.replace(own, less)
    file = tmp_path_factory.mktemp("recipe") / "demo.yaml"
    file.write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "RECIPE", str(file))
        yield file


@pytest.fixture(scope="module")
def shown(network, recipe, tmp_path_factory):
    return demo.run(tmp_path_factory.mktemp("demo") / "it")


def number(shown, label, name):
    return shown.models[label][name].value


def test_the_recipe_is_four_times_the_context_and_its_lengths_double_up_to_it():
    asked = job.read(demo.RECIPE)
    assert asked.evaluation["lengths"] == (WINDOW, 2 * WINDOW, TARGET)
    assert asked.extend.factor == demo.METHODS["factor"][0] == TARGET / WINDOW


@pytest.mark.slow
def test_nothing_asked_for_a_network(shown, network):
    assert network.asked == []


@pytest.mark.slow
def test_the_base_finds_keys_inside_its_window_and_explodes_beyond_it(shown):
    far, near = (number(shown, own, f"tail_nll@{TARGET}") for own in ("untouched", "base"))
    assert far - near >= 1.5
    assert number(shown, "untouched", f"keys@{WINDOW}") >= 0.95
    assert number(shown, "untouched", f"keys@{TARGET}") <= 0.05


@pytest.mark.slow
def test_closed_forms_separate(shown):
    order = ("base", EXTENDED, "ntk-4x", "pi-4x", "untouched")
    tails = [number(shown, label, f"tail_nll@{TARGET}") for label in order]
    assert tails == sorted(tails)
    assert tails[1] < tails[0] + 0.4
    folded = number(shown, "self-extend-4x", f"tail_nll@{TARGET}")
    assert tails[0] - 0.1 < folded < tails[0] + 0.01
    assert number(shown, "pi-4x", f"keys@{TARGET}") <= 0.05
    assert 0.5 <= number(shown, EXTENDED, f"keys@{TARGET}") <= 0.95


@pytest.mark.slow
def test_the_fitted_spectrum_comes_near_the_window_with_untouched_weights(shown):
    fitted, closed, base = (
        number(shown, label, f"tail_nll@{TARGET}") for label in (FITTED, EXTENDED, "base")
    )
    assert fitted <= 1.04 * base
    assert fitted < closed
    keys = number(shown, EXTENDED, f"keys@{TARGET}")
    assert number(shown, FITTED, f"keys@{TARGET}") >= keys - 0.1


@pytest.mark.slow
def test_a_short_fine_tuning_recovers_the_window_and_more(shown):
    tuned, control, base, fitted = (
        number(shown, label, f"tail_nll@{TARGET}") for label in (TUNED, "control", "base", FITTED)
    )
    assert tuned <= min(base, control) + 0.05
    assert tuned <= fitted - 0.05
    assert number(shown, TUNED, "short_tax") <= 0.05
    assert number(shown, TUNED, f"keys@{TARGET}") >= 0.85


@pytest.mark.slow
def test_all_were_read_on_the_same_tokens(shown):
    base = number(shown, "base", f"tail_nll@{TARGET}")
    for label in ("untouched", "pi-4x", EXTENDED, FITTED, TUNED, "control"):
        assert number(shown, label, f"in_window_nll@{TARGET}") == pytest.approx(base, abs=1e-6)


@pytest.mark.slow
def test_the_outputs_are_proved_and_leave_no_path_of_this_machine(shown):
    place = str(bundled.MODELS["ropext://demo"].parent)
    records = list(shown.output.rglob("ropext.json"))
    assert len(records) == 6  # three stages and the output, and the base beside two of them
    for record in map(json.loads, (path.read_text("utf-8") for path in records)):
        assert record["base"]["name"] == "ropext://demo"
        assert record["proof"]
    for path in shown.output.rglob("*"):
        if path.suffix in (".json", ".md", ".html"):
            assert place not in path.read_text("utf-8"), path


@pytest.mark.slow
def test_the_report_is_one_file_with_everything_in_it(shown):
    page = check((shown.output / "report.html").read_text("utf-8"))  # nothing is fetched
    for text in (*(gate.sentence for gate in shown.gates), *shown.commands, *demo.ORDER):
        assert text in page.text
    pictures = list((shown.output / "plots").glob("*.png"))
    assert len(pictures) == [tag for tag, _ in page.tags].count("img") == 5
    assert all(own.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" for own in pictures)


def test_its_lines_are_for_the_platforms_shell(monkeypatch):
    words = demo._words("eval", "M", PureWindowsPath(r"C:\my runs\x"), demo.METHODS)
    monkeypatch.setattr(sys, "platform", "win32")
    said = pasted(*words)
    assert said == r'ropext eval M --method "pi,ntk,self-extend" --factor 4 -o "C:\my runs\x"'


@pytest.mark.slow
def test_its_commands_are_commands(shown):
    group = typer.main.get_command(build())
    for line in shown.commands:
        words = shlex.split(line)[1:]
        name, command, rest = group.resolve_command(group.make_context("ropext", words[:1]), words)
        command.make_context(name, list(rest))  # fails on an unknown option or a missing one


@pytest.mark.slow
def test_a_second_run_does_nothing_again_and_the_command_prints_it(shown, network, capsys):
    before = {p: p.stat().st_mtime_ns for p in shown.output.rglob("*.safetensors")}
    code, said = run("demo", "-o", shown.output, capsys=capsys)
    assert code == 0
    assert said.err.count("done before, skipped") == 6
    assert re.search(r"^gate (passed|FAILED): fitted: the point of gain@1k is", said.out, re.M)
    assert 'ropext eval ropext://demo --method "pi,ntk,self-extend" --factor 4 --data' in said.out
    assert before == {p: p.stat().st_mtime_ns for p in shown.output.rglob("*.safetensors")}
    code, said = run("demo", "-o", shown.output, "--json", "-q", capsys=capsys)
    assert (code, said.err) == (0, "")
    assert [gate["gate"] for gate in json.loads(said.out)["gates"]] == [*demo.GATES]
    assert network.asked == []


def test_an_interrupt_says_what_is_kept(tmp_path, monkeypatch):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("ropext.evaluate", interrupted)
    with pytest.raises(
        Interrupted, match=r"what is finished is kept in .*it; run the same command"
    ):
        demo.run(tmp_path / "it")
