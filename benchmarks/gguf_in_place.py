"""GGUF: llama.cpp computes the planned spectrum, and an extension costs as much as a copy.

Claims: for six forms on the bundled model as an F32 GGUF, llama.cpp's perplexity at 4 times the
context equals stock transformers' on the extended directory to 4 digits. The unscaled file is far
off. A 20-GB file is extended in at most 1.1 times the time of `cp` and in under 100 MB.

    python benchmarks/gguf_in_place.py forms --engine PYTHON_WITH_LLAMA_CPP [--documents 4]
    python benchmarks/gguf_in_place.py real --engine PYTHON --model Q4_1.gguf --text BOOK.txt
        [--like FITTED]
    python benchmarks/gguf_in_place.py perplexity --tools BIN [--kind Q4_1 --documents 64]
    python benchmarks/gguf_in_place.py copy [--gigabytes 20 --filled 2 --rounds 3] [--room DIR]
"""

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import ropext
from ropext.base import bundled

# In a process of its own: a child begins with the memory of what forked it.
MEASURED = """import resource, subprocess, sys, time
begun = time.perf_counter()
subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)
print(time.perf_counter() - begun, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"""
ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))
READERS = ROOT / "scripts" / "loaders"
DEMO = bundled.MODELS["ropext://demo"]
CONTEXT, TARGET = 256, 1024
PAIRS = 16


def fitted() -> tuple[float, ...]:
    """Draw one divisor per pair, as a fit finds them: no formula's, growing with the wavelength."""
    draw = np.random.default_rng(0)
    return tuple((np.linspace(1, 4, PAIRS) ** 1.2 * draw.uniform(0.9, 1.1, PAIRS)).tolist())


FORMS: dict[str, dict[str, Any]] = {
    "theta": {"method": "ntk"},
    "linear": {"method": "pi"},
    "yarn": {"method": "yarn"},
    "yarn, its own attention factor and betas": {
        "method": "yarn",
        "attention_factor": 1.3,
        "beta_fast": 8.0,
        "beta_slow": 0.5,
    },
    "Llama-3-like (rope_freqs)": {"method": "llama3"},
    "one divisor per pair (rope_freqs)": {
        "method": "longrope",
        "pair_factors": fitted(),
        "attention_factor": 1.1,
    },
}


