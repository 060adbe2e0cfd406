"""Documents to token arrays: BOS once, bytes add up, the choice depends on content and seed."""

import hashlib
import json
import math
import os
import tracemalloc

import numpy as np
import pytest
from small_tokenizer import make_tokenizer

from ropext.base.errors import InputError, UsageError
from ropext.evaluation.corpus import (
    Document,
    DocumentEncoder,
    RawDocument,
    Source,
    Wanted,
    choose_documents,
    glue_documents,
    read_documents,
    split_documents,
    texts_of,
    unread_files,
)
from ropext.options.evaluate import Evaluate
from ropext.options.fields import documents_as_place


@pytest.fixture(scope="module")
def tokenizer():
    """Make a byte-level BPE with merges of its own; BOS in front, as Llama's."""
    return make_tokenizer(bos=True)


def texts(n, words=60):
    rng = np.random.default_rng(0)
    vocabulary = ["the", "quick", "brown", "fox", "jumps", "over", "lazy", "dog", "and", "runs"]
    return [" ".join(rng.choice(vocabulary, words)) for _ in range(n)]


def raw(contents):
    return [RawDocument(f"doc{k}", text) for k, text in enumerate(contents)]


def test_bos_occurs_once_and_only_at_the_start(tokenizer):
    encoder = DocumentEncoder(tokenizer)
    document = encoder.document("d", texts(1)[0], 50)
    assert document.has_bos
    assert document.ids[0] == tokenizer.bos_token_id
    assert (document.ids == tokenizer.bos_token_id).sum() == 1
    assert list(document.ids[1:]) == encoder.encode(texts(1)[0])[:49]
    # A text that brings its own (a chat template, say) does not get a second one.
    own = encoder.document("d", "<s>" + texts(1)[0], 50)
    assert list(own.ids) == list(document.ids)
    assert own.token_bytes[0] == 0


def test_a_tokenizer_that_puts_no_bos_gets_none():
    encoder = DocumentEncoder(make_tokenizer(bos=False))
    assert encoder.bos is None
    document = encoder.document("d", "the fox", 50)
    assert not document.has_bos
    assert list(document.ids) == encoder.encode("the fox")


@pytest.mark.parametrize("text", ["the quick fox", "naïve café — 漢字 🙂 the end", "\n\n  \t x"])
def test_bytes_per_token_add_up_to_the_text(tokenizer, text):
    document = DocumentEncoder(tokenizer).document("d", text, 10_000)
    assert document.token_bytes.sum() == len(text.encode())
    assert document.token_bytes[0] == 0
    # Up to any token, no more bytes than the tokens decode to (a cut character counts early).
    for stop in range(1, len(document) + 1):
        decoded = tokenizer.decode(document.ids[1:stop], clean_up_tokenization_spaces=False)
        decoded_bytes = len(decoded.replace("�", "").encode())
        assert decoded_bytes <= document.token_bytes[:stop].sum() <= decoded_bytes + 4


def test_a_long_text_is_encoded_only_as_far_as_needed(tokenizer):
    encoder = DocumentEncoder(tokenizer)
    text = " ".join(texts(400))
    start = encoder.document("d", text, 300)
    whole = encoder.encode(text)
    assert len(start) == 300
    assert list(start.ids[1:]) == whole[:299]


def test_prefix_hashes_are_of_the_token_ids(tokenizer):
    document = DocumentEncoder(tokenizer).document("d", texts(1)[0], 40)
    hashes = document.prefix_hashes([10, 40, 41])
    assert list(hashes) == [10, 40]
    ids = np.array(document.ids[:10], "<i4").tobytes()
    assert hashes[10] == hashlib.sha256(ids).hexdigest()
    assert document.cut(10).prefix_hashes([10]) == {10: hashes[10]}


def test_choice_depends_on_content_and_seed_not_on_order_or_names(tokenizer):
    contents = texts(40)
    wanted = Wanted((16, 32), given=True, max_documents=10)
    encoder = DocumentEncoder(tokenizer, seed=1)
    first = choose_documents(raw(contents), encoder, wanted)
    again = choose_documents(raw(contents[::-1]), encoder, wanted)
    keys = [document.key for document in first.documents]
    assert keys == [document.key for document in again.documents] == sorted(keys)
    expected = sorted(hashlib.sha256(b"1\0" + text.encode()).hexdigest() for text in contents)[:10]
    assert keys == expected
    other = choose_documents(raw(contents), DocumentEncoder(tokenizer, seed=2), wanted)
    assert [document.key for document in other.documents] != keys
    assert first.num_spare == 30
    assert all(len(document) == 32 for document in first.documents)


