"""What Python and the command line call, where the pipeline does it."""

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ropext import bundled, guard
from ropext.checkpoint import open_snapshot, provenance
from ropext.checkpoint.card import README
from ropext.inputs import from_home, model_name
from ropext.inspecting import open_model, planned, positions_of, read_again
from ropext.narration import SILENT, Hooks, Say, silent
from ropext.options.evaluate import Evaluate
from ropext.options.extend import Writing, is_run
from ropext.options.fields import FINETUNE, FIT, TextsOrPlace, as_place, reads
from ropext.planning import Plan

if TYPE_CHECKING:
    from ropext.checkpoint.push import Pushed
    from ropext.evaluation.costs import Costs
    from ropext.pipeline.extending import Extended
    from ropext.pipeline.outcome import Ran
    from ropext.report.evaluation import Compared
    from ropext.results.measurement import Measurement
    from ropext.training.objective import Finetuned, Fitted


def extend(
    model: str | Path,
    output: str | Path,
    *,
    revision: str | None = None,
    force: bool = False,
    trust_remote_code: bool = False,
    command: Sequence[str] = (),
    say: Say = silent,
    **options: Any,
) -> "Extended | Ran":
    """Write an extended checkpoint and prove it; `options` are the fields of options.extend's
    Extend and Writing.

    With method="auto" the method is chosen by measuring on `data`, and all that a run did is
    returned (`Ran.raise_if_failed` turns failed gates into an error).
    """
    output = from_home(output)
    name = model_name(model)
    given = {key: value for key, value in options.items() if value is not None}
    how: dict[str, Any] = {"force": force, "command": command, "say": say}
    how |= {"trust_remote_code": trust_remote_code}
    if not is_run(given):
        from ropext.pipeline import extending

        return extending.extend(name, output, given, revision=revision, **how)
    from ropext.pipeline import job, running

    with _as_file(given.pop("data", None)) as data:
        given |= {} if data is None else {"data": data}
        top = {"model": name, "revision": revision}
        return running.run(job.from_options(top, given, {}, where="the call"), output, **how)


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
        file.write_text(
            "".join(json.dumps(dict(document)) + "\n" for document in documents), "utf-8"
        )
        yield str(file)


def finetune(
    directory: str | Path, data: TextsOrPlace, output: str | Path, **options: Any
) -> "Finetuned":
    """Fine-tune an extended checkpoint; `options` are the fields of options.training.Finetune, and
    what `training.train` takes beside them."""
    from ropext.training import train

    name = model_name(directory)
    done: Finetuned = train(FINETUNE, name, data, from_home(output), **options)
    return done


def fit(
    model: str | Path,
    data: TextsOrPlace,
    output: str | Path,
    *,
    force: bool = False,
    command: Sequence[str] = (),
    say: Say = silent,
    **options: Any,
) -> "Fitted | None":
    """Fit a spectrum with the weights frozen; `options` are the fields of options.training.Fit. Of
    a GGUF it is fitted on the dequantised weights, and OUTPUT also has the file with it.

    Under `accelerate launch` the first process has the result, the others None.
    """
    from ropext.training import train

    place = from_home(output)
    common: dict[str, Any] = {"command": command, "say": say}
    base = model_name(model)
    gguf = bundled.find_gguf(base)

    def add_gguf(directory: Path) -> None:
        assert gguf is not None
        name = f"{gguf.stem}-long.gguf"
        _extend_like(base, directory, place, name, common)
        say(f"{place / name} is the file with this spectrum; beside it are the weights in float32")

    finish = None if gguf is None else add_gguf
    done: Fitted | None = train(
        FIT, base, data, place, force=force, finish=finish, **common, **options
    )
    return done


