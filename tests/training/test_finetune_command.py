"""The command itself, in a process of its own: what goes where, and a real Ctrl-C."""

import json
import os
import signal
import subprocess
import sys

import pytest
import torch
from command_line import run
from safetensors.torch import load_file
from test_finetune import ROOT
from tiny_llama import CONTEXT, VOCABULARY, write_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

import ropext

pytestmark = pytest.mark.slow

ENVIRONMENT = os.environ | {"PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1"}
SMALL = ("--batch-tokens", "512", "--eval-documents", "0", "--rank", "4")


def command(extended, stories, *words):
    return ["finetune", str(extended), "--data", str(stories), *SMALL, *words]


def started(*words):
    """Start the command in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "ropext", *command(*words)],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_stdout_is_one_json_document_and_the_narration_is_on_stderr(
    extended, stories, tmp_path, capfd
):
    output = tmp_path / "out"
    words = command(extended, stories, "--steps", "2", "-o", str(output), "--json")
    code, heard = run(*words, capsys=capfd)
    assert code == 0, heard.err
    told = json.loads(heard.out)
    assert told["output"] == str(output)
    assert [entry["step"] for entry in told["losses"]] == [1, 2]
    lines = heard.err.splitlines()
    assert "training tuned: 2 steps of 512 tokens" in lines
    assert not [line for line in lines if "Loading weights" in line or "Warning" in line], lines
    assert (output / "model.safetensors").is_file()


def test_ctrl_c_ends_after_the_step_saves_and_exits_with_4(extended, stories, tmp_path):
    output = tmp_path / "out"
    words = ("--steps", "4000", "--save-every", "4000", "-o", str(output))
    with started(extended, stories, *words) as running:
        assert running.stderr is not None
        told = []
        for line in running.stderr:
            told.append(line)
            if line.startswith("step "):
                running.send_signal(signal.SIGINT)
                break
        rest = running.stderr.read()
        assert running.stdout is not None
        assert running.stdout.read() == ""
    assert running.returncode == 4, "".join(told) + rest
    assert "stopping after this step and saving" in rest
    assert "run the same command to resume" in rest
    assert len(list((tmp_path / "out.run" / "tuned").glob("checkpoint-*/complete"))) == 1
    assert not output.exists()


def test_ctrl_c_before_the_training_keeps_nothing_and_exits_with_130(extended, stories, tmp_path):
    words = ("--eval-documents", "8", "--steps", "9", "-o", str(tmp_path / "out"))
    with started(extended, stories, *words) as running:
        assert running.stderr is not None
        for line in running.stderr:
            if line.startswith("evaluating"):
                running.send_signal(signal.SIGINT)
                break
        rest = running.stderr.read()
    assert running.returncode == 130, rest
    assert rest.startswith("stopping after the current document")
    assert "Traceback" not in rest


def test_dry_run_shows_settings_with_sources_and_writes_nothing(
    extended, stories, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    words = command(extended, stories, "--dry-run", "--learning-rate", "0.5")
    code, heard = run(*words, capsys=capsys)
    assert code == 0, heard.err
    rows = {line.split("  ")[0]: line for line in heard.out.splitlines()}
    assert "asked for" in rows["learning rate"]
    assert "YaRN" in rows["betas"]
    assert "trained: " in heard.out
    assert "q_proj, k_proj" in heard.out
    assert not list(tmp_path.iterdir())


SHAPES = {
    "falcon": {"alibi": False, "new_decoder_architecture": False, "multi_query": True},
    "gpt2": {"bos_token_id": 1, "eos_token_id": 2},
    "gpt_neo": {"attention_types": [[["global"], 2]]},
}


@pytest.mark.parametrize("model_type", SHAPES)
def test_trained_embeddings_of_a_tied_head_are_read_alike_by_stock_and_config(
    model_type, stories, tmp_path, capsys
):
    """PEFT unties these three by itself; the loss by stored tensors and the config's word is
    stock's."""
    small = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2}
    small |= {"num_attention_heads": 2, "max_position_embeddings": CONTEXT}
    keys = small | SHAPES[model_type] | {"tie_word_embeddings": True, "pad_token_id": 0}
    torch.manual_seed(0)
    base, extended, out = (tmp_path / name for name in ("base", "extended", "out"))
    AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **keys)).save_pretrained(base)
    write_tokenizer(base)
    rotary = model_type == "falcon"
    how = {"method": "yarn"} if rotary else {"method": "linear"}
    ropext.extend(base, extended, factor=4, no_verify=True, **how)
    words = ("--steps", "4", "--learning-rate", "0.01", "--train-embeddings", "-o", str(out))
    words += () if rotary else ("--train", "lora")
    code, heard = run(*command(extended, stories, *words), capsys=capsys)
    assert code == 0, heard.err
    stored, ids = load_file(out / "model.safetensors"), torch.arange(3, 43)[None]
    (name,) = (own for own in stored if "word_embeddings" in own or own.endswith("wte.weight"))
    assert not torch.equal(stored[name], load_file(extended / "model.safetensors")[name])
    config = AutoConfig.from_pretrained(out)
    rows = stored[name] if config.tie_word_embeddings else stored["lm_head.weight"]
    stock = AutoModelForCausalLM.from_pretrained(out).eval()
    with torch.no_grad():
        logits = stock.base_model(input_ids=ids).last_hidden_state @ rows.T
        wanted = torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:])
        found = stock(input_ids=ids, labels=ids).loss
    assert float(found) == pytest.approx(float(wanted), abs=1e-6)
    assert torch.equal(stored.get("lm_head.weight", rows), rows)
    assert ropext.verify(out).passed