def test_short_documents_and_duplicates_are_counted_never_glued(tokenizer):
    contents = [*texts(12), "the fox", "the dog", texts(12)[3]]
    corpus = choose_documents(
        raw(contents), DocumentEncoder(tokenizer), Wanted((16, 64), True, 100)
    )
    assert len(corpus.documents) == 12
    assert (corpus.num_read, corpus.num_short, corpus.num_duplicates) == (15, 2, 1)


def test_default_lengths_end_at_the_length_of_eight_documents(tokenizer):
    contents = texts(8, words=200) + texts(3, words=800)
    encoder = DocumentEncoder(tokenizer)
    tokens = min(len(encoder.encode(text)) for text in contents[:8])
    grid = (32, 64, 128, 256, 512, 1024)
    corpus = choose_documents(raw(contents), encoder, Wanted(grid, False, 100))
    assert corpus.lengths[-1] == max(length for length in grid if length <= tokens + 1)
    assert len(corpus.documents) == 11
    few = choose_documents(raw(contents[8:]), encoder, Wanted(grid, False, 100))
    assert few.lengths[-1] > corpus.lengths[-1]
    assert len(few.documents) == 3


@pytest.mark.slow
def test_a_million_short_documents_take_constant_memory(tokenizer):
    long = texts(10, words=300)

    def stream(count):
        for k in range(count):
            yield RawDocument(f"s{k}", f"short number {k}")
            if k % (count // 10) == 0:
                yield RawDocument(f"l{k}", long[k // (count // 10)])

    wanted = Wanted((64, 256), True, 4)

    def peak(count):
        tracemalloc.start()
        corpus = choose_documents(stream(count), DocumentEncoder(tokenizer), wanted)
        size = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return size, corpus

    small, _ = peak(1_000)
    large, corpus = peak(1_000_000)
    assert corpus.num_read == 1_000_010
    assert corpus.num_short == 1_000_000
    assert large < small + 300_000


def test_documents_that_are_all_too_short_are_refused_with_the_longest(tokenizer):
    wanted = Wanted((16, 4096), True, 8)
    with pytest.raises(
        InputError, match=r"none of the 12 documents reaches 4k tokens; the longest"
    ):
        choose_documents(raw(texts(12)), DocumentEncoder(tokenizer), wanted)
    with pytest.raises(InputError, match="no document"):
        choose_documents([], DocumentEncoder(tokenizer), wanted)


def test_a_tokenizer_of_another_model_is_refused(tokenizer):
    with pytest.raises(InputError, match="the tokenizer does not match the model"):
        DocumentEncoder(tokenizer, vocabulary=100).document("d", texts(1)[0], 50)


TEXT = "one a\nb\n\ntwo c\n \n\n\nthree d\n=====\nfour e\n=====\n"


@pytest.mark.parametrize(
    ("how", "wanted"),
    [
        (None, [TEXT]),
        ("blank-lines", ["one a\nb", "two c", "three d\n=====\nfour e\n=====\n"]),
        ("=====", ["one a\nb\n\ntwo c\n \n\n\nthree d\n", "\nfour e\n"]),
        ("\\n\\n\\n", ["one a\nb\n\ntwo c\n ", "three d\n=====\nfour e\n=====\n"]),
    ],
)
def test_one_text_becomes_several_documents_on_request(tokenizer, tmp_path, how, wanted):
    place = tmp_path / "stories.txt"
    place.write_text(TEXT, "utf-8")
    found = list(texts_of(Source(str(place), pieces=how), DocumentEncoder(tokenizer), 8))
    assert [document.content for document in found] == wanted
    assert len({document.name for document in found}) == len(found)
    talk = [{"role": "user", "content": TEXT}]
    place = tmp_path / "talks.jsonl"
    place.write_text(json.dumps({"messages": talk}), "utf-8")
    (kept,) = texts_of(Source(str(place), pieces=how), DocumentEncoder(tokenizer), 8)
    assert kept.content == talk


def test_windows_follow_one_another_through_the_whole_text(tokenizer):
    encoder = DocumentEncoder(tokenizer)
    (text,) = texts(1, words=400)
    size = len(encoder.document("a", text, 10**6))
    raw = split_documents([RawDocument("a", text)], "windows", encoder, 50)
    found = choose_documents(raw, encoder, Wanted((50,), True, 1000))
    assert len(found.documents) >= size // 50 - 1 > 5
    begins = np.cumsum([0, *encoder.document("a", text, 10**6).token_bytes])
    for own in found.documents:
        begin = begins[50 * (int(own.name.removeprefix("a#")) - 1)]
        assert text[begin:].lstrip().startswith(tokenizer.decode(own.ids[1:20]).lstrip()[:9])


def test_no_document_is_in_two_glued_sequences():
    sizes = [100, 20, 50, 130, 10, 64, 30, 40]
    documents = [
        Document(
            np.full(size, k, np.int32),
            token_bytes=np.ones(size, np.int32),
            name=f"{k}",
            key=f"{k}",
        )
        for k, size in enumerate(sizes)
    ]
    glued = glue_documents(documents, 64, 9, separator=99)
    # Too long documents are cut, and the rest of the last one in each is left out.
    held = [[int(k) for k in dict.fromkeys(own.ids.tolist())] for own in glued]
    assert held == [[0], [1, 99, 2], [3], [4, 99, 5], [6, 99, 7]]
    assert all(len(own) == len(own.token_bytes) == 64 for own in glued)
    assert [own.name for own in glued] == ["0", "1 … 2", "3", "4 … 5", "6 … 7"]
    assert len({own.key for own in glued}) == 5
    assert len(glue_documents(documents, 64, 2)) == 2


def test_read_documents_reads_text_jsonl_and_parquet(tmp_path):
    import pyarrow
    import pyarrow.parquet

    (tmp_path / "b.txt").write_text("plain")
    (tmp_path / "c.jsonl").write_text('{"text": "one"}\n\n{"text": "two", "id": 3}\n')
    pyarrow.parquet.write_table(pyarrow.table({"text": ["p", "q"]}), tmp_path / "d.parquet")
    (tmp_path / "ignored.png").write_bytes(b"\x89PNG")
    found = [(d.name, d.content) for d in read_documents(Source(str(tmp_path)))]
    assert found == [
        ("b.txt", "plain"),
        ("c.jsonl:1", "one"),
        ("c.jsonl:3", "two"),
        ("d.parquet:1", "p"),
        ("d.parquet:2", "q"),
    ]


FOLDERS = [
    ("train.jsonl", "test.jsonl", "README.md", "notes.md"),
    ("train_0.txt", "train_1.txt", "my-test.txt", "val-1.txt", "protrain.txt", "contrain.test.txt"),
    ("data/train-00000-of-00002.jsonl", "data/train-00001-of-00002.jsonl", "test/a.txt",
     "data/odd.name-00000-of-00001.txt"),
    ("training/a.txt", "x/my_dev/b.txt", "valid 1/deep/er/c.txt", "evaluation/test.txt", "d.txt"),
    ("train/validation.txt", "train/a.txt", "latest/b.txt"),
    ("one.txt", "two.md", "sub/three.jsonl", "README.md", "sub/README.md", ".hidden/train.txt",
     "__cache__/test.txt"),
]  # fmt: skip


@pytest.mark.parametrize("names", FOLDERS)
def test_a_folder_has_the_splits_that_datasets_finds_in_it(tmp_path, names):
    from datasets.data_files import DataFilesDict, get_data_patterns

    for name in names:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"text": name}) if path.suffix == ".jsonl" else name)
    place = str(tmp_path)
    expected = {
        str(split): {os.path.relpath(file, tmp_path).replace(os.sep, "/") for file in files}
        for split, files in DataFilesDict.from_patterns(get_data_patterns(place), place).items()
    }
    if "one.txt" in names:  # no split at all, which datasets calls train
        assert {own.content for own in read_documents(Source(str(tmp_path)))} == expected["train"]
        with pytest.raises(InputError, match="no split train: it has none"):
            list(read_documents(Source(str(tmp_path), split="train")))
        return
    for split, files in expected.items():
        found = [own.content for own in read_documents(Source(str(tmp_path), split=split))]
        assert sorted(found) == sorted(files)
    with pytest.raises(InputError, match="no split none: ") as caught:
        list(read_documents(Source(str(tmp_path), split="none")))
    assert set(str(caught.value).partition("one of ")[2].split(", ")) == set(expected)


