"""What verify says of directories that somebody else made, and what --fix makes of them."""

import json

import pytest

from ropext import looking, verifying
from ropext.checkpoint import open_snapshot

YARN = {"factor": 4.0, "original_max_position_embeddings": 128}
OLD, NEW = {"type": "yarn"} | YARN, {"rope_type": "yarn", "rope_theta": 50000.0} | YARN


def edit(directory, **changes):
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return directory


def repaired(directory):
    """The edits by path, and the config they lead to after they were written."""
    config, edits = verifying.repair(directory)
    verifying.write_config(directory, config)
    return {".".join(e.path): (e.before, e.after) for e in edits}


def test_integers_become_floats_also_inside_a_dict(llama):
    edit(llama, rope_scaling=OLD | {"factor": 4}, rope_parameters=NEW, max_position_embeddings=512)
    assert repaired(llama) == {"rope_scaling.factor": (4, 4.0)}
    factor = json.loads((llama / "config.json").read_text())["rope_scaling"]["factor"]
    assert isinstance(factor, float)
    assert repaired(llama) == {}


def test_a_length_left_behind_is_raised(llama):
    edit(llama, rope_scaling=OLD, rope_parameters=NEW, max_position_embeddings=512, seq_length=128)
    assert repaired(llama) == {"seq_length": (128, 512)}


def test_a_stale_spelling_is_told_and_repaired_from_what_transformers_5_takes(llama):
    # transformers 5 takes the theta in rope_parameters; 4.x takes the one beside it.
    edit(llama, rope_parameters=NEW, rope_theta=1e4, max_position_embeddings=512)
    told = {
        (r.loader, r.versions): r.verdict
        for r in looking.read_again(open_snapshot(str(llama))).readings
    }
    assert told["transformers", "5.0-5.23"] == "same"
    assert told["transformers", "4.51-4.57"] == "different"
    assert told["mlx", "MLX-LM 0.32.2"] == "different"
    assert repaired(llama) == {"rope_theta": (1e4, 5e4), "rope_scaling": (None, OLD)}
    told = looking.read_again(open_snapshot(str(llama))).readings
    assert {r.verdict for r in told if r.versions == "4.51-4.57"} == {"same"}


@pytest.mark.slow
def test_verify_names_a_stale_spelling_and_fix_makes_it_pass(ropext, llama):
    edit(llama, rope_parameters=NEW, rope_theta=1e4, max_position_embeddings=512)
    (llama / "tokenizer_config.json").write_text("{}")
    code, out, err = ropext("verify", llama)
    assert code == 3
    assert "rope_theta is 10000" in err
    assert "--fix" in err
    code, out, err = ropext("verify", llama, "--fix")
    assert code == 0, err
    assert "- rope_theta: 10000.0\n+ rope_theta: 50000.0" in err
    assert "WRONG" not in out


def test_a_name_that_is_no_directory_here_is_verified_and_not_repaired(ropext):
    code, _, err = ropext("verify", "ropext://demo", "--fix")
    assert (code, err) == (
        2,
        "error: --fix writes into ropext://demo, which is no directory here\n",
    )
    code, _, err = ropext("finetune", "ropext://demo", "--data", "ropext://tuning", "--dry-run")
    assert code == 2
    assert "ropext://demo was not extended by ropext" in err


@pytest.mark.slow
def test_the_bundled_checkpoint_is_verified_by_its_name(ropext):
    code, out, _ = ropext("verify", "ropext://demo")
    assert code == 0
    assert "ropext://demo: 256 tokens" in out
