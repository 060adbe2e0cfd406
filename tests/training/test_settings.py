"""Defaults and their sources, and options: all without a weight."""

import pytest
import torch

from ropext.base.errors import UsageError
from ropext.options.fields import value_kind
from ropext.options.training import Finetune, Fit
from ropext.training import defaults


def settings(parameters, context=4096, target=32768, **options):
    return defaults.finetune_settings(
        Finetune(**options), defaults.ModelSize(parameters, context, target)
    )


def test_a_7b_model_gets_the_papers_optimiser_and_at_most_its_steps():
    found = settings(7e9, 4096, 65536)
    assert (found.steps.value, found.is_open) == (400, True)
    assert "YaRN" in found.steps.source
    assert found.warmup.value == 20
    assert found.betas.value == (0.9, 0.95)
    assert found.weight_decay.value == 0
    assert found.learning_rate.value == 2e-4
    assert found.rows.value == 4
    assert found.tokens == 400 * 4 * 65536
    assert settings(70e9).learning_rate.value == 1e-4


@pytest.mark.parametrize("parameters", [1e6, 135e6, 7e9])
@pytest.mark.parametrize("per_pass", [1, 3, 165, 5000, 10**6])
@pytest.mark.parametrize("processes", [1, 4])
@pytest.mark.parametrize("options", [{}, {"patience": 0}])
def test_held_out_documents_say_how_long_a_default_run_is_or_else_four_passes_do(
    parameters, per_pass, processes, options
):
    for judging in (0, 8 * 16384):
        found = of_data(per_pass, processes, parameters, judging, **options)
        steps, rows = found.steps.value, found.rows.value
        assert rows in (settings(parameters, 4096, 16384).rows.value, rows - rows % processes)
        assert rows <= max(per_pass / 10, processes)  # a step has a row for each process
        assert found.is_open == bool(judging and not options)
        assert found.patience == (3 if found.is_open else 0)
        if found.is_open:
            assert steps == 400
        else:
            assert steps == max(1, min(400, 4 * per_pass // rows))


def of_data(per_pass, processes=1, parameters=7e9, judging=1, **options):
    size = defaults.ModelSize(parameters, 4096, 16384)
    amount = defaults.DataAmount(per_pass, processes, judging)
    return defaults.finetune_settings(Finetune(**options), size, amount)


@pytest.mark.parametrize("judging", [1, 8 * 16384, 64 * 16384, 10**9])
def test_the_evaluations_of_an_open_end_cost_a_tenth_of_its_training_at_most(judging):
    found = of_data(10**4, judging=judging)
    assert found.between >= 10
    assert judging <= 0.1 * found.between * 3 * found.rows.value * 16384
    assert of_data(10**4, judging=judging, eval_every=7).between == 7
    asked = of_data(10**4, judging=judging, steps=400)
    assert (asked.between, asked.patience, asked.is_open) == (80, 0, False)
    assert of_data(10**4, judging=judging, epochs=1, patience=2).patience == 2


def test_requested_steps_epochs_and_batches_are_kept():
    books = of_data(165, judging=0)  # eight books in windows of 16k
    assert (books.steps.value, books.rows.value) == (41, 16)
    assert "at most 4 passes" in books.steps.source
    assert of_data(165, steps=400).tokens == 400 * 16 * 16384
    assert of_data(165, epochs=5).steps.value == 5 * 165 // 16
    assert of_data(10**4, epochs=1).steps.value == 10**4 // 16
    half = of_data(165, epochs=0.5)
    assert (half.steps.value, half.rows.value) == (20, 4)
    assert of_data(3, batch_tokens=16 * 16384).rows.value == 16


def test_a_short_run_warms_up_for_as_large_a_share_as_yarns():
    found = settings(1e6, 256, 1024, steps=60)
    assert (found.steps.value, found.warmup.value) == (60, 3)
    assert "at most its share of YaRN's 400 steps" in found.warmup.source
    assert settings(1e6, 256, 2048, steps=60, strategy="pose").warmup.value == 3
    assert settings(7e9, steps=400).warmup.value == 20
    assert settings(7e9, steps=4000).warmup.value == 20
    assert settings(1e6, 256, 1024, steps=10, warmup=2).warmup.value == 2


def test_a_given_option_wins_with_a_note():
    found = settings(7e9, steps=30, learning_rate=1e-3, batch_tokens=40000, rank=8)
    assert (found.steps.value, found.steps.source) == (30, "asked for")
    assert found.learning_rate.value == 1e-3
    assert found.rows.value == 1
    assert found.warmup.value == 1
    assert found.alpha.value == 16


def test_pose_reads_windows_of_twice_the_context_and_warms_up_for_ten_steps():
    found = settings(7e9, 4096, 131072, strategy="pose")
    assert found.row_tokens.value == 2048
    assert found.warmup.value == 10
    assert found.rows.value == 128
    assert settings(7e9, 1024, 8192, strategy="pose").row_tokens.value == 2048
    assert settings(7e9, 256, 2048, strategy="pose").row_tokens.value == 512
    assert settings(7e9, 1024, 2048, strategy="pose").row_tokens.value == 1024
    assert settings(7e9, strategy="pose", window=300).row_tokens.value == 300


def test_rows_read_at_once_divide_the_share_of_a_step():
    options = Finetune()
    assert defaults.micro_rows(options, 1024, 12) == 6
    assert defaults.micro_rows(options, 32768, 12) == 1
    assert defaults.micro_rows(Finetune(micro_rows=5), 32768, 12) == 4
    assert defaults.micro_rows(Finetune(micro_rows=99), 32768, 12) == 12


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"strategy": "skip"}, "--strategy is one of full, pose"),
        ({"steps": 0}, "--steps must be at least 1"),
        ({"learning_rate": float("nan")}, "--learning-rate must be finite"),
        ({"dropout": 1.0}, "--dropout must be"),
        ({"window": 512}, "--window is for --strategy pose"),
        ({"packing": "glued", "strategy": "pose"}, "--packing glued is for --strategy full"),
        ({"epoch": 3}, "unknown option 'epoch'"),
        ({"epochs": 3, "steps": 9}, "--epochs and --steps both"),
        ({"epochs": 0.0}, "--epochs must be finite and above 0"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, words):
    with pytest.raises(UsageError, match=words):
        Finetune(**options)


