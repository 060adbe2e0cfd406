"""Define the public functions that the pipeline implements."""

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ropext.base import guard
from ropext.base.inputs import from_home, model_name
from ropext.base.narration import SILENT, Call, Hooks, Say, Show, no_messages, no_progress
from ropext.options.door import public
from ropext.options.evaluate import Evaluate
from ropext.options.extend import Choosing, Extend, Writing, is_run
from ropext.options.fields import TextsOrPlace, documents_as_place
from ropext.options.training import Finetune, Fit
from ropext.pipeline.recipe import Recipe

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ropext.files.checkpoint.push import Pushed
    from ropext.pipeline.python_results import Evaluated, Extended, Ran
    from ropext.results.gates import Gate
    from ropext.results.report.compared import Compared
    from ropext.training.result import Finetuned, Fitted


@public(Extend, Writing, Choosing)
def extend(
    model: str | Path,
    output: str | Path,
    *,
    revision: str | None = None,
    force: bool = False,
    trust_remote_code: bool = False,
    say: Say = no_messages,
    **options: Any,
) -> "Extended | Ran":
    """Write an extended checkpoint and verify it.

    With method="auto" ropext measures the methods on `data` and chooses one. Then the result is
    that of a run; `Ran.raise_if_failed` turns failed gates into an error.
    """
    output = from_home(output)
    name = model_name(model)
    call = Call(Hooks(say), force=force, trust_remote_code=trust_remote_code)
    if not is_run(options):
        from ropext.pipeline import extending

        made = extending.prepare_extension(name, options, output, revision).make(output, call)
        from ropext.pipeline.python_results import Extended

        return Extended(made.written, made.serving, made.plan)
    from ropext.pipeline import running
    from ropext.pipeline.checked_recipe import recipe_from_options

    with _texts_as_file(options.pop("data", None)) as data:
        if data is not None:
            options["data"] = data
        top = {"model": name, "revision": revision}
        recipe = recipe_from_options(top, options, {}, where="the call")
        return running.run(recipe, output, call)


@public()
def run(
    recipe: str | Path | Mapping[str, Any] | Recipe,
    output: str | Path | None = None,
    *,
    overrides: Sequence[str] = (),
    trust_remote_code: bool = False,
    begin: str | None = None,
    only: str | None = None,
    force: bool = False,
    keep_previous: bool = False,
    say: Say = no_messages,
    show: Show = no_progress,
) -> "Ran":
    """Run a recipe: plan, extend, verify, fit, fine-tune, evaluate, report.

    A stage is skipped if its inputs did not change, so a second run does nothing. `recipe` is a
    file, or its content as a mapping; `overrides` are `key=value`; `begin` and `only` name a stage.
    `Ran.raise_if_failed` turns failed gates into an error. `show` gets the progress of an
    evaluation: the tokens done, the total, and a description.
    """
    from ropext.pipeline import running
    from ropext.pipeline.checked_recipe import open_recipe

    call = Call(Hooks(say, show), (), force, trust_remote_code, keep_previous)
    return running.run(
        open_recipe(recipe, overrides), output, call, running.WantedStages(begin, only)
    )


@contextmanager
def _texts_as_file(data: TextsOrPlace | None) -> Iterator[str | None]:
    """Yield the path of the documents that choose a method; documents in memory are written to a
    temporary file."""
    place = None if data is None else documents_as_place(data)
    rows = getattr(place, "rows", None)
    if rows is None:
        yield place
        return
    with tempfile.TemporaryDirectory(prefix="ropext-texts-") as room:
        file = Path(room) / "texts.jsonl"
        documents = (row if isinstance(row, Mapping) else {"text": row} for row in rows)
        file.write_text(
            "".join(json.dumps(dict(one), default=str) + "\n" for one in documents), "utf-8"
        )
        yield str(file)


@public(Finetune)
def finetune(
    directory: str | Path,
    data: TextsOrPlace,
    output: str | Path,
    *,
    force: bool = False,
    say: Say = no_messages,
    **options: Any,
) -> "Finetuned":
    """Fine-tune an extended checkpoint and return the result."""
    from ropext.training.request import TrainingRequest

    place = from_home(output)
    call = Call(Hooks(say), force=force)
    request = TrainingRequest(model_name(directory), documents_as_place(data), Finetune(**options))
    with request.prepared(place, call) as job:
        done: Finetuned | None = job.make(place, call)
    assert done is not None  # every process of a fine-tuning has it
    return done


