"""A learned position table is lengthened: rows by hand-written numpy, the rest by its bytes."""

import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import ropext
from ropext.base.errors import InputError, ProofFailed, UnsupportedModel, UsageError
from ropext.files.inspecting import plan_config
from ropext.options.extend import Extend
from ropext.pipeline.public import push
from ropext.scaling.tables import METHODS

KEYS = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "vocab_size": 99,
}
TABLE = "roberta.embeddings.position_embeddings.weight"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Write a tiny RoBERTa in two shards, with the further files of sentence-transformers and
    exporters."""
    from transformers import RobertaConfig, RobertaForMaskedLM

    torch.manual_seed(0)
    directory = tmp_path_factory.mktemp("tables") / "base"
    model = RobertaForMaskedLM(RobertaConfig(**KEYS, max_position_embeddings=34)).bfloat16()
    model.save_pretrained(directory, max_shard_size="8KB")
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    shard = directory / index["weight_map"][TABLE]
    held = load_file(shard)
    held["roberta.embeddings.position_ids"] = torch.arange(34)[None]  # of transformers before 4.31
    save_file(held, shard, {"format": "pt"})
    index["weight_map"]["roberta.embeddings.position_ids"] = shard.name
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    (directory / "tokenizer_config.json").write_text('{"model_max_length": 32}')
    (directory / "sentence_bert_config.json").write_text('{"max_seq_length": 32}')
    (directory / "onnx").mkdir()
    (directory / "onnx" / "model.onnx").write_bytes(b"graph")
    (directory / "pytorch_model.bin").write_bytes(b"pickle")
    (directory / "tf_model.h5").write_bytes(b"keras")
    return directory


@pytest.fixture(scope="module")
def grown(base, tmp_path_factory):
    return ropext.extend(base, tmp_path_factory.mktemp("grown") / "out", method="linear", factor=4)


def weights(directory):
    out = {}
    for file in sorted(directory.glob("*.safetensors")):
        out |= load_file(file)
    return out


def copy_of(base, place):
    shutil.copytree(base, place)
    return place


def test_rows_are_those_of_numpy_and_everything_else_is_the_bases(base, grown):
    old, new = weights(base), weights(grown.output)
    assert set(old) - set(new) == {"roberta.embeddings.position_ids"}
    rows = old[TABLE].float().numpy()
    assert (new[TABLE][:2] == old[TABLE][:2]).all()
    assert (new[TABLE][2::4] == old[TABLE][2:]).all()
    wanted = np.stack([np.interp(np.arange(125) / 4, np.arange(32), c) for c in rows[2:].T], 1)
    rest = [rows[33] + (rows[33] - rows[32]) * k / 4 for k in (1, 2, 3)]
    wanted = torch.from_numpy(np.concatenate([wanted, rest])).to(torch.bfloat16)
    assert (new[TABLE][2:] == wanted).all()
    for name in set(new) - {TABLE}:
        assert torch.equal(old[name], new[name])


def test_lengths_are_raised_and_stale_copies_are_left_out_by_name(grown):
    out = grown.output
    assert json.loads((out / "config.json").read_text())["max_position_embeddings"] == 130
    assert json.loads((out / "tokenizer_config.json").read_text())["model_max_length"] == 128
    assert json.loads((out / "sentence_bert_config.json").read_text())["max_seq_length"] == 128
    assert {"onnx/", "pytorch_model.bin", "tf_model.h5"} <= set(grown.written.left)
    assert any("position_ids" in note for note in grown.written.notes)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(weights(out))
    assert grown.written.proof["rows_bit_exact"] == 34
    assert "reads 128 tokens" in grown.written.proof["forward"]
    assert "short tax of linear" in (out / "README.md").read_text()


def test_stock_reads_every_position_of_a_grown_table_without_ropext(grown):
    code = (
        "import sys; sys.modules['ropext'] = None\n"
        "import torch, transformers\n"
        f"m = transformers.AutoModelForMaskedLM.from_pretrained({str(grown.output)!r})\n"
        "out = m(input_ids=16 + torch.arange(128)[None] % 80).logits\n"
        "assert out.shape == (1, 128, 99) and torch.isfinite(out).all()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_copy_leaves_short_inputs_bit_equal(base, tmp_path):
    from transformers import AutoModelForMaskedLM

    out = ropext.extend(base, tmp_path / "out", method="copy", target=80, no_verify=True).output
    ids = 16 + torch.arange(32)[None] % 80
    models = [AutoModelForMaskedLM.from_pretrained(place).eval() for place in (base, out)]
    with torch.no_grad():
        assert torch.equal(*(model(input_ids=ids).logits for model in models))
    rows = weights(out)[TABLE]
    assert len(rows) == 82
    assert torch.equal(rows[2:34], rows[34:66])
    assert torch.equal(rows[2:18], rows[66:])


def test_verify_passes_and_finds_a_row_or_a_tensor_that_was_changed(base, grown, tmp_path):
    assert ropext.verify(grown.output, against=str(base), deep=True).passed
    bad = copy_of(grown.output, tmp_path / "bad")
    file = next(f for f in bad.glob("*.safetensors") if TABLE in load_file(f))
    held = load_file(file)
    held[TABLE][6] += 1
    save_file(held, file, {"format": "pt"})
    found = ropext.verify(bad, against=str(base))
    assert any("is not the old row 1" in check.sentence for check in found.failures())
    held = load_file(grown.output / file.name)
    held[TABLE][7] += 7  # a row between two old ones
    save_file(held, file, {"format": "pt"})
    config = json.loads((bad / "config.json").read_text()) | {"hidden_act": "relu"}
    (bad / "config.json").write_text(json.dumps(config))
    other = "config.json: hidden_act is 'relu', the base's 'gelu'"
    found = ropext.verify(bad, against=str(base), deep=True)
    said = f"verification: row 5 of {TABLE} differs from the interpolation of the old rows"
    assert {check.sentence for check in found.failures()} >= {said, other}
    assert other in [check.sentence for check in ropext.verify(bad).failures()]
    config = json.loads((bad / "config.json").read_text()) | {"max_position_embeddings": 131}
    (bad / "config.json").write_text(json.dumps(config))
    assert any("has 130 rows" in check.sentence for check in ropext.verify(bad).failures())


def test_a_target_that_is_no_multiple_keeps_the_rows_that_fall_on_a_position():
    rows = np.random.default_rng(1).standard_normal((6, 3))
    grown = METHODS["linear"].grow(rows, 9)
    kept = METHODS["linear"].kept(6, 9)
    assert kept == {0: 0, 3: 2, 6: 4}
    for new, old in kept.items():
        assert (grown[new] == rows[old]).all()
    wanted = [np.interp(np.arange(8) / 1.5, np.arange(6), column) for column in rows.T]
    assert np.allclose(grown[:8], np.stack(wanted, 1), atol=1e-12)


def test_a_table_of_the_wrong_length_or_missing_is_refused(base, tmp_path):
    lost = copy_of(base, tmp_path / "lost")
    for file in lost.glob("*.safetensors"):
        held = load_file(file)
        if held.pop(TABLE, None) is not None:
            save_file(held, file, {"format": "pt"})
    with pytest.raises(InputError, match=r"has no tensor position_embeddings\.weight"):
        ropext.extend(lost, tmp_path / "out", factor=2)
    short = copy_of(base, tmp_path / "short")
    config = json.loads((short / "config.json").read_text()) | {"max_position_embeddings": 40}
    (short / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="has 34 rows, not 40"):
        ropext.extend(short, tmp_path / "out", factor=2)
    assert not (tmp_path / "out").exists()


def test_tables_of_two_lengths_under_one_key_are_refused(base, tmp_path):
    two = copy_of(base, tmp_path / "two")
    file = next(f for f in two.glob("*.safetensors") if TABLE in load_file(f))
    held = load_file(file) | {"other.position_embeddings.weight": torch.zeros(20, 16)}
    save_file(held, file, {"format": "pt"})
    with pytest.raises(InputError, match="one key sets the length of both"):
        ropext.extend(two, tmp_path / "out", factor=2)


def test_a_wrong_output_gets_no_name(base, tmp_path, monkeypatch):
    from ropext.files.schemes import growing

    rows = growing.encoded
    monkeypatch.setattr(growing, "grown", lambda *given: rows(np.zeros((66, 16)), "BF16"))
    with pytest.raises(ProofFailed, match="has other rows than the plan says"):
        ropext.extend(base, tmp_path / "out", factor=2)
    assert not (tmp_path / "out").exists()


def test_rows_between_the_old_ones_are_proved_and_a_recorded_digest_is_read(
    base, tmp_path, monkeypatch
):
    from ropext.files.schemes import growing

    out = ropext.extend(base, tmp_path / "out", factor=4, hash=True, no_verify=True).output
    record = json.loads((out / "ropext.json").read_text())
    name = next(own for own, file in record["weights"].items() if TABLE in load_file(out / own))
    record["weights"][name]["sha256"] = "0" * 64
    (out / "ropext.json").write_text(json.dumps(record))
    said = [own.sentence for own in ropext.verify(out, against=str(base), deep=True).failures()]
    assert said == [f"{name} does not have the recorded SHA-256"]
    write = growing.rewrite

    def damaged(source, target, *rest):
        stale = write(source, target, *rest)
        held = load_file(target)
        held[TABLE][7] += 7
        save_file(held, target, {"format": "pt"})
        return stale

    monkeypatch.setattr(growing, "rewrite", damaged)
    with pytest.raises(
        ProofFailed, match=r"row 5 of .* differs from the interpolation of the old rows"
    ):
        ropext.extend(base, tmp_path / "bad", factor=4)
    assert not (tmp_path / "bad").exists()


def test_methods_and_options_of_the_other_kind_are_refused(base, tmp_path):
    with pytest.raises(UsageError, match="known for that: linear, copy"):
        ropext.plan(base, method="yarn", factor=2)
    with pytest.raises(UsageError, match=r"^attention_factor is for rotary embeddings"):
        ropext.plan(base, factor=2, attention_factor=1.1)
    with pytest.raises(UsageError, match="name a method that scales one"):
        ropext.plan("ropext://demo", method="copy", factor=2)
    (tmp_path / "config.json").write_text('{"model_type": "bloom"}')
    with pytest.raises(UnsupportedModel, match="slopes are hard-coded"):
        ropext.plan(tmp_path, factor=2)
    assert "slopes are hard-coded" in ropext.inspect(tmp_path).advice


def test_inspect_names_the_table_and_its_rows(base):
    seen = ropext.inspect(base)
    assert (seen.positions.context, seen.tables[0].name) == (32, TABLE)
    assert seen.rows().shape == (32, 16)


def test_an_encoder_is_pushed_with_its_record(grown):
    done = push(grown.output, "me/longer", dry_run=True)
    assert {"model.safetensors.index.json", "ropext.json", "README.md"} <= set(done.files)
    assert "lengthened from 32 to 128 tokens by linear" in done.card


def test_stored_sinusoids_are_rows_like_others(tmp_path):
    """Stock takes them from the checkpoint, and computes none. Between two rows the sinusoid of the
    position between them is met except for the curve: d²/8 of the fastest, one radian a step."""
    from transformers import AutoModelForMaskedLM, DistilBertConfig, DistilBertForMaskedLM

    keys = {"dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 32, "vocab_size": 99}
    config = DistilBertConfig(**keys, max_position_embeddings=32, sinusoidal_pos_embds=True)
    DistilBertForMaskedLM(config).save_pretrained(tmp_path / "base")
    out = ropext.extend(tmp_path / "base", tmp_path / "out", method="linear", factor=4).output
    table = AutoModelForMaskedLM.from_pretrained(out).distilbert.embeddings.position_embeddings
    channel = np.arange(16)
    angles = np.arange(128)[:, None] / 4 / 10000.0 ** (2 * (channel // 2) / 16)
    sinusoids = np.where(channel % 2, np.cos(angles), np.sin(angles))
    rows = table.weight.detach().numpy()
    assert np.abs(rows[::4] - sinusoids[::4]).max() < 1e-6
    assert np.abs(rows[:125] - sinusoids[:125]).max() < 1 / 8


def test_an_old_clip_is_lengthened_at_the_key_that_stock_reads():
    """Its text_config_dict, class defaults filled in, takes the place of its text_config."""
    from transformers import CLIPConfig

    config = {"model_type": "clip", "text_config": {"max_position_embeddings": 77}}
    config["text_config_dict"] = {"hidden_size": 768}
    made = plan_config(config, Extend(method="copy", factor=4)).config
    assert CLIPConfig(**made).text_config.max_position_embeddings == 308
