"""The long campaign: `python -m tests.fuzz --inputs 20000`; exits 1 when the promise was broken."""

import argparse
import sys
import tempfile
from collections import Counter
from pathlib import Path
from random import Random

from tests.support import paths  # noqa: F401  it leads to what follows

# isort: split
from fuzz import campaign, oracle


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=20_000)
    parser.add_argument("--first", type=int, default=100_000, help="the first seed")
    parser.add_argument("--stock", type=int, default=200, help="plans to compare with transformers")
    asked = parser.parse_args()
    tally, broken = campaign.Tally(), []
    with tempfile.TemporaryDirectory(prefix="ropext-fuzz-") as room:
        for number in range(asked.first, asked.first + asked.inputs):
            item = campaign.make_input(Random(number), number)
            try:
                campaign.run(item, Path(room), tally)
            except Exception as error:  # every broken promise is told with its seed
                broken.append(
                    f"input {number} ({item.file}): {type(error).__name__}: {error}"[:400]
                )
                print(broken[-1], flush=True)
    show(tally, broken)
    verdicts = oracle.judge(tally.planned, asked.stock)
    print(f"\nstock transformers: {verdicts.equal} configs equal, {len(verdicts.wrong)} different")
    for reason, count in sorted(verdicts.refused.items(), key=lambda pair: -pair[1]):
        print(f"{count:7}  stock cannot build it: {reason}")
    for sentence in verdicts.wrong:
        print(f"WRONG {sentence}")
    return 1 if broken or verdicts.wrong else 0


def show(tally: campaign.Tally, broken: list[str]) -> None:
    """Counts by category."""
    for name, count in sorted(tally.outcomes.items()):
        print(f"{count:7}  {name}")
    print("\nthe commonest refusals")
    for shape, count in Counter(tally.sentences).most_common(40):
        print(f"{count:7}  {shape}")
    total = sum(tally.outcomes.values()) + len(broken)
    planned = sum(n for name, n in tally.outcomes.items() if ": planned" in name)
    seconds, number = tally.slowest
    memory, largest = tally.largest
    print(f"\n{total} inputs: {planned} planned ({planned / total:.0%}), {len(broken)} broken;")
    print(f"slowest {seconds:.2f} s (input {number}); most memory for one input ", end="")
    print(f"{memory / 2**20:.0f} MiB (input {largest})")


if __name__ == "__main__":
    sys.exit(main())
