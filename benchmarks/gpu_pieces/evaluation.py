"""Evaluation of random weights in published shapes: speed and memory, nothing about quality."""

from functools import partial
from typing import Any

from gpu_pieces import Case, Day, at_least
from gpu_pieces.shapes import LLAMA, QWEN3, build, cut

ROUNDS = 2


def one_pass(day: Day, name: str, tokens: int) -> dict[str, Any]:
    import eval_gpu

    figures = eval_gpu.one_pass(build(day, name).eval(), cut(day, tokens), ROUNDS)
    share = "share of the trunk's own rate"
    return figures | {share: at_least(figures[share], 0.95)}


def sixteen(day: Day, tokens: int) -> dict[str, Any]:
    import eval_gpu

    figures = eval_gpu.sixteen_lengths(build(day, LLAMA).eval(), cut(day, tokens))
    ratio = "times as fast as the loop"
    return figures | {ratio: at_least(figures[ratio], 8)}


def cases(day: Day) -> dict[str, Case]:
    passes = ((LLAMA, 32768), (LLAMA, 65536), (LLAMA, 131072), (QWEN3, 32768))
    made = {
        f"{name}, {tokens:,} tokens": partial(one_pass, day, name, tokens)
        for name, tokens in passes
    }
    # Longer, the loop's own logits would not fit.
    return made | {f"{LLAMA}, sixteen lengths to 16,384": partial(sixteen, day, 16384)}
