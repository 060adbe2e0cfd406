"""Compare a running server with the model that it should serve."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ropext import families
from ropext.base.errors import InputError, ProofFailed
from ropext.base.jsontext import JsonObject, read_object
from ropext.base.narration import Say, no_messages
from ropext.endpoint.server import model_and_limit, server_at
from ropext.files.checkpoint import open_snapshot
from ropext.verifying import proof
from ropext.verifying.checks import Check, Depth, RotarySubject, Verification
from ropext.verifying.claim import planned_claim, read_plan
from ropext.verifying.judging import Neighbour
from ropext.verifying.neighbours import PLAIN, neighbours
from ropext.verifying.plain_server import PlainServer, compare_with_plain, prompt_lengths

if TYPE_CHECKING:
    from ropext.verifying import server

ENDPOINT = "endpoint"
UNKNOWN = ("another factor", PLAIN)  # neighbours that nothing here computes


@dataclass(frozen=True)
class AskedServer:
    """A running server, and the settings of its check."""

    url: str
    plain: PlainServer | None = None  # None: compare with transformers
    tolerance: float | None = None  # nats; None: the default for a directory or file
    dtype: str = "auto"  # for the model that transformers runs
    device: str = "cpu"
    config: JsonObject | None = None  # for that model, in place of its directory's
    say: Say = no_messages

    def check_answers(self, subject: RotarySubject, *, dequantised: bool = False) -> Check:
        """Check that a running server's answers match the directory that it serves, or the
        dequantised weights of a GGUF file."""
        if self.plain is not None:
            return self._compare_with_plain(self.plain, subject)
        try:
            if dequantised:
                probed = self._probe_file(subject)
            else:
                probed = self._probe_directory(subject)
        except ProofFailed as failed:
            return Check(ENDPOINT, False, str(failed))
        return self._check_of(probed.passed, probed.sentence)

    def _check_of(self, passed: bool | None, sentence: str) -> Check:
        """Return the check of the running server; the sentence describes the server's behaviour."""
        return Check(ENDPOINT, passed, f"{self.url} {sentence}", f"the server {sentence}")

    def _compare_with_plain(self, plain: PlainServer, subject: RotarySubject) -> Check:
        """Check that a running server's answers differ from the answers of a server of the plain
        model."""
        model = subject.model
        claim = subject.claim
        if model.vocab_size is None:
            raise InputError("--endpoint: config.json states no vocab_size")
        leaves_short = any(site.wanted.short_inv_freq for site in claim.sites)
        at = prompt_lengths(claim.context, model.context, beyond=leaves_short)
        kept = plain.answers(at, model.vocab_size)
        server = server_at(self.url)
        name, _ = model_and_limit(server, self.url)
        done = compare_with_plain(server, name, kept)
        return self._check_of(done.is_on, f"serves {name}; {done.sentence}")

    def _probe_directory(self, subject: RotarySubject) -> "server.ServerAnswers":
        """Compare a running server's answers with a directory, as transformers reads it."""
        config = self.config or subject.snapshot.config
        near = [Neighbour(name, None, decides=True) for name in UNKNOWN]
        if not subject.depth.trust_remote_code:  # else the model's own code builds it
            near = neighbours(config, subject.model, subject.claim.base)
        return self._probe(subject, subject.snapshot.directory, near)

    def _probe_file(self, subject: RotarySubject) -> "server.ServerAnswers":
        """Compare a running server's answers with a GGUF's weights as transformers reads them,
        dequantised."""
        from ropext.models.dequantising import dequantised_directory, with_rope

        snapshot = subject.snapshot
        vocab_size = subject.model.vocab_size
        if vocab_size is None:
            raise InputError(f"--endpoint: {snapshot.name} states no vocabulary size")
        near = neighbours(snapshot.config, subject.model, subject.claim.base)
        with dequantised_directory(snapshot.name, self.say) as name:
            place = Path(name)
            whole = read_object(place / "config.json")
            full = list[Neighbour]()
            for each in near:
                config = each.config and with_rope(dict(whole), dict(each.config))
                full.append(replace(each, config=config))
            return self._probe(subject, place, full, vocab_size)

    def _probe(
        self,
        subject: RotarySubject,
        directory: Path,
        near: Sequence[Neighbour],
        vocab_size: int | None = None,
    ) -> "server.ServerAnswers":
        """Compare a running server's answers with the model that transformers runs from a
        directory."""
        from ropext.verifying import server  # late: it runs the model

        trust = subject.depth.trust_remote_code
        question = server.ServerQuestion(
            server.ReferenceModel(directory, self.config, self.dtype, self.device, trust),
            subject.claim.context,
            subject.model.context,
            near,
            self.tolerance or server.TOLERANCE,
            vocab_size,
            self.say,
        )
        return server.probe_server(self.url, question)


def check_saved_plan(path: Path, asked: AskedServer, depth: Depth) -> Verification:
    """Check that a running server of the base computes the numbers of a saved plan."""
    plan = read_plan(path)
    claim = planned_claim(plan, str(path))
    snapshot = open_snapshot(str(plan.get("model")), weights=True)
    if snapshot.config != claim.base:
        raise InputError(
            f"{path} was planned from another config than the one of {snapshot.name} now"
        )
    model = families.as_read(plan["config"])
    if not depth.trust_remote_code:
        proof.require_buildable(plan["config"])
    subject = RotarySubject(snapshot, None, claim, None, depth, model)
    there = replace(asked, config=plan["config"])
    return Verification(str(path), (there.check_answers(subject),), None)
