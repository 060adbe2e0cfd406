"""The user's own questions: the lines of a JSONL file, or the rows that a Python function returns.

A line is {"input": TEXT, "outputs": [TEXT, ...]}, if wanted with "answer_prefix" and "length", as
RULER's generators write it (Hsieh et al. 2024). The prompt is the input with the prefix behind it.
The score of an answer is the share of the outputs that it contains (RULER's string_match_all).
"""

import os
import re
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Self

from ropext.base.errors import InputError, UsageError, class_name
from ropext.base.inputs import check_names, from_home
from ropext.base.jsontext import json_lines
from ropext.base.lengths import length_text
from ropext.tasks.asking import TextQuestion, match, text_span
from ropext.tasks.item import FEWEST_READ, Item, PromptEncoder, check_amount

SUFFIX = ".jsonl"
SHARED = 0.9  # of two inputs: from this share of a common beginning on, they are about one text
MOST_QUESTIONS = 10_000  # of one task
ANSWER_ROOM = 128  # tokens; the most that RULER's tasks give an answer
LONGEST_NAME = 60  # characters
# The name of any task. Results, which anyone may have written, are held against it.
NAME = rf"[A-Za-z_][\w-]{{0,{LONGEST_NAME}}}"
FIELDS = '"input" (a text) and "outputs" (a list of texts, none empty)'


class OwnTask(str):
    """A task of the user's. The string itself is its name, which metrics, gates and keys have."""

    source: str | Callable[..., Any]  # the path of its questions, or a function that returns them

    def __new__(cls, name: str, source: str | Callable[..., Any]) -> Self:
        """Make a retrieval task of the user's own questions from its name, and their file or
        function."""
        task = super().__new__(cls, name)
        task.source = source
        return task

    @property
    def source_name(self) -> str:
        """Return for a message the file or function of the user's own questions."""
        if isinstance(self.source, str):
            return self.source
        return f"the function {self}"

    def taken_name(self, owner: str) -> UsageError:
        """Return the error for own questions whose task would have the name of something else."""
        return UsageError(
            f"--tasks: the questions of {self.source_name} would be called {self}, as {owner} is; "
            f"rename it, or give NAME=FILE{SUFFIX}"
        )


def own_task(word: object, bundled: Collection[str]) -> object:
    """Make a retrieval task of the user's own questions, from their file or function; return every
    other word of --tasks unchanged."""
    if isinstance(word, OwnTask):
        return word
    if callable(word):
        return _checked_task(_clean_task_name(_function_name(word)), word, bundled)
    if isinstance(word, Path):
        word = str(word)
    if not isinstance(word, str) or not _is_question_file(word):
        return word
    name, place = _name_and_file(word)
    if not name:
        name = _clean_task_name(Path(place).stem)
    return _checked_task(name, str(from_home(place)), bundled)


def with_place(word: str, placed: Callable[[str], str]) -> str:
    """Return the word of a retrieval task in --tasks with its file's path as `placed` gives it; a
    name as it is."""
    if not _is_question_file(word):
        return word
    name, place = _name_and_file(word)
    if name:
        return f"{name}={placed(place)}"
    return placed(place)


def _is_question_file(word: str) -> bool:
    """Return whether the word of a retrieval task in --tasks names a file of own questions."""
    return word.lower().endswith(SUFFIX) or "/" in word or "\\" in word


def _name_and_file(word: str) -> tuple[str, str]:
    """Return the name of a retrieval task of own questions and its file's path, from NAME=FILE; the
    name is empty if only the path is given."""
    name, equals, place = word.partition("=")
    if equals and name == _clean_task_name(name):
        return name, place
    return "", word


def _clean_task_name(name: str) -> str:
    """Return a name that a task of own questions can have in metrics and gates: letters, digits,
    hyphens and underscores."""
    clean = re.sub(r"[^\w-]", "_", name)[:LONGEST_NAME]
    if re.match(r"[A-Za-z_]", clean):
        return clean
    return f"_{clean}"


def _function_name(function: Any) -> str:
    """Return the name of a Python function of own questions."""
    while isinstance(function, partial):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__)).strip("<>")


def _checked_task(name: str, source: str | Callable[..., Any], bundled: Collection[str]) -> OwnTask:
    """Return a task of own questions; raise UsageError if a task of ropext has its name."""
    task = OwnTask(name, source)
    if task in bundled:
        raise task.taken_name("a retrieval task of ropext")
    return task


