"""Gates: the grammar, the end of the interval that counts, and values without an interval."""

import re
from dataclasses import replace

import numpy as np
import pytest

from ropext.base.errors import UsageError
from ropext.base.jsontext import values_json
from ropext.options.evaluate import Evaluate
from ropext.results import BASE, UNTOUCHED, metrics
from ropext.results.gates import GateMetrics, check_gate, parse_gate
from ropext.results.measurement import MeasuredModel, Measurement
from ropext.results.metrics import GateRules, Metric
from ropext.results.perplexity import LossStatistics, MeasuredDocuments, Reading
from ropext.results.report.gates import failed_gate_lines
from ropext.results.rundir import judge_gates
from ropext.results.values import Bootstrap, Value, difference_of_shares, wilson_share

MODELS = {"base": MeasuredModel(BASE), "m": MeasuredModel()}
VALUES = {
    "tail@32768": Value(8.4, 0.1, (8.2, 8.6), 16),
    "short_tax": Value(0.01, None, None, 3, (0.0, 0.02)),
    "passkey@32768": Value(0.95, 0.03, (0.88, 0.99), 40),
    "effective_context.multi-key": Value(16384.0, None, (16384.0, 16384.0), 40),
}


@pytest.mark.parametrize(
    ("text", "passed"),
    [
        ("tail@32k > 8.5", False),  # 8.6 is above, though the point is not
        ("tail@32k.value > 8.5", True),
        ("tail@32768 > 8.61", True),
        ("tail@32k >= 8.6", False),
        ("tail@32k > 8.6", True),
        ("passkey@32k < 0.9", False),  # 0.88
        ("passkey@32k.value < 0.9", True),
        ("passkey@32k < .8", True),
        ("passkey@32k < 0.88", True),  # the end itself
        ("passkey@32k <= 0.88", False),
        ("passkey@32k > 0.99", True),
        ("passkey@32k >= 0.99", False),
        ("tail@32k.value > 8.4", True),
        ("tail@32k.value >= 8.4", False),
        ("tail@32k.value < 8.4", True),
        ("tail@32k.value <= 8.4", False),
        ("short_tax > 0.5", False),  # no interval
        ("short_tax.value > 0.02", True),
        ("effective_context.multi-key < 32k", False),
        ("effective_context.multi-key < 16k", True),
        ("effective_context.multi-key.value <= 16k", False),
    ],
)
def test_a_gate_uses_the_worse_end_of_the_interval(text, passed):
    gate = parse_gate(text)
    assert check_gate(gate, "yarn-4x", VALUES).passed is passed


def test_the_sentence_of_a_gate_names_the_compared_number():
    outcome = check_gate(parse_gate("tail@32k > 8.5"), "yarn-4x", VALUES)
    assert outcome.sentence == (
        "yarn-4x: the upper end of the 95 % interval of tail@32k is 8.6, the gate fails at > 8.5"
        "; the value itself, 8.4, does not: about 64 documents would decide, instead of 16"
    )
    assert "no interval (n = 3)" in check_gate(parse_gate("short_tax > 1"), "m", VALUES).reason


def test_a_gate_is_written_with_its_model_and_a_value_only_where_one_was_looked_at():
    judged = check_gate(parse_gate("tail@32k.value > 8.5"), "yarn-4x", VALUES)
    assert judged.reason == "the point of tail@32k is 8.4, the gate fails at > 8.5"
    assert values_json(judged) == {
        "gate": "tail@32k.value > 8.5",
        "variant": "yarn-4x",
        "passed": True,
        "looked_at": 8.4,
        "reason": "yarn-4x: the point of tail@32k is 8.4, the gate fails at > 8.5",
        "value": 8.4,
        "is_uncertain": False,
    }
    unanswered = parse_gate("tail@64k > 1").unanswered("m", "nothing is there")
    assert "value" not in values_json(unanswered)
    assert unanswered.recorded()["value"] is None