def test_a_seed_that_no_generator_takes_is_refused_at_once():
    for options in (Finetune, Fit):
        with pytest.raises(UsageError, match="--seed must be at least 0, was -1"):
            options(seed=-1)
        with pytest.raises(UsageError, match=f"--seed must be at most {2**63 - 1}"):
            options(seed=2**64)
        torch.manual_seed(options(seed=2**63 - 1).seed)


@pytest.mark.parametrize("options", [Finetune, Fit])
def test_no_count_is_so_large_that_a_run_would_hang_or_overflow(options):
    counts = [name for name, info in options.model_fields.items() if value_kind(info)[0] is int]
    counts = [name for name in counts if name not in ("target", "context", "original_context")]
    assert {"steps", "batch_tokens", "seed"} < set(counts)
    for name in counts:
        with pytest.raises(UsageError, match="--" + name.replace("_", "-") + " must be at most"):
            options(**{name: 10**400})
    with pytest.raises(UsageError, match="--micro-rows must be at most 65536, was 1000000000"):
        options(micro_rows=10**9)  # a divisor of a step's rows is looked for among them all


def test_questions_are_counted_before_they_are_made():
    with pytest.raises(UsageError, match="--retrieval-items must be at most 1000, was 1000000000"):
        Fit(retrieval_items=10**9)


def in_brackets(options, name):
    """Return the default that the help prints in brackets."""
    return options.model_fields[name].description.partition("[")[2].rstrip("]")


def test_a_fit_names_a_flag_only_if_it_was_given():
    plain, given = (defaults.fit_settings(own, 256, 1024, 32) for own in (Fit(), Fit(steps=40)))
    assert plain.steps.value == given.steps.value == 40
    assert [own.steps.source for own in (plain, given)] == [defaults.FIT_MEASURED, "--steps"]
    assert plain.rows.source == given.rows.source == defaults.FIT_MEASURED


def test_the_help_says_the_defaults_that_are_taken():
    def rate(pairs, target=1024):
        return defaults.fit_settings(Fit(), 256, target, pairs).learning_rate.value

    many, few = rate(16), rate(4)
    assert many == rate(64) == rate(16, 1792)
    assert rate(10) == pytest.approx(0.04)
    assert few == rate(2) == rate(4, 2048)
    said = f"{many}, from 8 times on {rate(16, 2048)}; of fewer than 16 pairs up to {few}"
    assert in_brackets(Fit, "learning_rate") == said
    small, large = (settings(own).learning_rate.value for own in (1e6, 70e9))
    rates = in_brackets(Finetune, "learning_rate").removeprefix("by size: ").split(" to ")
    assert [float(own) for own in rates] == [small, large]
    assert int(in_brackets(Finetune, "rank")) == settings(7e9).rank.value
    steps = {"steps": 10_000}
    warmup, pose = (settings(7e9, **steps, strategy=own).warmup.value for own in ("full", "pose"))
    assert in_brackets(Finetune, "warmup").startswith(f"{warmup}, pose {pose};")
