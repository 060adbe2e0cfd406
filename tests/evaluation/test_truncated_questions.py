"""The truncated baseline of retrieval: the base answers the same questions on truncated text.

The truth is a loop over upstream transformers: a prompt that is truncated here, and `generate`.
"""

import shutil
from pathlib import Path

import pytest
import torch
from prepared import evaluation_of
from small_tokenizer import make_tokenizer
from tiny_checkpoints import write_checkpoint
from transformers import AutoModelForCausalLM

from ropext.base.bundled import find_bundled
from ropext.pipeline.public import evaluate
from ropext.results import retrieval
from ropext.results.gates import parse_gate
from ropext.results.report.compared import compare_runs
from ropext.results.rundir import judge_gates
from ropext.tasks.item import Item, truncated

RECORDED = Path(__file__).parents[1] / "results/recorded/run"
DEMO = {"tasks": "passkey,mkey", "items": 2, "lengths": "256,512,1024"}
TEMPLATE = "{% for m in messages %}<s>[{{ m.role }}]{{ m.content }}{% endfor %}[answer]"
CONTEXT = 1024
BOS = 0
WORDED = {
    "tasks": "niah_single_1,niah_multikey_1,vt,qa_1",
    "lengths": "1024,2048",
    "items": 1,
    "depths": "0,0.5,1",
    "chat": True,
}
BEGINNINGS = {  # the part of a prompt's beginning that a user who truncates the text keeps
    "niah_single_1": "[user]Some secret numbers are told in the text below. Keep them in mind: a "
    "question about them follows.\n\n",
    "niah_multikey_1": "[user]Some secret numbers are told in the text below. Keep them in mind: a "
    "question about them follows.\n\n",
    "qa_1": "[user]Answer by the passages below, as briefly as you can.\n\n",
}


def generated(model, row, count):
    """Return the next tokens of upstream transformers, greedily."""
    ids = torch.tensor([row])
    made = model.generate(ids, do_sample=False, max_new_tokens=count, min_new_tokens=count)
    return tuple(int(token) for token in made[0, ids.shape[1] :])


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    place = tmp_path_factory.mktemp("demo") / "run"
    return evaluate("ropext://demo", place, method="yarn", factor="4", **DEMO)


@pytest.fixture(scope="module")
def worded(tmp_path_factory):
    """Write a random model with a chat template; it answers nothing right."""
    path = write_checkpoint(tmp_path_factory.mktemp("worded"), max_position_embeddings=CONTEXT)
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    return path


def test_the_base_answers_like_a_loop_over_truncated_prompts(demo):
    """The bundled model, trained on 256 tokens: a prompt of 512 keeps its last 256 tokens."""
    model = AutoModelForCausalLM.from_pretrained(find_bundled("ropext://demo", "model"))
    told = {(i.task, i.length, i.index, i.depth): i for i in demo.models["base"].items}
    found = dict[tuple[str, int], list[bool]]()
    for group in evaluation_of("ropext://demo", **DEMO).reads.questions:
        for item in group:
            row = item.prompt[-(256 - len(item.answer)) :]
            said = generated(model, row, len(item.answer))
            score = told.pop((item.task, item.length, item.index, item.depth))
            assert score.predicted[:1] == said[:1]
            assert score.exact == (said == item.answer)
            logits = model(torch.tensor([[*row, *item.answer]])).logits[0].double()
            losses = torch.nn.functional.cross_entropy(
                logits[len(row) - 1 : -1], torch.tensor(item.answer)
            )
            assert score.answer_nll == pytest.approx(float(losses), abs=1e-4)
            found.setdefault((item.task, item.length), []).append(said == item.answer)
    assert not told
    for (task, length), right in found.items():
        share = sum(right) / len(right)
        assert demo.values("base")[f"{task}@{length}"].value == pytest.approx(share)
    assert demo.values("base")["passkey@512"].value == pytest.approx(0.4)
    assert demo.values("base")["passkey@1024"].value == pytest.approx(0.2)


def test_inside_the_context_the_base_answers_as_the_untouched_model(demo):
    for name in ("passkey@256", "mkey@256", "passkey_nll@256", "mkey_nll@256"):
        assert demo.values("base")[name] == demo.values("untouched")[name]


def test_the_table_of_retrieval_has_the_truncated_baseline(demo):
    (table,) = demo.tables
    rows = {(row[0], row[1]): row for row in table.rows}
    header = list(table.header)
    assert rows["1k", "base"][header.index("passkey")] == "0.20"
    assert rows["", "untouched"][header.index("passkey")] == "0.00"
    assert "base: the same questions, their text truncated to 256 tokens" in table.note
    page = (demo.path / "report.md").read_text()
    assert "base: the same questions, their text truncated to its context" in page


