"""Every task's items, through two tokenizers that share no code with the tasks."""

import re

import pytest

from ropext.base.errors import UsageError
from ropext.tasks import TASKS as EVERY
from ropext.tasks import copy as copying
from ropext.tasks import find_task, mkey, noise, repetition, running_text
from ropext.tasks.item import Template, derived_rng, drawn_from, holds_tokens

TASKS = [task for task in EVERY if not task.in_words]  # of ids; the others: test_asking.py
DEPTHS = (0.0, 0.25, 0.5, 0.9, 1.0)


class Characters:
    """One token per character: ids decode by eye."""

    def encode(self, text):
        return [ord(c) for c in text]


class Pieces:
    """Runs of up to three digits, words with their leading space, everything else alone."""

    def __init__(self):
        self.ids = {}

    def encode(self, text):
        found = re.findall(r"\d{1,3}| ?[A-Za-z]+|\s|.", text)
        return [self.ids.setdefault(piece, len(self.ids)) for piece in found]


def text_of(tokens):
    return "".join(chr(token) for token in tokens)


def haystacks(encoder):
    prose = "It was a bright cold day in April, and the clocks were striking thirteen. " * 9
    return repetition(encoder), noise(encoder), running_text(encoder.encode(prose))


def build(task, encoder, haystack, length, depths=DEPTHS, index=0, seed=7):
    return task.build(encoder, haystack, length=length, depths=depths, index=index, seed=seed)


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
@pytest.mark.parametrize("encoder", [Characters(), Pieces()], ids=["characters", "pieces"])
def test_lengths_are_exact_and_depths_kept(task, encoder):
    for haystack in haystacks(encoder):
        for length in (400, 401, 777):
            items = build(task, encoder, haystack, length)
            assert [item.depth for item in items] == list(DEPTHS)
            for item in items:
                assert len(item.prompt) + len(item.answer) == item.length == length
                assert (item.task, item.index, item.seed) == (task.name, 0, 7)
                assert item.answer


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_same_arguments_same_items_and_other_arguments_others(task):
    first = build(task, Characters(), noise(Characters()), 500)
    derived_rng("something", "drawn", "between").random()
    assert build(task, Characters(), noise(Characters()), 500) == first
    for other in ({"seed": 8}, {"index": 1}):
        changed = build(task, Characters(), noise(Characters()), 500, **other)
        assert all(a.answer != b.answer for a, b in zip(first, changed, strict=True))


@pytest.mark.parametrize("name", ["passkey", "copy"])
def test_an_item_does_not_depend_on_the_other_depths(name):
    task, encoder = find_task(name), Characters()
    alone = build(task, encoder, noise(encoder), 300, depths=(0.5,))
    assert alone[0] in build(task, encoder, noise(encoder), 300)


def test_passkey_reads_as_written():
    encoder = Characters()
    hay = running_text(encoder.encode("a" * 1000))
    for depth, before in ((0.0, 0), (0.5, 77), (1.0, 154)):
        (item,) = build(find_task("passkey"), encoder, hay, 200, depths=(depth,))
        key = text_of(item.answer)[1:]
        assert re.fullmatch(r"\d{5}", key)
        # 200 - 24 (statement) - 16 (question) - 6 (answer) = 154 of filler, cut at the depth
        statement, question = f"\nThe pass key is {key}.\n", "\nThe pass key is"
        assert text_of(item.prompt) == ("a" * before + statement + "a" * (154 - before) + question)


def test_the_answer_equals_joint_tokenization():
    """A tokenizer that merges the space into the number: the answer is that one token."""

    class SpacedNumbers(Pieces):
        def encode(self, text):
            return [
                self.ids.setdefault(piece, len(self.ids))
                for piece in re.findall(r" ?\d+| ?[a-z]+|.", text)
            ]

    encoder = SpacedNumbers()
    question, answer = Template("{key}", "it is {key}").question(encoder, "123")
    assert [len(question), len(answer)] == [2, 1]
    assert (*question, *answer) == tuple(encoder.encode("it is 123"))


def test_multi_key_items_share_their_prefix_and_hold_each_key_once():
    encoder = Characters()
    items = build(find_task("mkey"), encoder, noise(encoder), 600)
    prefixes = {item.prompt[: item.shared] for item in items}
    assert len(prefixes) == 1
    haystack = text_of(prefixes.pop())
    found = re.findall(r"\nThe key of (\w+) is (\d{4})\.\n", haystack)
    assert len(found) == len(dict(found)) == len({key for _, key in found}) == len(DEPTHS)
    for item, (name, key) in zip(items, found, strict=True):  # ascending depths: text order
        assert text_of(item.prompt[item.shared :]) == f"\nThe key of {name} is"
        assert text_of(item.answer) == f" {key}"
    assert haystack.startswith("\nThe key of")
    assert haystack.endswith(".\n")


