"""Compare a running server with the model that it should serve."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from ropext import families, proof
from ropext.base.errors import InputError, ProofFailed
from ropext.base.jsontext import JsonObject, read_object
from ropext.base.narration import Say, no_messages, told
from ropext.endpoint.beside import PlainServer, Prompts, compare_with_plain, prompt_lengths
from ropext.endpoint.server import served_model, server_at
from ropext.files.checkpoint import open_snapshot
from ropext.proof.neighbours import Neighbour
from ropext.verifying.checks import Check, Depth, Subject, Verification
from ropext.verifying.claim import planned_claim, read_plan
from ropext.verifying.neighbours import PLAIN, neighbours

if TYPE_CHECKING:
    from ropext.verifying import server


Probe = Callable[["AskedServer", Subject], "server.Probe"]
ENDPOINT = "endpoint"
UNKNOWN = ("another factor", PLAIN)  # neighbours that nothing here computes


@dataclass(frozen=True)
class AskedServer:
    """A running server, and the settings of its check."""

    url: str
    beside: PlainServer | None = None  # None: compare with transformers
    tolerance: float | None = None  # nats; None: the default for a directory or file
    dtype: str = "auto"  # for the model that transformers runs
    device: str = "cpu"
    config: JsonObject | None = None  # for that model, in place of its directory's
    say: Say = no_messages

    def check(self, subject: Subject, probe: Probe) -> Check:
        """Ask the server, as it serves a directory or a file."""
        if self.beside is not None:
            return self._compare(self.beside, subject)
        try:
            probed = probe(self, subject)
        except ProofFailed as failed:
            return Check(ENDPOINT, False, str(failed))
        return self._check(_passed(probed), _sentence(probed))

    def _check(self, passed: bool | None, sentence: str) -> Check:
        """Return the check's result; the sentence describes the server's behaviour."""
        return Check(ENDPOINT, passed, f"{self.url} {sentence}", f"the server {sentence}")

    def _compare(self, beside: PlainServer, subject: Subject) -> Check:
        """Compare the server with a server of the plain model."""
        model = subject.model
        claim = subject.claim
        if model.vocab_size is None:
            raise InputError("--endpoint: config.json states no vocab_size")
        leaves_short = any(site.wanted.short_inv_freq for site in claim.sites)
        at = prompt_lengths(claim.context, model.context, beyond=leaves_short)
        plain = beside.answers(Prompts(at, model.vocab_size))
        server = server_at(self.url)
        name, _ = served_model(server, self.url)
        done = compare_with_plain(server, name, plain)
        return self._check(done.is_on, f"serves {name}; {done.sentence}")

    def probe_directory(self, subject: Subject) -> "server.Probe":
        """Compare the server with a directory, as transformers reads it."""
        from ropext.verifying import server  # late: it runs the model

        config = self.config or subject.snapshot.config
        near = [Neighbour(name, None, decides=True) for name in UNKNOWN]
        if not subject.depth.trust_remote_code:  # else the model's own code builds it
            near = neighbours(config, subject.model, subject.claim.base)
        reference = self._reference(subject, subject.snapshot.directory)
        return server.probe(self.url, self._question(subject, reference, near))

    def probe_file(self, subject: Subject) -> "server.Probe":
        """Compare the server with a GGUF's weights as transformers reads them, dequantised."""
        from ropext.models.dequantising import directory_of, with_rope
        from ropext.verifying import server

        snapshot = subject.snapshot
        vocab_size = subject.model.vocab_size
        if vocab_size is None:
            raise InputError(f"--endpoint: {snapshot.name} states no vocabulary size")
        near = neighbours(snapshot.config, subject.model, subject.claim.base)
        with directory_of(snapshot.name, self.say) as name:
            place = Path(name)
            whole = read_object(place / "config.json")
            full = list[Neighbour]()
            for each in near:
                config = each.config and with_rope(dict(whole), dict(each.config))
                full.append(replace(each, config=config))
            reference = self._reference(subject, place)
            question = self._question(subject, reference, full)
            return server.probe(self.url, replace(question, vocab_size=vocab_size))

    def _question(
        self,
        subject: Subject,
        reference: "server.ReferenceModel",
        near: Sequence[Neighbour],
    ) -> "server.ServerQuestion":
        """Return the question for the server."""
        from ropext.verifying import server

        lengths = server.ReadLengths(subject.claim.context, subject.model.context)
        tolerance = self.tolerance or server.TOLERANCE
        return server.ServerQuestion(
            reference, lengths, near, tolerance, say=self.say, show=told(self.say)
        )

    def _reference(self, subject: Subject, directory: Path) -> "server.ReferenceModel":
        """Return the model that transformers runs for comparison."""
        from ropext.verifying import server

        trust = subject.depth.trust_remote_code
        return server.ReferenceModel(directory, self.config, self.dtype, self.device, trust)


def _served(probed: "server.Probe") -> str:
    """Return the name and the limit that the server states."""
    limit = "no stated limit"
    if probed.limit is not None:
        limit = f"a limit of {probed.limit}"
    return f"serves {probed.model} with {limit}"


def _sentence(probed: "server.Probe") -> str:
    """Describe the result: how far the answers are from the plan's, and which neighbours they
    exclude."""
    gaps = [prompt.difference for prompt in probed.prompts]
    said = (
        f"{_served(probed)}; after {len(gaps)} prompts of up to {probed.reached:,} tokens its "
        f"log-probabilities differ from transformers' by {fmean(gaps):.1e} in the mean (tolerance "
        f"{probed.tolerance:g})"
    )
    for judged in probed.neighbours:
        said += f"; {judged.sentence}"
    return said


def _passed(probed: "server.Probe") -> bool | None:
    """Return True if the answers exclude every neighbour that decides; None: it is not known."""
    for judged in probed.neighbours:
        if judged.neighbour.decides and not judged.is_excluded:
            return None
    return True


def check_plan(path: Path, asked: AskedServer, depth: Depth) -> Verification:
    """Compare a plan with a server that runs its base with the plan's numbers."""
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
