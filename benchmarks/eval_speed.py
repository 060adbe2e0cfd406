"""One pass against the loops that other tools run, and sixteen questions over one prefix.

    OMP_NUM_THREADS=1 python benchmarks/eval_speed.py > benchmarks/results/eval-speed-DATE.md

A random Llama of hidden 256, 4 layers, vocabulary 32,000. The peers are written here from their
protocols: one truncated forward per length (as yarn, LongRoPE and PoSE evaluate) and the strided
loop of the transformers documentation. Rounds are interleaved; CPU seconds of one thread, since
cores may be shared; the claims are ratios of medians in one run.
"""

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

from ropext.evaluation.answers import score_items
from ropext.evaluation.forward import Manner, TokenScorer, slice_for
from ropext.tasks import Item

VOCABULARY = 32_000
POINTS = 16
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


def truncated_grid(model: Any, ids: torch.Tensor, lengths: list[int]) -> list[float]:
    """A forward per length; the loss over the whole prefix."""
    return [float(model(ids[:, :n], labels=ids[:, :n]).loss) for n in lengths]


def strided_loop(model: Any, ids: torch.Tensor, window: int, stride: int) -> float:
    """docs/source/en/perplexity.md of transformers."""
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
    """All lengths from one reading."""
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
    took["grid"], grid = clock(lambda: truncated_grid(model, row, lengths))
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


def large_model() -> None:
    """A 7B-shaped random model at 128k tokens against its bare body and head, on a GPU."""
    print("\n7B-shaped model, 128k tokens, against its bare forward: ", end="")
    if not torch.cuda.is_available():
        print("not run (no GPU).")
        return
    config = LlamaConfig(max_position_embeddings=131072)  # its defaults are Llama-2-7B's
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    scorer = TokenScorer(model, Manner(None, slice_for(1 << 30, config.vocab_size)))
    ids = np.random.default_rng(0).integers(3, config.vocab_size, 131072).astype(np.int32)
    row = torch.as_tensor(ids).long()[None].cuda()
    took: dict[str, list[float]] = {"bare": [], "ours": []}
    with torch.inference_mode():
        scorer.self_check()
        for _ in range(4):  # the first round warms up
            for name, work in (
                ("bare", lambda: model(row, use_cache=False, logits_to_keep=1).logits),
                ("ours", lambda: scorer.token_nll(ids)),
            ):
                torch.cuda.synchronize()
                start = time.perf_counter()
                work()
                torch.cuda.synchronize()
                took[name].append(time.perf_counter() - start)
    rate = statistics.median(took["bare"][1:]) / statistics.median(took["ours"][1:])
    print(f"{100 * rate:.0f} % of its rate (one last token's head there, every token's here).")


def medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(own[name] for own in rounds) for name in rounds[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", default="1024,2048,4096")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--questions", type=int, default=4096, help="length of the shared prefix")
    parser.add_argument("--question-rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = model_of()
    scorer = TokenScorer(model, Manner(None, slice_for(256 << 20, VOCABULARY)))
    print("# Speed of evaluation\n")
    print("Command: `OMP_NUM_THREADS=1 python benchmarks/eval_speed.py`\n")
    print(f"Machine: CPU, {platform.system()}, one thread; other work may share the cores.")
    print(
        f"Versions: Python {platform.python_version()}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}.\n"
    )
    print(f"Random Llama, hidden 256, 4 layers, vocabulary {VOCABULARY}; CPU seconds, medians.\n")
    print(
        "| N | rounds | one pass | grid of 16 | strided 1024/256 | bare forward | grid / one pass |"
        " strided / one pass | over bare |\n|---|---|---|---|---|---|---|---|---|"
    )
    with torch.inference_mode():
        scorer.self_check()
        for length in map(int, options.lengths.split(",")):
            ids = np.random.default_rng(1).integers(3, VOCABULARY, length).astype(np.int32)
            took = medians([text_round(model, scorer, ids) for _ in range(options.rounds)])
            print(
                f"| {length} | {options.rounds} | {took['ours']:.2f} | {took['grid']:.2f} | "
                f"{took['strided']:.2f} | {took['bare']:.2f} | {took['grid'] / took['ours']:.1f} | "
                f"{took['strided'] / took['ours']:.1f} | "
                f"{100 * (took['ours'] / took['bare'] - 1):+.1f} % |",
                flush=True,
            )
        rounds = [
            questions(model, scorer, options.questions) for _ in range(options.question_rounds)
        ]
    took = medians(rounds)
    print(f"\nSixteen questions over one prefix of {options.questions} tokens, ", end="")
    print(f"{options.question_rounds} rounds (same scores asserted):\n")
    print("| way | CPU s | against the shared prefix |\n|---|---|---|")
    for name, seconds in took.items():
        print(f"| {name} | {seconds:.2f} | {seconds / took['shared']:.1f} |")
    large_model()


if __name__ == "__main__":
    main()
