"""Results that a notebook holds: own labels, verdicts of gates, and comparisons of objects."""

import shutil

import numpy as np
import pytest
from json_schema import check_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import ropext
from ropext.base.bundled import MODELS
from ropext.base.errors import GateFailed, RopextError, UsageError
from ropext.results.gates import parse_gate

GIVEN = {"data": "ropext://held-out", "lengths": [256, 512], "max_docs": 2, "factor": 2}
OWN = {"yarn-2x": "YaRN (ours)"}
GATES = ["tail@512.value < 0", "YaRN (ours):tail@512.value > 0"]


def evaluate_demo(documents):
    return ropext.evaluate("ropext://demo", data=documents)


@pytest.fixture(scope="module")
def yarn():
    return ropext.evaluate("ropext://demo", method="yarn", labels=OWN, gates=GATES, **GIVEN)


@pytest.fixture(scope="module")
def pi():
    return ropext.evaluate("ropext://demo", method="pi", tasks="passkey", items=1, **GIVEN)


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    run = tmp_path_factory.mktemp("kept") / "run"
    return ropext.evaluate("ropext://demo", run, method="pi", **GIVEN)


def test_a_model_has_the_user_s_label_everywhere(yarn):
    names = ["base", "untouched", "YaRN (ours)"]
    assert list(yarn.models) == names == list(yarn.losses())
    assert {row["model"] for row in yarn.table()} == set(names)
    assert {row["model"] for row in yarn.positions()} == set(names)
    assert "YaRN (ours)" in repr(yarn)


def test_a_label_decides_no_number_and_a_finished_run_is_not_measured_again(kept, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(kept.path, run)
    named = ropext.evaluate("ropext://demo", run, method="pi", labels={"pi-2x": "PI"}, **GIVEN)
    assert named.resumed == 6  # two documents by three models
    assert ropext.open(run) == named
    assert list(named.models) == ["base", "untouched", "PI"]
    assert named.values("PI") == kept.values("pi-2x")
    assert named.key == kept.key
    check_file(run / "results.json")


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        ({"yarn-4x": "x"}, r"there is no model 'yarn-4x'; there are base, untouched, pi-2x"),
        ({"base": "x"}, "'base' keeps its name"),
        ({"pi-2x": "a:b"}, "'a:b' cannot name a model"),
        ({"pi-2x": " a"}, "' a' cannot name a model"),
        ({"pi-2x": "base"}, "two models are called 'base'"),
        ({"pi-2x": 3}, "labels must be a dict of texts"),
    ],
)
def test_a_label_that_cannot_be_is_refused(labels, said):
    with pytest.raises(UsageError, match=said):
        ropext.evaluate("ropext://demo", method="pi", labels=labels, **GIVEN)


def test_the_result_has_the_verdicts_of_its_gates(yarn, pi):
    assert [(one.gate, one.variant, one.passed) for one in yarn.gates] == [
        (GATES[0], "YaRN (ours)", True),
        (GATES[1], "YaRN (ours)", False),
    ]
    assert yarn.gates[1].looked_at == yarn.values("YaRN (ours)")["tail@512"].value
    with pytest.raises(GateFailed, match=r"1 of 2 gates failed: YaRN \(ours\):tail@512"):
        yarn.raise_if_failed()
    assert "FAILED" in repr(yarn)
    assert pi.gates == ()
    pi.raise_if_failed()
    assert [one.passed for one in pi.judge(["tail@512.value > 1e9", "passkey@512.value < 2"])] == [
        True,
        False,
    ]


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        (lambda done: done.values("x"), r"^there is no model 'x'; there are base, untouched, YaRN"),
        (lambda done: done.difference("x", done), "no model 'x'"),
        (lambda done: done.judge("tail@512 < 3"), "^gates are a list of texts, was 'tail@512 < 3'"),
        (lambda done: done.judge([3]), "^gates '3' is not a gate; write METRIC"),
        (lambda done: ropext.compare([done]), "a path is a text or .*, not a list"),
        (lambda done: ropext.compare(), "needs two models at least"),
        (lambda done: done.frame.bootstrap.ratio([1, 2], [1]), r"of shapes \(2,\) and \(1,\)"),
        (lambda done: evaluate_demo(["a", None]), "^data texts:2 is a NoneType"),
        (lambda done: evaluate_demo({"a": 1}), "no column .*; there are a"),
    ],
)  # fmt: skip
def test_a_wrong_use_of_a_result_gives_one_sentence(yarn, mistake, said):
    with pytest.raises(RopextError, match=said):
        mistake(yarn)


