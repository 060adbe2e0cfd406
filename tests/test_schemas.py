"""docs/schemas lists exactly the keys of results.json, ropext.json, outcome.json, and `--json` of
plan, verify and run.

Tests of other kinds (fitted, tuned, runs, servers, several caches) compare their own files with the
schemas: grep for `json_schema`.
"""

import copy
import json
from pathlib import Path

import pytest
from command_line import run
from configs import LLAMA, LLAMA31
from gguf_files import making
from json_schema import check, check_file, complaints, schema_of
from tiny_checkpoint import make_llama

TRANSCRIPTS = Path(__file__).parent / "golden/transcripts"
NAMES = ("results", "ropext", "plan", "verify", "run", "outcome")
GPT2 = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_positions": 1024}
GPT2 |= {"n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 300}
T5 = {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "vocab_size": 300}
T5 |= {"relative_attention_num_buckets": 32, "relative_attention_max_distance": 128, "d_model": 64}


def written(place, config):
    place.mkdir()
    (place / "config.json").write_text(json.dumps(config))
    return str(place)


def in_transcript(name, file):
    """Return a JSON file as a transcript prints it."""
    text = (TRANSCRIPTS / f"{name}.txt").read_text("utf-8")
    return json.loads(text.partition(f"--- {file}\n")[2].partition("\n--- ")[0])


# Dicts with foreign names: keys of a model's config, a method's knobs, files, metrics.
OPEN = {
    "ropext": {
        *("versions", "base.config", "knobs", "sites.params", "edits.after", "weights", "recipe"),
        *("proof", "files"),
    },
    "results": {"variants", "variants.*.passes", "variants.*.metrics", "variants.*.retrieval"},
}
RECORD = in_transcript("extend", "long/ropext.json")
RESULTS = in_transcript("eval", "measured/results.json")


@pytest.mark.parametrize(("value", "name"), [(RECORD, "ropext"), (RESULTS, "results")])
def test_the_transcripts_match_the_schema(value, name):
    check(value, name)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (LLAMA, ["--factor", "4"]),
        (LLAMA, ["--factor", "4", "--method", "longrope-search", "--even-so"]),
        (LLAMA31, ["--factor", "2"]),
        (LLAMA, ["--factor", "4", "--for", "vllm,llama.cpp"]),
        (LLAMA, ["--factor", "4", "--memory", "24G"]),
        (LLAMA, ["--memory", "24G"]),
        (LLAMA31, ["--for", "vllm"]),
        (GPT2, ["--factor", "2"]),
        (T5, ["--factor", "2"]),
        (LLAMA, ["--factor", "0.5"]),
    ],
)
def test_every_kind_of_plan_matches_the_schema(config, words, tmp_path, capsys):
    _, said = run("plan", written(tmp_path / "m", config), *words, "--json", capsys=capsys)
    check(json.loads(said.out), "plan")


def test_the_records_of_outputs_match_the_schema(tmp_path, capsys):
    make_llama(tmp_path / "model")
    base = making.write(tmp_path / "base.gguf")
    once = ["extend", f"{tmp_path}/model", "--factor", "2", "--no-verify"]
    assert run(*once, "-o", f"{tmp_path}/long", capsys=capsys)[0] == 0
    check_file(tmp_path / "long/ropext.json")
    twice = ["extend", f"{tmp_path}/long", "--factor", "2", "--again", "--no-verify"]
    assert run(*twice, "--hash", "-o", f"{tmp_path}/longer", capsys=capsys)[0] == 0
    check_file(tmp_path / "longer/ropext.json")
    for words in ([f"{tmp_path}/long"], [str(base), "--factor", "4"]):
        code, said = run("plan", *words, "--json", "--quiet", capsys=capsys)
        assert code == 0
        check(json.loads(said.out), "plan")


