"""Compare `ropext eval --kv` on a rounded KV cache with a real llama.cpp.

    python benchmarks/kv_rounding.py LLAMA_SERVER MODEL.gguf TEXT [CACHE ...]

The script starts llama-server with each cache (`-ctk`, `-ctv`, flash attention) and asks, token by
token, for the log-probability of the next token. `ropext eval --losses` reads the same tokens of
the same file. It prints the mean change of the loss by each cache in both, over the same tokens,
and how alike the changes of single tokens are. llama.cpp computes in other kernels (queries of a
quantised cache in 8 bits, sums in 16), so single tokens differ by more than the rounding's mean.
The weights are widened to 32 bits first. LLAMA_ATTN_ROT_DISABLE=1 in the environment reaches the
server.
"""

import argparse
import json
import os
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import gguf
import gguf.quants
import numpy as np
import pyarrow.parquet

import ropext

PORT = 18978
CONTEXT = 1024  # tokens before the first measured one
ASKED = 96  # tokens
CACHES = ("q8_0", "q4_0", "q8_0/q4_0")
UNROUNDED = "f16"


def asked(path: str, body: dict[str, Any]) -> Any:
    """Return the server's answer."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{PORT}{path}",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=600) as answer:
        return json.load(answer)


def started(server: str, model: str, cache: str) -> "subprocess.Popen[bytes]":
    """Start a server, and wait until it answers."""
    keys, _, values = cache.partition("/")
    words = [server, "-m", model, "-c", "2048", "-np", "1", "-t", "2", "--no-warmup", "-fa", "on"]
    words += ["-ctk", keys, "-ctv", values or keys, "--port", str(PORT)]
    library = {"LD_LIBRARY_PATH": str(Path(server).parent)}
    log = subprocess.DEVNULL
    running = subprocess.Popen(words, stdout=log, stderr=log, env=os.environ | library)
    for _ in range(240):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health", timeout=5):
                return running
        except OSError:
            time.sleep(0.5)
    running.kill()
    raise SystemExit(f"{server} does not answer")


def losses_of_server(server: str, model: str, tokens: list[int], cache: str) -> np.ndarray:
    """Return the loss of each of the last tokens, given all before it."""
    running = started(server, model, cache)
    losses = []
    try:
        for place in range(len(tokens) - ASKED, len(tokens)):
            known = {"n_predict": 1, "temperature": 0, "n_probs": 4096, "cache_prompt": True}
            answer = asked("/completion", {"prompt": tokens[:place], **known})
            choices = answer["completion_probabilities"][0]["top_logprobs"]
            by_token = {choice["id"]: choice["logprob"] for choice in choices}
            losses.append(-by_token.get(tokens[place], np.nan))
    finally:
        running.kill()
        running.wait()
    return np.array(losses)


def read_by_ropext(
    model: str, text: str, caches: list[str]
) -> tuple[list[int], dict[str, np.ndarray]]:
    """Return the tokens from the second on, and the losses of the last ones by variant."""
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, "text.txt")
        data.write_text(text, "utf-8")
        losses = Path(folder, "losses.parquet")
        lengths = [CONTEXT + ASKED]
        ropext.evaluate(model, data=str(data), lengths=lengths, kv=",".join(caches), losses=losses)
        rows = pyarrow.parquet.read_table(losses).to_pylist()
    tokens = [row["token"] for row in rows if row["variant"] == "untouched"]
    by_variant: dict[str, list[float]] = {}
    for row in rows:
        if row["position"] >= CONTEXT:
            by_variant.setdefault(row["variant"], []).append(row["loss"])
    return tokens, {label: np.array(values) for label, values in by_variant.items()}


def in_float32(model: str, output: Path) -> None:
    """Write the same model with its weights as 32-bit numbers.

    Otherwise llama.cpp's kernels round activations to 8 bits, which hides a cache's effect.
    """
    reader = gguf.GGUFReader(model)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(output, architecture)
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        kind = field.types[0]
        inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), kind, inner)
    for tensor in reader.tensors:
        weights = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, weights.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main(server: str, model: str, text: str, caches: list[str]) -> None:
    following, ours = read_by_ropext(model, text, caches)
    running = started(server, model, UNROUNDED)
    first = asked("/tokenize", {"content": text[:40], "add_special": False})["tokens"][0]
    running.kill()
    running.wait()
    tokens = [first, *following]
    plain = losses_of_server(server, model, tokens, UNROUNDED)
    apart = np.abs(plain - ours["untouched"]).mean()
    print(
        f"not rounded: {np.nanmean(plain):.4f} and {ours['untouched'].mean():.4f} nats a token; "
        f"single tokens are {apart:.4f} apart in the mean\n"
    )
    print("| cache | llama.cpp, nats | ropext, nats | correlation of single tokens |")
    print("|---|---|---|---|")
    for cache in caches:
        theirs = losses_of_server(server, model, tokens, cache) - plain
        label = f"untouched+kv-{cache.replace('/', '-')}"
        mine = ours[label] - ours["untouched"]
        both = ~np.isnan(theirs)
        alike = np.corrcoef(theirs[both], mine[both])[0, 1]
        print(
            f"| {cache} | {theirs[both].mean():+.4f} | {mine[both].mean():+.4f} | {alike:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("server", metavar="LLAMA_SERVER")
    parser.add_argument("model", metavar="MODEL.gguf", type=Path)
    parser.add_argument("text", metavar="TEXT", type=Path)
    parser.add_argument("caches", metavar="CACHE", nargs="*", default=list(CACHES))
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        wide = Path(folder, "float32.gguf")
        in_float32(str(given.model), wide)
        main(given.server, str(wide), given.text.read_text("utf-8"), given.caches)
