"""Compare Self-Extend's windows and groups with YaRN and the base's own window.

Claim: the defaults (half of the context, half as much again as the smallest group) are within 0.02
nats a token of the best of the grid over the far half, on every model. Inside the trained context
they cost nothing.

    python benchmarks/self_extend.py MODEL DATA [--factor 2 4 8] [--documents 12]
    python benchmarks/self_extend.py MODEL DATA --keys 10
    python benchmarks/self_extend.py MODEL DATA --speed 16384
    python benchmarks/self_extend.py MODEL DATA --memory 16384 self-extend

Losses are means over documents of nats a token: inside the context, over the far half (from half of
the target on) and the tail (the last eighth). The base reads each token through windows of its
context, every token with at least half of it before it. Spectra and masks are transformers' own.
Keys are the share found of eight in each of --keys texts (task `mkey`).
"""

import argparse
import json
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from eval_memory import highest
from real_model_keys import DEPTHS

from ropext.base.bundled import DATA, MODELS
from ropext.evaluation import corpus
from ropext.evaluation.reader import Reader
from ropext.evaluation.reading import pinned, score_items
from ropext.evaluation.workload import NEXT_TOKEN, Workload
from ropext.files.checkpoint import open_snapshot
from ropext.models.patching import patch, unpatch
from ropext.models.tokenizer import load_tokenizer
from ropext.tasks import Item, find_task
from ropext.tasks.item import running_text

SHARES = (0.25, 0.5, 0.75)  # windows, as shares of the context
ROWS = 512  # positions of which logits are made at a time


@torch.no_grad()
def losses(model: Any, ids: torch.Tensor) -> np.ndarray:
    """Nats of every token but the first."""
    hidden = model.base_model(input_ids=ids[None], use_cache=False).last_hidden_state[0]
    head, parts = model.get_output_embeddings(), []
    for at in range(0, len(ids) - 1, ROWS):
        wanted = ids[at + 1 : at + 1 + ROWS]
        logits = head(hidden[at : at + len(wanted)]).float()
        parts.append(torch.nn.functional.cross_entropy(logits, wanted, reduction="none"))
    return torch.cat(parts).double().numpy()


def through_window(model: Any, ids: torch.Tensor, context: int) -> np.ndarray:
    """Return the same losses by a model that sees its context alone."""
    out = np.empty(len(ids) - 1)
    out[: context - 1] = losses(model, ids[:context])
    step = context // 2
    for start in range(step, len(ids) - context + 1, step):
        out[start + context - step - 1 : start + context - 1] = losses(
            model, ids[start : start + context]
        )[-step:]
    return out


def ways(context: int, factor: float) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the tried settings: the default, the grid around it, ReRoPE, YaRN."""
    how: dict[str, Any] = {"method": "self-extend", "factor": factor}
    yield "yarn", {"method": "yarn", "factor": factor}
    yield "default", how
    for share in SHARES:
        window = int(context * share)
        least = -(-(int(context * factor) - window) // (context - window))
        for group in (least, round(least * 1.5), least * 2, 0):
            yield f"window {window}, group {group}", how | {"window": window, "group": group}


def documents(model: Any, data: str, target: int, count: int) -> list[torch.Tensor]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    found = []
    for line in Path(DATA.get(data, data)).read_text(encoding="utf-8").splitlines():
        ids = tokenizer(json.loads(line)["text"]).input_ids
        found += [torch.tensor(ids[:target])] if len(ids) >= target else []
    return found[:count]


def questions(place: str, texts: list[torch.Tensor], length: int, count: int) -> list[list[Item]]:
    """Eight questions about each of `count` texts."""
    encoder = corpus.DocumentEncoder(load_tokenizer(open_snapshot(place), False))
    around = running_text([int(token) for ids in texts for token in ids[1:]])
    how: dict[str, Any] = {"length": length, "depths": DEPTHS, "seed": 0}
    return [find_task("mkey").build(encoder, around, index=at, **how) for at in range(count)]


def found(model: Any, haystacks: list[list[Item]], context: int) -> float:
    """Return the share of all questions that are answered."""
    right: list[float] = []
    for items in haystacks:
        with pinned(model, items[0].length), torch.no_grad():
            reads = Workload(NEXT_TOKEN.frame(context, (items[0].length,), 0))
            scorer = Reader(nullcontext).scorer(model, reads)
            right += [score.exact for score in score_items(scorer, items, None)]
    return float(np.mean(right)) if right else float("nan")


def measure(given: argparse.Namespace) -> None:
    place = str(MODELS.get(given.model, given.model))
    model = transformers.AutoModelForCausalLM.from_pretrained(place).eval()
    context = model.config.max_position_embeddings
    for factor in given.factor:
        target = int(context * factor)
        texts = documents(place, given.data, target, given.documents)
        print(f"\n{given.model}, {factor:g} times: {target} tokens, {len(texts)} documents\n")
        print("| | inside | far half | tail | keys |\n|---|---|---|---|---|")
        asked = questions(place, texts, target, given.keys)
        inside = questions(place, texts, context, given.keys)
        spans = (slice(0, context - 1), slice(target // 2 - 1, None), slice(-target // 8, None))

        def show(
            name: str, read: list[np.ndarray], share: float, spans: tuple[slice, ...] = spans
        ) -> None:
            cells = (f"{np.mean([nll[span].mean() for nll in read]):.4f}" for span in spans)
            print(f"| {name} | {' | '.join(cells)} | {share:.2f} |", flush=True)

        read = [through_window(model, ids, context) for ids in texts]
        show("base, its window", read, found(model, inside, context))
        for name, options in ways(context, factor):
            patch(model, **options)
            show(name, [losses(model, ids) for ids in texts], found(model, asked, context))
            unpatch(model)


def speed(given: argparse.Namespace) -> None:
    """Seconds of a pass by plain attention and by Self-Extend, in turns."""
    place = MODELS.get(given.model, given.model)
    model = transformers.AutoModelForCausalLM.from_pretrained(place).eval()
    ids = torch.randint(model.config.vocab_size, (given.speed,))
    factor = given.speed / model.config.max_position_embeddings
    for _ in range(3):
        for name in ("plain", "self-extend"):
            if name != "plain":
                patch(model, method=name, factor=factor)
            start = time.perf_counter()
            losses(model, ids)
            print(f"{name}: {time.perf_counter() - start:.2f} s", flush=True)
            unpatch(model)


def memory(given: argparse.Namespace) -> None:
    """Print the bytes above the loaded model, at their highest in one pass.

    A process reads once, because it keeps the memory that it has freed.
    """
    length, name = int(given.memory[0]), given.memory[1]
    place = MODELS.get(given.model, given.model)
    model = transformers.AutoModelForCausalLM.from_pretrained(place).eval()
    losses(model, torch.arange(64))
    if name != "plain":
        patch(model, method=name, factor=length / model.config.max_position_embeddings)
    ids = torch.randint(model.config.vocab_size, (length,))
    print(f"{length} tokens, {name}: {highest(lambda: losses(model, ids)) >> 20} MiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("data")
    parser.add_argument("--factor", type=float, nargs="+", default=[2.0, 4.0, 8.0])
    parser.add_argument("--documents", type=int, default=12)
    parser.add_argument("--speed", type=int, help="tokens of one pass, timed")
    parser.add_argument("--keys", type=int, default=0, help="texts with eight keys each")
    parser.add_argument("--memory", nargs=2, metavar=("TOKENS", "plain|self-extend"))
    given = parser.parse_args()
    (speed if given.speed else memory if given.memory else measure)(given)


if __name__ == "__main__":
    main()
