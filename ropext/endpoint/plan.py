"""Plan the evaluation of a running server before the first question."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ropext.base.errors import UsageError
from ropext.base.jsontext import Json, digest
from ropext.base.lengths import doubling_grid, lengths_text, tail_tokens
from ropext.base.narration import clean_command
from ropext.base.workdir import Workdir
from ropext.endpoint.counting import Counting, counting_of
from ropext.endpoint.perplexity import ServerTexts, TextPlan, TokenLosses, losses_of
from ropext.endpoint.questions import WantedQuestions, sentences_of
from ropext.endpoint.remote_model import RemoteModel
from ropext.endpoint.server import identity_of, model_and_limit, server_at
from ropext.endpoint.shares import ENOUGH, deciding_questions
from ropext.endpoint.window import trained_window
from ropext.files.checkpoint.provenance import installed
from ropext.options.endpoint import EndpointOptions
from ropext.options.fields import CONTENT, NEUTRAL, NUMBERS
from ropext.results import BASE, EXTENDED, SCHEMA
from ropext.results.measurement import MeasuredModel
from ropext.results.perplexity import LossStatistics
from ropext.results.values import Bootstrap
from ropext.tasks import OwnTask, find_task
from ropext.tasks.own import OwnQuestion, read_questions

SERVER = "port"
CUT = "cut"  # the two rows
KINDS = {SERVER: EXTENDED, CUT: CUT, BASE: BASE}  # of rows
KIB = 1024
SHORTEST = 1024  # length, if nothing states the window
MOST_LENGTHS = 8  # if the user gives none
ROOM = 1  # token that a server generates after a text whose losses it returns
NO_LOSSES = (
    "perplexity is not measured: {} returns no log-probabilities of a prompt (`echo`), as vLLM, "
    "SGLang and ropext serve do"
)


@dataclass(frozen=True)
class ServerPlan:
    """Everything that is decided before the first question."""

    options: EndpointOptions
    served: RemoteModel
    plain: RemoteModel | None
    counting: Counting
    window: tuple[int, str] | None
    wanted: WantedQuestions
    texts: tuple[str, ...]
    losses: TokenLosses | None = None  # if it returns them, and the user gives texts
    reads: TextPlan | None = None  # with the texts as tokens
    remarks: tuple[str, ...] = ()  # the metrics that are not measured, and why

    @property
    def models(self) -> dict[str, MeasuredModel]:
        """Return the rows to measure by their labels: the server, the truncated questions, the
        base."""
        labels = [SERVER]
        if self.window is not None:
            labels.append(CUT)
        if BASE in self.text_labels:
            labels.append(BASE)
        return {label: MeasuredModel(KINDS[label]) for label in labels}

    @property
    def text_labels(self) -> tuple[str, ...]:
        """Return the labels of the rows for which a server returns losses of texts."""
        if self.reads is None:
            return ()
        if self.reads.base is None:
            return (SERVER,)
        return (SERVER, BASE)

    @property
    def context(self) -> int:
        """Return the trained window of the served model; the longest length if nobody states it."""
        if self.window is None:
            return self.wanted.lengths[-1]
        return self.window[0]

    @property
    def frame(self) -> LossStatistics:
        """Return the settings of the server's numbers: context, lengths, tail and intervals."""
        return LossStatistics(
            self.context,
            self.wanted.lengths,
            tail_tokens(self.context),
            Bootstrap(self.options.seed),
        )

    @property
    def decides(self) -> dict[str, Json]:
        """Return the values that must be equal for an evaluation of a server to resume in its
        folder."""
        plain = self.plain
        further = dict[str, Json]()
        if self.reads is not None:
            further |= self.reads.decides
        if self.wanted.own:
            own = {task: [one.content for one in asked] for task, asked in self.wanted.own.items()}
            further["own_questions_sha256"] = digest(own)
        return {
            "schema": SCHEMA,
            "endpoint": self.served.identity,
            "plain": plain and plain.identity,
            "settings": self.options.deciding(NUMBERS),
            "lengths": list(self.wanted.lengths),
            "window": self.window and self.window[0],
            "counted_by": self.counting.how,
            "texts_sha256": digest(self.texts),
            "variants": {},
            "versions": installed(("ropext",)),
            **further,
        }

    def workdir(self, output: Path, command: Sequence[str]) -> Workdir:
        """Return the folder of an evaluation of a server."""
        about = {
            "words": list(clean_command(command)),
            "names": self.options.deciding(CONTENT, NEUTRAL)
            | {"models": {SERVER: self.served.model}},
        }
        return Workdir(output, "eval", self.decides, about)


