"""Build questions in words for a server, and the same questions with their text truncated to a
window.

They are equal for all servers that count alike.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from ropext.base.jsontext import read_values
from ropext.endpoint.counting import Count, Counting
from ropext.results.measurement import Store
from ropext.tasks import OwnTask, TaskWording, find_task, wording_of
from ropext.tasks.asking import TextQuestion, TextRequest, split_sentences
from ropext.tasks.item import ItemRequest, LengthTooShort, derived_rng
from ropext.tasks.own import OwnQuestion, haystacks_of, too_long

LEAST_ROOM = 32  # tokens for an answer with more than the wanted words
KIND = 2000  # characters of the text by which a task's texts are counted
STEPS = 12  # steps of the search for the longest text that fits
NEAR = 0.985  # the least share of a window to fill


@dataclass(frozen=True)
class Question:
    """One question over a text, and the counted number of tokens in its prompt."""

    task: str
    length: int
    index: int
    asked: TextQuestion
    room: int
    counted: int

    @property
    def name(self) -> str:
        """Return the name of the file of the server's answer, without its suffix."""
        return f"{self.task}-{self.length}-{self.index}-{self.asked.digest}"

    def prompt(self, api: str) -> str:
        """Return the words that a server's API gets for the question."""
        return prompt_for(self.asked, api)


def prompt_for(asked: TextQuestion, api: str) -> str:
    """Return the words that a server's API gets for a question; for the completions API also the
    beginning of the answer."""
    if api == "chat" or not asked.opening:
        return asked.prompt
    return f"{asked.prompt}\n{asked.opening}"


@dataclass(frozen=True)
class WantedQuestions:
    """The questions that a plan wants."""

    tasks: tuple[str, ...]
    lengths: tuple[int, ...]
    depths: tuple[float, ...]
    items: int
    seed: int
    api: str
    hay: tuple[str, ...] = ()  # sentences of the user's texts
    own: Mapping[OwnTask, tuple[OwnQuestion, ...]] = field(default_factory=dict)

    @property
    def bundled(self) -> list[str]:
        """Return the bundled tasks that a running server gets, without the user's own."""
        return [task for task in self.tasks if task not in self.own]

    def groups(self) -> Iterator[tuple[int, str, int, tuple[float, ...]]]:
        """Yield length, task, index and depths of every haystack for a server, the shortest
        first."""
        for length in self.lengths:
            for task in self.bundled:
                for index, depths in find_task(task).groups(self.depths, self.items):
                    yield length, task, index, depths


def room_of(worded: TaskWording) -> int:
    """Return the limit of generated tokens that a request to a running server sets for the answer:
    the task's own, but at least 32."""
    return max(worded.room, LEAST_ROOM)


def counts_of(wanted: WantedQuestions, counting: Counting) -> dict[str, Count]:
    """Return how the prompts of each task are counted for a server."""
    counts = dict[str, Count]()
    for task in wanted.tasks:
        counts[task] = counting.of_kind(_sample_text(task, wanted))
    return counts


def _sample_text(task: str, wanted: WantedQuestions) -> str:
    """Return a text of the kind that a task has, by which prompts for a server are counted."""
    for own, questions in wanted.own.items():
        if own == task:
            return questions[0].text[:KIND]
    worded = wording_of(task)
    units = worded.least
    text = ""
    while len(text) < KIND and units <= worded.most:
        rng = derived_rng(wanted.seed, task, 0, 0)
        depths = wanted.depths[: find_task(task).per_haystack or len(wanted.depths)]
        text = worded.make(TextRequest(units, depths, wanted.lengths[0], rng, wanted.hay))[0].text
        units *= 2
    return text


def build(
    wanted: WantedQuestions, counts: Mapping[str, Count], kept: Store
) -> Iterator[list[Question] | str]:
    """Yield the questions for a server over each haystack, as an earlier call kept them if it did.
    Yield a sentence instead if no question of a task fits a length."""
    too_short = set[tuple[str, int]]()
    for length, task, index, depths in wanted.groups():
        if (task, length) in too_short:
            continue
        name = f"{task}-{length}-{index}.json"
        if kept.has(name):
            yield read_values(list[Question], kept.get(name), kept.file(name))
            continue
        try:
            questions = _questions_of_haystack(
                wanted, counts[task], task, ItemRequest(length, depths, index, wanted.seed)
            )
        except LengthTooShort as error:
            too_short.add((task, length))
            yield str(error)
            continue
        kept.put(name, [asdict(question) for question in questions])
        yield questions
    for own in wanted.own:
        yield from _own_questions(wanted, own, counts[own])


