"""Compare the default length of a fine-tuning with fixed numbers of steps.

Claims, on texts of 0.1M, 0.4M and 2M tokens: the default ends at most 5 % above the best of
`--steps 50`, 100, 200 and 400. The measure is perplexity of the last tokens at the target, on
documents that no training read. The default does not overfit its held-out documents: it keeps the
step with their lowest loss.

    python benchmarks/finetune_steps.py --work DIR --model ropext://demo --tokens 100000
    python benchmarks/finetune_steps.py --work DIR --model llama --data BOOKS
        [--tokens 100000 400000 2000000] [--steps default 50 100 200 400]

Both models are extended to 4 times their context of 256 by YaRN. Without --data the text is the
bundled one (0.2M tokens), and the bundled held-out documents judge. BOOKS is a folder of .txt
files: the first third of them (by name) trains `llama`, a Llama of 0.1M parameters that reads
characters, which this script makes. The others are cut into documents of 5,000 tokens, 32 of which
judge. An interrupt (Ctrl-C) keeps finished work, and the same command resumes.
"""

import argparse
import gc
import json
import math
import platform
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as hf

import ropext
from ropext.base.bundled import DATA, MODELS
from ropext.evaluation import corpus
from ropext.evaluation.variants import Variant
from ropext.evaluation.workload import Workload
from ropext.files.checkpoint import open_snapshot
from ropext.results import rules
from ropext.training import data, judge

CONTEXT, FACTOR, JUDGING, DOCUMENT = 256, 4, 32, 5000
BASE_TOKENS, BASE_RATE = 4096, 3e-3
WAYS = ("default", "50", "100", "200", "400")


def told(sentence: str) -> None:
    sys.stderr.write(sentence + "\n")