def plan_server(options: EndpointOptions, model: str | None, texts: Sequence[str]) -> ServerPlan:
    """Return the plan for the evaluation of a server: query the servers, and decide lengths and
    questions."""
    url = options.endpoint or ""
    served = _remote_model_at(url, options, model)
    plain: RemoteModel | None = None
    if options.plain is not None:
        plain = _remote_model_at(options.plain, options, None)
    window = trained_window(options.context, options.against)
    losses: TokenLosses | None = None
    if options.reads_text:
        losses = losses_of(served)
    lengths = lengths_of(options, served, window and window[0], room=ROOM * (losses is not None))
    hay: tuple[str, ...] = ()
    if options.haystack == "text":
        hay = sentences_of(texts)
    own = dict[OwnTask, tuple[OwnQuestion, ...]]()
    for task in options.asked:
        if isinstance(task, OwnTask):
            context = lengths[-1] if window is None else window[0]
            own[task] = read_questions(task, context, lengths, options.seed)
    wanted = WantedQuestions(
        options.asked,
        lengths,
        options.depths,
        options.items,
        options.seed,
        options.api,
        hay,
        own,
    )
    counting = counting_of(served, options.tokenizer)
    plan = ServerPlan(options, served, plain, counting, window, wanted, tuple(texts), losses)
    if options.reads_text and losses is None:
        plan = replace(plan, remarks=(NO_LOSSES.format(served.server.root),))
    return plan


def reading_texts(plan: ServerPlan, texts: ServerTexts) -> ServerPlan:
    """Return the plan of `eval --endpoint` with texts; a running server will return their losses.
    The server of the unscaled model (--plain) reads them through the short window, if it can."""
    assert plan.losses is not None
    base = None
    reason = _no_base_reason(plan)
    if reason is None and plan.plain is not None:
        base = losses_of(plan.plain)
        if base is None:
            reason = NO_LOSSES.format(plan.plain.server.root)
    reads = TextPlan(plan.frame, texts, plan.losses, base)
    remarks = plan.remarks
    if reason is not None:
        remarks = (*remarks, f"no gain and no short tax: {reason}")
    return replace(plan, reads=reads, remarks=remarks)


def _no_base_reason(plan: ServerPlan) -> str | None:
    """Return why no server of the unscaled model reads the texts through the short window. Return
    None if one can."""
    if plan.window is None:
        return "give --context, or --against what was extended"
    if plan.plain is None:
        return "--plain URL names a server of the unscaled model"
    limit = plan.plain.limit
    needed = min(plan.window[0], plan.wanted.lengths[-1]) + ROOM
    if limit is not None and needed > limit:
        # vLLM takes no more tokens than the config states, and that is the window.
        override = json.dumps({"max_position_embeddings": needed})
        return (
            f"{plan.plain.server.root} takes {limit} tokens, and windows of {needed - ROOM} are "
            "read with one more that is generated: start it with that length (vLLM: "
            f"--max-model-len {needed} --hf-overrides '{override}')"
        )
    return None


def _remote_model_at(url: str, options: EndpointOptions, model: str | None) -> RemoteModel:
    """Return the server at a URL with the model that it serves."""
    server = replace(server_at(url), deadline=float(options.deadline))
    name, limit = model_and_limit(server, url, model)
    properties = identity_of(server, name)
    return RemoteModel(server, name, limit, options.api, options.template_args, properties)


