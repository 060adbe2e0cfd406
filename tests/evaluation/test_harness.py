"""lm-evaluation-harness on our loaded model, with tasks made here (its own need a network)."""

import importlib.util
import json
import random
import sys
from contextlib import nullcontext
from functools import partialmethod
from types import SimpleNamespace

import pytest
import torch
from small_tokenizer import make_tokenizer
from tiny_checkpoints import write_checkpoint

from ropext.base.errors import UsageError
from ropext.evaluation import harness
from ropext.evaluation.variants import Variant
from ropext.pipeline.public import evaluate
from ropext.results.measurement import Store
from ropext.tasks.asking import match

QUESTIONS = [
    {"question": "the quick brown", "choices": [" fox", " dog"], "answer": 0},
    {"question": "the lazy", "choices": [" fox", " dog"], "answer": 1},
]
# Data files in the task's folder, as in a task for a firm's own questions.
TASK = """\
task: ropext_local
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: choices
doc_to_target: answer
metric_list:
  - metric: acc
"""

needed = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="lm-eval (an optional extra) is not here"
)


@pytest.fixture
def loaded(tmp_path):
    from transformers import AutoModelForCausalLM

    write_checkpoint(tmp_path / "model")
    return AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()


def variants():
    return [Variant(label, label, None) for label in ("base", "untouched")]


@needed
def test_scores_are_those_of_the_model_and_the_base_is_not_run(loaded, capsys):
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
    options = SimpleNamespace(
        lm_eval=(task,), seed=0, chat=False, template_args={}, lm_eval_limit=None
    )
    tokenizer = make_tokenizer()
    stores = {"untouched": Store()}
    found = harness.run_tasks(
        lambda _: nullcontext(loaded), tokenizer, options, 64, variants(), stores
    )
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
    assert capsys.readouterr().out == ""
    # What was finished is not run again.
    again = harness.run_tasks(None, None, options, 64, variants(), stores)
    assert again == found


@needed
def test_an_installed_task_is_run_on_every_model_with_its_length(tmp_path, monkeypatch):
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    (tmp_path / "tasks").mkdir()
    data = tmp_path / "questions.jsonl"
    data.write_text("".join(json.dumps(own) + "\n" for own in QUESTIONS))
    (tmp_path / "tasks" / "choice.yaml").write_text(TASK.format(data=data))
    installed = partialmethod(TaskManager.__init__, include_path=tmp_path / "tasks")
    monkeypatch.setattr(TaskManager, "__init__", installed)
    lengths, own = [], HFLM.__init__

    def noting(self, *args, **kwargs):
        lengths.append(kwargs["max_length"])
        own(self, *args, **kwargs)

    monkeypatch.setattr(HFLM, "__init__", noting)
    told, simple = [], lm_eval.simple_evaluate

    def listening(**given):
        template = given["model"].chat_template_args
        told.append((given["task_manager"].metadata, given["apply_chat_template"], template))
        return simple(**given)

    monkeypatch.setattr(lm_eval, "simple_evaluate", listening)
    write_checkpoint(tmp_path / "model")
    options = {"lm_eval": "ropext_local", "method": "pi", "factor": "4"}
    done = evaluate(str(tmp_path / "model"), tmp_path / "run", **options)
    assert set(done.results["lm_eval"]) == {"untouched", "pi-4x"}
    assert 0 <= done.results["lm_eval"]["pi-4x"]["ropext_local"]["acc,none"] <= 1
    assert lengths == [256, 256]
    # RULER's tasks make their texts to these lengths, with this tokenizer (4,096 without them).
    tokenizer = str(tmp_path / "model")
    assert told == [({"max_seq_lengths": [256], "tokenizer": tokenizer}, False, {})] * 2
    assert "ropext_local" in (tmp_path / "run" / "report.html").read_text()
    some = {"lm_eval": "ropext_local", "lm_eval_limit": 1, "chat": True}
    monkeypatch.setattr(lm_eval, "simple_evaluate", lambda **given: limited.append(given) or {})
    limited: list = []
    evaluate(str(tmp_path / "model"), tmp_path / "less", chat_args="enable_thinking=false", **some)
    (given,) = limited
    assert (given["limit"], given["apply_chat_template"]) == (1, True)
    assert given["model"].chat_template_args == {"enable_thinking": False}
    with pytest.raises(UsageError, match="has no such task"):
        evaluate(str(tmp_path / "model"), lm_eval="nobody_knows")


def test_without_the_extra_a_sentence_names_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'lm-eval>=0\.4\.9'"):
        harness.check(["arc_easy"])


@needed
def test_the_string_match_of_ruler_tasks_is_theirs():
    """`all` equals lm-eval's. Its `part` (0.4.13) is the same share; RULER's repository asks
    whether the answer has any reference: ours is RULER's, and equals lm-eval's for one reference.
    """
    from lm_eval.tasks.ruler import common_utils as ruler

    rng = random.Random(0)
    for _ in range(500):
        references = ["".join(rng.choices("aB1", k=rng.randint(1, 3))) for _ in range(4)]
        said = "".join(rng.choices("Ab1 ", k=12))
        theirs = ruler.string_match_all([said], [references])
        assert match(said, tuple(references), False) == pytest.approx(theirs)
        one = ruler.string_match_part([said], [references[:1]])
        assert match(said, tuple(references[:1]), True) == one
        assert match(said, tuple(references), True) == float(theirs > 0)


def test_an_edited_task_and_another_version_give_no_old_numbers(tmp_path, monkeypatch):
    """Of either list that the harness has had, without it."""
    for name in ("one", "two", "three"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "task.yaml").write_text("metric: acc")

    def entry(name, kind):
        given = {"yaml_path": tmp_path / name / "task.yaml", "tags": {"both"}}
        return given | {"yaml_path": str(given["yaml_path"])} if kind is dict else kind(**given)

    tag = {dict: {"yaml_path": -1, "task": ["one", "two"]}, SimpleNamespace: SimpleNamespace()}
    for kind in (dict, SimpleNamespace):
        index = {name: entry(name, kind) for name in ("one", "two")} | {"both": tag[kind]}
        tasks = SimpleNamespace(TaskManager=lambda index=index: SimpleNamespace(task_index=index))
        monkeypatch.setitem(sys.modules, "lm_eval", SimpleNamespace())
        monkeypatch.setitem(sys.modules, "lm_eval.tasks", tasks)
        before = [harness.decided_by([name]) for name in ("one", "both", "two")]
        (tmp_path / "one" / "task.yaml").write_text(f"metric: {kind}")
        after = [harness.decided_by([name]) for name in ("one", "both", "two")]
        assert [old == new for old, new in zip(before, after, strict=True)] == [False, False, True]
        monkeypatch.setattr(harness, "installed", lambda names: {"lm-eval": "9"})
        assert harness.decided_by(["two"]) != after[2]
        monkeypatch.undo()
