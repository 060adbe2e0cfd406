"""transformers 4.57.6 and 4.51.3 read ropext's output like the installed 5.x.

Both are installed into directories of their own (see old_versions). Without a network the tests are
skipped with the reason; with ROPEXT_NO_SKIP=1 in the environment that is a failure.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import old_versions
import pytest
import tiny
from building import Stock, base_case, extended_case, rotary_types, scaled

from ropext import families
from ropext.families import loaders

CHILD = Path(__file__).with_name("old_reader.py")
OLD = tuple(old_versions.PINS)
FAMILIES = ("llama", "qwen2", "mistral", "gpt_neox", "phi", "granite", "cohere", "gemma3_text")
FAMILIES += ("olmo2",)
METHODS = ("pi", "ntk", "by-parts", "yarn", "longrope")
CONTEXT, TARGET = 64, 256
TOKENS = [(7 * i * i + 3 * i) % 128 for i in range(TARGET)]

pytestmark = pytest.mark.slow


def installed(version):
    folder, reason = old_versions.install(version)
    if folder is None:
        told = f"transformers {version} could not be installed: {reason}"
        if os.environ.get("ROPEXT_NO_SKIP") == "1":
            pytest.fail(told)
        pytest.skip(told)
    return folder


class Reader:
    """One process of one version ("" = the installed one)."""

    def __init__(self, version=""):
        env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
        if version:
            env["PYTHONPATH"] = str(installed(version))
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", str(CHILD)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=env,
            cwd="/",
        )
        self.version = json.loads(self.process.stdout.readline())["version"]
        assert not version or self.version == version

    def ask(self, **job):
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def logits(self, directory):
        out = directory / f"{self.version}.npy"
        answer = self.ask(do="logits", directory=str(directory), tokens=TOKENS, out=str(out))
        return answer.get("error"), None if "error" in answer else np.load(out)

    def close(self):
        self.process.stdin.close()
        self.process.wait()


@pytest.fixture(scope="module")
def readers():
    made = {}
    try:
        made |= {version: Reader(version) for version in ("", *OLD)}
        yield made
    finally:
        for reader in made.values():
            reader.close()


def small(model_type):
    """Return the family's tiny config as transformers 4 spells it."""
    sizes = {"vocab_size": 128, "max_position_embeddings": CONTEXT, "head_dim": 32}
    config = tiny.legacy(model_type) | sizes | {"architectures": [ARCHITECTURES[model_type]]}
    if model_type == "cohere":
        config["logit_scale"] = 1.0  # its default of 1/16 would hide a difference
    if model_type in ("gpt_neox", "phi", "phi3", "granite", "cohere", "olmo2"):
        del config["head_dim"]  # no field there
    return config


ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "mistral": "MistralForCausalLM",
    "gpt_neox": "GPTNeoXForCausalLM",
    "phi": "PhiForCausalLM",
    "granite": "GraniteForCausalLM",
    "cohere": "CohereForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "phi3": "Phi3ForCausalLM",
}


@pytest.fixture(scope="module")
def bases(readers, tmp_path_factory):
    """Write one checkpoint per family, saved by the oldest version as released ones were."""
    root = tmp_path_factory.mktemp("old")
    for model_type in FAMILIES:
        job = {"config": small(model_type), "directory": str(root / model_type)}
        assert readers[OLD[-1]].ask(do="make", **job) == {}, model_type
    return root


def written(bases, model_type, method):
    """Write a directory with the extended config and a link to the base's weights."""
    config = small(model_type)
    model = families.read(config)
    plan = scaled(model, method, TARGET)
    params = {label: made for label, (_, made) in plan.items()}
    directory = bases / f"{model_type}-{method}"
    if not directory.exists():
        directory.mkdir()
        new = families.write(config, model, params, TARGET)
        (directory / "config.json").write_text(json.dumps(new))
        os.link(bases / model_type / "model.safetensors", directory / "model.safetensors")
    return directory, next(iter(params.values()))


def verdict(model_type, params, version):
    """Return the loader table's row for this version of transformers."""
    minor = int(version.split(".")[1])
    for reading in loaders.readings(model_type, params, length=TARGET, target=TARGET):
        ends = [part.strip() for part in reading.versions.replace("and", "-").split("-")]
        bounds = [int(end.split(".")[1]) for end in ends if end.startswith("4.")]
        if reading.loader == "transformers" and bounds and bounds[0] <= minor <= bounds[-1]:
            return reading
    return None


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("model_type", FAMILIES)
def test_old_versions_of_transformers_compute_the_same_logits(readers, bases, model_type, method):
    directory, params = written(bases, model_type, method)
    error, wanted = readers[""].logits(directory)
    assert error is None
    assert wanted.std() > 0.1  # on a flat output nothing would show
    for version in OLD:
        error, found = readers[version].logits(directory)
        said = verdict(model_type, params, version)
        if model_type == "olmo2" and method not in ("pi", "ntk"):
            assert "two fields" in error, (version, error)
            assert said is not None
            assert said.verdict == "error"
            continue
        assert error is None, version
        assert np.abs(found - wanted).max() <= 1e-3, version
        assert said is not None
        assert said.verdict == "same", (version, said)