def test_every_kind_of_verification_matches_the_schema(tmp_path, capsys):
    """Right, wrong, of a model without a rotation, of a GGUF, with --for, and an error."""
    make_llama(tmp_path / "model")
    longer = ["extend", f"{tmp_path}/model", "--factor", "2", "--method", "yarn", "--no-verify"]
    assert run(*longer, "-o", f"{tmp_path}/long", capsys=capsys)[0] == 0
    base = making.write(tmp_path / "base.gguf")
    grown = ["extend", str(base), "--factor", "2", "--no-verify", "-o", f"{tmp_path}/long.gguf"]
    assert run(*grown, capsys=capsys)[0] == 0
    found = []
    for words in (
        ["long"],
        ["long", "--for", "vllm"],
        ["long.gguf"],
        ["long", "--against", "./no"],
    ):
        words = [f"{tmp_path}/{words[0]}", *words[1:]]
        code, said = run("verify", *words, "--json", "--quiet", capsys=capsys)
        check(json.loads(said.out), "verify")
        found.append((code, *sorted(json.loads(said.out))))
    plain = ["checks", "context", "directory", "loaders", "method", "passed", "serving", "target"]
    error = ["error", "exit_code", "option"]
    assert found == [(0, *plain), (0, *sorted([*plain, "gate"])), (0, *plain), (2, *error)]
    config = tmp_path / "long/config.json"
    config.write_text(config.read_text("utf-8").replace('"factor": 2.0', '"factor": 3.0'))
    code, said = run("verify", f"{tmp_path}/long", "--json", capsys=capsys)
    check(json.loads(said.out), "verify")
    assert (code, sorted(json.loads(said.out))) == (3, ["checks", "directory", "passed"])


def test_the_dry_run_of_a_run_matches_the_schema(tmp_path, capsys):
    words = ["extend", "ropext://demo", "--factor", "2", "--eval", "ropext://held-out"]
    code, said = run(*words, "--dry-run", "--json", capsys=capsys)
    assert code == 0
    check(json.loads(said.out), "run")


def places(value, schema, whole, path=()):
    """Yield the dicts of a value, each by its path, and whether its schema knows all of its
    keys."""
    if "$ref" in schema:
        schema = whole["$defs"][schema["$ref"].rpartition("/")[2]]
    for part in schema.get("anyOf", ()):
        if not complaints(value, part, whole):
            yield from places(value, part, whole, path)
            return
    if isinstance(value, dict):
        rest = schema.get("additionalProperties", True)
        yield path, rest is False
        for key, item in value.items():
            known = schema.get("properties", {})
            if key in known or isinstance(rest, dict):
                yield from places(item, known.get(key, rest), whole, (*path, key))
    if isinstance(value, list):
        for number, item in enumerate(value):
            yield from places(item, schema.get("items", {}), whole, (*path, number))


@pytest.mark.parametrize(("value", "name"), [(RECORD, "ropext"), (RESULTS, "results")])
def test_a_new_key_wants_a_schema(value, name):
    """Wherever the keys are ours: a config, a method's knobs and metrics have names of others."""
    whole = schema_of(name)
    open_places = set()
    closed = 0
    for path, is_closed in places(value, whole, whole):
        changed = copy.deepcopy(value)
        inner = changed
        for key in path:
            inner = inner[key]
        inner["a new key"] = {}
        if is_closed:
            closed += 1
            assert len(complaints(changed, whole)) == 1
        else:
            names = [str(key) for key in path if not isinstance(key, int)]
            if name == "results" and len(names) > 1:
                names[1] = "*"  # the label of a model
            open_places.add(".".join(names))
    assert closed > 5
    assert open_places == OPEN[name]


@pytest.mark.parametrize("name", NAMES)
def test_a_schema_leads_to_its_own_parts_alone(name):
    whole = schema_of(name)
    text = json.dumps(whole)
    for part in whole["$defs"]:
        assert f'"#/$defs/{part}"' in text, f"{part} is used nowhere"
    assert complaints([], whole)
