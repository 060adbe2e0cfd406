"""Lengths, buckets and the numbers made of per-token arrays, against sums written out."""

import math
from dataclasses import replace

import numpy as np
import pytest

from ropext.base.errors import InputError, UsageError
from ropext.base.jsontext import read_values, values_json
from ropext.base.lengths import (
    doubling_grid,
    length_text,
    octaves,
    parse_length,
    parse_lengths,
    tail_tokens,
)
from ropext.results.measurement import MeasuredModel, Measurement, item_differences
from ropext.results.metrics import ReadText, text_values
from ropext.results.perplexity import (
    ALL_TOKENS,
    LossStatistics,
    MeasuredDocuments,
    Reading,
    loss_by_position,
    truncation_verdicts,
)
from ropext.results.retrieval import ItemScore, heat_map_cells, retrieval_values, share_of_answers
from ropext.results.rules import compare_text
from ropext.results.values import Bootstrap, Value, wilson_share


def test_parse_lengths_reads_ascending_lengths_with_a_k():
    assert parse_lengths("4k, 8k,1m") == (4096, 8192, 1048576)
    assert parse_length("0.5k") == 512
    assert length_text(32768) == "32k"
    assert length_text(1000) == "1000"
    for bad in ("8k,4k", "4k,4k", "", "four", "1.5", "0", "-4"):
        with pytest.raises(UsageError, match="--lengths"):
            parse_lengths(bad)


def test_grid_starts_at_a_quarter_and_ends_at_the_limit():
    assert doubling_grid(4096, 16384) == (1024, 2048, 4096, 8192, 16384)
    assert doubling_grid(4096, 12288) == (1024, 2048, 4096, 8192, 12288)
    assert doubling_grid(4096, 1000) == ()


def test_tail_is_a_quarter_of_the_context_and_at_most_1024():
    assert tail_tokens(256) == 64
    assert tail_tokens(131072) == 1024


def test_octaves_are_split_at_the_trained_context_and_cover_everything_once():
    assert octaves(64, 256) == ((1, 8), (8, 16), (16, 32), (32, 64), (64, 128), (128, 256))
    assert octaves(64, 200)[-1] == (128, 200)
    assert octaves(64, 48)[-1] == (32, 48)
    for parts in (1, 4):
        for longest in (5, 63, 64, 65, 300, 4096):
            covered = [t for start, stop in octaves(64, longest, parts) for t in range(start, stop)]
            assert covered == list(range(1, longest))
            assert longest <= 64 or any(stop == 64 for _, stop in octaves(64, longest, parts))


def arrays(rng, n, longest, level=2.0):
    nll = rng.gamma(2.0, level / 2, (n, longest)).astype(np.float32)
    nll[:, 0] = np.nan
    return list(nll)


def documents(rng, n, lengths, tag="d"):
    return MeasuredDocuments(
        tuple(f"{tag}{k}" for k in range(n)),
        tuple({c: f"{tag}-{k}-{c}" for c in lengths} for k in range(n)),
        tuple(rng.integers(1, 6, lengths[-1]) for _ in range(n)),
    )


@pytest.fixture
def setting():
    rng = np.random.default_rng(0)
    frame = LossStatistics(64, (16, 32, 64, 128, 256), 16, Bootstrap(0))
    own = documents(rng, 12, frame.lengths)
    return rng, frame, own


def test_text_values_follow_from_the_losses(setting):
    rng, frame, own = setting
    nll = arrays(rng, 12, 256)
    base = arrays(rng, 12, 256, level=2.5)
    reading, basis = Reading("m", {256: nll}), Reading("base", {256: base})
    values = text_values(ReadText(frame, reading, basis, own))
    truth, other = np.array(nll, np.float64), np.array(base, np.float64)
    assert values["tail_nll@128"].value == pytest.approx(truth[:, 112:128].mean(), abs=1e-12)
    assert values["tail@128"].value == pytest.approx(math.exp(truth[:, 112:128].mean()))
    assert values["tail_nll@16"].value == pytest.approx(truth[:, 1:16].mean(), abs=1e-12)
    assert values["cumulative@64"].value == pytest.approx(math.exp(truth[:, 1:64].mean()))
    assert values["in_window_nll@256"].value == pytest.approx(other[:, 240:].mean(), abs=1e-12)
    gain = values["in_window_nll@256"].value - values["tail_nll@256"].value
    assert values["gain@256"].value == pytest.approx(gain, abs=1e-12)
    tax = truth[:, 1:64].mean() - other[:, 1:64].mean()
    assert values["short_tax"].value == pytest.approx(tax, abs=1e-12)
    num_bytes = sum(counts[1:64].sum() for counts in own.token_bytes)
    bits = truth[:, 1:64].sum() / math.log(2)
    assert values["bpb@64"].value == pytest.approx(bits / num_bytes)
    # Buckets weighed by their tokens are the cumulative mean.
    rows = loss_by_position(frame, reading, basis)
    total = sum(row.nll.value * (row.stop - row.start) for row in rows)
    assert total / 255 == pytest.approx(math.log(values["cumulative@256"].value), abs=1e-12)


