"""Define `ropext run RECIPE -o OUT`."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ropext.base.narration import Call
from ropext.cli import options
from ropext.cli.output import Out, call_of
from ropext.cli.push import Push, print_pushed_result, requested_push
from ropext.options.push import PushOptions
from ropext.pipeline.recipe import STAGES

if TYPE_CHECKING:
    from ropext.pipeline.recipe import Recipe
    from ropext.pipeline.running import WantedStages

RecipeArg = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE", help="a recipe file, or the name of a bundled one (ropext recipes ls)"
    ),
]
Words = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="override a key, e.g. finetune.steps=60"),
]
Output = Annotated[
    Path | None,
    options.output_option("OUT", "directory to write; OUT.run keeps the stages", panel=None),
]
From = Annotated[
    str | None,
    typer.Option(
        "--from",
        metavar="STAGE",
        help=f"repeat this stage and all later ones: {', '.join(STAGES[:-1])} or {STAGES[-1]}",
    ),
]
Only = Annotated[str | None, typer.Option("--only", metavar="STAGE", help="run only this stage")]
Force = Annotated[bool, typer.Option("--force", help="replace OUT if another run wrote it")]
KeepPrevious = Annotated[
    bool,
    typer.Option("--keep-previous", help="keep the replaced output as OUT.previous"),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="show the plan and the cost of each stage; write nothing")
]


def command(
    out: Out,
    recipe: RecipeArg,
    words: Words = None,
    *,
    output: Output = None,
    begin: From = None,
    only: Only = None,
    force: Force = False,
    keep_previous: KeepPrevious = False,
    dry_run: DryRun = False,
    trust_remote_code: options.TrustRemoteCode = False,
    pushing: Annotated[options.Given, options.OptionsOf(PushOptions)],
) -> None:
    """Run all steps of a recipe. Plan, extend, verify, fit, fine-tune, evaluate; resumable."""
    from ropext.pipeline.checked_recipe import open_recipe
    from ropext.pipeline.running import WantedStages

    chosen = open_recipe(recipe, words or ())
    push = None
    if pushing:
        push = requested_push(pushing)
    call = call_of(
        out, force=force, trust_remote_code=trust_remote_code, keep_previous=keep_previous
    )
    stages = WantedStages(begin, only)
    if dry_run:
        print_forecast(out, chosen, output, call, stages)
    else:
        run_and_print(out, chosen, output, push, call, stages)


def print_forecast(
    out: Out,
    recipe: "Recipe",
    output: Path | None,
    call: Call,
    stages: "WantedStages",
) -> None:
    """Print the cost of each stage of a run; `ropext extend --dry-run` with later steps does the
    same."""
    from ropext.base.table import columns
    from ropext.pipeline import running

    counts = running.forecast(recipe, output, call, stages)
    out.result(columns(("stage", "what it takes"), counts.rows()), counts)


def run_and_print(
    out: Out,
    recipe: "Recipe",
    output: Path | None,
    push: Push | None,
    call: Call,
    stages: "WantedStages",
) -> None:
    """Run a recipe and print its outcome on the command line; `ropext extend` with later steps does
    the same."""
    from ropext.models.processes import is_main
    from ropext.pipeline import running

    done = running.run(recipe, output, call, stages)
    if not is_main():
        return
    if (report := done.folder / "report.md").is_file():
        out.summarise(report.read_text(encoding="utf-8") + "\n")
    if push is not None and done.output is not None:
        wanted = replace(push, results=tuple(done.measured))
        print_pushed_result(out, done.to_text(), done, done.output, wanted)
        return
    out.result(done.to_text(), done)
    done.raise_if_failed()
