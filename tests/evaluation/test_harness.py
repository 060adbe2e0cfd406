"""lm-evaluation-harness on our loaded model, with a task made here (its own need a network)."""

import importlib.util
from types import SimpleNamespace

import pytest
import torch
from checkpoints import write_checkpoint
from small_tokenizer import make_tokenizer

from ropext.errors import UsageError
from ropext.evaluation import harness
from ropext.evaluation.variants import Variant

QUESTIONS = [
    {"question": "the quick brown", "choices": [" fox", " dog"], "answer": 0},
    {"question": "the lazy", "choices": [" fox", " dog"], "answer": 1},
]


@pytest.fixture
def loaded(tmp_path):
    from transformers import AutoModelForCausalLM

    write_checkpoint(tmp_path / "model")
    return AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()


def variants():
    return [Variant(label, label, None) for label in ("base", "untouched")]


@pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="lm-eval (an optional extra) is not here"
)
def test_scores_are_those_of_the_model_and_the_base_is_not_run_twice(loaded):
    import datasets

    task = {
        "task": "ropext_choice",
        "custom_dataset": lambda **_: {"test": datasets.Dataset.from_list(QUESTIONS)},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc"}],
    }
    options = SimpleNamespace(lm_eval=(task,), seed=0)
    tokenizer = make_tokenizer()
    found = harness.run_tasks(loaded, tokenizer, options, 64, variants())
    assert list(found) == ["untouched"]
    right = 0
    for own in QUESTIONS:
        sums = []
        for choice in own["choices"]:
            ids = torch.tensor([tokenizer.encode(own["question"] + choice)])
            start = len(tokenizer.encode(own["question"]))
            logp = torch.log_softmax(loaded(ids).logits[0].float(), -1)
            sums.append(sum(float(logp[t - 1, ids[0, t]]) for t in range(start, ids.shape[1])))
        right += sums.index(max(sums)) == own["answer"]
    assert found["untouched"]["ropext_choice"]["acc,none"] == right / 2


def test_without_the_extra_a_sentence_names_it(loaded, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(UsageError, match=r"pip install 'ropext\[lm-eval\]'"):
        harness.run_tasks(loaded, None, SimpleNamespace(lm_eval=("arc_easy",), seed=0), 64, [])
