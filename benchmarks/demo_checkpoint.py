"""What the demo checkpoint shows, measured with stock transformers alone.

    python benchmarks/demo_checkpoint.py > benchmarks/results/demo-checkpoint-DATE.md

Each spectrum is written into the config in memory as stock `rope_parameters`; ropext gives the
documents and the retrieval items, and takes no part in the model. Losses are nats per token over
the last 64 tokens before a length, the mean over documents with its 95 % interval (1.96 standard
errors over documents). Retrieval is exact greedy match, with Wilson 95 % intervals.
"""

import argparse
import json
import math
import os
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from ropext.tasks import (
    Haystack,
    Item,
    copy,
    mkey,
    noise,
    passkey,
    repetition,
    running_text,
)
from ropext.tasks.item import ItemRequest
from scripts.demo_checkpoint import rows
from scripts.demo_checkpoint.tokenizer import CachedEncoder, load_encoder

DEMO = Path(passkey.__file__).parents[1] / "demo"
TAIL = 64
ITEMS = 100
SEED = 20261121
BATCH_TOKENS = 16_384


@dataclass(frozen=True)
class Spectrum:
    """A name and the rope dict that a stock config carries it in."""

    name: str
    rope: dict[str, Any]
    target: int


def spectra(theta: float, dim: int, context: int, factors: list[int]) -> Iterator[Spectrum]:
    power = dim / (dim - 2)
    yield Spectrum("untouched", {"rope_type": "default", "rope_theta": theta}, context)
    for s in factors:
        yield Spectrum(
            f"PI {s}×",
            {"rope_type": "linear", "factor": float(s), "rope_theta": theta},
            s * context,
        )
        for name, growth in (("NTK", s), ("dynamic, frozen", s * s - s + 1)):
            rope = {"rope_type": "default", "rope_theta": theta * growth**power}
            yield Spectrum(f"{name} {s}×", rope, s * context)
        yarn = {"rope_type": "yarn", "factor": float(s), "rope_theta": theta}
        yarn["original_max_position_embeddings"] = context
        yield Spectrum(f"YaRN {s}×", yarn, s * context)


def load(checkpoint: Path, spectrum: Spectrum) -> Any:
    config = transformers.AutoConfig.from_pretrained(checkpoint)
    config.rope_parameters = dict(spectrum.rope)
    config.max_position_embeddings = spectrum.target
    model = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint, config=config, dtype=torch.float32
    )
    return model.eval()


