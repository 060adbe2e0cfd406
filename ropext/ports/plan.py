"""What is asked of a running server, decided before the first question."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ropext.checkpoint.provenance import clean_command, digest, installed
from ropext.errors import UsageError
from ropext.lengths import doubling_grid, lengths_text
from ropext.options.endpoint import AskPort
from ropext.options.fields import CONTENT, NEUTRAL, NUMBERS
from ropext.ports.counting import Counting, counting_of
from ropext.ports.port import Port
from ropext.ports.questions import Wish, sentences_of
from ropext.ports.server import served_model, server_at
from ropext.ports.shares import ENOUGH, deciding_questions
from ropext.ports.window import trained_window
from ropext.results import rundir
from ropext.tasks import find_task
from ropext.workdir import Workdir

PORT = "port"
CUT = "cut"  # the two rows
SHORTEST = 1024  # of the lengths, where nothing says what the window is
MOST_LENGTHS = 8  # where none are named


@dataclass(frozen=True)
class PortPlan:
    """Everything that is decided before the first question."""

    options: AskPort
    port: Port
    plain: Port | None
    counting: Counting
    window: tuple[int, str] | None
    wish: Wish
    texts: tuple[str, ...]

    @property
    def labels(self) -> tuple[str, ...]:
        """The rows that there will be."""
        return (PORT,) if self.window is None else (PORT, CUT)

    @property
    def decides(self) -> dict[str, Any]:
        """What must be equal for a run to go on in its folder."""
        plain = self.plain
        return {
            "schema": rundir.SCHEMA,
            "endpoint": [self.port.server.root, self.port.model, self.port.limit],
            "plain": None if plain is None else [plain.server.root, plain.model],
            "settings": self.options.deciding(NUMBERS),
            "lengths": list(self.wish.lengths),
            "window": self.window and self.window[0],
            "counted_by": self.counting.how,
            "texts_sha256": digest(self.texts),
            "variants": {},
            "versions": installed(("ropext",)),
        }

    def workdir(self, output: Path, command: Sequence[str]) -> Workdir:
        """The folder of the run."""
        about = {
            "words": list(clean_command(command)),
            "names": self.options.deciding(CONTENT, NEUTRAL) | {"models": {PORT: self.port.model}},
        }
        return Workdir(output, "eval", self.decides, about)


def prepare_port(options: AskPort, model: str | None, texts: Sequence[str]) -> PortPlan:
    """Ask who is there, and decide lengths and questions."""
    url = options.endpoint or ""
    port = _port(url, options, model)
    plain = None if options.plain is None else _port(options.plain, options, None)
    window = trained_window(options.context, options.against)
    hay = sentences_of(texts) if options.haystack == "text" else ()
    wish = Wish(
        options.asked,
        lengths_of(options, port, window and window[0]),
        options.depths,
        options.items,
        options.seed,
        options.api,
        hay,
    )
    counting = counting_of(port, options.tokenizer)
    return PortPlan(options, port, plain, counting, window, wish, tuple(texts))


def _port(url: str, options: AskPort, model: str | None) -> Port:
    server = replace(server_at(url), deadline=float(options.deadline))
    name, limit = served_model(server, url, model)
    return Port(server, name, limit, options.api, options.template_args)


def lengths_of(options: AskPort, port: Port, window: int | None) -> tuple[int, ...]:
    """The lengths that are asked for, else doubling up to what the server says that it takes."""
    if options.lengths:
        return options.lengths
    if port.limit is None:
        raise UsageError(
            f"{port.server.root} does not say how many tokens it takes: give --lengths, such as "
            "4k,8k,16k"
        )
    grid = doubling_grid(window or min(4 * SHORTEST, port.limit), port.limit)
    return grid[-MOST_LENGTHS:]


def plan_lines(plan: PortPlan) -> list[str]:
    """What will be asked, and how many questions could decide."""
    port = plan.port
    limit = "no stated limit" if port.limit is None else f"a limit of {port.limit} tokens"
    lines = [
        f"{port.server.root} serves {port.model} with {limit}; prompts are counted by "
        f"{plan.counting.how}"
    ]
    if plan.wish.tasks:
        lines.append(_questions_line(plan))
    if plan.window is None:
        lines.append(
            "no row of cut text: neither --context nor --against says what the trained window is"
        )
    elif plan.plain is None:
        lines.append(
            f"beside it the same questions cut to {plan.window[0]} tokens ({plan.window[1]}), read "
            "by this server; --plain URL asks one of the unscaled model"
        )
    else:
        lines.append(
            f"beside it the same questions cut to {plan.window[0]} tokens ({plan.window[1]}), read "
            f"by {plan.plain.server.root}"
        )
    return lines


def _questions_line(plan: PortPlan) -> str:
    wish = plan.wish
    at_each = sum(
        len(depths)
        for task in wish.tasks
        for _, depths in find_task(task).groups(wish.depths, wish.items)
    )
    least = deciding_questions()
    line = f"{', '.join(wish.tasks)}: {at_each} questions at each of {lengths_text(wish.lengths)}"
    if at_each >= least:
        return f"{line}; with all found the interval lies above {ENOUGH:.0%} from {least} on"
    return (
        f"{line}; no answer can put the interval above {ENOUGH:.0%}: {least} questions could "
        "(--items)"
    )
