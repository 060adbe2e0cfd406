"""Check a directory, ropext's own or anybody's: spectrum, spellings, lengths, limits, weights."""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from ropext import bundled, families, forms, loaders, proof
from ropext.checkpoint import (
    OTHER_SET,
    VARIANT,
    Snapshot,
    check_asked,
    open_snapshot,
    provenance,
    with_weights,
)
from ropext.checkpoint.staging import replace_file
from ropext.checkpoint.tokenizer import length_edits
from ropext.checkpoint.weights import WeightFile, compare_weights, content_digest, weigh
from ropext.errors import InputError, ProofFailed, RopextError, UnsupportedModel, UsageError, listed
from ropext.families import Model
from ropext.inputs import model_name
from ropext.inspecting import Served, open_model, positions_of, read_again, said_of
from ropext.jsontext import dump, read_object, read_redirected
from ropext.narration import Say, Show, silent, unseen
from ropext.planning.plan import WRONG
from ropext.ports.beside import PlainServer, Prompts, compare_beside, prompt_lengths
from ropext.ports.server import require_server, served_model, server_at
from ropext.proof import Promise
from ropext.rope import ABSENT, CONFIG, Edit, Positions, Site
from ropext.scaling.tables import METHODS, growth

if TYPE_CHECKING:
    from ropext.proof import server


@dataclass(frozen=True)
class Check:
    """One thing that was looked at."""

    what: str
    passed: bool | None  # None: there was nothing to compare with
    sentence: str


@dataclass(frozen=True)
class Verification:
    """Everything that was checked, and what each loader reads where nothing is wrong."""

    directory: str
    checks: tuple[Check, ...]
    served: Served | None = field(repr=False)

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    def failures(self) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if not check.passed)

    @property
    def verdict(self) -> str:
        """What came of it, in one line."""
        states = [check.passed for check in self.checks]
        wrong = states.count(False)
        unknown = states.count(None)
        counts = [f"{wrong} wrong"] * bool(wrong) + [f"{unknown} not known"] * bool(unknown)
        return f"{self.directory}: {', '.join(counts) or 'all right'} ({len(states)} checks)"

    def to_json(self) -> dict[str, Any]:
        checks = [asdict(check) for check in self.checks]
        out = {"directory": self.directory, "passed": self.passed, "checks": checks}
        return out | (self.served.to_json() if self.served else {})


def check_directory(
    directory: str | Path,
    *,
    against: str | None = None,
    deep: bool = False,
    record: bool = False,
    endpoint: str | None = None,
    beside: PlainServer | None = None,
    tolerance: float | None = None,
    trust_remote_code: bool = False,
    say: Say = silent,
    show: Show = unseen,
    **loading: Any,
) -> Verification:
    """Check a checkpoint directory against its own record, a saved plan, or its base.

    `record` writes into that record what `deep` compares with. With `endpoint`, a running server
    is asked too; `loading` says how transformers runs beside it. A saved plan in place of the
    directory is held against a server that runs its base by an override. With `beside`, the server
    is held against one of the plain model, and no model is loaded; `tolerance` is in nats.
    """
    loading |= {"trust_remote_code": trust_remote_code}
    directory = model_name(directory)
    if tolerance is not None:
        loading |= {"tolerance": tolerance}
    if endpoint is not None:
        require_server(endpoint)
    if endpoint is not None and str(directory).endswith(".json") and Path(directory).is_file():
        if against is not None or deep:
            raise UsageError(f"{directory} is a plan; --against and --deep are for a checkpoint")
        return _served_plan(Path(directory), AskedServer(endpoint, beside), loading, say)
    snapshot = with_weights(open_model(str(directory)))
    checking = Checking(
        snapshot, provenance.record_in(snapshot), deep, record, trust_remote_code, show
    )
    if (positions := positions_of(snapshot)) is not None:
        if endpoint is not None:
            raise UsageError(f"--endpoint is for rotary models, and {directory} rotates nothing")
        tables = [*_other_sets(snapshot), *checking.table(positions, against)]
        return Verification(snapshot.name, tuple(tables), None)
    with said_of(snapshot):
        model = families.as_read(snapshot.config)
    claim, base = _claim(snapshot, model, checking.record, against)
    if snapshot.is_gguf:
        checks = [*checking.file(claim, base)]
    else:
        checks = [
            *_other_sets(snapshot),
            *_spellings(snapshot.config, model, checking.record is not None),
            *_lengths(snapshot, model, claim),
            *checking.proof(model, claim),
            *checking.weights(base),
        ]
    if endpoint is not None:
        asked = AskedServer(endpoint, beside)
        checks.append(_endpoint(asked, snapshot, model, claim, loading, say))
    broken = any(check.passed is False for check in checks)
    served = None if broken else read_again(snapshot)
    return Verification(snapshot.name, tuple(checks), served)


