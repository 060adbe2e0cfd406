"""How ropext counts a prompt if the server does not: by a tokenizer, or by the server's usage."""

import pytest
from fake_server import TEMPLATE, Fake, serving, words

from ropext.base.errors import InputError
from ropext.endpoint.counting import counting_of
from ropext.endpoint.remote_model import RemoteModel
from ropext.endpoint.server import server_at
from ropext.endpoint.vocabulary import tokenizer_at

TEXT = "The sky is blue. " * 100


def port_at(url: str) -> RemoteModel:
    return RemoteModel(server_at(url), "fake", None)


def test_the_servers_own_count_is_exact() -> None:
    with serving(Fake()) as url:
        counting = counting_of(port_at(url), None)
        assert counting.is_exact
        assert counting.of_kind(TEXT)(TEXT) == len(words(TEXT)) + TEMPLATE


def test_counts_by_usage_are_interpolated_linearly() -> None:
    with serving(Fake(counts=False)) as url:
        counting = counting_of(port_at(url), None)
        count = counting.of_kind(TEXT)
        longer = TEXT * 20
        assert not counting.is_exact
        assert count(longer) == pytest.approx(len(words(longer)) + TEMPLATE, rel=0.01)


def test_a_server_without_count_and_usage_is_reported() -> None:
    with serving(Fake(counts=False, usage=lambda read: None)) as url:
        counting = counting_of(port_at(url), None)
        with pytest.raises(InputError, match="neither counts tokens nor tells the usage"):
            counting.of_kind(TEXT)


def test_without_a_chat_template_the_message_names_api_completions() -> None:
    with serving(Fake(counts=False, template=False)) as url:
        counting = counting_of(port_at(url), None)
        with pytest.raises(InputError, match=r"no chat template.*give --api completions"):
            counting.of_kind(TEXT)


def test_a_tokenizer_counts_the_text_and_usage_the_template(tmp_path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {"[UNK]": 0} | {word: 1 + at for at, word in enumerate(sorted({*words(TEXT)}))}
    coder = Tokenizer(models.WordLevel(vocabulary, "[UNK]"))
    coder.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    coder.save(str(tmp_path / "tokenizer.json"))
    with serving(Fake(counts=False)) as url:
        count = counting_of(port_at(url), str(tmp_path)).of_kind(TEXT)
    assert count(TEXT) == len(words(TEXT)) + TEMPLATE


def test_a_gguf_counts_with_its_vocabulary(tmp_path) -> None:
    """The bundled model's own tokenizer, which splits as GPT-2's, is the truth."""
    from gguf import GGUFWriter
    from tokenizers import Tokenizer

    from ropext.base.bundled import MODELS

    stock = MODELS["ropext://demo"] / "tokenizer.json"
    coder = Tokenizer.from_file(str(stock))
    ranks = coder.get_vocab()
    import json

    merges = json.loads(stock.read_text("utf-8"))["model"]["merges"]
    writer = GGUFWriter(tmp_path / "words.gguf", "llama")
    writer.add_token_list(sorted(ranks, key=lambda token: ranks[token]))
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    text = "The key of anchor is 4711. What is the key of anchor?"
    wanted = len(coder.encode(text, add_special_tokens=False).ids)
    assert tokenizer_at(str(tmp_path / "words.gguf"))(text) == pytest.approx(wanted, abs=2)


def test_a_tokenizer_that_truncates_counts_the_whole_text(tmp_path) -> None:
    from tokenizers import Tokenizer

    from ropext.base.bundled import MODELS

    coder = Tokenizer.from_file(str(MODELS["ropext://demo"] / "tokenizer.json"))
    whole = len(coder.encode(TEXT, add_special_tokens=False).ids)
    coder.enable_truncation(8)
    coder.save(str(tmp_path / "tokenizer.json"))
    assert tokenizer_at(str(tmp_path))(TEXT) == whole
