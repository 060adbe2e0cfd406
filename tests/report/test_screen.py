"""A plan on one screen: at most 24 rows of a terminal, whatever the model and the method."""

import json
import math
from dataclasses import replace

import configs
import pytest

from ropext.files import inspecting
from ropext.options.extend import Extend
from ropext.planning import make_plan
from ropext.results.report import text
from ropext.results.report.screen import plan_screen, served_screen

PAIRS = tuple(1 + 0.1 * pair for pair in range(64))


def rows(shown):
    return sum(max(1, math.ceil(len(line) / 120)) for line in shown.split("\n"))


def plan(config, **options):
    return make_plan(config, Extend(**({"factor": 4.0} | options)), "model")


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (configs.LLAMA, {}),
        (configs.LLAMA, {"method": "longrope", "pair_factors": PAIRS}),
        (configs.LLAMA31, {}),
        (configs.LLAMA31, {"from_original": True, "target": 262144, "factor": None}),
        (configs.DEEPSEEK_V3, {}),
        (configs.PHI3, {}),
    ],
)
def test_a_plan_is_one_screen(config, options):
    made = plan(config, **options)
    shown = plan_screen(made)
    assert rows(shown) <= 26, shown
    first, *_, last = shown.splitlines()
    assert first == text.plan_details(made).splitlines()[0]
    assert last.startswith("--details shows")
    assert "to write it: ropext extend model " in shown
    assert not made.warnings or "\nwarning: [" in shown


def test_a_users_first_questions_are_answered_on_the_screen():
    shown = plan_screen(plan(configs.LLAMA)).splitlines()
    assert "exact in     transformers, vllm, sglang, llama.cpp" in "\n".join(shown)
    assert any(line.startswith("wrong in     ") for line in shown)
    assert any(line.startswith("recommended  --method yarn: ") for line in shown)
    assert any(line.startswith("KV cache     ") for line in shown)
    assert any("vllm serve model --hf-overrides" in line for line in shown)
    assert any("vllm serve OUT --max-model-len 16384" in line for line in shown)
    assert not any("pairs extrapolated" in line for line in shown)
    longrope = plan_screen(plan(configs.LLAMA, method="longrope", pair_factors=PAIRS))
    assert "vllm serve OUT --max-model-len 16384" in longrope


def test_lines_are_those_of_the_programs_that_were_named():
    shown = plan_screen(plan(configs.LLAMA, for_loaders="llama.cpp"))
    assert "\n  llama.cpp " in shown
    assert "vllm serve" not in shown
    assert "AutoModelForCausalLM" not in shown
    # the screen still names an engine that reads it otherwise
    assert "wrong in     exllamav2" in shown


def test_warnings_of_one_kind_are_grouped_and_hidden_ones_are_named():
    warnings = tuple(f"[kind{n % 3}] sentence {n} " + "word " * 60 for n in range(12))
    made = replace(plan(configs.LLAMA), warnings=warnings)
    (first, *others) = made.remarks()[-3:]
    assert first.startswith("warning: [kind0] sentence 0 word")
    assert first.count("[kind0]") == 1
    for number in (3, 6, 9):
        assert f"; sentence {number} word" in first
    assert len(others) == 2
    shown = plan_screen(made)
    assert rows(shown) <= 26
    assert "([kind0], [kind1], [kind2]): --details" in shown


def test_a_refused_plan_says_why_first():
    made = make_plan(configs.LLAMA, Extend(target=2**22), "model")
    assert plan_screen(made).startswith(text.plan_details(made).splitlines()[0])
    assert "to write it" not in plan_screen(made)
    assert rows(plan_screen(made)) <= 26


@pytest.mark.parametrize("config", [configs.LLAMA31, configs.DEEPSEEK_V3])
def test_the_plan_of_an_extended_model_is_one_screen_too(config, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    read = inspecting.read_unchanged(inspecting.open_model(str(tmp_path)))
    shown = served_screen(read)
    assert rows(shown) <= 26, shown
    assert shown.splitlines()[0] == text.served_details(read).splitlines()[0]
    assert "exact in  " in shown
    assert "vllm serve " in shown
    assert shown.splitlines()[-1].startswith("--details shows")
