"""`ropext fit MODEL --data DATA -o OUT`."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ropext.cli import options as shared
from ropext.cli import push
from ropext.cli.output import Out
from ropext.errors import UsageError
from ropext.options.fields import FIT
from ropext.options.training import Fit

DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="show settings, sources, tokens, bytes; fit nothing",
        rich_help_panel=shared.BASIC_OUTPUT,
    ),
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
    given |= {"revision": revision, "force": force}
    train(out, FIT, (model, data, output), dry_run, push.asked_push(push_to_hub, public), given)


def train(
    out: Out,
    kind: str,
    places: tuple[str, str, Path | None],
    dry_run: bool,
    wanted: push.Push | None,
    given: dict[str, Any],
) -> None:
    """Train, `places` being the model, the data and the output; with --dry-run say what that would
    take. Of several processes the first one prints."""
    from ropext.models import processes
    from ropext.pipeline import public
    from ropext.training import count_training, report

    model, data, output = places
    if output is None and not dry_run:
        raise UsageError("give -o OUT, the directory to write (or --dry-run to see the settings)")
    if output is None or dry_run:
        planned = count_training(kind, model, data, output, **given)
        if processes.is_main():
            out.result(report.plan_text(planned), planned)
        return
    done = getattr(public, kind)(model, data, output, command=sys.argv, say=out.say, **given)
    if processes.is_main():
        said = report.fit_result(done) if kind == FIT else report.finetune_result(done)
        push.result(out, said, done, done.output, wanted)
