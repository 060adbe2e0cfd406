"""A model type released tomorrow: ropext reads it from stock transformers as `families` would."""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import proving
import published
import pytest
import tiny
from hiding import hidden

from ropext import families
from ropext.base.errors import InputError, ProofFailed, RopextError, UnsupportedModel
from ropext.cli.app import main
from ropext.families import described, stock
from ropext.families.config import auto_class, census, locate
from ropext.families.described import forget
from ropext.families.model import LENGTH_KEYS
from ropext.families.table import FAMILIES
from ropext.files import inspecting
from ropext.options.extend import Extend
from ropext.planning import make_plan
from ropext.verifying import proof

ROOT = Path(__file__).parents[2]
# Where the two sides differ, and why: by type, then by published config.
DIFFERENCES = json.loads(Path(__file__).with_name("described.json").read_text("utf-8"))
TWENTY = (
    *("afmoe", "bamba", "cohere2", "deepseek_v3", "exaone4", "gemma4_text", "glm4", "gpt_neox"),
    *(
        "gpt_oss",
        "granite",
        "llama4_text",
        "mellum",
        "mistral",
        "mixtral",
        "modernbert",
        "nanochat",
    ),
    *("olmo3", "phi3", "qwen3_5_text", "smollm3"),
)
CASES = {name: tiny.modern(name) for name in TWENTY}
if os.environ.get("SPELLINGS") == "all":  # as .ci/slow spellings
    rotary = sorted(name for name, known in census().items() if known.scheme == "rotary")
    CASES = {name: tiny.modern(name) for name in rotary}
    for name, released in published.CONFIGS.items():
        CASES[name] = published.LLAMA | released
        CASES[name].pop("auto_map", None)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield
    forget()


def read(config):
    """Read the model of a config as `open_snapshot` has it read."""
    stock.describe_unknown_types(config)
    return families.read(config)


def outcome(config, kinds=()):
    """Return the model and its plan by four with these types hidden, or the reason why there is
    none."""
    found = {}
    with hidden(*kinds):
        try:
            model = read(config)
            found |= {field.name: getattr(model, field.name) for field in fields(model)}
            plan = make_plan(config, Extend(factor=4.0))
            found |= {"method": plan.method, "written": plan.config}
        except RopextError as error:
            found["refused"] = type(error).__name__
    found |= {"sites": {site.label: site for site in found.get("sites", ())}}
    for told in ("notes", "stock_sites", "described"):
        found.pop(told, None)
    return found