@dataclass(frozen=True)
class Claim:
    """What a directory is checked against."""

    context: int
    target: int
    sites: tuple[Site, ...]
    base: Mapping[str, Any] | None  # the config before, where it is known
    edited: tuple[str, ...] = ()  # dotted keys of it that the extension writes

    @property
    def promise(self) -> Promise:
        """What stock is to build of it."""
        return Promise(self.sites, self.target / self.context)


def _claim(
    snapshot: Snapshot, model: Model, record: provenance.Record | None, against: str | None
) -> tuple[Claim, Snapshot | None]:
    """What should be true: as a saved plan says (a JSON file), as recorded, or as we read the
    config; and the base, where `against` names one (a directory or hub id)."""
    if against is not None and Path(against).is_file() and bundled.find_gguf(against) is None:
        return _planned(Path(against)), None
    base = open_model(against) if against is not None else None
    if base is not None and base.kind != snapshot.kind:
        raise UsageError(
            f"--against {against} is {base.kind}, and {snapshot.name} is {snapshot.kind}; name one "
            "of its kind, or a saved plan"
        )
    if base is not None:
        base = with_weights(base)
    before = base.config if base is not None else None
    if record is not None:
        before = before or record.base["config"]
        edited = _edited(record)
        return Claim(record.context, record.target, record.sites, before, edited), base
    context = model.scaled_sites[0].rope.original_context
    edited = tuple[str, ...]()
    if before is not None and base is not None and not base.is_gguf:
        plain = families.as_read(before)
        params = {s.label: s.params for s in model.scaled_sites}
        written = families.write(dict(before), plain, params, model.context)
        edited = tuple(edit.key for edit in families.diff(before, written))
    return Claim(context, model.context, model.sites, before, edited), base


def _edited(record: provenance.Record) -> tuple[str, ...]:
    """The keys of config.json that the recorded extensions wrote."""
    keys = list[str]()
    for link in provenance.lineage(record):
        for edit in provenance.edits_of(link):
            if edit.file == CONFIG:
                keys.append(edit.key)
    return tuple(keys)


LISTED = 5  # names shown of a longer list
CONSOLIDATED = re.compile(r"consolidated[\w.-]*\.safetensors")
# What a save by another program or a user's choice changes, and nothing proved follows from.
FREE = {"_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache"}


def _config(
    config: Mapping[str, Any],
    base: Mapping[str, Any] | None,
    edited: Iterable[str],
    changed: Iterable[str] | None,
) -> Iterable[Check]:
    """Compare every key beside the edits with the base's; `changed` are those that stock reads
    otherwise, None where that is not known."""
    if base is None:
        return

    def within(key: str, others: Iterable[str]) -> bool:
        return any(f"{key}.".startswith(f"{o}.") or f"{o}.".startswith(f"{key}.") for o in others)

    edits = {edit.key: edit for edit in families.diff(base, config)}
    beside = {key: edit for key, edit in edits.items() if not within(key, edited)}
    both = [key for key, e in beside.items() if ABSENT not in (e.before, e.after)]
    differing = both if changed is None else [key for key in beside if within(key, changed)]
    wrong = [key for key in differing if key.rpartition(".")[2] not in FREE]
    for key in wrong:
        was, now = (repr(v)[:60] for v in (beside[key].before, beside[key].after))
        yield Check("config", False, f"config.json: {key} is {now}, the base's {was}")
    if wrong or changed is None:
        return
    more = [f"{len(beside) - LISTED} more"] if len(beside) > LISTED else []
    names = listed([*beside][:LISTED] + more)
    others = f", but for {names}, by which stock builds the same" if beside else ""
    yield Check("config", True, f"every key beside the edits is the base's{others}")


