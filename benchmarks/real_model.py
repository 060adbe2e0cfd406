"""SmolLM2-135M-Instruct beyond its 8,192 tokens, on whole books: the effect of each extension.

    python scripts/real_model.py MODEL
    python benchmarks/real_model.py --model MODEL --books FOLDER
    python benchmarks/real_model.py --table > benchmarks/results/real-model-DATE.md

    python scripts/real_model.py --code CODE --manuals MANUALS
    python benchmarks/real_model.py --model MODEL --books CODE --count 17 --cells CELLS/code

FOLDER holds one text file a book; the first --length tokens of each are read. A cell is one book
read by one variant. Every cell is kept as soon as it is there, as sums of NLL over parts of 256
tokens, in --cells (benchmarks/results/real-model, which holds the measured cells). The same command
resumes with the missing cells, --until stops between two of them, and the table names the cells
that are still missing.

Variants are `short` (the base through its short window), `untouched`, the methods at LENGTH /
context, and written checkpoints, NAME=DIR. `self-extend-4096-3` has that window and group;
`self-extend-from-4` has groups that double with distance, see self_extend_groups.py. A checkpoint
whose context is shorter than LENGTH is read through the short window (a control).
"""

import argparse
import hashlib
import json
import re
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from self_extend_groups import patch_doubling

from ropext.base.jsontext import write_json
from ropext.evaluation import corpus
from ropext.evaluation.reader import Progress, Reader, read_units, shape_of
from ropext.evaluation.variants import Variant
from ropext.evaluation.workload import NEXT_TOKEN, Workload, read_unit
from ropext.files.checkpoint import open_snapshot
from ropext.models import patching
from ropext.models.tokenizer import load_tokenizer
from ropext.results.measurement import Store
from ropext.results.values import Bootstrap, Value

PART = 256  # tokens of a sum
CONTEXT, TAIL = 8192, 1024
CELLS = Path(__file__).parent / "results/real-model"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
METHODS = ("yarn", "self-extend", "llama3", "ntk", "dynamic", "pi")
SHORT, UNTOUCHED = "short", "untouched"
# What is read first is worth most: (how many books, which variants).
ORDER = (
    (2, (SHORT, "yarn", UNTOUCHED)),
    (8, (SHORT, "yarn")),
    (2, METHODS),
    (8, (*METHODS, UNTOUCHED)),
)


class Cells:
    """What was measured at one length in one dtype: a file per variant, a cell per book."""

    def __init__(self, folder: Path, length: int, dtype: str) -> None:
        self.folder = folder / f"{length}-{dtype}"

    def of(self, variant: str) -> dict[str, Any]:
        path = self.folder / f"{variant}.json"
        found: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.is_file() else {}
        return found

    def keep(self, variant: str, book: str, cell: dict[str, Any]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.folder / f"{variant}.json", self.of(variant) | {book: cell})

    def variants(self) -> list[str]:
        return sorted(path.stem for path in self.folder.glob("*.json"))


def books_of(model: str, folder: Path, length: int) -> tuple[corpus.Document, ...]:
    """Return the beginnings of all books that are long enough, in the order of their hashes."""
    snapshot = open_snapshot(model)
    encoder = corpus.DocumentEncoder(load_tokenizer(snapshot, False))
    wanted = corpus.Wanted((length,), given=True, max_documents=100)
    raw = corpus.read_documents(corpus.Source(str(folder)))
    return corpus.choose_documents(raw, encoder, wanted).documents


def order_of(given: Sequence[str], count: int) -> Iterator[tuple[int, str]]:
    """Yield (book, variant) in the order in which they are read."""
    done = set()
    rounds = [(count, tuple(given))] if given else [(min(n, count), own) for n, own in ORDER]
    for books, variants in rounds:
        for variant in variants:
            for book in range(books):
                if (book, variant) not in done:
                    done.add((book, variant))
                    yield book, variant


class Models:
    """The models of the variants, the last one kept."""

    def __init__(self, model: str, length: int, dtype: str, checkpoints: dict[str, str]) -> None:
        self.model, self.length, self.checkpoints = model, length, checkpoints
        self.dtype = getattr(torch, dtype)
        self.held: tuple[str, Any] = ("", None)

    def of(self, variant: str) -> Any:
        """Return the model as this variant computes."""
        name = self.checkpoints.get(variant, self.model)
        if self.held[0] != name:
            loaded = transformers.AutoModelForCausalLM.from_pretrained(name, dtype=self.dtype)
            self.held = name, loaded.eval().to(device=DEVICE)
        loaded = self.held[1]
        patching.unpatch(loaded)
        factor = self.length / CONTEXT
        if knobs := re.fullmatch(r"self-extend-(\d+)-(\d+)", variant):
            window, group = map(int, knobs.groups())
            patching.patch(loaded, method="self-extend", factor=factor, window=window, group=group)
        elif first := re.fullmatch(r"self-extend-from-(\d+)", variant):
            patch_doubling(loaded, int(first[1]), factor)
        elif variant in METHODS:
            patching.patch(loaded, method=variant, factor=factor)
        return loaded

    def is_short(self, variant: str, loaded: Any) -> bool:
        shorter = int(loaded.config.max_position_embeddings) < self.length
        return variant == SHORT or (variant in self.checkpoints and shorter)


