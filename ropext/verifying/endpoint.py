"""Hold a running server against what it is to compute."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from ropext import families, proof
from ropext.checkpoint import open_snapshot
from ropext.errors import InputError, ProofFailed
from ropext.jsontext import JsonObject, read_object
from ropext.narration import Say, silent
from ropext.ports.beside import PlainServer, Prompts, compare_beside, prompt_lengths
from ropext.ports.server import served_model, server_at
from ropext.verifying.checks import Check, Depth, Subject, Verification
from ropext.verifying.claim import planned_claim, read_plan

if TYPE_CHECKING:
    from ropext.proof import server


Probe = Callable[["AskedServer", Subject], tuple["server.Probe", str]]


@dataclass(frozen=True)
class AskedServer:
    """A running server, and what it is held against."""

    url: str
    beside: PlainServer | None = None  # None: what transformers computes
    tolerance: float | None = None  # nats; None: as it is usual of a directory or file
    dtype: str = "auto"  # of the model that transformers runs
    device: str = "cpu"
    config: JsonObject | None = None  # of that model, in place of its directory's
    say: Say = silent

    def check(self, subject: Subject, probe: Probe) -> Check:
        """Ask it, in the way of a directory or of a file."""
        if self.beside is not None:
            return self._compare(self.beside, subject)
        try:
            probed, sentence = probe(self, subject)
        except ProofFailed as failed:
            return Check("endpoint", False, str(failed))
        passed, judged = _judged(probed, sentence)
        return self._check(passed, judged)

    def _check(self, passed: bool | None, sentence: str) -> Check:
        """What came of it; the sentence says what the server does."""
        return Check("endpoint", passed, f"{self.url} {sentence}", f"the server {sentence}")

    def _compare(self, beside: PlainServer, subject: Subject) -> Check:
        """Hold the server against one of the plain model."""
        model = subject.model
        claim = subject.claim
        if model.vocab_size is None:
            raise InputError("--endpoint: config.json states no vocab_size")
        leaves_short = any(site.wanted.short_inv_freq for site in claim.sites)
        at = prompt_lengths(claim.context, model.context, beyond=leaves_short)
        plain = beside.answers(Prompts(at, model.vocab_size))
        server = server_at(self.url)
        name, _ = served_model(server, self.url)
        done = compare_beside(server, name, plain)
        return self._check(done.is_on, f"serves {name}; {done.sentence}")

    def probe_directory(self, subject: Subject) -> tuple["server.Probe", str]:
        """Hold the server against transformers; what came of it, and in words."""
        from ropext.proof import server  # late: it runs the model

        claim = subject.claim
        before = claim.base
        if subject.depth.trust_remote_code:
            before = None
        lengths = server.ReadLengths(claim.context, subject.model.context)
        reference = self._reference(subject, subject.snapshot.directory)
        probed = server.probe(self.url, reference, lengths, before, self.tolerance)
        worst = max(prompt.difference for prompt in probed.prompts)
        within = f"its log-probabilities are within {worst:.1e} of transformers'"
        return probed, f"{_served(probed)}; {within} (tolerance {probed.tolerance:g})"

    def probe_file(self, subject: Subject) -> tuple["server.Probe", str]:
        """Hold the server against a GGUF's weights, by transformers, with its spectrum and the
        base's."""
        from ropext.dequantising import directory_of, with_rope
        from ropext.proof import server

        snapshot = subject.snapshot
        claim = subject.claim
        vocab_size = subject.model.vocab_size
        if vocab_size is None:
            raise InputError(f"--endpoint: {snapshot.name} states no vocabulary size")
        before = claim.base
        if before is None and snapshot.config.get("rope_scaling"):
            unscaled = {k: value for k, value in snapshot.config.items() if k != "rope_scaling"}
            before = unscaled | {"max_position_embeddings": claim.context}
        with directory_of(snapshot.name, self.say) as name:
            place = Path(name)
            config = before and with_rope(read_object(place / "config.json"), dict(before))
            reference = self._reference(subject, place)
            lengths = server.ReadLengths(claim.context, subject.model.context)
            probed = server.probe_gguf(
                self.url, reference, lengths, config, vocab_size, self.tolerance
            )
        gaps = [prompt.difference for prompt in probed.prompts]
        return probed, (
            f"{_served(probed)}; after {len(gaps)} prompts its log-probabilities differ from "
            f"transformers' on the dequantised weights by {fmean(gaps):.1e} in the mean (tolerance "
            f"{probed.tolerance:g})"
        )

    def _reference(self, subject: Subject, directory: Path) -> "server.ReferenceModel":
        """The model that transformers runs beside the server."""
        from ropext.proof import server

        trust = subject.depth.trust_remote_code
        return server.ReferenceModel(directory, self.config, self.dtype, self.device, trust)


def _served(probed: "server.Probe") -> str:
    """Return the name and the limit that the server states."""
    limit = "no stated limit"
    if probed.limit is not None:
        limit = f"a limit of {probed.limit}"
    return f"serves {probed.model} with {limit}"


def _judged(probed: "server.Probe", sentence: str) -> tuple[bool | None, str]:
    """Say whether the comparison would have seen a reading without the extension."""
    from ropext.proof.server import ORDER

    if probed.lost is None:
        return True, sentence
    sentence += f"; without the extension they would differ by {probed.lost:.1e}"
    if probed.drawn and probed.lost < ORDER * probed.tolerance:
        sentence += (
            f" at most (up to {probed.drawn} prompts per length; ropext sought {ORDER}× the "
            "tolerance)"
        )
    if probed.lost >= 2 * probed.tolerance:
        return True, sentence
    return None, f"{sentence}: too little to decide on this model"


def check_plan(path: Path, asked: AskedServer, depth: Depth) -> Verification:
    """Hold a plan against a server that runs its base with the plan's numbers."""
    claim = planned_claim(path, "")
    plan = read_plan(path)
    snapshot = open_snapshot(str(plan.get("model")), weights=True)
    if snapshot.config != claim.base:
        raise InputError(
            f"{path} was planned from another config than the one of {snapshot.name} now"
        )
    model = families.as_read(plan["config"])
    if not depth.trust_remote_code:
        proof.require_buildable(plan["config"])
    subject = Subject(snapshot, model, None, claim, None, depth)
    there = replace(asked, config=plan["config"])
    return Verification(str(path), (there.check(subject, AskedServer.probe_directory),), None)
