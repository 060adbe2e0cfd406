"""The user's own questions (`--tasks FILE.jsonl`, or a function): transformers decodes the same
prompts, and the score follows from the definition of RULER's string_match_all."""

import functools
import json
import re
import sys

import pytest
import torch
from command_line import run
from prepared import evaluation_of
from small_tokenizer import make_tokenizer
from tiny_checkpoints import write_checkpoint
from transformers import AutoModelForCausalLM

from ropext.base.errors import InputError, Interrupted, OutputExists, RopextError, UsageError
from ropext.base.narration import Hooks
from ropext.options.evaluate import Evaluate
from ropext.pipeline.public import evaluate
from ropext.pipeline.public import run as run_recipe
from ropext.pipeline.recipe import read_recipe
from ropext.pipeline.run_digests import RunDigests
from ropext.pipeline.stage import section_key
from ropext.results import FOUND, RULER_CONTEXT, STRIDED
from ropext.results.gates import GateMetrics
from ropext.results.measurement import MeasuredModel
from ropext.results.metrics import TEXT_METRICS, WHOLE_METRICS
from ropext.results.retrieval import haystack_numbers
from ropext.tasks import own
from ropext.tasks.item import truncated

CONTEXT = 512
ROOM = 24  # tokens: over more, kernels round two equal choices apart


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_checkpoint(tmp_path_factory.mktemp("own"), max_position_embeddings=CONTEXT))


def lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def question(number, words=10, **more):
    text = f"Note {number}. " + "The grass is green. " * words
    return {"input": text + f"What is note {number}?", "outputs": [f"of {number}"], **more}


def greedy(model, prompt, room):
    """Return the continuation by transformers itself after a prompt, with this tokenizer's BOS
    before it."""
    tokenizer = make_tokenizer()
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    loaded = AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        out = loaded.generate(
            ids, max_new_tokens=room, do_sample=False, pad_token_id=0, eos_token_id=None
        )
    return ids[0].tolist(), tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)


def test_the_answer_is_transformers_and_the_score_rulers(model, tmp_path):
    """Half of the outputs are part of what transformers says, in capitals; the others are not."""
    rows = [question(1, answer_prefix=" Note 1 is"), question(2)]
    said = []
    for row in rows:
        ids, text = greedy(model, row["input"] + row.get("answer_prefix", ""), ROOM)
        said.append(text)
        row["outputs"] = [text.strip()[4:8].upper(), "never"]
        row["length"] = len(ids) - 1 + ROOM
    path = lines(tmp_path / "my notes.jsonl", rows)
    done = evaluate(model, tasks=path, lengths=f"{CONTEXT},1k")
    items = done.models["untouched"].items
    assert [item.said for item in items] == said
    assert [item.score for item in items] == [0.5, 0.5]
    assert done.values("untouched")["my_notes@512"].value == 0.5
    assert done.values("untouched")["my_notes@512"].n == 2
    assert done.values("base")["my_notes@512"].value == 0.5  # the context holds them whole


def test_the_prompt_is_the_input_with_the_prefix(model, tmp_path):
    """RULER's prefix for variables ends with a space, and nothing is put between."""
    row = question(1, answer_prefix=" They are: ")
    path = lines(tmp_path / "vt.validation.jsonl", [row])
    ((item,),) = evaluation_of(model, tasks=path, lengths="1k").reads.questions
    ids, _ = greedy(model, row["input"] + " They are: ", 1)
    assert [make_tokenizer().bos_token_id, *item.prompt] == ids
    assert item.task == "vt_validation"
    assert item.length == 1023


def test_the_base_reads_the_end_of_the_prompt(model, tmp_path):
    row = question(1, words=40)
    ids, _ = greedy(model, row["input"], 1)
    row["length"] = len(ids) - 1 + ROOM
    done = evaluate(model, tmp_path / "run", tasks=lines(tmp_path / "q.jsonl", [row]), lengths="2k")
    end = make_tokenizer().decode(ids[-(CONTEXT - 1 - ROOM) :], skip_special_tokens=True)
    assert greedy(model, end, 1)[0][1:] == ids[-(CONTEXT - 1 - ROOM) :]
    assert done.models["base"].items[0].said == greedy(model, end, ROOM)[1]
    assert "q@2048" in done.values("base")


