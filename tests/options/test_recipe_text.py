"""A recipe's text: its values are read, and a refusal names the line."""

from pathlib import Path

import pytest

from ropext.base.errors import InputError, UsageError
from ropext.pipeline.recipe import RecipeSource, parse_recipe, read_recipe, recipe_from_source

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
REST = "extend: {}\nmodel: m\n"  # after lines in which something is wrong: nothing else is


def given(text, folder=Path(), words=()):
    return recipe_from_source(RecipeSource("my.yaml", parse_recipe(text, "my.yaml", folder)), words)


def test_values_are_of_the_kind_that_their_field_says(tmp_path):
    found = given(GOOD, tmp_path)
    assert found.model == "org/name"
    assert found.options("extend") == {
        "method": "yarn",
        "factor": 4.0,
        "for_loaders": ("vllm", "sglang"),
    }
    # PyYAML alone reads 2e-4 as a text.
    assert found.finetune.learning_rate == 2e-4
    assert found.finetune.targets == ("q_proj", "v_proj")
    assert found.finetune.train_norms is True
    assert isinstance(found.finetune.steps, int)


def test_a_whole_number_keeps_all_its_digits():
    # A float would make 9223372036854775808 of the first, which no generator takes.
    found = given("model: m\nseed: 9223372036854775807\nextend: {target: 1_000_000}\n")
    assert found.seed == 2**63 - 1
    assert found.extend.target == 10**6
    assert given("seed: 1e3\n" + REST).seed == 1000
    assert given("seed: '4'\n" + REST).seed == 4  # quotes decide nothing


def test_a_word_that_yaml_takes_for_something_else_stays_a_text():
    found = given("model: no\nextend: {method: yarn}\nrevision: 1.10\n")
    assert (found.model, found.revision) == ("no", "1.10")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model: a\nmodel: b\n", ["my.yaml, line 2", "model is given twice (line 1)"]),
        ("model: a\nextend:\n  factor: 4\n  factor: 8\n", ["line 4", "factor", "(line 3)"]),
        ("modle: a\n", ["line 1", "no key 'modle'", "did you mean model"]),
        ("modle:\n", ["line 1", "no key 'modle'"]),
        ("model: a\nextend:\n  fctor: 4\n", ["line 3", "extend has no key 'fctor'", "factor"]),
        ("model: a\nextend:\n  steps: 4\n", ["line 3", "key of fit and of finetune"]),
        ("model: a\nfinetne:\n  data: b\n", ["line 2", "did you mean finetune"]),
        ("model: a\nextend: 4\n", ["line 2", "extend is a section"]),
        ("model: [a, b]\nextend: {}\n", ["line 1", "model must be a text, was ['a', 'b']"]),
        ("model: {a: b}\nextend: {}\n", ["line 1", "model must be a text"]),
        (
            "model: a\nextend:\n  factor: four\n",
            ["line 3: extend.factor must be a number", "'four'"],
        ),
        (
            "model: a\nextend:\n  target: 4kb\n",
            ["line 3 (extend.target)", "'4kb' is not a number of"],
        ),
        (
            "finetune:\n  data: b\n  steps: 1.5\n" + REST,
            ["line 3: finetune.steps must be a whole", "1.5"],
        ),
        (
            "finetune:\n  steps: true\n  data: b\n" + REST,
            ["finetune.steps must be a whole number", "true"],
        ),
        ("finetune:\n  train_norms: 2\n  data: b\n" + REST, ["train_norms must be true or false"]),
        ("finetune:\n  learning_rate: .inf\n  data: b\n" + REST, ["must be a number", ".inf"]),
        ("finetune:\n  targets: [[a]]\n  data: b\n" + REST, ["finetune.targets must be a text"]),
        ("finetune:\n  data: [a, b]\n" + REST, ["line 2: finetune.data must be a text"]),
        ("evaluate:\n  data: [a, b]\n" + REST, ["line 2: evaluate.data must be a text"]),
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
        (b"model: \xff\n", ["my.yaml: not valid YAML"]),
        # With two mistakes the message names the unknown key, which may be why another is missing.
        ("modle: a\nextend: {factor: x}\n", ["no key 'modle'"]),
        ("model: a\nextend: {factor: x}\nfinetune: {rank: 0, dta: b}\n", ["no key 'dta'"]),
        ("model: a\nextend: {theta: x}\nfinetune: {}\n", ["extend.theta must be"]),
    ],
)
def test_a_refused_line_is_named(text, words):
    with pytest.raises((InputError, UsageError)) as caught:
        given(text)
    for word in words:
        assert word in str(caught.value), str(caught.value)


def test_a_recipe_has_a_size_limit(tmp_path):
    path = tmp_path / "large.yaml"
    path.write_text("model: a\n" + "#" * (1 << 16))
    with pytest.raises(InputError, match=r"large\.yaml has more than the 64 KiB"):
        read_recipe(path)


def test_nothing_of_a_billion_laughs_is_built():
    text = "a: &a [x, x]\n" + "".join(
        f"{chr(98 + k)}: &{chr(98 + k)} [*{chr(97 + k)}, *{chr(97 + k)}]\n" for k in range(20)
    )
    with pytest.raises(InputError, match="line 1: anchors"):
        parse_recipe(text, "bomb.yaml")


