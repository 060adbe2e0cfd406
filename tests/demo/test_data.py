"""The bundled documents, the split they come from, and the tokenizer: what evaluation relies on."""

import gzip
import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

import ropext
from scripts.demo_checkpoint import sources
from scripts.demo_checkpoint.tokenizer import CachedEncoder, train_tokenizer

DEMO = Path(ropext.__file__).parent / "demo"
DATA = DEMO / "data"


def bundled(name):
    return [json.loads(line) for line in (DATA / f"{name}.jsonl").read_text().splitlines()]


def test_held_out_documents_have_no_sibling_in_training():
    held_out = {row["path"].split("/")[0].removesuffix(".py") for row in bundled("held-out")}
    tuning = {row["path"].split("/")[0].removesuffix(".py") for row in bundled("tuning")}
    assert held_out <= set(sources.HELD_OUT)
    assert not tuning & set(sources.HELD_OUT)
    training, others = sources.split(sources.read_documents(sources.library()))
    assert not {d.package for d in training} & {d.package for d in others}
    assert held_out <= {d.package for d in others}


def test_held_out_text_is_not_in_training_under_another_name():
    training, _ = sources.split(sources.read_documents(sources.library()))
    seen = {line.strip() for d in training for line in d.text.splitlines()}
    for row in bundled("held-out"):
        lines = [line.strip() for line in row["text"].splitlines() if len(line.strip()) > 20]
        assert sum(line in seen for line in lines) < 0.3 * len(lines), row["path"]


def test_documents_are_small_together_and_carry_their_licence():
    for name in ("held-out", "tuning"):
        assert len(gzip.compress((DATA / f"{name}.jsonl").read_bytes())) <= 200_000
    assert "PYTHON SOFTWARE FOUNDATION LICENSE" in (DATA / "LICENSE-PSF.txt").read_text()
    assert "Python Software Foundation" in (DATA / "README.md").read_text()


def test_documents_reach_eight_times_the_trained_context():
    tokenizer = Tokenizer.from_file(str(DEMO / "checkpoint" / "tokenizer.json"))
    context = json.loads((DEMO / "checkpoint" / "config.json").read_text())
    context = context["max_position_embeddings"]
    lengths = [len(tokenizer.encode(row["text"]).ids) for row in bundled("held-out")]
    assert len(lengths) >= 16
    assert min(lengths) >= 8 * context
    assert min(len(tokenizer.encode(row["text"]).ids) for row in bundled("tuning")) >= 4 * context


@pytest.fixture
def small_library(tmp_path):
    files = {
        "email/message.py": "a message\nwith lines that are long enough to count\n",
        "email/test/test_message.py": "skipped, a test of a held-out package\n",
        "json/decoder.py": "a decoder\nwith other lines, long enough to count too\n",
        "json/copied.py": "a decoder\nwith other lines, long enough to count too\n",
        "_argparse.py": "a private sibling of a held-out module, held out with it\n",
        "_sysconfigdata_linux.py": "paths of the machine it was built on\n",
        "site-packages/other.py": "somebody else's code, on this machine only\n",
        "empty.py": "\n",
        "zipapp.py": "café in the wrong encoding, which is read nevertheless\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="latin-1")
    return tmp_path


def test_split_divides_a_small_library_by_path(small_library):
    training, held_out = sources.split(sources.read_documents(small_library))
    assert [d.path for d in training] == ["json/copied.py", "zipapp.py"]  # path order, one of two
    assert [d.path for d in held_out] == ["_argparse.py", "email/message.py"]
    assert training[1].text.startswith("café")


def test_tokenizer_gives_every_digit_alone_and_its_text_back():
    text = "def f(x):\n    return 12345 * x  # naïve\n" * 50
    tokenizer = train_tokenizer([text])
    encoder = CachedEncoder(tokenizer)
    assert tokenizer.convert_ids_to_tokens(encoder.encode("12345")) == list("12345")
    assert tokenizer.decode(encoder.encode(text)) == text
    assert encoder.encode("naïve") == encoder.encode("naïve")
    assert (tokenizer.eos_token_id, tokenizer.bos_token_id) == (0, None)
    assert tokenizer("x")["input_ids"] == encoder.encode("x")  # nothing is added
