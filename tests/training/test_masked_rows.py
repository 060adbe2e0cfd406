"""Masked language models, tuned: by the bytes that are written, and by stock's own loss."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from small_tokenizer import wrapping_tokenizer
from transformers import (
    AutoModelForMaskedLM,
    BertConfig,
    BertForMaskedLM,
    BertModel,
    RobertaConfig,
    RobertaForMaskedLM,
)

import ropext
from ropext.base.errors import UnsupportedModel, UsageError
from ropext.files.checkpoint.provenance import read_record
from ropext.options.training import Finetune
from ropext.training import finetune as preparing
from ropext.training import trainer
from ropext.training.learning import MaskedRows
from ropext.training.rows import IGNORED

pytestmark = pytest.mark.slow

CONTEXT, TARGET = 64, 256  # the self-check of the evaluation reads 48 tokens
TABLE = "embeddings.position_embeddings.weight"
SHORT = {"steps": 3, "batch_tokens": 1024, "eval_documents": 2}
KEYS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
KEYS |= {"intermediate_size": 64, "type_vocab_size": 1, "pad_token_id": 1}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Write a BERT in bfloat16 and shards, and a RoBERTa without dropout, whose first position
    reads row 2; both extended, and texts."""
    path, tokenizer = tmp_path_factory.mktemp("masked"), wrapping_tokenizer()
    torch.manual_seed(0)
    keys = KEYS | {"vocab_size": len(tokenizer)}
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    bert = BertForMaskedLM(BertConfig(max_position_embeddings=CONTEXT, **keys)).bfloat16()
    bert.save_pretrained(path / "bert", max_shard_size="200KB")
    config = RobertaConfig(max_position_embeddings=CONTEXT + 2, **keys, **still)
    RobertaForMaskedLM(config).save_pretrained(path / "roberta")
    for name, method in (("bert", "copy"), ("roberta", "linear")):
        tokenizer.save_pretrained(path / name)
        ropext.extend(path / name, path / f"{name}-long", method=method, factor=4, no_verify=True)
    words, rng = (
        np.array(["the", "quick", "brown", "fox", "jumps", "over", "lazy", "dog"]),
        np.random.default_rng(0),
    )
    rows = [{"text": " ".join(rng.choice(words, 320)) + f" {k}"} for k in range(20)]
    (path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def finetune(place, name, out, **options):
    data, long = place / "data.jsonl", place / f"{name}-long"
    return ropext.finetune(long, data, place / out, **SHORT | options)


def weights(directory):
    found = {}
    for file in sorted(directory.glob("*.safetensors")):
        found |= load_file(file)
    return found


@pytest.mark.parametrize(
    ("name", "old"),
    [("bert", [*range(CONTEXT)]), ("roberta", [0, 1, *range(2, 2 + TARGET, 4)])],
)
def test_the_new_rows_alone_are_other_bytes(place, name, old):
    out = finetune(place, name, f"{name}-tuned").output
    before, after = weights(place / f"{name}-long"), weights(out)
    assert before.keys() == after.keys()
    table = f"{name}.{TABLE}"
    for own in before.keys() - {table}:
        assert torch.equal(before[own], after[own]), own
    same = (before[table] == after[table]).all(1)
    assert same.nonzero()[:, 0].tolist() == old
    assert read_record(out).proof["rows_bit_exact"] == len(old)
    assert ropext.verify(out, against=str(place / name), deep=True).passed
    assert "AutoModelForMaskedLM.from_pretrained" in (out / "adapter" / "README.md").read_text()


def test_the_first_loss_is_stock_cross_entropy_over_all_masked_tokens_of_a_step(place):
    long, data = str(place / "roberta-long"), str(place / "data.jsonl")
    done = finetune(place, "roberta", "literal", micro_rows=1)
    prepared = preparing.prepare_finetune(long, data, Finetune(**SHORT))
    around = prepared.learning.prediction
    rows = MaskedRows(prepared.rows, prepared.encoder.tokenizer, around, 0)
    model = AutoModelForMaskedLM.from_pretrained(long)
    losses, mask = [], around.token
    for row, plain in zip([rows[k] for k in range(4)], prepared.rows, strict=False):
        wanted = [
            0,
            *plain.ids[: TARGET - 2],
            *around.after,
        ]  # the text between the special tokens
        assert len(row.ids) == TARGET
        for k in np.flatnonzero(row.labels == IGNORED):
            assert row.ids[k] == wanted[k]
        logits = model(input_ids=torch.tensor(row.ids)[None]).logits[0].log_softmax(-1)
        at = np.flatnonzero(row.labels != IGNORED)
        assert [*row.labels[at]] == [wanted[k] for k in at]
        assert 0 not in at
        assert TARGET - 1 not in at
        assert (row.ids[at] == mask).mean() > 0.5
        losses += [-float(logits[k, wanted[k]].detach()) for k in at]
    assert 0.1 < len(losses) / 4 / TARGET < 0.2
    assert done.by_step[0]["loss"] == pytest.approx(sum(losses) / len(losses), abs=1e-4)
    assert not np.array_equal(rows[0].labels, rows[1].labels)


def test_a_resumed_run_gives_the_same_bytes(place, monkeypatch):
    whole = finetune(place, "bert", "whole", save_every=1)
    step = trainer._Trainer.training_step

    def dies(self, *args, **kwargs):
        if self.state.global_step == 2:
            raise MemoryError
        return step(self, *args, **kwargs)

    monkeypatch.setattr(trainer._Trainer, "training_step", dies)
    with pytest.raises(Exception, match="out of memory"):
        finetune(place, "bert", "again", save_every=1)
    monkeypatch.undo()
    again = finetune(place, "bert", "again", save_every=1)
    assert again.by_step == whole.by_step
    first, second = weights(whole.output), weights(again.output)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_the_losses_of_a_masked_training_equal_those_of_evaluate(place):
    data = str(place / "data.jsonl")
    done = finetune(place, "roberta", "judged", evaluate=data, eval_documents=8, eval_every=1)
    found = ropext.evaluate(done.output, data=data, lengths=[CONTEXT, TARGET], max_docs=8)
    for label, own in found.results["variants"].items():
        for name in (f"tail_nll@{CONTEXT}", f"tail_nll@{TARGET}"):
            value = own["metrics"][name]["value"]
            assert done.numbers[label][name].value == pytest.approx(value, abs=1e-5)
    assert any("are pseudo-perplexities" in note for note in done.notes)
    # What a training without --steps stops by: the tokens that were masked, and no others.
    assert [own["step"] for own in done.evaluations] == [1, 2, 3]
    last = done.numbers["tuned"][f"tail_nll@{TARGET}"].value
    assert done.evaluations[-1]["held_out"] == pytest.approx(last, abs=1e-5)


def test_a_lora_leaves_the_rows_and_has_a_control(place):
    out = finetune(place, "bert", "lora", train="lora", control=True).output
    table = f"bert.{TABLE}"
    before, after = weights(place / "bert-long"), weights(out)
    assert torch.equal(after[table], before[table])
    name = "bert.encoder.layer.0.attention.self.query.weight"
    assert not torch.equal(before[name], after[name])
    numbers = json.loads((out / "training" / "numbers.json").read_text())
    assert {"base", "untuned", "tuned", "control"} <= numbers.keys()
    assert ropext.verify(out).passed


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"strategy": "pose"}, "strategy pose is for models that predict the next token"),
        ({"retrieval_share": 0.5}, "retrieval_share is for models that predict the next"),
    ],
)
def test_options_of_causal_models_are_refused(place, options, said):
    with pytest.raises(UsageError, match=said):
        finetune(place, "bert", "never", **options)


def test_keep_short_works_for_masked_models(place):
    assert finetune(place, "roberta", "short", keep_short=2).steps == 3


def test_a_masked_model_without_a_mask_token_is_refused(place, tmp_path):
    BertModel.from_pretrained(place / "bert").save_pretrained(tmp_path / "body")
    wrapping_tokenizer().save_pretrained(tmp_path / "body")
    ropext.extend(tmp_path / "body", tmp_path / "long", factor=2, no_verify=True)
    with pytest.raises(
        UnsupportedModel, match=r"has no head that predicts masked tokens .BertModel"
    ):
        ropext.finetune(tmp_path / "long", place / "data.jsonl", tmp_path / "x")
