"""Count the tokens that `ropext serve` reads in a long conversation, with the kept cache and
without.

Each turn sends the whole conversation, a piece of a text, and gets an answer of some tokens. Counts
come from the log; the greedy answers of both ways must be equal. Without the cache: a question
about something else comes between two turns, and takes the cache's place.

    ropext serve MODEL --method self-extend --factor 2 2> serve.log
    python benchmarks/serve_turns.py 127.0.0.1:8000 TEXTS --log serve.log [--turns 8]
"""

import argparse
import http.client
import json
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ANSWER = 16  # tokens


@dataclass(frozen=True)
class Turn:
    """What one turn took."""

    sent: int
    read: int
    answer: str


def call(server: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return one answer of the server."""
    connection = http.client.HTTPConnection(server)
    verb = "GET" if body is None else "POST"
    connection.request(verb, path, json.dumps(body), {"Content-Type": "application/json"})
    answer: dict[str, Any] = json.loads(connection.getresponse().read())
    connection.close()
    return answer


def tokens_of(server: str, text: str, special: bool) -> list[int]:
    """Return a text in tokens."""
    ids: list[int] = call(server, "/tokenize", {"prompt": text, "add_special_tokens": special})[
        "tokens"
    ]
    return ids


def kept_of(log: Path, name: str) -> int:
    """Tokens of a prompt that the cache held, by the line that follows the answer."""
    for _ in range(100):
        found = re.search(rf"{name}: ([\d,]+) tokens kept", log.read_text("utf-8"))
        if found:
            return int(found[1].replace(",", ""))
        time.sleep(0.1)
    raise SystemExit(f"{log} has no line for {name}; is it the log of this server?")


def converse(server: str, log: Path, pieces: list[list[int]], keep: bool) -> list[Turn]:
    """Hold one conversation."""
    prompt, turns = list[int](), list[Turn]()
    for piece in pieces:
        prompt += piece
        if not keep:
            other = 5 if prompt[0] != 5 else 6
            call(server, "/v1/completions", {"prompt": [other], "max_tokens": 1})
        body = {"prompt": prompt, "max_tokens": ANSWER, "temperature": 0}
        answer = call(server, "/v1/completions", body)
        sent, text = answer["usage"]["prompt_tokens"], answer["choices"][0]["text"]
        turns.append(Turn(sent, sent - kept_of(log, answer["id"]), text))
        prompt += tokens_of(server, text, special=False)
    return turns


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("server")
    parser.add_argument("texts", type=Path)
    parser.add_argument("--log", type=Path, required=True, help="stderr of ropext serve")
    parser.add_argument("--turns", type=int, default=8)
    given = parser.parse_args()
    limit = call(given.server, "/v1/models")["data"][0]["max_model_len"]
    text = given.texts.read_text("utf-8")[: limit * 8]
    ids = tokens_of(given.server, text, special=True)
    size = limit // given.turns - ANSWER - 4  # an answer may have more tokens when it is read again
    pieces = [ids[turn * size : (turn + 1) * size] for turn in range(given.turns)]
    kept = converse(given.server, given.log, pieces, keep=True)
    anew = converse(given.server, given.log, pieces, keep=False)
    print("| turn | sent | read, cache kept | read anew |\n|---|---|---|---|")
    same = 0
    for number, (one, other) in enumerate(zip(kept, anew, strict=True), 1):
        print(f"| {number} | {one.sent:,} | {one.read:,} | {other.read:,} |")
        same += one.answer == other.answer
    totals = [sum(turn.read for turn in turns) for turns in (kept, anew)]
    print(f"| all | | {totals[0]:,} | {totals[1]:,} |")
    print(f"\n{same} of {len(kept)} greedy answers are equal.")


if __name__ == "__main__":
    main()