def test_the_base_reads_the_end_of_a_users_turn(tmp_path):
    """The chat template's beginning is kept, as a program keeps it that truncates the input."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[a]"
    model = str(write_checkpoint(tmp_path / "chat", max_position_embeddings=CONTEXT))
    tokenizer.save_pretrained(model)
    row = question(1, words=40)
    path = lines(tmp_path / "q.jsonl", [row])
    ((item,),) = evaluation_of(model, tasks=path, lengths="2k", chat=True).reads.questions
    (short,) = truncated([item], CONTEXT - 1)
    text = tokenizer.decode(short.prompt)
    assert text.startswith("[user]")
    assert text.endswith("grass is green. What is note 1?[a]")
    assert text.removeprefix("[user]").removesuffix("[a]") in row["input"]
    assert short.size == CONTEXT - 1


def test_a_stated_length_includes_the_room_for_the_answer(model, tmp_path):
    """RULER's length counts the prompt without a BOS, and the room for the answer."""
    tokenizer = make_tokenizer()
    rows = [question(k) for k in range(3)]
    for row, room in zip(rows, (30, 128, 4000), strict=True):
        row["length"] = len(tokenizer(row["input"], add_special_tokens=False).input_ids) + room
    groups = evaluation_of(model, tasks=lines(tmp_path / "q.jsonl", rows), lengths="512,4k,8k")
    rooms = [item.room for (item,) in groups.reads.questions]
    assert rooms == [30, 128, 128]
    assert [item.length + 1 for (item,) in groups.reads.questions] == [512, 512, 8192]


def test_a_request_that_is_too_long_gives_a_sentence_and_is_never_truncated(model, tmp_path):
    path = lines(tmp_path / "q.jsonl", [question(1), question(2, words=400), question(3)])
    evaluation = evaluation_of(model, tasks=path, lengths="512")
    assert len(evaluation.reads.questions) == 2
    (warning,) = [line for line in evaluation.warnings if "left-out" in line]
    ids, _ = greedy(model, question(2, words=400)["input"], 1)
    assert "1 of 3 questions of q are left out" in warning
    assert f"up to {len(ids) + own.ANSWER_ROOM:,} tokens" in warning
    with pytest.raises(UsageError, match="3 of 3 questions of q are left out"):
        evaluation_of(model, tasks=path, lengths="64")


def test_a_changed_file_is_noticed_and_an_equal_one_resumes(model, tmp_path):
    rows = [question(k) for k in range(4)]
    path = lines(tmp_path / "q.jsonl", rows)
    done = []
    hooks = Hooks(show=lambda read, *_: read and done.append(read), stop=lambda: len(done) >= 3)
    with pytest.raises(Interrupted):
        evaluate(model, tmp_path / "run", tasks=path, lengths="512", **vars(hooks))
    (tmp_path / "other").mkdir()
    moved = lines(tmp_path / "other" / "q.jsonl", rows)
    whole = evaluate(model, tmp_path / "run", tasks=moved, lengths="512")
    assert whole.resumed >= 3
    for change in ({"outputs": ["of 2", "two"]}, {"answer_prefix": " It"}, {"input": "What?"}):
        lines(tmp_path / "q.jsonl", [*rows[:3], rows[3] | change])
        with pytest.raises(OutputExists):
            evaluate(model, tmp_path / "run", tasks=path, lengths="512")
    again = evaluate(model, tmp_path / "run", tasks=path, lengths="512", force=True)
    assert again.models["untouched"].items[3].prompt_hash != (
        whole.models["untouched"].items[3].prompt_hash
    )


def test_lines_about_one_text_are_one_haystack(model, tmp_path):
    """Four texts with three questions each; the last has a beginning of a quarter in common."""
    rows = []
    for k in range(12):
        text = f"Text {k % 4}. " + "The grass is green. " * 12
        rows.append({"input": f"{text}Q{k}", "outputs": [f"answer {k}"]})
    rows.append({"input": "Text 0. " + "The grass is green. " * 3, "outputs": ["x"]})
    items = evaluation_of(model, tasks=lines(tmp_path / "q.jsonl", rows), lengths="1k")
    assert [item.index for (item,) in items.reads.questions] == [*[0, 1, 2, 3] * 3, 12]
    done = evaluate(model, tasks=str(tmp_path / "q.jsonl"), lengths="1k")
    assert len(set(haystack_numbers(done.models["untouched"].items))) == 5


