"""`ropext finetune DIR --data DATA -o OUT`."""

from typing import Annotated, Any

import typer

from ropext.cli import options as shared
from ropext.cli import push
from ropext.cli.output import Out
from ropext.errors import UsageError
from ropext.options.fields import FINETUNE
from ropext.options.training import Finetune

Directory = Annotated[
    str, typer.Argument(metavar="DIR", help="an extended checkpoint: a directory or a hub id")
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="show settings, sources, tokens, bytes; train nothing")
]


@shared.takes("given", Finetune, after=4)
def command(
    out: Out,
    directory: Directory,
    data: shared.Data,
    given: dict[str, Any],
    output: shared.Output = None,
    force: shared.BeginAnew = False,
    dry_run: DryRun = False,
    push_to_hub: push.PushToHub = None,
    public: push.Public = False,
) -> None:
    """Train an extended checkpoint briefly. A LoRA, merged at the end."""
    from ropext.evaluation import sharing
    from ropext.pipeline.public import finetune
    from ropext.training import count_training, report

    if output is None and not dry_run:
        raise UsageError("give -o OUT, the directory to write (or --dry-run to see the settings)")
    wanted = push.asked_push(push_to_hub, public)
    if output is None or dry_run:
        planned = count_training(FINETUNE, directory, data, output, force=force, **given)
        if sharing.is_main():
            out.result(report.plan_text(planned), planned)
        return
    done = finetune(directory, data, output, force=force, say=out.say, **given)
    if sharing.is_main():
        push.result(out, report.finetune_result(done), done, done.output, wanted)
