"""The answers of `verify` about the weights, about unknown facts, and about a broken directory."""

import hashlib
import json
import os
import re

import pytest
from tiny_checkpoint import make_llama

from ropext.verifying import proof
from ropext.verifying.proof.comparing import Difference


@pytest.fixture
def extended(ropext, llama, tmp_path, monkeypatch):
    """Write an extended copy without the proof by another process; these tests look elsewhere."""
    exact = Difference("", "", -1, 1.0, 1.0, 0.0)
    proved = proof.RotaryProof(
        transformers="5", model_class="", rotary_modules=1, attention_modules=2,
        tensors_compared=20, tensors_not_compared=0, worst=exact, changed=(), base_was_built=True,
    )  # fmt: skip
    monkeypatch.setattr(proof, "prove", lambda *_, **__: proved)
    out = tmp_path / "out"
    assert (
        ropext("extend", llama, "--method", "yarn", "--factor", 4, "-o", out, "--no-verify")[0] == 0
    )
    return out


def flip(path):
    """Change one bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_deep_does_not_approve_tensors_that_were_never_recorded(ropext, extended, llama):
    weights = extended / "model.safetensors"
    flip(weights)
    code, out, _ = ropext("verify", extended)
    assert code == 0
    assert "1 weight file with the right header and size (--deep compares the bytes)" in out
    code, out, err = ropext("verify", extended, "--deep")
    assert (code, err) == (3, f"error: {extended}: 1 of 7 checks not known\n")
    assert "NOT KNOWN" in out
    assert "WRONG" not in out
    assert "never recorded" in out
    said = " ".join(out.split())  # long lines are wrapped
    for way in (f"ropext verify {extended} --record", "extend --hash", "--against BASE"):
        assert way in said
    found = json.loads(ropext("verify", extended, "--deep", "--json")[1])
    assert [c["passed"] for c in found["checks"] if c["what"] == "weights"] == [None]
    assert found["passed"] is False
    code, out, _ = ropext("verify", extended, "--deep", "--against", llama)
    assert code == 3
    assert f"differs from the base's file at byte {weights.stat().st_size // 2:,}" in out


def test_a_recorded_digest_is_compared_by_deep(ropext, extended, llama):
    weights, record = extended / "model.safetensors", extended / "ropext.json"
    before = json.loads(record.read_text())
    code, out, err = ropext("verify", extended, "--record", "--against", llama)
    assert code == 0, err
    assert "recorded the SHA-256 of 1 weight file" in out
    digest = hashlib.sha256(weights.read_bytes()).hexdigest()
    before["weights"]["model.safetensors"]["sha256"] = digest
    assert json.loads(record.read_text()) == before
    assert "1 weight file with the recorded SHA-256" in ropext("verify", extended, "--deep")[1]
    flip(weights)
    for words in ((), ("--record",)):  # damage does not become the record
        code, out, _ = ropext("verify", extended, "--deep", *words)
        assert code == 3
        assert "model.safetensors does not have the recorded SHA-256" in out
    assert json.loads(record.read_text()) == before


def test_record_keeps_nothing_of_weights_that_differ_from_the_base(ropext, extended, llama):
    record = extended / "ropext.json"
    before = record.read_bytes()
    flip(extended / "model.safetensors")
    code, out, _ = ropext("verify", extended, "--record", "--against", llama)
    assert code == 3
    assert "at byte" in out
    assert record.read_bytes() == before


def test_extend_hash_is_a_record(ropext, extended, llama, tmp_path):
    out = tmp_path / "hashed"
    assert ropext("extend", llama, "--factor", 4, "-o", out, "--no-verify", "--hash")[0] == 0
    assert ropext("verify", out, "--deep")[0] == 0
    flip(out / "model.safetensors")
    assert ropext("verify", out, "--deep")[0] == 3


def test_a_directory_without_a_record_has_nothing_to_be_compared_with(ropext, extended):
    (extended / "ropext.json").unlink()
    code, out, _ = ropext("verify", extended, "--deep")
    assert code == 3
    assert "--against BASE compares" in out
    assert "--record" not in out
    code, _, err = ropext("verify", extended, "--record")
    assert code == 2
    assert "--record writes into ropext.json" in err
    assert ropext("verify", "ropext://demo", "--record")[0] == 2


def test_a_broken_directory_gets_every_error_and_no_loader(ropext, extended):
    code, out, _ = ropext("verify", extended)
    assert out.splitlines()[0] == f"{extended}: verified (7 checks passed)"
    assert "vllm" not in out  # that is what plan DIR says
    assert "vllm serve" in ropext("plan", extended)[1]
    config = json.loads((extended / "config.json").read_text())
    config["rope_scaling"]["factor"] = 2.0
    (extended / "config.json").write_text(json.dumps(config))
    (extended / "tokenizer_config.json").write_text('{"model_max_length": 128}')
    code, out, err = ropext("verify", extended)
    assert code == 3
    verdict = out.splitlines()[0]
    assert verdict.startswith(f"{extended}: 3 of ")
    assert err == f"error: {verdict}\n"
    for error in (
        "rope_scaling.factor is 2.0",
        "yarn with factor 2 of 128",
        "limits the model below",
    ):
        assert out.count(error) == 1
    assert "vllm" not in out.replace("and vLLM go by", "")
    assert "loaders" not in json.loads(ropext("verify", extended, "--json")[1])


def test_plan_of_a_scaled_directory_without_a_record_describes_its_config(ropext, extended):
    (extended / "ropext.json").unlink()
    code, out, _ = ropext("plan", extended)
    assert code == 0
    assert f"{extended}: 512 tokens, scaled 4x from 128 by its config; no record" in out


def test_a_file_that_is_no_plan_is_refused_by_its_option(ropext, extended, tmp_path):
    (tmp_path / "notes.json").write_text("{}")
    code, _, err = ropext(
        "verify", extended, "--against", os.path.join(tmp_path, ".", "notes.json")
    )
    assert code == 2
    assert f"--against {tmp_path / 'notes.json'} is not a plan" in err


@pytest.fixture
def windowed(ropext, tmp_path):
    """Write a base with a layer that does not rotate and a layer with a window, and its
    extension."""
    keys = {"no_rope_layers": [1, 0], "layer_types": ["full_attention", "sliding_attention"]}
    keys |= {"model_type": "smollm3", "architectures": ["SmolLM3ForCausalLM"]}
    keys |= {"sliding_window": 32, "use_sliding_window": True, "pad_token_id": 0}
    base, out = make_llama(tmp_path / "base", **keys), tmp_path / "out"
    how = ("--method", "yarn", "--factor", 4, "--no-verify")
    assert ropext("extend", base, *how, "-o", out)[0] == 0
    return base, out


@pytest.mark.parametrize("recorded", [True, False])
def test_every_unedited_key_is_compared_with_the_bases(ropext, windowed, recorded):
    base, out = windowed
    path = out / "config.json"
    config = json.loads(path.read_text())
    wrong = {"no_rope_layers": [1, 1], "layer_types": ["full_attention"] * 2, "rms_norm_eps": 0.1}
    free = {"torch_dtype": "float16", "_name_or_path": "elsewhere", "initializer_range": 0.02}
    path.write_text(json.dumps(config | wrong | free | {"sliding_window": 64}))
    if not recorded:
        (out / "ropext.json").unlink()
    code, said, _ = ropext("verify", out, "--json", *([] if recorded else ["--against", base]))
    assert code == 3
    checks = json.loads(said)["checks"]
    failed = [own["sentence"] for own in checks if not own["passed"]]
    for key in (*wrong, "sliding_window"):
        assert any(f"config.json: {key} is" in sentence for sentence in failed), key
    assert not [own for own in failed if any(key in own for key in free)]
    # The small model has both layers, of which the second rotates in the written config alone.
    assert any("small model (2 of 2 layers" in own and "differs by" in own for own in failed)


def test_defaults_that_stock_writes_out_are_no_difference(ropext, windowed):
    import transformers

    _, out = windowed
    transformers.AutoConfig.from_pretrained(out).save_pretrained(out)
    assert "rope_theta" not in json.loads((out / "config.json").read_text())
    checks = json.loads(ropext("verify", out, "--json")[1])["checks"]
    (config,) = [own for own in checks if own["what"] == "config"]
    assert config["passed"]
    assert "with which transformers builds the same" in config["sentence"]
    (read,) = [own["sentence"] for own in checks if own["what"] == "base"]
    assert "reads the base's config as transformers does" in read


def test_a_base_that_stock_cannot_build_is_not_called_right(ropext, windowed):
    _, out = windowed
    path = out / "ropext.json"
    record = json.loads(path.read_text())
    record["base"]["config"]["torch_dtype"] = "float7"  # which changes nothing that is compared
    path.write_text(json.dumps(record))
    code, said, err = ropext("verify", out, "--json")
    (base,) = [own for own in json.loads(said)["checks"] if own["what"] == "base"]
    assert base["passed"] is None
    assert re.match("not checked: transformers cannot build the base .*float7", base["sentence"])
    assert (code, err) == (3, f"error: {out}: 1 of 7 checks not known\n")
