"""Ask SmolLM2-135M-Instruct for keys at 16,384 tokens: the share that each extension finds, by
depth.

    python scripts/real_model.py MODEL
    python benchmarks/real_model_keys.py --model MODEL --books FOLDER
    python benchmarks/real_model_keys.py --table [--length N] [--plot FILE.png]

A haystack is a run of 16,384 tokens of FOLDER's books that holds eight named four-digit keys, at
eight depths (the task `mkey`), with a question for each key. All variants get the same questions.
`window` is the base in its 8,192 tokens, in the middle of its depths: the ceiling. `truncated` is
the base that reads the last 8,192 tokens of the long text: the baseline. `nll` is the loss of the
right answer, nats a token, given the right tokens before it. Every haystack is kept as soon as it
is read (--cells); the same command resumes with the rest.
"""

import argparse
import time
from contextlib import nullcontext
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from real_model import CELLS, CONTEXT, UNTOUCHED, Cells, Models, books_of, until

from ropext.evaluation import corpus
from ropext.evaluation.reader import Reader
from ropext.evaluation.reading import pinned, score_items
from ropext.evaluation.workload import NEXT_TOKEN, Workload
from ropext.files.checkpoint import open_snapshot
from ropext.models.tokenizer import load_tokenizer
from ropext.results.values import Bootstrap
from ropext.tasks import Item, find_task
from ropext.tasks.item import running_text

LENGTH = 2 * CONTEXT
DEPTHS = tuple((at + 0.5) / 8 for at in range(8))
WINDOW, TRUNCATED = "window", "truncated"
ORDER = (TRUNCATED, WINDOW, "yarn", "self-extend", UNTOUCHED)
SHOWN = {
    TRUNCATED: ("base, its last 8,192 tokens", "#000000"),
    UNTOUCHED: ("untouched, all 16,384", "#999999"),
    "yarn": ("YaRN", "#0072B2"),
    "yarn-tuned": ("YaRN and 30 steps of LoRA", "#009E73"),
    "self-extend": ("Self-Extend", "#D55E00"),
}


def items_of(model: str, books: Path, length: int, index: int) -> list[Item]:
    """Return the questions about one haystack of running text."""
    encoder = corpus.DocumentEncoder(load_tokenizer(open_snapshot(model), False))
    texts = [book.ids[int(book.has_bos) :] for book in books_of(model, books, max(length, LENGTH))]
    around = running_text([int(token) for text in texts for token in text])
    build = find_task("mkey").build
    return build(encoder, around, length=length, depths=DEPTHS, index=index, seed=0)


def truncated(item: Item) -> Item:
    """Return the same question after the end of its text alone, as much as the context holds."""
    cut = item.length - CONTEXT
    return replace(item, prompt=item.prompt[cut:], shared=item.shared - cut, length=CONTEXT)


def ask(models: Models, variant: str, items: list[Item]) -> dict[str, Any]:
    """Ask one variant about one haystack."""
    loaded, began = models.of(variant), time.process_time()
    length = items[0].length
    with pinned(loaded, length), torch.no_grad():
        reads = Workload(NEXT_TOKEN.frame(CONTEXT, (length,), 0))
        scores = score_items(Reader(nullcontext).scorer(loaded, reads), items, None)
    by_depth = {f"{score.depth:.4f}": score for score in scores}
    return {
        "right": {depth: score.exact for depth, score in by_depth.items()},
        "nll": {depth: round(score.answer_nll or 0.0, 3) for depth, score in by_depth.items()},
        "cpu_seconds": round(time.process_time() - began),
    }


def measure(given: argparse.Namespace) -> None:
    cells = Cells(given.cells, given.length, given.dtype)
    checkpoints = dict(own.split("=", 1) for own in given.variants if "=" in own)
    models = Models(given.model, given.length, given.dtype, checkpoints)
    names = [own.partition("=")[0] for own in given.variants] or list(ORDER)
    for index, variant in ((index, name) for index in range(given.haystacks) for name in names):
        if str(index) in cells.of(variant):
            continue
        if given.until and datetime.now() >= given.until:
            print("the time is over; the same command goes on")
            return
        length = CONTEXT if variant == WINDOW else given.length
        items = items_of(given.model, given.books, length, index)
        if variant == TRUNCATED:
            items = [truncated(item) for item in items]
        cell = ask(models, variant, items)
        cells.keep(variant, str(index), cell)
        found = sum(cell["right"].values())
        print(f"{variant}, haystack {index}: {found} of 8, {cell['cpu_seconds']} s", flush=True)