def test_numbers_of_numpy_are_options(yarn):
    given = GIVEN | {
        "lengths": np.array([256, 512]),
        "max_docs": np.int64(2),
        "factor": np.float32(2),
    }
    again = ropext.evaluate("ropext://demo", method="yarn", labels=OWN, seed=np.int64(0), **given)
    assert again == yarn


def words_alone(words):
    """Make a tokenizer that knows these words and nothing else."""
    vocabulary = {word: number for number, word in enumerate(["[UNK]", *words])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]")


def test_a_tokenizer_that_does_not_know_the_text_gets_a_warning():
    model = AutoModelForCausalLM.from_pretrained(MODELS["ropext://demo"])
    given = {
        "data": [f"fox{n} " + "the fox and the dog " * 100 for n in range(8)],
        "lengths": [256],
        "max_docs": 8,
    }
    for words, share in (
        (["fox"], "80%"),
        (["the", "fox", "and"], "20%"),
        (["fox", "the", "and", "dog"], ""),
    ):
        heard = []
        done = ropext.evaluate(model, tokenizer=words_alone(words), say=heard.append, **given)
        found = [line for line in done.facts.warnings if line.startswith("[unknown-tokens]")]
        assert [line.split()[1] for line in found] == ([share] if share else [])
        assert sum("[unknown-tokens]" in line for line in heard) == len(found)


@pytest.mark.parametrize("label", ["yarn-2x", "a b", "x"])
def test_a_gate_names_a_label_with_spaces(label):
    gate = parse_gate(f"{label}:tail@512 < 3 vs run:tuned")
    assert (gate.variant, gate.metric, gate.run) == (label, "tail@512", "run:tuned")


def test_results_in_memory_are_compared_on_the_same_tokens(yarn, pi):
    compared = ropext.compare(yarn, pi, labels={"pi-2x": "PI"})
    # One base for both, since all of its losses are equal; names that two models have get a number.
    assert list(compared.parts) == ["base", "1:untouched", "YaRN (ours)", "2:untouched", "PI"]
    own = {row["model"]: row for row in compared.table() if row["length"] == 512}
    tail = slice(512 - 64, 512)
    rows = pi.losses()["pi-2x"][:, tail] - pi.losses()["base"][:, tail]
    assert own["PI"]["difference"] == pytest.approx(rows.mean())


def test_one_row_of_a_comparison_has_the_differences_of_text_and_of_answers(pi):
    yarn = ropext.evaluate("ropext://demo", method="yarn", tasks="passkey", items=1, **GIVEN)
    table = ropext.compare(pi, yarn, labels={"pi-2x": "PI", "yarn-2x": "YaRN"}).table()
    own = {row["model"]: row for row in table if row["length"] == 512}
    found = {}
    for label, measured in {"base": pi, "YaRN": yarn}.items():
        model = "base" if label == "base" else "yarn-2x"
        answers = [a for a in measured.answers() if (a["model"], a["length"]) == (model, 512)]
        found[label] = sum(answer["exact"] for answer in answers) / len(answers)
    assert own["YaRN"]["passkey"] == pytest.approx(found["YaRN"] - found["base"])
    assert own["YaRN"]["difference"] is not None


def test_kept_and_unkept_results_are_compared(kept, yarn, tmp_path):
    compared = ropext.compare(f"{kept.path}:base", yarn, f"{kept.path}:pi-2x")
    assert list(compared.parts) == ["base", "untouched", "YaRN (ours)", "pi-2x"]
    with pytest.raises(UsageError, match="was not kept in a folder"):
        ropext.compare(kept, yarn, output=tmp_path / "out")
    with pytest.raises(UsageError, match="there is no model 'x'"):
        ropext.compare(kept, yarn, labels={"x": "y"})
    written = ropext.compare(kept, output=tmp_path / "out", labels={"pi-2x": "PI"})
    assert ropext.open(tmp_path / "out") == written
    assert list(written.parts) == ["base", "untouched", "PI"]
