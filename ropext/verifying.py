"""Check a directory, ropext's own or anybody's: spectrum, spellings, lengths, limits, weights."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ropext import families, forms, proof
from ropext.checkpoint import Snapshot, open_snapshot
from ropext.checkpoint.comparing import compare_weights
from ropext.checkpoint.jsontext import dump, read_object
from ropext.checkpoint.provenance import Record
from ropext.checkpoint.records import read_record
from ropext.checkpoint.staging import replace_file
from ropext.checkpoint.tokenizer import length_edits
from ropext.errors import InputError, ProofFailed
from ropext.families import Model
from ropext.looking import Served, read_again
from ropext.proof import Expected


@dataclass(frozen=True)
class Check:
    """One thing that was looked at."""

    what: str
    passed: bool
    sentence: str


@dataclass(frozen=True)
class Verification:
    """Everything that was checked, and what each loader reads."""

    checks: tuple[Check, ...]
    served: Served

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    def failures(self) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if not check.passed)

    def worst(self) -> str:
        """One sentence for the end of a failed run."""
        failed = self.failures()
        more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
        return f"{self.served.directory}: {failed[0].sentence}{more}"

    def to_json(self) -> dict[str, Any]:
        checks = [asdict(check) for check in self.checks]
        return {"passed": self.passed, "checks": checks} | self.served.to_json()


def check_directory(
    directory: str | Path,
    *,
    against: str | None = None,
    deep: bool = False,
    endpoint: str | None = None,
    trust_remote_code: bool = False,
    **loading: Any,
) -> Verification:
    """Check a checkpoint directory against its own record, a saved plan, or its base.

    With `endpoint`, a running server is asked too; `loading` says how transformers runs beside it.
    """
    snapshot = open_snapshot(str(directory), weights=True)
    record = read_record(snapshot.directory)
    model = families.as_read(snapshot.config)
    plan, base = _against(against)
    wanted = _expected(model, record, plan)
    checks = [
        *_spellings(snapshot.config),
        *_lengths(snapshot, model, record, plan),
        *_proof(snapshot, model, wanted, trust_remote_code),
        *_weights(snapshot, record, base, deep),
    ]
    if endpoint is not None:
        loading |= {"trust_remote_code": trust_remote_code}
        checks.append(_endpoint(endpoint, snapshot, model, record, loading))
    return Verification(tuple(checks), read_again(snapshot))


def _against(against: str | None) -> tuple[dict[str, Any] | None, Snapshot | None]:
    """A saved plan (a JSON file), or the base (a directory or hub id)."""
    if against is None:
        return None, None
    if Path(against).is_file():
        plan = read_object(Path(against))
        if not isinstance(plan.get("sites"), list) or not isinstance(plan.get("target"), int):
            raise InputError(f"--against {against} is not a plan; `ropext plan --json` writes one")
        return plan, None
    return None, open_snapshot(against, weights=True)


def _expected(model: Model, record: Record | None, plan: dict[str, Any] | None) -> list[Expected]:
    """What the spectrum should be: as planned, as recorded, or as we read the config."""
    if plan is not None:
        return [_from_plan(site, plan) for site in plan["sites"]]
    if record is not None:
        return proof.recorded(record)
    found = []
    for site in model.sites:
        rope = site.rope
        factor = rope.context / rope.original_context
        found.append(proof.promise(site.label, rope.spectrum, site.params, factor, site.scaled))
    return found


def _from_plan(site: Any, plan: Mapping[str, Any]) -> Expected:
    try:
        short = site["short_inv_freq"]
        return Expected(
            _a(str, site["label"]),
            tuple(map(_number, site["inv_freq"])),
            _number(site["attention_factor"]),
            _number(site["softmax_factor"]),
            _a(str, site["rope"].get("rope_type", "default")),
            _number(plan["factor"]),
            _a(bool, site["scaled"]),
            tuple(map(_number, short)) if short else None,
            forms.steepness(site["rope"]),
        )
    except (KeyError, TypeError, AttributeError, OverflowError) as error:
        raise InputError(f"--against: the plan is damaged at its sites ({error})") from None


def _a(kind: type, value: Any) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"{repr(value)[:60]} is no {kind.__name__}")
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{repr(value)[:60]} is no number")
    return float(value)


def _spellings(config: dict[str, Any]) -> Iterable[Check]:
    problems = families.check_spellings(config)
    if not problems:
        yield Check("spellings", True, "every spelling says the same")
    for problem in problems:
        fix = "; --fix writes it anew" if problem.fixable else ""
        yield Check("spellings", False, problem.sentence + fix)


def _lengths(
    snapshot: Snapshot, model: Model, record: Record | None, plan: dict[str, Any] | None
) -> Iterable[Check]:
    target = plan["target"] if plan else record.target if record else model.context
    if model.stated_context != target:
        yield Check(
            "length",
            False,
            f"max_position_embeddings is {model.stated_context}, the target is {target}",
        )
    else:
        yield Check("length", True, f"max_position_embeddings is the target of {target}")
    context = (
        record.context
        if record
        else model.scaled_sites[0].rope.original_context
        if model.scaled_sites
        else model.context
    )
    edits, _ = length_edits(snapshot, context, target)
    for edit in edits:
        yield Check(
            "limits",
            False,
            f"{edit.file}: {edit.key} of {str(edit.before)[:80]} caps the target of {target}",
        )
    if not edits:
        yield Check("limits", True, "no tokenizer or generation limit caps it")


def _proof(
    snapshot: Snapshot, model: Model, wanted: list[Expected], trust_remote_code: bool
) -> Iterable[Check]:
    try:
        proved = proof.prove(
            snapshot.directory,
            wanted,
            text_path=model.path,
            trust_remote_code=trust_remote_code,
        )
    except ProofFailed as failed:
        yield Check("spectrum and tensors", False, str(failed))
        return
    packed = proved.tensors_not_compared
    yield Check(
        "spectrum and tensors",
        True,
        f"transformers {proved.transformers} builds {proved.rotary_modules} rotary and "
        f"{proved.attention_modules} attention modules and {proved.tensors_compared} tensors as "
        f"expected (worst relative error {proved.worst.error:.1e})"
        + (f"; {packed} packed tensors not compared" if packed else ""),
    )


def _weights(
    snapshot: Snapshot, record: Record | None, base: Snapshot | None, deep: bool
) -> Iterable[Check]:
    if base is None and record is None:
        return
    source: Snapshot | Mapping[str, Any] = base if base is not None else record.weights  # type: ignore[union-attr]
    findings = compare_weights(source, snapshot.directory, deep=deep)
    bad = [finding for finding in findings if not finding.same]
    for finding in bad:
        yield Check("weights", False, finding.sentence)
    if not bad:
        hows = ", ".join(sorted({finding.how for finding in findings}))
        yield Check("weights", True, f"{len(findings)} weight files unchanged (by {hows})")


def _endpoint(
    url: str,
    snapshot: Snapshot,
    model: Model,
    record: Record | None,
    loading: Mapping[str, Any],
) -> Check:
    from ropext import endpoint  # late: it runs the model

    rope = model.scaled_sites[0].rope
    context = record.context if record else rope.original_context
    try:
        probed = endpoint.probe(
            url, snapshot.directory, context=context, target=model.context, **loading
        )
    except ProofFailed as failed:
        return Check("endpoint", False, str(failed))
    worst = max(prompt.difference for prompt in probed.prompts)
    limit = "no limit that it tells" if probed.limit is None else f"a limit of {probed.limit}"
    return Check(
        "endpoint",
        True,
        f"{url} serves {probed.model} with {limit}; its log-probabilities are within {worst:.1e} "
        f"of transformers' (tolerance {probed.tolerance:g})",
    )


def repair(directory: str | Path) -> tuple[dict[str, Any], tuple[families.Edit, ...]]:
    """The config with every spelling written anew from what stock transformers 5 reads of it."""
    snapshot = open_snapshot(str(directory))
    fixed = families.respell(snapshot.config)
    return fixed, tuple(families.diff(snapshot.config, fixed))


def write_config(directory: str | Path, config: Mapping[str, Any]) -> None:
    """Replace config.json in one step, so that a reader sees the old or the new one whole."""
    replace_file(Path(directory) / "config.json", dump(config))