def _extend_like(
    model: str, directory: Path, output: Path, file: str, common: Mapping[str, Any]
) -> None:
    """Write a GGUF with the spectrum of a directory into it, and list it there. The directory will
    be called `output`, and is so in the record."""
    from ropext.pipeline import extending

    snapshot = open_model(model)
    plan = extending.warned(planned(snapshot, model, {"like": str(directory)}), common["say"])
    assert isinstance(plan, Plan)  # a GGUF rotates
    plan = replace(plan, recipe=plan.recipe.changed(like=str(output)))
    before = guard.listing(directory)
    extending.write_extension(snapshot, plan, directory / file, Writing(), **common)
    for name in guard.listing(directory):
        if name not in before:
            provenance.relist(directory, name)


def evaluate(
    model: str | Path, output: str | Path | None = None, *, hooks: Hooks = SILENT, **options: Any
) -> "Measurement":
    """Measure a model on long text and by retrieval, and with `output` write the report there too;
    `options` are those of evaluation.session.evaluate."""
    from ropext.evaluation import session
    from ropext.report.evaluation import write_report

    output = None if output is None else from_home(output)
    name = model_name(model)
    with _readable(name, output, options, hooks.say) as place:
        if place != name:
            from ropext.evaluation.variants import line_up
            from ropext.options.evaluate import Evaluate

            chosen = {key: value for key, value in options.items() if key in Evaluate.model_fields}
            options["lineup"] = line_up(place, None, Evaluate(**chosen), name)
        report = partial(write_report, gates=options.get("gates", ()))
        return session.evaluate(place, output, hooks=hooks, report=report, **options)


def count_evaluation(
    model: str, output: Path | None, *, losses: Path | None, say: Say, **options: Any
) -> "Costs":
    """What `evaluate` would read; what it would refuse is refused."""
    from ropext.evaluation import costs

    with _readable(model, output, options | {"losses": losses}, say) as place:
        evaluation, count = costs.count_evaluation(place, output=output, **options)
    for warning in evaluation.warnings:
        say(f"warning: {warning}")
    return count


@contextmanager
def _readable(
    model: str, output: str | Path | None, options: Mapping[str, Any], say: Say
) -> Iterator[str]:
    """The directory that is read: of a GGUF, one of its weights while this lasts. To write over,
    into or around what is read is refused."""
    from ropext.dequantising import directory_of
    from ropext.results.gates import split_spec

    runs = [split_spec(gate.run)[0] for gate in options.get("gates", ()) if gate.run]
    losses = Path(options["losses"]) if options.get("losses") else None
    read = {"MODEL": model, "--fail-if": runs, **reads(options, Evaluate)}
    guard.check(read, {"--output": output, "--losses": losses})
    guard.check_file(losses, "--losses", guard.LOSSES)
    with directory_of(model, say) as place:
        yield place


def compare(*runs: str | Path, output: str | Path | None = None) -> "Compared":
    """Set finished evaluations side by side, paired on the same tokens: a run directory, or
    RUN:VARIANT; with `output` write the report there too."""
    from ropext.report.evaluation import compare_runs

    return compare_runs([str(run) for run in runs], None if output is None else from_home(output))[
        1
    ]


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
    from ropext.results.gates import split_spec
    from ropext.results.model_index import figures

    guard.check(
        {"--results": [split_spec(str(run))[0] for run in results]},
        {"its model card": Path(directory) / README},
    )
    pushing.check_name(repository)
    there = replace(open_snapshot(directory), name=repository, hub_id=repository)
    served = read_again(there).serving if positions_of(there) is None else ()
    lines = [(line.loader, line.command) for line in served if line.command]
    shown = figures(directory, [str(run) for run in results])
    head = pushing.Head(shown, lines, license, base_model)
    note = outcome.owner(Path(directory))
    how: dict[str, Any] = {"force": force, "dry_run": dry_run, "bars": bars}
    done = pushing.push(directory, repository, not public, head=head, say=say, stop=stop, **how)
    if note is not None:
        outcome.claim(note, Path(directory))
    return done
