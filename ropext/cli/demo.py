"""`ropext demo`."""

from pathlib import Path
from typing import Annotated

import typer

from ropext.cli import options
from ropext.cli.output import Bar, Out, stoppable

Output = Annotated[
    Path, typer.Option("--output", "-o", metavar="DIR", help="directory that keeps it all")
]
NoFinetune = Annotated[bool, typer.Option("--no-finetune", help="leave out what is trained")]
Far = Annotated[
    bool, typer.Option("--far", help="go on to 32 times the context, tuned by pose (longer)")
]


def command(
    output: Output = Path("ropext-demo"),
    no_finetune: NoFinetune = False,
    far: Far = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Show it all on a small bundled model. Extend, fit, fine-tune, measure, verify; no network."""
    from ropext.demo import running, steps, telling

    out = Out(as_json, quiet)
    chosen = steps.steps(finetune=not no_finetune, far=far)
    with stoppable() as stop:
        hooks = running.Hooks(out.say, Bar(out).show, stop)
        done = running.run(chosen, output, hooks)
    shown = telling.show(done, output)
    out.result(shown.to_text(), shown.to_json())
