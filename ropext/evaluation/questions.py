"""Which questions an evaluation asks: of which task, over which haystack, at which lengths."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TypeGuard

from ropext.corpus import Corpus, DocumentEncoder
from ropext.errors import InputError, UsageError
from ropext.inputs import CONFIG_LIMIT, read_bytes
from ropext.lengths import length_text
from ropext.options.evaluate import Evaluate
from ropext.tasks import (
    Haystack,
    Item,
    check_amount,
    find_task,
    noise,
    passages,
    repetition,
    running_text,
)
from ropext.tasks.item import TooShort
from ropext.tasks.passages import KnownAnswer


def build_questions(
    options: Evaluate, lengths: Sequence[int], encoder: DocumentEncoder, corpus: Corpus | None
) -> tuple[tuple[tuple[Item, ...], ...], list[str]]:
    """The question groups, and which lengths are too short for a task.

    A length that the user asked for is never left out: an item that does not fit is an error, that
    of the task which needs most.
    """
    if not options.tasks:
        return (), []
    tokens = len(options.tasks) * options.items * len(options.depths) * sum(lengths)
    check_amount(tokens, "give fewer --items or --depths, or shorter --lengths")
    around = _haystack(options.haystack, encoder, corpus)
    before = 0 if encoder.bos is None else 1  # the BOS in front of a prompt
    groups = list[tuple[Item, ...]]()
    left_out = dict[str, UsageError]()
    known = read_passages(options.passages) if options.passages else ()
    for name in options.tasks:
        task = find_task(name)
        task = passages.over(task, known) if known else task
        for length in lengths:
            try:
                for index, depths in task.groups(options.depths, options.items):
                    items = task.build(
                        encoder,
                        around,
                        length=length - before,
                        depths=depths,
                        index=index,
                        seed=options.seed,
                    )
                    groups.append(tuple(items))
            except UsageError as error:
                if options.lengths and not isinstance(error, TooShort):
                    raise
                left_out[f"[left-out] {name} is left out at {length_text(length)}: {error}"] = error
    if left_out and (options.lengths or not groups):
        raise max(left_out.values(), key=lambda error: getattr(error, "needed", 0))
    return tuple(groups), list(left_out)


def read_passages(path: str) -> tuple[KnownAnswer, ...]:
    """Questions of a JSONL file: {"question": TEXT, "answers": [TEXT, ...], "passages": [...]}."""
    if not Path(path).is_file():
        raise InputError(f"--passages {path} is no file")
    known = []
    for number, line in enumerate(read_bytes(Path(path), CONFIG_LIMIT).splitlines(), 1):
        if not line.strip():
            continue
        answer = _known_answer(line)
        if answer is None:
            raise InputError(
                f"--passages {path}, line {number}: not a JSON object with a question, a list of "
                "answers and a list of passages, none of them empty"
            )
        known.append(answer)
    if not known:
        raise InputError(f"--passages {path} is empty")
    return tuple(known)


def _known_answer(line: bytes) -> KnownAnswer | None:
    """The question of one line; None where something is missing, empty or of another type."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    if not isinstance(row, dict):
        return None
    question = row.get("question")
    answers = row.get("answers")
    passages_given = row.get("passages")
    if not _is_text(question) or not _are_texts(answers) or not _are_texts(passages_given):
        return None
    return KnownAnswer(question, tuple(answers), tuple(passages_given))


def _is_text(value: object) -> TypeGuard[str]:
    return isinstance(value, str) and bool(value.strip())


def _are_texts(value: object) -> TypeGuard[list[str]]:
    return isinstance(value, list) and bool(value) and all(_is_text(text) for text in value)


def _haystack(name: str, encoder: DocumentEncoder, corpus: Corpus | None) -> Haystack:
    if name == "repeat":
        return repetition(encoder)
    if name == "noise":
        return noise(encoder)
    assert corpus is not None  # where a haystack is of text, Evaluate asks for --data
    texts = [document.ids[int(document.has_bos) :] for document in corpus.documents]
    return running_text([int(token) for text in texts for token in text])