@torch.no_grad()
def losses(model: Any, tokens: np.ndarray) -> np.ndarray:
    """Nats of each token from the second on, a row for each row of `tokens`."""
    found = []
    step = max(1, BATCH_TOKENS // tokens.shape[1])
    for at in range(0, len(tokens), step):
        ids = torch.from_numpy(tokens[at : at + step])
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
        nats = torch.nn.functional.cross_entropy(
            logits.transpose(1, 2), ids[:, 1:], reduction="none"
        )
        found.append(nats.double().numpy())
    return np.concatenate(found)


@torch.no_grad()
def hits(model: Any, items: list[Item]) -> int:
    """Return how many answers greedy decoding gives, by teacher forcing (the same by induction)."""
    right = 0
    size = len(items[0].answer)
    step = max(1, BATCH_TOKENS // items[0].length)
    for at in range(0, len(items), step):
        ids = torch.tensor([[*i.prompt, *i.answer] for i in items[at : at + step]])
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
        best = model.lm_head(hidden[:, -size - 1 : -1]).argmax(-1)
        right += int((best == ids[:, -size:]).all(-1).sum())
    return right


def wilson(right: int, count: int) -> str:
    z, p = 1.959964, right / count
    middle = (p + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(p * (1 - p) / count + z * z / (4 * count**2))
    return f"{p:.2f} [{max(0.0, middle - half):.2f}, {min(1.0, middle + half):.2f}]"


def with_interval(values: np.ndarray) -> str:
    half = 1.96 * values.std(ddof=1) / math.sqrt(len(values))
    return f"{values.mean():.3f} ± {half:.3f}"


def table(head: list[str], lines: list[list[str]]) -> str:
    rule = ["---"] * len(head)
    return "\n".join("| " + " | ".join(line) + " |" for line in [head, rule, *lines]) + "\n"


def documents(folder: Path, encoder: CachedEncoder, length: int) -> np.ndarray:
    texts = [json.loads(line)["text"] for line in (folder / "held-out.jsonl").open()]
    ids = [encoder.encode(text) for text in texts]
    return np.array([document[:length] for document in ids if len(document) >= length])


class Measurement:
    """One checkpoint with its documents and items."""

    def __init__(self, checkpoint: Path, factors: list[int], far: list[int]) -> None:
        self.checkpoint = checkpoint
        config = transformers.AutoConfig.from_pretrained(checkpoint)
        self.context = config.max_position_embeddings
        self.encoder = load_encoder(checkpoint)
        self.factors, self.far = factors, far
        self.all = list(
            spectra(config.rope_parameters["rope_theta"], config.head_dim, self.context, factors)
        )
        self.tokens = documents(DEMO / "data", self.encoder, max(factors) * self.context)
        stream = [token for row in self.tokens for token in row]
        self.held_out_text = running_text(stream)

    def items(
        self,
        make: Callable[[CachedEncoder, Haystack, ItemRequest], list[Item]],
        haystack: Haystack,
        length: int,
    ) -> list[Item]:
        """Make one item at each of 100 depths, evenly from 0 to 1."""
        depths = tuple(i / (ITEMS - 1) for i in range(ITEMS))
        return make(self.encoder, haystack, ItemRequest(length, depths, 0, SEED))

    def by_position(self) -> str:
        nats = losses(load(self.checkpoint, self.all[0]), self.tokens[:, : self.context])
        edges = [1, 8, 16, 32, 64, 128, 192, self.context]
        lines = [
            [f"{low}–{high - 1}", with_interval(nats[:, low - 1 : high - 1].mean(1))]
            for low, high in pairwise(edges)
        ]
        return table(["position", "nats per token"], lines)

    def tails(self) -> str:
        lengths = [self.context * 2**i for i in range(int(math.log2(max(self.factors))) + 1)]
        base = load(self.checkpoint, self.all[0])
        short = [
            losses(base, self.tokens[:, length - self.context : length])[:, -TAIL:].mean(1)
            for length in lengths
        ]
        lines = [["base, short window", *map(with_interval, short)]]
        for spectrum in self.all:
            nats = losses(load(self.checkpoint, spectrum), self.tokens)
            tails = [nats[:, length - 1 - TAIL : length - 1].mean(1) for length in lengths]
            lines.append([spectrum.name, *map(with_interval, tails)])
        return table(["spectrum", *(f"at {length}" for length in lengths)], lines)

    def passkeys(self) -> str:
        short = [64, 128, 192, 256]
        lengths = short + [self.context * s for s in (2, 4, 8)]
        sets = [self.items(passkey.passkey_items, repetition(self.encoder), n) for n in lengths]
        lines = []
        for spectrum in self.all:
            model = load(self.checkpoint, spectrum)
            found = [wilson(hits(model, items), ITEMS) for items in sets]
            lines.append([spectrum.name, *found])
        return table(["spectrum", *map(str, lengths)], lines)

    def formats(self) -> str:
        """Trained and held-out wordings and fillers; untouched in the window, YaRN 4× at 4×."""
        sentences = repetition(self.encoder, rows.HELD_OUT_SENTENCES)
        words = noise(self.encoder)
        held = partial(passkey.passkey_items, template=rows.HELD_OUT_PASSKEY)
        many = tuple(i / 15 for i in range(16))
        cases: list[tuple[str, Callable[[int], list[Item]]]] = [
            ("passkey, repeated sentences", lambda n: self.items(
                passkey.passkey_items, repetition(self.encoder), n)),
            ("passkey, held-out packages as filler", lambda n: self.items(
                passkey.passkey_items, self.held_out_text, n)),
            ("passkey, random words (filler held out)", lambda n: self.items(
                passkey.passkey_items, words, n)),
            ("held-out wording, held-out sentences", lambda n: self.items(
                held, sentences, n)),
            ("held-out wording, held-out packages", lambda n: self.items(
                held, self.held_out_text, n)),
            ("held-out wording, random words", lambda n: self.items(
                held, words, n)),
            ("copy of 20 random-word tokens, repeated sentences", lambda n: self.items(
                copy.copy_items, repetition(self.encoder), n)),
            ("copy, held-out packages as filler", lambda n: self.items(
                copy.copy_items, self.held_out_text, n)),
            ("mkey, 4 keys, held-out packages", lambda n: [
                item for index in range(25) for item in mkey.mkey_items(
                    self.encoder, self.held_out_text, ItemRequest(n, many[1::4], index, SEED))]),
        ]  # fmt: skip
        chosen = [s for s in self.all if s.name in ("untouched", "YaRN 4×")]
        models = [(load(self.checkpoint, s), s.target) for s in chosen]
        lines = [
            [name, *(wilson(hits(model, make(length)), ITEMS) for model, length in models)]
            for name, make in cases
        ]
        return table(["items", *(f"{s.name} at {s.target}" for s in chosen)], lines)

    def far_passkeys(self) -> str:
        lines = []
        for s in self.far:
            items = self.items(passkey.passkey_items, repetition(self.encoder), s * self.context)
            wanted = ("dynamic, frozen", "YaRN")
            for spectrum in spectra(10000.0, 32, self.context, [s]):
                if spectrum.name.startswith(wanted):
                    model = load(self.checkpoint, spectrum)
                    lines.append(
                        [spectrum.name, str(s * self.context), wilson(hits(model, items), ITEMS)]
                    )
        return table(["spectrum", "length", "passkey"], lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the demo checkpoint.")
    parser.add_argument("--checkpoint", type=Path, default=DEMO / "checkpoint")
    parser.add_argument("--factors", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--far", type=int, nargs="*", default=[16, 32])
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    measure = Measurement(options.checkpoint, options.factors, options.far)
    print("# The demo checkpoint, measured\n")
    print(f"Command: `{' '.join(['python', 'benchmarks/demo_checkpoint.py', *sys.argv[1:]])}`")
    print(
        f"Machine: {platform.machine()} CPU, {os.cpu_count()} cores, {torch.get_num_threads()}"
        f" thread(s); Python {platform.python_version()}, torch {torch.__version__},"
        f" transformers {transformers.__version__}.\n"
    )
    print(f"{len(measure.tokens)} held-out documents; {ITEMS} items a cell, depths 0 to 1.\n")
    sections = [
        ("Loss by position inside the window, untouched", measure.by_position),
        (f"Loss over the last {TAIL} tokens before a length (nats per token)", measure.tails),
        ("Passkey by length", measure.passkeys),
        ("Trained and held-out formats", measure.formats),
        ("Far beyond", measure.far_passkeys),
    ]
    for title, section in sections:
        print(f"## {title}\n\n{section()}", flush=True)


if __name__ == "__main__":
    main()
