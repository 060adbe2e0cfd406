"""The peak by which a chunk is chosen, against what torch's allocator then gives out."""

from dataclasses import replace

import pytest
import torch
from small_models import random_ids, tiny
from torch.profiler import ProfilerActivity, profile

from ropext.evaluation.forward import TokenScorer
from ropext.evaluation.reader import choose_reading_mode, shape_of

SLICE_BYTES = 4 << 20
LLAMA = {"hidden_size": 64, "intermediate_size": 256, "head_dim": 16, "vocab_size": 512}


def peak_of(work):
    """Return the most bytes that were allocated at one time."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        work()
    events = [e for e in watched.profiler.kineto_results.events() if e.name() == "[memory]"]
    out = most = 0
    for event in sorted(events, key=lambda own: own.start_ns()):
        out += event.nbytes()
        most = max(most, out)
    return most


def read(model, count, chunk=None):
    """Return (bytes measured, bytes estimated, manner) of one reading."""
    shape = shape_of(model)
    scorer = TokenScorer(model, choose_reading_mode(shape, count, 1 << 60, chunk, SLICE_BYTES))
    manner = scorer.self_check()
    ids = random_ids(count, vocabulary=shape.vocabulary)
    scorer.token_nll(ids[:32])
    return peak_of(lambda: scorer.token_nll(ids)), shape.peak_bytes(count, manner), manner


@pytest.mark.parametrize(
    ("kind", "changes", "count", "chunk"),
    [
        ("llama", {}, 4096, None),
        ("llama", {"vocab_size": 20_000}, 2048, None),
        ("llama", {"vocab_size": 20_000}, 4096, 1024),
        ("llama", {"num_hidden_layers": 6}, 4096, 512),
        # A window narrower than the input: SDPA gets a mask of all positions by all.
        ("mistral", {"sliding_window": 256}, 4096, None),
        ("mistral", {"sliding_window": 8192}, 4096, None),
        ("gemma2", {"vocab_size": 20_000, "final_logit_softcapping": 5.0}, 1024, None),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_peak_memory_is_within_a_factor_of_two(kind, changes, count, chunk, dtype):
    model = tiny(kind, dtype=dtype, **LLAMA | {"max_position_embeddings": 8192} | changes)
    measured, estimated, _ = read(model, count, chunk)
    assert measured / 2 <= estimated <= measured * 2, (measured, estimated)


def test_memory_does_not_grow_with_the_vocabulary():
    few, _, manner = read(tiny(**LLAMA | {"vocab_size": 2_000}), 1024)
    many, _, _ = read(tiny(**LLAMA | {"vocab_size": 20_000}), 1024)
    assert manner.columns is not None
    assert many < 1.05 * few


def test_chunks_are_used_only_if_the_whole_does_not_fit():
    shape = replace(shape_of(tiny(**LLAMA)), hidden=2048, feed_forward=8192)
    whole = choose_reading_mode(shape, 65536, 1 << 60, None, SLICE_BYTES)
    assert whole.chunk is None
    needed = shape.peak_bytes(65536, whole)
    chunked = choose_reading_mode(shape, 65536, needed, None, SLICE_BYTES)
    assert chunked.chunk == 8192  # 16384 tokens by 65536 are a mask of 5.4 GB
    assert shape.peak_bytes(65536, chunked) < 0.8 * needed
    # If nothing fits, it takes the smallest; for a narrow model that is the whole.
    assert choose_reading_mode(shape, 65536, 1, None, SLICE_BYTES).chunk == 1024
    narrow = shape_of(tiny(**LLAMA))
    assert choose_reading_mode(narrow, 65536, 1, None, SLICE_BYTES).chunk is None
    assert choose_reading_mode(shape, 512, 1, 1024, SLICE_BYTES).chunk is None
    assert (
        choose_reading_mode(replace(shape, device="cuda"), 512, 1 << 60, None, 1 << 30).columns
        > 1024
    )