@public(Fit)
def fit(
    model: str | Path,
    data: TextsOrPlace,
    output: str | Path,
    *,
    force: bool = False,
    say: Say = no_messages,
    revision: str | None = None,
    **options: Any,
) -> "Fitted | None":
    """Fit a spectrum with the weights frozen.

    For a GGUF, ropext fits on the dequantised weights, and OUTPUT also gets the GGUF with the
    fitted spectrum. Under `accelerate launch` the first process returns the result, the others
    None.
    """
    from ropext.pipeline.gguf_outputs import fit_request

    place = from_home(output)
    call = Call(Hooks(say), force=force)
    request = fit_request(model_name(model), documents_as_place(data), Fit(**options), revision)
    with request.prepared(place, call) as job:
        return job.make(place, call)


@public(Evaluate)
def evaluate(
    model: "str | Path | PreTrainedModel | PeftModel",
    output: str | Path | None = None,
    *,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    say: Say = no_messages,
    show: Show = no_progress,
    stop: Callable[[], bool] = SILENT.stop,
    revision: str | None = None,
    trust_remote_code: bool = False,
    force: bool = False,
    gates: "Sequence[str | Gate]" = (),
    losses: str | Path | None = None,
    labels: Mapping[str, str] | None = None,
    **options: Any,
) -> "Evaluated":
    """Measure a model on long text and by retrieval.

    With `output` ropext writes the report into that folder, and the same call resumes after a stop.
    ropext refuses `gates` about numbers that are not measured. `Evaluated.gates` has the verdicts,
    and `Evaluated.raise_if_failed` turns failed gates into an error. `labels` gives models the
    user's own names: `{"yarn-4x": "YaRN"}`.

    A model in memory, patched or not, is evaluated as it is, on its device, and does not change:
    ropext evaluates copies that share its weights. If `ropext.patch` extended it, its base is the
    same model before the patch; if its weights changed since, give `base`. A PEFT model is
    evaluated without its adapter and with it. Without `tokenizer`, ropext loads the tokenizer from
    the model's origin. The results of a model in memory are written at the end and never resumed: a
    second call with the same output needs `force`.
    """
    from ropext.evaluation.request import EvaluationRequest, named_or_held
    from ropext.pipeline.python_results import Evaluated
    from ropext.results.gates import read_gates

    call = Call(Hooks(say, show, stop), (), force, trust_remote_code)
    place = None if output is None else from_home(output)
    kept = None if losses is None else from_home(losses)
    conditions = read_gates(gates)
    measured = named_or_held(model)
    request = EvaluationRequest(
        measured, Evaluate(**options), revision, conditions, kept, tokenizer, labels or {}
    )
    with request.prepared(place, call) as job:
        return Evaluated.of(job.make(place, call))


@public()
def compare(
    *runs: "str | Path | Evaluated | Ran",
    output: str | Path | None = None,
    labels: Mapping[str, str] | None = None,
) -> "Compared":
    """Compare finished evaluations, paired on the same tokens.

    A run is a directory, RUN:VARIANT, or the result of `evaluate`, `run` or `open`. With `output`
    ropext also writes the report there. `labels` gives models the user's own names.
    """
    from ropext.pipeline.python_results import measurement_of_result
    from ropext.results.measurement import Measurement
    from ropext.results.report.compared import compare_runs

    given = list[str | Measurement]()
    for run in runs:
        given.append(measurement_of_result(run) or str(from_home(cast(str, run))))
    place = None if output is None else from_home(output)
    return compare_runs(given, place, labels)[1]


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
    from ropext.files.checkpoint import card, open_snapshot
    from ropext.files.checkpoint import push as pushing
    from ropext.files.inspecting import read_unchanged
    from ropext.pipeline import run_output
    from ropext.results.gates import split_run_spec
    from ropext.results.model_index import card_figures
    from ropext.results.rundir import no_digest_warnings

    directory = model_name(directory)
    runs = [split_run_spec(str(run))[0] for run in results]
    guard.check(
        {"--results": runs},
        {"its model card": Path(directory) / card.README},
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
    note = run_output.find_output_list(Path(directory))
    done = pushing.push(
        directory,
        pushing.Destination(repository, not public, force),
        head,
        dry_run=dry_run,
        bars=bars,
        hooks=Hooks(say, stop=stop),
    )
    if note is not None:
        run_output.add_to_output_list(note, Path(directory))
    return done
