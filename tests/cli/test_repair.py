"""What verify says of directories that somebody else made, and what --fix makes of them."""

import copy
import json
import os

import configs
import pytest

import ropext
from ropext import families, planning
from ropext.base import guard
from ropext.base.errors import NotExpressible, OutputExists, UsageError
from ropext.base.jsontext import dump
from ropext.files import inspecting
from ropext.files.checkpoint import open_snapshot
from ropext.options.extend import Extend
from ropext.verifying import verification

YARN = {"factor": 4.0, "original_max_position_embeddings": 128}
OLD, NEW = {"type": "yarn"} | YARN, {"rope_type": "yarn", "rope_theta": 50000.0} | YARN


def edit(directory, **changes):
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return directory


def repaired(directory, trust=None):
    """Repair the config, write it, and return the edits by path."""
    config, edits = verification.repair(directory, trust)
    verification.write_config(directory, config)
    return {".".join(e.path): (e.before, e.after) for e in edits}


def test_integers_become_floats_also_inside_a_dict(llama):
    edit(llama, rope_scaling=OLD | {"factor": 4}, rope_parameters=NEW, max_position_embeddings=512)
    assert repaired(llama) == {"rope_scaling.factor": (4, 4.0)}
    factor = json.loads((llama / "config.json").read_text())["rope_scaling"]["factor"]
    assert isinstance(factor, float)
    assert repaired(llama) == {}


def test_a_length_that_was_not_raised_is_raised(llama):
    edit(llama, rope_scaling=OLD, rope_parameters=NEW, max_position_embeddings=512, seq_length=128)
    assert repaired(llama) == {"seq_length": (128, 512)}


def test_a_stale_spelling_is_reported_and_repaired_from_the_trusted_one(llama):
    # transformers 5 takes the theta in rope_parameters; 4.x takes the top-level one.
    edit(llama, rope_parameters=NEW, rope_theta=1e4, max_position_embeddings=512)
    told = {
        (r.loader, r.versions): r.verdict
        for r in inspecting.read_unchanged(open_snapshot(str(llama))).readings
    }
    assert told["transformers", "5.0-5.23"] == "same"
    assert told["transformers", "4.51-4.57"] == "different"
    assert told["mlx", "MLX-LM 0.32.2"] == "different"
    with pytest.raises(UsageError, match="--trust rope_parameters or --trust rope_scaling"):
        verification.repair(llama)
    with pytest.raises(UsageError, match="has no rope_scaling"):
        verification.repair(llama, "rope_scaling")
    found = repaired(llama, "rope_parameters")
    assert found == {"rope_theta": (1e4, 5e4), "rope_scaling": (None, OLD)}
    told = inspecting.read_unchanged(open_snapshot(str(llama))).readings
    assert {r.verdict for r in told if r.versions == "4.51-4.57"} == {"same"}


@pytest.mark.parametrize(("trust", "factor"), [("rope_parameters", 4.0), ("rope_scaling", 2.0)])
def test_fix_writes_the_factor_of_the_trusted_key(llama, trust, factor):
    edit(llama, rope_scaling=OLD | {"factor": 2.0}, rope_parameters=NEW)
    repaired(llama, trust)
    config = json.loads((llama / "config.json").read_text())
    assert config["rope_scaling"]["factor"] == config["rope_parameters"]["factor"] == factor
    assert config["rope_theta"] == 5e4
    assert repaired(llama) == {}


GEMMA3_TEXT = configs.LLAMA | {
    "model_type": "gemma3_text",
    "head_dim": 128,
    "sliding_window": 512,
    "layer_types": ["sliding_attention", "full_attention"] * 16,
}


@pytest.mark.parametrize(
    ("trust", "factor", "theta"), [("rope_parameters", 4.0, 1e6), ("rope_scaling", 2.0, 5e5)]
)
def test_of_two_spellings_by_layer_type_the_trusted_one_is_written(trust, factor, theta):
    full = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6}
    sliding = {"rope_type": "default", "rope_theta": 1e4}
    config = GEMMA3_TEXT | {
        "rope_theta": 5e5,
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
        "rope_parameters": {"full_attention": full, "sliding_attention": sliding},
    }
    fixed = families.respell(families.with_spelling_in_force(config, trust))
    (site,) = families.read(fixed).scaled_sites  # read refuses spellings that disagree
    assert (site.params["factor"], site.rope.theta) == (factor, theta)
    assert fixed["rope_theta"] == theta
    assert fixed["rope_scaling"]["factor"] == factor
    assert config["rope_theta"] == 5e5


def test_in_a_directory_with_a_record_the_record_decides(ropext, llama, tmp_path):
    out = tmp_path / "out"
    assert (
        ropext("extend", llama, "--method", "yarn", "--factor", 4, "-o", out, "--no-verify")[0] == 0
    )
    right = (out / "config.json").read_bytes()
    edit(out, rope_scaling=OLD | {"factor": 2.0})
    with pytest.raises(UsageError, match="which decides"):
        verification.repair(out, "rope_scaling")
    assert repaired(out) == {"rope_scaling.factor": (2.0, 4.0)}
    assert (out / "config.json").read_bytes() == right
    both = {"factor": 2.0, "original_max_position_embeddings": 128}
    edit(out, rope_scaling=OLD | both, rope_parameters=NEW | both, max_position_embeddings=128)
    repaired(out)
    assert (out / "config.json").read_bytes() == right
    edit(llama, rope_parameters={"rope_type": "default", "rope_theta": 5e4})
    record = json.loads((out / "ropext.json").read_text())
    record["sites"] *= 2
    (llama / "ropext.json").write_text(json.dumps(record))
    code, _, err = ropext("verify", llama, "--fix")
    assert (code, "they belong to different models" in err) == (2, True)
    record = json.loads((out / "ropext.json").read_text())
    del record["sites"][0]["params"]["rope_theta"]  # found by the fuzzer
    (out / "ropext.json").write_text(json.dumps(record))
    code, _, err = ropext("verify", out, "--fix")
    assert (code, "lack rope_theta" in err) == (2, True)