def test_a_gate_that_only_an_interval_fails_says_how_many_documents_would_decide():
    values = {"gain@512": Value(0.02, 0.02, (-0.02, 0.06), 16)}
    outcome = check_gate(parse_gate("gain@512 < 0"), "m", values)
    assert not outcome.passed
    # The end is twice as far from the value as the limit, and falls with the root of the number.
    assert outcome.reason.endswith(
        "fails at < 0; the value itself, 0.02, does not: about 64 documents would decide, "
        "instead of 16"
    )
    for text in ("gain@512 < 0.03", "gain@512 < -0.03", "gain@512.value < 0.03", "gain@512 < 0.02"):
        assert "would decide" not in check_gate(parse_gate(text), "m", values).reason


@pytest.mark.parametrize("metric", ["tail", "cumulative", "yarn", "in_window", "hf_stride"])
def test_the_documents_that_decide_about_a_perplexity_follow_its_logarithm(metric):
    """16 documents end at 10 and at 6.4: ln 1.25 = .22314 on both sides of ln 8. Of n documents
    they are .22314·sqrt(16/n) away. ln(9/8) = .11778 gives n = 57.4, and ln(8/7) = .13353 gives
    44.7."""
    values = {f"{metric}@512": Value(8.0, 0.9, (6.4, 10.0), 16)}

    def reason(text):
        return check_gate(parse_gate(f"{metric}@512 {text}"), "m", values).reason

    assert reason("> 9").endswith("about 58 documents would decide, instead of 16")
    assert 8 * 1.25 ** (16 / 58) ** 0.5 < 9 < 8 * 1.25 ** (16 / 57) ** 0.5
    assert reason("< 7").endswith("about 45 documents would decide, instead of 16")
    assert 8 / 1.25 ** (16 / 44) ** 0.5 < 7 < 8 / 1.25 ** (16 / 45) ** 0.5


def test_the_documents_that_decide_about_a_difference_or_a_loss_follow_the_number_itself():
    """The end .4 is .3 away, and the limit .2 is .1 away: nine times the documents."""
    for metric, run in (("tail", " vs base"), ("tail_nll", ""), ("bpb", ""), ("short_tax", "")):
        name = metric if metric == "short_tax" else f"{metric}@512"
        values = {name: Value(0.1, 0.1, (-0.2, 0.4), 16)}
        told = check_gate(parse_gate(f"{name} > 0.2{run}"), "m", values).reason
        assert told.endswith("about 150 documents would decide, instead of 16"), metric


def test_a_perplexity_that_is_infinite_says_no_count():
    values = {"tail@512": Value(float("inf"), None, (5.0, float("inf")), 16)}
    outcome = check_gate(parse_gate("tail@512 < 9"), "m", values)
    assert not outcome.passed
    assert "would decide" not in outcome.reason


def test_a_gate_on_a_share_says_how_many_questions_would_decide():
    """40 of 40 over eight haystacks; by Wilson's formula 132 of 132 end above .9."""
    values = {"mkey@256": wilson_share(40, 40, 40 / 3.8)}
    outcome = check_gate(parse_gate("mkey@256 < 0.9"), "m", values)
    assert outcome.is_uncertain
    assert outcome.reason.endswith("about 140 questions would decide, instead of 40")
    losses = {"mkey_nll@256": Value(0.5, 0.1, (0.3, 0.7), 8)}
    told = check_gate(parse_gate("mkey_nll@256 > 0.6"), "m", losses).reason
    assert told.endswith("about 32 haystacks would decide, instead of 8")


def test_twenty_questions_answered_alike_do_not_show_that_nothing_is_lost():
    values = {"passkey@256": difference_of_shares(wilson_share(0, 20), wilson_share(0, 20))}
    outcome = check_gate(parse_gate("passkey@256 < -0.02 vs untouched"), "extended", values)
    assert not outcome.passed
    assert outcome.looked_at == pytest.approx(-3.8415 / 23.8415, abs=1e-4)
    assert outcome.reason.endswith("about 190 questions would decide, instead of 20")
    few = {"passkey@256": Value(0.0, None, None, 7, (0.0, 0.0))}
    told = check_gate(parse_gate("passkey@256 < -0.02 vs untouched"), "extended", few).reason
    assert "no interval (n = 7); measure 8 haystacks or more" in told


