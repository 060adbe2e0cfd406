"""Train the demo checkpoint from scratch:
`python -m scripts.demo_checkpoint.train --out DIR --seed 0`.

Seeded and resumable: every step's rows follow from the seed and the step, and the state is saved
as training goes; the same command continues. Windows grow with competence: attention learns to find
a key at 64 tokens in a few million tokens, and at 256 from scratch not at all.
"""

import argparse
import json
import math
import os
import platform
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from ropext.tasks import Encoder, Haystack, passkey, repetition
from ropext.tasks.item import ItemRequest
from scripts.demo_checkpoint.rows import Mixture, Row, RowMaker, batch_rows
from scripts.demo_checkpoint.sources import library, read_documents, split
from scripts.demo_checkpoint.tokenizer import VOCABULARY, CachedEncoder, train_tokenizer

CONTEXT = 256
STEP_TOKENS = 6144
PEAK_RATE = 2e-3
WARM_UP = 200  # steps
DECAY_FROM = 0.6  # share of the token budget
WEIGHT_DECAY = 0.05
CHECK_EVERY = 100  # steps
SAVE_EVERY = 300  # steps
COMPETENT = 0.85
STAGE_LIMIT = 0.2  # share of the token budget: a window that is not learned by then is left anyway


@dataclass(frozen=True)
class Stage:
    """A window, and the mixture trained at it."""

    window: int
    mixture: Mixture


LEARNING = Mixture(text=0.20, dense=0.25, passkey=0.25, repeat=0.30)
STAGES = (
    Stage(64, LEARNING),
    Stage(128, LEARNING),
    Stage(CONTEXT, Mixture(text=0.55, dense=0.10, passkey=0.20, repeat=0.15)),
)


@dataclass
class Progress:
    """The state of a training."""

    step: int = 0
    tokens: int = 0
    stage: int = 0
    stage_tokens: int = 0
    seconds: float = 0.0