def documents(count: int) -> list[list[int]]:
    """Tokens of the held-out documents that are long enough."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    lines = bundled.DATA["ropext://held-out"].read_text("utf-8").splitlines()
    rows = (tokenizer(json.loads(line)["text"]).input_ids for line in lines)
    return [row[:TARGET] for row in rows if len(row) >= TARGET][:count]


def losses(python: str, reader: str, rows: list[list[int]], places: list[Path]) -> dict[str, float]:
    """Mean negative log-probability of every token but the first, by place."""
    sums = dict.fromkeys(map(str, places), 0.0)
    with tempfile.TemporaryDirectory() as folder:
        for row in rows:
            ids, out = Path(folder, "ids.npy"), Path(folder, "out.npz")
            np.save(ids, np.array(row))
            words = [python, str(READERS / reader), str(ids), str(out), *map(str, places)]
            subprocess.run(words, check=True, capture_output=True)
            with np.load(out) as told:
                for place in sums:
                    sums[place] -= float(told[place].mean())
    return {place: total / len(rows) for place, total in sums.items()}


def forms(engine: str, count: int) -> None:
    from gguf_files import making

    rows = documents(count)
    with tempfile.TemporaryDirectory() as folder:
        room = Path(folder)
        base = making.of_checkpoint(DEMO, room / "base.gguf")
        files, directories = [], []
        for number, options in enumerate(FORMS.values()):
            file, directory = room / f"{number}.gguf", room / str(number)
            ropext.extend(str(base), file, factor=TARGET / CONTEXT, **options)
            ropext.extend(str(DEMO), directory, factor=TARGET / CONTEXT, no_verify=True, **options)
            files.append(file)
            directories.append(directory)
        by_llama = losses(engine, "read_llama_cpp.py", rows, [base, *files])
        by_stock = losses(sys.executable, "read_transformers.py", rows, [DEMO, *directories])
        print(f"{len(rows)} documents of {TARGET} tokens\n")
        print("| form | llama.cpp | transformers | control: the unscaled file |")
        print("|---|---|---|---|")
        control = np.exp(by_llama[str(base)])
        print(f"| untouched | {control:.3f} | {np.exp(by_stock[str(DEMO)]):.3f} | |")
        for name, file, directory in zip(FORMS, files, directories, strict=True):
            one, two = np.exp(by_llama[str(file)]), np.exp(by_stock[str(directory)])
            print(f"| {name} | {one:.3f} | {two:.3f} | {control:.3f} |")
            assert abs(one / two - 1) < 5e-4, (name, one, two)


def real(engine: str, model: Path, text: Path, tokens: int, like: Path | None, kept: Path) -> None:
    """Compare a quantised file in llama.cpp with its dequantised weights in transformers.

    Both read the last 2,048 tokens of one text, inside the window and at its end. Each cell is
    kept, and not read again.
    """
    from transformers import AutoTokenizer

    from ropext.files.inspecting import Inspection, inspect
    from ropext.models.dequantising import dequantised_directory

    kept.mkdir(parents=True, exist_ok=True)
    found = inspect(str(model))
    assert isinstance(found, Inspection)
    context = found.model.context
    with tempfile.TemporaryDirectory() as folder, dequantised_directory(str(model)) as untouched:
        files = {"untouched": model, "yarn": Path(folder, "yarn.gguf")}
        ropext.extend(str(model), files["yarn"], target=tokens, method="yarn")
        if like is not None:
            files["fitted"] = Path(folder, "fitted.gguf")
            ropext.extend(str(model), files["fitted"], like=str(like))
        tokenizer = AutoTokenizer.from_pretrained(untouched)
        row = tokenizer(text.read_text("utf-8"), add_special_tokens=False).input_ids[:tokens]

        def cell(name: str, length: int, reader: str) -> float:
            place = kept / f"{name}-{length}-{reader}.json"
            if not place.exists():
                with dequantised_directory(str(files[name])) as directory:
                    ours = reader == "transformers"
                    python, read = (sys.executable if ours else engine), Path(directory)
                    script = f"read_{reader.replace('.', '_')}.py"
                    found = losses(python, script, [row[:length]], [read if ours else files[name]])
                place.write_text(json.dumps(found.popitem()[1]))
            return float(np.exp(json.loads(place.read_text())))

        print("| form | tokens | llama.cpp | transformers |")
        print("|---|---|---|---|")
        for length in (min(context, tokens) // 2, tokens):
            for name in files:
                pair = [cell(name, length, reader) for reader in ("llama.cpp", "transformers")]
                print(f"| {name} | {length} | {pair[0]:.4f} | {pair[1]:.4f} |", flush=True)


def chunks(count: int, length: int) -> list[tuple[str, list[int]]]:
    """Beginnings of held-out documents that stay the same tokens when they are joined."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    kept, text, ids = list[tuple[str, list[int]]](), "", list[int]()
    for line in bundled.DATA["ropext://held-out"].read_text("utf-8").splitlines():
        row = tokenizer(json.loads(line)["text"]).input_ids[:length]
        piece = str(tokenizer.decode(row))
        whole = tokenizer(text + piece).input_ids
        if len(row) == length and whole == ids + row and tokenizer(piece).input_ids == row:
            kept, text, ids = [*kept, (piece, row)], text + piece, ids + row
    return kept[:count]


def perplexity(quantise: Path, tool: Path, kind: str, count: int) -> None:
    """Compare `ropext eval` and llama.cpp's own perplexity on the bundled model, quantised, at
    twice its window.

    Both read the same tokens, the second half of each chunk.
    """
    from gguf_files import making
    from pyarrow import parquet

    length = 2 * CONTEXT
    rows = chunks(count, length)
    with tempfile.TemporaryDirectory() as folder:
        room = Path(folder)
        base, small = making.of_checkpoint(DEMO, room / "base.gguf"), room / f"{kind}.gguf"
        subprocess.run([quantise, base, small, kind], check=True, capture_output=True)
        files = {"untouched": small, "yarn": room / "yarn.gguf"}
        ropext.extend(str(small), files["yarn"], factor=2.0, method="yarn")
        text, data = room / "text.txt", room / "data.jsonl"
        text.write_bytes("".join(piece for piece, _ in rows).encode())
        data.write_text("".join(json.dumps({"text": piece}) + "\n" for piece, _ in rows), "utf-8")
        print(f"{kind}, {len(rows)} chunks of {length} tokens, window {CONTEXT}\n")
        print("| form | `ropext eval` | llama.cpp's perplexity |")
        print("|---|---|---|")
        for name, file in files.items():
            options: dict[str, Any] = {
                "data": str(data),
                "lengths": [CONTEXT, length],
                "losses": room / "l.parquet",
            }
            ropext.evaluate(str(file), max_docs=len(rows), tasks=[], force=True, **options)
            told = parquet.read_table(room / "l.parquet").to_pydict()
            label = "untouched" if name == "untouched" else "extended"
            mine = [
                loss
                for loss, position, variant in zip(
                    told["loss"], told["position"], told["variant"], strict=True
                )
                if variant == label and position > CONTEXT  # as llama-perplexity scores them
            ]
            words: list[str | Path] = [
                tool,
                "-m",
                file,
                "-f",
                text,
                "-c",
                str(length),
                "-b",
                str(length),
                "-t",
                "1",
            ]
            done = subprocess.run(words, check=True, capture_output=True, text=True)
            said = re.search(r"Final estimate: PPL = ([\d.]+)", done.stdout + done.stderr)
            assert said, done.stderr[-2000:]
            print(f"| {name} | {np.exp(np.mean(mine)):.3f} | {float(said[1]):.3f} |")


