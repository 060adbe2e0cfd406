"""The whole way, once: plan, extend, fine-tune, evaluate and verify the bundled model."""

import json
from pathlib import Path

import pytest
import torch
import transcriptions
from transformers import AutoModelForCausalLM, AutoTokenizer

from ropext.base.bundled import DATA, MODELS


def test_extend_finetune_evaluate_and_verify_work_in_a_row(tmp_path, ropext):
    def answer(*words):
        code, out, err = ropext(*words, "--json")
        assert code == 0, err
        return json.loads(out)

    line = Path(DATA["ropext://held-out"]).read_text(encoding="utf-8").splitlines()[0]
    (data := tmp_path / "one.jsonl").write_text(line, encoding="utf-8")
    longer, tuned = tmp_path / "longer", tmp_path / "tuned"
    asked = ("ropext://demo", "--method", "yarn", "--factor", "2")
    spectrum, attention = transcriptions.yarn(32, 10_000.0, 256, 512)

    (planned,) = answer("plan", *asked)["sites"]
    assert planned["inv_freq"] == pytest.approx(spectrum, rel=1e-12)
    answer("extend", *asked, "-o", longer)
    short = ("--steps", "1", "--batch-tokens", "1024", "--eval-documents", "0")
    answer("finetune", longer, "--data", "ropext://tuning", *short, "-o", tuned)
    measured = answer("eval", tuned, "--data", data, "--lengths", "256,512")
    answer("verify", tuned)

    model = AutoModelForCausalLM.from_pretrained(tuned)
    rotary = model.model.rotary_emb
    assert rotary.inv_freq.tolist() == pytest.approx(spectrum, rel=1e-6)
    assert rotary.attention_scaling == pytest.approx(attention)
    first = AutoModelForCausalLM.from_pretrained(MODELS["ropext://demo"]).state_dict()
    assert any(not torch.equal(first[name], part) for name, part in model.state_dict().items())
    ids = AutoTokenizer.from_pretrained(tuned)(json.loads(line)["text"]).input_ids[:512]
    with torch.no_grad():
        logs = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
    losses = [-logs[at - 1, ids[at]].item() for at in range(1, 512)]
    said = {own["stop"]: own["nll"]["value"] for own in measured["variants"]["tuned"]["positions"]}
    assert said[512] == pytest.approx(sum(losses[255:]) / 256, abs=1e-5)
    assert said[256] == pytest.approx(sum(losses[127:255]) / 128, abs=1e-5)