@dataclass(frozen=True)
class Checking:
    """What is checked, and how deep."""

    snapshot: Snapshot
    record: provenance.Record | None
    deep: bool  # every byte of the weights
    keep: bool  # their SHA-256 is written into the record
    trust_remote_code: bool
    show: Show

    def table(self, positions: Positions, against: str | None) -> Iterator[Check]:
        """Check a directory that rotates nothing: its lengths, its rows, its other tensors."""
        from ropext.checkpoint import tables  # late: no rotary model needs it

        snapshot = self.snapshot
        record = self.record
        if not positions.carried:
            raise UnsupportedModel(families.refusal(positions))
        target = record.target if record else positions.context
        said = f"{positions.key} gives {positions.context} tokens"
        right = positions.context == target
        yield Check("length", right, said + ("" if right else f", the record says {target}"))
        try:
            position_tables = tables.find_tables(snapshot, positions)
        except InputError as error:
            yield Check("rows", False, str(error))
            return
        if position_tables:
            names = ", ".join(f"{table.name} {table.shape[0]}" for table in position_tables)
            front = f"{positions.offset} of them in front of the first position"
            yield Check("rows", True, f"{names}, {front}")
        yield from _limits(snapshot, record.context if record else target, target)
        base = open_snapshot(against, weights=True) if against is not None else None
        if base is not None:
            if record is None or record.method not in METHODS:
                raise UsageError(f"--against needs a ropext.json, which {snapshot.name} lacks")
            yield from self.against(positions, record, base)
        weights = record.weights if record is not None else {}
        hashed = any(file.sha256 for file in weights.values())
        recorded = self.deep and (base is None or hashed)
        yield from replace(self, deep=recorded).weights(None)
        before = base.config if base is not None else record.base["config"] if record else None
        edited = _edited(record) if record is not None else ()
        try:
            proved = proof.prove_table(
                snapshot.directory,
                replace(positions, context=target),
                base=before,
                trust_remote_code=self.trust_remote_code,
            )
        except ProofFailed as failed:
            yield Check("tensors", False, str(failed))
            yield from _config(snapshot.config, before, edited, failed.changed)
            return
        yield from _config(snapshot.config, before, edited, proved.get("changed"))
        loads = f"transformers {proved['transformers']} loads {proved['tensors_compared']} tensors"
        yield from _untied(proved.get("untied", ()))
        yield Check("tensors", True, f"{loads} in the shapes of {proved['model_class']}")
        yield Check("forward", True, proved["forward"])
        if "base" in proved:
            yield Check("base", None, proved["base"])

    def against(
        self, positions: Positions, record: provenance.Record, base: Snapshot
    ) -> Iterator[Check]:
        """Compare a table's old rows, and all tensors beside it, with those of the base."""
        from ropext.checkpoint import tables  # late: no rotary model needs it

        before = families.read_positions(base.config)
        if before is None or before.context != record.context:
            raise UsageError(f"--against {base.name} is not the base that ropext.json names")
        old = tables.find_tables(base, before)
        how = growth(before, record.method, record.target)
        trained = any(record.more.get(name) for name in (*provenance.TRAININGS, provenance.SAVED))
        if trained:  # of equal rows the first is the old one
            how = replace(how, kept={new: row for row, new in how.old_rows.items()})
        try:
            same = tables.compare_tables(base, self.snapshot.directory, how, old, trained=trained)
        except ProofFailed as failed:
            yield Check("base", False, str(failed))
            return
        if old:
            said = f"{same['rows_bit_exact']} old rows in every bit"
            said += "" if trained else f", the others of {how.rows} as they were made"
            yield Check("base", True, f"{said}, {same['tensors_unchanged']} tensors beside them")
        grown = {table.file for table in old}
        for finding in compare_weights(
            base, self.snapshot.directory, deep=self.deep, show=self.show
        ):
            if finding.file not in grown:
                yield Check("base", finding.same, finding.sentence)

    def file(self, claim: Claim, base: Snapshot | None) -> Iterator[Check]:
        """Check a GGUF file: what ggml computes from its keys, and its tensors."""
        from ropext.gguf import GgufFile, proving  # late: no directory needs it

        snapshot = self.snapshot
        record = self.record
        deep = self.deep
        assert isinstance(snapshot, GgufFile)
        site = next(site for site in claim.sites if site.scaled)
        scaled = [entry for entry in record.sites if entry.scaled] if record else []
        near = scaled[0].wanted.short_context if scaled else claim.context
        wanted = replace(site.wanted, short_context=near if site.wanted.short_inv_freq else 0)
        try:
            done = proving.compare(snapshot, wanted, claim.target)
        except ProofFailed as failed:
            yield Check("spectrum", False, str(failed))
        else:
            said = f"{done.pairs} pairs, within {done.error:.1e} of what is expected"
            yield Check("spectrum", True, f"ggml's formula on its keys gives {said}")
        known = record.weights if record else {}
        if isinstance(base, GgufFile):
            known = proving.weigh_parts(base, content=deep, show=self.show)
        weights = proving.weigh_parts(snapshot, content=deep and bool(known), show=self.show)
        count = sum(len(part.tensors) for part in snapshot.parts)
        for name, file in weights.items() if known else ():
            wish = known.get(name)
            if wish is None or (wish.size, wish.header_sha256) != (file.size, file.header_sha256):
                yield Check("tensors", False, "names, types, shapes or sizes are not the base's")
                return
            if deep and wish.sha256 is None:
                yield Check(
                    "tensors", None, "their bytes were not recorded: --against BASE, or --hash"
                )
                return
            if deep and wish.sha256 != file.sha256:
                yield Check("tensors", False, "their bytes are not the base's")
                return
        how = "in every byte" if deep and known else "in name, type, shape and size"
        against = f"the base's {how}" if known else "whole; there is no record to compare with"
        yield Check("tensors", True, f"{count} tensors, {against}")

    def proof(self, model: Model, claim: Claim) -> Iterator[Check]:
        forward = proof.Forward(claim.context, max(claim.target, claim.context), claim.base)
        try:
            proved = proof.prove(
                self.snapshot.directory,
                claim.promise,
                forward=forward,
                text_path=model.path,
                trust_remote_code=self.trust_remote_code,
            )
        except ProofFailed as failed:
            yield Check("spectrum and tensors", False, str(failed))
            yield from _config(self.snapshot.config, claim.base, claim.edited, failed.changed)
            return
        yield from _config(self.snapshot.config, claim.base, claim.edited, proved.changed)
        packed = proved.tensors_not_compared
        yield from _untied(proved.untied)
        yield Check(
            "spectrum and tensors",
            True,
            f"transformers {proved.transformers} builds {proved.rotary_modules} rotary and "
            f"{proved.attention_modules} attention modules and {proved.tensors_compared} tensors "
            f"as expected (worst relative error {proved.worst.error:.1e})"
            + (f"; {packed} packed tensors not compared" if packed else ""),
        )
        yield Check("forward", True, proved.forward)
        if proved.base:
            unseen = proved.base.startswith(proof.UNSEEN)
            yield Check("base", None if unseen else True, proved.base)

    def weights(self, base: Snapshot | None) -> Iterator[Check]:
        snapshot = self.snapshot
        record = self.record
        deep = self.deep
        show = self.show
        if self.keep and record is None:
            raise UsageError(
                f"--record writes into ropext.json, and {snapshot.name} has none; --against BASE "
                "--deep compares its weights with the base's"
            )
        source: Snapshot | Mapping[str, WeightFile]
        if base is not None or record is not None:
            source = base or record.weights  # type: ignore[union-attr]
        elif deep:
            source = {name: weigh(snapshot.path(name)) for name in snapshot.weight_files}
        else:
            return
        findings = compare_weights(source, snapshot.directory, deep=deep or self.keep, show=show)
        if (
            deep and base is not None and record is not None
        ):  # what was recorded is read all the same
            hashed = {name: file for name, file in record.weights.items() if file.sha256}
            findings += tuple(
                finding
                for finding in compare_weights(hashed, snapshot.directory, deep=True, show=show)
                if finding.file in hashed
            )
        bad = [finding for finding in findings if finding.same is False]
        for finding in bad:
            yield Check("weights", False, finding.sentence)
        for how, words in _EQUAL.items():
            count = sum(finding.same is True and finding.how == how for finding in findings)
            if count:
                yield Check("weights", True, f"{count} weight files {words}")
        unknown = [finding for finding in findings if finding.same is None]
        if self.keep and not bad:
            names = _record_bytes(snapshot, show)
            yield Check(
                "weights", True, f"SHA-256 recorded of {len(names)} weight files as they are"
            )
        elif unknown:
            more = f" (and {len(unknown) - 1} more)" if len(unknown) > 1 else ""
            advice = "--against BASE compares them with the base's"
            if record is not None:
                advice += (
                    f"; `ropext verify {snapshot.name} --record` records them as they are now, and"
                    " `extend --hash` does so at once"
                )
            said = f"so --deep has nothing to compare them with: {advice}"
            yield Check("weights", None, f"{unknown[0].sentence}{more}, {said}")


