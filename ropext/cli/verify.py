"""Define `ropext verify DIR`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ropext.base import guard
from ropext.base.errors import NotMeasured, ProofFailed, UsageError
from ropext.base.jsontext import values_json
from ropext.base.narration import file_progress
from ropext.cli import options
from ropext.cli.output import Out
from ropext.options.verify import Reference, Verify

if TYPE_CHECKING:
    from ropext.verifying.plain_server import PlainServer
    from ropext.verifying.verification import Verification

Directory = Annotated[
    str,
    typer.Argument(metavar="DIR", help="directory, .gguf file, hub id; a plan for --endpoint"),
]


def command(
    out: Out,
    directory: Directory,
    given: Annotated[options.Given, options.OptionsOf(Verify)],
    loading: Annotated[options.Given, options.OptionsOf(Reference)],
    trust_remote_code: options.TrustRemoteCode = False,
) -> None:
    """Check a directory or GGUF against its plan. Frequencies, config keys, lengths, weights."""
    from ropext.files import inspecting
    from ropext.results.report import text
    from ropext.verifying import verification
    from ropext.verifying.endpoint import ENDPOINT

    wanted = Verify(**given)
    reference = Reference(**loading)
    _check_written_places(directory, wanted)
    if wanted.fix:
        config, edits = verification.repair(directory, wanted.trust)
        out.say(text.config_diff(edits) or "every spelling is right already")
        if edits:
            verification.write_config(directory, config)
    server = None
    if wanted.endpoint is not None:
        server = verification.AskedServer(
            wanted.endpoint,
            _plain_server_of(wanted),
            wanted.tolerance,
            reference.dtype,
            reference.device,
            say=out.say,
        )
    show = file_progress(out.say)
    result = verification.check_directory(
        directory,
        against=wanted.against,
        depth=verification.Depth(wanted.deep, wanted.record, trust_remote_code, show),
        server=server,
    )
    checks = [(check.passed, check.what, check.sentence) for check in result.checks]
    shown = text.verification_text(result.verdict, checks)
    if wanted.report and wanted.endpoint is not None:
        shown = f"{shown}\n\n{_issue_form(directory, wanted.endpoint, result)}"
    data = result.to_json()
    judged = None
    if wanted.for_loaders and result.passed:
        if result.served is None:
            raise UsageError(f"--for is for rotary models, and {directory} rotates nothing")
        judged = inspecting.gate(result.served, wanted.for_loaders)
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


def _check_written_places(directory: str, wanted: Verify) -> None:
    """Refuse, on the command line of `ropext verify`, a flag whose file it may not write. --fix
    writes config.json. --record writes ropext.json, and --plain the fingerprint of a server."""
    place = Path(directory)
    written = dict[str, Path]()
    if wanted.fix:
        written["--fix"] = place / "config.json"
    if wanted.record:
        written["--record"] = place / guard.RECORD
    for flag in written:
        if not place.is_dir():
            raise UsageError(f"{flag} writes into {directory}, which is not a local directory")
    if wanted.plain is not None and wanted.fingerprint is not None:
        written["--fingerprint"] = Path(wanted.fingerprint)
    guard.check({"--against": wanted.against}, written)


def _plain_server_of(wanted: Verify) -> "PlainServer | None":
    """Read the flags --plain and --fingerprint from the command line of `ropext verify`. Return the
    server of the unscaled model that they name."""
    from ropext.verifying.plain_server import PlainServer

    if wanted.fingerprint is not None:
        return PlainServer(wanted.plain, Path(wanted.fingerprint))
    return PlainServer(wanted.plain) if wanted.plain else None


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
