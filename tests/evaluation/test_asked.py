"""Tasks in words from the options to the report, on a tiny random model."""

import json
from dataclasses import replace

import pytest
from command_line import run
from matplotlib.colorbar import Colorbar
from prepared import costs_of, evaluation_of
from small_tokenizer import make_tokenizer
from tiny_checkpoints import write_checkpoint, write_documents

from ropext.base.errors import InputError, Interrupted, UsageError
from ropext.base.jsontext import values_json
from ropext.base.narration import Hooks
from ropext.evaluation.forward import TokenScorer
from ropext.pipeline.public import evaluate
from ropext.results import retrieval
from ropext.results.gates import parse_gate
from ropext.results.report.evaluation import heat_pictures
from ropext.results.rundir import judge_gates

ASKED = {
    "tasks": "niah_single_1,niah_multikey_2,vt",
    "lengths": "4096",
    "items": 1,
    "depths": "0,1",
}
TEMPLATE = "{% for m in messages %}<s>[{{ m.role }}]{{ m.content }}{% endfor %}[answer]"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_checkpoint(tmp_path_factory.mktemp("asked"), max_position_embeddings=8192))


@pytest.fixture(scope="module")
def whole(model, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(retrieval, "CAN_DO", 0.0)
        return evaluate(model, tmp_path_factory.mktemp("run") / "whole", **ASKED)


def rows(path):
    return [json.loads(line) for line in (path / "items.jsonl").read_text().splitlines()]


def test_answers_are_kept_as_they_were_said(whole):
    found = rows(whole.path)
    tasks = ["niah_multikey_2"] * 2 + ["niah_single_1"] * 2 + ["vt"] * 2
    assert [row["task"] for row in found] == tasks * 2
    assert [row["variant"] for row in found] == ["base"] * 6 + ["untouched"] * 6
    for row in found:
        assert 0 <= row["score"] <= 1
        assert row["said"] == make_tokenizer().decode(row["predicted"], skip_special_tokens=True)
        assert row["length"] == 4096
    assert {row["depth"] for row in found} == {0.0, 1.0, None}
    assert whole.results["variants"]["untouched"]["metrics"]["ruler@4096"]["n"] == 6


def test_the_report_explains_the_scores_of_ruler(whole):
    text = (whole.path / "report.md").read_text()
    assert "mean of the 3 of RULER's thirteen tasks that ran at every length" in text
    assert text.count("not comparable with published RULER scores") == 4
    assert (whole.path / "plots/retrieval-vt.png").exists()


def test_results_json_describes_the_scores(whole):
    """One of a trace's five names is right: a share of 0.2, and no exact answer."""
    results = json.loads((whole.path / "results.json").read_text())
    assert "not comparable with published RULER scores" in results["ruler"]["note"]
    assert results["ruler"]["tasks"] == ["niah_multikey_2", "niah_single_1", "vt"]
    items = whole.models["untouched"].items
    assert whole.results["variants"]["untouched"]["retrieval"].keys() == {i.task for i in items}
    part = [replace(item, score=0.2, exact=False) for item in items]
    for cells in values_json(retrieval.heat_map_cells(part)).values():
        for cell in cells:
            assert cell["share"]["value"] == pytest.approx(0.2)
            assert not [key for key in cell if "exact" in key]


def test_the_pictures_label_the_scores(whole, monkeypatch):
    told, own = [], Colorbar.set_label

    def heard(bar, label, **more):
        told.append(label)
        return own(bar, label, **more)

    monkeypatch.setattr(Colorbar, "set_label", heard)
    drawn = heat_pictures([whole])
    assert len(drawn) == 3
    assert [label for label in told if label] == ["share named"] * 3


def test_an_unsolvable_task_is_not_measurable_and_not_zero(model, tmp_path):
    done = evaluate(model, tmp_path / "run", **ASKED)
    assert list(done.results["not_measurable"]) == ["niah_single_1", "niah_multikey_2", "vt"]
    assert done.results["variants"]["untouched"]["metrics"] == {}
    assert "vt is not measurable here" in (tmp_path / "run/report.md").read_text()
    assert not (tmp_path / "run/plots/retrieval-vt.png").exists()
    assert len(rows(tmp_path / "run")) == 2 * 6  # every answer is recorded
    (outcome,) = judge_gates(done, [parse_gate("vt@4k.value < 0.5")])
    assert not outcome.passed
    assert "not measurable here" in outcome.reason


def test_an_unsolvable_task_is_named_on_the_terminal(model, capsys):
    words = [f"--{key}={value}" for key, value in ASKED.items()]
    code, heard = run("eval", model, *words, capsys=capsys)
    assert code == 0
    for task in ("niah_single_1", "niah_multikey_2", "vt"):
        assert f"{task} is not measurable here: inside its trained context" in heard.out


def test_an_interrupted_run_resumes_at_the_next_item(model, whole, tmp_path, monkeypatch):
    monkeypatch.setattr(retrieval, "CAN_DO", 0.0)
    done = []
    hooks = Hooks(show=lambda read, *_: read and done.append(read), stop=lambda: len(done) >= 2)
    with pytest.raises(Interrupted, match="2 finished pieces"):
        evaluate(model, tmp_path / "run", **vars(hooks), **ASKED)
    done = evaluate(model, tmp_path / "run", **ASKED)
    assert done.resumed == 2
    assert (done.path / "items.jsonl").read_bytes() == (whole.path / "items.jsonl").read_bytes()


def test_the_forecast_is_the_most_that_is_read(model, monkeypatch):
    seen = []
    for name in ("fill_cache", "extend_cache"):
        own = getattr(TokenScorer, name)
        monkeypatch.setattr(
            TokenScorer,
            name,
            lambda self, *args, own=own: (seen.append(len(args[-1])), own(self, *args))[1],
        )
    expected = []
    hooks = Hooks(show=lambda done, total, what: expected.append(total))
    evaluate(model, **vars(hooks), **ASKED)
    costs = costs_of(model, **ASKED)
    # One haystack of two questions, and four prompts alone: for the base, and for the untouched.
    assert [part.passes for part in costs.work] == [2, 1, 2] * 2
    assert expected[0] == costs.tokens
    assert 0.9 * costs.tokens < sum(seen) <= costs.tokens


def test_questions_of_evaluate_chat_go_through_the_template(model, tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    write_checkpoint(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    for chat in (False, True):
        (item, *_), *_ = evaluation_of(tmp_path, **ASKED | {"chat": chat}).reads.questions
        text = tokenizer.decode(item.prompt)
        assert text.startswith("[user]Some secret" if chat else "Some secret")
        assert ("?[answer]As the text tells" in text) is chat
        assert "<s>" not in text  # the reader puts the one there is
        assert len(item.prompt) + item.room < 4096


def test_the_chat_template_gets_more_variables(model, tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        TEMPLATE + "{% if enable_thinking is false %}[no]{% endif %}{{ tone }}"
    )
    write_checkpoint(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    texts = []
    for told in ((), ("enable_thinking=false", "tone=dry"), ("enable_thinking=true",)):
        (item, *_), *_ = evaluation_of(
            tmp_path, **ASKED | {"chat": True, "chat_args": told}
        ).reads.questions
        texts.append(tokenizer.decode(item.prompt))
    plain, short, thinking = texts
    assert "[answer][no]dryAs the text tells" in short
    assert plain == thinking
    assert "[no]" not in plain


@pytest.mark.parametrize(
    ("more", "error", "said"),
    [
        ({"chat": True}, InputError, "--chat needs a chat template"),
        ({"chat_args": "a=1"}, UsageError, "--chat-args are for the chat template that --chat"),
        ({"chat": True, "chat_args": "thinking"}, UsageError, "--chat-args is NAME=VALUE, such"),
        ({"chat": True, "chat_args": "a b=1"}, UsageError, "--chat-args is NAME=VALUE, such"),
        ({"chat": True, "tasks": "passkey"}, UsageError, "passkey is none"),
        ({"tasks": "vt,needle"}, UsageError, "there is no retrieval task 'needle'"),
        ({"lengths": "64"}, UsageError, "niah_single_1 takes at least|one item of it takes"),
        ({"passages": "gone.jsonl", "tasks": "qa_1"}, InputError, "gone.jsonl is no file"),
    ],
)
def test_bad_options_of_questions_give_one_sentence(model, more, error, said):
    with pytest.raises(error, match=said):
        evaluation_of(model, **ASKED | more)


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        '{"question": "Who?", "answers": ["I"]}',
        '{"question": "Who?", "answers": [], "passages": ["I did."]}',
        '{"question": "Who?", "answers": "I", "passages": ["I did."]}',
        '{"question": "Who?", "answers": ["I"], "passages": "I did."}',
        '{"question": 3, "answers": ["I"], "passages": ["I did."]}',
        '{"question": "Who?", "answers": ["I"], "passages": [" "]}',
    ],
)
def test_a_broken_file_of_passages_is_refused_with_its_line(model, tmp_path, line):
    good = '{"question": "Who?", "answers": ["I"], "passages": ["I did."]}'
    (tmp_path / "own.jsonl").write_text(f"{good}\n\n{line}\n")
    more = {"tasks": "qa_1", "passages": str(tmp_path / "own.jsonl")}
    with pytest.raises(InputError, match=r"own\.jsonl, line 3"):
        evaluation_of(model, **ASKED | more)
    (tmp_path / "own.jsonl").write_bytes(b"\xff\xfe\n")
    with pytest.raises(InputError, match="line 1"):
        evaluation_of(model, **ASKED | more)
    (tmp_path / "own.jsonl").write_text("\n")
    with pytest.raises(InputError, match="is empty"):
        evaluation_of(model, **ASKED | more)


def test_questions_come_from_the_users_passages(model, tmp_path):
    known = [
        {"question": f"Who is {k}?", "answers": [f"M{k}"], "passages": [f"M{k} is {k}. " * 20]}
        for k in range(40)
    ]
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in known))
    more = {"tasks": "qa_1", "passages": str(tmp_path / "own.jsonl")}
    evaluation = evaluation_of(model, **ASKED | more)
    text = evaluation.encoder.decode(evaluation.reads.questions[0][0].prompt)
    number = text.rsplit("Who is ", 1)[1].partition("?")[0]
    assert f"M{number} is {number}." in text
    assert evaluation.reads.questions[0][0].references == (f"M{number}",)


def test_the_longest_need_of_too_short_lengths_is_named(model):
    needs = []
    for name in ("copy,vt", "vt,copy", "vt"):
        with pytest.raises(UsageError, match=r"the task vt .* at least (\d+) tokens") as caught:
            evaluation_of(model, tasks=name, lengths="16")
        needs.append(str(caught.value))
    assert len(set(needs)) == 1


def test_a_window_that_holds_no_question_is_reported(tmp_path):
    """Default lengths up to the model's 64 tokens: nothing fits, and the error names the least
    length."""
    own = str(write_checkpoint(tmp_path))
    with pytest.raises(UsageError, match=r"one item of it takes at least \d+ tokens"):
        evaluation_of(own, tasks="ruler")
    write_documents(tmp_path / "d.jsonl")
    evaluation = evaluation_of(own, tasks="copy,vt")
    assert {group[0].task for group in evaluation.reads.questions} == {"copy"}
    assert any("vt is left out at 64" in line for line in evaluation.warnings)
