"""`ropext demo`."""

from pathlib import Path
from typing import Annotated

import typer

from ropext.cli.output import Bar, Out, stoppable

Output = Annotated[
    Path, typer.Option("--output", "-o", metavar="DIR", help="directory that keeps it all")
]
NoFinetune = Annotated[bool, typer.Option("--no-finetune", help="leave out what is trained")]
Far = Annotated[bool, typer.Option("--far", help="go on to 8 and 32 times the context (longer)")]


def command(
    out: Out,
    output: Output = Path("ropext-demo"),
    no_finetune: NoFinetune = False,
    far: Far = False,
) -> None:
    """Show it all on a small bundled model. Extend, fit, fine-tune, measure, verify; no network."""
    from ropext import demo
    from ropext.narration import Hooks
    from ropext.pipeline.series import run_series

    recipe = demo.read_recipe(finetune=not no_finetune, far=far)
    with stoppable() as stop:
        done = run_series(recipe.steps, output, Hooks(out.say, Bar(out).show, stop))
        shown = demo.show(recipe, done, output)
    out.result(shown.to_text(), shown.to_json())
