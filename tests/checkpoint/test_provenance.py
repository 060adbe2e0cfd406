"""ropext.json is read back or refused, and no secret gets into it."""

import json
import math
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sample_checkpoint import record

from ropext import families
from ropext.base.errors import InputError
from ropext.base.narration import clean_command, scrub
from ropext.files.checkpoint import provenance
from ropext.files.checkpoint.provenance import undone
from ropext.files.checkpoint.weights import WeightFile
from ropext.scaling.rope import Edit, Spectrum

WEIGHTS = {
    "b.safetensors": WeightFile(5, "ab" * 32, "cd" * 32),
    "a.safetensors": WeightFile(7, "0" * 64),
}


def test_a_written_record_reads_back_equal(tmp_path: Path):
    spectrum = Spectrum((1.0, math.pi / 1e7, 5e-324, 0.0), 1 / 3, 1.1, (1.0, 0.1, 0.2, 0.0))
    first = record()
    site = replace(first.sites[0], label="full_attention", wanted=spectrum, scaled=False)
    whole = replace(
        first,
        sites=(first.sites[0], site),
        edits=(Edit("a.b", after=None), Edit("c", 1), Edit("d", 1, 2.0, "generation_config.json")),
        weights=WEIGHTS,
        command=("ropext", "extend", "caf\udce9"),  # a name of a file that is not UTF-8
        proof={"worst": [0, 1e-9]},
        more={"finetune": {"tokens": 3}},
    )
    provenance.write(whole, tmp_path)
    found = provenance.read_record(tmp_path)
    assert found == whole
    assert found.sites[1].wanted.inv_freq == spectrum.inv_freq  # to the last bit
    (again := tmp_path / "again").mkdir()
    provenance.write(found, again)
    assert (again / "ropext.json").read_bytes() == (tmp_path / "ropext.json").read_bytes()


def test_the_record_writes_sites_and_edits_with_these_keys(tmp_path: Path):
    edits = (Edit("a.b", after=None), Edit("c", 1), Edit("d", 1, 2.0, "generation_config.json"))
    provenance.write(replace(record(), edits=edits), tmp_path)
    written = json.loads((tmp_path / "ropext.json").read_text("utf-8"))
    keys = ["label", "dim", "context", "scaled", "params", "base", "spectrum"]
    assert list(written["sites"][0]) == keys
    assert json.dumps(written["edits"]) == (
        '[{"file": "config.json", "key": "a.b", "after": null},'
        ' {"file": "config.json", "key": "c", "before": 1},'
        ' {"file": "generation_config.json", "key": "d", "before": 1, "after": 2.0}]'
    )


def test_read_record_returns_none_without_a_file(tmp_path: Path):
    assert provenance.read_record(tmp_path) is None


WRONG = [
    (["schema"], 2, "has schema 2"),
    (["schema"], "1", "schema"),
    (["method"], 5, "method"),
    (["target"], "8192", "target"),
    (["target"], True, "target"),
    (["context"], -1, "context"),
    (["context"], 2048.5, "context"),
    (["base"], [], "base"),
    (["base", "config"], None, "config"),
    (["sites"], {}, "sites"),
    (["sites", 0], 1, "sites"),
    (["sites", 0, "dim"], None, "dim"),
    (["sites", 0, "spectrum", "inv_freq", 0], "1", "inv_freq"),
    (["sites", 0, "spectrum", "inv_freq", 0], 0.999, "digest"),
    (["sites", 0, "spectrum", "attention_factor"], 10**400, "digest"),
    (["weights"], [], "weights"),
    (["weights", "../../etc/passwd"], {}, "plain file name"),
    (["weights", "a.safetensors", "size"], "7", "size"),
    (["weights", "a.safetensors", "header_sha256"], "xyz", "header_sha256"),
    (["weights", "a.safetensors", "sha256"], 1, "sha256"),
    (["command", 0], None, "command"),
    (["proof"], 1, "proof"),
    (["edits"], [{}], "key"),
    (["edits"], ["rope_theta"], "edits"),
    (["edits"], [{"key": 5}], "key"),
    (["edits"], {"rope_theta": 1}, "edits"),
    (["base", "name"], 7, "name"),
    (["base", "hub_id"], ["a/b"], "hub_id"),
    (["base", "extended"], "pi", "extended"),
    (["base", "extended"], {"method": "pi"}, "extended"),
    (["recipe"], [], "recipe"),
    (["finetune"], ["x"], "finetune"),
    (["fit"], 3, "fit"),
    (["trained_on"], "all", "trained_on"),
    (["base", "config"], {"transformers_weights": "zz.safetensors"}, "another file"),
    (["base", "config"], {"vision_config": {"checkpoint_path": "/x"}}, "another library"),
]