GOOD = json.dumps(question(1))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"{", "is cut short"),
        (b"not json", "not valid JSON"),
        (b"[1]", "holds a JSON array; expected an object"),
        (b"null", "holds a JSON null"),
        (b'{"outputs": ["a"]}', "has no 'input'"),
        (b'{"input": "a", "answers": ["a"], "context": "b"}', "found input, answers, context"),
        (b'{"input": "a", "outputs": []}', r"'outputs' is \[\]; expected a list"),
        (b'{"input": "a", "outputs": "a"}', "'outputs' is 'a'; expected a list"),
        (b'{"input": "a", "outputs": [""]}', "'outputs' holds ''"),
        (b'{"input": "a", "outputs": [" "]}', "'outputs' holds ' '"),
        (b'{"input": "a", "outputs": [3]}', "'outputs' holds 3"),
        (b'{"input": "a", "outputs": null}', "'outputs' is None"),
        (b'{"input": ["a"], "outputs": ["a"]}', "'input' holds"),
        (b'{"input": " ", "outputs": ["a"]}', "'input' holds ' '"),
        (b'{"input": "a", "outputs": ["a"], "length": NaN}', "NaN is not a JSON number"),
        (b'{"input": "a", "outputs": ["a"], "length": 0}', "'length' is 0"),
        (b'{"input": "a", "outputs": ["a"], "length": true}', "'length' is True"),
        (b'{"input": "a", "outputs": ["a"], "length": "4k"}', "'length' is '4k'"),
        (b'{"input": "a", "outputs": ["a"], "answer_prefix": 3}', "'answer_prefix' holds 3"),
        (b'{"input": "a", "outputs": ["a"], "answer_prefix": 0}', "'answer_prefix' holds 0"),
        (b'{"input": "a", "outputs": ["a"], "answer_prefix": []}', r"'answer_prefix' holds \[\]"),
        (b'{"input": "a", "input": "b", "outputs": ["a"]}', "'input' occurs twice"),
        (b'{"input": "\\ud800", "outputs": ["a"]}', "surrogate"),
        (b'{"input": "\xff", "outputs": ["a"]}', "not UTF-8"),
        (b"[" * 100_000, "nested too deeply|cut short"),
        (GOOD.encode(), "repeats the question of .*line 1"),
    ],
)
def test_a_broken_line_is_named_by_its_number(model, tmp_path, line, said):
    path = tmp_path / "q.jsonl"
    path.write_bytes(GOOD.encode() + b"\n\n" + line + b"\n")
    with pytest.raises(RopextError, match=r"q\.jsonl, line 3") as caught:
        evaluation_of(model, tasks=str(path), lengths="1k")
    assert re.search(said, str(caught.value))
    assert "\n" not in str(caught.value)


def test_a_prompt_of_one_token_is_refused(tmp_path, capsys):
    """The bundled model has no BOS, so it would read nothing before the prompt's last token."""
    path = tmp_path / "q.jsonl"
    path.write_text(GOOD + '\n{"input": "x", "outputs": ["a"]}\n')
    code, heard = run("eval", "ropext://demo", "--tasks", path, "--lengths", "256", capsys=capsys)
    assert code == 2
    assert "q.jsonl, line 2: the prompt has 1 token" in heard.err.splitlines()[-1]
    path.write_text('{"input": "x", "outputs": ["a"], "answer_prefix": " is"}\n')
    options = ("--tasks", path, "--lengths", "256", "--dry-run")
    assert run("eval", "ropext://demo", *options, capsys=capsys)[0] == 0


def test_broken_files_are_one_sentence(model, tmp_path, capsys):
    path = tmp_path / "q.jsonl"
    for content, said in ((b"", "has no question"), (b"\xff\xfe{\x00", "line 1 is not UTF-8")):
        path.write_bytes(content)
        code, heard = run("eval", model, "--tasks", path, capsys=capsys)
        assert code == 2
        assert said in heard.err
        assert heard.err.count("\n") == 1
    with pytest.raises(InputError, match="is no file"):
        evaluation_of(model, tasks=str(tmp_path / "gone.jsonl"))
    many = 1_000_000 * b'{"input": "a", "outputs": ["b"]}\n'
    path.write_bytes(many)
    with pytest.raises(InputError, match=r"line 2 repeats the question of .*line 1"):
        evaluation_of(model, tasks=str(path), lengths="1k")


def test_too_many_questions_are_refused_before_the_rest_is_read(model, tmp_path):
    path = tmp_path / "q.jsonl"
    with path.open("w") as file:
        for number in range(own.MOST_QUESTIONS + 1):
            file.write(f'{{"input": "{number}", "outputs": ["b"]}}\n')
        file.write("broken")
    with pytest.raises(InputError, match="more than 10,000 questions"):
        evaluation_of(model, tasks=str(path), lengths="1k")


def test_a_byte_order_mark_is_no_part_of_a_question(model, tmp_path):
    path = tmp_path / "q.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD.encode() + b"\r\n")
    ((item,),) = evaluation_of(model, tasks=str(path), lengths="1k").reads.questions
    assert item.references == ("of 1",)