def damaged(config):
    """Yield the config as other programs leave it, with the name of the damage."""
    yield "nothing", config
    saved = copy.deepcopy(config)
    text = saved.get("text_config", saved)
    for key in ("rope_scaling", "rope_theta", "rope_local_base_freq", "rotary_emb_base"):
        text.pop(key, None)
    yield "saved by transformers 5", saved
    stale = copy.deepcopy(config)
    scaling = stale.get("text_config", stale).get("rope_scaling") or {}
    if "factor" in scaling:
        scaling["factor"] /= 2
        yield "one spelling stale", stale


WRITTEN = {
    name: config
    for name, config in vars(configs).items()
    if isinstance(config, dict) and "model_type" in config and name != "GPT2"
} | {"GEMMA3_TEXT": GEMMA3_TEXT}


@pytest.mark.parametrize("method", ["yarn", "ntk", "pi", "llama3", "by-parts"])
@pytest.mark.parametrize("name", WRITTEN)
def test_recorded_edits_are_written_as_extend_wrote_them(name, method):
    try:
        made = planning.make_plan(WRITTEN[name], Extend(method=method, factor=4.0))
    except NotExpressible:
        pytest.skip("cannot be written in this family")
    params = [site.params for site in made.sites if site.scaled]
    for what, config in damaged(made.config):
        assert families.respell(config, params, made.target) == made.config, what


@pytest.mark.slow
def test_verify_names_a_stale_spelling_and_fix_makes_it_pass(ropext, llama):
    edit(llama, rope_parameters=NEW, rope_theta=1e4, max_position_embeddings=512)
    (llama / "tokenizer_config.json").write_text("{}")
    code, out, err = ropext("verify", llama)
    assert code == 3
    assert "rope_theta is 10000" in out
    assert "--fix" in out
    before = (llama / "config.json").read_bytes()
    code, out, err = ropext("verify", llama, "--fix")
    assert (code, out) == (2, "")
    assert "--trust rope_parameters or --trust rope_scaling" in err
    assert (llama / "config.json").read_bytes() == before
    assert ropext("verify", llama, "--trust", "rope_scaling")[0] == 2
    code, out, err = ropext("verify", llama, "--fix", "--trust", "rope_parameters")
    assert code == 0, err
    assert "- rope_theta: 10000.0\n+ rope_theta: 50000.0" in err
    assert "WRONG" not in out


def test_owner_and_mode_of_a_replaced_file_stay(ropext, llama):
    edit(llama, rope_parameters=NEW, rope_theta=1e4, max_position_embeddings=512)
    config = llama / "config.json"
    config.chmod(0o600)
    if getattr(os, "geteuid", int)() == 0 and hasattr(os, "chown"):
        os.chown(config, 65534, 65533)
    before = config.stat()
    ropext("verify", llama, "--fix", "--trust", "rope_parameters")
    after = config.stat()
    assert after.st_ino != before.st_ino
    for name in ("st_mode", "st_uid", "st_gid"):
        assert getattr(after, name) == getattr(before, name)


def test_a_name_that_is_no_directory_here_is_verified_and_not_repaired(ropext):
    code, _, err = ropext("verify", "ropext://demo", "--fix")
    assert (code, err) == (
        2,
        "error: --fix writes into ropext://demo, which is not a local directory\n",
    )
    code, _, err = ropext("finetune", "ropext://demo", "--data", "ropext://tuning", "--dry-run")
    assert code == 2
    assert "ropext://demo was not extended by ropext" in err


@pytest.mark.slow
def test_the_bundled_checkpoint_is_verified_by_its_name(ropext):
    code, out, _ = ropext("verify", "ropext://demo")
    assert code == 0
    assert out.startswith("ropext://demo: verified (5 checks passed)\n")


def test_a_repaired_config_equals_the_written_one(llama, tmp_path):
    """--force replaces it; not so a config that a user edited, before it was repaired or since."""
    out = tmp_path / "out"
    how = {"method": "yarn", "factor": 2, "no_verify": True}
    ropext.extend(str(llama), out, **how)
    listed = guard.files_in(out)["config.json"]
    stale = json.loads((out / "config.json").read_text()) | {"seq_length": 128}
    (out / "config.json").write_bytes(dump(stale))
    assert repaired(out)  # a user's directory stays the user's
    with pytest.raises(OutputExists, match=r"edited since ropext wrote it: config\.json"):
        ropext.extend(str(llama), out, force=True, **how)
    record = json.loads((out / "ropext.json").read_text())
    (out / "config.json").write_bytes(dump(stale))
    record["files"]["config.json"] = guard.state(out / "config.json")  # as an older ropext wrote it
    (out / "ropext.json").write_text(json.dumps(record))
    assert repaired(out)
    assert json.loads((out / "config.json").read_text()) != stale
    assert guard.files_in(out)["config.json"] not in (listed, record["files"]["config.json"])
    ropext.extend(str(llama), out, force=True, **how)
    assert guard.files_in(out)["config.json"] == listed