@dataclass(frozen=True)
class OwnQuestion:
    """One question of the user's."""

    text: str
    outputs: tuple[str, ...]
    prefix: str = ""  # begins the answer
    length: int | None = None  # tokens of the prompt and of the room for its answer, if stated
    where: str = ""  # file and line, for messages
    is_made_for: bool = False  # a function made it for this length and no other

    @property
    def content(self) -> tuple[object, ...]:
        """Return what decides the answer to an own question and its score, wherever the question
        was read."""
        return self.text, self.prefix, self.outputs, self.length

    @property
    def asked(self) -> TextQuestion:
        """Return the own question in the form that a server gets."""
        return TextQuestion(self.text, self.prefix, "", self.outputs)

    def room(self, prompt: int, answer: int) -> int:
        """Return the tokens that the answer to an own question may take, by the tokens of prompt
        and right answer.

        It is the rest of a stated length, as in RULER, and at most 128 unless the right answer is
        longer.
        """
        room = ANSWER_ROOM
        if self.length is not None:
            room = min(room, self.length - prompt)
        return max(room, answer)

    def size(self, prompt: int, answer: int) -> int:
        """Return the tokens that an own question takes: as stated, or as counted if that is
        more."""
        if self.length is None:
            return prompt + max(ANSWER_ROOM, answer)
        return max(self.length, prompt + answer)

    def place(self, size: int, lengths: Sequence[int]) -> int | None:
        """Return the shortest of the --lengths that holds an own question; None if none does."""
        for length in lengths:
            if size <= length and not (self.is_made_for and length != self.length):
                return length
        return None


def read_questions(
    task: OwnTask, context: int, lengths: Sequence[int], seed: int
) -> tuple[OwnQuestion, ...]:
    """Return the user's own questions of a task: all lines of its file, or what its function
    returns for each length."""
    found = list[OwnQuestion]()
    if isinstance(task.source, str):
        path = Path(task.source)
        check_names(path)
        if not path.is_file():
            raise InputError(f"--tasks {path} is no file")
        rows = ((where, row, None) for where, row in json_lines(path))
        _collect_questions(rows, str(path), found)
    else:
        for length in lengths:
            made = _returned_by_function(task, task.source, (context, length, seed))
            _collect_questions(_rows_of_function(task, made, length), f"the function {task}", found)
    if not found:
        raise InputError(f"--tasks {task.source_name} has no question")
    return tuple(found)


Row = tuple[str, Mapping[str, Any], int | None]  # its place, its fields, and the length asked for


def _collect_questions(rows: Iterable[Row], source: str, found: list[OwnQuestion]) -> None:
    """Add the own questions of rows, each checked; raise if one occurs twice, or if there are too
    many."""
    seen = {(question.text, question.prefix): question.where for question in found}
    for where, row, length in rows:
        question = _question_of_row(where, row, length)
        if len(found) >= MOST_QUESTIONS:
            raise InputError(f"{source} has more than {MOST_QUESTIONS:,} questions; split it")
        prompt = question.text, question.prefix
        if prompt in seen:
            raise InputError(f"{where} repeats the question of {seen[prompt]}; leave one out")
        seen[prompt] = where
        found.append(question)


def _question_of_row(where: str, row: Mapping[str, Any], length: int | None) -> OwnQuestion:
    """Return the own question of one row; `length` is the length that a function made it for, if
    any."""
    for field in ("input", "outputs"):
        if field not in row:
            there = ", ".join(map(str, list(row)[:8])) or "no field"
            raise InputError(f"{where} has no {field!r}: a question has {FIELDS}; found {there}")
    text = _text_of_row(where, "input", row["input"])
    outputs = row["outputs"]
    if not isinstance(outputs, list | tuple) or not outputs:
        raise InputError(f"{where}: 'outputs' is {_short_value(outputs)}; expected a list of texts")
    texts = tuple(_text_of_row(where, "outputs", output) for output in outputs)
    prefix = ""
    if row.get("answer_prefix") not in (None, ""):
        prefix = _text_of_row(where, "answer_prefix", row["answer_prefix"])
    stated = row.get("length")
    if stated is not None and (type(stated) is not int or stated < 1):
        raise InputError(
            f"{where}: 'length' is {_short_value(stated)}; expected a number of tokens"
        )
    if length is not None:
        return OwnQuestion(text, texts, prefix, length, where, is_made_for=True)
    return OwnQuestion(text, texts, prefix, stated, where)


def _text_of_row(where: str, field: str, value: object) -> str:
    """Return a text in a row of own questions; raise if it is empty, no text, or has half of a
    surrogate pair."""
    if not isinstance(value, str) or not value.strip():
        raise InputError(
            f"{where}: {field!r} holds {_short_value(value)}; expected a text, not empty"
        )
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InputError(
            f"{where}: {field!r} holds half of a surrogate pair, which is no character"
        ) from None
    return value


def _short_value(value: object) -> str:
    """Return a short form of a value in a row of own questions, for an error."""
    return repr(value)[:60]


