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

import canaries
import pytest
import typer
from command_line import run
from report.pages import check

from ropext.base import bundled
from ropext.base.errors import Interrupted
from ropext.base.narration import join_for_shells
from ropext.cli.app import build
from ropext.pipeline import demo
from ropext.pipeline.checked_recipe import open_recipe
from ropext.pipeline.demo import EXTENDED, FOLDED, TUNED
from ropext.results.gates import check_gate, parse_gate
from ropext.results.report.gates import gate_table
from ropext.results.values import Value

WINDOW, TARGET = 256, 1024


class Network:
    """A network that is switched off; it remembers every request."""

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
        for name, token in canaries.TOKENS.items():
            patch.setenv(name, token)
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)  # read from it once
        yield off


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    """Write the demo's recipe with fewer steps, items and documents."""
    text = bundled.find_recipe(demo.RECIPE).read_text("utf-8")
    for own, less in (
        ("steps: 40\n  warmup: 8\n", "steps: 12\n  warmup: 2\n"),
        ("items: 8\n", "items: 2\n  max_docs: 12\n"),
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
    asked = open_recipe(demo.RECIPE)
    assert asked.evaluate_options().lengths == (WINDOW, 2 * WINDOW, TARGET)
    assert asked.extend.factor == demo.FACTOR == TARGET / WINDOW


def test_the_full_demo_adds_a_fit_and_a_control_to_the_same_evaluation():
    short, full = open_recipe(demo.RECIPE), open_recipe(demo.RECIPE, demo.MORE_WORDS)
    assert "fit" in full.stages
    assert "fit" not in short.stages
    assert (short.finetune.control, full.finetune.control) == (False, True)
    assert full.finetune_options().steps > short.finetune_options().steps
    assert full.evaluate_options() == short.evaluate_options()
    assert {*demo.METHODS} < {*demo.MORE_METHODS}


def measured(perplexity, gain, keys):
    """Return the numbers of one model that reads 1,024 tokens, its gain sure to within 0.01."""
    return {
        "tail@1024": Value(perplexity, 0.1, (perplexity - 0.2, perplexity + 0.2), 32),
        "gain@1024": Value(gain, 0.005, (gain - 0.01, gain + 0.01), 32),
        "keys@1024": Value(keys, 0.05, (keys - 0.1, keys + 0.1), 80),
        "passkey@1024": Value(keys, 0.05, (keys - 0.1, keys + 0.1), 40),
    }


def a_demo(tmp_path, tuned):
    """Return a finished demo with these numbers."""
    base = measured(9.72, 0.0, 0.22)
    del base["gain@1024"]  # nobody gains over itself
    models = {
        "base": base,
        "untouched": measured(106.67, -2.4, 0.0),
        EXTENDED: measured(11.75, -0.19, 0.74),
        FOLDED: measured(9.27, 0.0, 0.89),
        TUNED: tuned,
    }
    texts = ("tuned:gain@1024.value < 0", "tuned:passkey@1024.value < 0.9")
    gates = [check_gate(parse_gate(text), "tuned", tuned) for text in texts]
    rows = demo.rows_of(models, 40)
    told = demo.sentences(models, rows, gates)
    table = demo.short_table(models, rows)
    return demo.Demo(tmp_path, models, gates, (), tmp_path / "report.html", told, None, table)


def test_the_demo_ends_in_sentences_with_the_verdict_first(tmp_path):
    shown = a_demo(tmp_path, measured(8.96, 0.08, 0.96))
    assert shown.sentences == [
        "After YaRN and 40 steps of LoRA the model reads 1,024 tokens better than truncated text: "
        "perplexity 8.96 against 9.72; it finds 96 % against 22 % of the needles.",
        "Truncated text, the base on its last 256 tokens: perplexity 9.72, and it finds 22 % of "
        "the needles, which are in these tokens.",
        "Untouched (no scaling): the base beyond its context: perplexity 106.67, worse than "
        "truncated text for the next word, and it finds 0 % of the needles.",
        "YaRN, untrained: perplexity 11.75, worse than truncated text for the next word, but it "
        "finds 74 % of the needles.",
        "Self-Extend, in memory, untrained: perplexity 9.27, not clearly different from "
        "truncated text for the next word, and it finds 89 % of the needles.",
    ]
    text = shown.to_text()
    assert text.startswith("After YaRN and 40 steps of LoRA")
    assert "FAILED" not in text
    assert text.index("perplexity at 1,024 tokens") < text.index("Gates\n")


def test_a_failing_run_explains_its_failure_and_the_next_step(tmp_path, monkeypatch, capsys):
    shown = a_demo(tmp_path, measured(12.5, -0.25, 0.3))
    monkeypatch.setattr(demo, "run", lambda *arguments: shown)
    code, said = run("demo", "-o", tmp_path / "it", capsys=capsys)
    assert code == 3
    assert said.err.endswith(
        "error: 2 of 2 gates failed: tuned:gain@1024.value < 0 (tuned: -0.25); "
        "tuned:passkey@1024.value < 0.9 (tuned: 0.3)\n"
    )
    text = " ".join(said.out.split())
    assert text.startswith(
        "After YaRN and 40 steps of LoRA the model reads 1,024 tokens worse than truncated "
        "text: perplexity 12.50 against 9.72; it finds 30 % against 22 % of the needles. FAILED "
    )
    for sentence in (
        "tuned predicts the last tokens before 1k 0.25 nats per token worse than the base does "
        "from truncated text. To do: train it, or longer (`ropext finetune`)",
        "tuned finds 30 % of what passkey asks for at 1k. To do: train it with questions",
        "so this machine computes something else: compare `ropext --version --verbose`",
    ):
        assert sentence in text, sentence
    assert len(gate_table(shown.gates).rows) == said.out.count("\nFAILED  ") == 2


@pytest.mark.slow
def test_the_demo_uses_no_network(shown, network):
    assert network.asked == []


@pytest.mark.slow
def test_no_file_of_the_demo_shows_a_token(shown):
    canaries.check_files(shown.output)
    canaries.check_files(shown.output.with_name(f"{shown.output.name}.run"))


@pytest.mark.slow
def test_the_base_finds_keys_inside_its_window_and_explodes_beyond_it(shown):
    far, near = (number(shown, own, f"tail_nll@{TARGET}") for own in ("untouched", "base"))
    assert far - near >= 1.5
    assert number(shown, "untouched", f"keys@{WINDOW}") >= 0.95
    assert number(shown, "untouched", f"keys@{TARGET}") <= 0.05


@pytest.mark.slow
def test_the_demos_models_rank_as_recorded(shown):
    order = ("base", EXTENDED, "untouched")
    tails = [number(shown, label, f"tail_nll@{TARGET}") for label in order]
    assert tails == sorted(tails)
    assert tails[1] < tails[0] + 0.4
    folded = number(shown, FOLDED, f"tail_nll@{TARGET}")
    assert tails[0] - 0.15 < folded < tails[0] + 0.05
    assert 0.4 <= number(shown, EXTENDED, f"keys@{TARGET}") <= 0.95
    # Truncation keeps the last quarter of a text: the needles at depth 1 of five, few others.
    assert 0.2 <= number(shown, "base", f"keys@{TARGET}") <= 0.4


@pytest.mark.slow
def test_a_short_fine_tuning_recovers_the_window(shown):
    tuned, base, closed = (
        number(shown, label, f"tail_nll@{TARGET}") for label in (TUNED, "base", EXTENDED)
    )
    assert tuned <= base + 0.05
    assert tuned <= closed - 0.1
    assert number(shown, TUNED, "short_tax") <= 0.07
    assert number(shown, TUNED, f"keys@{TARGET}") >= 0.75


@pytest.mark.slow
def test_the_demos_models_read_the_same_tokens(shown):
    base = number(shown, "base", f"tail_nll@{TARGET}")
    for label in ("untouched", EXTENDED, FOLDED, TUNED):
        assert number(shown, label, f"in_window_nll@{TARGET}") == pytest.approx(base, abs=1e-6)


@pytest.mark.slow
def test_the_outputs_are_proved_and_leave_no_path_of_this_machine(shown):
    place = str(bundled.MODELS["ropext://demo"].parent)
    records = list(shown.output.rglob("ropext.json"))
    assert len(records) == 5  # two stages and the output, and two of them also list the base
    for record in map(json.loads, (path.read_text("utf-8") for path in records)):
        assert record["base"]["name"] == "ropext://demo"
        assert record["proof"]
    for path in shown.output.rglob("*"):
        if path.suffix in (".json", ".md", ".html"):
            assert place not in path.read_text("utf-8"), path


@pytest.mark.slow
def test_the_report_is_one_file_with_everything_in_it(shown):
    page = check((shown.output / "report.html").read_text("utf-8"))  # nothing is fetched
    gates = [gate.gate for gate in shown.gates]
    for text in (*shown.sentences, *gates, *shown.commands, *shown.models):
        assert text in page.text
    pictures = list((shown.output / "plots").glob("*.png"))
    assert len(pictures) == [tag for tag, _ in page.tags].count("img") == 5
    assert all(own.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" for own in pictures)


def test_the_demos_lines_are_for_the_platforms_shell(monkeypatch):
    asked = {"method": demo.MORE_METHODS, "factor": (demo.FACTOR,)}
    words = demo._words("eval", "M", PureWindowsPath(r"C:\my runs\x"), asked)
    monkeypatch.setattr(sys, "platform", "win32")
    said = join_for_shells(*words)
    assert said == r'ropext eval M --method "pi,ntk,self-extend" --factor 4 -o "C:\my runs\x"'


@pytest.mark.slow
def test_the_demos_commands_parse(shown):
    group = typer.main.get_command(build())
    for line in shown.commands:
        words = shlex.split(line)[1:]
        name, command, rest = group.resolve_command(group.make_context("ropext", words[:1]), words)
        command.make_context(name, list(rest))  # fails on an unknown option or a missing one


@pytest.mark.slow
def test_a_second_run_does_nothing_again_and_the_command_prints_it(shown, network, capsys):
    before = {p: p.stat().st_mtime_ns for p in shown.output.rglob("*.safetensors")}
    code, said = run("demo", "-o", shown.output, capsys=capsys)
    ended = 0 if all(gate.passed for gate in shown.gates) else 3
    assert code == ended
    assert said.err.count("done before, skipped") == 5
    assert said.out.startswith("After YaRN and 12 steps of LoRA the model reads 1,024 tokens ")
    assert re.search(r"^(passed|FAILED)  tuned:gain@1024\.value < 0 ", said.out, re.M)
    assert "ropext eval ropext://demo --method self-extend --factor 4 " in said.out
    assert before == {p: p.stat().st_mtime_ns for p in shown.output.rglob("*.safetensors")}
    code, said = run("demo", "-o", shown.output, "--json", "-q", capsys=capsys)
    assert code == ended
    gates = [gate["gate"] for gate in json.loads(said.out)["gates"]]
    assert gates == [gate for gate in demo.GATES if "control" not in gate]
    assert network.asked == []
    canaries.check(said.out + said.err, "what the command says")


def test_an_interrupt_names_the_kept_results(tmp_path, monkeypatch):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("ropext.pipeline.running.run", interrupted)
    with pytest.raises(Interrupted, match=r"finished work is kept in .*it; run the same command"):
        demo.run(tmp_path / "it")
