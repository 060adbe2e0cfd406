"""What an evaluation keeps in its folder (`workdir` owns that): arrays, items and results.

    documents.json                         names, token hashes by length
    documents/HASH.npy                     bytes of text per token
    variants/STORE/pass-LENGTH/HASH.npy    NLL of every token, one pass of that length
    variants/STORE/short/HASH.npy          NLL through the short window
    variants/STORE/stride-LENGTH/HASH.npy  weighted sum and weight of the strided loop
    variants/STORE/items/UNIT.json         retrieval scores
    items.jsonl, results.json, report.md, report.html, plots/*.png

A unit of work is one file under variants/; it is written beside its name and renamed, so a file
that is there is complete. A store is named by the label of its variant and a digest of all that
decides its units, so that what is there is never of another model. Nothing here holds a time.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ropext import workdir
from ropext.checkpoint.provenance import digest
from ropext.errors import GateFailed, InputError, UsageError
from ropext.files import read_json, write_json
from ropext.results.comparison import Contender, differences
from ropext.results.gates import Gate, Outcome, check_gate, split_spec
from ropext.results.overlap import mark_of
from ropext.results.perplexity import Documents, Frame
from ropext.results.retrieval import ItemScore
from ropext.results.stores import Store, write_array
from ropext.results.values import Bootstrap, Value
from ropext.workdir import STORES

SCHEMA = 1


def write_documents(path: Path, documents: Documents, longest: int) -> None:
    """Write documents.json, and the bytes per token of each."""
    rows = []
    for name, hashes, counts in zip(
        documents.names, documents.prefix_hashes, documents.token_bytes, strict=True
    ):
        rows.append({"name": name, "hashes": {str(length): h for length, h in hashes.items()}})
        write_array(path / "documents" / f"{hashes[longest][:32]}.npy", counts.astype(np.int32))
    write_json(path / "documents.json", rows)


def store(path: Path, name: str) -> Store:
    """The losses and answers of one variant of a run."""
    return Store(path / STORES / name)


def keep_only(path: Path, units: Collection[Path]) -> None:
    """Delete what a run before this one read and this one does not."""
    names = {unit.relative_to(path).as_posix() for unit in units}
    workdir.remove(path, lambda name: name in names or not _is_unit(name))


def _is_unit(name: str) -> bool:
    return name.startswith(STORES) and "/lm-eval/" not in name


@dataclass(frozen=True)
class Run:
    """A finished run, read back."""

    path: Path
    manifest: Mapping[str, Any]
    results: Mapping[str, Any]
    contenders: Mapping[str, Contender]

    @property
    def key(self) -> str:
        """SHA-256 of what decides the numbers."""
        return digest(self.manifest["decides"])


def read_run(path: Path) -> Run:
    """Read a run directory; what is missing or torn is said by name."""
    manifest = workdir.read(path)
    if manifest is None or manifest["command"] != "eval":
        raise InputError(f"{path} holds no run of ropext eval")
    if not (path / "results.json").exists():
        raise InputError(f"{path} is not finished; run the same ropext eval again to complete it")
    results = read_json(path / "results.json")
    if results.get("schema") != SCHEMA:
        raise InputError(
            f"{path}/results.json has schema {results.get('schema')!r}; this ropext reads {SCHEMA}"
        )
    try:
        return Run(path, manifest, results, _contenders(path, results))
    except (KeyError, TypeError, ValueError, OSError) as error:
        raise InputError(f"{path} is damaged: {error!r}; evaluate again") from error


def _contenders(path: Path, results: Mapping[str, Any]) -> dict[str, Contender]:
    frame = Frame(
        int(results["context"]),
        tuple(int(length) for length in results["lengths"]) or (2,),
        int(results["tail_tokens"]),
        Bootstrap(int(results["seed"])),
        int(results.get("mask_stride", 0)),
    )
    documents = _read_documents(path, frame) if (path / "documents.json").exists() else None
    items: dict[str, list[ItemScore]] = {}
    if (path / "items.jsonl").exists():
        for line in (path / "items.jsonl").read_text(encoding="utf-8").splitlines():
            data = json.loads(line)
            if data["task"] not in results.get("not_measurable", ()):
                items.setdefault(data.pop("variant"), []).append(ItemScore.from_json(data))
    return {
        label: Contender(
            label,
            frame,
            documents,
            store(path, variant["store"]).reading(
                label, variant["passes"], [own[frame.longest] for own in documents.prefix_hashes]
            )
            if documents is not None
            else None,
            tuple(items.get(label, ())),
            mark_of(variant),
            mark_of(variant, questions=True),
        )
        for label, variant in results["variants"].items()
    }


def _read_documents(path: Path, frame: Frame) -> Documents:
    rows = read_json(path / "documents.json")
    hashes = [{int(length): h for length, h in row["hashes"].items()} for row in rows]
    return Documents(
        tuple(row["name"] for row in rows),
        tuple(hashes),
        tuple(
            # Mapped: a header that claims more than its file holds is refused, not allocated.
            np.load(file, mmap_mode="r").astype(np.int64)
            for file in [path / "documents" / f"{own[frame.longest][:32]}.npy" for own in hashes]
        ),
    )


def gather(specs: Sequence[str]) -> tuple[list[Run], dict[str, Contender]]:
    """Open the runs, and everyone in them by a label that tells them apart.

    Runs of one base share its short window, which is shown once; another base has its own row.
    """
    runs, everyone, bases = list[Run](), list[tuple[Run, str]](), list[Any]()
    for spec in specs:
        path, wanted = split_spec(spec)
        run = read_run(path)
        runs.append(run)
        for label in _chosen(run, wanted):
            own = run.manifest["decides"]["variants"].get(label)  # None: somebody renamed it
            weights = own and (own["model"]["weights_sha256"], own["adapter_sha256"])
            base = weights, own and own.get("inv_freq"), run.results["context"]
            is_base = run.results["variants"][label]["kind"] == "base"
            if not (is_base and base in bases and wanted is None):
                everyone.append((run, label))
            bases += [base] if is_base else []
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
    same = sum(f"{other.path.name}:{name}" == short for other, name in everyone)
    return short if same == 1 else f"{run.path}:{label}"


def _chosen(run: Run, wanted: str | None) -> dict[str, Contender]:
    if wanted is None:
        return dict(run.contenders)
    if wanted not in run.contenders:
        names = ", ".join(run.contenders)
        raise InputError(f"{run.path} holds no variant {wanted!r}; it has {names}")
    return {wanted: run.contenders[wanted]}


def judge(run: Run, gates: Sequence[Gate]) -> list[Outcome]:
    """Judge every gate on every variant it concerns: the one it names, else all that were extended
    (all that read the long window, where none was). One that cannot be answered fails: what was
    measured is to be shown all the same."""
    outcomes = []
    for gate in gates:
        for label in [own for own in _concerned(run, gate) if own != gate.run]:
            try:
                outcomes.append(_judged(run, gate, label))
            except (UsageError, InputError) as error:
                outcomes.append(Outcome(gate.text, label, False, None, f"{label}: {error}"))
    return outcomes


def _judged(run: Run, gate: Gate, label: str) -> Outcome:
    opponent = None
    reason = run.results.get("not_measurable", {}).get(gate.task)
    if reason is not None:
        return Outcome(gate.text, label, False, None, f"{label}: {reason}")
    if gate.run is None:
        stored = run.results["variants"][label]["metrics"]
        values = {name: Value.from_json(data) for name, data in stored.items()}
    else:
        opponent = _opponent(run, gate, label)
        values = differences(run.contenders[label], opponent)
    outcome = check_gate(gate, label, values)
    both = (run.contenders[label], *([opponent] if opponent else []))
    marks = [f"{each.label}: {m}" for each in both if (m := each.mark_at(gate.task))]
    marked = f" ({', '.join(marks)})" if marks else ""
    return replace(outcome, reason=f"{outcome.reason}{marked}")


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
    return extended or [label for label, kind in kinds.items() if kind == "untouched"]


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
    short = ("base", "control")
    readers = [own for own, data in other.results["variants"].items() if data["kind"] not in short]
    if label in readers:
        return other.contenders[label]
    if len(readers) != 1:
        raise UsageError(
            f"--fail-if {gate.text!r}: {name} holds several models ({', '.join(readers)}); write "
            f"vs {name}:{readers[0] if readers else 'VARIANT'}"
        )
    return other.contenders[readers[0]]


def raise_if_failed(outcomes: Sequence[Outcome]) -> None:
    """Raise GateFailed with the reason of every gate that did not hold."""
    failed = [outcome for outcome in outcomes if not outcome.passed]
    if failed:
        reasons = "; ".join(f"{outcome.gate} ({outcome.reason})" for outcome in failed)
        raise GateFailed(f"{len(failed)} of {len(outcomes)} gates failed: {reasons}")
