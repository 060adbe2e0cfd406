"""Compare one pass with the loops that other tools run, and ask sixteen questions over one prefix.

    OMP_NUM_THREADS=1 python benchmarks/eval_speed.py --lengths 1024,2048
    OMP_NUM_THREADS=1 python benchmarks/eval_speed.py --lengths 4096 --rounds 3
    OMP_NUM_THREADS=1 python benchmarks/eval_speed.py --questions 4096

The model is a random Llama of hidden 256, 4 layers, vocabulary 32,000. The peers are written here
from their protocols: one truncated forward per length (as yarn, LongRoPE and PoSE evaluate) and the
strided loop of the transformers documentation. The bare forward is the model's own over the same
tokens, its logits included (`model(ids, use_cache=False).logits`): the work of a peer before it
takes a loss. Rounds are interleaved. The times are CPU seconds of one thread, with the kernel's
time; the claims are ratios of medians in one run. A first round, which does not count, warms up.
"""

import argparse
import platform
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

from ropext.evaluation.forward import TokenScorer
from ropext.evaluation.reader import choose_reading_mode, shape_of
from ropext.evaluation.reading import score_items
from ropext.tasks import Item

VOCABULARY = 32_000
POINTS = 16
STEP = 256  # step of a grid whose lengths grow in number with N, as yarn's do (there 2048)
WINDOW, STRIDE = 1024, 256
QUESTIONS = 16


def model_of() -> Any:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=16384,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval()


def truncated(model: Any, ids: torch.Tensor, length: int) -> float:
    """Return the loss over the whole prefix, from a forward of one length."""
    return float(model(ids[:, :length], labels=ids[:, :length]).loss)


def strided_loop(model: Any, ids: torch.Tensor, window: int, stride: int) -> float:
    """Run docs/source/en/perplexity.md of transformers."""
    total, count, done = 0.0, 0, 0
    for begin in range(0, ids.shape[1], stride):
        end = min(begin + window, ids.shape[1])
        target = ids[:, begin:end].clone()
        target[:, : -(end - done)] = -100
        scored = int((target != -100).sum()) - 1
        total += float(model(ids[:, begin:end], labels=target).loss) * scored
        count += scored
        done = end
        if end == ids.shape[1]:
            break
    return total / count


def one_pass(scorer: TokenScorer, ids: np.ndarray, lengths: list[int]) -> list[float]:
    """Return the losses at all lengths from one reading."""
    nll = scorer.token_nll(ids).astype(np.float64)
    return [float(nll[1:n].mean()) for n in lengths]


def clock(work: Callable[[], Any]) -> tuple[float, Any]:
    start = time.process_time()
    value = work()
    return time.process_time() - start, value


def text_round(model: Any, scorer: TokenScorer, ids: np.ndarray) -> dict[str, float]:
    row = torch.as_tensor(ids).long()[None]
    lengths = [len(ids) * k // POINTS for k in range(1, POINTS + 1)]
    took: dict[str, float] = {}
    took["ours"], ours = clock(lambda: one_pass(scorer, ids, lengths))
    forwards = {n: clock(partial(truncated, model, row, n)) for n in lengths}
    took["grid"] = sum(seconds for seconds, _ in forwards.values())
    took["step"] = sum(seconds for n, (seconds, _) in forwards.items() if n % STEP == 0)
    grid = [loss for _, loss in forwards.values()]
    took["strided"], _ = clock(lambda: strided_loop(model, row, WINDOW, STRIDE))
    took["bare"], _ = clock(lambda: model(row, use_cache=False).logits.shape)
    assert np.allclose(ours, grid, rtol=1e-5), "not the same numbers"
    return took


def questions(model: Any, scorer: TokenScorer, length: int) -> dict[str, float]:
    generator = np.random.default_rng(0)
    prefix = tuple(map(int, generator.integers(3, VOCABULARY, length - 24)))
    items = []
    for k in range(QUESTIONS):
        rest, answer = generator.integers(3, VOCABULARY, 16), generator.integers(3, VOCABULARY, 8)
        prompt = (*prefix, *map(int, rest))
        items.append(
            Item("bench", length, k / 16, 0, 0, prompt, tuple(map(int, answer)), len(prefix))
        )

    def forwards(keep: int) -> list[float]:
        found = []
        for item in items:
            row = torch.tensor([[*item.prompt, *item.answer]])
            logits = model(row, use_cache=False, logits_to_keep=keep).logits[0]
            logp = torch.log_softmax(logits[-9:-1].float(), -1)
            found.append(-float(logp[range(8), list(item.answer)].mean()))
        return found

    took: dict[str, float] = {}
    took["shared"], scores = clock(lambda: score_items(scorer, items, None))
    took["forwards"], truth = clock(lambda: forwards(0))
    took["forwards, last logits"], _ = clock(lambda: forwards(9))
    assert np.allclose([own.answer_nll for own in scores], truth, rtol=1e-4), "not the same scores"
    return took


def medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(own[name] for own in rounds) for name in rounds[0]}


