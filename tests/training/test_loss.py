"""The sliced loss against stock's own, and the mask that pose needs."""

import numpy as np
import pytest
import torch
from tiny_llama import SHAPE, VOCABULARY, new_llama

from ropext.evaluation.corpus import Document
from ropext.training import loss
from ropext.training.rows import PoseRows, RowCollator, TrainingRow, TrainingRows


def gradients(model, **inputs):
    model.zero_grad()
    value = model(**inputs).loss
    value.backward()
    return float(value.detach()), {name: p.grad.clone() for name, p in model.named_parameters()}


def batch(rows=3, length=40):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(4, VOCABULARY, (rows, length), generator=generator)
    labels = ids.clone()
    labels[0, 5:9] = -100
    return {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}


@pytest.mark.parametrize("tied", [False, True])
def test_loss_and_gradients_are_those_of_the_models_own_forward(monkeypatch, tied):
    # 3 * 40 tokens in slices of 16: several, the last one shorter.
    monkeypatch.setattr(loss, "slice_tokens", lambda vocabulary: 16)
    model = new_llama(tie_word_embeddings=tied)
    own, own_gradients = gradients(model, **batch())
    assert loss.use_sliced_loss(model) is None
    ours, our_gradients = gradients(model, **batch())
    assert ours == pytest.approx(own, rel=1e-6)
    for name, gradient in own_gradients.items():
        assert torch.allclose(our_gradients[name], gradient, atol=1e-7, rtol=1e-5), name


def test_the_loss_of_128k_tokens_in_bfloat16_is_added_up_in_float32(monkeypatch):
    # As many slices as a vocabulary of 128k has, whose sum bfloat16 cannot count up to.
    monkeypatch.setattr(loss, "slice_tokens", lambda vocabulary: 128)
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(64, 16, generator=generator), torch.zeros(64)
    labels = torch.randint(0, 64, (2**17,), generator=generator)
    hidden = 0.2 * weight[labels] + 0.3 * torch.randn(2**17, 16, generator=generator)
    rounded = [own.bfloat16().requires_grad_() for own in (hidden, weight, bias)]
    exact = [own.detach().double().requires_grad_() for own in rounded]
    found = loss.sliced_cross_entropy(*rounded, labels)
    logits = torch.nn.functional.linear(*exact)
    truth = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
    assert float(found.detach() / truth.detach()) == pytest.approx(1, abs=1e-3)
    found.backward()
    truth.backward()
    for ours, own in zip(rounded, exact, strict=True):
        assert float((ours.grad - own.grad).norm() / own.grad.norm()) < 0.01


def test_the_number_of_tokens_of_the_whole_step_divides():
    model = new_llama()
    inputs = batch() | {"num_items_in_batch": torch.tensor(400)}
    own = float(model(**inputs).loss.detach())
    loss.use_sliced_loss(model)
    assert float(model(**inputs).loss.detach()) == pytest.approx(own, rel=1e-6)


def test_no_logits_are_made():
    model = new_llama()
    loss.use_sliced_loss(model)
    out = model(**batch())
    assert out.logits is None
    assert model(input_ids=batch()["input_ids"]).logits.shape == (3, 40, VOCABULARY)


def test_families_that_scale_or_cap_their_logits_keep_their_own_loss():
    from transformers import CohereConfig, CohereForCausalLM, Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(0)
    for kind, config in ((Gemma2ForCausalLM, Gemma2Config), (CohereForCausalLM, CohereConfig)):
        model = kind(config(**SHAPE))
        assert loss.use_sliced_loss(model) == "it scales or caps its logits"
        assert "forward" not in vars(model)
    # The same family without its cap is sliced: the logits decide, not the family.
    model = Gemma2ForCausalLM(Gemma2Config(**SHAPE | {"final_logit_softcapping": None}))
    assert loss.use_sliced_loss(model) is None


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_the_second_chunk_of_a_pose_row_sees_the_first(attention):
    model = new_llama()
    model.set_attn_implementation(attention)
    row = TrainingRows([Document(np.arange(300) % 50 + 4)], PoseRows(16, 64), 1, seed=0)[0]
    jump = int(np.flatnonzero(~row.scored)[0])
    assert np.diff(row.positions).max() > 1
    inputs = RowCollator(padding=0)([row])
    inputs.pop("labels")
    inputs["use_cache"] = False  # as in training; a cache would hide the trap

    def second_chunk(change_first):
        ids = inputs["input_ids"].clone()
        if change_first:
            ids[:, :jump] = 60
        with torch.no_grad():
            return model(**inputs | {"input_ids": ids}).logits[:, jump:]

    assert float((second_chunk(True) - second_chunk(False)).abs().max()) > 1e-3
    # The trap: without the mask transformers takes the jump for the border of another document.
    inputs["attention_mask"] = None
    assert torch.equal(second_chunk(True), second_chunk(False))


def test_the_probe_tells_joined_chunks_from_isolated_ones():
    model = new_llama()
    assert loss.chunks_are_joined(model, 100)
    forward = model.forward
    model.forward = lambda attention_mask=None, **inputs: forward(**inputs)
    assert not loss.chunks_are_joined(model, 100)


def test_the_collator_pads_at_the_end_and_masks_the_padding():
    rows = [
        TrainingRow(np.arange(5), np.arange(5), np.ones(5, bool)),
        TrainingRow(np.arange(3) + 7, np.array([0, 9, 10]), np.array([True, False, True])),
    ]
    inputs = RowCollator(padding=63)(rows)
    assert inputs["input_ids"].tolist() == [[0, 1, 2, 3, 4], [7, 8, 9, 63, 63]]
    assert inputs["labels"].tolist() == [[0, 1, 2, 3, 4], [7, -100, 9, -100, -100]]
    assert inputs["attention_mask"].tolist() == [[1] * 5, [1, 1, 1, 0, 0]]
    assert inputs["position_ids"].tolist() == [[0, 1, 2, 3, 4], [0, 9, 10, 0, 0]]


def test_labels_that_were_shifted_before_a_row_was_shared_win_over_the_others():
    """Context parallelism gives each process a piece of the row, and of labels shifted before."""
    model = new_llama()
    inputs = batch()
    own = float(model(**inputs).loss.detach())
    loss.use_sliced_loss(model)
    shifted = loss.next_token_labels(inputs["labels"])
    again = model(**inputs | {"labels": inputs["input_ids"] * 0, "shift_labels": shifted}).loss
    assert float(again.detach()) == pytest.approx(own, rel=1e-6)
