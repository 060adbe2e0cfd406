"""A recipe's text: what is read, and that what is refused is named with its line."""

from pathlib import Path

import pytest

from ropext.errors import InputError, UsageError
from ropext.options.sections import TABLE
from ropext.recipefile import from_text, override, parse, read

GOOD = """\
# a comment
model: org/name
extend: {method: yarn, factor: 4, for: [vllm, sglang]}
finetune:
  data: books.jsonl
  learning_rate: 2e-4
  steps: 60
  train_norms: true
  targets: q_proj, v_proj
"""


def given(text, folder):
    return from_text(text, "my.yaml", TABLE, folder)


def test_values_are_of_the_kind_that_their_key_says(tmp_path):
    found = given(GOOD, tmp_path)
    assert found.section("") == {"model": "org/name"}
    assert found.section("extend") == {
        "method": "yarn",
        "factor": 4.0,
        "for": ("vllm", "sglang"),
    }
    # PyYAML alone reads 2e-4 as a text.
    assert found.section("finetune")["learning_rate"] == 2e-4
    assert found.section("finetune")["targets"] == ("q_proj", "v_proj")
    assert found.section("finetune")["train_norms"] is True
    assert isinstance(found.section("finetune")["steps"], int)


def test_a_whole_number_keeps_all_its_digits(tmp_path):
    # A float would make 9223372036854775808 of the first, which no generator takes.
    found = given("seed: 9223372036854775807\nextend: {target: 1_000_000}\n", tmp_path)
    assert found.section("") == {"seed": 2**63 - 1}
    assert found.section("extend") == {"target": 10**6}
    assert given("seed: 1e3\n", tmp_path).section("") == {"seed": 1000}


def test_a_word_that_yaml_takes_for_something_else_stays_a_text(tmp_path):
    found = given("model: no\nextend: {method: yarn}\nrevision: 1.10\n", tmp_path)
    assert found.section("") == {"model": "no", "revision": "1.10"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model: a\nmodel: b\n", ["my.yaml, line 2", "model is given twice (line 1)"]),
        ("model: a\nextend:\n  factor: 4\n  factor: 8\n", ["line 4", "factor", "(line 3)"]),
        ("modle: a\n", ["line 1", "no key 'modle'", "did you mean model"]),
        ("model: a\nextend:\n  fctor: 4\n", ["line 3", "extend has no key 'fctor'", "factor"]),
        ("model: a\nextend:\n  steps: 4\n", ["line 3", "key of fit and of finetune"]),
        ("model: a\nfinetne:\n  data: b\n", ["line 2", "did you mean finetune"]),
        ("model: a\nextend: 4\n", ["line 2", "extend is a section"]),
        ("model: [a, b]\n", ["line 1", "model takes a text, not a list"]),
        ("model: {a: b}\n", ["line 1", "model takes a text"]),
        ("extend:\n  factor: four\n", ["line 2", "extend.factor takes a number or a list", "four"]),
        ("extend:\n  factor: '4'\n", ["line 2", "extend.factor takes a number", "'4'"]),
        ("extend:\n  target: 4kb\n", ["line 2", "extend.target '4kb' is not a number of tokens"]),
        ("finetune:\n  steps: 1.5\n", ["line 2", "finetune.steps takes a whole number", "1.5"]),
        ("finetune:\n  steps: true\n", ["finetune.steps takes a whole number", "true"]),
        ("finetune:\n  train_norms: yes\n", ["finetune.train_norms takes true or false", "yes"]),
        ("finetune:\n  learning_rate: .inf\n", ["takes a number", ".inf"]),
        ("finetune:\n  targets: [[a]]\n", ["lists in a list"]),
        ("model: &a x\nrevision: *a\n", ["line 1", "anchors and aliases"]),
        ("model: !!python/object/apply:os.system [ls]\n", ["line 1", "tags"]),
        ("model: !!str a\n", ["line 1", "tags"]),
        ("extend:\n  <<: {factor: 4}\n", ["line 2", "no key '<<'"]),
        ("? [a]\n: b\n", ["line 1", "a key is a word"]),
        ("model: a\n---\nmodel: b\n", ["line 2", "one document"]),
        ("- a\n- b\n", ["no recipe"]),
        ("", ["no recipe"]),
        ("model: [a\n", ["not valid YAML"]),
        ("model: a\n\tx: b\n", ["line 2", "not valid YAML"]),
        ("model: a\0b\n", ["not valid YAML"]),
        ("model: " + "[" * 500 + "]" * 500, ["nested deeper"]),
        ("model: " + "{a: " * 500 + "b" + "}" * 500, ["nested deeper"]),
        (b"model: \xff\n", ["not UTF-8"]),
    ],
)
def test_what_is_refused_is_named_with_its_line(tmp_path, text, words):
    with pytest.raises(InputError) as caught:
        given(text, tmp_path)
    for word in words:
        assert word in str(caught.value), str(caught.value)


def test_a_recipe_has_a_size_limit(tmp_path):
    path = tmp_path / "large.yaml"
    path.write_text("model: a\n" + "#" * (1 << 16))
    with pytest.raises(InputError, match=r"large\.yaml has more than the 64 KiB"):
        read(path, TABLE, tmp_path)


def test_nothing_of_a_billion_laughs_is_built():
    text = "a: &a [x, x]\n" + "".join(
        f"{chr(98 + k)}: &{chr(98 + k)} [*{chr(97 + k)}, *{chr(97 + k)}]\n" for k in range(20)
    )
    with pytest.raises(InputError, match="line 1: anchors"):
        parse(text, "bomb.yaml")


