"""Measure large inputs in the memory of small ones: resident memory at its highest.

Claims: a search of a million short documents for long ones takes the memory of a search of ten
thousand. An evaluation of 256 documents of 4,096 tokens takes the memory of one of 8 documents. One
document of 131,072 tokens takes at most four times the memory of 32,768 tokens. (A checkpoint of
100 GB by link: benchmarks/extend.py.)

    OMP_NUM_THREADS=1 python benchmarks/load.py [--only corpus,many,long] [--folder DIR]

The model is a random Llama of two layers and 32 channels. Each case has a process of its own, and
"grown" counts from its level after a small search, or a small evaluation with its report.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

CONTEXT = 2048
WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "lazy", "dog", "and", "runs")
CASES = {
    "corpus": ((10_000,), (1_000_000,)),  # documents
    "many": ((8, 4096), (256, 4096)),  # documents, tokens
    "long": ((1, 32_768), (1, 131_072)),
}


def resident(name: str) -> int:
    """Return VmRSS (now) or VmHWM (highest since it was last reset), in bytes. Linux."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) * 1024


def highest(work: Callable[[], Any]) -> tuple[Any, dict[str, int]]:
    """Return the work's result, and how far resident memory rises during it."""
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # resets VmHWM
    found = work()
    peak = resident("VmHWM")
    return found, {"peak": peak, "grown": peak - before}


def write_corpus(path: Path, count: int, words: int, long_ones: int = 0) -> None:
    """Write `count` documents of `words` words; every (count / long_ones)-th has a hundred times
    that."""
    every = count // long_ones if long_ones else count + 1
    with path.open("w", encoding="utf-8") as out:
        for number in range(count):
            length = words * 100 if number % every == every - 1 else words
            text = " ".join(random.Random(number).choices(WORDS, k=length))
            out.write(json.dumps({"text": text}) + "\n")


def write_model(directory: Path) -> None:
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    vocabulary = {word: k for k, word in enumerate(("<s>", "</s>", "<unk>", *WORDS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(directory)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
    )
    LlamaForCausalLM(config).save_pretrained(directory)


def corpus_case(folder: Path, count: int) -> dict[str, Any]:
    """Run an evaluation's search for documents that are long enough."""
    from ropext.evaluation.corpus import (
        DocumentEncoder,
        Source,
        Wanted,
        choose_documents,
        read_documents,
    )
    from ropext.files.checkpoint import open_snapshot
    from ropext.models.tokenizer import load_tokenizer

    small, path = folder / "small.jsonl", folder / f"{count}.jsonl"
    write_corpus(small, 100, 12, long_ones=2)
    write_corpus(path, count, 12, long_ones=16)
    tokenizer = load_tokenizer(open_snapshot(str(folder / "model")), False)

    def search(file: Path) -> Any:
        encoder, wanted = DocumentEncoder(tokenizer, 13, 0), Wanted((512,), True, 16)
        return choose_documents(read_documents(Source(str(file))), encoder, wanted)

    search(small)
    found, memory = highest(lambda: search(path))
    told = {"read": found.num_read, "kept": len(found.documents), "bytes": os.path.getsize(path)}
    return told | memory


def reading_case(folder: Path, count: int, tokens: int) -> dict[str, Any]:
    """Run `ropext eval`, whole, with its report."""
    import torch

    from ropext.pipeline.public import evaluate

    torch.set_num_threads(1)
    model, path = str(folder / "model"), folder / f"{count}-{tokens}.jsonl"
    write_corpus(folder / "small.jsonl", 1, 520)
    write_corpus(path, count, tokens + 8)
    more: dict[str, Any] = {"max_docs": count, "device": "cpu"}
    warm = folder / f"warm-{count}-{tokens}"
    evaluate(model, warm, data=str(folder / "small.jsonl"), lengths=(512,), **more)
    more |= {"data": str(path), "lengths": (tokens,)}
    done, memory = highest(lambda: evaluate(model, folder / f"run-{count}-{tokens}", **more))
    kept = len(done.documents or ())
    told = {"read": count, "kept": kept, "bytes": os.path.getsize(path)}
    return told | memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(CASES))
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--case", help="(for the child process)")
    given = parser.parse_args()
    if given.case:
        kind, *numbers = json.loads(given.case)
        case = corpus_case if kind == "corpus" else reading_case
        print(json.dumps(case(given.folder, *numbers)))
        return
    print("| case | documents | tokens | input, MB | peak, MB | grown, MB | ratio |")
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        write_model(Path(folder) / "model")
        for kind in given.only.split(","):
            first = 0.0
            for numbers in CASES[kind]:
                words = [sys.executable, __file__, "--folder", folder]
                words += ["--case", json.dumps([kind, *numbers])]
                done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
                found = json.loads(done.stdout.splitlines()[-1])
                first = first or found["peak"]
                cells = [kind, f"{found['kept']} of {found['read']}"]
                cells += [str(numbers[1]) if numbers[1:] else "12 to 1200"]
                cells += [f"{found[key] / 1e6:.1f}" for key in ("bytes", "peak", "grown")]
                print(
                    "| " + " | ".join([*cells, f"{found['peak'] / first:.2f}"]) + " |", flush=True
                )


if __name__ == "__main__":
    main()