def test_a_title_is_no_split_and_unread_entries_are_counted(tmp_path):
    names = [f"book {k}.txt" for k in range(12)] + ["eval.txt"]
    for name in names:
        (tmp_path / name).write_text(name)
    whole, data = Source(str(tmp_path)), str(tmp_path)
    assert [own.content for own in read_documents(whole)] == sorted(names)
    (line,) = unread_files(whole)
    assert line.startswith(f"[no-split] --data {data}: all 13 files are read, though eval.txt is")
    assert "--split test reads 1 of them" in line
    asked_for = Source(data, split="test")
    assert [own.content for own in read_documents(asked_for)] == ["eval.txt"]
    (line,) = unread_files(asked_for)
    assert "the split test is read, 1 of 13 files (12 in no split)" in line
    for name in names[:-1]:
        (tmp_path / name).rename(tmp_path / f"train-{name}")
    (line,) = unread_files(whole)
    assert "the split test is read, 1 of 13 files (12 in train)" in line
    (tmp_path / "eval.txt").rename(tmp_path / "evaluation-in-detail.txt")
    for name in names[:-1]:
        (tmp_path / f"train-{name}").rename(tmp_path / name)
    assert unread_files(whole) == []
    for name in ("LICENSE.docx", "a.pdf", "b.pdf", ".hidden.pdf"):
        (tmp_path / name).write_text("not read")
    (line,) = unread_files(whole)
    assert line.startswith(
        f"[left-out] --data {data}: 3 files are not read (.docx, .pdf), only .txt"
    )
    (tmp_path / "evaluation-in-detail.txt").rename(tmp_path / "book 12.txt")
    assert unread_files(Source(str(tmp_path / "book 12.txt"))) == []