def head_lines(arguments: list[str]) -> None:
    """Print the command and the machine."""
    model = next(
        (line.split(":", 1)[1].strip() for line in cpu_lines() if line.startswith("model name")),
        platform.processor(),
    )
    print(f"Command: `OMP_NUM_THREADS=1 python benchmarks/eval_speed.py {' '.join(arguments)}`\n")
    print(
        f"Machine: {model}, one thread, {torch.backends.cpu.get_cpu_capability()}, "
        f"{platform.system()}. Python {platform.python_version()}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}.\n"
    )


def cpu_lines() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def compare_text(model: Any, scorer: TokenScorer, lengths: list[int], count: int) -> None:
    print(
        "| N | rounds | one pass | grid of 16 | grid of step 256 | strided 1024/256 | bare forward"
        " | 16 / one pass | step 256 / one pass | strided / one pass | over bare |\n"
        "|---|---|---|---|---|---|---|---|---|---|---|"
    )
    every = {}
    for length in lengths:
        ids = np.random.default_rng(1).integers(3, VOCABULARY, length).astype(np.int32)
        scorer.token_nll(ids[:512])
        every[length] = rounds = [text_round(model, scorer, ids) for _ in range(count)]
        took = medians(rounds)
        print(
            f"| {length} | {count} | {took['ours']:.2f} | {took['grid']:.2f} | "
            f"{took['step']:.2f} | {took['strided']:.2f} | {took['bare']:.2f} | "
            f"{took['grid'] / took['ours']:.1f} | {took['step'] / took['ours']:.1f} | "
            f"{took['strided'] / took['ours']:.1f} | "
            f"{100 * (took['ours'] / took['bare'] - 1):+.1f} % |",
            flush=True,
        )
    for length, rounds in every.items():
        raw(f"N = {length}", rounds)


def raw(title: str, rounds: list[dict[str, float]]) -> None:
    print(f"\nRaw, {title}, CPU seconds by round: ", end="")
    print("; ".join(f"{k} {', '.join(f'{own[k]:.3f}' for own in rounds)}" for k in rounds[0]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", default="", help="e.g. 1024,2048,4096")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--questions", type=int, default=0, help="length of the shared prefix")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = model_of()
    head_lines(sys.argv[1:])
    shape = shape_of(model)
    scorer = TokenScorer(model, choose_reading_mode(shape, 1024, 1 << 60, None, 256 << 20))
    lengths = [int(length) for length in options.lengths.split(",") if length]
    with torch.inference_mode():
        scorer.self_check()
        if lengths:
            compare_text(model, scorer, lengths, options.rounds)
        if options.questions:
            questions(model, scorer, 512)
            rounds = [questions(model, scorer, options.questions) for _ in range(options.rounds)]
            took = medians(rounds)
            print(f"Sixteen questions over one prefix of {options.questions} tokens, ", end="")
            print(f"{options.rounds} rounds (same scores asserted):\n")
            print("| way | CPU s | against the shared prefix |\n|---|---|---|")
            for name, seconds in took.items():
                print(f"| {name} | {seconds:.2f} | {seconds / took['shared']:.1f} |")
            raw("questions", rounds)


if __name__ == "__main__":
    main()
