"""Ask a real llama-server for keys, with its caches in 16, 8 and 4 bits, scaled and plain.

    python scripts/ports.py --server LLAMA_SERVER --model MODEL.gguf -o DIR [--lengths 4k,12k]

The model is extended by YaRN to twice its context. Each setting is a server of its own, asked by
`ropext eval --endpoint`; at the end `ropext compare` pairs them, and all that was printed stands in
DIR/page.md. `.ci/slow port` runs it.
"""

import argparse
import json
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

CACHES = {"f16": (), "q8": ("q8_0",), "q4": ("q4_0",)}


def ropext(*words: object) -> str:
    """Run one command, and return what it printed."""
    command = [sys.executable, "-P", "-m", "ropext", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr[-2000:]}")
    return done.stdout


@contextmanager
def serving(server: Path, file: Path, context: int, log: Path, *flags: str) -> Iterator[str]:
    """The address of a llama-server, once its model is loaded."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [server, "-m", file, "-c", context, "-np", 1, "--port", port, *flags]
    with (
        log.open("w", encoding="utf-8") as stream,
        subprocess.Popen([*map(str, words)], stdout=stream, stderr=stream) as process,
    ):
        url = f"http://127.0.0.1:{port}"
        try:
            for _ in range(600):
                with suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
                    break
                assert process.poll() is None, log.read_text("utf-8")[-2000:]
                time.sleep(0.5)
            yield url
        finally:
            process.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--server", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True, help="an unscaled GGUF")
    parser.add_argument("--output", "-o", type=Path, required=True)
    parser.add_argument("--lengths", default="4k,8k,16k")
    parser.add_argument("--items", type=int, default=8)
    given = parser.parse_args()
    room = given.output
    room.mkdir(parents=True, exist_ok=True)
    extended = room / "yarn.gguf"
    if not extended.exists():
        ropext("extend", given.model, "--method", "yarn", "--factor", 2, "-o", extended)
    target = json.loads(ropext("inspect", extended, "--json"))["context"]
    longer = ("--override-kv", f"llama.context_length=int:{target}")
    settings = {name: (extended, _cache(*kind)) for name, kind in CACHES.items()}
    settings["plain"] = (given.model, longer)
    pages = list[str]()
    for name, (file, flags) in settings.items():
        with serving(given.server, file, target, room / f"{name}.log", *flags) as url:
            words = ("eval", "--endpoint", url, "--against", extended, "--lengths", given.lengths)
            printed = ropext(*words, "--items", given.items, "-o", room / name)
        pages.append(f"## {name}\n\n```\n{printed}```\n")
    compared = ropext("compare", *(room / name for name in settings))
    pages.append(f"## Compared\n\n```\n{compared}```\n")
    (room / "page.md").write_text("\n".join(pages), "utf-8")
    print((room / "page.md").read_text("utf-8"))


def _cache(kind: str = "") -> tuple[str, ...]:
    """Flags for keys and values of a kind."""
    return ("-ctk", kind, "-ctv", kind, "-fa", "on") if kind else ()


if __name__ == "__main__":
    main()
