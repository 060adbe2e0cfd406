"""`ropext verify DIR`."""

from pathlib import Path
from typing import Annotated

import typer

from ropext.cli import options
from ropext.cli.output import Out
from ropext.errors import ProofFailed, UsageError

NAME = "verify"

Directory = Annotated[
    str, typer.Argument(metavar="DIR", help="a checkpoint: a directory or a hub id")
]
Against = Annotated[
    str | None,
    typer.Option(
        "--against", metavar="PLAN_OR_BASE", help="a plan saved with `plan --json`, or the base"
    ),
]
Deep = Annotated[bool, typer.Option("--deep", help="compare the weights byte by byte")]
Fix = Annotated[bool, typer.Option("--fix", help="repair the config's spellings, diff first")]

Endpoint = Annotated[
    str | None,
    typer.Option(
        "--endpoint",
        metavar="URL",
        help="ask a running server (vLLM, SGLang, llama-server) whether it reads DIR alike",
    ),
]


def command(
    directory: Directory,
    against: Against = None,
    deep: Deep = False,
    fix: Fix = False,
    endpoint: Endpoint = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "cpu",
    trust_remote_code: options.TrustRemoteCode = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Check a directory against its plan. Spectrum, spellings, lengths, limits and weights."""
    from ropext import pipeline, verifying
    from ropext.report import text

    out = Out(as_json, quiet)
    if fix and not Path(directory).is_dir():
        raise UsageError(f"--fix writes into {directory}, which is no directory here")
    if fix:
        config, edits = verifying.repair(directory)
        out.say(text.edit_lines(edits) or "every spelling is right already")
        if edits:
            verifying.write_config(directory, config)
    found = pipeline.verify(
        directory,
        against=against,
        deep=deep,
        endpoint=endpoint,
        trust_remote_code=trust_remote_code,
        dtype=dtype,
        device=device,
    )
    out.result(text.verification(found), found.to_json())
    if not found.passed:
        raise ProofFailed(found.worst())
