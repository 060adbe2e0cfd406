"""Define `ropext extend MODEL -o OUT`; with later steps it runs a recipe made of the options."""

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ropext.base.errors import UsageError
from ropext.base.jobs import Job, counted
from ropext.cli import options, plan
from ropext.cli.output import Out, call_of
from ropext.cli.push import print_pushed_result, requested_push
from ropext.options.extend import Choosing, Extend, Writing, is_run
from ropext.options.push import PushOptions
from ropext.pipeline import extending
from ropext.results.report import text

if TYPE_CHECKING:
    from ropext.planning import ExtensionPlan

Words = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="keys of the later steps, e.g. finetune.steps=60"),
]
Fit = Annotated[
    str | None,
    typer.Option(
        "--fit",
        metavar="DATA",
        help="data to fit the RoPE frequencies on afterwards",
        rich_help_panel=options.BASIC_FOLLOWS,
    ),
]
Evaluate = Annotated[
    str | None,
    typer.Option(
        "--eval",
        metavar="DATA",
        help="data to evaluate on, before and after",
        rich_help_panel=options.BASIC_FOLLOWS,
    ),
]
Force = Annotated[
    bool,
    typer.Option(
        "--force",
        help="replace OUT if ropext wrote all of it",
        rich_help_panel=options.BASIC_OUTPUT,
    ),
]
Serve = Annotated[
    bool,
    typer.Option(
        "--serve",
        help="print how to serve OUT in every engine [vLLM; a GGUF: llama.cpp, Ollama, LM Studio]",
    ),
]
As = Annotated[
    Literal["directory"] | None,
    typer.Option(
        "--as",
        help="write a GGUF as a Hugging Face directory of float32 weights; needs torch and "
        "transformers. Without --factor and --target it is not extended",
        rich_help_panel=options.FURTHER_OUTPUT,
    ),
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run", help="show the plan and write nothing", rich_help_panel=options.BASIC_OUTPUT
    ),
]


def command(
    out: Out,
    model: options.ModelArg,
    given: Annotated[options.Given, options.OptionsOf(Extend, Choosing, Writing)],
    words: Words = None,
    *,
    fit: Fit = None,
    evaluate: Evaluate = None,
    output: options.OutputOrFile = None,
    force: Force = False,
    dry_run: DryRun = False,
    details: plan.Details = False,
    serve: Serve = False,
    as_kind: As = None,
    revision: options.Revision = None,
    trust_remote_code: options.TrustRemoteCode = False,
    pushing: Annotated[options.Given, options.OptionsOf(PushOptions)],
) -> None:
    """Write an extended checkpoint or GGUF and verify it. Changes position settings, not trained
    weights."""
    if output is None and not dry_run:
        raise UsageError(
            "give -o OUT, the directory or GGUF file to write (or --dry-run to see the plan)"
        )
    if details and not dry_run:
        raise UsageError("--details only applies to a plan; add --dry-run, or use ropext plan")
    push = None
    if pushing:
        push = requested_push(pushing)
    call = call_of(out, force=force, trust_remote_code=trust_remote_code)
    if is_run(given, words, fit, evaluate, given.get("finetune")):
        if serve:
            raise UsageError(
                "--serve works only without later steps; after them use ropext plan OUT"
            )
        if as_kind is not None:
            raise UsageError(
                "--as directory works only without later steps; run them on the directory"
            )
        from ropext.cli import run  # late: it needs the options of all steps
        from ropext.pipeline.checked_recipe import recipe_from_options
        from ropext.pipeline.running import UNFINISHED

        top = {"model": model, "revision": revision}
        later = {"fit": fit, "evaluate": evaluate}
        recipe = recipe_from_options(top, given, later, words or ())
        if dry_run:
            run.print_forecast(out, recipe, output, call, UNFINISHED)
        else:
            run.run_and_print(out, recipe, output, push, call, UNFINISHED)
        return
    extension: Job[ExtensionPlan, extending.MadeExtension]
    if as_kind is None:
        extension = extending.prepare_extension(model, given, output, revision)
    else:
        from ropext.pipeline import gguf_outputs  # late: no other extension needs it

        if output is not None and not dry_run and not gguf_outputs.asks_for_extension(given):
            made_directory = gguf_outputs.convert_gguf(model, output, force, call.hooks.say)
            out.result(made_directory.to_text(), made_directory)
            return
        extension = gguf_outputs.prepare_gguf_extension(model, given, output)
    if output is None or dry_run:
        made = counted(extension, output, call)
        plan.show(out, made, details=details)
        made.raise_if_refused()  # as the run would; the run prints no plan
        made.require_training()
        return
    done = extension.make(output, call)
    print_pushed_result(
        out, text.extension_text(done.plan, done.written, serve), done, done.output, push
    )
