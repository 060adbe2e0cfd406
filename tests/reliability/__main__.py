"""The long campaign: `python -m tests.reliability --kills 1000`; exits 1 if a promise was broken.

It kills every command at write boundaries, in the middle of writes and at random moments, and makes
calls fail. Then it prints a table of the kills' places and of the states after them. With --guard
PART it checks instead that no command loses an input: each input in each relation to the output.
"""

import argparse
import math
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support import paths  # noqa: F401  it makes the next imports possible

# isort: split
from hub_stub import Stub, serving
from reliability import campaign, commands, guarding

# Shares of --kills, by command: a command that writes at more points is killed more often.
SHARES = {
    "extend": 0.09,
    "extend --link hard": 0.07,
    "extend --force": 0.07,
    "extend GGUF": 0.04,
    "extend, proved": 0.005,
    "fit": 0.17,
    "finetune": 0.19,
    "eval": 0.19,
    "run": 0.175,
}
AT_RANDOM = 0.2  # the share of a command's kills at a random moment instead of a boundary
KILLING = 0.85  # the share of a command's part of --minutes; the rest is for failing calls
WANTED = 50  # kills in each of the three middle phases


def main() -> int:
    asked = parse()
    with ready() as folder:
        return conduct(asked, folder)


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--faults", type=int, help="failing calls [a third of --kills]")
    parser.add_argument("--only", help="names of commands, comma-separated")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--wanted", type=int, default=WANTED, help="kills in each middle phase")
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="begin nothing more after so long"
    )
    parser.add_argument(
        "--guard", choices=guarding.PARTS, help="instead a campaign of inputs and outputs"
    )
    return parser.parse_args(words)


@contextmanager
def ready() -> Iterator[Path]:
    """Make a folder for campaigns, with a hub to push to and all modules of the commands
    imported."""
    with (
        serving(Stub({})) as hub,
        tempfile.TemporaryDirectory(prefix="ropext-reliability-") as folder,
    ):
        hub.writers["hf_token"] = "org"
        os.environ |= {"HF_ENDPOINT": hub.url, "HF_TOKEN": "hf_token", "HF_HUB_OFFLINE": "0"}
        os.environ |= {"HF_HUB_DISABLE_XET": "1"}  # the stub speaks Git LFS
        campaign.preload()
        yield Path(folder)


def conduct(asked: argparse.Namespace, folder: Path) -> int:
    """Run one campaign and return its exit code."""
    inputs = commands.prepare(folder)
    if asked.guard:
        runs = guarding.make_runs(folder / "runs", inputs)
        guarded = guarding.Guarding(folder, inputs, runs)
        guarding.PARTS[asked.guard](guarded)
        guarding.show(guarded)
        return 1 if guarded.broken else 0
    known = commands.commands(inputs)
    names = asked.only.split(",") if asked.only else list(SHARES)
    running = campaign.Campaign(folder, inputs, asked.seed)
    for name in names:
        command = known[name]
        seconds = 60 * asked.minutes * SHARES[name] / sum(SHARES[own] for own in names)
        running.until = time.monotonic() + KILLING * seconds
        disturb(running, command, round(asked.kills * SHARES[name]))
        running.until += (1 - KILLING) * seconds
        wanted = asked.kills // 3 if asked.faults is None else asked.faults
        if not command.proved:
            campaign.faults(running, command, round(wanted * SHARES[name]))
        show_line(running, name)
    show(running.tally, names)
    short = [p for p in campaign.PHASES[1:4] if running.tally.phase(p) < asked.wanted]
    for phase in short:
        print(f"too few kills {phase}")
    return 1 if running.tally.broken or short else 0


def disturb(running: campaign.Campaign, command: commands.Command, kills: int) -> None:
    """Run the kills of one command."""
    if not kills:
        return  # nor is it run undisturbed
    at_random = kills if command.proved else round(kills * AT_RANDOM)
    for wish in running.wishes(command, kills - at_random):
        running.kill(command, wish)
    for _ in range(at_random):
        running.kill_at_random(command)


def show_line(running: campaign.Campaign, name: str) -> None:
    steps = running.truths[name][1] if name in running.truths else []
    said = len(running.tally.broken)
    print(f"{name}: {len(steps)} calls change a file; {said} promises broken so far", flush=True)


def show(tally: campaign.Tally, names: list[str]) -> None:
    """Print two tables as Markdown, and every broken promise."""
    print("\n| killed | " + " | ".join(campaign.PHASES) + " | all |")
    print("|---" * (len(campaign.PHASES) + 2) + "|")
    for name in names:
        row = [tally.phases[name, phase] for phase in campaign.PHASES]
        print(f"| {name} | " + " | ".join(map(str, row)) + f" | {sum(row)} |")
    row = [tally.phase(phase) for phase in campaign.PHASES]
    print("| all | " + " | ".join(map(str, row)) + f" | {sum(row)} |")
    print("\n| found afterwards | count |\n|---|---|")
    for (name, state), count in sorted(tally.states.items()):
        print(f"| {name}: {state} | {count} |")
    print("\n| failing calls | count |\n|---|---|")
    for (name, what), count in sorted(tally.faults.items()):
        print(f"| {name}: {what} | {count} |")
    print(f"\n{len(tally.broken)} promises broken")


if __name__ == "__main__":
    sys.exit(main())
