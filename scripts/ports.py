"""Ask real servers as `ropext eval --endpoint` does, and compare their counts and losses with known
ones.

    python scripts/ports.py llama-server PROGRAM MODEL.gguf -o DIR [--lengths 1k,2k] [--items 1]
    python scripts/ports.py vllm PYTHON -o DIR

llama-server: an unscaled GGUF is extended by YaRN to twice its context, and served with its caches
in 16, 8 and 4 bits, and unscaled; `ropext compare` pairs the answers. vLLM (PYTHON is of its
environment): the bundled model is extended to four times its context, and the perplexities of its
port must equal those of its directory. DIR keeps the measurements, and the same command resumes.
DIR/llama-server.md and DIR/vllm.md have the printed text. `.ci/slow port` runs both.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

CACHES = {"f16": (), "q8": ("q8_0",), "q4": ("q4_0",)}
WINDOW = 1024  # tokens to which texts are cut: each prompt is read by one core
PATIENCE = 3600  # seconds for one answer
SMALL = 2048  # tokens of a server that must refuse longer prompts
STARTS = 1200  # seconds that a server may take until it answers
# Between a number of a port and its directory's: float32 on two engines, whose sums have another
# order.
SAME = 1e-4
CONTEXT = 256  # context of the bundled model
FACTOR = 4
LENGTHS = "256,512"
DOCS = 8
# The bundled model answers nothing in words; this shows only how its prompts are counted.
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def ropext(*words: object) -> str:
    """Run one command, and return its output."""
    command = [sys.executable, "-P", "-m", "ropext", *map(str, words)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}")
    return done.stdout


@contextmanager
def serving(words: Sequence[object], log: Path, **environment: str) -> Iterator[str]:
    """Yield the address of a server, once its model is loaded."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [*map(str, words), "--port", str(port)]
    with (
        log.open("w", encoding="utf-8") as stream,
        subprocess.Popen(
            command, stdout=stream, stderr=stream, env=os.environ | environment
        ) as process,
    ):
        url = f"http://127.0.0.1:{port}"
        end = time.monotonic() + STARTS
        try:
            while time.monotonic() < end:
                with suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
                    break
                if process.poll() is not None:
                    raise SystemExit(log.read_text("utf-8")[-3000:])
                time.sleep(0.5)
            yield url
        finally:
            process.terminate()


def evaluated(url: str, output: Path, *words: object) -> dict[str, Any]:
    """Return the results of an evaluation of a port, whether it is measured now or was before."""
    printed = output.with_suffix(".txt")
    if not printed.exists():
        printed.write_text(ropext("eval", "--endpoint", url, *words, "-o", output), "utf-8")
    results: dict[str, Any] = json.loads((output / "results.json").read_text("utf-8"))
    return results


def counted_alike(name: str, results: Mapping[str, Any], questions: int) -> str:
    """Check that every question has an outcome, and that the server and ropext count each prompt
    alike."""
    lines = []
    for row in results["variants"]["port"]["outcomes"]:
        outcomes = {kind: count for kind, count in row["counts"].items() if count}
        if sum(outcomes.values()) != questions:
            raise SystemExit(f"{name}: {outcomes} are not {questions} questions")
        if row["used"] is not None and row["used"] != row["counted"]:
            raise SystemExit(f"{name}: counted {row['counted']}, by the server {row['used']}")
        lines.append(f"{name} at {row['length']}: {row['counted']} tokens, {outcomes}")
    return "\n".join(lines)


def ask_llama_server(program: Path, model: Path, room: Path, lengths: str, items: int) -> str:
    """Ask llama-server with each kind of cache, unscaled, and with too little room."""
    extended = room / "yarn.gguf"
    if not extended.exists():
        ropext("extend", model, "--method", "yarn", "--factor", 2, "-o", extended)
    target = json.loads(ropext("inspect", extended, "--json"))["context"]
    longer = ("--override-kv", f"llama.context_length=int:{target}")
    settings = {name: (extended, cache_flags(*kind)) for name, kind in CACHES.items()}
    settings["plain"] = (model, longer)
    threads = os.environ.get("OMP_NUM_THREADS", "1")
    common = ("-np", 1, "-t", threads)
    asked = ("--items", items, "--deadline", PATIENCE)
    beside = {"f16": ("--context", WINDOW)}  # its cut row; the others are compared with this port
    pages = list[str]()
    for name, (file, flags) in settings.items():
        words = (program, "-m", file, "-c", target, *common, *flags)
        with serving(words, room / f"{name}.log") as url:
            also = beside.get(name, ())
            results = evaluated(url, room / name, *asked, "--lengths", lengths, *also)
        pages.append(counted_alike(name, results, 5 * items))
        pages.append((room / name).with_suffix(".txt").read_text("utf-8"))
    with serving((program, "-m", extended, "-c", SMALL, *common), room / "small.log") as url:
        results = evaluated(url, room / "small", *asked, "--lengths", f"1k,{2 * SMALL}")
    pages.append(counted_alike("small", results, 5 * items))
    for row in results["variants"]["port"]["outcomes"]:
        refused = 5 * items if row["length"] > SMALL else 0
        if row["counts"]["refused"] != refused:
            raise SystemExit(f"a server of {SMALL} tokens refused {row['counts']}")
    pages.append(ropext("compare", *(room / name for name in settings)))
    return "\n\n".join(pages)