def new_model(seed: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(  # type: ignore[call-arg]  # attn_implementation, by **kwargs
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=336,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config)


def rate_at(progress: Progress, budget: int) -> float:
    done = progress.tokens / budget
    warm = min(1.0, (progress.step + 1) / WARM_UP)
    return PEAK_RATE * warm * min(1.0, max(0.0, (1.0 - done) / (1.0 - DECAY_FROM)))


def rows_loss(model: Any, body: Any, rows: list[Row]) -> torch.Tensor:
    """Return the mean over rows of each row's mean loss on its scored tokens.

    `body` is the model's own, or a compiled one. The head runs on scored positions only: most rows
    have few.
    """
    tokens = torch.tensor([row.tokens for row in rows])
    at_row = [i for i, row in enumerate(rows) for _ in row.scored]
    at_token = torch.tensor([position for row in rows for position in row.scored])
    weights = torch.tensor([1.0 / len(row.scored) for row in rows for _ in row.scored])
    hidden = body(input_ids=tokens, use_cache=False).last_hidden_state
    index = torch.tensor(at_row)
    logits = model.lm_head(hidden[index, at_token - 1])
    losses = functional.cross_entropy(logits, tokens[index, at_token], reduction="none")
    return (losses * weights).sum() / len(rows)


@torch.no_grad()
def find_rate(model: Any, encoder: Encoder, hay: Haystack, window: int, step: int) -> float:
    """Return the share of 64 fresh passkeys at `window` that greedy decoding would give."""
    depths = tuple((i + 0.5) / 64 for i in range(64))
    items = passkey.passkey_items(encoder, hay, ItemRequest(window, depths, step, seed=-1))
    tokens = torch.tensor([[*item.prompt, *item.answer] for item in items])
    hidden = model.model(input_ids=tokens, use_cache=False).last_hidden_state
    size = len(items[0].answer)
    best = model.lm_head(hidden[:, -size - 1 : -1]).argmax(-1)
    return float((best == tokens[:, -size:]).all(-1).float().mean())


class Trainer:
    """Model, optimiser, data and progress of one run in one folder."""

    def __init__(
        self, out: Path, maker: RowMaker, *, seed: int, budget: int, compiled: bool = False
    ) -> None:
        self.out, self.maker, self.seed, self.budget = out, maker, seed, budget
        self.model = new_model(seed)
        self.body = torch.compile(self.model.model) if compiled else self.model.model
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=PEAK_RATE,
            betas=(0.9, 0.95),
            weight_decay=WEIGHT_DECAY,
            fused=True,
        )
        self.progress = Progress()
        self.losses: dict[str, float] = {}
        if self.state_file.is_file():
            state = torch.load(self.state_file, weights_only=True)
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.progress = Progress(**state["progress"])

    @property
    def state_file(self) -> Path:
        return self.out / "state.pt"

    def save(self) -> None:
        partial = self.state_file.with_suffix(".partial")
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "progress": asdict(self.progress),
        }
        torch.save(state, partial)
        os.replace(partial, self.state_file)

    def log(self, **entry: Any) -> None:
        line = json.dumps({**asdict(self.progress), **entry})
        with (self.out / "log.jsonl").open("a") as file:
            file.write(line + "\n")
        sys.stderr.write(line + "\n")

    def run(self) -> None:
        while self.progress.tokens < self.budget:
            started = time.monotonic()
            loss = self.step()
            self.progress.seconds += time.monotonic() - started
            if not math.isfinite(loss):
                raise FloatingPointError(f"loss is {loss} at step {self.progress.step}")
            if self.progress.step % CHECK_EVERY == 0:
                self.check(loss)
            if self.progress.step % SAVE_EVERY == 0:
                self.save()
        self.save()

    def step(self) -> float:
        progress, stage = self.progress, STAGES[self.progress.stage]
        share = progress.tokens / self.budget
        count = STEP_TOKENS // stage.window
        rows = batch_rows(
            self.maker, stage.mixture, stage.window, count, share, self.seed, progress.step
        )
        for group in self.optimizer.param_groups:
            group["lr"] = rate_at(progress, self.budget)
        loss = rows_loss(self.model, self.body, rows)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        progress.step += 1
        progress.tokens += count * stage.window
        progress.stage_tokens += count * stage.window
        return float(loss.detach())

    def check(self, loss: float) -> None:
        """Log losses by kind, and go to the next window when this one is learned."""
        progress = self.progress
        window = STAGES[progress.stage].window
        found = find_rate(
            self.model, self.maker.encoder, repetition(self.maker.encoder), window, progress.step
        )
        found_in_text = find_rate(
            self.model, self.maker.encoder, self.maker.text, window, progress.step
        )
        with torch.no_grad():
            for kind in ("text", "dense", "passkey", "repeat"):
                only = Mixture(**{k: float(k == kind) for k in asdict(STAGES[0].mixture)})
                rows = batch_rows(self.maker, only, window, 16, 0.0, -1, progress.step)
                self.losses[kind] = round(float(rows_loss(self.model, self.model.model, rows)), 4)
        self.log(
            window=window, loss=round(loss, 4), found=found, in_text=found_in_text, **self.losses
        )
        learned = min(found, found_in_text) >= COMPETENT
        late = progress.stage_tokens > STAGE_LIMIT * self.budget
        if progress.stage + 1 < len(STAGES) and (learned or late):
            progress.stage += 1
            progress.stage_tokens = 0


def prepare(out: Path) -> RowMaker:
    """Return the maker of rows from the standard library of the running interpreter; its tokenizer
    is trained and saved first."""
    from transformers import AutoTokenizer

    documents, _ = split(read_documents(library()))
    folder = out / "tokenizer"
    if not (folder / "tokenizer.json").is_file():
        train_tokenizer([document.text for document in documents]).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids: list[int] = []
    for document in documents:
        ids += tokenizer.backend_tokenizer.encode(document.text).ids
        ids.append(tokenizer.eos_token_id)
    lines = sorted(
        {
            line.strip() + "\n"
            for document in documents
            for line in document.text.splitlines()
            if 20 <= len(line.strip()) <= 80
        }
    )
    stream: Any = np.array(ids, dtype=np.uint16)
    return RowMaker(CachedEncoder(tokenizer), stream, VOCABULARY, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the demo checkpoint from scratch.")
    parser.add_argument(
        "--out", type=Path, required=True, help="folder of the run, resumed if used"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=50_000_000, help="the budget, in tokens")
    parser.add_argument(
        "--compile", action="store_true", help="a sixth faster; needs a C++ compiler"
    )
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(
        options.out,
        prepare(options.out),
        seed=options.seed,
        budget=options.tokens,
        compiled=options.compile,
    )
    trainer.log(
        event="start",
        budget=options.tokens,
        compiled=options.compile,
        stream=len(trainer.maker.stream),
        machine=f"{platform.machine()} CPU, {torch.get_num_threads()} thread(s)",
        python=platform.python_version(),
        torch=torch.__version__,
    )
    trainer.run()


if __name__ == "__main__":
    main()
