"""What choosing by measurement says, and what searching for YaRN's knobs gives.

Claims: `ropext plan --measure` ranks the closed forms on documents at the cost of one pass each;
`ropext fit --search --within yarn` is never worse than default YaRN on documents that the search
and its judge have not seen.

    python benchmarks/plan_measure.py [--model DIR --data FILE [--glued]] [--factor 4 8]
        [--part rank search]

Without --model, the bundled checkpoint: its tuning documents are searched on, its held-out ones are
for the tables. A FILE of one's own is divided by content first.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from fit_quality import divided

import ropext.demo
from ropext.checkpoint import open_snapshot
from ropext.corpus import (
    DocumentEncoder,
    Source,
    Wanted,
    choose_documents,
    pack_documents,
    read_documents,
)
from ropext.evaluation.loading import load_tokenizer
from ropext.evaluation.ranking import Measured, document_reader, frame_of, measure
from ropext.narration import Hooks
from ropext.report.tables import ranking_table, ranking_verdict, shown
from ropext.results.comparison import difference
from ropext.results.values import Value
from ropext.table import as_markdown
from ropext.training import run_fit

DEMO = Path(ropext.demo.__path__[0])


def told(sentence: str) -> None:
    sys.stderr.write(sentence + "\n")


def searched(
    model: str, data: str, table: str, factor: float, folder: Path, glued: bool
) -> tuple[Any, dict[str, Value]]:
    """Search, then read default YaRN and what was written on the table's documents."""
    done = run_fit(
        model,
        data,
        folder / f"{factor:g}x",
        say=told,
        factor=factor,
        within="yarn",
        start="yarn",
        search=True,
        packing="glued" if glued else "documents",
    )
    assert done is not None
    start = done.planned.prepared.starts["yarn"]
    snapshot = open_snapshot(model)
    encoder = DocumentEncoder(load_tokenizer(snapshot, False), start.model.vocab_size)
    wanted = Wanted((start.target,), given=True, max_documents=32)
    take = pack_documents if glued else choose_documents
    documents = take(read_documents(Source(table)), encoder, wanted).documents
    loaded = transformers.AutoModelForCausalLM.from_pretrained(snapshot.directory).eval()
    frame = frame_of(start.context, start.target)
    reader = document_reader(loaded, [own.ids for own in documents], frame)
    before, after = reader.whole("yarn", start.config), reader.whole("searched", done.plan.config)
    tail, far = frame.tail_span(start.target), (start.target // 2, start.target)
    return done, {
        "tail": difference(frame, after, before, tail),
        "far half": difference(frame, after, before, far),
    }


def search_row(done: Any, changes: dict[str, Value], factor: float) -> str:
    tokens = next(note for note in done.notes if note.startswith("searched"))
    knobs = ", ".join(
        f"{name} {value:.4g}" for name, value in done.plan.knobs.items() if name != "truncate"
    )
    knobs += f", attention factor {done.attention_factor:.4f}"
    cells = [f"{factor:g}x", done.kept, knobs, *(shown(own, 4) for own in changes.values())]
    return "| " + " | ".join([*cells, tokens.removeprefix("searched: ")]) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=str(DEMO / "checkpoint"))
    parser.add_argument("--data")
    parser.add_argument("--factor", type=float, nargs="+", default=[4.0, 8.0])
    parser.add_argument("--glued", action="store_true", help="documents of FILE are short")
    parser.add_argument("--part", nargs="+", default=["rank", "search"])
    asked = parser.parse_args()
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, transformers {transformers.__version__}\n")
    with tempfile.TemporaryDirectory(prefix="plan-measure-") as name:
        folder = Path(name)
        data, table = (DEMO / "data" / f"{part}.jsonl" for part in ("tuning", "held-out"))
        if asked.data:
            data, table = divided(Path(asked.data), folder)
        for factor in asked.factor if "rank" in asked.part else ():
            found: Measured = measure(
                asked.model,
                str(table),
                factor=factor,
                hooks=Hooks(say=told),
                reading={"pack": asked.glued},
            )
            print(as_markdown([ranking_table(found.ranking)]))
            print(f"\n{ranking_verdict(found.ranking)}\nforward tokens: {found.tokens:,}\n")
        if "search" not in asked.part:
            return
        rows = []
        for factor in asked.factor:
            rows.append(
                search_row(
                    *searched(asked.model, str(data), str(table), factor, folder, asked.glued),
                    factor,
                )
            )
        print("| factor | kept | knobs | tail, nats | far half, nats | cost |")
        print("|---|---|---|---|---|---|")
        print("\n".join(rows))


if __name__ == "__main__":
    main()