def test_parse_gate_splits_a_gate_into_its_parts():
    gate = parse_gate("yarn-4x:tail@32k >0.05 vs runs/last week")
    assert (gate.variant, gate.metric, gate.op, gate.limit) == ("yarn-4x", "tail@32768", ">", 0.05)
    assert gate.run == "runs/last week"
    assert parse_gate("tail@4k > vs base").limit == 0
    assert parse_gate("tail@4k > vs base").run == "base"
    assert parse_gate("gain@4096 < -1e-2").limit == -0.01


@pytest.mark.parametrize(
    "text",
    [
        *("", "tail", "tail@32k", "tail@32k >", "tail@x > 1", "tail > 1 vs", "> 3", "a = 3"),
        *("tail@32k > ٣", "tail@٣٢k > 3", "tail@32k > 3e٣", "tail@32k > 𝟑", "tail@32k > −3"),
        *("tail@32k > inf", "tail@32k > nan", "tail@32k > 0x10", "tail@32k > 1_0"),
    ],
)
def test_nonsense_is_refused(text):
    with pytest.raises(UsageError, match="not a gate"):
        parse_gate(text)


@pytest.mark.parametrize(
    "number", ["1e400", "-1e400", "1e308k", "9" * 400, "1e-400", "-.1e-400", "1e-330m"]
)
def test_a_limit_that_a_float_cannot_hold_is_refused(number):
    """An infinite limit would let everything pass, and one near zero would become zero."""
    with pytest.raises(UsageError, match="too large or too small for a computer's numbers"):
        parse_gate(f"tail@32k > {number}")


def test_limits_near_the_ends_of_a_float_and_every_zero_are_read():
    for number in ("0", "-0", "0.000", ".0", "0e5", "0k", "0e-400"):
        assert parse_gate(f"tail@32k > {number}").limit == 0
    assert parse_gate("tail@32k > 1e308").limit == 1e308
    assert parse_gate("tail@32k > -2e-323").limit == -2e-323
    assert parse_gate("tail@32k > 100.5k").limit == 100.5 * 1024


def test_a_gate_about_what_was_not_measured_fails_and_loses_no_measurement():
    outcome = check_gate(parse_gate("tail@64k > 1"), "m", VALUES)
    assert not outcome.passed
    assert "tail@64k was not measured; there are tail@32k, short_tax, passkey@32k" in outcome.reason


def test_a_number_that_is_not_finite_fails():
    values = {"tail@4096": Value(float("inf"), None, (8.0, float("nan")), 9)}
    assert not check_gate(parse_gate("tail@4k > 100"), "m", values).passed
    assert not check_gate(parse_gate("tail@4k.value < 100"), "m", values).passed


@pytest.mark.parametrize("gate", ["tail@64 > 9", "short_tax > 0", "effective_context < 64"])
def test_a_gate_that_no_interval_can_answer_is_refused_before_anything_is_read(gate):
    """A point, questions and eight documents do have an interval or a value."""

    def check(text, count):
        options = Evaluate(data="x.jsonl", tasks=("passkey",), max_docs=count)
        GateMetrics(options, MODELS, (64,)).check([parse_gate(text)])

    with pytest.raises(UsageError, match="7 documents give no interval: --max-docs 8 or more"):
        check(gate, 7)
    check(gate, 8)
    for text in ("tail@64.value > 9", "passkey@64 < 0.9", "effective_context.passkey.value < 64"):
        check(text, 7)
    with pytest.raises(UsageError, match=r"has no interval: ask for its \.value"):
        check("effective_context.passkey < 64", 8)


