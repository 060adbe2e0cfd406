"""Tokens that `ropext serve` reads in a conversation that goes on, with the kept cache and without.

Each turn sends all that was said before, a piece of a text, and gets an answer of some tokens.
Counts come from the answers' usage; the greedy answers of both ways must be equal.

    python benchmarks/serve_turns.py MODEL TEXTS [--method self-extend] [--factor 2] [--turns 8]
"""

import argparse
import http.client
import json
import threading
from pathlib import Path
from typing import Any

from ropext.options.evaluate import DocumentOptions
from ropext.options.extend import parse_extend
from ropext.serving import app
from ropext.serving.served import LiveModel, Wish, load
from ropext.serving.turns import KeptCache

ANSWER = 16  # tokens


class Forgetful(KeptCache):
    """Keeps nothing."""

    def keep(self, cache: Any, tokens: list[int]) -> None:
        """Let it go."""


def ask(number: int, body: dict[str, Any]) -> dict[str, Any]:
    """One completion of the port on this machine."""
    connection = http.client.HTTPConnection("127.0.0.1", number)
    head = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body), head)
    answer: dict[str, Any] = json.loads(connection.getresponse().read())
    connection.close()
    return answer


def converse(served: LiveModel, pieces: list[str], keep: bool) -> list[tuple[int, int, str]]:
    """Tokens sent and tokens read of each turn, and its answer."""
    port = app.Port(served, lambda line: None, only_local=True)
    if not keep:
        port.worker.kept = Forgetful()
    taken = app.reserve("127.0.0.1", 0)
    taken.listen()
    server = app.server_of(port)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [taken]})
    thread.start()
    text, turns = "", list[tuple[int, int, str]]()
    try:
        for piece in pieces:
            text += piece
            body = {"prompt": text, "max_tokens": ANSWER, "temperature": 0}
            answer = ask(taken.getsockname()[1], body)
            usage, written = answer["usage"], answer["choices"][0]["text"]
            sent = usage["prompt_tokens"]
            turns.append((sent, sent - usage["prompt_tokens_details"]["cached_tokens"], written))
            text += written
    finally:
        server.should_exit = True
        thread.join()
    return turns


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("texts", type=Path)
    parser.add_argument("--method", default="self-extend")
    parser.add_argument("--factor", type=float, default=2.0)
    parser.add_argument("--turns", type=int, default=8)
    given = parser.parse_args()
    wish = parse_extend({"method": given.method, "factor": given.factor})
    served = load(Wish(given.model, "model", wish), DocumentOptions(device="cpu"))
    ids = served.tokenizer(given.texts.read_text("utf-8")[: served.limit * 20])["input_ids"]
    size = served.limit // given.turns - ANSWER - 4  # what an answer becomes when it is read again
    pieces = list[str]()
    for turn in range(given.turns):
        part = ids[turn * size : (turn + 1) * size]
        pieces.append(str(served.tokenizer.decode(part, skip_special_tokens=True)))
    kept, anew = converse(served, pieces, True), converse(served, pieces, False)
    print(f"{given.method} at {given.factor:g} times, {served.limit:,} tokens\n")
    print("| turn | sent | read, cache kept | read anew |\n|---|---|---|---|")
    for number, (one, other) in enumerate(zip(kept, anew, strict=True), 1):
        print(f"| {number} | {one[0]:,} | {one[1]:,} | {other[1]:,} |")
    both = (sum(turn[1] for turn in turns) for turns in (kept, anew))
    print("| all | | {:,} | {:,} |".format(*both))
    same = sum(one[2] == other[2] for one, other in zip(kept, anew, strict=True))
    print(f"\n{same} of {len(kept)} greedy answers are equal.")


if __name__ == "__main__":
    main()