def _saved_sites(plan: Mapping[str, Any]) -> tuple[Site, ...]:
    """The sites of a plan's JSON."""
    entries = []
    for site in plan["sites"]:
        wanted = {
            "inv_freq": site["inv_freq"],
            "attention_factor": site["attention_factor"],
            "softmax_factor": site["softmax_factor"],
            "short_inv_freq": site["short_inv_freq"],
        }
        entry = {"label": site["label"], "wanted": wanted, "params": site["rope"]}
        entries.append(entry | {"scaled": site["scaled"]})
    sites = TypeAdapter(tuple[Site, ...]).validate_json(json.dumps(entries), strict=True)
    for each in sites:
        numbers = [each.wanted.attention_factor, each.wanted.softmax_factor]
        numbers += [*each.wanted.inv_freq, *(each.wanted.short_inv_freq or ())]
        if not all(map(math.isfinite, numbers)):
            raise ValueError("its numbers are to be finite")
        if not isinstance(each.params.get("rope_type"), str):
            raise ValueError("its rope_type is to be a text")
        forms.steepness(each.params)  # refuses a dict that no plan has
    return sites


def _read_plan(path: Path) -> dict[str, Any]:
    """Read a plan, and check its config, which may be built as that of a model."""
    plan = read_redirected(path)
    if isinstance(config := plan.get("config"), dict):
        check_asked(config, f"{path}, its config")
    return plan