def cache_flags(kind: str = "") -> tuple[str, ...]:
    """Flags for keys and values of a kind."""
    return ("-ctk", kind, "-ctv", kind, "-fa", "on") if kind else ()


def perplexity_of_a_port(python: Path, room: Path) -> str:
    """Ask vLLM for the perplexity of the bundled model, extended and unscaled, and compare each
    number with the directory's."""
    from ropext.base.bundled import MODELS

    base = MODELS["ropext://demo"]
    extended = room / "yarn"
    if not extended.exists():
        ropext("extend", "ropext://demo", "--method", "yarn", "--factor", FACTOR, "-o", extended)
    template = room / "template.jinja"
    template.write_text(TEMPLATE, "utf-8")
    read = ("--data", "ropext://held-out", "--max-docs", DOCS, "--lengths", LENGTHS)
    if not (room / "directory.txt").exists():
        printed = ropext("eval", extended, *read, "-o", room / "directory")
        (room / "directory.txt").write_text(printed, "utf-8")
    # One more than the window: a token is generated behind each text.
    longer = ("--hf-overrides", json.dumps({"max_position_embeddings": CONTEXT + 1}))
    server = (python, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1")
    server += ("--dtype", "float32", "--enforce-eager", "--max-num-seqs", 1)
    server += ("--chat-template", template)
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "PYTHONPATH": ""}
    with (
        serving((*server, "--model", extended), room / "vllm.log", **settings) as url,
        serving((*server, "--model", base, *longer), room / "plain.log", **settings) as plain,
    ):
        asked = ("--against", extended, "--plain", plain, "--items", 1, "--depths", "0,1")
        results = evaluated(url, room / "port", *read, *asked)
    pages = [counted_alike("vllm", results, 2), (room / "port.txt").read_text("utf-8")]
    written = json.loads((room / "directory" / "results.json").read_text("utf-8"))
    pages.append(numbers_alike(results, written))
    pages.append(ropext("compare", f"{room}/directory:extended", f"{room}/port:port"))
    return "\n\n".join(pages)


def numbers_alike(port: Mapping[str, Any], directory: Mapping[str, Any]) -> str:
    """Return a line for each number of a port and its directory's; the furthest apart must be
    alike."""
    lines = []
    for label, of_directory in (("port", "extended"), ("base", "base")):
        told = port["variants"][label]["metrics"]
        known = directory["variants"][of_directory]["metrics"]
        for name in sorted(told.keys() & known.keys()):
            value = told[name]["value"]
            right = known[name]["value"]
            lines.append(f"{label} {name}: {value:.9f}, of the directory {right:.9f}")
            if abs(value - right) > SAME * max(1.0, abs(right)):
                raise SystemExit(lines[-1])
    return "\n".join(lines)


def main() -> None:
    """Ask one program, and keep the printed text."""
    parser = argparse.ArgumentParser(description=__doc__)
    programs = parser.add_subparsers(dest="program", required=True)
    llama = programs.add_parser("llama-server")
    llama.add_argument("path", type=Path)
    llama.add_argument("model", type=Path, help="an unscaled GGUF")
    llama.add_argument("--lengths", default="1k,2k")
    llama.add_argument("--items", type=int, default=1)
    vllm = programs.add_parser("vllm")
    vllm.add_argument("path", type=Path, help="the Python of its environment")
    for each in (llama, vllm):
        each.add_argument("--output", "-o", type=Path, required=True)
    given = parser.parse_args()
    given.output.mkdir(parents=True, exist_ok=True)
    if given.program == "vllm":
        page = perplexity_of_a_port(given.path, given.output)
    else:
        page = ask_llama_server(given.path, given.model, given.output, given.lengths, given.items)
    (given.output / f"{given.program}.md").write_text(page, "utf-8")
    print(page)


if __name__ == "__main__":
    main()