def lengths_of(
    options: EndpointOptions, served: RemoteModel, window: int | None, room: int = 0
) -> tuple[int, ...]:
    """Return the lengths of the prompts for a server: --lengths, or lengths that double up to the
    server's limit. For texts, `room` tokens of the limit are left for the generated ones."""
    if options.lengths:
        if served.limit is not None and options.lengths[-1] + room > served.limit and room:
            raise UsageError(
                f"{served.server.root} takes {served.limit} tokens, and a text is read with one "
                f"more that is generated: give --lengths below {served.limit}, or start it with "
                "more"
            )
        return options.lengths
    if served.limit is None:
        raise UsageError(
            f"{served.server.root} does not say how many tokens it takes: give --lengths, such as "
            "4k,8k,16k"
        )
    if options.quick:
        return quick_lengths(window, served.limit - room)
    grid = doubling_grid(window or min(4 * SHORTEST, served.limit), served.limit)
    return tuple(length for length in grid if length + room <= served.limit)[-MOST_LENGTHS:]


def quick_lengths(window: int | None, limit: int) -> tuple[int, ...]:
    """Return three lengths of prompts (--quick): the trained context, the server's limit, and one
    halfway between them in doublings. A quarter of the limit replaces the context if that is
    unknown or not shorter than the limit."""
    shortest = limit // 4
    if window is not None and window < limit:
        shortest = window
    middle = round(math.sqrt(shortest * limit))
    if middle > 4 * KIB:
        middle -= middle % KIB
    return shortest, middle, limit


def plan_lines(plan: ServerPlan) -> list[str]:
    """Return sentences about the questions that a server will get and how many could decide."""
    served = plan.served
    limit = "no stated limit"
    if served.limit is not None:
        limit = f"a limit of {served.limit} tokens"
    lines = [
        f"{served.server.root} serves {served.model} with {limit}; prompts are counted by "
        f"{plan.counting.how}"
    ]
    if plan.wanted.bundled:
        lines.append(_questions_line(plan))
    for task, asked in plan.wanted.own.items():
        lines.append(f"{task}: {len(asked)} questions of {task.source_name}")
    if plan.window is None:
        lines.append(
            "no truncated baseline: neither --context nor --against gives the trained context"
        )
    elif plan.plain is None:
        lines.append(
            f"baseline: the same questions truncated to {plan.window[0]} tokens "
            f"({plan.window[1]}), on this server; --plain URL uses a server of the unscaled model"
        )
    else:
        lines.append(
            f"baseline: the same questions truncated to {plan.window[0]} tokens "
            f"({plan.window[1]}), on {plan.plain.server.root}"
        )
    if plan.reads is not None:
        count = len(plan.reads.texts.ids)
        lines.append(f"perplexity of {count} documents at {lengths_text(plan.wanted.lengths)}")
    lines += plan.remarks
    return lines


def _questions_line(plan: ServerPlan) -> str:
    """Return the sentence about the number of questions to a server and their tokens."""
    wanted = plan.wanted
    at_each = sum(
        len(depths)
        for task in wanted.bundled
        for _, depths in find_task(task).groups(wanted.depths, wanted.items)
    )
    least = deciding_questions()
    tokens = at_each * sum(wanted.lengths)
    if plan.window is not None:
        for length in wanted.lengths:
            # The same server answers a question only once if it is not truncated.
            if length > plan.window[0] or plan.plain is not None:
                tokens += at_each * min(length, plan.window[0])
    line = (
        f"{', '.join(wanted.bundled)}: {at_each} questions at each of "
        f"{lengths_text(wanted.lengths)}, at most {tokens:,} tokens"
    )
    if at_each >= least:
        return f"{line}; with all found the interval lies above {ENOUGH:.0%} from {least} on"
    return (
        f"{line}; no answer can put the interval above {ENOUGH:.0%}: {least} questions could "
        "(--items)"
    )