def test_a_dataset_of_save_to_disk_is_read_by_split(tmp_path):
    import datasets

    parts = {name: datasets.Dataset.from_dict({"text": [name, "x"]}) for name in ("train", "test")}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "both")
    parts["train"].save_to_disk(tmp_path / "one")
    for place, how, expected in (
        ("both", {}, "test"),
        ("both", {"default_split": "train"}, "train"),
        ("both", {"split": "train"}, "train"),
        ("one", {}, "train"),
    ):
        found = list(read_documents(Source(str(tmp_path / place), **how)))
        assert [(own.name, own.content) for own in found] == [
            (f"{place}:0", expected),
            (f"{place}:1", "x"),
        ]
    with pytest.raises(InputError, match=r"no split dev: .* of train, test"):
        list(read_documents(Source(str(tmp_path / "both"), split="dev")))
    with pytest.raises(InputError, match="no split train: it has none"):
        list(read_documents(Source(str(tmp_path / "one"), split="train")))
    (tmp_path / "one" / "data-00000-of-00001.arrow").write_bytes(b"damaged")
    with pytest.raises(InputError, match="one"):
        list(read_documents(Source(str(tmp_path / "one"))))


def test_a_split_of_data_without_splits_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    for data in (str(tmp_path / "a.txt"), documents_as_place(["text"])):
        with pytest.raises(InputError, match="no split test: it has none"):
            list(read_documents(Source(data, split="test")))


def test_a_dataset_repository_on_the_disk_is_streamed_without_the_hub(tmp_path, monkeypatch):
    """`conftest.py` fails a test that asks another machine, with or without HF_HUB_OFFLINE."""
    (tmp_path / "books").mkdir()
    card = ["---", "configs:", "- config_name: short", "  data_files:"]
    card += ["  - split: test", "    path: test.jsonl", "  - split: train", "    path: train.jsonl"]
    (tmp_path / "books" / "README.md").write_text("\n".join([*card, "---", ""]))
    for split, count in (("test", 3), ("train", 5)):
        rows = [json.dumps({"body": f"{split} {k}", "id": k}) for k in range(count)]
        (tmp_path / "books" / f"{split}.jsonl").write_text("\n".join(rows) + "\n")
    monkeypatch.chdir(tmp_path)
    found = list(read_documents(Source("books:short", column="body")))
    assert [(own.name, own.content) for own in found] == [
        (f"books:{k}", f"test {k}") for k in range(3)
    ]
    for data in ("books:short", "./books:short", f"{tmp_path}/books:short"):
        assert len(list(read_documents(Source(data, column="body", split="train")))) == 5
    with pytest.raises(InputError, match="no column text or messages; there are body, id"):
        list(read_documents(Source("books:short")))
    for wrong in (
        Source("books:short", split="nope"),
        Source("books:long"),
        Source("./books:long"),
        Source("no/such/id:x"),
    ):
        with pytest.raises(InputError, match="neither a local file nor a dataset"):
            list(read_documents(wrong))


