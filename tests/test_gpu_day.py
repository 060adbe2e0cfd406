"""benchmarks/gpu_day.py: its pieces fail, hang, die and go on as it says; and its dry run."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FAKES = {
    "correctness": """
import gpu_pieces
from gpu_pieces import LeftOut, at_most
def cases(day):
    def wrong():
        with (day.out / "wrong").open("a") as file:
            file.write("x")
        gpu_pieces.spoilt = True
        raise ValueError("wrong on purpose")
    def out():
        raise LeftOut("no such thing here")
    return {
        "right": lambda: {"three": 3, "small": at_most(1.0, 2), "large": at_most(3.0, 2)},
        "wrong": wrong, "out": out,
        "after": lambda: {"four": 4 / (not hasattr(gpu_pieces, "spoilt"))},
    }
""",
    "evaluation": """
import subprocess, sys, time
def cases(day):
    def hangs():
        subprocess.run([sys.executable, "-c", "import time; time.sleep(60)"])
    return {"hangs": hangs, "after": lambda: {"five": 5}}
""",
    "training": """
import os
def cases(day):
    return {"dies": lambda: os._exit(7), "after": lambda: {"six": 6}}
""",
    "processes": "import no_such_module\n",
    "result": """
import time
def cases(day):
    def long():
        if not (day.out / "half").exists():
            (day.out / "half").touch()
            time.sleep(60)
        return {"seven": 7}
    return {"long": long}
