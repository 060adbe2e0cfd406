"""Texts, templates and tokenizers that are made to hang or to fill the memory: a sentence each."""

import http.server
import json
import os
import subprocess
import sys
import threading

import pytest
from small_tokenizer import make_tokenizer

from ropext.base.errors import InputError
from ropext.evaluation.corpus import (
    DocumentEncoder,
    RawDocument,
    Source,
    Wanted,
    choose_documents,
    read_documents,
)
from ropext.files.checkpoint import open_snapshot
from ropext.models import sandbox
from ropext.models.tokenizer import load_tokenizer

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="FIFOs, devices, limits on addresses")
MIB = 1 << 20


def bomb(path, size, rows, **how):
    """Write a parquet of some kilobytes in which each row is the same long text."""
    import pyarrow
    import pyarrow.parquet

    text = pyarrow.DictionaryArray.from_arrays(
        pyarrow.array([0] * rows), pyarrow.array(["a" * size])
    )
    limit = {"store_schema": False, "dictionary_pagesize_limit": 1 << 30}
    pyarrow.parquet.write_table(
        pyarrow.table({"text": text}), path, compression="zstd", **limit, **how
    )


def lying(path):
    """Write a bomb whose footer claims that it is small."""
    bomb(path, 110 * MIB, 70)
    data = path.read_bytes()
    true, said = (varint(size) for size in (110 * MIB + 55, MIB))
    said = varint(MIB)
    assert data.count(true)
    path.write_bytes(data.replace(true, said))


def varint(number):
    """Encode an integer as parquet's footer (Thrift's compact protocol) does."""
    out, number = b"", number * 2
    while number > 127:
        out, number = out + bytes([number & 127 | 128]), number >> 7
    return out + bytes([number])


def sparse(path):
    with path.open("wb") as file:
        file.truncate(60 << 30)


def lines(path, size):
    path.write_text(json.dumps({"text": "a" * size}))


DATA = {
    "bomb.parquet": (lambda path: bomb(path, 110 * MIB, 70), "more than 64 MiB"),
    "many.parquet": (lambda path: bomb(path, 60 * MIB, 40), None),
    "liar.parquet": (lying, "more than 64 MiB"),
    "sparse.txt": (sparse, "binary"),
    "sparse.jsonl": (sparse, "line 1 has more than 64 MiB"),
    "fifo.txt": (lambda path: os.mkfifo(path), "not a regular file"),
    "fifo.jsonl": (lambda path: os.mkfifo(path), "not a regular file"),
    "fifo.parquet": (lambda path: os.mkfifo(path), "not a regular file"),
    "zero.txt": (lambda path: path.symlink_to("/dev/zero"), "not a regular file"),
    "long.txt": (lambda path: path.write_text("é" * 40 * MIB, "utf-8"), "more than 64 MiB"),
    "long.jsonl": (lambda path: lines(path, 129 * MIB), "line 1 has more than 64 MiB"),
}
READ = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
from ropext.evaluation.corpus import Source, read_documents
from ropext.base.errors import InputError
try:
    print(sum(len(own.content) for own in read_documents(Source(sys.argv[1]))))
except InputError as error:
    print(error)