def test_messages_go_through_the_chat_template(tmp_path):
    tokenizer = make_tokenizer(bos=True)
    row = {"messages": [{"role": "user", "content": "the fox"}]}
    (tmp_path / "m.jsonl").write_text(json.dumps(row))
    (own,) = read_documents(Source(str(tmp_path / "m.jsonl")))
    with pytest.raises(InputError, match="no chat template"):
        DocumentEncoder(tokenizer).text_of(own)
    tokenizer.chat_template = "{{ bos_token }}{% for m in messages %}[{{ m.content }}]{% endfor %}"
    encoder = DocumentEncoder(tokenizer)
    text = encoder.text_of(own)
    assert text == "<s>[the fox]"
    assert list(encoder.document("m", text, 99).ids).count(tokenizer.bos_token_id) == 1


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.jsonl", b'{"body": "x", "id": 1}\n', "no column text or messages; there are body, id"),
        ("a.jsonl", b'{"text": "x"}\n{"text"\n', "line 2: not valid JSON"),
        ("a.jsonl", b"[1]\n", "line 1: expected an object"),
        ("a.jsonl", b'{"text": 3}\n', "column text holds int"),
        ("a.txt", b"\xff\xfe\x00", "not UTF-8"),
        ("a.txt", b"caf\xe9", r"not UTF-8 text: `iconv -f latin1 -t utf-8 .*a\.txt`"),
        ("a.txt", b"a\x00b", "binary"),
        ("a.bin", b"\x80\x81", "not UTF-8"),
        ("a.parquet", b"nonsense", "not a parquet file"),
        ("empty.txt", b"", "holds only empty documents"),
        ("blank.txt", b"\n \n", "holds only empty documents"),
        ("none.jsonl", b"\n", "holds no document"),
        ("empty.jsonl", b'{"text": ""}\n{"text": " "}\n', "holds only empty documents"),
    ],
)
def test_unreadable_data_is_named(tmp_path, name, content, says):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=says) as caught:
        list(read_documents(Source(str(tmp_path / name))))
    assert name in str(caught.value)


def test_unknown_data_costs_one_request_to_the_hub(monkeypatch):
    import datasets
    import huggingface_hub

    requests = []

    def unreachable(self, name, **how):
        requests.append(name)
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", unreachable)
    monkeypatch.setattr(datasets, "load_dataset_builder", None)
    with pytest.raises(InputError, match="no file or folder here, and the hub cannot be reached"):
        list(read_documents(Source("nobody/nothing:en")))
    assert requests == ["nobody/nothing"]


def test_missing_data_files_and_columns_are_named(tmp_path):
    with pytest.raises(InputError, match="no such file"):
        list(read_documents(Source(str(tmp_path / "gone.jsonl"))))
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="no file of a known kind"):
        list(read_documents(Source(str(tmp_path / "empty"))))
    (tmp_path / "c.jsonl").write_text('{"text": "one"}\n')
    with pytest.raises(InputError, match="no column body; there are text"):
        list(read_documents(Source(str(tmp_path / "c.jsonl"), column="body")))


def test_half_of_a_surrogate_pair_becomes_a_question_mark(tokenizer, tmp_path):
    path = tmp_path / "docs.jsonl"
    path.write_text('{"text": "the quick \\ud800 fox"}\n')
    encoder = DocumentEncoder(tokenizer)
    (own,) = read_documents(Source(str(path)))
    assert encoder.text_of(own) == "the quick ? fox"
    assert len(encoder.document(own.name, encoder.text_of(own), 50)) > 3


@pytest.mark.parametrize("name", ["docs.csv", "docs.tsv"])
def test_a_table_is_not_read_as_one_long_text(tmp_path, name):
    (tmp_path / name).write_text('[{"text": "the fox"}]')
    with pytest.raises(InputError, match=f"{name}: .* convert it to jsonl"):
        list(read_documents(Source(str(tmp_path / name))))