""",
}
for name in ("folding", "pose", "groups", "questions", "recipes"):
    FAKES[name] = "def cases(day):\n    return {}\n"


@pytest.fixture
def clone(tmp_path):
    """Copy the command and its children unchanged, with invented cases and short limits."""
    folder = tmp_path / "clone/benchmarks"
    for name in ("gpu_day.py", "gpu_pieces/__init__.py", "gpu_pieces/child.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "benchmarks" / name, folder / name)
    shutil.copy(ROOT / "benchmarks/gpu_pieces/page.py", folder / "gpu_pieces/page.py")
    (folder.parent / "scripts").mkdir()
    shutil.copy(ROOT / "scripts/real_model.py", folder.parent / "scripts")
    pieces = folder / "gpu_pieces/__init__.py"
    text = pieces.read_text("utf-8")
    for limits in ("120, 40", "240, 60", "300, 90", "480, 100", "480, 150"):
        assert f", {limits}" in text
        text = text.replace(f", {limits}", ", 2, 2")
    pieces.write_text(text, "utf-8")
    for name, code in FAKES.items():
        (folder / f"gpu_pieces/{name}.py").write_text(code, "utf-8")
    return folder / "gpu_day.py"


def call(script, *words, path=None):
    env = {"PATH": path or "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, str(script), *map(str, words)],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def lines_of(out):
    text = (out / "lines.jsonl").read_text("utf-8")
    return [json.loads(line) for line in text.splitlines() if line]


def outcomes(out):
    """Return the outcome of each case, in order."""
    kinds = ("figures", "left_out", "error")
    return [
        (line["piece"], line["case"], next(kind for kind in kinds if kind in line))
        for line in lines_of(out)
        if line["case"] is not None
    ]


FIRST = [
    ("correctness", "right", "figures"),
    ("correctness", "wrong", "error"),
    ("correctness", "out", "left_out"),
    ("correctness", "after", "figures"),
    ("training", "dies", "error"),
    ("training", "after", "figures"),
    ("processes", "its start", "error"),
    ("evaluation", "hangs", "error"),
    ("evaluation", "after", "figures"),
]


@pytest.mark.slow
def test_a_case_that_fails_hangs_or_dies_is_noted_and_the_rest_continues(clone, tmp_path):
    out = tmp_path / "out"
    printed = call(clone, "--dry-run", "-o", out)
    assert outcomes(out) == FIRST
    assert "wrong: FAILED: ValueError: wrong on purpose" in printed.replace(" (0.0 s)", "")
    assert "hangs: FAILED: ended at its limit of 6 s" in printed
    assert "dies: FAILED: the process ended with 7" in printed
    assert "No module named 'no_such_module'" in (out / "log.txt").read_text("utf-8")
    assert "long: stopped; the next call goes on" in printed
    assert "not done: result; the same command goes on" in printed
    with (out / "lines.jsonl").open("a") as file:  # begins a line that a kill cut short
        file.write('\n{"torn')
    printed = call(clone, "--dry-run", "-o", out)
    text = (out / "lines.jsonl").read_text("utf-8").replace('\n{"torn', "")
    (out / "lines.jsonl").write_text(text, "utf-8")
    assert outcomes(out) == [*FIRST, ("result", "long", "figures")]
    assert (out / "wrong").read_text() == "x"
    assert "all is done" in printed
    call(clone, "--dry-run", "-o", out, "--again", "--only", "correctness")
    assert (out / "wrong").read_text() == "xx"
    again = [case for case in outcomes(out) if case[0] == "correctness"]
    assert sorted(again) == sorted(case for case in FIRST if case[0] == "correctness")


def test_the_page_of_a_dry_run_claims_nothing_and_shows_failures(clone, tmp_path):
    call(clone, "--dry-run", "-o", tmp_path / "out", "--only", "correctness")
    page = call(clone, "--page", tmp_path / "out")
    assert "**No GPU has run this yet.**" in page
    assert "| right | goes through |" in page
    assert "| out | left out: no such thing here |" in page
    assert "| wrong | **failed** (below) |" in page
    assert "ValueError: wrong on purpose\n```" in page
    assert "torch " in page
    assert "small" not in page


@pytest.fixture
def gpu(tmp_path):
    """Return a PATH on which nvidia-smi finds a GPU."""
    program = tmp_path / "bin/nvidia-smi"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho 'Some GPU, 580.1'\n", "utf-8")
    program.chmod(0o755)
    return f"{program.parent}:/usr/bin:/bin"


@pytest.mark.slow
def test_a_call_ends_with_its_minutes_and_the_page_judges_a_gpu(clone, tmp_path, gpu):
    out = tmp_path / "out"
    printed = call(clone, "--minutes", "0.06", "-o", out, path=gpu)  # 3.6 s
    assert outcomes(out)[:1] == FIRST[:1]
    assert len(outcomes(out)) < len(FIRST)
    assert "large: 3 (goal ≤ 2: MISSED)" in printed
    assert "not done: " in printed
    page = call(clone, "--page", out)
    assert "No GPU has run this" not in page
    assert "## 1 × Some GPU, driver 580.1, " in page
    assert "| right | small | 1 | ≤ 2 | met |" in page
    assert "| right | large | 3 | ≤ 2 | MISSED |" in page


def test_without_a_gpu_and_in_the_folder_of_another_kind_nothing_is_begun(clone, tmp_path):
    with pytest.raises(AssertionError, match="nvidia-smi finds no GPU here"):
        call(clone, "-o", tmp_path / "out")
    (tmp_path / "out/lines.jsonl").write_text('{"piece": "x", "case": "y", "dry": false}', "utf-8")
    with pytest.raises(AssertionError, match="is of a real run: give another -o"):
        call(clone, "--dry-run", "-o", tmp_path / "out")


def test_the_result_waits_for_a_wheel_that_is_not_whole(clone, tmp_path):
    parts = tmp_path / "parts"
    parts.mkdir()
    (parts / "part-aa").write_bytes(b"half")
    words = ("--dry-run", "-o", tmp_path / "out", "--model", parts, "--only", "result", "recipes")
    printed = call(clone, *words)
    assert f"--model {parts}: not the whole wheel yet; what reads it waits" in printed
    waiting = "result, pose, groups, questions"
    left = f"correctness, folding, {waiting}, training, processes, evaluation"
    assert f"not done: {left}; the same command goes on" in printed
    assert not (tmp_path / "out/half").exists()


def test_the_parent_loads_neither_torch_nor_ropext():
    code = "import sys, gpu_day; print(sorted({'torch', 'ropext', 'numpy'} & {*sys.modules}))"
    folder = ROOT / "benchmarks"
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


@pytest.mark.parametrize("tied", [True, False])
def test_flops_equal_torchs_count(tied, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import eval_gpu
    import torch
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    model = LlamaForCausalLM._from_config(config, attn_implementation="eager").eval()
    tokens = 128
    counted = FlopCounterMode(display=False)
    with counted, torch.no_grad():
        model(torch.zeros(1, tokens, dtype=torch.long), use_cache=False)
    trunk, head = eval_gpu.flops(model, tokens)
    square = 4 * 3 * 64 * tokens**2  # eager computes it whole, a causal pass needs half of it
    norms = 2 * tokens * 7 * 64  # counted with the weights, and no product
    # Of frequencies and positions some versions make a product: 5e-5 of it all.
    expected = pytest.approx(counted.get_total_flops(), rel=1e-4)
    assert trunk - norms + square / 2 + head == expected


@pytest.mark.skipif("GPU_DAY" not in os.environ, reason="GPU_DAY=1 runs it: eight minutes")
def test_the_dry_run_goes_through_every_piece(tmp_path):
    """Every case gives figures, except cases that need CUDA; on one device nothing is apart."""
    out = tmp_path / "out"
    printed = call(ROOT / "benchmarks/gpu_day.py", "--dry-run", "-o", out)
    assert "all is done" in printed
    cases = outcomes(out)
    assert [figure for figure in cases if figure[2] == "error"] == [], (out / "log.txt").read_text(
        "utf-8"
    )
    assert {piece for piece, _, _ in cases} == set(FAKES)
    assert [case for _, case, kind in cases if kind == "left_out"] == [
        "loss, bfloat16, flash",
        "Llama-3-8B, --qlora, full rows of 32,768",
        "fsdp2",
        "fsdp2_cp",
    ]
    for line in lines_of(out):
        if line["piece"] in ("correctness", "processes"):
            for name, figure in line.get("figures", {}).items():
                assert not isinstance(figure, dict) or figure["met"], (line["case"], name, figure)