def test_null_is_not_given():
    found = given("model: a\nrevision:\nextend: {factor: null}\nfinetune: ~\n")
    assert found.options("extend") == {}
    assert (found.finetune, found.revision) == (None, None)


def test_paths_in_a_recipe_are_relative_to_its_folder(tmp_path, monkeypatch):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "mine").mkdir()
    text = "model: {}\nextend: {{}}\nfinetune: {{data: {}}}\n"

    def places(model, data, folder=tmp_path / "sub"):
        found = given(text.format(model, data), folder)
        return found.model, found.finetune.data

    here = str(tmp_path / "sub")
    assert places("mine", "books.jsonl") == (f"{here}/mine", f"{here}/books.jsonl")
    other = (str(tmp_path / "sub" / "other"), f"{here}/../x/books.parquet")
    assert places("./other", "../x/books.parquet") == other
    assert places("org/name", "org/dataset:part") == ("org/name", "org/dataset:part")
    kept = ("ropext://demo", "/data/books.jsonl")
    assert places(*kept) == kept
    monkeypatch.setenv("HOME", "/home/me")
    for folder in (tmp_path / "sub", Path()):  # for a file elsewhere, and for one right here
        at_home = ("/home/me/mine", "/home/me/books.jsonl")
        assert places("~/mine", "~/books.jsonl", folder) == at_home


def test_the_environment_is_read_in_places_alone(monkeypatch):
    monkeypatch.setenv("BOOKS", "/data/books")
    monkeypatch.setenv("REVISION", "main")
    monkeypatch.delenv("NOWHERE", raising=False)
    found = given("finetune:\n  data: ${BOOKS}/a.jsonl\nrevision: ${REVISION}\n" + REST)
    assert found.finetune.data == "/data/books/a.jsonl"
    assert found.resolved()["finetune"]["data"] == "${BOOKS}/a.jsonl"  # the recorded value
    assert found.revision == "${REVISION}"
    with pytest.raises(InputError, match="line 2: the environment variable NOWHERE is not set"):
        given("finetune:\n  data: ${NOWHERE}/a.jsonl\n" + REST)
    with pytest.raises(InputError, match=r"write \$\{NAME\}"):
        given("model: $BOOKS\n")


@pytest.mark.parametrize("name", ["HF_TOKEN", "TOKEN", "AWS_ACCESS_KEY", "apiKey", "db_password"])
def test_a_variable_that_is_a_secret_is_not_read(monkeypatch, name):
    monkeypatch.setenv(name, "hf_secret")
    with pytest.raises(InputError, match="looks like a secret"):
        given(f"model: ${{{name}}}/a\n")


@pytest.mark.parametrize("name", ["TOKENIZER_DIR", "TOKEN_COUNTS", "KEYS", "MONKEY", "SECRETARY"])
def test_a_variable_whose_name_only_holds_such_a_word_is_read(monkeypatch, name):
    monkeypatch.setenv(name, "/data")
    assert given(f"model: ${{{name}}}/a\nextend: {{}}\n").model == "/data/a"


def test_a_place_that_is_empty_is_refused():
    with pytest.raises(InputError, match=r"line 2: finetune\.data is empty"):
        given("finetune:\n  data: ''\n")


def test_overrides_are_typed_like_the_file_and_count_from_the_working_directory(tmp_path):
    words = [
        "finetune.steps=7",
        "finetune.data=mine.jsonl",
        "extend.for=[llama.cpp]",
        "evaluate.tasks=passkey,mkey",
        "evaluate.depths=[0, 0.5]",
        "revision=main",
    ]
    found = given(GOOD, tmp_path, words)
    assert found.finetune.steps == 7
    assert found.finetune.data == "mine.jsonl"
    assert found.extend.for_loaders == ("llama.cpp",)
    assert (found.evaluate.tasks, found.evaluate.depths) == (("passkey", "mkey"), (0.0, 0.5))
    found = given(GOOD, tmp_path, [*words, "finetune=null", "revision=null"])
    assert (found.finetune, found.revision) == (None, None)


@pytest.mark.parametrize(
    ("word", "words"),
    [
        ("finetune.setps=3", "finetune.setps=3: finetune has no key 'setps'; did you mean steps"),
        (
            "finetun.steps=3",
            "finetun.steps=3: a recipe has no key 'finetun'; did you mean finetune",
        ),
        ("finetune.setps=null", "finetune.setps=null: finetune has no key 'setps'"),
        (
            "finetune.steps=many",
            "finetune.steps=many: finetune.steps must be a whole number, was 'many'",
        ),
        ("no.such.model=null", "a recipe has no key 'no.such'"),
        ("finetune", "no KEY=VALUE"),
        ("finetune=3", "finetune=3: finetune is a section"),
        ("steps=3", "it is a key of fit and of finetune"),
        ("extend.for=[vllm", "not valid YAML"),
        ("evaluate.method=pi", "it is a key of extend"),
    ],
)
def test_a_wrong_override_is_refused_with_similar_names(word, words):
    with pytest.raises(UsageError) as caught:
        given(GOOD, words=[word])
    assert words in str(caught.value)
    assert "line 0" not in str(caught.value)
