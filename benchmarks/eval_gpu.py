"""Measure a model with random weights at up to 128k tokens on a GPU.

It compares our reading with the model's own bare forward, and sixteen lengths in one pass with a
loop over them.

    python benchmarks/gpu_day.py --only evaluation -o OUT

The bare forward computes the logits of the last token only, since all of them (128k by 128,256)
would not fit. Ours takes the NLL of every token, so its FLOPs include the trunk's and the head's.
The claim is a rate, FLOPs of a pass over its seconds, as a share of the trunk's own.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch

from ropext.evaluation.costs import num_parameters
from ropext.evaluation.forward import TokenScorer
from ropext.evaluation.reader import Shape, choose_reading_mode, shape_of
from ropext.models.load import free_memory

Found = TypeVar("Found")
SLICE_BYTES = 256 << 20
POINTS = 16
# Dense bfloat16 FLOPs a second, from the makers' data sheets; the first name that fits.
PEAKS = (
    ("H200 NVL", 836e12),
    ("H200", 989e12),
    ("GH200", 989e12),
    ("H100 NVL", 836e12),
    ("H100 PCIe", 756e12),
    ("H100", 989e12),
    ("A100", 312e12),
    ("L40S", 362e12),
)


def peak_rate() -> float | None:
    """Return the peak rate that the device's maker states."""
    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name()
    return next((rate for known, rate in PEAKS if known in name), None)


def wait() -> None:
    """Wait until the device has finished its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds_of(work: Callable[[], object], rounds: int) -> list[float]:
    """Return each round's time; the first round warms up and does not count."""
    took = []
    for _ in range(rounds + 1):
        wait()
        start = time.perf_counter()
        work()
        wait()
        took.append(time.perf_counter() - start)
    return took[1:]


def peak_of(work: Callable[[], Found]) -> tuple[int, Found]:
    """Return the most bytes that it takes above the level before (0 on a CPU, which counts none),
    and its result."""
    if not torch.cuda.is_available():
        return 0, work()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = work()
    return torch.cuda.max_memory_allocated() - before, result


def flops(model: Any, tokens: int) -> tuple[float, float]:
    """Return the FLOPs of one causal pass: the trunk's and the head's.

    Two for each weight and token, and in each layer half a square of scores and of the sums that
    they weigh.
    """
    shape, table = shape_of(model), model.get_input_embeddings().weight.numel()
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    weights = num_parameters(model) - table * (1 if tied else 2)
    square = 2 * shape.layers * shape.heads * shape.head_dim * tokens**2
    return 2.0 * tokens * weights + square, 2.0 * tokens * table


def ids_of(model: Any, tokens: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    vocabulary = model.get_input_embeddings().weight.shape[0]
    return np.random.default_rng(0).integers(3, vocabulary, tokens).astype(np.int32)


def scorer_of(model: Any, tokens: int) -> tuple[TokenScorer, Shape]:
    """Return the reader, in the manner that fits the free memory and proves itself on it."""
    shape, free = shape_of(model), free_memory(model.device)
    scorer = TokenScorer(model, choose_reading_mode(shape, tokens, free, None, SLICE_BYTES))
    scorer.self_check()
    return scorer, shape


@torch.inference_mode()
def one_pass(model: Any, tokens: int, rounds: int) -> dict[str, Any]:
    """Compare our reading of so many tokens with the trunk's own speed."""
    scorer, shape = scorer_of(model, tokens)
    ids = ids_of(model, tokens)
    row = torch.as_tensor(ids).long()[None].to(model.device)
    peak, _ = peak_of(lambda: scorer.token_nll(ids))
    bare = seconds_of(lambda: model(row, use_cache=False, logits_to_keep=1).logits.shape, rounds)
    ours = seconds_of(lambda: scorer.token_nll(ids), rounds)
    trunk, head = flops(model, tokens)
    rate = trunk / statistics.median(bare)
    rate_of_ours = (trunk + head) / statistics.median(ours)
    top = peak_rate()
    return {
        "tokens a second": tokens / statistics.median(ours),
        "share of the trunk's own rate": rate_of_ours / rate,
        "share of its tokens a second": statistics.median(bare) / statistics.median(ours),
        "TFLOP/s": rate_of_ours / 1e12,
        "share of the device's bf16 peak": rate_of_ours / top if top else None,
        "peak above the weights, GiB": peak / 2**30,
        "estimated, GiB": shape.peak_bytes(tokens, scorer.manner) / 2**30,
        "weights, GiB": num_parameters(model) * shape.dtype_bytes / 2**30,
        "read as": str(scorer.manner),
    }


@torch.inference_mode()
def sixteen_lengths(model: Any, tokens: int) -> dict[str, Any]:
    """Compare losses at sixteen lengths from one pass with a loop that reads each by itself."""
    scorer, _ = scorer_of(model, tokens)
    ids = ids_of(model, tokens)
    row = torch.as_tensor(ids).long()[None].to(model.device)
    lengths = [tokens * part // POINTS for part in range(1, POINTS + 1)]

    def ours() -> list[float]:
        nll = scorer.token_nll(ids).astype(np.float64)
        return [float(nll[1:length].mean()) for length in lengths]

    def loop() -> list[float]:
        return [float(model(row[:, :n], labels=row[:, :n]).loss) for n in lengths]

    apart = max(abs(a - b) for a, b in zip(ours(), loop(), strict=True))
    ratio = seconds_of(loop, 1)[0] / statistics.median(seconds_of(ours, 3))
    return {"times as fast as the loop": ratio, "largest difference of a loss": apart}
