"""`ropext eval MODEL --data DATA`."""

import inspect
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, fields
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ropext.cli import options
from ropext.cli.output import Out, fail
from ropext.evaluation.options import Options, gates_of

if TYPE_CHECKING:
    from ropext.evaluation import Evaluation
    from ropext.results.gates import Gate, Outcome

NAME = "eval"

Output = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="RUN", help="directory that keeps it all")
]
FailIf = Annotated[
    list[str] | None,
    typer.Option(
        "--fail-if",
        metavar="GATE",
        help='exit 3 when it holds, e.g. "tail@32k > 8.5", "short_tax > 0.02", "tail@32k > vs RUN"',
    ),
]
Force = Annotated[bool, typer.Option("--force", help="replace RUN if it holds another run")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="passes, FLOPs, peak memory; runs nothing")]


def _takes_options(command: Callable[..., None]) -> Callable[..., None]:
    """One option per field of Options; the command gets those given as `values`."""
    own = inspect.signature(command, eval_str=True)
    added = []
    for wish in fields(Options):
        default = wish.default if wish.default is not MISSING else None
        kind: Any = str | None
        if wish.type is bool:
            kind = bool
        elif wish.type in (int, int | None):
            kind = int | None
        flag = "--" + wish.name.replace("_", "-")
        names = [flag, "-m"] if wish.name == "method" else [flag]
        words = wish.metadata["help"]
        if isinstance(default, str | int) and not isinstance(default, bool):
            words = f"{words} [{default}]"
        info = typer.Option(*names, metavar=wish.metadata["metavar"], help=words)
        added.append(
            inspect.Parameter(
                wish.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=False if kind is bool else None,
                annotation=Annotated[kind, info],
            )
        )

    def with_options(**values: Any) -> None:
        chosen = {p.name: values.pop(p.name) for p in added}
        given = {key: value for key, value in chosen.items() if value not in (None, False)}
        command(values=given, **values)

    kept = [p for name, p in own.parameters.items() if name != "values"]
    kept = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in kept]
    merged = [*kept[:1], *added, *kept[1:]]
    with_options.__signature__ = inspect.Signature(merged)  # type: ignore[attr-defined]
    with_options.__annotations__ = {p.name: p.annotation for p in merged}
    with_options.__doc__ = command.__doc__
    return with_options


@_takes_options
def command(
    model: options.ModelArg,
    values: dict[str, Any],
    output: Output = None,
    fail_if: FailIf = None,
    force: Force = False,
    dry_run: DryRun = False,
    revision: options.Revision = None,
    trust_remote_code: options.TrustRemoteCode = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Measure a model at its long lengths. By perplexity and retrieval, beside the base."""
    from ropext.evaluation import Hooks, estimate_evaluation, evaluate
    from ropext.evaluation.work import processes

    out = Out(as_json, quiet)
    gates = gates_of(tuple(fail_if or ()))
    common = {"revision": revision, "trust_remote_code": trust_remote_code}
    if dry_run:
        setting, estimate = estimate_evaluation(model, **common, **values)
        for warning in setting.prepared.warnings:
            out.say(f"warning: {warning}")
        out.result(_estimate_text(estimate), estimate.to_json())
        return
    with _interruptible() as stop:
        hooks = Hooks(say=out.say, show=_Bar(out).show, stop=stop)
        done = evaluate(
            model, output, **common, force=force, command=sys.argv, hooks=hooks, **values
        )
    if processes()[0] == 0:
        _tell(out, done, gates)


def _tell(out: Out, done: "Evaluation", gates: "tuple[Gate, ...]") -> None:
    """The result on stdout, the gates, and the exit code that follows from them."""
    from ropext.report import measured
    from ropext.results import contest

    assert done.run is not None  # the first process always has it
    outcomes = contest.judge(done.run, gates)
    tables = [*measured.text_tables(done.results), *measured.retrieval_tables(done.results)]
    harness = measured.harness_table(done.results)
    tables += [harness] if harness else []
    lines = measured.verdict_lines(done.results)
    lines += [_gate_line(outcome) for outcome in outcomes]
    out.result(
        measured.as_text(tables, lines),
        dict(done.results) | {"gates": [vars(outcome) for outcome in outcomes]},
    )
    if done.resumed:
        out.say(f"{done.resumed} finished pieces were found and not read again")
    if done.path is not None:
        out.say(f"report: {done.path / 'report.html'}")
    summary = os.environ.get("GITHUB_STEP_SUMMARY")
    if summary:
        with Path(summary).open("a", encoding="utf-8") as stream:
            stream.write(measured.as_markdown(tables) + "\n\n")
            stream.writelines(f"- {line}\n" for line in lines)
    contest.raise_if_failed(outcomes)


def _gate_line(outcome: "Outcome") -> str:
    return f"gate {'passed' if outcome.passed else 'FAILED'}: {outcome.reason}"


def _estimate_text(estimate: Any) -> str:
    from ropext.report.text import size, table

    manner = f"in chunks of {estimate.chunk}" if estimate.chunk else "each document in one piece"
    rows = [(part.what, str(part.passes), str(part.tokens)) for part in estimate.work]
    return "\n".join(
        [
            table(("work", "passes", "tokens each"), rows),
            "",
            f"passes       {estimate.passes}",
            f"tokens       {estimate.tokens:,}",
            f"FLOPs        {estimate.flops:.3g}",
            f"weights      {size(estimate.weight_bytes)}",
            f"peak memory  {size(estimate.peak_bytes)} above the weights, read {manner}, logits in "
            f"slices of {estimate.slice_tokens} tokens",
        ]
    )


@contextmanager
def _interruptible() -> Iterator[Callable[[], bool]]:
    """The first Ctrl-C asks for a stop at the next unit of work; a second one ends now."""
    asked: list[bool] = []

    def on_interrupt(signum: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        fail("interrupted; stopping after the document in hand (Ctrl-C again ends at once)")
        asked.append(True)

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield lambda: bool(asked)
    finally:
        signal.signal(signal.SIGINT, before)


class _Bar:
    """Progress with the time that is left, on one line of a terminal; a sentence now and then
    elsewhere."""

    SECONDS = 0.2
    SECONDS_IN_LOGS = 30.0

    def __init__(self, out: Out) -> None:
        self.out = out
        self.begun = time.monotonic()
        self.last = self.begun

    def show(self, done: int, total: int, what: str) -> None:
        now = time.monotonic()
        pause = self.SECONDS if self.out.animated else self.SECONDS_IN_LOGS
        finished = done >= total
        if self.out.quiet or (now - self.last < pause and not (finished and self.out.animated)):
            return
        self.last = now
        left = (now - self.begun) * (total - done) / max(done, 1)
        text = f"{100 * done / max(total, 1):3.0f} %  about {_time(left)} left  {what}"
        if self.out.animated:
            sys.stderr.write(f"\r\x1b[2K{text[:100]}" + ("\n" if finished else ""))
            sys.stderr.flush()
        else:
            self.out.say(text)


def _time(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