def _own_questions(
    wanted: WantedQuestions, task: OwnTask, count: Count
) -> Iterator[list[Question] | str]:
    """Yield the user's own questions for a server, each alone, and a sentence if some are too
    long."""
    sizes = list[int]()
    for index, one in zip(haystacks_of(wanted.own[task]), wanted.own[task], strict=True):
        counted = count(prompt_for(one.asked, wanted.api))
        # No server says how many tokens an answer has; two characters are rarely more than one.
        answer = max(LEAST_ROOM, len(one.asked.written) // 2)
        room = one.room(counted, answer)
        length = one.place(one.size(counted, answer), wanted.lengths)
        if length is None:
            sizes.append(one.size(counted, answer))
        else:
            yield [Question(str(task), length, index, one.asked, room, counted)]
    if sizes:
        yield too_long(task, sizes, wanted.own[task], wanted.lengths[-1])


def _questions_of_haystack(
    wanted: WantedQuestions, count: Count, task: str, request: ItemRequest
) -> list[Question]:
    """Return the questions for a server over one haystack of a task."""
    worded = wording_of(task)
    room = room_of(worded)

    def needed(asked: TextQuestion) -> int:
        """Return how many tokens of the server a question needs: its prompt, and the room for its
        answer."""
        return count(prompt_for(asked, wanted.api)) + room

    chosen = worded.questions_that_fit(needed, request, wanted.hay)
    return [
        Question(task, request.length, request.index, asked, room, needed(asked) - room)
        for asked in chosen
    ]


def truncate_together(
    questions: Sequence[Question], counts: Mapping[str, Count], window: int, api: str
) -> list[tuple[Question, Question]]:
    """Return each question for a server, paired with itself over the end of its text. Questions
    over one text share its remaining part, so a server reads it once."""
    longest = dict[str, Question]()
    for question in questions:
        other = longest.setdefault(question.asked.text, question)
        if question.counted > other.counted:
            longest[question.asked.text] = question
    shorter = dict[str, Question]()
    for text, question in longest.items():
        shorter[text] = cut(question, counts[question.task], window, api)
    pairs = list[tuple[Question, Question]]()
    for question in questions:
        left = shorter[question.asked.text]
        if left is longest[question.asked.text]:
            pairs.append((question, question))
        else:
            asked = replace(
                question.asked, instruction=left.asked.instruction, text=left.asked.text
            )
            pairs.append((question, replace(question, asked=asked, counted=left.counted)))
    return pairs


def cut(question: Question, count: Count, window: int, api: str) -> Question:
    """Return the question with its text truncated, so that prompt and answer fit a window of the
    server.

    The instruction and the end of the text are kept. If a window is too short for the instruction
    and the question, the instruction is removed, too.
    """
    if question.counted + question.room <= window:
        return question
    text = question.asked.text
    budget = window - question.room
    kept = int(len(text) * budget / question.counted)
    asked = replace(question.asked, text="")
    if count(prompt_for(asked, api)) > budget:
        asked = replace(asked, instruction="")
    best = replace(question, asked=asked, counted=0)
    for _ in range(STEPS):
        shorter = replace(question, asked=replace(asked, text=_end_of_text(text, kept)))
        tokens = count(shorter.prompt(api))
        if tokens <= budget and tokens > best.counted:
            best = replace(shorter, counted=tokens)
        if NEAR * budget <= tokens <= budget:
            break
        kept = max(int(kept * budget / tokens) - (tokens > budget), 0)
    return best


def _end_of_text(text: str, length: int) -> str:
    """Return the end of the text in a prompt for a running server: at most `length` characters,
    from the beginning of a word on."""
    if length <= 0:
        return ""
    start = len(text) - length
    if start <= 0:
        return text
    space = text.find(" ", start)
    if space < 0:
        return text[start:]
    return text[space + 1 :]


def sentences_of(texts: Sequence[str]) -> tuple[str, ...]:
    """Return the sentences of the user's texts that surround the needles in the prompts to a
    running server (`eval --endpoint --haystack text`)."""
    return tuple(sentence for text in texts for sentence in split_sentences(text))
