"""Define `ropext verify DIR`."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ropext.base import guard
from ropext.base.errors import NotMeasured, ProofFailed, UsageError
from ropext.base.jsontext import values_json
from ropext.base.narration import file_progress
from ropext.cli import options
from ropext.cli.output import Out
from ropext.options.fields import DTYPES

if TYPE_CHECKING:
    from ropext.verifying.verification import Verification

Directory = Annotated[
    str,
    typer.Argument(metavar="DIR", help="directory, .gguf file, hub id; a plan for --endpoint"),
]
Against = Annotated[
    str | None,
    typer.Option(
        "--against", metavar="PLAN_OR_BASE", help="a plan saved with `plan --json`, or the base"
    ),
]
Deep = Annotated[
    bool,
    typer.Option("--deep", help="compare every byte of the weights, with the record or --against"),
]
Record = Annotated[
    bool,
    typer.Option("--record", help="write the weights' SHA-256 into ropext.json, for --deep"),
]
Fix = Annotated[
    bool, typer.Option("--fix", help="repair RoPE config keys for other engines; prints the diff")
]
Trust = Annotated[
    Literal["rope_parameters", "rope_scaling"] | None,
    typer.Option(
        "--trust", help="if the two keys disagree: the key that --fix copies to the other"
    ),
]

Endpoint = Annotated[
    str | None,
    typer.Option(
        "--endpoint",
        metavar="URL",
        help="ask a running server (vLLM, SGLang, llama-server) whether it reads DIR as planned",
    ),
]
For = Annotated[
    str | None,
    typer.Option(
        "--for",
        metavar="LOADERS",
        help="also fail if one of these engines does not compute what the config states (exit code "
        "3), or was not measured (6)",
    ),
]
Plain = Annotated[
    str | None,
    typer.Option(
        "--plain",
        metavar="URL",
        help="compare --endpoint with a server of the unscaled model, without loading a model",
    ),
]
KeptFile = Annotated[
    Path | None,
    typer.Option(
        "--fingerprint",
        metavar="FILE",
        help="the unscaled server's answers: written with --plain, read without",
    ),
]
Tolerance = Annotated[
    float | None,
    typer.Option(
        "--tolerance",
        help="allowed mean difference of log-probabilities, in nats [0.25]",
    ),
]
Report = Annotated[
    bool,
    typer.Option(
        "--report", help="with --endpoint: fill in the issue form for the table of engines"
    ),
]


def command(
    out: Out,
    directory: Directory,
    against: Against = None,
    deep: Deep = False,
    record: Record = False,
    fix: Fix = False,
    trust: Trust = None,
    endpoint: Endpoint = None,
    report: Report = False,
    for_loaders: For = None,
    plain: Plain = None,
    fingerprint: KeptFile = None,
    tolerance: Tolerance = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "cpu",
    trust_remote_code: options.TrustRemoteCode = False,
) -> None:
    """Check a directory or GGUF against its plan. Frequencies, config keys, lengths, weights."""
    from ropext.families import loaders
    from ropext.files import inspecting
    from ropext.results.report import text
    from ropext.verifying import verification
    from ropext.verifying.endpoint import ENDPOINT
    from ropext.verifying.plain_server import PlainServer

    names: tuple[str, ...] = ()
    if for_loaders is not None:
        names = loaders.parse_for(for_loaders)
    place = Path(directory)
    written = dict[str, Path]()
    if fix:
        written["--fix"] = place / "config.json"
    if record:
        written["--record"] = place / guard.RECORD
    for flag in written:
        if not place.is_dir():
            raise UsageError(f"{flag} writes into {directory}, which is not a local directory")
    if endpoint is None:
        about_server = {"--plain": plain, "--fingerprint": fingerprint, "--tolerance": tolerance}
        for flag, value in about_server.items():
            if value is not None:
                raise UsageError(f"{flag} is about a running server: give --endpoint URL too")
    if tolerance is not None and not 0 < tolerance < math.inf:
        raise UsageError(f"--tolerance is in nats, finite and above 0, was {tolerance:g}")
    if trust is not None and not fix:
        raise UsageError(f"--trust {trust} says what --fix writes; give both")
    if report and endpoint is None:
        raise UsageError("--report needs a server; give --endpoint URL too")
    if plain is not None and fingerprint is not None:
        written["--fingerprint"] = fingerprint
    guard.check({"--against": against}, written)
    kept = None
    if plain or fingerprint:
        kept = PlainServer(plain, fingerprint)
    if fix:
        config, edits = verification.repair(directory, trust)
        out.say(text.config_diff(edits) or "every spelling is right already")
        if edits:
            verification.write_config(directory, config)
    server = None
    if endpoint is not None:
        kind = DTYPES.get(dtype, dtype)
        server = verification.AskedServer(endpoint, kept, tolerance, kind, device, say=out.say)
    result = verification.check_directory(
        directory,
        against=against,
        depth=verification.Depth(deep, record, trust_remote_code, file_progress(out.say)),
        server=server,
    )
    checks = [(check.passed, check.what, check.sentence) for check in result.checks]
    shown = text.verification_text(result.verdict, checks)
    if report and endpoint is not None:
        shown = f"{shown}\n\n{_issue_form(directory, endpoint, result)}"
    data = result.to_json()
    judged = None
    if names and result.passed:
        if result.served is None:
            raise UsageError(f"--for is for rotary models, and {directory} rotates nothing")
        judged = inspecting.gate(result.served, names)
        data["gate"] = values_json(judged)
        if judged.passed:
            shown = f"{shown}\n\n{judged.sentence}"
    out.result(shown, data)
    if result.is_only_unknown(ENDPOINT):
        raise NotMeasured(result.verdict)
    if not result.passed:
        raise ProofFailed(result.verdict)
    if judged is not None:
        judged.raise_if_failed()


def _issue_form(directory: str, endpoint: str, result: "Verification") -> str:
    """Return the issue form that `ropext verify --report` prints for a cell of the loader table,
    filled in from a verification."""
    from ropext import families
    from ropext.base.jsontext import read_object
    from ropext.cli.versions import version_lines
    from ropext.endpoint.issue_form import filled_issue_form, program_at
    from ropext.files.inspecting import open_model
    from ropext.verifying.endpoint import ENDPOINT

    is_plan = directory.endswith(".json") and Path(directory).is_file()
    if is_plan:
        config = read_object(Path(directory))["config"]
    else:
        config = open_model(directory).config
    model = families.as_read(config)
    form = {site.label or "rope_parameters": dict(site.params) for site in model.scaled_sites}
    check = next(check for check in result.checks if check.what == ENDPOINT)
    state = {True: "as planned", False: "otherwise than planned", None: "not known"}[check.passed]
    sentence = check.unnamed or check.sentence
    versions = "\n".join(version_lines(verbose=True))
    program = program_at(endpoint)
    return filled_issue_form(program, model.text_type, form, f"{state}: {sentence}", versions)
