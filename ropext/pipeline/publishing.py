"""Upload a finished output to the hub."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ropext.base import guard
from ropext.base.inputs import model_name
from ropext.base.narration import SILENT, Hooks, Say, no_messages
from ropext.files.checkpoint import open_snapshot
from ropext.files.checkpoint.card import README
from ropext.files.inspecting import read_unchanged
from ropext.options.door import public

if TYPE_CHECKING:
    from ropext.files.checkpoint.push import Pushed


@public()
def push(
    directory: str | Path,
    repository: str,
    *,
    public: bool = False,
    results: Sequence[str | Path] = (),
    license: str | None = None,
    base_model: str | None = None,
    force: bool = False,
    dry_run: bool = False,
    bars: bool = False,
    say: Say = no_messages,
    stop: Callable[[], bool] = SILENT.stop,
) -> "Pushed":
    """Upload a finished output to the hub with its card.

    The card gets the numbers of `results` (folders of evaluations, or RUN:VARIANT). With `dry_run`
    ropext uploads nothing and only returns the content of the upload.
    """
    from ropext.files.checkpoint import push as pushing
    from ropext.pipeline import outcome
    from ropext.results.gates import split_run_spec
    from ropext.results.model_index import card_figures
    from ropext.results.rundir import no_digest_warnings

    directory = model_name(directory)
    runs = [split_run_spec(str(run))[0] for run in results]
    guard.check(
        {"--results": runs},
        {"its model card": Path(directory) / README},
    )
    pushing.check_name(repository)
    there = replace(open_snapshot(directory), name=repository, hub_id=repository)
    served = read_unchanged(there)
    lines = served.serving if served else ()
    shown = card_figures(directory, [str(run) for run in results])
    for run in runs:
        for remark in no_digest_warnings(run):
            say(f"warning: {remark}")
    head = pushing.Head(shown, lines, license, base_model)
    note = outcome.owner(Path(directory))
    done = pushing.push(
        directory,
        pushing.Destination(repository, not public, force),
        head,
        dry_run=dry_run,
        bars=bars,
        hooks=Hooks(say, stop=stop),
    )
    if note is not None:
        outcome.claim(note, Path(directory))
    return done
