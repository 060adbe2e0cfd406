"""Runs side by side: who is compared with whom, and which gates hold."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ropext.errors import GateFailed, InputError, UsageError
from ropext.results.comparison import Contender, differences
from ropext.results.gates import Gate, Outcome, check_gate, split_spec
from ropext.results.rundir import Run, read_run
from ropext.results.values import Value


def gather(specs: Sequence[str]) -> tuple[list[Run], dict[str, Contender]]:
    """The runs, and everyone in them by a label that tells them apart.

    The base of the first run that has one stands for all: it is the same short window.
    """
    runs, everyone, with_base = list[Run](), list[tuple[Run, str]](), False
    for spec in specs:
        path, wanted = split_spec(spec)
        run = read_run(path)
        runs.append(run)
        for label in _chosen(run, wanted):
            is_base = run.results["variants"][label]["kind"] == "base"
            if not (is_base and with_base and wanted is None):
                everyone.append((run, label))
            with_base = with_base or is_base
    found = dict[str, Contender]()
    for run, label in everyone:
        name = _name(run, label, everyone)
        if name in found:
            raise UsageError(f"compare names {name} twice")
        found[name] = replace(run.contenders[label], label=name)
    if len(found) < 2:
        raise UsageError("compare needs two models at least: name another RUN")
    return runs, found


def _name(run: Run, label: str, everyone: Sequence[tuple[Run, str]]) -> str:
    """The shortest name that nobody else has: variant, run:variant, path:variant."""
    if sum(other == label for _, other in everyone) == 1:
        return label
    short = f"{run.path.name}:{label}"
    same = sum(f"{other.path.name}:{its}" == short for other, its in everyone)
    return short if same == 1 else f"{run.path}:{label}"


def _chosen(run: Run, wanted: str | None) -> dict[str, Contender]:
    if wanted is None:
        return dict(run.contenders)
    if wanted not in run.contenders:
        names = ", ".join(run.contenders)
        raise InputError(f"{run.path} holds no variant {wanted!r}; it has {names}")
    return {wanted: run.contenders[wanted]}


def judge(run: Run, gates: Sequence[Gate]) -> list[Outcome]:
    """Every gate on every variant it concerns: the one it names, else all that were extended
    (all that read the long window, where none was)."""
    outcomes = []
    for gate in gates:
        for label in _concerned(run, gate):
            opponent = None
            if gate.run is None:
                stored = run.results["variants"][label]["metrics"]
                values = {name: Value.from_json(data) for name, data in stored.items()}
            elif gate.run == label:
                continue
            else:
                opponent = _opponent(run, gate, label)
                values = differences(run.contenders[label], opponent)
            outcome = check_gate(gate, label, values)
            both = (run.contenders[label], *([opponent] if opponent else []))
            marks = [f"{own.label}: {mark}" for own in both if (mark := own.mark_at(gate.metric))]
            told = f" ({', '.join(marks)})" if marks else ""
            outcomes.append(replace(outcome, reason=f"{outcome.reason}{told}"))
    return outcomes


def _concerned(run: Run, gate: Gate) -> list[str]:
    kinds: Mapping[str, str] = {
        label: own["kind"] for label, own in run.results["variants"].items()
    }
    if gate.variant is not None:
        if gate.variant not in kinds:
            names = ", ".join(kinds)
            raise UsageError(f"--fail-if {gate.text!r}: no variant {gate.variant!r}; has {names}")
        return [gate.variant]
    extended = [label for label, kind in kinds.items() if kind == "extended"]
    return extended or [label for label, kind in kinds.items() if kind != "base"]


def _opponent(run: Run, gate: Gate, label: str) -> Contender:
    """Another variant of this run, or a run directory (its variant of the same label, else its
    only one)."""
    name = gate.run or ""
    if name in run.contenders:
        return run.contenders[name]
    path, variant = split_spec(name)
    if not path.is_dir():
        names = ", ".join(run.contenders)
        raise UsageError(
            f"--fail-if {gate.text!r}: {name!r} is neither a run directory nor a variant ({names})"
        )
    other = read_run(path)
    if variant is not None:
        return _chosen(other, variant)[variant]
    readers = [own for own, data in other.results["variants"].items() if data["kind"] != "base"]
    if label in readers:
        return other.contenders[label]
    if len(readers) != 1:
        raise UsageError(
            f"--fail-if {gate.text!r}: {name} holds several models ({', '.join(readers)}); write "
            f"vs {name}:{readers[0] if readers else 'VARIANT'}"
        )
    return other.contenders[readers[0]]


def raise_if_failed(outcomes: Sequence[Outcome]) -> None:
    """GateFailed with the reason of every gate that did not hold."""
    failed = [outcome for outcome in outcomes if not outcome.passed]
    if failed:
        reasons = "; ".join(f"{outcome.gate} ({outcome.reason})" for outcome in failed)
        raise GateFailed(f"{len(failed)} of {len(outcomes)} gates failed: {reasons}")