def by_depth(cells: dict[str, Any], what: str) -> np.ndarray:
    """Return `right` (1 or 0) or `nll`: a row a haystack, a column a depth."""
    return np.array([list(cell[what].values()) for cell in cells.values()], dtype=float)


def with_interval(values: np.ndarray) -> str:
    """Return the mean of all questions; the interval is over haystacks."""
    mean = Bootstrap(0).ratio(list(values.sum(1)), [values.shape[1]] * len(values))
    ends = mean.ci95 or mean.range or (mean.value, mean.value)
    return f"{mean.value:.2f} ({ends[0]:.2f} to {ends[1]:.2f})"


def table(cells: Cells) -> str:
    """Share of keys found and loss of the right answer, and the share by depth."""
    head = ["variant", "haystacks", "needles found", "nats a token of the answer"]
    head += [f"{name}, in the half that truncation cuts off" for name in ("found", "nats")]
    head += [f"found at {depth:.0%}" for depth in DEPTHS]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    known = cells.variants()
    for variant in sorted(known, key=lambda v: [*ORDER, *known].index(v)):
        right, nll = (by_depth(cells.of(variant), what) for what in ("right", "nll"))
        row = [variant, str(len(right)), with_interval(right), with_interval(nll)]
        far = right[:, : len(DEPTHS) // 2], nll[:, : len(DEPTHS) // 2]
        row += ["", ""] if variant == WINDOW else [with_interval(values) for values in far]
        row += [f"{one:.2f}" for one in right.mean(0)]
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def picture(cells: Cells, path: Path) -> None:
    """Draw the share of keys found, and the loss of the right answer, by the key's depth."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    labels = {"right": "share of keys found", "nll": "loss of the right answer, nats a token"}
    for axis, (what, label) in zip(axes, labels.items(), strict=True):
        for variant, (name, colour) in SHOWN.items():
            values = by_depth(cells.of(variant), what).mean(0)
            dash = "--" if variant == TRUNCATED else "-"
            axis.plot(DEPTHS, values, dash, label=name, marker=".", color=colour)
        ceiling = by_depth(cells.of(WINDOW), what).mean()
        name = "base, text of its own 8,192 tokens (mean)"
        axis.axhline(ceiling, color="0.5", lw=0.8, ls=":", label=name)
        axis.axvspan(0, 0.5, color="0.95", lw=0)
        axis.set(xlabel="where the key stands: 0 start, 1 end", ylabel=label, xlim=(0, 1))
    axes[0].set_ylim(-0.03, 1.03)
    axes[1].set_ylim(0, 2.4)
    axes[0].set_title("SmolLM2-135M-Instruct at 16,384 tokens", loc="left", fontsize=10)
    lost = by_depth(cells.of(UNTOUCHED), "nll").mean()
    axes[1].set_title(
        f"grey: cut off by truncation; untouched: {lost:.1f}", loc="left", fontsize=10
    )
    axes[0].legend(frameon=False, fontsize=8, loc="upper left")
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="what scripts/real_model.py wrote")
    parser.add_argument("--books", type=Path)
    parser.add_argument("--cells", type=Path, default=CELLS / "keys")
    parser.add_argument("--length", type=int, default=LENGTH)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--haystacks", type=int, default=10)
    parser.add_argument("--variants", nargs="+", default=[], help="these, or NAME=DIR")
    parser.add_argument("--until", type=until, help="HH:MM after which no haystack is begun")
    parser.add_argument("--table", action="store_true", help="print what is measured")
    parser.add_argument("--plot", type=Path, help="draw what is measured")
    given = parser.parse_args()
    cells = Cells(given.cells, given.length, given.dtype)
    if given.plot:
        picture(cells, given.plot)
    if given.table:
        print(table(cells))
    if not (given.table or given.plot):
        measure(given)


if __name__ == "__main__":
    main()