"""


@LINUX
@pytest.mark.needs("mkfifo")
@pytest.mark.parametrize("name", DATA)
def test_data_that_would_hang_or_fill_the_memory(tmp_path, name):
    """Read in two gigabytes of addresses, Python and pyarrow among them."""
    make, says = DATA[name]
    make(tmp_path / name)
    words = [sys.executable, "-c", READ, str(tmp_path / name)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert done.stderr == ""
    assert (says or str(60 * MIB * 40)) in done.stdout
    assert name in done.stdout or says is None
    assert done.stdout.count("\n") == 1


def test_the_limits_on_bytes_are_raised_by_one_option(tmp_path, monkeypatch):
    lines(tmp_path / "long.jsonl", 2 * MIB)
    with pytest.raises(InputError, match="raise --max-document-mib"):
        list(read_documents(Source(str(tmp_path / "long.jsonl"), largest=1)))
    assert len(list(read_documents(Source(str(tmp_path / "long.jsonl"), largest=2)))) == 1
    row = json.dumps({"text": "a" * (MIB // 2)})
    (tmp_path / "many.jsonl").write_text("\n".join([row] * 5))
    monkeypatch.setattr("ropext.evaluation.corpus.sources.PER_FILE", 2)
    with pytest.raises(InputError, match=r"many.jsonl has more than 2 MiB of text"):
        list(read_documents(Source(str(tmp_path / "many.jsonl"), largest=1)))
    assert len(list(read_documents(Source(str(tmp_path / "many.jsonl"), largest=2)))) == 5


def test_a_stream_without_an_end_is_read_until_there_is_enough():
    def endless():
        for number in range(10**9):
            yield RawDocument(str(number), f"{number} the quick brown fox " * 9)

    wanted = Wanted((16, 32), True, 4, streamed=True)
    assert (
        len(choose_documents(endless(), DocumentEncoder(make_tokenizer()), wanted).documents) == 4
    )


def test_documents_to_evaluate_a_training_on_are_drawn_from_a_stream_too(monkeypatch):
    from ropext.options.training import Finetune
    from ropext.training import data

    def endless(source):
        assert source.is_streamed
        for number in range(5_000):
            yield RawDocument(str(number), f"{number} the quick brown fox " * 9)
        raise AssertionError("all of it was read")

    monkeypatch.setattr("ropext.evaluation.corpus.selection.read_documents", endless)
    nothing = data.TrainingData((), (), 0)
    options = Finetune(evaluate="org/endless", eval_documents=2)
    encoder = DocumentEncoder(make_tokenizer())
    assert len(data.judging_documents(nothing, options, encoder, 32)) == 2


TEMPLATES = {
    "{% for i in range(10**12) %}x{% endfor %}": "OverflowError: Range too big",
    "{% for i in range(99999) %}" * 4 + "{% endfor %}" * 4: "more than 2 seconds",
    "{{ 9 ** (9 ** 9) }}": "more than 2 seconds",
    "{% for i in range(70000) %}{{ 'x' * 1000 }}{% endfor %}": "makes 70,000,000 characters",
    "{{ 'x' * 10 ** 11 }}": "MemoryError",
    "{{ messages.__class__.__mro__[1].__subclasses__() }}": "SecurityError",
    "{{ raise_exception('roles must alternate') }}": "TemplateError: roles must alternate",
    "{% for": "TemplateSyntaxError",
}


@pytest.mark.parametrize("template", TEMPLATES)
@LINUX
def test_a_template_that_never_ends_or_leaves_its_sandbox(template, monkeypatch):
    monkeypatch.setattr(sandbox, "SECONDS", 2)
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    encoder, talk = DocumentEncoder(tokenizer), [{"role": "user", "content": "the fox"}]
    with pytest.raises(InputError, match="chat template fails") as caught:
        encoder.text_of(RawDocument("talk", talk))
    assert TEMPLATES[template] in str(caught.value)
    assert len(str(caught.value)) < 500
    # The next one is rendered as if nothing had been.
    tokenizer.chat_template = "{{ bos_token }}{{ messages[0].content }}"
    assert encoder.text_of(RawDocument("talk", talk)) == "<s>the fox"


def test_an_interrupted_answer_is_not_taken_for_the_next(monkeypatch):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ messages[0].content }}"
    encoder = DocumentEncoder(tokenizer)
    assert encoder.converse([{"role": "user", "content": "one"}]) == "one"

    def interrupt(text):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(sandbox.json, "loads", interrupt)
        with pytest.raises(KeyboardInterrupt):
            encoder.converse([{"role": "user", "content": "two"}])
    assert encoder.converse([{"role": "user", "content": "three"}]) == "three"


def doubling(times, letter="a"):
    from tokenizers import normalizers

    tokenizer = make_tokenizer()
    twice = [normalizers.Replace(letter, 2 * letter) for _ in range(times)]
    tokenizer.backend_tokenizer.normalizer = normalizers.Sequence(twice)
    return tokenizer


@LINUX
@pytest.mark.parametrize("letter", ["a", "\N{ALCHEMICAL SYMBOL FOR GOLD}"])
@pytest.mark.parametrize(
    ("times", "says"), [(40, "takes more than 5 seconds or 2 GiB"), (12, "tokens of")]
)
def test_a_tokenizer_that_doubles_a_text_many_times_is_refused(
    tmp_path, monkeypatch, times, says, letter
):
    monkeypatch.setattr(sandbox, "SECONDS", 5)
    monkeypatch.setattr(sandbox, "MEMORY", 2 << 30)
    doubling(times, letter).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(InputError, match=r"tokenizer.json cannot be used") as caught:
        load_tokenizer(open_snapshot(tmp_path), False)
    assert says in str(caught.value)


@pytest.mark.parametrize("has_file", [False, True])
def test_a_tokenizer_config_with_a_thousand_million_extra_ids_is_refused(
    tmp_path, monkeypatch, has_file
):
    """Sixty bytes made a list of a thousand million names, in this very process."""
    monkeypatch.setattr(sandbox, "SECONDS", 1)
    monkeypatch.setattr(sandbox, "SECONDS_A_MEGABYTE", 0)
    if has_file:
        doubling(0, "a").save_pretrained(tmp_path)
    told = {"tokenizer_class": "ByT5Tokenizer", "extra_ids": 10**9}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(told))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(InputError, match=r"the numbers in tokenizer_config\.json it takes more"):
        load_tokenizer(open_snapshot(tmp_path), False)


def test_a_tokenizer_of_the_usual_kind_is_used(tmp_path):
    doubling(2).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert load_tokenizer(open_snapshot(tmp_path), False).encode("a", add_special_tokens=False)


def test_a_column_of_images_is_not_opened(tmp_path):
    """A row of somebody's dataset may name any path, which decoding its image would open."""
    import datasets

    place = tmp_path / "data"
    image = {"bytes": None, "path": str(tmp_path / "nowhere.png")}
    words = datasets.Value("string")
    types = datasets.Features(
        {"text": words, "image": {"bytes": datasets.Value("binary"), "path": words}}
    )
    rows = datasets.Dataset.from_list([{"text": "a text", "image": image}], features=types)
    rows.save_to_disk(str(place))
    about = json.loads((place / "dataset_info.json").read_text())
    about["features"]["image"] = {"_type": "Image"}
    (place / "dataset_info.json").write_text(json.dumps(about))
    with pytest.raises(FileNotFoundError):  # as `datasets` reads it
        datasets.load_from_disk(str(place))[0]
    documents = list(read_documents(Source(str(place))))
    assert [document.content for document in documents] == ["a text"]


