"""`ropext fit MODEL --data DATA -o OUT`."""

import sys
from typing import Annotated, Any

import typer

from ropext.cli import options as shared
from ropext.cli import push
from ropext.cli.output import Out
from ropext.errors import UsageError
from ropext.options.fields import FIT
from ropext.options.training import Fit

DryRun = Annotated[
    bool, typer.Option("--dry-run", help="show settings, sources, tokens, bytes; fit nothing")
]


@shared.takes("given", Fit, after=4)
def command(
    out: Out,
    model: shared.ModelArg,
    data: shared.Data,
    given: dict[str, Any],
    output: shared.Output = None,
    force: shared.BeginAnew = False,
    dry_run: DryRun = False,
    revision: shared.Revision = None,
    push_to_hub: push.PushToHub = None,
    public: push.Public = False,
) -> None:
    """Learn a spectrum from text, weights untouched. config.json says what was found."""
    from ropext.evaluation import sharing
    from ropext.pipeline.public import fit
    from ropext.training import count_training, report

    if output is None and not dry_run:
        raise UsageError("give -o OUT, the directory to write (or --dry-run to see the settings)")
    wanted = push.asked_push(push_to_hub, public)
    if output is None or dry_run:
        planned = count_training(FIT, model, data, output, revision=revision, force=force, **given)
        if sharing.is_main():
            out.result(report.plan_text(planned), planned)
        return
    given |= {"revision": revision, "force": force, "command": sys.argv, "say": out.say}
    done = fit(model, data, output, **given)
    if done is not None:
        push.result(out, report.fit_result(done), done, done.output, wanted)
