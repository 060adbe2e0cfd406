"""`ropext demo`, for real, once, without a network; everything is asserted from that one run.

Without fine-tuning it is the demo as it stands. The fine-tuning has fewer steps here, so that
all of it takes minutes on one core; its bounds are looser for that.
"""

import json
import re
import shutil
import socket
from dataclasses import replace

import pytest
from command_line import run
from marked import manifest
from report.pages import check

from ropext import bundled, demo
from ropext.errors import InputError, OutputExists, Stopped
from ropext.narration import Hooks
from ropext.pipeline.series import SCHEMA, Spent, Step, run_series
from ropext.results.values import Value
from ropext.workdir import Ledger

FEW_STEPS, ALL_STEPS = 16, 60
WINDOW, TARGET = 256, 1024
MOST, MOST_UNTUNED = 5_600_000, 2_100_000
BASE, UNTOUCHED, EXTENDED = "base", "untouched", "yarn-4x"
FITTED, CONTROL, TUNED = "fitted-4x", "control", "tuned-4x"
MODEL = "ropext://demo"
UNTUNED = demo.read_recipe(finetune=False, far=False)

pytestmark = pytest.mark.slow


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
def said():
    return []


@pytest.fixture(scope="module")
def recipe():
    whole = demo.read_recipe(finetune=True, far=False)
    few = {"tune": {"steps": FEW_STEPS, "eval_every": FEW_STEPS}}
    steps = [replace(own, options={**own.options, **few.get(own.name, {})}) for own in whole.steps]
    assert [own.options["steps"] for own in whole.steps if own.name == "tune"] == [ALL_STEPS]
    return replace(whole, steps=tuple(steps))


@pytest.fixture(scope="module")
def finished(network, said, recipe, tmp_path_factory):
    """The finished steps, in a directory."""
    folder = tmp_path_factory.mktemp("demo") / "it"
    return run_series(recipe.steps, folder, Hooks(say=said.append)), folder


@pytest.fixture(scope="module")
def shown(recipe, finished):
    return demo.show(recipe, *finished)


def number(model, name):
    return model.values[name].value


def test_nothing_asked_for_a_network(finished, network):
    assert network.asked == []


def test_one_sentence_stands_before_each_step(finished, said):
    done, _ = finished
    assert len(said) == len(done)
    for number, (sentence, own) in enumerate(zip(said, done.values(), strict=True), 1):
        assert sentence == f"[{number}/{len(done)}] {own.step.sentence}"


def test_the_base_finds_keys_inside_its_window_and_explodes_beyond_it(shown):
    untouched = shown.read[UNTOUCHED]
    excess = number(untouched, f"tail_nll@{TARGET}") - number(untouched, f"in_window_nll@{TARGET}")
    assert excess >= 1.5
    assert number(untouched, f"keys@{WINDOW}") >= 0.95
    assert number(untouched, f"keys@{TARGET}") <= 0.05


def test_closed_forms_separate(shown):
    tails = {name: number(own, f"tail_nll@{TARGET}") for name, own in shown.read.items()}
    assert tails[EXTENDED] < tails["ntk-4x"] < tails["pi-4x"] < tails[UNTOUCHED]
    assert tails[BASE] < tails[EXTENDED] < tails[BASE] + 0.4
    assert shown.read["pi-4x"].values[f"keys@{TARGET}"].value <= 0.05
    assert 0.5 <= number(shown.read[EXTENDED], f"keys@{TARGET}") <= 0.95


def test_the_fitted_spectrum_comes_near_the_window_with_untouched_weights(shown):
    fitted = shown.read[FITTED]
    in_window = number(fitted, f"in_window_nll@{TARGET}")
    assert number(fitted, f"tail_nll@{TARGET}") <= 1.04 * in_window
    assert number(fitted, f"tail_nll@{TARGET}") < number(shown.read[EXTENDED], f"tail_nll@{TARGET}")
    assert number(fitted, f"keys@{TARGET}") >= number(shown.read[EXTENDED], f"keys@{TARGET}") - 0.1


def test_a_short_fine_tuning_recovers_the_window_and_more(shown):
    tuned = shown.read[TUNED]
    tail, in_window = (number(tuned, f"{name}@{TARGET}") for name in ("tail_nll", "in_window_nll"))
    assert tail <= in_window + 0.05
    assert tail <= number(shown.read[CONTROL], f"tail_nll@{TARGET}") + 0.05
    assert tail <= number(shown.read[EXTENDED], f"tail_nll@{TARGET}") - 0.1
    assert number(tuned, "short_tax") <= 0.05
    own = number(shown.read[UNTOUCHED], f"keys@{WINDOW}")
    assert number(tuned, f"keys@{TARGET}") >= 0.85 * own


