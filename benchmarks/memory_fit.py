"""Compare `ropext plan --memory` with the allocations of a real llama.cpp, by its own log.

    python benchmarks/memory_fit.py LLAMA_SERVER CONVERTER FOLDER [FAMILY ...]

CONVERTER is the convert_hf_to_gguf.py of a llama.cpp checkout. For each family a small model with
random weights is written, converted, and loaded by llama-server at several lengths and types of
cache. The table has the sizes of its KV buffers, as it logs them in MiB, and ropext's.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ropext.files.inspecting import memory_fit
from ropext.options.memory import MemoryOptions

LOADERS = Path(__file__).parents[1] / "scripts/loaders"
FAMILIES = ["llama", "qwen2", "gemma2", "gemma3_text", "gpt_oss", "cohere2"]
FAMILIES += ["deepseek_v3", "qwen3_next", "gemma4"]
LENGTHS = (8192, 20_000)
CACHES = ("f16", "q8_0", "q4_0")
ALLOCATED = re.compile(r"llama_kv_cache: size =\s*([\d.]+) MiB")
READY = ("server is listening", "all slots are idle", "error loading model")


def convert(family: str, folder: Path, converter: str) -> Path:
    """Make a small model of a family as a GGUF."""
    output = folder / f"{family}.gguf"
    if output.exists():
        return output
    base = folder / family
    script = (
        f"import sys; sys.path.insert(0, {str(LOADERS)!r}); from pathlib import Path;"
        f"import checkpoints; checkpoints.write_base({family!r}, Path({str(base)!r}))"
    )
    if not base.exists():
        subprocess.run([sys.executable, "-P", "-c", script], check=True)
    words = [sys.executable, str(LOADERS / "convert_gguf.py"), converter, str(base), str(output)]
    subprocess.run(words, check=True, capture_output=True)
    return output


def allocated(server: str, model: Path, length: int, cache: str) -> float | None:
    """Return the MiB of the KV buffers that llama-server logs; None if it does not start."""
    library = {"LD_LIBRARY_PATH": str(Path(server).parent)}
    words = [server, "-m", str(model), "-c", str(length), "-np", "1", "-t", "1", "--no-warmup"]
    words += ["-ctk", cache, "-ctv", cache, "-fa", "on", "--port", "18977", "-lv", "4"]
    with tempfile.TemporaryFile("w+", encoding="utf-8") as log:
        running = subprocess.Popen(words, stdout=log, stderr=log, env=os.environ | library)
        try:
            text = _wait_for(running, log.fileno())
        finally:
            running.kill()
            running.wait()
    sizes = [float(size) for size in ALLOCATED.findall(text)]
    return sum(sizes) if sizes else None


def _wait_for(running: "subprocess.Popen[bytes]", log: int) -> str:
    """Return the log when the server is ready, or has ended."""
    while True:
        try:
            running.wait(timeout=0.5)
            ended = True
        except subprocess.TimeoutExpired:
            ended = False
        text = os.pread(log, 1 << 22, 0).decode("utf-8", "replace")
        if ended or any(word in text for word in READY):
            return text


def compared(server: str, model: Path) -> Iterator[tuple[int, str, float | None, float | None]]:
    """Yield (length, cache, MiB of llama.cpp, MiB of ropext)."""
    for length in LENGTHS:
        fit = memory_fit(
            model, MemoryOptions(memory="64G", kv=CACHES), length=length, revision=None
        )
        for row in fit.rows:
            taken = row.bytes_at_length
            mebibytes = None if taken is None else taken / (1 << 20)
            yield length, row.cache, allocated(server, model, length, row.cache), mebibytes


def main(server: str, converter: str, folder: Path, families: list[str]) -> None:
    print("| family | tokens | cache | llama.cpp, MiB | ropext, MiB |\n|---|---|---|---|---|")
    for family in families:
        model = convert(family, folder, converter)
        for length, cache, theirs, ours in compared(server, model):
            print(f"| {family} | {length:,} | {cache} | {theirs} | {ours} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("server", metavar="LLAMA_SERVER")
    parser.add_argument("converter", metavar="CONVERTER")
    parser.add_argument("folder", metavar="FOLDER", type=Path)
    parser.add_argument("families", metavar="FAMILY", nargs="*", default=FAMILIES)
    given = parser.parse_args()
    main(given.server, given.converter, given.folder, given.families)
