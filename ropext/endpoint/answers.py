"""Judge the answer to a question: found, missed, refused, truncated, or no answer.

An answer is untrusted text: ropext matches, keeps and prints it, and does nothing else with it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from ropext.endpoint.counting import Counting
from ropext.endpoint.questions import Question
from ropext.endpoint.remote_model import RemoteModel, Reply
from ropext.results import FOUND
from ropext.results.retrieval import MISSED, NO_ANSWER, REFUSED, ItemScore
from ropext.tasks.asking import match

GROWN = 16
LEAST_GROWN = 2048  # times the room, and tokens, for a model that thinks first
MOST_ERROR = 0.08  # as a share: if usage is further from the count, it is of another prompt
FIRST_ERROR = 0.04  # as a share, at the shortest length: no shorter one shows how exact usage is
REST = 0.5  # the least share of the deeper questions that a server answers if it cut off the start
SETTINGS = "num_ctx of Ollama, Context Length of LM Studio, -c of llama-server"


@dataclass(frozen=True)
class Answer:
    """The answer of a server to one question, with its outcome."""

    outcome: str
    said: str
    score: float  # the share of the references that it names
    counted: int  # tokens of the prompt, as they were counted before
    tokens: int | None  # and by the server's usage
    cached: int = 0
    reason: str = ""
    date: str = ""  # on which it was given, UTC

    @property
    def read(self) -> int | None:
        """Return the most tokens of the prompt that the server can have read, by its usage.

        Some servers include a cached prefix in `tokens`, some do not.
        """
        if self.tokens is None:
            return None
        return self.tokens + self.cached

    @property
    def error(self) -> float | None:
        """Return the share by which the server's usage and our count differ. Return None if the
        usage is of another prompt."""
        if self.tokens is None or self.read is None:
            return None
        off = min(abs(self.tokens - self.counted), abs(self.read - self.counted))
        share = off / max(self.counted, 1)
        if share > MOST_ERROR:
            return None
        return share


def answer_of(served: RemoteModel, question: Question) -> Answer:
    """Return a server's answer to a question. A model that spent its tokens on thinking gets the
    question once more, with more tokens."""
    text = question.prompt(served.api)
    reply = served.ask(text, question.room)
    score = _reply_score(question, reply)
    if reply.ran_out and score < 1 and (reply.has_thought or not reply.said):
        longer = served.ask(text, max(GROWN * question.room, LEAST_GROWN))
        if not longer.error:
            reply = longer
    return judged_reply(question, reply)


def _reply_score(question: Question, reply: Reply) -> float:
    """Return the share of the references that a server's reply names."""
    return match(reply.said, question.asked.references, question.asked.part)


def judged_reply(question: Question, reply: Reply) -> Answer:
    """Return the outcome of a question by the server's reply alone; `truncated_by_usage` finds the
    prompts that the server truncated."""
    score = _reply_score(question, reply)
    outcome = MISSED
    reason = reply.error
    if reply.error:
        outcome = REFUSED
    elif not reply.said:
        outcome = NO_ANSWER
        reason = "it is empty"
        if reply.ran_out:
            reason = (
                "its tokens were spent on thinking: --chat-args enable_thinking=false asks without"
            )
    elif score >= 1:
        outcome = FOUND
    today = datetime.now(UTC).date().isoformat()
    return Answer(
        outcome, reply.said, score, question.counted, reply.tokens, reply.cached, reason, today
    )


ByLength = Mapping[int, Sequence[Answer]]


@dataclass(frozen=True)
class TruncatedLengths:
    """The lengths whose prompts the server truncated, and those for which that is not known."""

    reasons: Mapping[int, str]  # by length: how it is known that the server truncated it
    unknown: Sequence[int]  # lengths at which something was missed and no usage shows a whole read


def truncated_by_usage(
    answers: ByLength, counting: Counting, limit: int | None
) -> TruncatedLengths:
    """Return the lengths whose prompts the server truncated, by the count of each prompt and the
    number of tokens that the server read, the shortest length first.

    If the server truncated one prompt of a length, all its prompts count as truncated: to leave out
    only the missed questions would select by outcome.
    """
    reasons = dict[int, str]()
    unknown = list[int]()
    error: float | None = None  # error of the usage, at the nearest shorter whole length
    for length in sorted(answers):
        group = [answer for answer in answers[length] if answer.outcome != REFUSED]
        cut = [
            reason
            for answer in group
            if (reason := _truncation_evidence(answer, counting, error, limit))
        ]
        if cut:
            reasons[length] = cut[0]
            continue
        missed = [answer for answer in group if answer.outcome == MISSED]
        if not all(_is_read_whole(answer, counting, error or 0.0) for answer in missed):
            unknown.append(length)
        errors = [answer.error for answer in group if answer.error is not None]
        if errors:
            error = max(errors)
    return TruncatedLengths(reasons, unknown)


def _truncation_evidence(
    answer: Answer, counting: Counting, error: float | None, limit: int | None
) -> str:
    """Return the evidence that a server truncated this prompt. Return "" if there is none."""
    if error is None:
        error = FIRST_ERROR
    least = answer.counted - counting.slack(answer.counted, error)
    if limit is not None and limit < least:
        return f"the server says that it takes {limit} tokens; {SETTINGS}"
    if answer.read is not None and answer.read < least:
        return (
            f"the server read {answer.read} of {answer.counted} tokens and reported no error; "
            f"raise {SETTINGS}"
        )
    return ""


def _is_read_whole(answer: Answer, counting: Counting, error: float) -> bool:
    """Return True if the server's usage shows that it read the whole prompt."""
    if answer.error is None:
        return False
    return answer.error * answer.counted <= counting.slack(answer.counted, error)


def lost_its_start(items: Sequence[ItemScore]) -> bool:
    """Return whether the server answers at least half of the questions about the second half of a
    text. If it also cannot repeat the first word, it dropped the start of the prompt."""
    behind = [item for item in items if item.is_read and (item.depth or 0.0) >= REST]
    return bool(behind) and sum(item.points for item in behind) >= REST * len(behind)


def item_score(question: Question, answer: Answer) -> ItemScore:
    """Return a server's answer in the form in which every evaluation keeps its items."""
    asked = question.asked
    return ItemScore(
        task=question.task,
        length=question.length,
        depth=asked.depth,
        index=question.index,
        answer_nll=None,
        answer_tokens=0,
        exact=answer.outcome == FOUND,
        prompt_hash=asked.digest,
        answer=(),
        predicted=(),
        score=answer.score,
        said=answer.said,
        text_hash=asked.digest,
        outcome=answer.outcome,
    )
