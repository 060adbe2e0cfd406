"""Repeated passages far beyond the trained length: ALiBi plain, interpolated and by NTK-ALiBi.

Claim: the effect of the two methods of `ropext.patch` on retrieval, which the loss on books does
not show.

    python benchmarks/alibi_repeats.py --work DIR

The Falcon of benchmarks/position_schemes.py with ALiBi learns to continue a passage of 32 tokens
that occurred before, from random tokens and in windows of 256 at most. First it trains on rows that
repeat themselves, then on rows in which one passage at a random place comes again at the end. The
benchmark reads the last 28 tokens of such rows of 1 to 8 times 256, with the passage at any place.
The weights are kept in DIR.
"""

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from position_schemes import FACTORS, LENGTH, SEED, VOCAB, build
from torch import nn
from torch.nn import functional

import ropext

PASSAGE, CUE, ROWS = 32, 4, 128
PERIODIC_STEPS, REPEAT_STEPS = 700, 1500
SHORT = 4  # the extension that is read at 1 times: its short tax
METHODS = ("plain", "interpolated", "ntk-alibi")


def periodic(random: np.random.Generator) -> Any:
    """Draw 16 rows of 128 tokens, each a run of random tokens over and over."""
    periods = random.integers(8, LENGTH // 4, 16)
    rows = [np.resize(random.integers(3, VOCAB, p), LENGTH // 2 + 1) for p in periods]
    return torch.from_numpy(np.stack(rows)).long()


def repeated(random: np.random.Generator, count: int, length: int) -> Any:
    """Draw rows of random tokens that end with a passage that occurred in them before."""
    rows = random.integers(3, VOCAB, (count, length + 1))
    for row in rows:
        start = random.integers(0, length + 2 - 2 * PASSAGE)
        row[-PASSAGE:] = row[start : start + PASSAGE]
    return torch.from_numpy(rows).long()


def train(model: nn.Module) -> None:
    """Train by AdamW with a warm-up in both halves; the loss counts the predictable tokens."""
    random = np.random.default_rng(SEED)
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.01)
    parts: tuple[tuple[Callable[[], Any], int, float, int], ...] = (
        (lambda: periodic(random), PERIODIC_STEPS, 3e-3, LENGTH // 4),
        (lambda: repeated(random, 8, LENGTH), REPEAT_STEPS, 1e-3, PASSAGE - CUE),
    )
    for draw, steps, rate, asked in parts:
        for step in range(steps):
            rows = draw()
            optimiser.param_groups[0]["lr"] = rate * min(1, (step + 1) / 50)
            logits, wanted = model(rows[:, :-1])[:, -asked:], rows[:, -asked:]
            loss = functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())
            optimiser.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            if step % 100 == 99:
                print(f"step {step + 1} of {steps}: {loss.item():.3f}", flush=True)


@torch.no_grad()
def right(model: nn.Module, length: int) -> np.ndarray[Any, Any]:
    """Return the share of each row's repeated tokens that the model names first."""
    asked = PASSAGE - CUE
    found = []
    for rows in repeated(np.random.default_rng(SEED + 1), ROWS, length).split(8):
        named = model(rows[:, :-1])[:, -asked:].argmax(-1)
        found.append((named == rows[:, -asked:]).double().mean(1).numpy())
    return np.concatenate(found)


def cell(values: np.ndarray[Any, Any], plain: np.ndarray[Any, Any]) -> str:
    """Return the mean, and its paired difference from plain ALiBi on the same rows."""
    apart = values - plain
    if not apart.any():
        return f"{values.mean():.3f}"
    return f"{values.mean():.3f} ({apart.mean():+.3f} ± {apart.std(ddof=1) / math.sqrt(ROWS):.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True)
    kept = parser.parse_args().work / "alibi-repeats.pt"
    kept.parent.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    if not kept.exists():
        model = build("alibi")
        train(model)
        torch.save(model.state_dict(), kept)
    print("| | " + " | ".join(METHODS) + " |\n|" + " --- |" * (len(METHODS) + 1))
    for factor in FACTORS:
        found = {}
        for method in METHODS:
            model = build("alibi").eval()
            model.load_state_dict(torch.load(kept))
            if method != "plain":
                ropext.patch(model.model, method=method, factor=factor if factor > 1 else SHORT)
            found[method] = right(model, LENGTH * factor)
        cells = [cell(values, found["plain"]) for values in found.values()]
        print(f"| {factor}x | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