def sparse(path: Path, gigabytes: int, filled: int) -> None:
    """Write a Llama of so many gigabytes, of which `filled` are on the disk."""
    from gguf_files import making

    rows = 1 << 18  # of 1024 float32 numbers: one GiB
    writer = making.gguf.GGUFWriter(path, "llama")
    for key, item in making.LLAMA.items():
        making.value(writer, f"llama.{key}", item)
    for number in range(gigabytes):
        writer.add_tensor_info(f"blk.{number}.ffn_up.weight", (rows, 1024), np.float32, rows * 4096)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    data = -(-path.stat().st_size // 32) * 32
    piece = np.random.default_rng(0).integers(0, 256, 1 << 26, np.uint8).tobytes()
    with path.open("r+b") as file:
        for number in range(filled * 16):
            file.seek(data + number * gigabytes // filled * len(piece))
            file.write(piece)
        file.truncate(data + gigabytes * rows * 4096)


def copy(gigabytes: int, filled: int, rounds: int, room: Path | None) -> None:
    with tempfile.TemporaryDirectory(dir=room) as folder:
        base, out = Path(folder, "base.gguf"), Path(folder, "long.gguf")
        small = Path(folder, "small.gguf")
        sparse(base, gigabytes, filled)
        sparse(small, 1, 0)
        copying = ["sh", "-c", 'cp "$0" "$1" && sync "$1"', str(base), str(out)]
        own = [sys.executable, "-P", "-m", "ropext", "extend", str(base), "--factor", "4", "-q"]
        own += ["--method", "llama3", "-o", str(out)]
        begun = [str(small) if word == str(base) else word for word in own]
        names = ("cp and sync", "its start, on an empty file", "ropext extend")
        times: dict[str, list[float]] = {name: [] for name in names}
        for _ in range(rounds):
            for name, words in zip(times, (copying, begun, own), strict=True):
                out.unlink(missing_ok=True)
                os.sync()  # so that freeing the unlinked file costs the next one nothing
                measured = [sys.executable, "-P", "-c", MEASURED, *words]
                done = subprocess.run(
                    measured, check=True, cwd=ROOT, capture_output=True, text=True
                )
                seconds, kilobytes = done.stdout.split()
                times[name].append(float(seconds))
        memory = int(kilobytes) * 1024
        usage = shutil.disk_usage(folder)
        medians = {name: statistics.median(values) for name, values in times.items()}
        for name, value in medians.items():
            print(f"{name}: {value:.1f} s (of {', '.join(f'{t:.1f}' for t in times[name])})")
        whole, start, cp = medians["ropext extend"], medians[names[1]], medians["cp and sync"]
        print(
            f"{gigabytes} GiB, {filled} on the disk: {whole / cp:.2f} times cp, without its start"
        )
        print(f"{(whole - start) / cp:.2f} times; {memory / 1e6:.0f} MB")
        print(f"{out.stat().st_blocks * 512 / 1e9:.1f} GB written, {usage.free / 1e9:.0f} GB free")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=("forms", "real", "perplexity", "copy"))
    parser.add_argument("--engine", help="a Python with llama-cpp-python")
    parser.add_argument("--documents", type=int, default=4)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--like", type=Path)
    parser.add_argument("--cells", type=Path, default=Path("gguf-cells"), help="read before")
    parser.add_argument("--gigabytes", type=int, default=20)
    parser.add_argument("--filled", type=int, default=2)
    parser.add_argument("--tools", type=Path, help="with llama-quantize and llama-perplexity")
    parser.add_argument("--kind", default="Q4_1", help="the quantisation")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--room", type=Path)
    asked = parser.parse_args()
    if asked.part in ("forms", "real") and not asked.engine:
        parser.error("--engine names a Python with llama-cpp-python")
    if asked.part == "forms":
        forms(asked.engine, asked.documents)
    elif asked.part == "real":
        real(asked.engine, asked.model, asked.text, asked.tokens, asked.like, asked.cells)
    elif asked.part == "perplexity":
        quantise, tool = (asked.tools / f"llama-{name}" for name in ("quantize", "perplexity"))
        perplexity(quantise, tool, asked.kind, asked.documents)
    else:
        copy(asked.gigabytes, asked.filled, asked.rounds, asked.room)


if __name__ == "__main__":
    main()