def test_all_were_read_on_the_same_tokens(finished, shown):
    done, _ = finished
    base = shown.read[BASE].metrics[f"tail_nll@{TARGET}"].value
    for label in (UNTOUCHED, EXTENDED, FITTED, TUNED, CONTROL):
        assert number(shown.read[label], f"in_window_nll@{TARGET}") == pytest.approx(base, abs=1e-6)
    judged = Value.from_json(done["tune"].result["numbers"]["tuned"][f"tail_nll@{TARGET}"])
    # Merged, saved, read back by stock transformers: the same number.
    assert number(shown.read[TUNED], f"tail_nll@{TARGET}") == pytest.approx(judged.value, abs=1e-4)


def test_what_it_costs_is_counted_and_within_the_budget(finished, shown):
    done, _ = finished
    tuning = ("tune", "measure-tuned")
    without = sum((own.spent for name, own in done.items() if name not in tuning), Spent())
    assert 1_000_000 < without.equivalents <= MOST_UNTUNED
    # Two runs (the control has as many tokens), one pass of every row each.
    assert done["tune"].spent.trained == 2 * FEW_STEPS * 8192
    # A fit asks its model once, on a few tokens, whether gradients reach the spectrum.
    assert 0 <= done["fit"].spent.trained - done["fit"].step.trains <= 256
    assert shown.spent == sum((own.spent for own in done.values()), Spent())
    # The whole demo: the steps that were left out of this run.
    more = 2 * (ALL_STEPS - FEW_STEPS)
    assert shown.spent.equivalents + 3 * 8192 * more <= MOST


def test_every_target_is_judged_in_words(shown):
    assert len(shown.targets) == 5
    for target in shown.targets:
        assert target.sentence.startswith("Reached: " if target.reached else "MISSED: ")


def test_the_outputs_are_proved(finished):
    done, folder = finished
    assert done["verify"].result["passed"]
    for name in ("pi-4x", "ntk-4x", "yarn-4x", "fitted", "tuned"):
        record = json.loads((folder / name / "ropext.json").read_text())
        assert record["base"]["name"] == "ropext://demo"
        assert record["proof"]


