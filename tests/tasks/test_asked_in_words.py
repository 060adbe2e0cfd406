"""Tasks asked in words: each prompt is taken apart, and its answer worked out from the text."""

import random
import re
from collections import Counter
from dataclasses import replace

import pytest
from test_tasks import Characters, Pieces

from ropext.base.errors import UsageError
from ropext.tasks import TASKS, THIRTEEN, find_task, named_tasks, passages
from ropext.tasks.asking import TextRequest, match, sentences
from ropext.tasks.item import NOUNS
from ropext.tasks.passages import KnownAnswer

WORDED = [task for task in TASKS if task.in_words]
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)


class Asking:
    """The functions of a tokenizer that tasks in words need, over a tokenizer that gives ids."""

    def __init__(self, encoder):
        self.encode = encoder.encode
        self.known = getattr(encoder, "ids", None)

    def decode(self, ids):
        if self.known is None:
            return "".join(map(chr, ids))
        texts = list(self.known)
        return "".join(texts[own] for own in ids)

    def render(self, content, opening):
        return f"{content}\n{opening}"


def build(name, length=9000, depths=None, index=0, seed=7, encoder=None):
    task = find_task(name)
    depths = (DEPTHS * 2)[: task.per_haystack] if depths is None else depths
    encoder = encoder or Asking(Characters())
    return task.build(encoder, None, length=length, depths=depths, index=index, seed=seed)


def texts(name, **more):
    """Return the prompt and references of every question of a haystack."""
    encoder = Asking(Characters())
    return [(encoder.decode(i.prompt), i) for i in build(name, encoder=encoder, **more)]


def test_ruler_is_thirteen_tasks_and_a_name_is_taken_once():
    assert len(THIRTEEN) == 13
    assert named_tasks(["vt", "ruler", "shots", "vt"])[0] == "vt"
    assert sorted(named_tasks(["vt", "ruler"])) == sorted(THIRTEEN)
    with pytest.raises(UsageError, match="ruler"):
        named_tasks(["ruller"])


@pytest.mark.parametrize("task", WORDED, ids=lambda task: task.name)
@pytest.mark.parametrize("encoder", [Characters, Pieces])
def test_an_item_fills_its_length_and_is_never_longer(task, encoder):
    for length in (8000, 9001):
        for item in build(task.name, length, encoder=Asking(encoder())):
            assert 0.85 * length < len(item.prompt) + item.room <= length
            assert item.length == length
            assert item.room >= len(item.answer) > 0
            assert item.references


@pytest.mark.parametrize("task", WORDED, ids=lambda task: task.name)
def test_the_same_arguments_give_the_same_items(task):
    first = build(task.name)
    assert build(task.name) == first
    for other in ({"seed": 8}, {"index": 1}):
        assert all(
            a.prompt != b.prompt for a, b in zip(first, build(task.name, **other), strict=True)
        )


@pytest.mark.parametrize("task", WORDED, ids=lambda task: task.name)
def test_every_depth_has_as_many_questions_and_common_prefixes_are_shared(task):
    groups = task.groups(DEPTHS, 4)
    assert Counter(depth for _, depths in groups for depth in depths) == dict.fromkeys(DEPTHS, 4)
    assert [index for index, _ in groups] == list(range(len(groups)))
    items = build(task.name)
    assert len(items) == task.per_haystack
    assert len({item.prompt[: item.shared] for item in items}) == 1
    assert (items[0].shared > 0.9 * len(items[0].prompt)) == (len(items) > 1)
    assert len({item.prompt for item in items}) == len(items)


