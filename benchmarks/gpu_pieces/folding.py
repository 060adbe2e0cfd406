"""Self-Extend's blocks by the device's own kernels, compared with whole scores and with plain
attention.

IN_BLOCKS in `models/patching/attending.py` lists the devices that passed here.
"""

from dataclasses import replace
from functools import partial
from typing import Any

from gpu_pieces import Case, Day, at_most
from gpu_pieces.shapes import LLAMA, build, cut

FACTOR = 4  # times the context of the shape, 8,192
ROUNDS = 2
HEADS, WIDTH, WINDOW = 8, 128, 1024


def allow(day: Day) -> None:
    """Let the blocks be taken on this device, in this process."""
    from ropext.models.patching import attending

    attending.IN_BLOCKS = ("cpu", day.device)


def heads(day: Day, dtype: str) -> Any:
    """Draw one layer's queries and keys at random, with a last block that is not whole."""
    import torch

    from ropext.models.patching.attending import Heads

    window = cut(day, WINDOW)
    tokens = 5 * window + window // 3
    generator = torch.Generator().manual_seed(0)  # a generator of the CPU, whatever the device
    made = [torch.randn(1, HEADS, tokens, WIDTH, generator=generator) for _ in range(5)]
    states = [state.to(day.device, getattr(torch, dtype)) for state in made]
    q, far_q, k, far_k, v = states
    beyond = slice(window, None)
    scale = WIDTH**-0.5
    return Heads(q[:, :, beyond], far_q[:, :, beyond], k, far_k, v, None, window, window, scale)


def beside_exact(layer: Any, blocks: Any, bound: float) -> dict[str, Any]:
    """Compare a layer's result in blocks with scores in float32 from the same states.

    Scores in half precision are rounded before the softmax, so their distance from the exact ones
    is mostly their own. So blocks may be as far from the exact ones as they are, if that is above
    the bound.
    """
    from ropext.models.patching import attending

    names = ("q", "far_q", "k", "far_k", "v")
    widened = {name: getattr(layer, name).float() for name in names}
    exact = attending.in_scores(replace(layer, **widened)).double()
    apart = (blocks.double() - exact).norm() / exact.norm()
    held = float((attending.in_scores(layer).double() - exact).norm() / exact.norm())
    return {
        "blocks from exact scores, of the norm": at_most(float(apart), max(bound, held)),
        "held scores from exact ones, of the norm": held,
        "largest difference of blocks": float((blocks.double() - exact).abs().max()),
    }


def equal(day: Day, dtype: str, bound: float) -> dict[str, Any]:
    """Compare a layer in blocks of the window, with random states."""
    from ropext.models.patching import attending

    allow(day)
    layer = heads(day, dtype)
    assert layer.fit_blocks
    return beside_exact(layer, attending.in_blocks(layer), bound)


def seconds(day: Day, tokens: int) -> dict[str, Any]:
    """Time a pass over one row by plain attention and by Self-Extend, in turns, alone on the
    device."""
    import statistics

    import torch
    from eval_gpu import peak_of, seconds_of

    from ropext.models import patching

    allow(day)
    model = build(day, LLAMA).eval()
    row = cut(day, tokens)
    ids = torch.randint(3, 1000, (1, row), device=day.device)

    def read() -> None:
        with torch.no_grad():
            model.base_model(input_ids=ids, use_cache=False)

    took: dict[str, list[float]] = {"plain": [], "self-extend": []}
    peaks = dict[str, int]()
    for _ in range(ROUNDS):
        for name, times in took.items():
            if name != "plain":
                patching.patch(model, method=name, factor=FACTOR)
            times += seconds_of(read, 1)
            peaks[name] = peak_of(read)[0]
            if name != "plain":
                patching.unpatch(model)
    plain, folded = (statistics.median(times) for times in took.values())
    return {
        "plain, seconds": plain,
        "self-extend, seconds": folded,
        "times plain": at_most(folded / plain, 2),
        "peak above the weights, plain, bytes a token": peaks["plain"] / row,
        "peak above the weights, self-extend, bytes a token": peaks["self-extend"] / row,
    }


def cases(day: Day) -> dict[str, Case]:
    half = 2e-3
    return {
        "equal to exact scores, float32": partial(equal, day, "float32", 1e-5),
        "equal to exact scores, bfloat16": partial(equal, day, "bfloat16", half),
        "equal to exact scores, float16": partial(equal, day, "float16", half),
        f"{LLAMA}, 32,768 tokens": partial(seconds, day, 32768),
        f"{LLAMA}, 16,384 tokens": partial(seconds, day, 16384),
    }