ROW = json.dumps({"text": "A text of the folder itself."})
# What leads out of a dataset repository on the disk: the lines of its card, the words of the error.
CARDS = {
    "absolute": ("data_files: {outside}", "a file outside of it"),
    "relative": ("data_files: ../outside.txt", "a file outside of it"),
    "split": ("data_files: [{{split: test, path: {outside}}}]", "a file outside of it"),
    "address": ("data_files: {address}", "names an address"),
    "escaped": ('data_files: "{escaped}"', "names an address"),
    "link": ("data_files: link.txt", "is a link to"),
    "code": ("data_files: own.jsonl", "no longer supported"),
}


@pytest.mark.parametrize("name", CARDS)
@LINUX
def test_a_dataset_on_the_disk_that_leads_out_of_its_folder(tmp_path, name):
    asked = []

    class Canary(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_error(404)

        do_HEAD = do_GET

    (tmp_path / "outside.txt").write_text("The secret of the owner.")
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "own.jsonl").write_text(ROW)
    if name == "link":
        (folder / "link.txt").symlink_to(tmp_path / "outside.txt")
    if name == "code":
        (folder / "data.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Canary) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/x.jsonl"
        line, words = CARDS[name]
        places = {"outside": tmp_path / "outside.txt", "address": address}
        line = line.format(**places, escaped=address.replace("/", "\\x2f"))
        (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: own\n  {line}\n---\n")
        with pytest.raises(InputError, match=words):
            list(read_documents(Source(f"{folder}:own", split="train")))
        server.shutdown()
    assert asked == []
    assert not (tmp_path / "ran").exists()


def test_a_dataset_on_the_disk_with_a_card_is_read(tmp_path):
    (tmp_path / "own.jsonl").write_text(ROW)
    card = (
        "---\nconfigs:\n- config_name: own\n  data_files: '*.jsonl'\n---\nSee https://a.example\n"
    )
    (tmp_path / "README.md").write_text(card)
    (read,) = read_documents(Source(f"{tmp_path}:own", split="train"))
    assert read.content == "A text of the folder itself."


@LINUX
@pytest.mark.parametrize("kind", ["image", "audio"])
def test_a_text_that_is_an_image_or_a_sound_is_not_opened(tmp_path, kind):
    """Opening the FIFO would hang."""
    os.mkfifo(tmp_path / "fifo")
    data = tmp_path / "data"
    data.mkdir()
    row = {"text": {"bytes": None, "path": str(tmp_path / "fifo")}}
    (data / "own.jsonl").write_text(json.dumps(row))
    info = f"dataset_info:\n- config_name: own\n  features:\n  - name: text\n    dtype: {kind}\n"
    configs = "configs:\n- config_name: own\n  data_files: own.jsonl\n"
    (data / "README.md").write_text(f"---\n{configs}{info}---\n")
    with pytest.raises(InputError, match=f"column text holds {kind.title()}"):
        list(read_documents(Source(f"{data}:own", split="train")))
