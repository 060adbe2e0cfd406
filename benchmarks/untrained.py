"""Measure a method's cost inside the trained window without training, and its gain beyond.

Claim: the default of `ropext plan` without training costs least inside the window among the methods
that work at the target.

    python benchmarks/untrained.py MODEL DATA [--factor 2] [--docs 8] [--glued] [--chat]
        [--inside 2048]

Tail perplexity and short tax are those of `ropext plan --measure`, with YaRN's attention factor set
to 1 as one more method. A dozen greedy answers inside the window follow. With --chat they answer
questions (right if the answer names the requested thing). Otherwise they continue the documents,
and the count is of tokens that equal the base's before the first difference. --inside N reads the
first N tokens of each document alone, for a model whose target is too long for this machine.
"""

import argparse
import sys
from typing import Any

import torch
import transformers

from ropext.base.narration import Hooks
from ropext.evaluation.corpus import (
    DocumentEncoder,
    Source,
    Wanted,
    choose_documents,
    glue_documents,
    read_documents,
)
from ropext.evaluation.corpus.selection import NO_LIMIT
from ropext.evaluation.measured_plan import MethodComparison
from ropext.evaluation.workload import NEXT_TOKEN, Workload
from ropext.files.checkpoint import open_snapshot
from ropext.models import patching
from ropext.models.load import load_model, loading_of
from ropext.models.tokenizer import load_tokenizer
from ropext.options.evaluate import Evaluate
from ropext.options.extend import Extend
from ropext.planning import make_plan
from ropext.results.report.cells import fixed_digits, value_cell

METHODS: dict[str, dict[str, Any]] = {
    "yarn": {},
    "yarn, attention factor 1": {"method": "yarn", "attention_factor": 1.0},
    "by-parts": {},
    "llama3": {},
    "dynamic": {},
    "ntk": {},
    "pi": {},
}
QUESTIONS = {
    "What is the capital of France?": "Paris",
    "What is the capital of Italy?": "Rome",
    "What is the capital of Japan?": "Tokyo",
    "What is 2 + 2?": "4",
    "How many days are in a week?": "7|seven",
    "What color is the sky on a clear day?": "blue",
    "Who wrote Romeo and Juliet?": "Shakespeare",
    "What is the largest planet in our solar system?": "Jupiter",
    "Which animal says meow?": "cat",
    "What is the opposite of hot?": "cold",
    "What is the chemical formula of water?": "H2O|H₂O",
    "In which country is the city of Berlin?": "Germany",
}
NEW = 16  # tokens of an answer
PROMPT = 32  # tokens of a document that are continued


def answers(model: Any, prompts: list[Any]) -> list[list[int]]:
    """Answer greedily; prompts of all lengths at once, padded on the left."""
    longest = max(map(len, prompts))
    padded = [[0] * (longest - len(ids)) + [int(token) for token in ids] for ids in prompts]
    masked = [[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts]
    made = model.generate(
        torch.tensor(padded),
        attention_mask=torch.tensor(masked),
        do_sample=False,
        max_new_tokens=NEW,
        pad_token_id=0,
    )
    return [row[longest:].tolist() for row in made]


def agreeing(own: list[int], base: list[int]) -> int:
    """Tokens before the first that differs."""
    pairs = zip(own, base, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(own), len(base)))


def is_right(text: str, wanted: str) -> bool:
    return any(word.lower() in text.lower() for word in wanted.split("|"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("data")
    parser.add_argument("--factor", type=float, default=2.0)
    parser.add_argument("--docs", type=int, default=8)
    parser.add_argument("--glued", action="store_true", help="documents of DATA are short")
    parser.add_argument("--chat", action="store_true")
    parser.add_argument("--inside", type=int)
    asked = parser.parse_args()
    torch.manual_seed(0)
    snapshot = open_snapshot(asked.model)
    plans = {
        label: make_plan(
            snapshot.config, Extend(**{"method": label, "factor": asked.factor} | knobs), label
        )
        for label, knobs in METHODS.items()
    }
    first = plans["yarn"]
    tokenizer = load_tokenizer(snapshot, False)
    encoder = DocumentEncoder(tokenizer, first.model.vocab_size)
    longest = asked.inside or first.target
    wanted = Wanted((longest,), given=True, max_documents=asked.docs)
    raw = read_documents(Source(asked.data))
    if asked.glued:
        coded = [encoder.document(own.name, encoder.text_of(own), NO_LIMIT) for own in raw]
        documents = glue_documents(coded, longest, asked.docs)
    else:
        documents = choose_documents(raw, encoder, wanted).documents
    ids = [own.ids[:longest] for own in documents]
    model = load_model(snapshot, loading_of(Evaluate(data=asked.data)))

    if asked.chat:
        ask = [{"role": "user", "content": question} for question in QUESTIONS]
        prompts = [
            tokenizer.apply_chat_template([own], add_generation_prompt=True)["input_ids"]
            for own in ask
        ]
    else:
        prompts = [own[:PROMPT] for own in ids[:12]]
    said = {"base": answers(model, prompts)}
    for label, plan in plans.items():
        patching.apply_config(model, plan.config)
        said[label] = answers(model, prompts)
        patching.unpatch(model)
    if asked.chat:
        for label, own in said.items():
            for question, each in zip(QUESTIONS, own, strict=True):
                text = " ".join(tokenizer.decode(each, skip_special_tokens=True).split())
                told(f"{label} | {question} | {text}")

    frame = NEXT_TOKEN.frame(min(first.context, longest), (longest,), 0)
    reads = Workload(frame, tuple(own.cut(longest) for own in documents))
    ranking = MethodComparison(snapshot, plans).rank(model, reads, Hooks(say=told, show=show))

    print(f"torch {torch.__version__}, transformers {transformers.__version__}")
    print(f"{first.context:,} -> {first.target:,} tokens, {len(ids)} documents\n")
    if asked.inside:
        print(f"read: the first {longest:,} tokens, inside the window\n")
    kept = (
        "answers right, the base's own"
        if asked.chat
        else f"tokens as the base's, of {NEW * len(prompts)}"
    )
    print(f"| method | attention factor | tail perplexity | gain | short tax | {kept} |")
    print("|---|---|---|---|---|---|")

    def score(label: str) -> str:
        if not asked.chat:
            return str(sum(map(agreeing, said[label], said["base"])))
        texts = [tokenizer.decode(own, skip_special_tokens=True) for own in said[label]]
        right = sum(map(is_right, texts, QUESTIONS.values()))
        alike = sum(map(list.__eq__, said[label], said["base"]))
        return f"{right}, {alike}"

    if ranking.in_window is not None:
        cells = ["base, in its window", "", value_cell(ranking.in_window), "", "", score("base")]
        print("| " + " | ".join(cells) + " |")
    taxes = {label: ranking.short_tax(label) for label in plans}
    for label in sorted(plans, key=lambda label: tax.value if (tax := taxes[label]) else 0.0):
        factor = plans[label].main.wanted.attention_factor
        cells = [label, fixed_digits(factor, 4), value_cell(ranking.tail(label))]
        cells.append(value_cell(ranking.gain(label), 4, sign=True))
        cells += [value_cell(taxes[label], 4, sign=True), score(label)]
        print("| " + " | ".join(cells) + " |")


def told(sentence: str) -> None:
    sys.stderr.write(sentence + "\n")


def show(done: int, total: int, what: str) -> None:
    told(f"{done:,} of {total:,} tokens: {what}")


if __name__ == "__main__":
    main()