def chained():
    """Return a record of an extension of an extension, as JSON."""
    first = provenance.to_json(record())
    older = {key: first[key] for key in provenance.LINK}
    return first | {"base": first["base"] | {"extended": older}}


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (["method"], None, "method"),
        (["context"], "2048", "context"),
        (["target"], 0, "target"),
        (["recipe"], "factor", "recipe"),
        (["edits"], [{}], "key"),
        (["edits"], None, "edits"),
        (["base"], [], "base"),
        (["base", "config"], "x", "config"),
        (["base", "config"], {"attn_implementation": "evil/kernel"}, "kernel"),
        (["base", "extended"], 4, "extended"),
    ],
)
def test_a_wrong_value_of_an_older_extension_is_named(tmp_path: Path, path, value, words):
    content = chained()
    (tmp_path / "ropext.json").write_text(json.dumps(content))
    assert provenance.read_record(tmp_path) is not None
    place = content["base"]["extended"]
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    (tmp_path / "ropext.json").write_text(json.dumps(content))
    with pytest.raises(InputError, match=words):
        provenance.read_record(tmp_path)


@pytest.mark.parametrize(("path", "value", "words"), WRONG)
def test_a_wrong_value_is_named(tmp_path: Path, path: list, value, words: str):
    content = provenance.to_json(replace(record(), weights=WEIGHTS))
    place = content
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    (tmp_path / "ropext.json").write_text(json.dumps(content))
    with pytest.raises(InputError) as error:
        provenance.read_record(tmp_path)
    assert words in str(error.value)
    assert str(tmp_path / "ropext.json") in str(error.value)


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(at=st.integers(0, 2000), bytes_=st.binary(max_size=3), cut=st.booleans())
def test_any_damage_is_an_input_error(tmp_path: Path, at: int, bytes_: bytes, cut: bool):
    provenance.write(replace(record(), weights=WEIGHTS), tmp_path)
    path = tmp_path / "ropext.json"
    data = path.read_bytes()
    at %= len(data)
    path.write_bytes(data[:at] + bytes_ + (b"" if cut else data[at + len(bytes_) :]))
    with suppress(InputError):  # anything else is a traceback that a user would see
        provenance.read_record(tmp_path)


def test_versions_are_the_installed_ones_and_nothing_is_imported():
    code = (
        "import sys, json; from ropext.files.checkpoint import provenance; "
        "print(json.dumps([provenance.versions(), sorted(sys.modules)]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    versions, modules = json.loads(done.stdout)
    assert versions["transformers"] == metadata.version("transformers")
    assert versions["torch"] == metadata.version("torch")
    assert not {"torch", "transformers", "numpy", "huggingface_hub", "yaml"} & set(modules)


SECRET = "hf_canaryCANARYcanary0123456789"


@pytest.mark.parametrize(
    ("given_", "kept"),
    [
        (["/usr/bin/ropext", "extend", "org/m", "-o", "my out"], "extend org/m -o my out"),
        (["r", "--hf-token", SECRET, "x"], "--hf-token *** x"),
        (["r", f"--token={SECRET}"], "--token=***"),
        (["r", "--api-key", "abc", "--api_key=abc"], "--api-key *** --api_key=***"),
        (["r", SECRET], "***"),
        (["r", f"https://me:{SECRET}@host/x"], "https://***@host/x"),
        (["r", "--endpoint", "http://u:pw@localhost:8000"], "--endpoint http://***@localhost:8000"),
        (
            ["r", "--data", "tokens.jsonl", "--batch-tokens", "512", "--batch-tokens=8"],
            "--data tokens.jsonl --batch-tokens 512 --batch-tokens=8",
        ),
    ],
)
def test_commands_lose_their_secrets_and_nothing_else(given_: list[str], kept: str):
    words = clean_command(given_)
    assert words[0] == "ropext"
    assert " ".join(words[1:]) == kept


def test_clean_command_of_a_python_call_is_empty():
    assert clean_command(()) == ()


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("https://user:pw@host/m", "https://***@host/m"),
        (
            "https:/user:pw@host/m is no folder",
            "https:/***@host/m is no folder",
        ),  # as a path has it
        ("/data/hf_checkpoints/llama at C:/me@work/x", None),
        ("ropext://demo and name@host", None),
    ],
)
def test_scrub_removes_user_and_password_from_urls(text, left):
    assert scrub(text) == (left or text)


def test_the_token_of_the_environment_is_scrubbed_whatever_its_shape(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "an odd token")
    assert scrub("x an odd token y") == "x *** y"


def test_the_key_of_a_server_is_scrubbed_but_not_a_word(monkeypatch):
    monkeypatch.setenv("ROPEXT_ENDPOINT_KEY", "the key of a server")
    assert scrub("wrong key: the key of a server") == "wrong key: ***"
    monkeypatch.setenv("ROPEXT_ENDPOINT_KEY", "lm-studio")
    assert scrub("lm-studio runs") == "lm-studio runs"


def test_the_base_config_comes_back_without_the_keys_that_were_new() -> None:
    """A null would be read otherwise than an absent key (olmo3's rope_scaling, head_dim)."""
    base = {"model_type": "llama", "head_dim": None, "rope_parameters": {"rope_theta": 1e4}}
    written = {
        "model_type": "llama",
        "head_dim": 64,
        "rope_scaling": {"type": "linear", "factor": 4.0},
        "rope_parameters": {"rope_theta": 1e4, "rope_type": "linear", "factor": 4.0},
    }
    edits = families.diff(base, written)
    edits.append(Edit("model_max_length", 1, 2, "tokenizer_config.json"))
    assert undone(written, edits) == base