def test_mean_of_means_differs_from_token_weights_only_by_weight(setting):
    rng, frame, own = setting
    values = text_values(ReadText(frame, Reading("m", {256: arrays(rng, 12, 256)}), documents=own))
    assert values["yarn@64"].value == pytest.approx(values["cumulative@64"].value)
    assert "gain@64" not in values


def test_a_length_is_read_from_the_shortest_pass_that_reaches_it(setting):
    rng, frame, own = setting
    short, long = arrays(rng, 12, 64), arrays(rng, 12, 256)
    reading = Reading("longrope", {64: short, 256: long})
    assert reading.sums(1, 64)[0][0] == pytest.approx(np.float64(short[0][1:]).sum())
    assert reading.sums(100, 128)[0][0] == pytest.approx(np.float64(long[0][100:128]).sum())
    values = text_values(ReadText(frame, reading, documents=own))
    assert values["tail_nll@32"].value == pytest.approx(
        np.mean([np.float64(a[16:32]) for a in short])
    )


def test_effective_context_stops_at_the_first_length_that_is_worse(setting):
    rng, frame, _ = setting
    base = arrays(rng, 12, 256)
    # Equal to the base up to 64, 0.1 nats worse in the tail of 128, equal again at 256.
    worse = [array.copy() for array in base]
    for array in worse:
        array[112:128] += 0.1
    reading, basis = Reading("m", {256: worse}), Reading("base", {256: base})
    reached = frame.effective_context(reading, basis)
    assert (reached.value, reached.ci95) == (64.0, (64.0, 64.0))
    assert frame.effective_context(basis, basis).value == 256
    few = Reading("m", {256: worse[:3]}), Reading("base", {256: base[:3]})
    assert frame.effective_context(*few).ci95 is None


def test_lengths_shorter_than_the_tail_do_not_count_in_the_effective_context(setting):
    rng, frame, _ = setting
    base = arrays(rng, 12, 256)
    worse = [array.copy() for array in base]
    for array in worse:
        array[:32] += 0.5
    reading, basis = Reading("m", {256: worse}), Reading("base", {256: base})
    # The tail of 128 begins at 64.
    late = replace(frame, lengths=(32, 128, 256), tail=64)
    assert late.effective_context(reading, basis).value == 256
    assert replace(late, lengths=(32,)).effective_context(reading, basis).value == 0


def test_a_verdict_names_lengths_at_which_truncation_is_better(setting):
    _, frame, _ = setting
    values = {
        "gain@128": Value(-0.4, 0.01, (-0.42, -0.38), 12),
        "gain@256": Value(0.1, 0.01, (0.08, 0.12), 12),
        "short_tax": Value(0.03, 0.001, (0.02, 0.04), 12),
    }
    lines = truncation_verdicts(frame, values, "yarn-4x")
    assert lines[0].startswith("Truncation beats yarn-4x at 128:")
    assert "0.400 nats" in lines[0]
    assert lines[1] == "The longer context helps yarn-4x at 256."
    assert "0.0300 nats" in lines[2]
    unsure = {"gain@128": Value(-0.4, 0.5, (-1.4, 0.6), 12)}
    assert truncation_verdicts(frame, unsure, "yarn-4x") == []
    few = {key: replace(value, ci95=None, n=7) for key, value in values.items()}
    assert truncation_verdicts(frame, few, "yarn-4x") == []


def contender(label, frame, own, nll, items=()):
    model = MeasuredModel(reading=Reading(label, {frame.longest: nll}), items=tuple(items))
    return Measurement(frame, {label: model}, own)


