"""Train short, read long: five tiny decoders that differ in their position scheme alone.

Claim: the loss of each scheme beyond the trained length, and the gain of its extension there,
untrained and after a short training.

    python benchmarks/position_schemes.py TEXTS HELD_OUT --work DIR
        [--schemes learned rope] [--steps 500] [--tune-rows 1] [--report FILE.md] [--plot FILE.png]

TEXTS and HELD_OUT are folders of .txt files. The five are stock classes (XGLM, GPT-2, T5's decoder,
Falcon with ALiBi and with RoPE) of the same width, depth, heads and vocabulary (the bundled
model's). They are trained on the same tokens in the same order from the same seed, in windows of
256. The benchmark reads the last 64 tokens of windows of 1 to 8 times 256 that end at the same
places, so that every length scores the same tokens. Each piece (a training, a tuning, a reading) is
kept in DIR, and a stopped run resumes with the first missing piece.
"""

import argparse
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

import ropext
from ropext.scaling.tables import METHODS as TABLES

WIDTH, DEPTH, HEADS, LENGTH, VOCAB = 96, 2, 4, 256, 1024
BATCH, RATE, SEED = 8, 3e-3, 7
TUNE_STEPS, TUNE_RATE, TUNE_FACTOR = 200, 1e-3, 4
FACTORS, TAIL, WINDOWS = (1, 2, 4, 8), 64, 48
SCHEMES = ("learned", "rope", "alibi", "sinusoidal", "buckets")


@dataclass(frozen=True)
class Bench:
    """The texts that all models are trained and read on, and the folder that keeps the pieces."""

    texts: np.ndarray[Any, Any]
    held_out: np.ndarray[Any, Any]
    work: Path
    steps: int
    tune_rows: int  # of a step

    def tails(self, model: nn.Module, factor: int) -> list[float]:
        return tails(model, self.held_out, LENGTH * factor)


class T5Decoder(nn.Module):
    """T5's decoder stack alone, with tied logits: a decoder whose one position signal is T5's."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        from transformers.models.t5.modeling_t5 import T5Stack

        self.config = config
        self.embed = nn.Embedding(VOCAB, WIDTH)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.stack = T5Stack(config)
        self.stack.set_input_embeddings(self.embed)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.stack(inputs_embeds=self.embed(ids) * WIDTH**0.5).last_hidden_state
        return functional.linear(hidden, self.embed.weight)


class Logits(nn.Module):
    """A stock model for causal modelling as a function from tokens to logits."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(input_ids=ids, use_cache=False).logits
        return logits


def build(scheme: str) -> nn.Module:
    """Build the model of a scheme with fresh weights; the report names its class."""
    import transformers as hf

    torch.manual_seed(SEED)
    none: dict[str, Any] = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    if scheme == "learned":
        sizes: dict[str, Any] = {
            "n_embd": WIDTH,
            "n_layer": DEPTH,
            "n_head": HEADS,
            "n_positions": LENGTH,
        }
        return Logits(hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=VOCAB, **sizes, **none)))
    if scheme == "sinusoidal":
        xglm = hf.XGLMConfig(
            vocab_size=VOCAB, d_model=WIDTH, num_layers=DEPTH, attention_heads=HEADS,
            ffn_dim=4 * WIDTH, max_position_embeddings=LENGTH, dropout=0.0, attention_dropout=0.0,
            layerdrop=0.0, scale_embedding=True,
        )  # fmt: skip
        return Logits(hf.XGLMForCausalLM(xglm))
    if scheme == "buckets":
        t5 = hf.T5Config(
            vocab_size=VOCAB, d_model=WIDTH, d_kv=WIDTH // HEADS, num_layers=DEPTH,
            num_heads=HEADS, d_ff=4 * WIDTH, dropout_rate=0.0, is_decoder=True, use_cache=False,
        )  # fmt: skip
        return T5Decoder(t5)
    config = hf.FalconConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, num_hidden_layers=DEPTH, num_attention_heads=HEADS,
        alibi=scheme == "alibi", multi_query=False, parallel_attn=False, bias=True,
        max_position_embeddings=LENGTH, hidden_dropout=0.0, attention_dropout=0.0,
        tie_word_embeddings=True,
    )  # fmt: skip
    config._attn_implementation = "eager"
    return Logits(hf.FalconForCausalLM(config))


