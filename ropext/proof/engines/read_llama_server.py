"""Log-probabilities by the llama-server on PATH of a GGUF.

It tells of a prompt only what comes next, so that a few of the last tokens are asked for, each
after those before it: the server keeps what it has read.
"""

import json
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable
from typing import Any

import numpy as np
import telling

ASKED = 16  # tokens, evenly spread
PATIENCE = 1800.0  # seconds that the server may take to load the file, or for an answer
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def call(url: str, body: dict[str, Any] | None = None) -> Any:
    """The JSON of an answer."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with DIRECT.open(request, timeout=PATIENCE) as answer:
        return json.load(answer)


def read(path: str, ids: np.ndarray) -> dict[str, Any]:
    """Of a few of the last tokens, each after those before it; `at` says of which."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    words = ["llama-server", "-m", path, "-c", str(len(ids)), "-np", "1", "--port", port]
    # As read_llama_cpp.py has it: cache in float32, no flash attention.
    words += ["--host", "127.0.0.1", "-ctk", "f32", "-ctv", "f32", "-fa", "off"]
    with (
        tempfile.TemporaryFile() as said,
        subprocess.Popen(words, stdout=said, stderr=said) as server,
    ):
        try:
            return asked(f"http://127.0.0.1:{port}", ids, server.poll)
        except OSError as error:
            server.terminate()
            server.wait()
            said.seek(0)
            last = [*filter(str.strip, said.read().decode(errors="replace").splitlines())][-1:]
            raise ValueError(f"llama-server: {''.join(last).strip() or error}") from None
        finally:
            server.terminate()


def asked(url: str, ids: np.ndarray, ended: Callable[[], int | None]) -> dict[str, Any]:
    """What it tells once it has loaded the file."""
    until = time.monotonic() + PATIENCE
    while True:
        try:
            call(f"{url}/health")
            break
        except OSError:  # not there yet, or 503 while it loads
            if ended() is not None or time.monotonic() > until:
                raise
            time.sleep(0.2)
    size = call(f"{url}/v1/models")["data"][0]["meta"]["n_vocab"]
    told = min(len(ids) - 1, telling.LAST)
    at, found = np.unique(np.linspace(0, told - 1, ASKED).astype(int)), []
    for place in len(ids) - told + at:
        body = {"prompt": ids[:place].tolist(), "n_predict": 1, "n_probs": size}
        (next_one,) = call(f"{url}/completion", body)["completion_probabilities"]
        own = {each["id"]: each["logprob"] for each in next_one["top_logprobs"]}
        found.append(own[int(ids[place])])
    return {"": np.array(found), "at": at}


if __name__ == "__main__":
    done = subprocess.run(["llama-server", "--version"], capture_output=True, text=True, check=True)
    lines = [line for line in (done.stderr + done.stdout).splitlines() if "version" in line]
    telling.main(lines[0].partition(":")[2].strip() if lines else "unknown", read)