def test_pairing_makes_the_error_bar_smaller_and_follows_the_hash_not_the_order(setting):
    rng, frame, own = setting
    difficulty = rng.normal(0, 0.5, 12)[:, None].astype(np.float32)
    left = np.array(arrays(rng, 12, 256)) + difficulty
    right = left + 0.05 + rng.normal(0, 0.05, left.shape).astype(np.float32)
    shuffled = rng.permutation(12)
    other = MeasuredDocuments(
        own.names,
        tuple(own.prefix_hashes[k] for k in shuffled),
        tuple(own.token_bytes[k] for k in shuffled),
    )
    compared = compare_text(
        [
            contender("a", frame, own, list(left)),
            contender("b", frame, other, list(right[shuffled])),
        ]
    )
    last = compared.lengths[-1]
    delta = last.difference["b"]
    assert delta.value == pytest.approx(0.05, abs=0.01)
    unpaired = math.hypot(last.tail["a"].se / last.tail["a"].value, 0)
    assert delta.se < 0.1 * unpaired
    assert last.winner == "a"
    assert compared.documents == 12
    spans = [(octave.start, octave.stop) for octave in compared.positions["b"]]
    assert spans == list(octaves(64, 256, 4))


def test_no_winner_where_an_interval_holds_zero(setting):
    rng, frame, own = setting
    left = np.array(arrays(rng, 12, 256))
    # Half of the documents better by 0.3 nats, half worse by 0.2: no telling with twelve.
    right = left + np.where(np.arange(12) % 2, 0.3, -0.2).astype(np.float32)[:, None]
    compared = compare_text(
        [contender("a", frame, own, list(left)), contender("b", frame, own, list(right))]
    )
    assert not compared.lengths[-1].difference["b"].sign
    assert compared.lengths[-1].winner is None


def test_runs_on_other_tokens_are_refused_and_partial_overlap_is_counted(setting):
    rng, frame, own = setting
    nll = arrays(rng, 12, 256)
    strange = documents(rng, 12, frame.lengths, tag="other")
    with pytest.raises(InputError, match="read different tokens"):
        compare_text([contender("a", frame, own, nll), contender("b", frame, strange, nll)])
    half = MeasuredDocuments(own.names[:9], own.prefix_hashes[:9], own.token_bytes[:9])
    compared = compare_text([contender("a", frame, own, nll), contender("b", frame, half, nll[:9])])
    assert (compared.documents, compared.left_out) == (9, {"a": 3, "b": 0})
    apart = LossStatistics(64, (17,), 16, Bootstrap())
    with pytest.raises(InputError, match="no length in common"):
        compare_text([contender("a", frame, own, nll), contender("b", apart, own, nll)])


def test_differences_for_gates_are_paired_nats(setting):
    rng, frame, own = setting
    left, right = arrays(rng, 12, 256), arrays(rng, 12, 256)
    a, b = contender("a", frame, own, left), contender("a", frame, own, right)
    values = a.difference("a", b)
    span = frame.tail_span(128)
    expected = frame.difference(Reading("", {256: left}), Reading("", {256: right}), span)
    assert values["tail@128"].value == pytest.approx(expected.value, abs=1e-12)


def test_a_refused_difference_names_both_models(setting):
    rng, frame, own = setting
    apart = LossStatistics(64, (17,), 16, Bootstrap())
    ours = contender("yarn", frame, own, arrays(rng, 12, 256))
    theirs = contender("other", apart, own, arrays(rng, 12, 256))
    with pytest.raises(InputError, match=r"\(yarn [^;]*; other \(reference\) 17\)"):
        ours.difference("yarn", theirs)


def item(task="passkey", length=64, depth=0.5, index=0, exact=True, nll=0.1):
    return ItemScore(
        task, length, depth, index, nll, 3, exact, f"{length}-{depth}-{index}", (1,), (1,)
    )


def test_retrieval_values_are_shares_with_wilson_intervals():
    items = [item(index=k, exact=k < 9) for k in range(10)]
    items += [item(length=128, index=k, exact=k < 8, nll=0.5) for k in range(10)]
    items += [item(length=256, index=k, exact=k < 7) for k in range(10)]
    values = retrieval_values(items, 64, Bootstrap())
    assert values["passkey@128"].value == 0.8
    assert values["passkey@128"].ci95 == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert values["passkey_nll@128"].value == pytest.approx(0.5)
    # 0.85 * 0.9 = 0.765: 0.8 holds, 0.7 does not.
    assert values["effective_context.passkey"] == Value(128.0, None, None, 10)
    cells = heat_map_cells(items)["passkey"]
    assert [(cell.length, cell.share.value) for cell in cells] == [
        (64, 0.9),
        (128, 0.8),
        (256, 0.7),
    ]
    assert read_values(ItemScore, values_json(items[0]), "x") == items[0]