def _planned(path: Path, flag: str = "--against ") -> Claim:
    plan = _read_plan(path)
    context = plan.get("context")
    target = plan.get("target")
    if type(context) is not int or type(target) is not int or type(plan.get("sites")) is not list:
        raise InputError(f"{flag}{path} is not a plan; `ropext plan --json` writes one")
    try:
        sites = _saved_sites(plan)
        if context < 1 or target < 1:
            raise ValueError("its lengths are below 1")
        if plan["factor"] != target / context:
            raise ValueError("its factor is not its target over its context")
        edits = provenance.edits_of(plan)
        base = provenance.undone(plan["config"], edits)
        edited = tuple(edit.key for edit in edits)
    except (KeyError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"{flag}{path}: the plan is damaged at its sites ({reason})") from None
    return Claim(context, target, sites, base, edited)


def _spellings(config: dict[str, Any], model: Model, recorded: bool) -> Iterable[Check]:
    """Check what each spelling says. What a save by transformers 5 leaves out is wrong where an
    extension is lost by it to a loader that the table has in its newest version; else a note."""
    problems = families.check_spellings(config)
    extended = recorded or any(site.rope.is_scaled for site in model.scaled_sites)
    readers = _misled(model)
    notes = [p for p in problems if p.dropped and not (extended and readers)]
    wrong = [problem for problem in problems if problem not in notes]
    for problem in wrong:
        fix = "; --fix writes it anew" if problem.fixable else ""
        if problem.disputed:
            way = "as ropext.json has it" if recorded else "from the one that --trust names"
            fix += f", {way}"
        yield Check("spellings", False, problem.sentence + fix)
    if wrong:
        return
    said = "every spelling says the same"
    for problem in notes:
        said += f"; note: {problem.sentence} (--fix writes it for them)"
    if notes and readers:
        said += f"; of the newest that were measured: {listed(readers)}"
    yield Check("spellings", True, said)


def _misled(model: Model) -> list[str]:
    """The loaders that read rope_parameters alone otherwise, in the newest version that was
    measured."""
    params = model.scaled_sites[0].params
    read = partial(
        loaders.readings,
        model.text_type,
        params,
        model_type=model.model_type,
        length=model.stated_context,
    )
    both = read()
    alone = read(v5_only=True)
    misled = []
    seen = set()
    for plain, modern in zip(both, alone, strict=True):
        if plain.loader in seen:
            continue  # the newest comes first
        seen.add(plain.loader)
        if plain.verdict == "same" and modern.verdict in WRONG:
            misled.append(modern.loader)
    return misled


