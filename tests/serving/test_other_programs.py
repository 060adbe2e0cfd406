"""Programs that nobody here wrote, with `ropext serve`: lm-evaluation-harness and LangChain.

`.ci/slow lm-eval` installs them.
"""

import json

import pytest
import torch
from serving.conftest import TARGET, opened
from serving.test_openai_client import LONG

import ropext
from ropext.base import bundled
from ropext.options.evaluate import DocumentOptions
from ropext.options.extend import parse_extend
from ropext.serving.served import ServeOptions, load_served_model

pytestmark = pytest.mark.slow
TASK = """\
task: continuations
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: multiple_choice
doc_to_text: text
doc_to_choice: choices
doc_to_target: answer
target_delimiter: ""
metric_list:
  - metric: acc
"""
CHOICES = 3
CONTEXT = 256  # of the demo
SAME = 5e-4  # nats of a whole choice: the sums of the same numbers have another order


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """Write eight beginnings of documents, with their own continuations and two other
    documents'."""
    folder = tmp_path_factory.mktemp("lm-eval")
    lines = bundled.DATA["ropext://held-out"].read_text("utf-8").splitlines()
    texts = [json.loads(line)["text"] for line in lines[:8]]
    cuts = [_word_end(text, 200 + 200 * number) for number, text in enumerate(texts)]
    ends = [text[cut : cut + 60] for text, cut in zip(texts, cuts, strict=True)]
    questions = []
    for number, (text, cut) in enumerate(zip(texts, cuts, strict=True)):
        choices = [ends[(number + shift) % len(ends)] for shift in range(CHOICES)]
        questions.append({"text": text[:cut], "choices": choices, "answer": 0})
    data = folder / "questions.jsonl"
    data.write_text("".join(json.dumps(own) + "\n" for own in questions))
    (folder / "continuations.yaml").write_text(TASK.format(data=data))
    return folder


def _word_end(text, start):
    """Return the next place at which a space follows a word; the harness moves longer spaces."""
    places = range(start, len(text))
    return next(at for at in places if text[at] == " " and not text[at - 1].isspace())


def harness(task, model, arguments):
    """Return the harness's accuracy and, for each question, the log-likelihood of each choice and
    whether greedy decoding gives it."""
    lm_eval = pytest.importorskip("lm_eval")
    from lm_eval.tasks import TaskManager

    results = lm_eval.simple_evaluate(
        model=model,
        model_args=arguments,
        tasks=["continuations"],
        task_manager=TaskManager(include_path=task),
        bootstrap_iters=0,
    )
    samples = sorted(results["samples"]["continuations"], key=lambda sample: sample["doc_id"])
    answers = [[answer for (answer,) in sample["resps"]] for sample in samples]
    return results["results"]["continuations"]["acc,none"], samples, answers


def asked(task, client, directory, **more):
    url = f"http://127.0.0.1:{client.port}/v1/completions"
    how = {"model": "demo", "base_url": url, "tokenizer": str(directory), "max_length": 4 * CONTEXT}
    return harness(task, "local-completions", how | more)


def assert_alike(found, wanted):
    for told, right in zip(found, wanted, strict=True):
        assert [greedy for _, greedy in told] == [greedy for _, greedy in right]
        likely = [value for value, _ in right]
        assert [value for value, _ in told] == pytest.approx(likely, abs=SAME)


@pytest.mark.parametrize("batch", [1, 5])
def test_lm_eval_has_the_numbers_of_its_own_model(task, tmp_path, batch):
    """An extended directory, read by transformers in the harness and by the harness from `ropext
    serve`."""
    directory = tmp_path / "demo"
    ropext.extend("ropext://demo", directory, method="yarn", factor=4)
    how = {"pretrained": str(directory), "dtype": "float32", "device": "cpu"}
    right, samples, wanted = harness(task, "hf", how)
    served = load_served_model(ServeOptions(str(directory), "demo"), DocumentOptions(device="cpu"))
    with opened(served) as client:
        share, _, found = asked(task, client, directory, batch_size=batch)
    assert max(len(sample["doc"]["text"]) for sample in samples) > 1500
    assert_alike(found, wanted)
    assert share == right > 0.6


def test_lm_eval_measures_self_extend(task):
    """Next to whole forward passes of the patched model."""
    wish = parse_extend({"method": "self-extend", "factor": 4})
    how = DocumentOptions(device="cpu")
    served = load_served_model(ServeOptions("ropext://demo", "demo", wish), how)
    with opened(served) as client:
        share, samples, found = asked(task, client, bundled.MODELS["ropext://demo"])
    wanted = []
    longest = right = 0
    for sample in samples:
        rows = []
        for text, choice in sample["arguments"]:
            ids = served.tokenizer(text + choice)["input_ids"]  # as the harness does
            start = len(served.tokenizer(text)["input_ids"])
            with torch.no_grad():
                whole = served.model(torch.tensor([ids])).logits[0].log_softmax(-1)
            likely = whole[range(start - 1, len(ids) - 1), ids[start:]].sum().item()
            greedy = whole[start - 1 : -1].argmax(-1).tolist() == ids[start:]
            rows.append((likely, greedy))
            longest = max(longest, len(ids))
        wanted.append(rows)
        right += max(rows) == rows[0]
    assert longest > 2 * CONTEXT
    assert_alike(found, wanted)
    assert share == right / len(samples)


def test_langchain_talks_and_completes(client, loaded):
    package = pytest.importorskip("langchain_openai")
    where = {"base_url": f"http://127.0.0.1:{client.port}/v1", "api_key": "none"}
    how = {"model": "tiny", "temperature": 0, "max_tokens": 9}
    completing = package.OpenAI(**where, **how)
    prompts = [LONG, "fox"]
    alone = [completing.invoke(prompt) for prompt in prompts]
    both = completing.generate(prompts)
    assert [answers[0].text for answers in both.generations] == alone
    talking = package.ChatOpenAI(**where, **how)
    answer = talking.invoke("hello")
    assert "".join(piece.content for piece in talking.stream("hello")) == answer.content
    history = [("human", "hello"), ("ai", answer.content), ("human", "again")]
    assert talking.invoke(history).usage_metadata["input_tokens"] < TARGET
    assert answer.response_metadata["model_name"] == "tiny"
    scored = package.OpenAI(**where, **how, logprobs=1, echo=True).generate(["fox"])
    told = scored.generations[0][0].generation_info["logprobs"]
    assert told["token_logprobs"][0] is None
    assert len(told["tokens"]) == len(loaded["self-extend"].tokenizer("fox")["input_ids"]) + 9