def test_a_miss_inside_the_context_does_not_zero_a_tasks_reach():
    shares = {32: 0.6, 64: 1.0, 128: 1.0, 256: 0.5}
    items = [
        item(length=length, index=k, exact=k < 10 * share)
        for length, share in shares.items()
        for k in range(10)
    ]
    reach = {
        c: retrieval_values(items, c, Bootstrap())["effective_context.passkey"] for c in (32, 64)
    }
    # Inside of 64 they are 0.8 together, of which 0.6 at 32 is less than 85 %.
    assert reach[64].value == 128
    late = [own for own in items if own.length != 64]
    worse = [replace(own, exact=own.exact and own.length < 128) for own in late]
    assert retrieval_values(worse, 32, Bootstrap())["effective_context.passkey"].value == 32


def test_item_differences_pair_by_question():
    left = [item(index=k, exact=True) for k in range(10)]
    right = [item(index=k, exact=k < 5) for k in reversed(range(10))] + [item(index=99)]
    values = item_differences(left, right, Bootstrap())
    assert (values["passkey@64"].value, values["passkey@64"].n) == (0.5, 10)


def test_a_cell_of_the_heat_map_counts_haystacks_too():
    """Ten questions a haystack ask the same depth twice over it."""
    asked = [item("niah_multikey_2", 64, 0.5, k // 2, k < 4, 1.0) for k in range(8)]
    (cell,) = heat_map_cells(asked)["niah_multikey_2"]
    assert cell.share == share_of_answers(asked)
    assert cell.share.ci95[0] < wilson_share(4, 8).ci95[0] - 0.02


def test_questions_over_one_haystack_are_one_unit():
    """Ten haystacks, of which six are read and four are not; five depths each."""
    asked = [("mkey", depth, k, k < 6) for k in range(10) for depth in (0, 0.25, 0.5, 0.75, 1)]
    shared = [item(task, 64, depth, k, exact, 1.0 - exact) for task, depth, k, exact in asked]
    apart = [replace(own, task="passkey") for own in shared]
    values = retrieval_values([*shared, *apart], 64, Bootstrap())
    one, other = values["mkey@64"], values["passkey@64"]
    assert (one.value, one.n, other.value, other.n) == (0.6, 50, 0.6, 50)
    # Spread 10/9 * (6 * 2^2 + 4 * 3^2) / 2500, of independent answers .24 / 50: 50/9 times as much.
    # 20 answers of the rarer kind weigh this, and one assumed answer the prior; Student's t with
    # nine degrees.
    effect = (20 * 50 / 9 + 3.8) / 21
    worth = 50 / (1 + (2.262157 / 1.959964) ** 2 * (effect - 1))
    assert one.ci95 == pytest.approx(wilson_share(6, 10, worth).ci95, rel=1e-4)
    assert other.ci95 == pytest.approx(wilson_share(30, 50).ci95)
    assert (values["mkey_nll@64"].n, values["passkey_nll@64"].n) == (10, 50)
    assert values["mkey_nll@64"].se > 2 * values["passkey_nll@64"].se
    right = [replace(own, exact=True, answer_nll=0.0) for own in [*shared, *apart]]
    changes = item_differences([*shared, *apart], right, Bootstrap())
    assert (changes["mkey@64"].n, changes["passkey@64"].n) == (50, 50)
    assert changes["mkey@64"].value == changes["passkey@64"].value == pytest.approx(-0.4)
    # Below eight haystacks there is no interval of a difference, as with documents.
    few = [own for own in shared if own.index < 7]
    assert item_differences(few, right, Bootstrap())["mkey@64"].ci95 is None


def test_a_task_that_is_never_done_has_no_reach():
    values = retrieval_values([item(index=k, exact=False) for k in range(8)], 64, Bootstrap())
    assert values["effective_context.passkey"].value == 0


def test_a_heading_names_lengths_that_are_no_longer_than_the_tail():
    tail_text = ALL_TOKENS.tail_text
    assert tail_text(1024, (1024, 4096)) == "the last 1024 tokens before each length"
    assert tail_text(1024, (512, 1024, 4096)) == (
        "the last 1024 tokens before each length (before 512 all there are)"
    )