def test_the_report_is_one_file_with_everything_in_it(finished, shown):
    _, folder = finished
    page = check((folder / "report.html").read_text("utf-8"))  # nothing is fetched, among others
    for target in shown.targets:
        assert target.sentence in page.text
    for command in shown.commands:
        assert command in page.text
    for word in ("base", "control", "extended (YaRN 4x)", "extended + tuned"):
        assert word in page.text
    pictures = list((folder / "plots").glob("*.png"))
    assert len(pictures) == [tag for tag, _ in page.tags].count("img") == 6
    assert all(own.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" for own in pictures)


def test_the_place_of_the_package_is_in_nothing_that_it_leaves(finished):
    _, folder = finished
    place = str(bundled.MODELS["ropext://demo"].parent)
    for path in folder.rglob("*"):
        if path.suffix in (".json", ".md", ".html"):
            assert place not in path.read_text("utf-8"), path


def test_a_second_run_does_nothing_again_and_the_command_prints_it(finished, network, capsys):
    """The command without fine-tuning: all but its own verification is there already."""
    _, folder = finished
    words = ("demo", "-o", folder, "--no-finetune")
    code, said = run(*words, capsys=capsys)
    assert code == 0
    (sentence,) = said.err.splitlines()
    assert "Verify the fitted checkpoint" in sentence
    assert re.search(r"^(Reached|MISSED): loss at 1024 with the fitted spectrum", said.out, re.M)
    assert "ropext fit ropext://demo --data ropext://tuning" in said.out
    code, said = run(*words, "--json", capsys=capsys)
    assert (code, said.err) == (0, "")
    found = json.loads(said.out)
    assert len(found["targets"]) == 2
    assert found["tokens"]["equivalents"] <= MOST_UNTUNED
    assert [own["name"] for own in found["steps"]] == [step.name for step in UNTUNED.steps]
    assert network.asked == []


def test_a_stopped_step_keeps_what_it_cost_and_goes_on(finished, tmp_path):
    """Stopped in the middle of an evaluation: the pieces read so far are read once."""
    done, _ = finished
    chosen = [step for step in UNTUNED.steps if step.command == "eval"][:1]
    begun = []

    def show(done, total, what):
        begun.append(what)

    with pytest.raises(Stopped):
        run_series(chosen, tmp_path / "it", Hooks(show=show, stop=lambda: len(begun) >= 20))
    kept = Ledger(tmp_path / "it" / "steps").read(chosen[0].name)
    assert kept.outputs is None
    partly = kept.about["spent"]["forward"]
    again = run_series(chosen, tmp_path / "it", Hooks())[chosen[0].name]
    whole = done[chosen[0].name].spent
    assert 0 < partly < whole.forward
    # Loading twice checks the model's own head twice, on a few tokens.
    assert whole.forward <= again.spent.forward <= whole.forward + 2000


def test_what_was_deleted_is_made_again(tmp_path):
    quick = {"factor": 2, "prove": False}
    step = Step("extend", "Extend it.", "extend", MODEL, quick, "it-2x")
    said = []
    for begun in (1, 1, 2):  # done, done before, done again
        if begun == 2:
            shutil.rmtree(tmp_path / "it" / "it-2x")
        run_series([step], tmp_path / "it", Hooks(say=said.append))
        assert len(said) == begun
        assert (tmp_path / "it/it-2x/config.json").is_file()


def test_an_interrupt_of_a_step_with_nothing_to_keep_keeps_the_demo(tmp_path, monkeypatch):
    """A training that is interrupted before its first step raises what Ctrl-C raises."""

    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    chosen, said = UNTUNED.steps[:2], []
    monkeypatch.setattr("ropext.plan", interrupted)
    with pytest.raises(Stopped, match=r"what is finished is kept in .*it, and the same command"):
        run_series(chosen, tmp_path / "it", Hooks(say=said.append))
    ledger = Ledger(tmp_path / "it" / "steps")
    assert ledger.read("inspect").outputs["context"] == 256
    assert ledger.read("plan").outputs is None
    monkeypatch.undo()
    with pytest.raises(Stopped):  # asked between two steps: the next is not announced
        run_series(chosen, tmp_path / "it", Hooks(say=said.append, stop=lambda: True))
    assert len(said) == 2
    run_series(chosen, tmp_path / "it", Hooks(say=said.append))
    assert [sentence[:5] for sentence in said] == ["[1/2]", "[2/2]", "[2/2]"]


def test_what_was_made_of_an_output_is_made_again_with_it(tmp_path):
    def chosen(method):
        options = {"method": method, "factor": 2}
        extend = Step("make", "Make.", "extend", MODEL, options, "made")
        return [extend, Step("look", "Look.", "inspect", "made")]

    said = []
    for method in ("pi", "pi", "ntk"):
        run_series(chosen(method), tmp_path / "it", Hooks(say=said.append))
    assert said == ["[1/2] Make.", "[2/2] Look."] * 2


def test_a_directory_of_something_else_is_refused(tmp_path):
    (tmp_path / "mine.txt").write_text("kept")
    with pytest.raises(OutputExists, match="holds something else; give another -o"):
        run_series([], tmp_path, Hooks())
    manifest(tmp_path, "demo", {"schema": SCHEMA, "versions": {}})
    with pytest.raises(OutputExists, match=r"differs in versions\.ropext.*give another -o$"):
        run_series([], tmp_path, Hooks())
    with pytest.raises(InputError, match="cannot be written"):
        run_series([], tmp_path / "run.json" / "below", Hooks())


@pytest.mark.parametrize(
    "edit",
    [
        lambda kept: kept.pop("inputs"),
        lambda kept: kept.pop("spent"),
        lambda kept: kept.update(inputs={"command": ["ropext"]}),
        lambda kept: kept.update(outputs={}),
        lambda kept: kept["spent"].update(forward="many"),
        lambda kept: kept.clear(),
    ],
)
def test_a_step_whose_record_was_edited_is_done_again(tmp_path, edit):
    chosen, said = UNTUNED.steps[:2], []
    run_series(chosen, tmp_path / "it", Hooks())
    record = tmp_path / "it" / "steps" / "plan.json"
    whole = record.read_text()
    kept = json.loads(whole)
    edit(kept)
    for text in (json.dumps(kept), whole[:-40]):
        record.write_text(text)
        run_series(chosen, tmp_path / "it", Hooks(said.append))
        assert record.read_text() == whole
    assert [sentence[:5] for sentence in said] == ["[2/2]", "[2/2]"]
