"""Options of `ropext verify`: its comparisons, its repairs, and the server that it asks."""

import math
from typing import Annotated, Literal, Self

from pydantic import AllowInfNan, model_validator

from ropext.base.errors import UsageError
from ropext.options.extend import Loaders
from ropext.options.fields import Device, Dtype, Neutral, Options, Panel, wanted

Nats = Annotated[float, AllowInfNan(True)]  # refused below, in a sentence of its own


class Verify(Options):
    """How deep `ropext verify` compares a directory, the files that it writes, and the server that
    it asks."""

    against: str | None = wanted(
        None, "a plan saved with `plan --json`, or the base", "PLAN_OR_BASE"
    )
    deep: bool = wanted(False, "compare every byte of the weights, with the record or --against")
    record: Neutral[bool] = wanted(False, "write the weights' SHA-256 into ropext.json, for --deep")
    fix: Neutral[bool] = wanted(False, "repair RoPE config keys for other engines; prints the diff")
    trust: Neutral[Literal["rope_parameters", "rope_scaling"] | None] = wanted(
        None, "if the two keys disagree: the key that --fix copies to the other"
    )
    endpoint: str | None = wanted(
        None,
        "ask a running server (vLLM, SGLang, llama-server) whether it reads DIR as planned",
        "URL",
    )
    report: Neutral[bool] = wanted(
        False, "with --endpoint: fill in the issue form for the table of engines"
    )
    for_loaders: Loaders = wanted(
        (),
        "also fail if one of these engines does not compute what the config states (exit code "
        "3), or was not measured (6)",
        "LOADERS",
    )
    plain: str | None = wanted(
        None,
        "compare --endpoint with a server of the unscaled model, without loading a model",
        "URL",
    )
    fingerprint: str | None = wanted(
        None, "the unscaled server's answers: written with --plain, read without", "FILE"
    )
    tolerance: Nats | None = wanted(
        None, "allowed mean difference of log-probabilities, in nats [0.25]"
    )

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        """Refuse options about a server without --endpoint, and --trust without --fix. Refuse a
        tolerance that is no number of nats."""
        if self.endpoint is None:
            about_server = {
                "--plain": self.plain,
                "--fingerprint": self.fingerprint,
                "--tolerance": self.tolerance,
            }
            for flag, value in about_server.items():
                if value is not None:
                    raise UsageError(f"{flag} is about a running server: give --endpoint URL too")
        if self.tolerance is not None and not 0 < self.tolerance < math.inf:
            raise UsageError(f"--tolerance is in nats, finite and above 0, was {self.tolerance:g}")
        if self.trust is not None and not self.fix:
            raise UsageError(f"--trust {self.trust} says what --fix writes; give both")
        if self.report and self.endpoint is None:
            raise UsageError("--report needs a server; give --endpoint URL too")
        return self


class Reference(Options):
    """How transformers loads the model that `ropext verify` compares with a running server."""

    dtype: Dtype = wanted(
        "auto",
        "with --endpoint: type of the weights that transformers loads",
        panel=Panel.LOADING,
    )
    device: Device = wanted(
        "cpu",
        "with --endpoint: where transformers runs: auto (cuda or cpu), cpu, cuda, cuda:N, mps",
        "NAME",
        panel=Panel.LOADING,
    )
