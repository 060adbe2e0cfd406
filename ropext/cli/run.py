"""`ropext run RECIPE -o OUT`."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ropext.cli import options
from ropext.cli.output import Out
from ropext.cli.push import Public, Push, PushToHub, asked_push, result

if TYPE_CHECKING:
    from ropext.options.recipe import Recipe

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
    typer.Option(
        "--output",
        "-o",
        callback=options.at_home,
        metavar="OUT",
        help="directory to write; OUT.run is beside it",
    ),
]
From = Annotated[
    str | None,
    typer.Option(
        "--from",
        metavar="STAGE",
        help="do this stage and all later ones again: plan, extend, fit, finetune, evaluate or "
        "report",
    ),
]
Only = Annotated[str | None, typer.Option("--only", metavar="STAGE", help="do this stage alone")]
Force = Annotated[bool, typer.Option("--force", help="replace OUT where this run did not write it")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="show the plan and what each stage takes; write nothing")
]


def command(
    out: Out,
    recipe: RecipeArg,
    words: Words = None,
    output: Output = None,
    begin: From = None,
    only: Only = None,
    force: Force = False,
    dry_run: DryRun = False,
    trust_remote_code: options.TrustRemoteCode = False,
    push_to_hub: PushToHub = None,
    public: Public = False,
) -> None:
    """Do what a recipe says. Plan, extend, prove, fit, fine-tune, evaluate, report; resumable."""
    from ropext.pipeline import job

    chosen = job.read(recipe, words or ()).trusting(trust_remote_code)
    push = asked_push(push_to_hub, public)
    choice = {"begin": begin, "only": only, "force": force}
    do(out, chosen, output, push, dry_run=dry_run, **choice)


def do(
    out: Out,
    recipe: "Recipe",
    output: Path | None,
    push: Push | None,
    *,
    dry_run: bool = False,
    **choice: Any,
) -> None:
    """Run a job and tell what came of it; `ropext extend` with later steps does the same."""
    from ropext.models.processes import is_main
    from ropext.pipeline import job, running

    if place := output or recipe.output:
        job.check_places(recipe, Path(place))
    if dry_run:
        from ropext.pipeline import choosing
        from ropext.table import columns

        if recipe.is_auto:
            counts = choosing.prospect(recipe).to_json()
            rows = [*counts["stages"].items()]
        else:
            counts = running.count(recipe, output, out.say, **choice)
            rows = [(name, stage["what"]) for name, stage in counts["stages"].items()]
        out.result(columns(("stage", "what it takes"), rows), counts)
        return
    from ropext.cli.output import Bar

    done = running.run(recipe, output, command=sys.argv, say=out.say, show=Bar(out).show, **choice)
    if not is_main():
        return
    if (report := done.folder / "report.md").is_file():
        out.summarise(report.read_text(encoding="utf-8") + "\n")
    if push is not None and done.output is not None:
        push |= {"results": done.measured}
        result(out, done.to_text(), done, done.output, push)
        return
    out.result(done.to_text(), done)
    done.raise_if_failed()
