"""A sentence encoder after `extend`, read by sentence-transformers itself (`.ci/slow encoders`)."""

import importlib.util

import numpy as np
import pytest
import torch
from small_tokenizer import wrapping_tokenizer
from transformers import BertConfig, BertModel

import ropext

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("sentence_transformers") is None,
    reason="sentence-transformers is not here",
)
CONTEXT = 64
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "lazy", "dog"]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Write a BERT with mean pooling, as sentence-transformers itself saves one."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    path, tokenizer = tmp_path_factory.mktemp("encoder"), wrapping_tokenizer()
    tokenizer.pad_token = tokenizer.sep_token
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = BertConfig(
        vocab_size=len(tokenizer), intermediate_size=64, max_position_embeddings=CONTEXT, **sizes
    )
    BertModel(config).save_pretrained(path / "bert")
    tokenizer.save_pretrained(path / "bert")
    read = Transformer(str(path / "bert"), max_seq_length=CONTEXT)
    pooling = Pooling(read.get_embedding_dimension(), pooling_mode="mean")
    SentenceTransformer(modules=[read, pooling], device="cpu").save(str(path / "base"))
    return path / "base"


@pytest.mark.parametrize("method", ["copy", "linear"])
def test_an_extended_sentence_encoder_reads_to_its_new_length(base, tmp_path, method):
    from sentence_transformers import SentenceTransformer

    out = ropext.extend(base, tmp_path / "out", method=method, factor=4).output
    old, new = (SentenceTransformer(str(path), device="cpu") for path in (base, out))
    assert (old.max_seq_length, new.max_seq_length) == (CONTEXT, 4 * CONTEXT)
    text = " ".join(np.random.default_rng(0).choice(WORDS, 400))
    changed = text[:700] + "dog dog dog" + text[711:]  # beyond the old length, not the new one
    assert CONTEXT < len(new.tokenizer(text[:700])["input_ids"]) < 4 * CONTEXT - 8
    assert np.array_equal(old.encode(text), old.encode(changed))
    assert not np.allclose(new.encode(text), new.encode(changed), atol=1e-6)
    short = " ".join(WORDS)
    assert np.array_equal(old.encode(short), new.encode(short)) == (method == "copy")
