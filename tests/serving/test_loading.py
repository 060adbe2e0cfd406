"""What is loaded: a LoRA on top, and spectra whose cache cannot be read on from."""

import json
import shutil

import pytest
import torch
from serving.conftest import CONTEXT, TARGET, opened

from ropext.options.evaluate import DocumentOptions
from ropext.options.extend import parse_extend

HOW = DocumentOptions(device="cpu")
TEXT = "the quick brown fox jumps over the lazy dog " * 10
ASK = {"max_tokens": 10, "temperature": 0}


@pytest.fixture(autouse=True)
def needs_the_packages():
    pytest.importorskip("uvicorn")


def test_an_adapter_is_served_on_top_of_an_extended_model(directory, tmp_path):
    """The answers equal those of the adapter merged into the base's weights, with the same
    extension."""
    import peft
    from transformers import AutoModelForCausalLM

    from ropext.models.patching import patch
    from ropext.serving.served import ServeOptions, load_served_model

    base = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    tuned = peft.get_peft_model(base, config)
    tuned.save_pretrained(tmp_path / "lora")
    merged = patch(tuned.merge_and_unload(), method="self-extend", target=TARGET)
    wish = parse_extend({"method": "self-extend", "target": TARGET})
    served = load_served_model(
        ServeOptions(str(directory), "tiny", wish, str(tmp_path / "lora")), HOW
    )
    ids = served.tokenizer(TEXT)["input_ids"]
    out = merged.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=10)
    expected = served.tokenizer.decode(out[0, len(ids) :], skip_special_tokens=True)
    with opened(served) as client:
        answer = client.ask("/v1/completions", ASK | {"prompt": TEXT})[1]
    assert len(ids) > CONTEXT
    assert answer["choices"][0]["text"] == expected


def test_window_group_and_the_papers_rule_are_served_as_they_are_patched(directory):
    from transformers import AutoModelForCausalLM

    from ropext.models.patching import patch
    from ropext.scaling.self_extend import FoldOptions
    from ropext.serving.served import ServeOptions, load_served_model

    base = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    folds = {"window": 16, "group": 3, "literal": True}
    patched = patch(base, method="self-extend", target=TARGET, **folds)
    wish = parse_extend({"method": "self-extend", "target": TARGET})
    asked = ServeOptions(str(directory), "tiny", wish, fold=FoldOptions(**folds))
    served = load_served_model(asked, HOW)
    ids = torch.arange(1, CONTEXT + 1)[None]
    with torch.no_grad():
        logits = served.model(ids).logits
        assert torch.equal(logits, patched(ids).logits)
        # By the paper's rule, whose queries see groups from the window on.
        stock = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)(ids).logits
        differs = (logits - stock).abs().amax(-1)[0] > 1e-6 * stock.abs().max()
    assert not differs[:16].any()
    assert differs[17:].all()


def test_a_spectrum_that_follows_the_length_is_read_from_its_start(directory, tmp_path):
    """A cache of a short prompt holds keys that were turned otherwise."""
    from ropext.serving.served import ServeOptions, load_served_model

    shutil.copytree(directory, tmp_path / "two-sets")
    path = tmp_path / "two-sets/config.json"
    config = json.loads(path.read_text())
    scaling = {"rope_type": "longrope", "rope_theta": 10000.0, "factor": 4.0}
    scaling |= {"original_max_position_embeddings": CONTEXT}
    scaling |= {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    config |= {"rope_parameters": scaling, "max_position_embeddings": TARGET}
    path.write_text(json.dumps(config))
    lines = []
    asked = ServeOptions(str(tmp_path / "two-sets"), "tiny")
    served = load_served_model(asked, HOW, lines.append)
    assert any("cannot be read on from" in line for line in lines)
    with opened(served) as client:
        for text in ("the quick brown fox ", "the quick brown fox jumps "):
            answer = client.ask("/v1/completions", ASK | {"prompt": text})[1]
            client.wait_for(f"{answer['id']}: 0 tokens kept")


def test_a_long_prompt_is_read_in_pieces_as_in_one(loaded, monkeypatch):
    from dataclasses import replace

    served = loaded["self-extend"]
    body = ASK | {"prompt": TEXT}
    with opened(served) as client:
        whole = client.ask("/v1/completions", body)[1]
    with opened(replace(served, piece=16)) as client:
        pieces = client.ask("/v1/completions", body)[1]
    assert pieces["choices"] == whole["choices"]


def test_the_user_sees_no_advice_of_transformers_about_its_arguments(directory):
    import warnings

    from ropext.serving.served import ServeOptions, load_served_model
    from ropext.serving.turns import AnswerThread

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        AnswerThread(load_served_model(ServeOptions(str(directory), "tiny"), HOW), print).check()
    advice = [own for own in seen if "past_key_values" in str(own.message)]
    assert advice == []