def test_null_is_not_given(tmp_path):
    found = given("model: a\nrevision:\nextend: {factor: null}\nfinetune: ~\n", tmp_path)
    assert found.section("extend") == {}
    assert sorted(found.sections) == ["extend"]
    assert "revision" not in found.entries


def test_places_count_from_the_recipe(tmp_path, monkeypatch):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "mine").mkdir()
    text = "model: {}\nfinetune: {{data: {}}}\n"
    for model, data, places in (
        ("mine", "books.jsonl", ("mine", "books.jsonl")),
        ("./other", "../x/books.parquet", ("other", "../x/books.parquet")),
    ):
        found = given(text.format(model, data), tmp_path / "sub")
        assert found.place("model") == str(tmp_path / "sub" / places[0])
        assert found.place("finetune.data") == str(tmp_path / "sub") + "/" + places[1]
    found = given(text.format("org/name", "org/dataset:part"), tmp_path / "sub")
    assert (found.place("model"), found.place("finetune.data")) == ("org/name", "org/dataset:part")
    found = given(text.format("ropext://demo", "/data/books.jsonl"), tmp_path / "sub")
    assert found.place("model") == "ropext://demo"
    assert found.place("finetune.data") == "/data/books.jsonl"
    monkeypatch.setenv("HOME", "/home/me")
    for folder in (tmp_path / "sub", Path()):  # of a file elsewhere, and of one right here
        found = given(text.format("~/mine", "~/books.jsonl"), folder)
        assert found.place("model") == "/home/me/mine"
        assert found.place("finetune.data") == "/home/me/books.jsonl"


def test_the_environment_is_read_in_places_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("BOOKS", "/data/books")
    monkeypatch.setenv("METHOD", "yarn")
    monkeypatch.delenv("NOWHERE", raising=False)
    found = given("finetune:\n  data: ${BOOKS}/a.jsonl\nextend:\n  method: ${METHOD}\n", tmp_path)
    assert found.place("finetune.data") == "/data/books/a.jsonl"
    assert found.section("finetune")["data"] == "${BOOKS}/a.jsonl"  # what is recorded
    assert found.section("extend")["method"] == "${METHOD}"
    with pytest.raises(InputError, match="line 2: the environment variable NOWHERE is not set"):
        given("finetune:\n  data: ${NOWHERE}/a.jsonl\n", tmp_path)
    with pytest.raises(InputError, match=r"write \$\{NAME\}"):
        given("model: $BOOKS\n", tmp_path)


@pytest.mark.parametrize("name", ["HF_TOKEN", "TOKEN", "AWS_ACCESS_KEY", "apiKey", "db_password"])
def test_a_variable_that_is_a_secret_is_not_read(tmp_path, monkeypatch, name):
    monkeypatch.setenv(name, "hf_secret")
    with pytest.raises(InputError, match="looks like a secret"):
        given(f"model: ${{{name}}}/a\n", tmp_path)


@pytest.mark.parametrize("name", ["TOKENIZER_DIR", "TOKEN_COUNTS", "KEYS", "MONKEY", "SECRETARY"])
def test_a_variable_whose_name_only_holds_such_a_word_is_read(tmp_path, monkeypatch, name):
    monkeypatch.setenv(name, "/data")
    assert given(f"model: ${{{name}}}/a\n", tmp_path).place("model") == "/data/a"


def test_a_place_that_is_empty_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"line 2: finetune\.data is empty"):
        given("finetune:\n  data: ''\n", tmp_path)


def test_overrides_are_typed_like_the_file_and_count_from_the_working_directory(tmp_path):
    found = given(GOOD, tmp_path)
    for word in (
        "finetune.steps=7",
        "finetune.data=mine.jsonl",
        "extend.factor=[2, 4]",
        "extend.for=llama.cpp",
        "evaluate.tasks=passkey,copying",
        "revision=main",
    ):
        override(found, word, TABLE)
    assert found.section("finetune")["steps"] == 7
    assert found.place("finetune.data") == "mine.jsonl"
    assert found.section("extend") == {
        "method": "yarn",
        "factor": (2.0, 4.0),
        "for": ("llama.cpp",),
    }
    assert found.section("evaluate") == {"tasks": ("passkey", "copying")}
    override(found, "finetune=null", TABLE)
    override(found, "revision=null", TABLE)
    assert "finetune" not in found.sections
    assert not found.section("finetune")
    assert "revision" not in found.entries


@pytest.mark.parametrize(
    ("word", "words"),
    [
        ("finetune.setps=3", "finetune.setps=3: finetune has no key 'setps'; did you mean steps"),
        ("finetun.steps=3", "no section 'finetun'; did you mean finetune"),
        (
            "finetune.steps=many",
            "finetune.steps=many: finetune.steps takes a whole number, was many",
        ),
        ("finetune", "no KEY=VALUE"),
        ("finetune=3", "finetune is a section"),
        ("steps=3", "it is a key of fit and of finetune"),
        ("extend.factor=[2", "not valid YAML"),
        ("evaluate.method=pi", "it is a key of extend"),
    ],
)
def test_a_wrong_override_is_told_with_its_neighbours(tmp_path, word, words):
    with pytest.raises((UsageError, InputError)) as caught:
        override(given(GOOD, tmp_path), word, TABLE)
    assert words in str(caught.value)
    assert "line 0" not in str(caught.value)
