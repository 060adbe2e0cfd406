"""Define a check, its result, and the verification of a model."""

from dataclasses import dataclass, field

from ropext.base.jsontext import Json, values_json
from ropext.base.narration import Show, no_progress
from ropext.families import Model
from ropext.files.checkpoint import Snapshot
from ropext.files.checkpoint.provenance import Record
from ropext.files.inspecting import Served
from ropext.verifying.claim import Claim


@dataclass(frozen=True)
class Check:
    """The result of one check of a file or a server: passed, failed, or not known."""

    what: str
    passed: bool | None  # None: there was nothing to compare with
    sentence: str
    # The same without the address of a server, for a report that others read.
    unnamed: str = field(default="", metadata={"json": None})


@dataclass(frozen=True)
class Verification:
    """The results of all checks, and each engine's reading if nothing is wrong."""

    directory: str
    checks: tuple[Check, ...]
    served: Served | None = field(repr=False)

    @property
    def passed(self) -> bool:
        """Return whether every check of `ropext verify` passed."""
        return all(check.passed for check in self.checks)

    def is_only_unknown(self, what: str) -> bool:
        """Return whether `what` is the only check of `ropext verify` that did not pass, and its
        answer is not known."""
        return bool(self.failures()) and all(
            check.what == what and check.passed is None for check in self.failures()
        )

    def failures(self) -> tuple[Check, ...]:
        """Return the checks of `ropext verify` that failed or whose answer is not known."""
        return tuple(check for check in self.checks if not check.passed)

    @property
    def verdict(self) -> str:
        """Return the outcome of all checks of `ropext verify` in one line."""
        states = [check.passed for check in self.checks]
        wrong = states.count(False)
        unknown = states.count(None)
        total = f"{len(states)} checks"
        counts = list[str]()
        if wrong:
            counts.append(f"{wrong} of {total} failed")
        if unknown:
            counts.append(f"{unknown} of {total} not known")
        if counts:
            return f"{self.directory}: {', '.join(counts)}"
        return f"{self.directory}: verified ({total} passed)"

    def to_json(self) -> dict[str, Json]:
        """Return the JSON document of `ropext verify`."""
        checks = [values_json(check) for check in self.checks]
        out = {"directory": self.directory, "passed": self.passed, "checks": checks}
        return out | (self.served.to_json() if self.served else {})


@dataclass(frozen=True)
class Depth:
    """How deep to check, and the permissions of the checks."""

    deep: bool = False  # every byte of the weights
    keep: bool = False  # their SHA-256 is written into the record
    trust_remote_code: bool = False
    show: Show = no_progress


HEADERS_ALONE = Depth()


@dataclass(frozen=True)
class Subject:
    """The model to check, and the claim to check it against."""

    snapshot: Snapshot
    record: Record | None
    claim: Claim
    base: Snapshot | None  # the base, if `--against` names it
    depth: Depth


@dataclass(frozen=True)
class RotarySubject(Subject):
    """A model with rotary embeddings to check."""

    model: Model