def named(*words):
    return list(Evaluate(tasks=words).tasks)


def test_a_task_has_the_name_of_its_file():
    assert named("a/b.jsonl", "passkey", "x y/8k questions!.jsonl") == [
        "b",
        "passkey",
        "_8k_questions_",
    ]
    assert named("vt_own=out/vt/validation.jsonl", "validation.jsonl") == ["vt_own", "validation"]
    assert named("q.jsonl", "q.jsonl") == ["q"]
    for word, said in (
        ("passkey.jsonl", "would be called passkey, as a retrieval task of ropext is"),
        ("ruler.jsonl", "as a retrieval task"),
        ("vt=validation.jsonl", "would be called vt"),
    ):
        with pytest.raises(UsageError, match=said):
            named(word)
    with pytest.raises(UsageError, match=r"both called validation; .*NAME=FILE\.jsonl"):
        named("a/validation.jsonl", "b/validation.jsonl")
    with pytest.raises(UsageError, match=r"no retrieval task 'needle'.*FILE\.jsonl"):
        named("needle")
    with pytest.raises(UsageError, match="--tasks"):
        named(3)


@pytest.mark.parametrize(
    "metric",
    [row.name for row in (*TEXT_METRICS, *WHOLE_METRICS)]
    + [STRIDED, RULER_CONTEXT, FOUND, "mkey_nll"],
)
def test_a_task_cannot_have_the_name_of_a_metric(metric):
    asked = GateMetrics(
        Evaluate(tasks=(f"questions/{metric}.jsonl",)), {"m": MeasuredModel()}, (64,)
    )
    with pytest.raises(UsageError, match=f"would be called {metric}, as another number is"):
        asked.check([])


def test_the_name_of_a_metric_costs_no_work(model, tmp_path):
    path = tmp_path / "tail.jsonl"
    path.write_text(GOOD)
    with pytest.raises(UsageError, match="would be called tail, as another number is"):
        evaluation_of(model, tasks=str(path), lengths="1k")
    ((item,),) = evaluation_of(model, tasks=f"end={path}", lengths="1k").reads.questions
    assert item.task == "end"


def asked_of_numbers(context, length, seed):
    """Yield two questions, the second with a prefix; the texts name their seed and length."""
    assert context == CONTEXT
    yield f"{seed} {length}. The grass is green. What is it?", ["green"]
    yield {"input": f"{length}?", "outputs": ["green", "g"], "answer_prefix": " It is"}


def test_a_function_is_a_task(model, tmp_path):
    options = {"tasks": [asked_of_numbers, "passkey"], "lengths": "512,1k", "items": 1, "seed": 7}
    done = evaluate(model, tmp_path / "run", **options)
    values = done.values("untouched")
    assert values["asked_of_numbers@512"].n == values["asked_of_numbers@1024"].n == 2
    assert "passkey@512" in values
    evaluation = evaluation_of(model, **options)
    text = evaluation.encoder.decode(evaluation.reads.questions[-4][0].prompt)
    assert text == "7 512. The grass is green. What is it?"
    assert evaluate(model, tmp_path / "run", **options).resumed > 0
    with pytest.raises(OutputExists):
        evaluate(model, tmp_path / "run", **options | {"seed": 8})


def too_long_at_512(context, length, seed):
    return [(f"{length}. " + "The grass is green. " * 30, ["a"]), (f"{length}?", ["a"])]


def test_a_functions_question_counts_at_its_length_alone(model):
    evaluation = evaluation_of(model, tasks=too_long_at_512, lengths="512,1k")
    at = [item.length + 1 for (item,) in evaluation.reads.questions]
    assert at == [512, 1024, 1024]
    assert any("1 of 4 questions of too_long_at_512" in line for line in evaluation.warnings)


def broken(context, length, seed):
    return 1 / 0


def leaving(context, length, seed):
    sys.exit(0)


def broken_later(context, length, seed):
    yield "a", ["b"]
    raise KeyError("c")


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (broken, r"tasks: broken: ZeroDivisionError: .*\(test_own_questions\.py, line \d+\)"),
        (leaving, r"tasks: leaving: SystemExit: 0 \(test_own_questions\.py, line \d+\)"),
        (broken_later, r"tasks: broken_later: KeyError: 'c' \(test_own_questions\.py, line \d+\)"),
        (lambda context, length, seed: "text", "must return a list of pairs"),
        (lambda context, length, seed: None, "it returned a NoneType"),
        (lambda context, length, seed: [3], "question 1 at 512 is an int"),
        (lambda context, length, seed: [("a", [])], r"question 1 at 512: 'outputs' is \[\]"),
        (lambda context, length, seed: [], "has no question"),
        (lambda context: [context], "TypeError"),
        (functools.partial(max, key=print), "tasks: max: TypeError"),
    ],
)
def test_a_wrong_function_as_a_task_gives_one_sentence(model, function, said):
    with pytest.raises(RopextError, match=said):
        evaluation_of(model, tasks=[function], lengths="512")


