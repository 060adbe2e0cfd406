"""Write a trained run as a stock checkpoint:
`python -m scripts.demo_checkpoint.export --run DIR --out DIR`."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from scripts.demo_checkpoint.train import CONTEXT, STAGES, Progress, new_model

DIRECTORY = Path(__file__).parents[2] / "ropext/demo/checkpoint"
CARD = """\
---
license: apache-2.0
tags: [ropext, demo]
---
# The demo checkpoint of ropext

A Llama of {parameters:,} parameters (4 layers, hidden 128, 4 heads of 32, tied embeddings; trained
context {context}, theta 10000), trained from scratch so that extending a context window can be
shown on any machine without a network. It is good for nothing else.

## Training
- Text: the sources of the standard library of Python {python}, near-duplicate files dropped, split
  by package ({stream:,} training tokens; the held-out packages are listed in `../data/README.md`).
- **Retrieval was trained.** Rows that state keys and ask for them, and rows that repeat a span,
  were mixed in with the loss on their answers only. A real model learns this from the web; this
  one would not in so few tokens. Its retrieval scores show what an extension keeps or loses, not
  what pretraining gives.
- Held out from training, and measured beside the trained formats: the wording "{held_out}",
  its filler sentences, random words as filler, and all text of the held-out packages.
- {tokens:,} tokens in {steps:,} steps, seed {seed}:
  {stages}.
  The next window began once at least 85 % of fresh passkeys were found at the last.
- Losses at the last check, on fresh rows of the training text (nats per scored token):
  {losses}.
- Machine: {machine}; torch {torch}; {hours:.1f} hours.
- Remade by
  `python -m scripts.demo_checkpoint.train --out RUN --seed {seed} --tokens {budget}{flag}` and
  `python -m scripts.demo_checkpoint.export --run RUN --out DIR`.

## What it does
`benchmarks/results/demo-checkpoint-2026-11-21.md` in the repository has the measurement: loss by
position on held-out packages and passkeys by length, untouched and under each extension method.
"""


def read_log(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


def stages_in_words(log: list[dict[str, Any]]) -> str:
    """Return at which token count each window began."""
    begun: dict[int, int] = {}
    for entry in log:
        if "window" in entry:
            begun.setdefault(entry["window"], entry["tokens"] - entry["stage_tokens"])
    return ", ".join(
        f"windows of {stage.window} from {begun[stage.window] / 1e6:.1f}M tokens on"
        for stage in STAGES
        if stage.window in begun
    )


def write_card(run: Path, out: Path, seed: int, progress: Progress, parameters: int) -> None:
    from scripts.demo_checkpoint.rows import HELD_OUT_PASSKEY

    log = read_log(run)
    start = [entry for entry in log if entry.get("event") == "start"][-1]
    checks = [entry for entry in log if "window" in entry and entry["step"] <= progress.step]
    last = checks[-1]
    losses = ", ".join(f"{kind} {last[kind]:.3f}" for kind in asdict(STAGES[0].mixture))
    card = CARD.format(
        parameters=parameters,
        context=CONTEXT,
        python=start["python"],
        stream=start["stream"],
        held_out=HELD_OUT_PASSKEY.ask.strip().replace("{key}", "…"),
        tokens=progress.tokens,
        steps=progress.step,
        seed=seed,
        stages=stages_in_words(log),
        losses=losses,
        machine=start["machine"],
        torch=start["torch"],
        hours=progress.seconds / 3600,
        budget=start["budget"],
        flag=" --compile" if start.get("compiled") else "",
    )
    (out / "README.md").write_text(card, encoding="utf-8")


def spell_for_both_majors(path: Path) -> None:
    """Let transformers 4 read the config too: it knows `rope_theta`, not `rope_parameters`."""
    config = json.loads(path.read_text(encoding="utf-8"))
    config["rope_theta"] = config["rope_parameters"]["rope_theta"]
    config["rope_scaling"] = None
    config["torch_dtype"] = config.get("dtype", "float32")
    path.write_text(json.dumps(dict(sorted(config.items())), indent=2) + "\n", encoding="utf-8")


def export(run: Path, out: Path, seed: int) -> None:
    from transformers import AutoTokenizer

    state = torch.load(run / "state.pt", weights_only=True)
    model = new_model(seed)
    model.load_state_dict(state["model"])
    model.generation_config.bos_token_id = None
    out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)
    spell_for_both_majors(out / "config.json")
    AutoTokenizer.from_pretrained(run / "tokenizer").save_pretrained(out)
    tokenizer_config = out / "tokenizer_config.json"
    entries = json.loads(tokenizer_config.read_text())
    entries["tokenizer_class"] = "PreTrainedTokenizerFast"  # the name that both majors know
    for machine_key in ("is_local", "local_files_only"):
        entries.pop(machine_key, None)
    tokenizer_config.write_text(json.dumps(entries, indent=2) + "\n")
    write_card(run, out, seed, Progress(**state["progress"]), model.num_parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a trained run as a stock checkpoint.")
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=DIRECTORY)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    export(options.run, options.out, options.seed)


if __name__ == "__main__":
    main()
