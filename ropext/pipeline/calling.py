"""What Python calls, where it knows of runs: an extension, with `method="auto"` a run; a push."""

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ropext import bundled, guard
from ropext.checkpoint import open_snapshot, provenance
from ropext.checkpoint.card import README
from ropext.inspecting import positions_of, read_again
from ropext.narration import SILENT, Say, silent
from ropext.options.extend import AUTO, Choosing, Extend
from ropext.options.fields import FINETUNE, TextsOrPlace, as_place
from ropext.pipeline import extending
from ropext.pipeline.extending import Extended
from ropext.results.figures import figures
from ropext.results.gates import split_spec

if TYPE_CHECKING:
    from ropext.checkpoint.push import Pushed
    from ropext.pipeline.outcome import Ran
    from ropext.training.fit import Fitted


def extend(
    model: str | Path,
    output: str | Path,
    *,
    say: Say = silent,
    force: bool = False,
    **options: Any,
) -> "Extended | Ran":
    """Write an extended checkpoint and prove it; `options` are the fields of options.extend.Extend.

    With method="auto" the method is chosen by measuring on `data`, and all that a run did is
    returned (`Ran.raise_if_failed` turns failed gates into an error).
    """
    choosing = {k: options.pop(k) for k in Choosing.model_fields if options.get(k) is not None}
    if not choosing and options.get("method") != AUTO:
        return extending.extend(model, output, say=say, force=force, **options)
    from ropext.options.recipe import ExtendSection
    from ropext.pipeline import job, running

    with _as_file(choosing.get("data")) as data:
        given = {k: v for k, v in (options | choosing | {"data": data}).items() if v is not None}
        top = {"model": str(model), "revision": given.pop("revision", None)}
        trusted = given.pop("trust_remote_code", False)
        command, later = given.pop("command", ()), {FINETUNE: given.pop("finetune", None)}
        given |= {"no_verify": not given.pop("prove", True)}
        given |= {"hash": given.pop("hash_weights", False)}
        known = ExtendSection.model_fields
        Extend(**{name: given[name] for name in given if name not in known})  # refuses it
        asked = job.from_options(top, given, later, where="the call").trusting(trusted)
        return running.run(asked, output, force=force, command=command, say=say)


def fit(
    model: str | Path,
    data: TextsOrPlace,
    output: str | Path,
    *,
    revision: str | None = None,
    force: bool = False,
    command: Sequence[str] = (),
    say: Say = silent,
    **options: Any,
) -> "Fitted | None":
    """Fit a spectrum with the weights frozen; `options` are the fields of options.training.Fit. Of
    a GGUF it is fitted on the dequantised weights, and OUTPUT also has the file with it.

    Under `accelerate launch` the first process has the result, the others None.
    """
    from ropext.training import run_fit

    common: dict[str, Any] = {"force": force, "command": command, "say": say}
    done = run_fit(model, data, output, revision=revision, **common, **options)
    if done is not None and (gguf := bundled.find_gguf(str(model))) is not None:
        file = Path(output) / f"{gguf.stem}-long.gguf"
        extending.extend(model, file, like=str(output), beside=True, **common)
        provenance.relist(Path(output), file.name)
        say(f"{file} is the file with this spectrum; beside it are the weights in float32")
    return done


@contextmanager
def _as_file(data: TextsOrPlace | None) -> Iterator[str | None]:
    """Where documents lie; those that Python holds lie in a file while this lasts."""
    place = None if data is None else as_place(data)
    rows = getattr(place, "rows", None)
    if rows is None:
        yield place
        return
    with tempfile.TemporaryDirectory(prefix="ropext-texts-") as room:
        file = Path(room) / "texts.jsonl"
        documents = (row if isinstance(row, Mapping) else {"text": row} for row in rows)
        file.write_text("".join(json.dumps(dict(own)) + "\n" for own in documents), "utf-8")
        yield str(file)


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
    say: Say = silent,
    stop: Callable[[], bool] = SILENT.stop,
) -> "Pushed":
    """Upload a finished output to the hub, with its card and what `results` (runs of an evaluation,
    or RUN:VARIANT) measured of it; with `dry_run` only say what would be there."""
    from ropext.checkpoint import push as pushing
    from ropext.pipeline import outcome

    guard.check(
        {"--results": [split_spec(str(run))[0] for run in results]},
        {"its model card": Path(directory) / README},
    )
    there = replace(open_snapshot(directory), name=repository, hub_id=repository)
    served = read_again(there).serving if positions_of(there) is None else ()
    lines = [(own.loader, own.command) for own in served if own.command]
    found = figures(directory, [str(run) for run in results])
    head = pushing.Head(found, lines, license, base_model)
    note = outcome.owner(Path(directory))
    done = pushing.push(
        directory,
        repository,
        not public,
        head=head,
        force=force,
        dry_run=dry_run,
        bars=bars,
        say=say,
        stop=stop,
    )
    if note is not None:
        outcome.own(note, Path(directory))
    return done