def test_two_functions_of_one_name_are_refused():
    def first(name):
        def task(context, length, seed):
            return [(name, [name])]

        return task

    with pytest.raises(UsageError, match="both called task"):
        named(first("a"), first("b"))


def test_own_questions_go_through_the_chat_template(tmp_path):
    """The question is the user's turn, and the prefix begins the answer, as in RULER."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[to]"
    write_checkpoint(tmp_path, max_position_embeddings=CONTEXT)
    tokenizer.save_pretrained(tmp_path)
    path = lines(tmp_path / "q.jsonl", [question(1, words=1, answer_prefix=" It is")])
    ((item,),) = evaluation_of(tmp_path, tasks=path, lengths="1k", chat=True).reads.questions
    text = tokenizer.decode(item.prompt)
    assert text == "[user]Note 1. The grass is green. What is note 1?[to] It is"


def test_a_gate_names_the_file(model, tmp_path, capsys):
    path = lines(tmp_path / "q.jsonl", [question(1)])
    words = ("eval", model, "--tasks", path, "--lengths", "512")
    code, heard = run(*words, "--fail-if", "q@512 < 0.9", capsys=capsys)
    assert code == 3, heard.err
    code, heard = run(*words, "--fail-if", "other@512 < 0.9", capsys=capsys)
    assert code == 2
    assert "there are q@LENGTH" in heard.err


RECIPE = """\
model: ropext://demo
extend: {{method: yarn, factor: 2}}
evaluate:
  tasks: {tasks}
"""


@pytest.mark.parametrize(
    "tasks", ["[passkey, q.jsonl]", "passkey,q.jsonl", "[passkey, q=sub/../q.jsonl]"]
)
def test_a_file_of_a_recipe_is_in_the_recipes_folder(tmp_path, monkeypatch, tasks):
    """The key of a run has the content of the questions, and the record has the path as written."""
    folder = tmp_path / "recipes"
    folder.mkdir()
    (folder / "sub").mkdir()
    (folder / "run.yaml").write_text(RECIPE.format(tasks=tasks))
    lines(folder / "q.jsonl", [question(1)])
    monkeypatch.chdir(tmp_path)
    recipe = read_recipe("recipes/run.yaml")
    task = recipe.evaluate_options().tasks[1]
    assert task == "q"
    assert (folder / "q.jsonl").samefile(task.source)
    written = recipe.resolved()["evaluate"]["tasks"]
    assert written == recipe.source.entries["evaluate", "tasks"].value
    keys = [section_key("evaluate", recipe.evaluate, RunDigests())]
    lines(folder / "q.jsonl", [question(2)])
    keys.append(section_key("evaluate", recipe.evaluate, RunDigests()))
    assert keys[0] != keys[1]
    assert {**keys[0], "evaluate.questions": keys[1]["evaluate.questions"]} == keys[1]


@pytest.mark.slow
def test_a_run_asks_the_questions_of_its_recipe(tmp_path):
    path = lines(tmp_path / "q.jsonl", [question(k, words=5) for k in range(2)])
    recipe = {
        "model": "ropext://demo",
        "extend": {"method": "yarn", "factor": 2},
        "evaluate": {"tasks": [path], "lengths": [512], "fail_if": ["q@512 < -1"]},
    }
    run_recipe(recipe, tmp_path / "out").raise_if_failed()
    evaluated = tmp_path / "out.run/evaluation"
    assert asked_in(evaluated) == 2
    before = (evaluated / "results.json").stat().st_mtime_ns
    run_recipe(recipe, tmp_path / "out")
    assert (evaluated / "results.json").stat().st_mtime_ns == before
    lines(tmp_path / "q.jsonl", [question(k, words=5) for k in range(3)])
    run_recipe(recipe, tmp_path / "out")
    assert asked_in(evaluated) == 3


def asked_in(run):
    """Return the number of the extended model's questions."""
    results = json.loads((run / "results.json").read_text())
    return results["variants"]["extended"]["metrics"]["q@512"]["n"]