def differences(config, *kinds):
    """Return the names of the fields that differ if stock alone knows these types."""
    known = outcome(config)
    shown = outcome(config, kinds)
    if "refused" in shown and "refused" not in known:
        return ["refused"]
    return sorted(name for name in known if known[name] != shown.get(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_stock_agrees_with_families(name):
    config = CASES[name]
    model_type, text_type, _, _ = locate(config)
    listed = DIFFERENCES["types"] | DIFFERENCES["published"]
    assert differences(config, model_type, text_type) == listed.get(name, [[]])[0]


def test_a_partial_rotation_is_found_by_changing_keys():
    """The quick one of those above, against numbers by hand."""
    config = tiny.modern("glm4")
    with hidden("glm4"):
        model = read(config)
    assert [site.rope.dim for site in model.sites] == [24]  # 32 channels of a head times 0.75
    theta = 12345.0
    wanted = [theta ** (-2 * pair / 24) for pair in range(12)]
    assert model.sites[0].wanted.inv_freq == pytest.approx(wanted, rel=1e-12)
    assert model.interleaved
    assert model.temperature == "rotated channels"
    assert differences(config, "glm4") == []


SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
NOVA = SIZES | {"model_type": "nova", "max_position_embeddings": 512, "rope_theta": 500.0}


def answer(theta=500.0):
    """Return the child's answer for such a type, whose heads of 16 turn half their channels."""
    row = {
        "forms": ["default", "linear"],
        "softmax_mscale": False,
        "interleaved": False,
        "masked_lm": False,
        "mrope": False,
        "temperature": "rotated channels",
        "every_layer_windowed": False,
        "rotates_only_windows": False,
        "theta": ["rope_theta"],
        "partial": ["partial_rotary_factor"],
        "dim": "head_dim",
    }
    facts = {"scheme": "rotary", "auto_class": "AutoModelForCausalLM", "row": row, "unseen": ""}
    facts |= {"rotates": [True, False], "defaults": {"partial": 0.5}}
    inv_freq = [theta ** (-2 * pair / 8) for pair in range(4)]
    rotary = [{"label": "", "inv_freq": inv_freq, "attention_factor": 1.0}]
    return {"transformers": "9.9", "types": {"nova": facts}, "rotary": rotary, "error": None}


@pytest.fixture
def asked(monkeypatch):
    """Return every job that a child received, and the answer to all of them."""
    jobs = []
    told = {"answer": answer()}

    def child(job, directories, timeout, task):
        jobs.append(job)
        return [told["answer"]]

    monkeypatch.setattr(stock, "knows", lambda kind: kind in ("nova", "novavl"))
    monkeypatch.setattr(stock, "ask_child", child)
    return jobs, told


def test_an_answer_is_kept_by_config_and_version(asked, monkeypatch):
    jobs, _ = asked
    model = read(NOVA)
    wanted = [500.0 ** (-2 * pair / 8) for pair in range(4)]
    assert model.sites[0].wanted.inv_freq == pytest.approx(wanted, rel=1e-12)
    assert model.forms == ("default", "linear")
    (note,) = [note for note in model.notes if note.startswith("[described]")]
    assert "transformers 9.9 was asked" in note
    assert "No loader was measured" in note
    assert "of its first 2 layers 1 turn nothing" in note
    plan = make_plan(NOVA, Extend(factor=4.0))
    assert plan.config["max_position_embeddings"] == 2048
    assert "written as a new theta, not measured in any engine" in plan.recommendation.reason
    doubts = {line.loader: line.note for line in plan.serving("OUT")}
    assert doubts["vllm"].endswith("ropext verify --endpoint URL compares a running server")
    assert doubts["transformers"].endswith("; extend proves it with the one that is installed")
    assert len(jobs) == 1
    forget()  # as the next command begins
    read(NOVA)
    assert len(jobs) == 1
    monkeypatch.setattr(stock, "installed", lambda: "9.10")
    forget()
    read(NOVA)
    assert len(jobs) == 2


def test_a_damaged_answer_is_requested_again(asked, tmp_path):
    jobs, _ = asked
    read(NOVA)
    (kept,) = (tmp_path / "cache").rglob("*.json")
    kept.write_text("[1")
    forget()
    read(NOVA)
    assert len(jobs) == 2


def test_numbers_that_are_not_understood_refuse_the_config(asked):
    asked[1]["answer"] = answer(theta=501.0)
    with pytest.raises(UnsupportedModel, match=r"transformers 9\.9 computes other frequencies"):
        read(NOVA)


def test_each_config_of_an_unknown_type_is_described_separately(asked):
    """ropext asks again for another config of the same type, and the first keeps its answers."""
    jobs, told = asked
    read(NOVA)
    other = answer()
    other["types"]["nova"]["row"]["interleaved"] = True
    other["types"]["nova"]["rotates"] = [True, True, True]
    told["answer"] = other
    deeper = NOVA | {"num_hidden_layers": 3}
    assert read(deeper).interleaved
    assert len(jobs) == 2
    assert not read(NOVA).interleaved
    assert read(deeper).interleaved
    assert len(jobs) == 2


def test_two_configs_of_one_type_are_each_written_by_their_own_facts(asked):
    other = answer()
    other["types"]["nova"]["row"]["theta"] = ["rotary_base"]
    other["types"]["nova"]["auto_class"] = "AutoModelForMaskedLM"
    based = SIZES | {"model_type": "nova", "max_position_embeddings": 512, "rotary_base": 500.0}
    first = read(NOVA)
    asked[1]["answer"] = other
    second = read(based)
    wanted = {"": {"rope_type": "default", "rope_theta": 900.0}}
    for config, model, key in ((NOVA, first, "rope_theta"), (based, second, "rotary_base")):
        written = families.write(dict(config), model, wanted, 1024)
        assert {name: written[name] for name in written if "theta" in name or "base" in name} == {
            key: 900.0
        }
        read(based if config is NOVA else NOVA)  # the other one between
    assert auto_class("nova", first.described) == "AutoModelForCausalLM"
    assert auto_class("nova", second.described) == "AutoModelForMaskedLM"


def test_a_second_config_is_compared_with_stock_too(asked):
    read(NOVA)
    asked[1]["answer"] = answer(theta=501.0)
    deeper = NOVA | {"num_hidden_layers": 3}
    for config in (deeper, deeper):  # not the first time alone
        with pytest.raises(UnsupportedModel, match="computes other frequencies"):
            read(config)
    read(NOVA)


@pytest.mark.parametrize(
    "other",
    [
        {"rope_theta": 600.0},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"max_position_embeddings": 1024},
    ],
)
def test_a_config_that_differs_in_its_rope_alone_is_compared_with_stock_too(asked, other):
    """The facts that it shares with a known config tell nothing about its own numbers."""
    jobs, told = asked
    read(NOVA)
    told["answer"] = answer(theta=501.0)  # which no reading of the other one has
    for _ in range(2):
        with pytest.raises(UnsupportedModel, match="computes other frequencies"):
            read(NOVA | other)
    assert len(jobs) == 2
    read(NOVA)
    assert len(jobs) == 2


def test_two_configs_of_an_unknown_type_keep_their_own_thetas(asked):
    """Both are opened before either is read."""
    other = NOVA | {"rope_theta": 600.0}
    stock.describe_unknown_types(NOVA)
    asked[1]["answer"] = answer(theta=601.0)
    stock.describe_unknown_types(other)
    families.read(NOVA)
    with pytest.raises(UnsupportedModel, match="computes other frequencies"):
        families.read(other)


def test_an_extended_config_is_not_described_again(asked):
    jobs, _ = asked
    read(NOVA)
    written = make_plan(NOVA, Extend(factor=4.0, method="pi")).config
    assert read(written).sites[0].params["factor"] == 4.0
    assert len(jobs) == 1


def test_an_in_memory_config_is_described_by_stock(asked):
    assert inspecting.inspect(NOVA).model.forms == ("default", "linear")
    assert len(asked[0]) == 1


def test_keys_that_an_extension_writes_change_no_answer():
    names = {*LENGTH_KEYS, "rope_scaling", "rope_parameters"}
    for row in FAMILIES.values():
        names |= {path.rpartition(".")[2] for path in (*row.theta, *row.partial)}
        names |= {label.theta for label in row.labels if label.theta}
    assert "rope_local_base_freq" in names
    for name in names:
        assert described._without_written({"a": [{name: 1}], "b": 2}) == {"a": [{}], "b": 2}
    kept = SIZES | {"head_dim": 16, "layer_types": ["full_attention"], "sliding_window": 8}
    kept |= {"layer_rope_theta": [500.0, 0]}  # these two say which layers rotate
    kept |= {"rope_parameters": {"full_attention": None, "sliding_attention": {}}}
    assert described._without_written(kept) == kept


def test_a_config_that_its_caller_edits_is_another_one(asked):
    config = dict(NOVA)
    read(config)
    config["rope_theta"] = 600.0
    asked[1]["answer"] = answer(theta=600.0)
    assert read(config).sites[0].rope.theta == 600.0


def test_a_known_type_inside_an_unknown_one_stays_known(asked):
    jobs, told = asked
    llama = SIZES | {"model_type": "llama", "max_position_embeddings": 512, "vocab_size": 100}
    outer = {"model_type": "novavl", "text_config": llama}
    facts = answer()["types"]["nova"]
    facts["row"]["mrope"] = True
    composite = {"scheme": "composite", "path": ["text_config"], "text": "llama", "added": {}}
    composite["auto_class"] = "AutoModelForImageTextToText"
    inv_freq = [10000.0 ** (-2 * pair / 16) for pair in range(8)]
    numbers = [{"label": "", "inv_freq": inv_freq, "attention_factor": 1.0}]
    told["answer"] = answer() | {"types": {"llama": facts, "novavl": composite}, "rotary": numbers}
    (note,) = [note for note in read(outer).notes if note.startswith("[described]")]
    assert "novavl is not among the model types" in note
    assert len(jobs) == 1
    model = read(llama)
    assert not model.mrope
    assert not model.notes
    numbers[0]["attention_factor"] = 2.0
    forget()
    shutil.rmtree(stock.user_cache())
    with pytest.raises(UnsupportedModel, match=r"'novavl' .* computes other frequencies"):
        read(outer)


def test_a_change_of_the_childs_code_drops_kept_answers(monkeypatch, tmp_path):
    folder = tmp_path / "proof"
    shutil.copytree(stock.CHILD.parent, folder)
    monkeypatch.setattr(stock, "CHILD", folder / "child.py")
    loaded = ["child"]
    for name in loaded:  # grows while it is read
        text = (folder / f"{name}.py").read_text("utf-8")
        for other in re.findall(r'sibling_module\("(\w+)"\)', text):
            loaded += [] if other in loaded else [other]
    assert {*loaded} == {"child", "describing", "turning", "forward", "tensors"}
    for name in loaded:
        before = stock._place_of(NOVA)
        with (folder / f"{name}.py").open("a") as file:
            file.write("# mended\n")
        assert stock._place_of(NOVA) != before, name


def test_the_question_to_stock_is_reported(asked, tmp_path, capsys, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps(NOVA))
    told = asked[1]
    heard = []

    def child(*job):
        heard.append(capsys.readouterr().err)
        return [told["answer"]]

    monkeypatch.setattr(stock, "ask_child", child)
    monkeypatch.setattr(stock, "installed", lambda: "9.9")
    monkeypatch.setattr(sys, "argv", ["ropext", "inspect", str(tmp_path)])
    main()
    wanted = "does not know the model type 'nova': transformers 9.9 is asked, in a child process"
    assert [wanted in sentence for sentence in heard] == [True]
    forget()
    main()
    assert "child process" not in capsys.readouterr().err  # the answer was kept
    assert len(heard) == 1


def test_a_description_that_takes_too_long_is_no_proof(asked, monkeypatch):
    def run(*words, **options):
        raise subprocess.TimeoutExpired("child", 600)

    monkeypatch.undo()
    monkeypatch.setattr(stock, "knows", lambda kind: kind == "nova")
    monkeypatch.setattr(stock, "user_cache", lambda: None)
    monkeypatch.setattr(stock.subprocess, "run", run)
    monkeypatch.setattr(stock, "ask_child", proving.apart)
    with pytest.raises(InputError, match=r"the description of config\.json took .* stopped$"):
        read(NOVA)
    with pytest.raises(ProofFailed, match=r"the verification of .* stopped; --no-verify skips it"):
        proof.build([proof.BuildRequest(ROOT)])


def test_transformers_knows_its_model_types_alone():
    assert stock.knows("llama")
    assert stock.knows("openai-gpt")
    for name in ("AutoConfig", "LlamaConfig", "CONFIG_MAPPING", "transformers", "lla.a", "llam"):
        assert not stock.knows(name), name


def test_a_config_that_stock_cannot_build_is_reported(asked):
    asked[1]["answer"] = {"transformers": "9.9", "error": "ValueError: no such size"}
    with pytest.raises(InputError, match=r"transformers 9\.9 knows .* 'nova'.* no such size"):
        read(NOVA)


def test_a_config_with_auto_map_runs_no_code(asked):
    with pytest.raises(InputError, match="auto_map"):
        read(NOVA | {"auto_map": {"AutoConfig": "x.Y"}})
    assert not asked[0]


def test_sizes_without_bound_are_refused_before_they_are_built(asked):
    with pytest.raises(InputError, match="num_hidden_layers must be at most 1024"):
        read(NOVA | {"num_hidden_layers": 10**6})
    assert not asked[0]


def with_types(place: Path, **renamed: str) -> None:
    """Copy the installed transformers, and add these types to it under new names too."""
    import transformers

    real = Path(transformers.__file__).parent
    for folder in ("", "models", "models/auto"):
        (place / folder).mkdir(parents=True)
        for entry in (real / folder).iterdir():
            if entry.name not in ("models", "auto", "__pycache__"):
                (place / folder / entry.name).symlink_to(entry)
    for path in (real / "models" / "auto").glob("*.py"):
        lines = []
        for line in path.read_text("utf-8").splitlines(keepends=True):
            lines.append(line)
            lines += [named(line, old, new) for old, new in renamed.items() if f'"{old}"' in line]
        copy = place / "models" / "auto" / path.name
        copy.unlink()
        copy.write_text("".join(lines), "utf-8")
    for old, new in renamed.items():
        (place / "models" / new).mkdir()
        for path in (real / "models" / old).glob("*.py"):
            text = named(path.read_text("utf-8"), old, new)
            (place / "models" / new / path.name.replace(old, new)).write_text(text, "utf-8")


def named(text: str, old: str, new: str) -> str:
    """Return the text of one type under the name of another."""
    return text.replace(old, new).replace(old.capitalize(), new.capitalize())


@pytest.mark.slow
def test_an_unknown_type_is_inspected_planned_extended_and_proved(tmp_path):
    """One with partial rotation, one with an embedding for each type of layer."""
    import transformers

    renamed = {"glm4": "nova", "olmo3": "quasar"}
    with_types(tmp_path / "newer" / "transformers", **renamed)
    environment = os.environ | {"PYTHONPATH": f"{tmp_path / 'newer'}{os.pathsep}{ROOT}"}

    def ropext(*words):
        command = [sys.executable, "-m", "ropext", *map(str, words)]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False, cwd=tmp_path
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    for old, new in renamed.items():
        place = tmp_path / new
        config = transformers.AutoConfig.for_model(**tiny.modern(old))
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(place)
        values = json.loads((place / "config.json").read_text("utf-8"))
        text = named(json.dumps(values), old, new)
        (place / "config.json").write_text(text, "utf-8")
        known = read(values)
        shown = ropext("inspect", place, "--json")
        assert [site["inv_freq"] for site in shown["sites"]] == [
            list(site.wanted.inv_freq) for site in known.sites
        ]
        out = tmp_path / f"{new}-out"
        plan = make_plan(values, Extend(factor=4.0))
        told = ropext("plan", place, "--factor", "4", "--json")
        assert told["method"] == plan.method
        assert re.search(f"{new} is not among", " ".join(told["warnings"]))
        assert ropext("extend", place, "--factor", "4", "-o", out, "--json")["proof"]
        written = json.loads((out / "config.json").read_text("utf-8"))
        same = {key: value for key, value in plan.config.items() if old not in str(value).lower()}
        for key in ("rope_theta", "rope_scaling") if new == "quasar" else ():
            same.pop(key, None)  # transformers 4 reads them, which knows no such type
        assert {key: written.get(key) for key in same} == same
    shutil.rmtree(tmp_path / "newer")


MOLMO = {
    "model_type": "molmo2_text",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 4,
    "intermediate_size": 64,
    "vocab_size": 128,
    "additional_vocab_size": 8,
    "max_position_embeddings": 256,
    "rope_theta": 10000.0,
}
MINICPM3 = {
    "model_type": "minicpm3",
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "vocab_size": 128,
    "max_position_embeddings": 32768,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "type": "longrope",
        "long_factor": [1.0 + pair / 4 for pair in range(16)],
        "short_factor": [1.0 + pair / 8 for pair in range(16)],
        "original_max_position_embeddings": 32768,
    },
}
# Gemma 4 31B by its layers, heads and windows; the sizes that no cache depends on are narrow.
GEMMA4_31B = {
    "model_type": "gemma4_text",
    "hidden_size": 64,
    "num_hidden_layers": 60,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "num_global_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "attention_k_eq_v": True,
    "intermediate_size": 64,
    "vocab_size": 128,
    "vocab_size_per_layer_input": 128,
    "sliding_window": 1024,
    "max_position_embeddings": 262144,
    "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 10,
}