def _returned_by_function(
    task: OwnTask, function: Callable[..., Any], given: tuple[int, int, int]
) -> Sequence[object]:
    """Return the own questions that the user's function returns; turn its exception into one
    sentence."""
    try:
        made = function(*given)
        if isinstance(made, Iterable) and not isinstance(made, str | bytes | Mapping):
            return list(islice(made, MOST_QUESTIONS + 1))
    except (Exception, SystemExit) as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = ""
        if place.filename != __file__:
            where = f" ({os.path.basename(place.filename)}, line {place.lineno})"
        raise UsageError(f"tasks: {task}: {type(error).__name__}: {error}{where}") from error
    raise UsageError(
        f"tasks: {task} must return a list of pairs (prompt, outputs), or of dicts with "
        f"{FIELDS}; it returned {class_name(made)}"
    )


def _rows_of_function(task: OwnTask, made: Sequence[object], length: int) -> Iterable[Row]:
    """Yield the rows of own questions that a function returned for a length."""
    for number, row in enumerate(made, 1):
        where = f"the function {task}, question {number} at {length_text(length)}"
        fields = row
        if isinstance(row, list | tuple) and len(row) == 2:
            fields = {"input": row[0], "outputs": row[1]}
        if not isinstance(fields, Mapping):
            raise UsageError(f"{where} is {class_name(row)}; expected (prompt, outputs) or a dict")
        yield where, fields, length


def haystacks_of(questions: Sequence[OwnQuestion]) -> list[int]:
    """Return, for each own question, the number of the first question over the same text. Intervals
    count texts, because questions over one text are alike."""
    order = sorted(range(len(questions)), key=lambda index: questions[index].text)
    groups = list[list[int]]()
    before = ""
    for index in order:
        text = questions[index].text
        cut = int(SHARED * max(len(text), len(before)))
        if not groups or text[:cut] != before[:cut]:
            groups.append([])
        groups[-1].append(index)
        before = text
    firsts = [0] * len(questions)
    for group in groups:
        for index in group:
            firsts[index] = min(group)
    return firsts


def too_long(
    task: OwnTask, sizes: Sequence[int], questions: Sequence[OwnQuestion], longest: int
) -> str:
    """Say how many own questions of a retrieval task fit none of the --lengths, with their size."""
    limit = f"and the longest of --lengths is {length_text(longest)}"
    if questions[0].is_made_for:
        limit = "more than the length that the function made them for"
    return (
        f"{len(sizes)} of {len(questions)} questions of {task} are left out: they take up to "
        f"{max(sizes):,} tokens, {limit}; ropext never truncates them"
    )


def own_items(
    task: OwnTask,
    questions: Sequence[OwnQuestion],
    encoder: PromptEncoder,
    lengths: Sequence[int],
    seed: int,
) -> tuple[list[tuple[Item, ...]], list[str]]:
    """Return the retrieval items of the user's own questions, each in a group alone, and a warning
    about questions that fit no length."""
    before = 0 if encoder.bos is None else 1  # the BOS in front of a prompt
    groups = list[tuple[Item, ...]]()
    left_out = list[int]()
    total = 0
    for index, question in zip(haystacks_of(questions), questions, strict=True):
        rendered = encoder.render(question.text, question.prefix, "")
        prompt = tuple(encoder.encode(rendered))
        if before + len(prompt) < FEWEST_READ:
            raise InputError(
                f"{question.where}: the prompt has {before + len(prompt)} token of this tokenizer; "
                f"a question needs {FEWEST_READ} or more"
            )
        answer = _encoded_answer(question, encoder)
        size = question.size(before + len(prompt), len(answer))
        length = question.place(size, lengths)
        if length is None:
            left_out.append(size)
            continue
        total += size
        check_amount(total, f"ask fewer questions of {task}")
        item = Item(
            task=str(task),
            length=length - before,
            depth=None,
            index=index,
            seed=seed,
            prompt=prompt,
            answer=answer,
            references=question.outputs,
            room=question.room(len(prompt), len(answer)),
            text_hash=question.asked.digest,
            text=text_span(encoder, rendered, "", question.text),
        )
        groups.append((item,))
    if not left_out:
        return groups, []
    sentence = too_long(task, left_out, questions, lengths[-1])
    if not groups:
        raise UsageError(sentence)
    return groups, [f"[left-out] {sentence}"]


def _encoded_answer(question: OwnQuestion, encoder: PromptEncoder) -> tuple[int, ...]:
    """Encode the right answer to an own question, as it follows the prompt."""
    written = question.asked.written
    space = "" if (question.text + question.prefix)[-1:].isspace() else " "
    answer = tuple(encoder.encode(space + written))
    back = encoder.decode(answer)
    if match(back, question.outputs, part=False) < 1:
        raise UsageError(
            f"{question.where}: this tokenizer decodes the outputs {written[:60]!r} as "
            f"{back[:60]!r}, so no answer would be right"
        )
    return answer