def _lengths(snapshot: Snapshot, model: Model, claim: Claim) -> Iterable[Check]:
    stated = model.stated_context
    target = claim.target
    if stated != target:
        said = f"max_position_embeddings is {stated}, the target is {target}"
        yield Check("length", False, said)
    else:
        yield Check("length", True, f"max_position_embeddings is the target of {target}")
    yield from _limits(snapshot, claim.context, target)


def _limits(snapshot: Snapshot, context: int, target: int) -> Iterable[Check]:
    edits, _ = length_edits(snapshot, context, target)
    for edit in edits:
        length = edit.before
        if edit.after is None:  # a stored truncation, of which the length counts
            length = f"{edit.before.get('max_length')} tokens"
        said = f"{edit.file}: {edit.key} of {length} caps the target of {target}"
        yield Check("limits", False, said)
    if not edits:
        yield Check("limits", True, "no tokenizer or generation limit caps it")


def _untied(pairs: Iterable[str]) -> Iterable[Check]:
    for pair in pairs:
        yield Check(
            "tied weights",
            False,
            f"config.json ties {pair} (tie_word_embeddings, stated or the class default), and both"
            " are stored and differ: loaders disagree on which they read",
        )


def _other_sets(snapshot: Snapshot) -> Iterable[Check]:
    """Check that no other set of the same weights lies beside the one that stock loads."""
    notes = []
    for name, reason in snapshot.left.items():
        if reason == OTHER_SET:
            said = "loaders disagree on which they read; move the files of one of them away"
            yield Check("weights", False, f"{name} is {reason}: {said}")
        elif reason == VARIANT or name == "original/" or CONSOLIDATED.fullmatch(name):
            notes.append(name)
    if notes:
        more = f" and {len(notes) - LISTED} more" if len(notes) > LISTED else ""
        said = "other forms of the weights, for programs that ask for them, and not looked at"
        yield Check("weights", True, f"{', '.join(notes[:LISTED])}{more}: {said}")


_EQUAL = {
    "same file": "the base's own",
    "bytes": "equal to the base's in every byte",
    "sha256": "with the recorded SHA-256",
    "header and size": "with the right header and size (their bytes: --deep)",
}


def _record_bytes(snapshot: Snapshot, show: Show) -> list[str]:
    """Write the SHA-256 of every weight file that has none into ropext.json; their names."""
    path = snapshot.path(provenance.NAME)
    content = read_object(path)
    missing = [name for name, file in content["weights"].items() if not file.get("sha256")]
    for name in missing:
        content["weights"][name]["sha256"] = content_digest(snapshot.path(name), show)
    if missing:
        replace_file(path, dump(content))
    return missing


@dataclass(frozen=True)
class AskedServer:
    """A running server, and what it is held against."""

    url: str
    beside: PlainServer | None = None  # None: what transformers computes


def _beside(asked: AskedServer, model: Model, claim: Claim) -> Check:
    """Hold a server against one of the plain model."""
    assert asked.beside is not None
    if model.vocab_size is None:
        raise InputError("--endpoint: the config does not say the size of its vocabulary")
    leaves_short = any(site.wanted.short_inv_freq for site in claim.sites)
    at = prompt_lengths(claim.context, model.context, beyond=leaves_short)
    plain = asked.beside.answers(Prompts(at, model.vocab_size))
    server = server_at(asked.url)
    name, _ = served_model(server, asked.url)
    done = compare_beside(server, name, plain)
    return Check("endpoint", done.is_on, f"{asked.url} serves {name}; {done.sentence}")