@pytest.mark.parametrize("method", ["ntk", "longrope"])
def test_phi3_is_read_with_its_three_keys(readers, bases, method):
    """Its 4.x config class refuses a dict with more keys; the others follow from the lengths."""
    if not (bases / "phi3").exists():
        job = {"config": small("phi3"), "directory": str(bases / "phi3")}
        assert readers[OLD[-1]].ask(do="make", **job) == {}
    directory, params = written(bases, "phi3", method)
    error, wanted = readers[""].logits(directory)
    assert error is None
    for version in OLD:
        error, found = readers[version].logits(directory)
        assert error is None, version
        assert np.abs(found - wanted).max() <= 1e-3, version
        assert verdict("phi3", params, version).verdict == "same"


def test_the_rotation_shows_in_the_logits(readers, bases):
    """Without its scaling the same model is far off, so that the comparison above can fail."""
    for model_type in FAMILIES:
        _, plain = readers[""].logits(bases / model_type)
        _, pi = readers[""].logits(written(bases, model_type, "pi")[0])
        assert np.abs(plain - pi).max() > 0.1, model_type


def test_the_new_spelling_alone_is_misread(readers, bases, tmp_path):
    """The control: a transformers 5 save has only rope_parameters, and 4.x runs without it."""
    directory, _ = written(bases, "llama", "yarn")
    config = json.loads((directory / "config.json").read_text())
    for key in ("rope_theta", "rope_scaling"):
        del config[key]
    (tmp_path / "config.json").write_text(json.dumps(config))
    os.link(bases / "llama" / "model.safetensors", tmp_path / "model.safetensors")
    _, wanted = readers[""].logits(tmp_path)
    for version in OLD:
        error, found = readers[version].logits(tmp_path)
        assert error is None
        assert np.abs(found - wanted).max() > 0.1, version


# Types that 4.57.6 knows but cannot read in this form, or cannot build without weights; the rest
# must agree. Values are parts of the message, or "plain" if it runs without the scaling.
CANNOT = {
    ("modernbert", "yarn"): "plain",
    ("modernbert-decoder", "yarn"): "plain",
    ("nemotron", "yarn"): "plain",
    # One theta for all layers there, so that the windowed ones move along.
    ("modernbert-decoder", "ntk"): "sliding_attention",
    ("olmo3", "ntk"): "sliding_attention",
    # Its legacy dict has no place for YaRN's temperature; longrope's own is read.
    ("phi3", "yarn"): "three fields",
    ("olmo", "yarn"): "two fields",
    ("olmo2", "yarn"): "two fields",
    ("llama4_text", "yarn"): "low_freq_factor",
    ("dbrx", "yarn"): "plain",
    ("phimoe", "ntk"): "no table",  # computed in each forward pass
    ("phimoe", "yarn"): "no table",
}
# Not built by 4.57.6 for reasons that have nothing to do with rotation.
NOT_BUILT = ("bamba", "gemma3n", "granitemoehybrid", "emu3", "llama4", "phi4_multimodal")


def test_every_type_is_built_by_4_57_6(capsys):
    process = Stock(extra_path=str(installed(OLD[0])))
    assert process.version == OLD[0]
    built, left_out, wrong = 0, {}, []
    for model_type in rotary_types():
        if model_type not in process.tasks or not process.has_head(model_type):
            continue
        for method in ("ntk", "yarn", *(("longrope",) if model_type == "phi3" else ())):
            case = old_case(model_type, method)
            if case is None:
                continue
            said = compare(case, process.build(case))
            expected = CANNOT.get((model_type, method), "")
            if model_type in NOT_BUILT and said.startswith("error"):
                left_out[model_type] = said
            elif bool(said) != bool(expected) or expected not in said:
                wrong.append(f"{model_type} {method}: {said or 'read as written, unexpectedly'}")
            else:
                built += 1
    process.close()
    with capsys.disabled():
        for model_type, reason in left_out.items():
            print(f"\nleft out by {OLD[0]}: {model_type}: {reason[:120]}", file=sys.stderr)
    assert not wrong, "\n".join(wrong)
    assert built >= 130


def old_case(model_type, method):
    """Extend the type's 4.x config, or its 5.x one if there is none, by a method."""
    text_type, path = tiny.text_part(model_type)
    text = None if path else tiny.legacy(text_type)
    if text is None or text_type == "olmo3":  # whose 4.x file is read with two thetas by 5.x
        text = tiny.modern(text_type)
    if text_type == "olmo3":
        for rope in text["rope_parameters"].values():
            rope["rope_theta"] = tiny.THETA
    base, model = base_case(model_type, "old", tiny.wrapped(model_type, text))
    assert not base.error, base.error
    return extended_case(base, model, method)


def compare(case, answer):
    """Return "" if every module has one of the wanted spectra and no scaled one is missing."""
    if "error" in answer:
        return f"error {answer['error']}"
    if not answer["sites"]:
        return "no table"
    seen = set()
    for built in answer["sites"]:
        hits = [label for label, wanted in case.wanted.items() if equal(built, wanted)]
        if not hits:
            plain = built["attention"] == 1.0
            return f"{'plain' if plain else 'other'} spectrum at {built['module']}"
        seen.update(hits)
    missing = case.wanted.keys() - seen
    return f"plain: {sorted(missing)} is nowhere" if missing else ""


def equal(built, wanted):
    if len(built["inv_freq"]) != len(wanted.inv_freq):
        return False
    near = np.allclose(built["inv_freq"], wanted.inv_freq, rtol=1e-6, atol=0)
    return near and abs(built["attention"] - wanted.attention_factor) <= 1e-6
