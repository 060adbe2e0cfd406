"""What became of a question: found, missed, refused, truncated, or no answer.

An answer is a stranger's text: it is matched, kept and shown, and nothing else.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ropext.jsontext import JsonObject
from ropext.ports.counting import Counting
from ropext.ports.port import Port, Reply
from ropext.ports.questions import Question
from ropext.results.retrieval import FOUND, MISSED, NO_ANSWER, REFUSED, TRUNCATED, ItemScore
from ropext.tasks.asking import match

GROWN = 16
LEAST_GROWN = 2048  # times the room, and tokens, where a model thinks first
REST = 0.5  # of the deeper questions are answered by a server that cut the start off
SETTINGS = "num_ctx of Ollama, Context Length of LM Studio, -c of llama-server"


@dataclass(frozen=True)
class Answer:
    """What a server made of one question."""

    outcome: str
    said: str
    score: float  # the share of what was asked for that it names
    counted: int  # tokens of the prompt, as they were counted before
    tokens: int | None  # and by the server's usage
    cached: int = 0
    reason: str = ""

    @staticmethod
    def from_json(data: JsonObject) -> "Answer":
        """Read what was kept."""
        return Answer(**data)


def answered(port: Port, question: Question, counting: Counting) -> Answer:
    """Ask a question; a model that spent its tokens on thinking is asked once more, with more."""
    text = question.prompt(port.api)
    reply = port.ask(text, question.room)
    score = _score(question, reply)
    if reply.ran_out and score < 1 and (reply.has_thought or not reply.said):
        longer = port.ask(text, max(GROWN * question.room, LEAST_GROWN))
        if not longer.error:
            reply = longer
    return judged(port, question, counting, reply)


def _score(question: Question, reply: Reply) -> float:
    return match(reply.said, question.asked.references, question.asked.part)


def judged(port: Port, question: Question, counting: Counting, reply: Reply) -> Answer:
    """Say what became of a question by the reply alone."""
    counted = question.counted
    answer = Answer(MISSED, reply.said, 0.0, counted, reply.tokens, reply.cached)
    if reply.error:
        return replace(answer, outcome=REFUSED, reason=reply.error)
    if port.limit is not None and counting.is_below(port.limit, counted):
        reason = f"the server says that it takes {port.limit} tokens; {SETTINGS}"
        return replace(answer, outcome=TRUNCATED, reason=reason)
    below = reply.tokens is not None and counting.is_below(reply.tokens, counted)
    if below and not reply.cached:
        reason = (
            f"the server read {reply.tokens} of {counted} tokens and said nothing of it: raise "
            f"{SETTINGS}"
        )
        return replace(answer, outcome=TRUNCATED, reason=reason)
    if not reply.said:
        reason = "it is empty"
        if reply.ran_out:
            reason = (
                "its tokens were spent on thinking: --chat-args enable_thinking=false asks without"
            )
        return replace(answer, outcome=NO_ANSWER, reason=reason)
    score = _score(question, reply)
    if score >= 1:
        return replace(answer, outcome=FOUND, score=score)
    return replace(answer, outcome=MISSED, score=score)


def needs_witness(answers: Sequence[Answer], counting: Counting) -> bool:
    """Whether something was missed, and no usage tells that the whole prompt was read."""
    for answer in answers:
        told = answer.tokens
        credible = told is not None and counting.is_credible(told, answer.counted)
        if answer.outcome == MISSED and not credible and not answer.cached:
            return True
    return False


def lost_its_start(items: Sequence[ItemScore]) -> bool:
    """Whether a server that cannot repeat the first word of a text answers what stands behind."""
    behind = [item for item in items if item.is_read and (item.depth or 0.0) >= REST]
    return bool(behind) and sum(item.points for item in behind) >= REST * len(behind)


def scored(question: Question, answer: Answer) -> ItemScore:
    """An answer as every evaluation keeps it."""
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