def test_a_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfhello")
    (tmp_path / "b.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "hello"}\r\n{"text": "again"}\r\n')
    found = [document.content for document in read_documents(Source(str(tmp_path)))]
    assert found == ["hello", "hello", "again"]


def test_the_rows_of_tables_and_a_single_object_are_documents():
    import pandas
    import pyarrow

    contents = texts(3)
    frame = pandas.DataFrame({"n": [1, 2, 3], "text": contents})
    arrow = pyarrow.table({"text": contents})
    for given in (frame, frame["text"], frame.set_index("n"), arrow, arrow["text"]):
        found = read_documents(Source(Evaluate(data=given).data))
        assert [own.content for own in found] == contents
    found = read_documents(Source(documents_as_place({"body": "a text", "n": 1}), column="body"))
    assert [own.content for own in found] == ["a text"]


@pytest.mark.parametrize(
    ("written", "contents"),
    [
        ([{"text": "one"}, {"text": "two", "n": 1}], ["one", "two"]),
        (["one", "two"], ["one", "two"]),
        ({"text": "one", "n": [1, 2]}, ["one"]),
        (
            [{"messages": [{"role": "user", "content": "hi"}]}],
            [[{"role": "user", "content": "hi"}]],
        ),
    ],
)
def test_a_json_file_holds_an_array_of_documents_or_one_document(tmp_path, written, contents):
    (tmp_path / "notes.txt").write_text("a note")
    place = tmp_path / "books.json"
    place.write_text(json.dumps(written, indent=1))
    found = [own.content for own in read_documents(Source(str(place)))]
    assert found == contents
    folder = [own.content for own in read_documents(Source(str(tmp_path)))]
    assert folder == ["a note"]  # in a folder a JSON file may describe the others


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("{", "not valid JSON"),
        ("[3]", "row 1 is an int; expected a text or a row"),
        ('{"data": ["a"]}', "no column text or messages; there are data"),
        ("[]", "holds no document"),
        ("[" * 200_000, "not valid JSON"),
    ],
)
def test_a_json_file_without_documents_is_refused(tmp_path, written, said):
    place = tmp_path / "books.json"
    place.write_text(written)
    with pytest.raises(InputError, match=said):
        list(read_documents(Source(str(place))))
    place.write_text(" " * (17 << 20))
    with pytest.raises(InputError, match="has more than 16 MiB; convert it"):
        list(read_documents(Source(str(place), largest=1)))


def test_texts_that_python_holds_are_documents_like_those_of_a_file(tmp_path):
    import datasets

    contents = texts(3)
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": own, "n": 1}) + "\n" for own in contents))
    expected = [own.content for own in read_documents(Source(str(path)))]
    rows = datasets.Dataset.from_dict({"text": contents, "n": [1, 2, 3]})
    for given in (contents, tuple(contents), rows, (own for own in contents)):
        source = Source(documents_as_place(given))
        assert not source.is_streamed
        found = list(read_documents(source))
        assert [own.content for own in found] == expected
        assert found[0].name == "texts:1"
    named = Source(documents_as_place(rows.rename_column("text", "body")), column="body")
    assert [own.content for own in read_documents(named)] == expected
    with pytest.raises(InputError, match="--data texts holds no document"):
        list(read_documents(Source(documents_as_place([]))))
    with pytest.raises(InputError, match="no column text or messages"):
        list(read_documents(Source(documents_as_place([{"n": 1}]))))
    with pytest.raises(UsageError, match="--data must be a text"):
        Evaluate(data=3)
    for row, kind in ((None, "a NoneType"), (3, "an int")):
        with pytest.raises(InputError, match=f"texts:3 is {kind}; expected a text or a row"):
            list(read_documents(Source(documents_as_place(["a", "b", row]))))
    with pytest.raises(InputError, match="column text holds float"):  # pandas writes nan for None
        list(read_documents(Source(documents_as_place([{"text": math.nan}]))))
    splits = datasets.DatasetDict({"train": rows, "test": rows})
    for refused in (documents_as_place, lambda given: Evaluate(data=given)):
        with pytest.raises(
            UsageError, match=r'has train, test: give one of them, as data\["train"\]'
        ):
            refused(splits)
    assert Evaluate(data=tmp_path).data == str(tmp_path)
    assert Evaluate(data=contents).data.rows is contents
