"""Protocols against literal re-implementations of the loops that give them their names."""

import math

import numpy as np
import pytest
import torch
from small_models import CONTEXT, VOCABULARY, random_ids, rope, tiny

from ropext.evaluation.forward import ReadingMode, TokenScorer
from ropext.evaluation.reading import read_pass, read_short, read_strided
from ropext.results.metrics import ReadText, text_values
from ropext.results.perplexity import LossStatistics, MeasuredDocuments, Reading
from ropext.results.values import Bootstrap

LENGTHS = (32, 64, 128)


def hf_documentation_loop(model, encodings, max_length, stride):
    """Run the loop of docs/source/en/perplexity.md (transformers 5), word for word without its
    progress bar."""
    seq_len = encodings.size(1)
    nll_sum = 0.0
    n_tokens = 0
    prev_end_loc = 0
    for begin_loc in range(0, seq_len, stride):
        end_loc = min(begin_loc + max_length, seq_len)
        trg_len = end_loc - prev_end_loc
        input_ids = encodings[:, begin_loc:end_loc]
        target_ids = input_ids.clone()
        target_ids[:, :-trg_len] = -100
        outputs = model(input_ids, labels=target_ids)
        neg_log_likelihood = outputs.loss
        num_valid_tokens = (target_ids != -100).sum().item()
        batch_size = target_ids.size(0)
        num_loss_tokens = num_valid_tokens - batch_size
        nll_sum += neg_log_likelihood * num_loss_tokens
        n_tokens += num_loss_tokens
        prev_end_loc = end_loc
        if end_loc == seq_len:
            break
    return float(nll_sum), n_tokens


def yarn_truncate(model, documents, max_length):
    """Run eval/perplexity.py --truncate of the YaRN repository: one window per document, then
    exp(mean(losses)).

    The document begins with its BOS, as add_start_token makes it.
    """
    nlls = []
    for ids in documents:
        labels = torch.as_tensor(ids[:max_length]).long()[None]
        nlls.append(model(labels, labels=labels).loss)
    return math.exp(torch.stack(nlls).mean().item())


def scorer_of(model):
    scorer = TokenScorer(model, ReadingMode(None, 16))
    scorer.self_check()
    return scorer


def documents_of(texts):
    hashes = tuple({c: f"{k}-{c}" for c in LENGTHS} for k in range(len(texts)))
    sizes = tuple(np.ones(len(ids), np.int64) for ids in texts)
    return MeasuredDocuments(tuple(map(str, range(len(texts)))), hashes, sizes)


@pytest.mark.parametrize(("size", "stride"), [(64, 32), (32, 16), (128, 64), (200, 100)])
def test_strided_reading_is_the_documentations_loop(size, stride):
    model, ids = tiny(), random_ids(170)
    expected = hf_documentation_loop(model, torch.as_tensor(ids).long()[None], size, stride)
    total, weight = read_strided(scorer_of(model), ids, size)
    assert weight == expected[1]
    assert total == pytest.approx(expected[0], rel=1e-5)


def test_yarn_protocol_comes_from_the_same_pass():
    model = tiny(max_position_embeddings=128, rope_parameters=rope("yarn", 2.0))
    texts = [random_ids(128, seed=k) for k in range(9)]
    scorer = scorer_of(model)
    arrays = [read_pass(scorer, ids, 128) for ids in texts]
    frame = LossStatistics(CONTEXT, LENGTHS, 16, Bootstrap())
    values = text_values(
        ReadText(frame, Reading("m", {128: arrays}), documents=documents_of(texts))
    )
    for length in LENGTHS:
        expected = yarn_truncate(model, texts, length)
        assert values[f"yarn@{length}"].value == pytest.approx(expected, rel=1e-5)


def test_short_window_is_a_forward_per_window():
    model, ids = tiny(), random_ids(160)
    found = read_short(scorer_of(model), ids, CONTEXT)
    row = torch.as_tensor(ids).long()[None]
    for token in (1, 40, 63, 64, 95, 96, 130, 159):
        # The window that scores it, computed here: the first that reaches it.
        begin = 0 if token < 64 else 32 * ((token - 64) // 32 + 1)
        logits = model(row[:, begin:token]).logits[0, -1].float()
        expected = torch.logsumexp(logits, 0) - logits[ids[token]]
        assert found[token] == pytest.approx(float(expected), abs=1e-4)


def test_a_truncated_window_begins_with_bos_as_any_program_truncates():
    """Stock, each window by itself: the BOS, then as many of the last tokens as still fit."""
    model, ids, bos = tiny(), random_ids(160), 1
    ids[0] = bos
    found = read_short(scorer_of(model), ids, CONTEXT, bos)
    plain = read_short(scorer_of(model), ids, CONTEXT)
    assert np.array_equal(found[1:64], plain[1:64])  # the first window is the unchanged text
    for token in (64, 95, 96, 130, 159):
        begin = 32 * ((token - 64) // 32 + 1)
        row = torch.as_tensor([bos, *ids[begin + 1 : token]]).long()[None]
        logits = model(row).logits[0, -1].float()
        expected = torch.logsumexp(logits, 0) - logits[ids[token]]
        assert found[token] == pytest.approx(float(expected), abs=1e-4)
    assert np.abs(found[64:] - plain[64:]).max() > 1e-3


def test_uniform_logits_have_the_vocabulary_as_perplexity_under_every_protocol():
    model = tiny()
    model.lm_head.weight.data.zero_()
    texts = [random_ids(128, seed=k) for k in range(9)]
    scorer = scorer_of(model)
    whole = [read_pass(scorer, ids, 128) for ids in texts]
    short = [read_short(scorer, ids, CONTEXT) for ids in texts]
    frame = LossStatistics(CONTEXT, LENGTHS, 16, Bootstrap())
    reading, base = Reading("m", {128: whole}), Reading("base", {128: short})
    values = text_values(ReadText(frame, reading, base, documents_of(texts)))
    for length in LENGTHS:
        for name in ("tail", "cumulative", "yarn", "in_window"):
            assert values[f"{name}@{length}"].value == pytest.approx(VOCABULARY, rel=1e-5)
        total, weight = read_strided(scorer, texts[0], length)
        assert math.exp(total / weight) == pytest.approx(VOCABULARY, rel=1e-5)
        # One byte per token here.
        assert values[f"bpb@{length}"].value == pytest.approx(math.log2(VOCABULARY), rel=1e-5)
    assert values["short_tax"].value == pytest.approx(0, abs=1e-6)