@pytest.mark.parametrize(
    ("gate", "value", "sentence"),
    [
        ("tail@512 > 1", 8.5, "tail@512 of m is 8.5. To do: train it, or longer"),
        ("hf_stride@512 > 1", 8.5, "hf_stride@512 of m is 8.5. To do: train it, or longer"),
        ("gain@512 < 1", -0.25, "before 512 0.25 nats per token worse than the base does"),
        ("gain@512 < 1", 0.25, "before 512 0.25 nats per token better than the base does"),
        (
            "short_tax > 0",
            0.25,
            "the trained context 0.25 nats per token worse than the base. To do",
        ),
        ("effective_context < 2k", 1024, "keeps its quality up to 1,024 tokens. To do: serve it"),
        ("ruler_context < 2k", 1024, "keeps its quality up to 1,024 tokens. To do: serve it"),
        (
            "passkey@512 < 1",
            0.25,
            "finds 25 % of what passkey asks for at 512. To do: train it with",
        ),
        ("passkey_nll@512 > 1", 2.5, "passkey_nll@512 of m is 2.5. To do: train it with questions"),
    ],
)
def test_a_failed_gate_says_what_the_number_means_and_what_to_do(gate, value, sentence):
    name = parse_gate(gate).metric
    ends = (value, value)
    (line,) = failed_gate_lines(
        [check_gate(parse_gate(gate), "m", {name: Value(value, 0.0, ends, 9)})]
    )
    assert sentence in line


def test_a_metric_says_in_its_row_how_gates_judge_it(monkeypatch):
    rules = GateRules("{model} is {size:g} {side} at {length}", "do this", True, has_interval=False)
    row = Metric("invented", "nll", gate_rules=rules)
    monkeypatch.setattr(metrics, "TEXT_METRICS", (*metrics.TEXT_METRICS, row))
    gate = parse_gate("invented@64.value < 3")
    (line,) = failed_gate_lines([check_gate(gate, "m", {"invented@64": Value(2.0, None, None, 9)})])
    assert line == "FAILED invented@64.value < 3: m is 2 better at 64. To do: do this."
    known = GateMetrics(Evaluate(data="x.jsonl"), MODELS, (64,))
    known.check([gate])
    with pytest.raises(UsageError, match=r"has no interval: ask for its \.value"):
        known.check([parse_gate("invented@64 < 3")])


@pytest.mark.parametrize(
    ("gate", "left"),
    [
        ("tail@64 > 1", ["x", "y"]),
        ("tail@64 > 1 vs base", ["x", "y"]),
        ("tail@64 > 1 vs x", ["y"]),
        ("x:tail@64 > 1 vs y", ["x"]),
        ("x:tail@64 > 1 vs x", "it compares x only with itself; name another model after vs, or"),
        ("rounding@64 > 1", ["x+kv-q8_0"]),
        ("rounding@64 > 1 vs x", ["x+kv-q8_0"]),
        ("z:tail@64 > 1", "no variant 'z'; there are base, untouched, x, x+kv-q8_0, y"),
    ],
)
def test_a_gate_judges_every_model_that_it_is_about_but_none_by_itself(gate, left):
    """All models have the same losses, but the base."""
    losses = [np.full(64, 1 + k / 10, np.float32) for k in range(9)]
    models = {"base": MeasuredModel(BASE, Reading("base", {64: [row / 2 for row in losses]}))}
    for label in ("untouched", "x", "x+kv-q8_0", "y"):
        models[label] = MeasuredModel(reading=Reading(label, {64: losses}))
    models["untouched"] = replace(models["untouched"], kind=UNTOUCHED)
    models["x+kv-q8_0"] = replace(models["x+kv-q8_0"], unrounded="x")
    hashes = tuple({64: str(k)} for k in range(9))
    documents = MeasuredDocuments(tuple("abcdefghi"), hashes, (np.ones(64, np.int64),) * 9)
    run = Measurement(LossStatistics(64, (64,), 16, Bootstrap(3)), models, documents)
    if isinstance(left, list):
        assert [one.variant for one in judge_gates(run, [parse_gate(gate)])] == left
    else:
        with pytest.raises(UsageError, match=re.escape(left)):
            judge_gates(run, [parse_gate(gate)])


def test_a_run_of_bases_alone_has_no_model_for_a_gate_without_one():
    run = Measurement(LossStatistics(64, (64,), 16, Bootstrap(3)), {"base": MeasuredModel(BASE)})
    with pytest.raises(UsageError, match="it is about none of base; name one of them, as in"):
        judge_gates(run, [parse_gate("tail@64 > 1")])
