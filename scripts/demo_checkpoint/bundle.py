"""Write the documents that ship with the demo:
`python -m scripts.demo_checkpoint.bundle --tokenizer DIR`.

They are bundled, and not read from the running interpreter, so that the demo's numbers are the same
on every machine. Held-out documents are for evaluation; tuning documents, from packages that the
checkpoint was trained on, are for the demo's fine-tuning and its control.
"""

import argparse
import gzip
import hashlib
import json
import platform
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from scripts.demo_checkpoint.sources import Document, library, read_documents, split
from scripts.demo_checkpoint.tokenizer import CachedEncoder, load_encoder

DATA = Path(__file__).parents[2] / "ropext/demo/data"
SHORTEST = 2112  # tokens: 8 times the trained context, and one tail more
LONGEST = 4096  # tokens: what any document is cut to, so that many fit
MOST_BYTES = 190_000  # compressed, for each file
TABLES = {"html/entities.py"}
"""A dictionary of characters: no text to predict."""

README = """\
# The demo's documents

Source files of the Python {python} standard library, each cut at a line end to at most {longest}
tokens of the demo's tokenizer; one JSON object a line, with `path`, `package` and `text`.

- `held-out.jsonl`: {held_out} documents of packages that the checkpoint was never trained on
  ({packages}). For evaluation.
- `tuning.jsonl`: {tuning} documents of packages that it was trained on. For the demo's fine-tuning.

Copyright © 2001 onwards Python Software Foundation; all rights reserved. Licensed to you under the
PSF License Agreement (`LICENSE-PSF.txt`), not under this project's licence. The only change is the
cut. Made by `python -m scripts.demo_checkpoint.bundle`.
"""


def cut(document: Document, encoder: CachedEncoder) -> tuple[Document, int]:
    """Return the document's first `LONGEST` tokens at most, to a line end, and how many tokens it
    has."""
    kept: list[str] = []
    tokens = 0
    for line in document.text.splitlines(keepends=True):
        tokens += len(encoder.encode(line))
        if tokens > LONGEST:
            break
        kept.append(line)
    text = "".join(kept)
    return Document(document.path, document.package, text), len(encoder.encode(text))


def long_enough(documents: list[Document], encoder: CachedEncoder) -> Iterator[Document]:
    for document in documents:
        shortened, tokens = cut(document, encoder)
        if tokens >= SHORTEST and document.path not in TABLES:
            yield shortened


def as_lines(documents: list[Document]) -> bytes:
    rows = [{"path": d.path, "package": d.package, "text": d.text} for d in documents]
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def fitted(documents: list[Document]) -> list[Document]:
    """Return as many documents as `MOST_BYTES` compressed allow, in an order that mixes
    packages."""
    mixed = sorted(documents, key=lambda d: hashlib.sha256(d.path.encode()).digest())
    while len(gzip.compress(as_lines(mixed), mtime=0)) > MOST_BYTES:
        mixed.pop()
    return mixed


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the demo's bundled documents.")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder of the tokenizer")
    parser.add_argument("--out", type=Path, default=DATA)
    options = parser.parse_args()
    encoder = load_encoder(options.tokenizer)
    training, held_out = split(read_documents(library()))
    options.out.mkdir(parents=True, exist_ok=True)
    counts = {}
    for name, documents in (("held-out", held_out), ("tuning", training)):
        chosen = fitted(list(long_enough(documents, encoder)))
        (options.out / f"{name}.jsonl").write_bytes(as_lines(chosen))
        counts[name] = len(chosen)
        sys.stderr.write(f"{name}: {len(chosen)} documents\n")
    shutil.copyfile(library() / "LICENSE.txt", options.out / "LICENSE-PSF.txt")
    note = README.format(
        python=platform.python_version(),
        longest=LONGEST,
        held_out=counts["held-out"],
        tuning=counts["tuning"],
        packages=", ".join(sorted({d.package for d in held_out})),
    )
    (options.out / "README.md").write_text(note, encoding="utf-8")


if __name__ == "__main__":
    main()