KINDS = {"number": r"\d{7}", "UUID": r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"}
NEEDLES = {  # values told, values wanted
    "niah_single_1": (1, 1),
    "niah_single_2": (1, 1),
    "niah_single_3": (1, 1),
    "niah_multikey_1": (4, 1),
    "niah_multikey_2": (None, 1),
    "niah_multikey_3": (None, 1),
    "niah_multivalue": (4, 4),
    "niah_multiquery": (4, 4),
}


@pytest.mark.parametrize("name", NEEDLES)
def test_needles_contain_the_requested_answer(name):
    told, wanted = NEEDLES[name]
    for text, item in texts(name):
        kind = "UUID" if name in ("niah_single_3", "niah_multikey_3") else "number"
        stated = re.findall(rf"The secret {kind} of (\S+) is ({KINDS[kind]})\.", text)
        assert len(stated) == (told or len(stated)) > 0
        asked = text.rsplit("secret", 1)[1]
        assert [value for key, value in stated if key in asked] == sorted(
            item.references, key=[value for _, value in stated].index
        )
        assert len(item.references) == wanted
        assert re.search(r"(is|are)$", text)
        if wanted == 1:
            at = text.index(item.references[0]) / len(text)
            assert at == pytest.approx(item.depth, abs=0.12)
        else:
            assert item.depth is None


def test_the_book_is_one_run_of_it():
    text, _ = texts("niah_single_2")[0]
    book = " ".join(sentences())
    body = text.split("\n\n")[1]
    before, _, after = body.partition("The secret number of")
    assert before.strip() in book + " " + book
    assert after.split(". ", 1)[1].strip() in book + " " + book


def test_the_variables_of_vt_lead_to_the_value():
    for index in range(5):
        ((text, item),) = texts("vt", index=index)
        value = re.search(r"(\d{5}):$", text)[1]
        holds = {}
        body = text.rsplit("The text below", 1)[1]
        for name, own in re.findall(r"VAR ([A-Z]{5}) = (?:VAR )?(\w+)", body):
            holds[name] = holds.get(own, own)  # an earlier one must be there already
        assert [name for name in holds if holds[name] == value] == list(item.references)
        assert len(holds) == 5


# RULER's common_words_extraction.py (c3f5e3b), generate_input_output: the words of the example, the
# occurrences of a common and of another word there, and the same occurrences in the list.
CWE = {4000: (20, 3, 1, 6, 1), 9000: (40, 10, 3, 30, 3)}


@pytest.mark.parametrize("length", CWE)
def test_common_words_are_the_common_ones(length):
    words, *numbers = CWE[length]
    ((text, item),) = texts("cwe", length=length)
    _, shown, asked = text.split("numbered list")
    shown, right = shown.split("Which ten")
    example = Counter(re.findall(r"\d+\. (\w+)", shown))
    counts = Counter(re.findall(r"\d+\. (\w+)", asked))
    assert len(example) == words
    assert sorted({*example.values()}, reverse=True) == numbers[:2]
    assert sorted({*counts.values()}, reverse=True) == numbers[2:]
    answer = set(re.findall(r"\d+\. (\w+)", right.split("\n\n")[0]))
    assert {word for word, count in example.items() if count == numbers[0]} == answer
    assert {word for word, count in counts.items() if count == numbers[2]} == set(item.references)
    assert len(item.references) == len(answer) == 10


def test_a_bos_does_not_make_4096_tokens_a_short_length():
    """A length without its BOS is 4,095 tokens: a model with a BOS is asked RULER's long list."""
    (task,) = [own for own in TASKS if own.name == "cwe"]
    for length, often in ((4094, 6), (4095, 30), (4096, 30)):
        (own,) = task.maker.make(TextRequest(20, (0.5,), length, random.Random(0)))
        assert max(Counter(re.findall(r"\d+\. (\w+)", own.text)).values()) == often


@pytest.mark.parametrize(("length", "lines"), [(4000, 2), (9000, 15)])
def test_the_example_of_vt_has_the_size_of_rulers(length, lines):
    """At 25 tokens a line, 15 fit into RULER's example of 500 tokens; its names have 3 letters."""
    ((text, _),) = texts("vt", length=length)
    _, example, _ = text.split("The text below")
    assert example.count("The grass is green.") == lines
    assert len(re.findall(r"VAR ([A-Z]{3}) = ", example)) == 5


def test_frequent_words_are_the_frequent_ones():
    for index in range(5):
        ((text, item),) = texts("fwe", index=index)
        words = text.split("\n\n")[1].split()
        (dots, _), *most = Counter(words).most_common(5)
        assert dots == "..."
        assert tuple(word for word, _ in most[:3]) == item.references
        assert most[2][1] > most[3][1]


def passages_of(text):
    return text.split("\n\n", 1)[1].rsplit("Answer by", 1)[0].split("\n\n")


@pytest.mark.parametrize("name", ["qa_1", "passages"])
def test_exactly_one_passage_answers_the_question(name):
    for text, item in texts(name):
        who = re.search(
            r"(?:was|of|did) (\w+ \w+)(?: born| move away)?\?", text.rsplit("Question:")[1]
        )
        assert who, text[-120:]
        own = [at for at, each in enumerate(passages_of(text)) if who[1] in each]
        assert len(own) == 1
        assert match(passages_of(text)[own[0]], item.references, True) == 1
        assert own[0] / len(passages_of(text)) == pytest.approx(item.depth, abs=0.15)


def test_qa_2_needs_two_passages():
    for index in range(5):
        ((text, item),) = texts("qa_2", index=index)
        house = re.search(r"builder of (\w+ House)", text)[1]
        (built,) = [each for each in passages_of(text) if house in each]
        assert item.references[0] not in built
        name = re.search(r"built by (\w+ \w+)", built)[1]
        (person,) = [each for each in passages_of(text) if f"{name}, a" in each]
        assert f"born in {item.references[0]}." in person


@pytest.mark.parametrize("hops", [1, 2])
def test_no_other_passage_is_about_the_person_or_house_of_a_question(hops, monkeypatch):
    """Of three houses and three persons at most, many passages would tell of the asked one."""
    monkeypatch.setattr(passages, "_invented_name", lambda rng: rng.choice(["Bar", "Dal", "Kel"]))
    monkeypatch.setattr(passages, "FIRST_NAMES", ("Ada",))
    for seed in range(5):
        request = TextRequest(40, (0.5,), 9000, random.Random(seed))
        (own,) = passages.PassageQuestions(hops)(request)
        who = re.search(r"(?:was|of|did) ((?!the)\w+ \w+)(?: born| move away)?\?", own.question)
        house = re.search(r"builder of (\w+ House)", own.question)
        if house:
            (built,) = re.findall(rf"{house[1]} stands .* built by (\w+ \w+)", own.text)
        (told,) = re.findall(rf"{built if house else who[1]}, a .*", own.text)
        assert match(told, own.references, True) == 1


def test_more_lines_than_pairs_of_words_have_keys_of_their_own():
    (task,) = [own for own in TASKS if own.name == "niah_multikey_2"]
    own = task.maker.make(TextRequest(len(NOUNS) ** 2, DEPTHS * 2, 2**20, random.Random(0)))[0]
    keys = re.findall(r"secret number of (\S+) is \d", own.text)
    assert len(keys) == len(set(keys)) == len(NOUNS) ** 2 + 10


def test_the_examples_of_shots_show_the_label_but_not_the_pair():
    for text, item in texts("shots"):
        shown = re.findall(r"Item: (\w+) (\w+)\nLabel: (\d+)", text)
        first, second = re.search(r"Item: (\w+) (\w+)\nLabel:$", text).groups()
        assert {label for own, _, label in shown if own == first} == set(item.references)
        assert second not in {own for _, own, _ in shown}
        counts = Counter(own for own, _, _ in shown)
        assert len(counts) == 8
        assert max(counts.values()) - min(counts.values()) <= 1


@pytest.mark.parametrize("task", WORDED, ids=lambda task: task.name)
def test_a_length_too_small_is_refused_with_the_least(task):
    with pytest.raises(UsageError, match="--lengths") as refused:
        build(task.name, 100)
    least = int(re.search(r"at least (\d+) tokens", str(refused.value))[1])
    assert 100 < least < 5000
    for item in build(task.name, least + 50):
        assert len(item.prompt) + item.room <= least + 50


def test_a_tokenizer_that_loses_the_needle_is_reported():
    class NoDigits(Characters):
        def encode(self, text):
            return [ord("?") if c.isdigit() else ord(c) for c in text]

    with pytest.raises(UsageError, match="so no answer would be right"):
        build("niah_single_1", encoder=Asking(NoDigits()))
    build("vt", encoder=Asking(NoDigits()))  # asks for names


def test_the_prompt_ends_before_a_token_that_joins_question_and_answer():
    """The last word and the number are one token: the prompt ends before it, the answer has it."""

    class Merged(Pieces):
        def encode(self, text):
            found = re.findall(r" is \d+| ?[A-Za-z]+|\s|.", text)
            return [self.ids.setdefault(piece, len(self.ids)) for piece in found]

    encoder = Asking(Merged())
    (item,) = build("niah_single_1", encoder=encoder)
    assert re.fullmatch(r" is \d{7}", encoder.decode(item.answer))
    assert not encoder.decode(item.prompt).endswith(" is")


def test_string_match_is_rulers():
    """By hand, from the definitions in the repository of Hsieh et al."""
    assert match("It is ABC and 12.", ("abc", "12", "7"), False) == pytest.approx(2 / 3)
    assert match("It is ABC.", ("abc", "12"), True) == 1
    assert match("nothing", ("abc", "12"), True) == 0


KNOWN = tuple(
    KnownAnswer(f"What is {k}?", (f"answer {k}",), (f"Of {k}: answer {k}. " + "More of it. " * 9,))
    for k in range(30)
)


def test_each_passage_of_the_user_occurs_at_most_once_in_an_item():
    task = passages.over_passages(find_task("passages"), KNOWN)
    items = task.build(Asking(Characters()), None, length=4000, depths=DEPTHS * 2, index=0, seed=0)
    text = "".join(map(chr, items[0].prompt))
    assert max(text.count(f"Of {k}:") for k in range(30)) == 1
    assert len({item.references for item in items}) == 10
    with pytest.raises(UsageError, match="--passages"):
        task.build(Asking(Characters()), None, length=9000, depths=DEPTHS * 2, index=0, seed=0)


def test_an_item_asks_one_question_of_a_passage():
    twice = KNOWN + tuple(replace(own, question=f"{own.question} Say it.") for own in KNOWN)
    task = passages.over_passages(find_task("passages"), twice)
    for index in range(3):
        items = task.build(
            Asking(Characters()), None, length=4000, depths=DEPTHS * 2, index=index, seed=0
        )
        text = "".join(map(chr, items[0].prompt))
        assert max(text.count(f"Of {k}:") for k in range(30)) == 1
        assert len({item.references for item in items}) == 10


def test_too_few_questions_of_the_user_are_refused():
    with pytest.raises(UsageError, match="asks about 9 passages"):
        passages.over_passages(find_task("passages"), KNOWN[:9])
    with pytest.raises(UsageError, match="1 passages; the task qa_1 needs 1 and more passages"):
        passages.over_passages(find_task("qa_1"), KNOWN[:1])
    with pytest.raises(UsageError, match="asks about 0 pairs"):
        passages.over_passages(find_task("qa_2"), KNOWN)
    assert passages.over_passages(find_task("vt"), KNOWN) is find_task("vt")