def test_a_gate_against_the_base_pairs_the_questions(demo):
    """On one question truncation finds less, on none more: the difference of the shares."""
    gate = parse_gate("yarn-4x:passkey@1k.value < 0.9 vs base")
    (outcome,) = judge_gates(demo, [gate])
    shares = [demo.values(label)["passkey@1024"].value for label in ("yarn-4x", "base")]
    assert outcome.value == pytest.approx(shares[0] - shares[1])
    assert not outcome.passed
    difference = demo.difference("yarn-4x", demo.only("base"))["passkey@1024"]
    assert difference.n == 10
    assert difference.ci95[0] > 0
    (alone,) = judge_gates(demo, [parse_gate("base:passkey@1k.value > 0.1")])
    assert not alone.passed


def test_a_folder_without_answers_of_the_base_is_read_and_completed(demo, tmp_path):
    """Folders were like this until November 2026."""
    old = tmp_path / "old"
    shutil.copytree(demo.path, old)
    for items in old.glob("variants/base-*/items"):
        shutil.rmtree(items)
    done = evaluate("ropext://demo", old, method="yarn", factor="4", **DEMO)
    assert done.resumed == 3 * 2 * 2 * 2  # lengths, tasks, items; two models that read whole texts
    for name in ("items.jsonl", "results.json"):
        assert (old / name).read_bytes() == (demo.path / name).read_bytes()


def test_a_run_without_answers_of_the_base_is_compared_with_a_new_one(tmp_path):
    """The recorded run is of a commit that did not ask the base."""
    asked = {"method": "yarn", "factor": "2", "lengths": "256,512", "tasks": "passkey", "items": 2}
    documents = {"data": "ropext://held-out", "max_docs": 3}
    evaluate("ropext://demo", tmp_path / "new", **asked, **documents)
    compared = compare_runs([f"{RECORDED}:untouched", f"{tmp_path / 'new'}:base"])[1]
    assert compared.asked == "untouched"
    (gained,) = compared.items.values()
    assert gained["passkey@256"].value == 0
    assert gained["passkey@512"].value == pytest.approx(0.4)


def test_in_words_the_instruction_and_the_question_are_kept(worded, monkeypatch):
    """The beginning of each prompt is spelled out above; for `vt` it has an example in it."""
    monkeypatch.setattr(retrieval, "CAN_DO", 0.0)
    model = AutoModelForCausalLM.from_pretrained(worded)
    tokenizer = make_tokenizer()
    reads = evaluation_of(worded, **WORDED).reads
    done = evaluate(str(worded), **WORDED)
    told = {i.prompt_hash: i for i in done.models["base"].items}
    assert set(told) == {i.prompt_hash for i in done.models["untouched"].items}
    for group in reads.questions:
        surplus = max(len(item.prompt) + item.room for item in group) - (CONTEXT - 1)
        for item in group:
            text = tokenizer.decode(item.prompt)
            beginning = BEGINNINGS.get(item.task)
            if beginning is None:
                # beginning of the example's answer
                example = text.index("variables hold the value")
                beginning = text[: text.index("\n\n", text.index("\n\nThe text", example) + 3) + 2]
            assert text.startswith(beginning)
            head = tokenizer.encode(beginning, add_special_tokens=False)
            row = list(item.prompt)
            if surplus > 0:
                row = head + row[len(head) + surplus :]
            said = told[item.prompt_hash].predicted
            assert len(said) == item.room
            logits = model(torch.tensor([[BOS, *row, *said[:-1]]])).logits[0, -len(said) :]
            chosen = logits.gather(1, torch.tensor(said)[:, None])[:, 0]
            assert float((logits.max(-1).values - chosen).max()) < 1e-4


def question(text, begin, end, answer=2, room=0):
    return Item("t", 99, 0.5, 0, 0, tuple(range(text)), (1,) * answer, room=room, text=(begin, end))


def test_truncation_removes_the_beginning_of_the_text():
    assert truncated([question(50, 10, 40)], 52)[0].prompt == tuple(range(50))
    (short,) = truncated([question(50, 10, 40)], 32)
    assert short.prompt == (*range(10), *range(30, 50))
    # Instruction and question leave no room: the end of the prompt is kept.
    (short,) = truncated([question(50, 10, 40)], 17)
    assert short.prompt == tuple(range(35, 50))
    # Nobody gave the text's place.
    (short,) = truncated([question(50, 0, 0)], 32)
    assert short.prompt == tuple(range(20, 50))
    assert (short.prompt_hash, short.length) == (question(50, 0, 0).prompt_hash, 99)
    assert truncated([question(50, 10, 40, room=31)], 32) == ()


def test_questions_over_one_text_keep_the_same_part():
    both = [question(50, 10, 40), question(60, 10, 40)]
    first, second = truncated(both, 42)
    assert (len(first.prompt), len(second.prompt)) == (30, 40)
    assert first.prompt == second.prompt[:30]
