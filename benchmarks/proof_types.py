"""List the model types that the proof's forward pass runs on, and the cost of their proof.

    python benchmarks/proof_types.py > benchmarks/results/proof-types-DATE.md

One child process runs every rotary type of the census, as the tests' tiny config of it, extended 4
times. A type whose tiny config stock itself cannot build or run is counted with its reason.
"""

import importlib.metadata as metadata
import json
import resource
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))

import tiny

from ropext.base.errors import ProofFailed, RopextError
from ropext.families.config import census
from ropext.options.extend import Extend
from ropext.planning import Plan, make_plan
from ropext.verifying import proof
from ropext.verifying.proof.answers import Built

METHODS = ("yarn", "ntk", "pi")  # the first that the family can carry


def planned(config: dict[str, Any]) -> Plan | None:
    for method in METHODS:
        try:
            return make_plan(config, Extend(method=method, factor=4, even_so=True))
        except RopextError:
            continue
    return None


def outcome(built: Built, plan: Plan) -> tuple[str, str]:
    if built["error"]:
        return "not built by stock", built["error"]
    try:
        said = proof.compare(
            built, proof.ExpectedRotary(plan.sites, plan.factor), tensors=False
        ).forward
    except ProofFailed as error:
        return "FAILED", str(error)
    if "not run" in said:
        return "not run", said.partition(": ")[2]
    return ("finite, not compared" if "not compared" in said else "equal"), said


def main() -> None:
    bases = {
        name: tiny.wrapped(name, tiny.modern(found[0]))
        for name in sorted(census())
        if (found := tiny.text_part(name))
    }
    plans = {name: plan for name, config in bases.items() if (plan := planned(config))}
    with tempfile.TemporaryDirectory() as root:
        requests = []
        for name, plan in plans.items():
            place = Path(root, name)
            place.mkdir()
            (place / "config.json").write_text(json.dumps(plan.config))
            promise = proof.ExpectedRotary(plan.sites, plan.factor)
            base = bases[name]
            requests.append(
                proof.BuildRequest(place, plan.model.path, base, promise, plan.context, plan.target)
            )
        found = proof.build(requests, tensors=False)
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    rows: dict[str, list[tuple[str, str]]] = {}
    for (name, plan), built in zip(plans.items(), found, strict=True):
        kind, said = outcome(built, plan)
        rows.setdefault(kind, []).append((name, said.replace(Path(root).name, "")))
    report(rows, usage.ru_utime + usage.ru_stime, len(found))


def report(rows: dict[str, list[tuple[str, str]]], seconds: float, types: int) -> None:
    versions = {name: metadata.version(name) for name in ("torch", "transformers")}
    print("# The proof's forward pass, over model types\n")
    print("Command: `python benchmarks/proof_types.py`\n")
    print(f"Versions: {', '.join(f'{k} {v}' for k, v in versions.items())}.\n")
    print(f"CPU seconds of the child process: {seconds:.2f} for {types} types.\n")
    print("| outcome | types |\n|---|---|")
    for kind, entries in sorted(rows.items()):
        print(f"| {kind} | {len(entries)} |")
    for kind, entries in sorted(rows.items()):
        print(f"\n## {kind}\n")
        if kind == "equal":
            print(" ".join(name for name, _ in entries))
            continue
        for name, said in entries:
            print(f"- {name}: {said.splitlines()[0][:160]}")


if __name__ == "__main__":
    main()