@pytest.mark.parametrize("layers", [{}, {"rope_scaling_layers": [0, 2]}])
def test_a_second_embedding_that_no_scaling_reaches_is_found(layers):
    with hidden("molmo2_text"), pytest.raises(UnsupportedModel, match="keeps an unscaled rotary"):
        read(MOLMO | layers)


def test_a_longrope_of_latent_attention_is_sized_by_its_own_key():
    with hidden("minicpm3"):
        model = read(MINICPM3)
    (site,) = model.sites
    plain = [10000.0 ** (-2 * pair / 32) for pair in range(16)]
    wanted = [one / (1.0 + pair / 4) for pair, one in enumerate(plain)]
    assert site.rope.spectrum.inv_freq == pytest.approx(wanted, rel=1e-12)


def test_the_cache_of_a_described_type_is_counted_from_transformers_modules():
    with hidden("gemma4_text"):
        model = read(GEMMA4_31B)
    full = 10 * 2 * 4 * 512 * 524_288  # layers, keys and values, heads, channels, tokens
    windowed = 50 * 2 * 16 * 256 * 1024
    assert model.kv_bytes(524_288) == 2 * (full + windowed)
    assert any("KV cache is counted by the sizes of its projections" in one for one in model.notes)


@pytest.mark.parametrize("kind", ["gptj", "bloom"])
def test_an_unknown_type_without_rotation_may_have_other_positions(kind):
    sizes = {"n_embd": 64, "n_head": 4, "n_layer": 2, "hidden_size": 64, "vocab_size": 128}
    with hidden(kind), pytest.raises(UnsupportedModel, match="may have positions of another kind"):
        read({"model_type": kind, **sizes})


def test_frequencies_among_the_weights_are_not_scaled_by_a_config(tmp_path):
    """ESM's class computes them from rope_theta, and loading replaces them by the checkpoint's."""
    import transformers

    sizes = {"vocab_size": 33, "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 64}
    tokens = {"pad_token_id": 1, "mask_token_id": 32, "num_attention_heads": 4}
    config = transformers.EsmConfig(position_embedding_type="rotary", **sizes, **tokens)
    transformers.EsmForMaskedLM(config).save_pretrained(tmp_path)
    place = tmp_path / "config.json"
    place.write_text(json.dumps(json.loads(place.read_text()) | {"rope_theta": 43872.0}))
    loaded = transformers.EsmForMaskedLM.from_pretrained(tmp_path)
    plain = [10000.0 ** (-2 * pair / 16) for pair in range(8)]
    assert loaded.esm.rotary_embeddings.inv_freq.tolist() == pytest.approx(plain, rel=1e-6)
    for kinds in ((), ("esm",)):  # by the census, and by what transformers shows
        with hidden(*kinds), pytest.raises(UnsupportedModel, match="frequencies among its weights"):
            read(json.loads(place.read_text()))