def resident(name: str) -> int:
    """Return VmRSS (now) or VmHWM (highest since the last reset), in bytes. Linux."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) * 1024


def read(models: Models, variant: str, book: corpus.Document) -> dict[str, Any]:
    """Read one cell."""
    loaded = models.of(variant)
    reads = Workload(NEXT_TOKEN.frame(CONTEXT, (models.length,), 0), (book,))
    store = Store()
    scorer = Reader(nullcontext).scorer(loaded, reads)
    before, began = resident("VmRSS"), time.process_time()
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # resets VmHWM
    short = models.is_short(variant, loaded)
    kind, config = "base" if short else "extended", loaded.config.to_dict()
    read = Variant(variant, kind, open_snapshot(str(loaded.name_or_path)), config)
    read_of = partial(read_unit, reads=reads, scorer=scorer)
    read_units(read_of, reads.units(read), store, Progress())
    reading = reads.measured([read], {read.label: store}).readings[read.label]
    longest = max(reading.passes)
    nll = np.nan_to_num(reading.passes[longest][0].astype(np.float64))
    window = CONTEXT if short else models.length
    estimate = shape_of(loaded).peak_bytes(window, scorer.manner)
    return {
        "tokens": hashlib.sha256(book.ids.astype("<i4").tobytes()).hexdigest()[:16],
        "nll": [round(float(own), 3) for own in nll.reshape(-1, PART).sum(1)],
        "cpu_seconds": round(time.process_time() - began),
        "peak_mib": (resident("VmHWM") - before) >> 20,
        "estimated_mib": estimate >> 20,
    }


def until(clock: str) -> datetime:
    """Return the next time that a clock shows HH:MM."""
    now = datetime.now()
    found = datetime.combine(now, datetime.strptime(clock, "%H:%M").time())
    return found if found > now else found + timedelta(days=1)


def measure(given: argparse.Namespace) -> None:
    cells = Cells(given.cells, given.length, given.dtype)
    checkpoints = dict(own.split("=", 1) for own in given.variants if "=" in own)
    models = Models(given.model, given.length, given.dtype, checkpoints)
    books = books_of(given.model, given.books, given.length)
    names = [own.partition("=")[0] for own in given.variants]
    for at, variant in order_of(names, min(given.count, len(books))):
        name = Path(books[at].name).stem
        if name in cells.of(variant):
            continue
        if given.until and datetime.now() >= given.until:
            sys.stderr.write("the time is over; the same command goes on\n")
            return
        cell = read(models, variant, books[at])
        cells.keep(variant, name, cell)
        mean = sum(cell["nll"]) / (given.length - 1)
        sys.stderr.write(f"{variant}, {name}: {mean:.4f} nats, {cell['cpu_seconds']} s of CPU\n")


# The table: values over the books that both variants have read.


def sums(cell: dict[str, Any], start: int, stop: int) -> tuple[float, int]:
    """Sum of NLL and scored tokens at positions [start, stop); position 0 is not scored."""
    total = sum(cell["nll"][start // PART : stop // PART])
    return total, stop - max(start, 1)


def ratio(cells: Sequence[dict[str, Any]], span: tuple[int, int], **shape: Any) -> Value:
    found = [sums(cell, *span) for cell in cells]
    return Bootstrap(0).ratio([own[0] for own in found], [own[1] for own in found], **shape)


def paired(
    own: dict[str, Any], other: dict[str, Any], span: tuple[int, int], books: Sequence[str]
) -> Value:
    """Nats a token by which one reads the same tokens worse than the other."""
    first, second = ([sums(cells[book], *span) for book in books] for cells in (own, other))
    gaps = [a[0] - b[0] for a, b in zip(first, second, strict=True)]
    return Bootstrap(0).ratio(gaps, [own[1] for own in first])


def told(value: Value, digits: int = 4, sign: str = "+") -> str:
    """Return a value with its interval, or if there is none with its range over books."""
    ends = value.ci95 or value.range
    own = f"{value.value:{sign}.{digits}f}"
    if ends is None or value.n < 2:
        return own
    mark = "" if value.ci95 else "range "
    return f"{own} ({mark}{ends[0]:{sign}.{digits}f} to {ends[1]:{sign}.{digits}f})"


def table(folder: Path, length: int, dtype: str) -> str:
    """Return all measurements at one length."""
    cells = Cells(folder, length, dtype)
    base = cells.of(SHORT)
    lengths = [at for at in (4096, 8192, 16384, 32768, 65536) if at <= length]
    end = f"{length // 1024}k"
    head = ["variant", "books", *(f"tail perplexity at {at // 1024}k" for at in lengths)]
    head += [f"short window's at {end}, same books", f"tail at {end} against it, nats"]
    head += ["far half against it, nats", "short tax, nats"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    known = [SHORT, UNTOUCHED, *METHODS]
    for variant in sorted(cells.variants(), key=lambda v: [*known, v].index(v)):
        own = cells.of(variant)
        both = [book for book in own if book in base]
        spans = [(at - TAIL, at) for at in lengths]
        tails = [ratio(list(own.values()), span, transform=np.exp).value for span in spans]
        row = [variant, str(len(own)), *(f"{tail:,.2f}" for tail in tails)]
        if variant != SHORT and both:
            beside = ratio([base[book] for book in both], spans[-1], transform=np.exp).value
            halves = [spans[-1], (length // 2, length), (0, CONTEXT)]
            row += [f"{beside:,.2f}", *(told(paired(own, base, span, both)) for span in halves)]
        lines.append("| " + " | ".join(row + [""] * (len(head) - len(row))) + " |")
    return "\n".join(lines)


def summary(folder: Path, length: int, dtype: str) -> str:
    """Gain over truncation, as `eval` prints it (above 0 is better than the base in its window),
    by kind of text, and the short tax."""
    kinds = {"novels": folder, "code": folder / "code", "manuals": folder / "manuals"}
    spans = {
        "last 1,024 tokens": (length - TAIL, length),
        "far half": (length // 2, length),
        "short tax": (0, CONTEXT),
    }
    lines = []
    for name, span in spans.items():
        lines += [f"\n| {name} | {' | '.join(kinds)} |", "|---" * (len(kinds) + 1) + "|"]
        known = Cells(folder, length, dtype).variants()
        for variant in sorted(known, key=lambda v: [SHORT, UNTOUCHED, *METHODS, *known].index(v)):
            row = []
            for place in kinds.values():
                cells = Cells(place, length, dtype)
                base, read = cells.of(SHORT), cells.of(variant)
                texts = [text for text in read if text in base]
                tax = name == "short tax"
                pair = (read, base) if tax else (base, read)
                row.append(f"{told(paired(*pair, span, texts), 3)}, {len(texts)}" if texts else "")
            lines.append(f"| {variant} | {' | '.join(row)} |")
    return "\n".join(lines)


def picture(folder: Path, length: int, dtype: str, path: Path) -> None:
    """Loss above the base in its own window by position, each variant over the books it has read;
    the two that leave the picture (untouched, pi) are in the table alone."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    cells = Cells(folder, length, dtype)
    base, step = cells.of(SHORT), 2 * TAIL
    figure, axis = pyplot.subplots(figsize=(7, 3.8), layout="constrained")
    for variant in [own for own in cells.variants() if own not in (SHORT, UNTOUCHED, "pi")]:
        own = {book: cell for book, cell in cells.of(variant).items() if book in base}
        gaps = np.array([np.subtract(own[book]["nll"], base[book]["nll"]) for book in own])
        curve = gaps.mean(0).reshape(-1, step // PART).sum(1) / step
        at = (np.arange(len(curve)) + 0.5) * step
        axis.plot(at, curve, label=f"{variant}, {len(own)} books", lw=1.5, marker=".")
    axis.axhline(0, color="0.5", lw=0.8)
    axis.axvline(CONTEXT, color="0.7", lw=0.8)
    axis.set_ylim(top=0.13)
    axis.set(xlabel="position", ylabel="nats a token above the base in its own window")
    axis.set_title("SmolLM2-135M-Instruct, 8,192 to 16,384 tokens", loc="left", fontsize=10)
    axis.legend(frameon=False, fontsize=8, ncols=2)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="what scripts/real_model.py wrote")
    parser.add_argument("--books", type=Path)
    parser.add_argument("--cells", type=Path, default=CELLS)
    parser.add_argument("--length", type=int, default=2 * CONTEXT)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--count", type=int, default=8, help="books to read")
    parser.add_argument("--variants", nargs="+", default=[], help="these, not all in their order")
    parser.add_argument("--until", type=until, help="HH:MM after which no cell is begun")
    parser.add_argument("--table", action="store_true", help="print what is measured")
    parser.add_argument("--summary", action="store_true", help="print gains by kind of text")
    parser.add_argument("--plot", type=Path, help="draw what is measured")
    given = parser.parse_args()
    where = given.cells, given.length, given.dtype
    if given.plot:
        picture(*where, given.plot)
    if given.table:
        print(table(*where))
    if given.summary:
        print(summary(*where))
    if given.table or given.plot or given.summary:
        return
    measure(given)


if __name__ == "__main__":
    main()