def characters(context: int) -> Any:
    """Make a tokenizer of printable characters."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    kinds = ["<unk>", "<eos>", *map(chr, range(32, 127)), "\n"]
    made = Tokenizer(models.WordLevel({own: at for at, own in enumerate(kinds)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made.decoder = decoders.Fuse()
    named: dict[str, Any] = {"unk_token": "<unk>", "eos_token": "<eos>", "pad_token": "<eos>"}
    return hf.PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=context, **named)


def make_llama(
    texts: Sequence[str], folder: Path, context: int = CONTEXT, width: int = 64, steps: int = 1000
) -> None:
    """Train a Llama on characters, 4,096 a step; AdamW with a warm-up of a twentieth and a cosine
    down to a tenth."""
    tokenizer = characters(context)
    kinds = tokenizer.get_vocab()
    ids = np.array([kinds.get(own, 0) for own in "".join(texts)])
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "hidden_size": width,
        "intermediate_size": 3 * width,
        "num_hidden_layers": 2,
    }
    heads: dict[str, Any] = {
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
    }
    special: dict[str, Any] = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 1}
    config = hf.LlamaConfig(
        vocab_size=len(kinds), max_position_embeddings=context, **shape, **heads, **special
    )
    model: Any = hf.LlamaForCausalLM(config)
    rates: dict[str, Any] = {"lr": BASE_RATE, "betas": (0.9, 0.95), "weight_decay": 0.01}
    optimiser = torch.optim.AdamW(model.parameters(), **rates)
    rng = np.random.default_rng(0)
    for step in range(steps):
        warm = min(1.0, (step + 1) / (steps / 20))
        scale = warm * (0.1 + 0.45 * (1 + math.cos(math.pi * step / steps)))
        for group in optimiser.param_groups:
            group["lr"] = BASE_RATE * scale
        starts = rng.integers(0, len(ids) - context - 1, BASE_TOKENS // context)
        rows = torch.from_numpy(np.stack([ids[own : own + context] for own in starts]))
        loss = model(input_ids=rows, labels=rows).loss
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        if step % 100 == 99:
            told(f"llama, step {step + 1} of {steps}: {loss.item():.4f}")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def passages(texts: Sequence[str], tokenizer: Any) -> list[str]:
    """Documents of 5,000 tokens, in a drawn order."""
    found = []
    for text in texts:
        ends = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        begins = [begin for begin, _ in ends["offset_mapping"]]
        cuts = range(0, len(begins) - DOCUMENT, DOCUMENT)
        found += [text[begins[at] : begins[at + DOCUMENT]] for at in cuts]
    return [found[at] for at in np.random.default_rng(1).permutation(len(found))]


def texts_of(place: Path) -> list[str]:
    lines = place.read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["text"] for line in lines]


def enough(texts: Sequence[str], tokenizer: Any, tokens: int) -> list[str]:
    """Return the first documents that hold so many tokens."""
    found: list[str] = []
    held = 0
    for text in texts:
        if held >= tokens:
            return found
        found.append(text)
        held += len(tokenizer(text, add_special_tokens=False)["input_ids"])
    if held < 0.9 * tokens:
        sys.exit(f"--tokens {tokens}: the text holds {held}; name more with --data")
    return found


def judging_workload(tokenizer: Any, texts: Sequence[str]) -> Workload:
    encoder = corpus.DocumentEncoder(tokenizer, None, 0)
    long = (encoder.document(f"{at}", text, DOCUMENT) for at, text in enumerate(texts))
    target = CONTEXT * FACTOR
    documents = [own.cut(target) for own in long if len(own) >= target][:JUDGING]
    return data.judging_workload(documents, (CONTEXT, target), 0)


def tail(own: Workload, place: Path) -> float:
    """Return the nats per token of the last tokens before the target, on the checkpoint that stock
    transformers loads."""
    model = hf.AutoModelForCausalLM.from_pretrained(place).eval()
    variant = Variant("own", "extended", open_snapshot(str(place)))
    return rules.tail_loss(judge.read_in_training(model, variant, own), variant.label)


def trained(extended: Path, data: Path, way: str, own: Workload, folder: Path) -> dict[str, Any]:
    """Run one training, and return its numbers."""
    asked: dict[str, Any] = {} if way == "default" else {"steps": int(way)}
    done = ropext.finetune(extended, str(data), folder / "out", force=True, say=told, **asked)
    found = {
        "way": way,
        "steps": done.steps,
        "kept": done.kept_step,
        "passes": done.passes,
        "documents": done.training.judging_count,
        "held_out": [[int(e["step"]), round(e["held_out"], 4)] for e in done.evaluations],
        "tail": tail(own, folder / "out"),
    }
    shutil.rmtree(folder / "out")
    gc.collect()
    return found


def table(rows: Sequence[dict[str, Any]], untuned: float) -> str:
    """Return one cell: every length compared with the best."""
    best = min(own["tail"] for own in rows)
    names = "steps, kept; passes; held-out loss: kept, lowest, last; tail loss; above the best"
    lines = [f"| | {names.replace('; ', ' | ')} |"]
    lines += ["|---" * 6 + "|", f"| extended, not trained | | | | {untuned:.4f} | |"]
    for own in rows:
        losses = dict(own["held_out"])
        ends = [losses.get(own["kept"]), min(losses.values(), default=None), own["held_out"][-1][1]]
        shown = ", ".join("" if value is None else f"{value:.4f}" for value in ends)
        above = math.expm1(own["tail"] - best)
        lines.append(
            f"| {own['way']} | {own['steps']}, {own['kept']} | {own['passes']:.1f} | {shown} "
            f"| {own['tail']:.4f} | {above:+.1%} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="ropext://demo")
    parser.add_argument("--data", type=Path, help="folder of books, .txt")
    parser.add_argument("--tokens", type=int, nargs="+", default=[100_000])
    parser.add_argument("--steps", nargs="+", default=WAYS, choices=WAYS)
    parser.add_argument("--work", type=Path, required=True)
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    print(f"{platform.machine()}, torch {torch.__version__}, transformers {hf.__version__}\n")
    books = [
        own.read_text(encoding="utf-8") for own in sorted((given.data or Path()).glob("*.txt"))
    ]
    third = len(books) // 3
    place = given.work / "llama" if given.model == "llama" else Path(MODELS[given.model])
    if given.model == "llama" and not place.exists():
        make_llama(books[:third], place)
    extended = given.work / f"{place.name}-{FACTOR}x"
    if not extended.exists():
        ropext.extend(str(place), extended, method="yarn", factor=FACTOR, no_verify=True)
    tokenizer = hf.AutoTokenizer.from_pretrained(place)
    if given.data is None:
        texts, judging = (texts_of(DATA[f"ropext://{name}"]) for name in ("tuning", "held-out"))
    else:
        cut = passages(books[third:], tokenizer)
        texts, judging = cut[JUDGING:], cut[:JUDGING]
    own = judging_workload(tokenizer, judging)
    untuned = tail(own, extended)
    for tokens in given.tokens:
        folder = given.work / f"{place.name}-{tokens}{'' if given.data is None else '-books'}"
        folder.mkdir(exist_ok=True)
        data = folder / "data.jsonl"
        lines = [json.dumps({"text": text}) for text in enough(texts, tokenizer, tokens)]
        data.write_text("\n".join(lines) + "\n", encoding="utf-8")
        rows = []
        for way in given.steps:
            kept = folder / f"{way}.json"
            if not kept.exists():
                found = trained(extended, data, way, own, folder)
                kept.write_text(json.dumps(found) + "\n", encoding="utf-8")
            rows.append(json.loads(kept.read_text(encoding="utf-8")))
        print(f"\n## {given.model}, {tokens:,} tokens in {len(lines)} documents\n")
        print(f"{len(own.documents)} documents judge.\n\n{table(rows, untuned)}", flush=True)


if __name__ == "__main__":
    main()