def test_multi_key_depths_are_places_in_the_filler():
    encoder = Characters()
    items = build(
        find_task("mkey"), encoder, running_text([ord("a")] * 50), 600, depths=(0.75, 0.25)
    )
    haystack = text_of(items[0].prompt[: items[0].shared])
    runs = [len(run) for run in re.findall(r"a{5,}", haystack)]
    filler = sum(runs)
    assert runs == [
        round(0.25 * filler),
        round(0.75 * filler) - round(0.25 * filler),
        filler - round(0.75 * filler),
    ]
    late, early = items
    assert haystack.index(text_of(early.answer)) < haystack.index(text_of(late.answer))


def test_copy_repeats_the_span_that_its_cue_begins():
    encoder = Pieces()
    for item in build(find_task("copy"), encoder, repetition(encoder), 300):
        cue = item.prompt[-copying.CUE :]
        span = (*cue, *item.answer)
        assert len(span) == copying.SPAN
        places = [
            at
            for at in range(len(item.prompt) - copying.CUE)
            if item.prompt[at : at + copying.CUE] == cue
        ]
        assert len(places) == 1
        assert item.prompt[places[0] : places[0] + copying.SPAN] == span
        assert places[0] == round(item.depth * (300 - 2 * copying.SPAN))


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_an_item_that_does_not_fit_is_an_error_that_says_the_shortest_length(task):
    encoder = Characters()
    with pytest.raises(UsageError, match="--lengths") as refused:
        build(task, encoder, noise(encoder), 20)
    smallest = int(re.search(r"at least (\d+) tokens", str(refused.value))[1])
    items = build(task, encoder, noise(encoder), smallest)
    assert {len(item.prompt) + len(item.answer) for item in items} == {smallest}
    with pytest.raises(UsageError, match="at least"):
        build(task, encoder, noise(encoder), smallest - 1)


def test_a_key_that_is_in_the_haystack_is_drawn_again():
    """A haystack that holds thousands of keys: each item still has a key of its own."""
    encoder = Characters()
    taken = "".join(f"{key:05d} " for key in range(0, 100_000, 2))
    hay = running_text(encoder.encode(taken))
    for index in range(20):
        (item,) = build(find_task("passkey"), encoder, hay, 20_000, depths=(0.5,), index=index)
        key = text_of(item.answer)[1:]
        assert text_of(item.prompt).count(key) == 1


def test_a_haystack_that_leaves_no_key_is_an_error():
    sevens = drawn_from([ord("7")])
    assert sevens(3, derived_rng(0)) == [ord("7")] * 3
    encoder = Characters()
    with pytest.raises(UsageError, match="haystack"):
        copying_items(encoder, sevens)


def copying_items(encoder, haystack):
    span = copying.RepeatedSpan(haystack, size=20, cue=4)
    return copying.copy_prompt(haystack, span, length=200, depth=0.5, rng=derived_rng(0))


@pytest.mark.parametrize("depths", [(), (-0.1,), (0.5, 1.2)])
@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_depths_outside_the_haystack_are_refused(task, depths):
    with pytest.raises(UsageError, match="--depths"):
        build(task, Characters(), noise(Characters()), 500, depths=depths)


def test_more_needles_than_names_are_refused():
    encoder = Characters()
    with pytest.raises(UsageError, match="fewer --depths"):
        build(find_task("mkey"), encoder, noise(encoder), 10_000, depths=[0.5] * 150)


def test_unknown_task_names_the_known_ones():
    with pytest.raises(UsageError, match=r"--tasks takes passkey, .*\bcopy\b"):
        find_task("needle")


def test_haystacks_have_exactly_the_requested_length():
    encoder = Characters()
    for haystack in haystacks(encoder):
        for count in (0, 1, 50, 2000):
            assert len(haystack(count, derived_rng(1))) == count
    text = text_of(repetition(encoder)(300, derived_rng(3)))
    cycle = "The grass is green. The sky is blue. The sun is yellow. Here we go."
    cycle += " There and back again."
    assert text in cycle * 6
    wrapped = running_text(encoder.encode("abcdef"))(14, derived_rng(2))
    assert text_of(wrapped) in "abcdef" * 4


def test_a_haystack_holds_tokens():
    assert holds_tokens([1, 2, 3], (2, 3))
    assert not holds_tokens([2, 2, 4, 3], (2, 3))
    assert not holds_tokens([2], (2, 3))


def test_multi_key_needles_have_equal_question_sizes():
    encoder = Pieces()
    needles = mkey.draw_needles(encoder, 16, derived_rng(0))
    assert len({len(question) + len(answer) for _, question, answer in needles}) == 1
