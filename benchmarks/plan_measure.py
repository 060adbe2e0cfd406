"""What choosing by measurement says.

Claim: `ropext plan --measure` ranks the closed forms on documents at the cost of one pass each.

    python benchmarks/plan_measure.py [--model DIR --data FILE] [--factor 4 8]

Without --model, the bundled checkpoint: its held-out documents are read. A FILE of one's own is
divided by content first.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import torch
import transformers
from fit_quality import divided

import ropext
from ropext.base.narration import Call, Hooks
from ropext.base.table import as_markdown
from ropext.evaluation.measured_plan import RankingRequest, measure
from ropext.options.extend import Extend
from ropext.results.report.ranking import ranking_table, ranking_verdict

DEMO = Path(ropext.__path__[0], "demo")


def told(sentence: str) -> None:
    sys.stderr.write(sentence + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=str(DEMO / "checkpoint"))
    parser.add_argument("--data")
    parser.add_argument("--factor", type=float, nargs="+", default=[4.0, 8.0])
    asked = parser.parse_args()
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, transformers {transformers.__version__}\n")
    with tempfile.TemporaryDirectory(prefix="plan-measure-") as name:
        folder = Path(name)
        table = DEMO / "data" / "held-out.jsonl"
        if asked.data:
            table = divided(Path(asked.data), folder)[1]
        for factor in asked.factor:
            request = RankingRequest(asked.model, str(table), Extend(factor=factor))
            found = measure(request, Call(Hooks(told)))
            print(as_markdown([ranking_table(found.ranking)]))
            print(f"\n{ranking_verdict(found.ranking)}\nforward tokens: {found.tokens:,}\n")


if __name__ == "__main__":
    main()
