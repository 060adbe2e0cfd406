"""`ropext extend MODEL -o OUT`."""

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ropext.cli import options, plan
from ropext.cli.output import Out
from ropext.errors import UsageError

NAME = "extend"

Output = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="OUT", help="directory to write")
]
Link = Annotated[
    Literal["copy", "hard", "symlink"],
    typer.Option(
        "--link",
        help="how weights get to OUT; hard and symlink share the files with the base, so that an "
        "edit in place alters both: for a cache of your own",
    ),
]
Force = Annotated[bool, typer.Option("--force", help="replace OUT if it is there")]
NoVerify = Annotated[bool, typer.Option("--no-verify", help="skip the proof by stock transformers")]
Hash = Annotated[bool, typer.Option("--hash", help="record a SHA-256 of every weight file")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="show the plan and write nothing")]


@options.takes_recipe()
def command(
    model: options.ModelArg,
    wishes: dict[str, Any],
    output: Output = None,
    link: Link = "copy",
    force: Force = False,
    no_verify: NoVerify = False,
    hash_weights: Hash = False,
    dry_run: DryRun = False,
    revision: options.Revision = None,
    trust_remote_code: options.TrustRemoteCode = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Write an extended checkpoint and prove it. Weights stay as they are; config.json changes."""
    from ropext import looking

    out = Out(as_json, quiet)
    if dry_run:
        plan.show(out, looking.plan(model, revision=revision, **wishes))
        return
    if output is None:
        raise UsageError("say where to: -o OUT (or --dry-run to see the plan)")
    from ropext import pipeline

    done = pipeline.extend(
        model,
        output,
        revision=revision,
        link=link,
        force=force,
        prove=not no_verify,
        hash_weights=hash_weights,
        trust_remote_code=trust_remote_code,
        command=sys.argv,
        say=out.say,
        **wishes,
    )
    from ropext.report import text

    out.result(text.extended(done), done.to_json())