def _endpoint(
    asked: AskedServer,
    snapshot: Snapshot,
    model: Model,
    claim: Claim,
    loading: Mapping[str, Any],
    say: Say,
) -> Check:
    from ropext.proof import server  # late: it runs the model

    if asked.beside is not None:
        return _beside(asked, model, claim)
    url = asked.url
    lengths = {"context": claim.context, "target": model.context}
    try:
        if snapshot.is_gguf:
            probed = _gguf_endpoint(url, snapshot, model, claim, {**lengths, **loading}, say)
        else:
            before = None if loading["trust_remote_code"] else claim.base
            probed = server.probe(url, snapshot.directory, before=before, **lengths, **loading)
    except ProofFailed as failed:
        return Check("endpoint", False, str(failed))
    limit = "no stated limit" if probed.limit is None else f"a limit of {probed.limit}"
    served = f"{url} serves {probed.model} with {limit}"
    gaps = [prompt.difference for prompt in probed.prompts]
    if not snapshot.is_gguf:
        within = f"its log-probabilities are within {max(gaps):.1e} of transformers'"
        said = f"{served}; {within} (tolerance {probed.tolerance:g})"
    else:
        said = (
            f"{served}; after {len(gaps)} prompts its log-probabilities differ from transformers' "
            f"on the dequantised weights by {fmean(gaps):.1e} in the mean (tolerance "
            f"{probed.tolerance:g})"
        )
    if probed.lost is None:
        return Check("endpoint", True, said)
    said += f", where a reading without the extension would differ by {probed.lost:.1e}"
    if probed.drawn and probed.lost < server.ORDER * probed.tolerance:
        said += (
            f" at most (of up to {probed.drawn} prompts of each length; {server.ORDER} times the "
            "tolerance was sought)"
        )
    if probed.lost >= 2 * probed.tolerance:
        return Check("endpoint", True, said)
    return Check("endpoint", None, f"{said}: too little to tell the two apart on this model")


def _served_plan(
    path: Path, asked: AskedServer, loading: Mapping[str, Any], say: Say
) -> Verification:
    """Hold a plan against a server that runs its base with the plan's numbers."""
    claim = _planned(path, "")
    plan = _read_plan(path)
    snapshot = open_snapshot(str(plan.get("model")), weights=True)
    if snapshot.config != claim.base:
        raise InputError(
            f"{path}: the config of {snapshot.name} is not the one it was planned from"
        )
    model = families.as_read(plan["config"])
    loading = {**loading, "config": plan["config"]}
    if not loading.get("trust_remote_code"):
        proof.require_buildable(plan["config"])
    return Verification(str(path), (_endpoint(asked, snapshot, model, claim, loading, say),), None)


def _gguf_endpoint(
    url: str,
    snapshot: Snapshot,
    model: Model,
    claim: Claim,
    request: Mapping[str, Any],
    say: Say,
) -> "server.Probe":
    """Ask a server about a GGUF: its weights by transformers, with its spectrum and the base's."""
    from ropext.dequantising import directory_of, with_rope
    from ropext.proof import server

    if model.vocab_size is None:
        raise InputError(f"--endpoint: {snapshot.name} does not say the size of its vocabulary")
    plain = snapshot.config
    before = claim.base
    if before is None and plain.get("rope_scaling"):
        unscaled = {key: value for key, value in plain.items() if key != "rope_scaling"}
        before = unscaled | {"max_position_embeddings": claim.context}
    with directory_of(snapshot.name, say) as name:
        place = Path(name)
        config = before and with_rope(read_object(place / "config.json"), dict(before))
        return server.probe_gguf(url, place, config, vocab_size=model.vocab_size, **request)


def repair(
    directory: str | Path, trust: str | None = None
) -> tuple[dict[str, Any], tuple[Edit, ...]]:
    """The config with every spelling written anew: from the record, where there is one, or from
    what stock transformers 5 reads; `trust` names the right one of two that disagree."""
    snapshot = open_snapshot(str(directory))
    known = provenance.read_record(snapshot.directory)
    if known is None:
        fixed = families.respell(families.trusting(snapshot.config, trust))
    elif trust is not None:
        raise UsageError(
            f"--trust {trust}: {directory} has a ropext.json, which decides; --fix alone writes"
            " what stands there"
        )
    else:
        planned = [dict(site.params) for site in known.sites if site.scaled]
        try:
            fixed = families.respell(snapshot.config, planned, known.target)
        except RopextError:
            raise
        except (KeyError, TypeError, ValueError):
            raise InputError(
                f"{snapshot.path(provenance.NAME)} is damaged: the rope dict of a site is none "
                "that ropext writes; take it anew from where the checkpoint came"
            ) from None
    return fixed, tuple(families.diff(snapshot.config, fixed))


def write_config(directory: str | Path, config: Mapping[str, Any]) -> None:
    """Replace config.json in one step, so that a reader sees the old or the new one whole."""
    provenance.replace_listed(Path(directory), "config.json", dump(config))
