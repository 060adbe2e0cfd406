"""The long campaign: `python -m tests.fuzz --inputs 20000`; exits 1 when the promise was broken."""

import argparse
import math
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

from tests.support import paths  # noqa: F401  it makes the next imports possible

# isort: split
from fuzz import campaign, oracle
from hypothesis import given, seed, settings

SLICE = 500  # inputs of one seed: then hypothesis forgets them, and progress is printed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stock", type=int, default=200, help="plans to compare with transformers")
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="begin no more inputs after so long"
    )
    asked = parser.parse_args()
    tally = campaign.Tally()
    broken = ""
    until = time.monotonic() + 60 * asked.minutes
    with tempfile.TemporaryDirectory(prefix="ropext-fuzz-") as room:
        for begun in range(0, asked.inputs, SLICE):
            if broken or time.monotonic() > until:
                break
            inputs = min(SLICE, asked.inputs - begun)
            broken = draw(asked.seed + begun, inputs, Path(room), tally)
            print(f"{tally.outcomes.total()} inputs so far", flush=True)
    show(tally)
    print(broken)
    verdicts = oracle.judge(tally.planned, asked.stock)
    print(f"\nstock transformers: {verdicts.equal} configs equal, {len(verdicts.wrong)} different")
    for reason, count in sorted(verdicts.refused.items(), key=lambda pair: -pair[1]):
        print(f"{count:7}  stock cannot build it: {reason}")
    for sentence in verdicts.wrong:
        print(f"WRONG {sentence}")
    return 1 if broken or verdicts.wrong else 0


def draw(number: int, inputs: int, room: Path, tally: campaign.Tally) -> str:
    """Run so many inputs of one seed; return the traceback of a broken promise, with the smallest
    input that shows it."""

    @seed(number)
    @settings(campaign.LONG, max_examples=inputs)
    @given(campaign.inputs())
    def one(item: campaign.Input) -> None:
        campaign.run(item, room, tally)

    try:
        one()
    except Exception:
        return traceback.format_exc()
    return ""


def show(tally: campaign.Tally) -> None:
    """Print the counts by category."""
    for name, count in sorted(tally.outcomes.items()):
        print(f"{count:7}  {name}")
    print("\nthe commonest refusals")
    for shape, count in Counter(tally.sentences).most_common(40):
        print(f"{count:7}  {shape}")
    total = sum(tally.outcomes.values())
    planned = sum(n for name, n in tally.outcomes.items() if ": planned" in name)
    print(f"\n{total} inputs that kept the promise: {planned} planned ({planned / total:.0%});")
    print(f"slowest {tally.slowest:.2f} s; most memory for one {tally.largest / 2**20:.0f} MiB")


if __name__ == "__main__":
    sys.exit(main())