def tokens_of(folder: Path, work: Path) -> np.ndarray[Any, Any]:
    """Return all texts of a folder as one row of tokens, kept between runs."""
    kept = work / f"{folder.name}.npy"
    if not kept.exists():
        from transformers import AutoTokenizer

        from ropext.base.bundled import MODELS

        tokenizer = AutoTokenizer.from_pretrained(MODELS["ropext://demo"])
        texts = [path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.txt"))]
        rows = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
        np.save(kept, np.concatenate([np.array(row, dtype=np.int32) for row in rows]))
    tokens: np.ndarray[Any, Any] = np.load(kept)
    return tokens


def batches(tokens: np.ndarray[Any, Any], steps: int, rows: int, length: int) -> Iterator[Any]:
    """Yield the same windows for every model: drawn by one seed."""
    random = np.random.default_rng(SEED)
    for _ in range(steps):
        starts = random.integers(0, len(tokens) - length - 1, rows)
        yield torch.from_numpy(np.stack([tokens[s : s + length + 1] for s in starts])).long()


def train(
    model: nn.Module, tokens: np.ndarray[Any, Any], steps: int, rows: int, length: int, rate: float
) -> list[float]:
    """Train by AdamW with a warm-up of a twentieth and a cosine down to a tenth; return the
    losses."""
    model.train()
    params = [p for p in model.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(params, lr=rate, betas=(0.9, 0.95), weight_decay=0.01)
    losses = []
    for step, window in enumerate(batches(tokens, steps, rows, length)):
        warm = min(1.0, (step + 1) / (steps / 20))
        scale = warm * (0.1 + 0.45 * (1 + math.cos(math.pi * step / steps)))
        for group in optimiser.param_groups:
            group["lr"] = rate * scale
        logits = model(window[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(params, 1.0)
        optimiser.step()
        losses.append(loss.item())
        if step % 50 == 49:
            print(f"  step {step + 1} of {steps}: {np.mean(losses[-50:]):.4f}", flush=True)
    return losses


@torch.no_grad()
def tails(model: nn.Module, tokens: np.ndarray[Any, Any], length: int) -> list[float]:
    """Return the mean loss over the last TAIL tokens of each window of this length."""
    model.eval()
    longest = LENGTH * FACTORS[-1]
    ends = np.linspace(longest + 1, len(tokens) - 1, WINDOWS).astype(int)
    out = []
    for end in ends:
        window = torch.from_numpy(tokens[end - length - 1 : end].astype(np.int64))[None]
        try:
            logits = model(window[:, :-1])[0, -TAIL:]
        except (IndexError, RuntimeError):
            return []  # a table has no row there
        out.append(float(functional.cross_entropy(logits, window[0, -TAIL:])))
    return out


def trained(scheme: str, bench: Bench) -> nn.Module:
    """Return the model of a scheme after its training, which runs once."""
    model, kept = build(scheme), bench.work / f"{scheme}.pt"
    if not kept.exists():
        size = sum(p.numel() for p in model.parameters())
        print(f"{scheme}: {type(model).__name__}, {size:,} parameters", flush=True)
        losses = train(model, bench.texts, bench.steps, BATCH, LENGTH, RATE)
        (bench.work / f"{scheme}.losses.json").write_text(json.dumps(losses))
        torch.save(model.state_dict(), kept.with_suffix(".part"))
        kept.with_suffix(".part").rename(kept)
    model.load_state_dict(torch.load(kept))
    return model


def grown(model: Any, factor: int, method: str) -> None:
    """Add rows to GPT-2's table: by a method of ropext, or drawn at random."""
    old = model.model.transformer.wpe.weight.detach()
    count = LENGTH * factor
    if method == "random":
        drawn = torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(SEED))
        rows = torch.cat([old, drawn[LENGTH:] * old.std()])
    else:
        rows = torch.from_numpy(TABLES[method].grow(old.double().numpy(), count)).float()
    model.model.transformer.wpe = nn.Embedding.from_pretrained(rows, freeze=False)


def patched(model: Any, factor: int, method: str) -> None:
    ropext.patch(model.model, method=method, factor=factor)


def slowed(model: Any, factor: int, method: str) -> None:
    """Give XGLM its sinusoids at positions divided by the factor."""
    table = next(m for m in model.modules() if "Sinusoidal" in type(m).__name__)
    half = WIDTH // 2
    waves = torch.exp(torch.arange(half) * -(math.log(10000) / (half - 1)))
    places = table.offset + (torch.arange(-table.offset, LENGTH * factor) / factor)
    angles = places[:, None] * waves
    table.weights = torch.cat([angles.sin(), angles.cos()], 1)


def bucketed(model: Any, factor: int, method: str) -> None:
    """Give T5 a larger maximum distance, or buckets of distances divided by the factor."""
    if method == "max-distance":
        ropext.patch(model.stack, method=method, factor=factor)
        return
    for module in model.modules():
        if not hasattr(module, "relative_attention_max_distance"):
            continue
        stock = module._relative_position_bucket

        def divided(distance: torch.Tensor, *, stock: Any = stock, **named: Any) -> torch.Tensor:
            near = torch.div(distance, factor, rounding_mode="trunc")
            bucket: torch.Tensor = stock(near, **named)
            return bucket

        module._relative_position_bucket = divided


EXTENSIONS: dict[str, tuple[Callable[[Any, int, str], None], tuple[str, ...]]] = {
    "learned": (grown, ("linear", "copy", "random")),
    "rope": (patched, ("yarn", "ntk", "pi")),
    "alibi": (patched, ("interpolated", "ntk-alibi")),
    "sinusoidal": (slowed, ("interpolated",)),
    "buckets": (bucketed, ("divided", "max-distance")),
}
TUNED = (
    ("learned", "linear"), ("learned", "copy"), ("rope", "yarn"), ("alibi", "interpolated"),
    ("sinusoidal", "interpolated"), ("buckets", "divided"),
)  # fmt: skip


def piece(work: Path, name: str, make: Callable[[], Any]) -> Any:
    """Return a result that is made once."""
    kept = work / f"{name}.json"
    if not kept.exists():
        print(name, flush=True)
        found = make()
        kept.with_suffix(".part").write_text(json.dumps(found))
        kept.with_suffix(".part").rename(kept)
    return json.loads(kept.read_text())


def read_untouched(scheme: str, bench: Bench) -> dict[str, list[float]]:
    model = trained(scheme, bench)
    return {str(f): bench.tails(model, f) for f in FACTORS}


def read_extended(scheme: str, method: str, bench: Bench) -> dict[str, list[float]]:
    """Return the tail at each length by the extension to it, and at 1x by the extension to 4x: its
    short tax."""
    extend, out = EXTENSIONS[scheme][0], {}
    for factor in FACTORS[1:]:
        model = trained(scheme, bench)
        extend(model, factor, method)
        out[str(factor)] = bench.tails(model, factor)
        if factor == TUNE_FACTOR:
            out["1"] = bench.tails(model, 1)
    return out


def read_tuned(scheme: str, method: str, bench: Bench) -> dict[str, list[float]]:
    """Return the tails of the extension to 4x after its training there, at every length up to
    it."""
    model = trained(scheme, bench)
    EXTENSIONS[scheme][0](model, TUNE_FACTOR, method)
    train(model, bench.texts, TUNE_STEPS, bench.tune_rows, LENGTH * TUNE_FACTOR, TUNE_RATE)
    torch.save(model.state_dict(), bench.work / f"{scheme}-{method}-tuned.pt")
    return {str(f): bench.tails(model, f) for f in FACTORS if f <= TUNE_FACTOR}


def readings(schemes: Sequence[str], bench: Bench) -> dict[str, dict[str, list[float]]]:
    """Return every reading by its name; the most important ones run first."""
    out = {}
    for scheme in schemes:
        out[scheme] = piece(bench.work, scheme, partial(read_untouched, scheme, bench))
    for scheme, method in TUNED:
        if scheme in schemes:
            make = partial(read_tuned, scheme, method, bench)
            out[f"{scheme}, {method}, tuned"] = piece(bench.work, f"{scheme}-{method}-tuned", make)
    for scheme in schemes:
        for method in EXTENSIONS[scheme][1]:
            make = partial(read_extended, scheme, method, bench)
            out[f"{scheme}, {method}"] = piece(bench.work, f"{scheme}-{method}", make)
    return out


def cell(values: list[float] | None, base: list[float]) -> str:
    """Mean loss in nats, and its paired difference from the in-window value of the same tokens."""
    if not values:
        return "-"
    apart = np.array(values) - np.array(base)
    error = apart.std(ddof=1) / math.sqrt(len(apart))
    return f"{np.mean(values):.3f} ({apart.mean():+.3f} ± {error:.3f})"


def report(found: dict[str, dict[str, list[float]]]) -> str:
    """Return the table in Markdown."""
    head = ["", *(f"{factor}x" for factor in FACTORS)]
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    for name in sorted(found, key=lambda n: (SCHEMES.index(n.split(",")[0]), n.count(","), n)):
        base = found[name.split(",")[0]]["1"]
        cells = [cell(found[name].get(str(factor)), base) for factor in FACTORS]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def draw(found: dict[str, dict[str, list[float]]], path: Path, bench: Bench) -> None:
    """Draw the loss by length: untouched, extended, tuned; and how alike positions are."""
    from matplotlib.figure import Figure

    from ropext.results.report.plots import row_similarity

    figure = Figure(figsize=(16, 9), dpi=100)
    figure.set_layout_engine("constrained")
    schemes = [scheme for scheme in SCHEMES if scheme in found]
    panels = figure.subplots(2, len(schemes), squeeze=False)
    lengths = [LENGTH * factor for factor in FACTORS]
    means = [float(np.mean(own)) for one in found.values() for own in one.values() if own]
    least, most = min(means), max(means)
    for axis, scheme in zip(panels[0], schemes, strict=True):
        for name, own in found.items():
            if name.split(",")[0] != scheme:
                continue
            points = [(n, np.mean(own[str(f)])) for n, f in zip(lengths, FACTORS, strict=True)
                      if own.get(str(f))]  # fmt: skip
            label = name.partition(", ")[2] or "untouched"
            axis.plot(*zip(*points, strict=True), marker="o", label=label)
        axis.set_xscale("log", base=2)
        axis.set_ylim(least - 0.1, min(8, most + 0.1))
        axis.set_title(scheme)
        axis.set_xlabel("tokens")
        axis.legend(fontsize=8)
    panels[0][0].set_ylabel("loss of the last 64 tokens (nats)")
    for axis, scheme in zip(panels[1], schemes, strict=True):
        alike, title = likeness(scheme, trained(scheme, bench), row_similarity)
        axis.imshow(alike, cmap="RdBu_r", extent=(0, LENGTH, LENGTH, 0))
        axis.set_title(title, fontsize=9)
    figure.savefig(path)


def likeness(scheme: str, model: Any, similarity: Any) -> tuple[np.ndarray[Any, Any], str]:
    """Return each scheme's similarity of two positions, for one head if heads differ."""
    apart = np.arange(LENGTH)[:, None] - np.arange(LENGTH)[None]
    if scheme == "learned":
        rows = model.model.transformer.wpe.weight.detach().double().numpy()
        return similarity(rows), "cosine of two rows"
    if scheme == "sinusoidal":
        table = next(m for m in model.modules() if "Sinusoidal" in type(m).__name__)
        rows = table.weights[2 : LENGTH + 2].double().numpy()
        return similarity(rows), "cosine of two sinusoids"
    if scheme == "rope":
        dim = WIDTH // HEADS
        waves = 10000.0 ** (-np.arange(0, dim, 2) / dim)
        return np.cos(apart[..., None] * waves).mean(-1), "mean cosine of the rotations"
    if scheme == "alibi":
        return np.where(apart >= 0, -np.abs(apart) * 2.0 ** (-8 / HEADS), np.nan), "bias, head 1"
    attention = model.stack.block[0].layer[0].SelfAttention
    bias = attention.compute_bias(LENGTH, LENGTH)[0].detach().double().numpy().mean(0)
    return np.where(apart >= 0, bias, np.nan), "learned bias, mean of heads"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("texts", type=Path)
    parser.add_argument("held_out", type=Path)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--schemes", nargs="+", choices=SCHEMES, default=SCHEMES)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--tune-rows", type=int, default=1)
    parser.add_argument("--report", type=Path)
    parser.add_argument("--plot", type=Path)
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    texts, held_out = (tokens_of(own, given.work) for own in (given.texts, given.held_out))
    bench = Bench(texts, held_out, given.work, given.steps, given.tune_rows)
    found = readings(given.schemes, bench)
    table = report(found)
    print(table)
    if given.report is not None:
        given.report.write_text(table, encoding="utf-8")
    if given.plot is not None:
        draw(found, given.plot, bench)


if __name__ == "__main__":
    main()
