"""What each architecture of 2026 carries: ggml's formula on the written file, by its own reader."""

import numpy as np
import pytest
import transcriptions
from gguf_files import ggml, making

import ropext
from ropext import families
from ropext.base.errors import NotExpressible, UnsupportedModel
from ropext.files import inspecting

DRIFT = 64 * 2**-23  # ggml multiplies up a power in float32
STANDING = np.array([1.0] * 4 + [1e30] * 12, np.float32)
WINDOWS = {"attention.sliding_window": 32, "attention.sliding_window_pattern": [True, False]}
HALF = {"rope.dimension_count": 8}
GEMMA4 = WINDOWS | {"attention.key_length": 32, "attention.key_length_swa": 16}
GEMMA4 |= {"rope.dimension_count": 32, "rope.dimension_count_swa": 16, "rope.freq_base_swa": 1e4}
GEMMA4 |= {"rope.freq_base": 1e9}
# More metadata than a Llama's, and the channels of a full layer that rotate.
NEW = {
    "qwen35": (HALF, 8),
    "qwen35moe": (HALF, 8),
    "qwen3next": (HALF, 8),
    "qwen2vl": ({}, 16),
    "qwen3vl": ({}, 16),
    "qwen3vlmoe": ({}, 16),
    "gemma3n": (WINDOWS, 16),
    "gemma4": (GEMMA4, 32),
    "olmo2": (WINDOWS, 16),
    "olmo3": (WINDOWS, 16),
    "gptoss": (WINDOWS | {"rope.scaling.type": "none"}, 16),
    "granite_swa": (WINDOWS, 16),
    "hy_v3": ({}, 16),
    "laguna": (WINDOWS | HALF | {"rope.dimension_count_swa": 16}, 8),
    "minimax-m2": (HALF, 8),
    "step35": (WINDOWS, 8),
}


def made(path, arch, more=None, **tensors):
    more = NEW[arch][0] if more is None else more
    data = {"rope_freqs.weight": STANDING} if arch == "gemma4" else {}
    return making.write(path, arch, making.LLAMA | more, data=data | tensors | making.tensors())


@pytest.mark.parametrize("arch", NEW)
def test_yarn_of_new_architectures_is_the_papers(tmp_path, arch):
    path, dim = made(tmp_path / "m.gguf", arch), NEW[arch][1]
    theta = (making.LLAMA | NEW[arch][0])["rope.freq_base"]
    ropext.extend(str(path), tmp_path / "o.gguf", factor=4.0, method="yarn")
    wanted, factor = transcriptions.yarn(dim, theta, 256, 1024)
    angles, attention = ggml.rope(tmp_path / "o.gguf", dim)
    turning = 4 if arch == "gemma4" else dim // 2
    np.testing.assert_allclose(angles[:turning], wanted[:turning], rtol=DRIFT)
    assert max(angles[turning:], default=0) < 1e-25
    assert attention == pytest.approx(factor, rel=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        {"method": "pi", "factor": 4.0},
        {"method": "ntk", "factor": 4.0},
        {"method": "llama3", "factor": 4.0},
        {"length_only": True, "target": 1024},
        {"method": "pi", "target": 2048, "from_original": True},
        {"method": "ntk", "target": 4096, "again": True},
    ],
)
def test_the_unrotated_pairs_of_gemma_4_keep_their_divisors(tmp_path, options):
    path, out = made(tmp_path / "m.gguf", "gemma4"), tmp_path / "o.gguf"
    if "target" in options and "method" in options:  # an already extended model
        ropext.extend(str(path), tmp_path / "one.gguf", factor=4.0, method="llama3")
        path = tmp_path / "one.gguf"
    wanted = ropext.extend(str(path), out, **options).plan.main.wanted
    held = ggml.tensors(out)["rope_freqs.weight"]
    assert held.shape == (16,)
    assert set(held[4:]) == {np.float32(1e30)}
    told = {edit.key for edit in inspecting.plan(str(path), **options).edits}
    assert ("rope_freqs.weight" in told) is (
        options.get("method") == "llama3" or "one" in path.name
    )
    np.testing.assert_allclose(ggml.rope(out, 32)[0][:4], wanted.inv_freq[:4], rtol=DRIFT)
    assert wanted.inv_freq[4:] == (0.0,) * 12


@pytest.mark.parametrize(
    ("arch", "options"),
    [
        ("qwen35", {"method": "llama3"}),
        ("qwen3vl", {"method": "yarn", "beta_fast": 8.0}),
        ("gemma4", {"method": "yarn", "attention_factor": 1.3}),
        ("gemma3n", {"method": "yarn", "attention_factor": 1.3}),
        ("step35", {"method": "yarn", "attention_factor": 1.3}),
        ("olmo2", {"method": "ntk"}),  # llama.cpp gives its windowed layers the same theta
    ],
)
def test_options_that_reach_windowed_layers_or_are_not_read_are_refused(tmp_path, arch, options):
    path = made(tmp_path / "m.gguf", arch)
    asked = 'method="yarn", beta_fast=8 ' if "beta_fast" in options else ""
    with pytest.raises(NotExpressible, match=f"{asked}cannot be .* reads of a {arch} GGUF"):
        ropext.extend(str(path), tmp_path / "o.gguf", factor=4.0, **options)
    assert [own.name for own in tmp_path.iterdir()] == ["m.gguf"]


def test_a_theta_does_not_reach_the_windows_that_would_follow_it(tmp_path):
    """A Laguna without freq_base_swa: its windowed layers have the theta of the others."""
    path, out = made(tmp_path / "m.gguf", "laguna"), tmp_path / "o.gguf"
    ropext.extend(str(path), out, factor=4.0, method="ntk")
    assert ggml.keys(out)["laguna.rope.freq_base"] > 60_000
    assert ggml.keys(out)["laguna.rope.freq_base_swa"] == 50_000


@pytest.mark.parametrize("there", [True, False])
def test_the_row_of_a_step_is_as_long_as_its_windowed_layers_ask_for(tmp_path, there):
    """Its full layers rotate 8 of 16 channels and read the first 4 of 8 divisors."""
    row = {"rope_freqs.weight": np.linspace(1, 2, 8, dtype=np.float32)} if there else {}
    path = made(tmp_path / "m.gguf", "step35", **row)
    done = ropext.extend(str(path), tmp_path / "o.gguf", factor=4.0, method="llama3")
    held = ggml.tensors(tmp_path / "o.gguf")["rope_freqs.weight"]
    assert len(held) == 8
    plain = 50_000.0 ** (-np.arange(4) / 4)
    np.testing.assert_allclose(plain / held[:4], done.plan.main.wanted.inv_freq, rtol=DRIFT)


BLOB = {k: v for k, v in making.LLAMA.items() if k != "rope.freq_base"} | WINDOWS


@pytest.mark.parametrize(
    ("more", "general", "factor", "thetas"),
    [
        ({"context_length": 131_072}, {}, 8.0, (1e6, 2e4)),
        ({"context_length": 131_072, "rope.scaling.type": "none"}, {}, 1.0, (1e6, 2e4)),
        ({"context_length": 32_768}, {}, 1.0, (1e6, 2e4)),
        ({"context_length": 32_768, "rope.global.freq_base": None}, {}, 1.0, (1e6, 2e4)),
        (
            {"context_length": 131_072, "rope.freq_base": 1e6, "mm.tokens_per_image": 256},
            {"rms": 1e-6},
            8.0,
            (1e6, 1e4),
        ),
        # Of another converter, which writes this key.
        ({"context_length": 131_072, "rope.freq_base": 1e6}, {"rms": 1e-6}, 1.0, (1e6, 1e4)),
    ],
)
def test_a_gemma_3_of_ollamas_converter_starts_from_ollamas_default(
    tmp_path, more, general, factor, thetas
):
    if general:
        more = more | {"attention.layer_norm_rms_epsilon": 1e-6}
    else:
        more = {"rope.global.freq_base": 1e6, "rope.local.freq_base": 2e4} | more
        more = {key: item for key, item in more.items() if item is not None}
    path, out = making.write(tmp_path / "sha256-ab", "gemma3", BLOB | more), tmp_path / "o.gguf"
    sites = inspecting.inspect(str(path)).model.sites
    assert sorted(site.rope.theta for site in sites) == sorted(thetas)
    full = next(site.rope for site in sites if site.scaled)
    assert full.spectrum.inv_freq[0] == 1 / factor
    stated = more["context_length"]
    options = {"target": 2 * stated, "method": "pi"} | ({"context": stated} if factor > 1 else {})
    ropext.extend(str(path), out, **options)
    keys = ggml.keys(out)
    assert keys["gemma3.rope.scaling.type"] == "linear"
    assert keys["gemma3.rope.scaling.factor"] == 2 * factor


def test_a_gpt_oss_of_ollamas_converter_is_a_yarn_and_its_copy_is_refused_there(tmp_path):
    yarn = {"rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64}
    path = making.write(tmp_path / "m.gguf", "gptoss", making.LLAMA | WINDOWS | yarn)
    assert inspecting.inspect(str(path)).main.params["rope_type"] == "yarn"
    options = {"target": 1024, "method": "yarn", "from_original": True}
    made = inspecting.plan(str(path), **options)
    said = {own.loader: own for own in made.readings}
    assert said["llama.cpp"].verdict == said["ollama"].verdict == "error"
    assert "knows no architecture gptoss" in said["llama.cpp"].why
    assert "`ollama create` refuses a copy" in said["ollama"].why
    assert [line.command for line in made.serving("OUT.gguf")] == ["", "", ""]
    with pytest.raises(NotExpressible, match="for ollama"):
        inspecting.plan(str(path), for_loaders="ollama", **options)


@pytest.mark.parametrize(
    ("name", "arch", "method", "verdict"),
    [
        ("koboldcpp", "qwen3", "yarn", "same"),
        ("koboldcpp", "llama", "llama3", "same"),
        ("llama-cpp-python", "qwen3", "yarn", "same"),
        ("ik_llama.cpp", "phi3", "llama3", "error"),
        ("mistral.rs", "llama", "pi", "same"),
        ("mistral.rs", "llama", "yarn", "error"),
        ("mistral.rs", "qwen3", "ntk", "same"),
        ("mistral.rs", "mistral3", "pi", "not measured"),
        ("mistral.rs", "mistral3", "yarn", "same"),
        ("candle", "qwen3", "yarn", "ignored"),
        ("candle", "qwen3", "ntk", "same"),
        ("text-generation-webui", "qwen35", "yarn", "same"),
        ("lemonade", "gemma4", "yarn", "same"),
        ("jan", "qwen3", "yarn", "not measured"),
    ],
)
def test_for_accepts_or_refuses_each_program_that_runs_ggufs(tmp_path, name, arch, method, verdict):
    path = made(tmp_path / "m.gguf", arch, NEW.get(arch, ({},))[0])
    options = {"factor": 4.0, "method": method}
    found = inspecting.plan(str(path), **options)
    mine = next(own for own in found.readings if own.loader == name)
    assert (mine.verdict, bool(mine.versions)) == (verdict, True)
    if verdict == "same":
        inspecting.plan(str(path), for_loaders=name, **options)
        return
    assert mine.why
    with pytest.raises(NotExpressible, match=f"for {name}"):
        inspecting.plan(str(path), for_loaders=name, **options)


def test_mistral_rs_reads_a_llama_with_experts_as_mixtral(tmp_path):
    path = making.write(tmp_path / "m.gguf", "llama", making.LLAMA | {"expert_count": 8})
    found = inspecting.plan(str(path), factor=4.0, method="pi").readings
    said = {own.loader: own for own in found}
    assert (said["mistral.rs"].verdict, said["llama.cpp"].verdict) == ("error", "same")
    assert "Mixtral" in said["mistral.rs"].why
    with pytest.raises(NotExpressible, match=r"for mistral\.rs"):
        inspecting.plan(str(path), factor=4.0, method="pi", for_loaders="mistral.rs")
    ropext.extend(
        str(path), tmp_path / "o.gguf", factor=4.0, method="ntk", for_loaders="mistral.rs"
    )


@pytest.mark.parametrize(
    ("method", "wanted"),
    [
        ("yarn", "ROPE_SCALING_TYPE=yarn|ROPE_SCALE=4.0|YARN_ORIG_CTX=256"),
        ("pi", "ROPE_SCALING_TYPE=linear|ROPE_SCALE=4.0"),
        ("llama3", ""),  # no flag divides each pair by its own
    ],
)
def test_the_way_by_ollamas_environment_is_printed(tmp_path, method, wanted):
    path = making.write(tmp_path / "m.gguf")
    lines = inspecting.plan(str(path), factor=4.0, method=method).serving("OUT.gguf")
    note = next(line.note for line in lines if line.loader == "ollama")
    found = [word.removeprefix("LLAMA_ARG_") for word in note.split() if "LLAMA_ARG" in word]
    assert "|".join(found) == wanted
    assert "second copy" in note


@pytest.mark.parametrize(("heads", "shared"), [([2, 1], 0), (2, 0), (2, 1)])
def test_the_cache_of_a_gemma_4_is_that_of_its_directory(tmp_path, heads, shared):
    """Its full layers have wider heads, sometimes fewer, and its last layers keep none."""
    more = GEMMA4 | {"attention.head_count_kv": heads, "attention.shared_kv_layers": shared}
    own = inspecting.inspect(str(made(tmp_path / "m.gguf", "gemma4", more))).model
    config = {"model_type": "gemma4_text", "num_hidden_layers": 2, "hidden_size": 64}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    config |= {"global_head_dim": 32, "sliding_window": 32, "max_position_embeddings": 256}
    config |= {"layer_types": ["sliding_attention", "full_attention"]}
    config |= {"num_kv_shared_layers": shared}
    if isinstance(heads, list):
        config |= {"num_global_key_value_heads": 1, "attention_k_eq_v": True}
    assert own.kv_bytes(1024) == families.read(config).kv_bytes(1024)


@pytest.mark.parametrize(
    ("arch", "pattern", "full"),
    [
        ("gemma2", None, [1, 3, 5, 7]),
        ("gemma3", None, [5]),
        ("laguna", None, [0, 4]),  # its first layer sees all
        ("cohere2", None, [3, 7]),
        ("gemma3", 4, [3, 7]),
        ("gemma3", [True, False], [1, 2, 3, 4, 5, 6, 7]),  # layers that are not listed see all
        ("gemma3", 0, []),
    ],
)
def test_the_windowed_layers_are_those_of_llama_cpp(tmp_path, arch, pattern, full):
    """As load_swa_pattern and set_swa_pattern of llama.cpp have it."""
    more = {"block_count": 8, "attention.sliding_window": 32}
    if pattern is not None:
        more["attention.sliding_window_pattern"] = pattern
    kinds = inspecting.inspect(str(made(tmp_path / "m.gguf", arch, more))).model.layer_types
    assert [i for i, kind in enumerate(kinds) if kind == "full_attention"] == full
    assert len(kinds) == 8


def test_layers_that_draft_are_not_counted(tmp_path):
    more = HALF | {"block_count": 9, "nextn_predict_layers": 1}
    path = made(tmp_path / "m.gguf", "qwen35", more)
    seen = inspecting.inspect(str(path)).model
    assert seen.layer_types.count("full_attention") == 2
    assert seen.layers == 8
    said = inspecting.plan(str(path), factor=4.0).warnings
    assert any("multi-token prediction) follow the same rope keys" in own for own in said)
    plain = made(tmp_path / "n.gguf", "qwen35", HALF | {"block_count": 8})
    assert not any("multi-token" in own for own in inspecting.plan(str(plain), factor=4.0).warnings)
    assert inspecting.inspect(str(plain)).model.kv_bytes(512) == seen.kv_bytes(512)


@pytest.mark.parametrize(
    ("arch", "type_"), [("granite_swa", "granite_swa"), ("gemma4", "gemma4_text")]
)
def test_windows_alone_get_the_warning_of_a_directory(tmp_path, arch, type_):
    every = NEW[arch][0] | {"attention.sliding_window_pattern": [True, True]}
    path = made(tmp_path / "m.gguf", arch, every)
    kinds = ["sliding_attention"] * 2
    config = {"model_type": type_, "num_hidden_layers": 2, "layer_types": kinds}
    config |= {"sliding_window": 32, "max_position_embeddings": 256}
    with pytest.raises(UnsupportedModel, match="every layer sees a window of 32 tokens") as told:
        ropext.extend(str(path), tmp_path / "o.gguf", factor=4.0)
    assert families.read(config).obstacles[0] in str(told.value)
    # One layer that sees all is enough.
    assert not inspecting.inspect(str(made(tmp_path / "n.gguf", arch))).model.obstacles


def test_muse_glimmer_gets_the_advice_to_raise_its_length_alone(tmp_path):
    path, out = made(tmp_path / "m.gguf", "muse-glimmer", WINDOWS), tmp_path / "o.gguf"
    with pytest.raises(UnsupportedModel, match=r"windowed layers only.*length_only=True"):
        ropext.extend(str(path), out, factor=4.0)
    ropext.extend(str(path), out, target=1024, length_only=True)
    changed = {key for key, own in ggml.keys(out).items() if ggml.keys(path).get(key) != own}
    assert {key for key in changed if key.startswith("muse")} == {"muse-glimmer.context_length"}
    shown = inspecting.plan(str(path), factor=4.0)
    assert "scaling cannot help this model" in str(shown.refusal)
    assert shown.serving("OUT.gguf") == ()
    assert "--length-only raises its stated length" in shown.recommendation.reason
    assert inspecting.plan(str(path), factor=4.0, method="yarn").method == "yarn"


def test_the_plan_says_how_large_the_copies_are(tmp_path):
    """The sparse file has 1 GiB, whose weights nobody reads."""
    path = tmp_path / "m.gguf"
    writer = making.gguf.GGUFWriter(path, "llama")
    for key, item in making.LLAMA.items():
        making.value(writer, f"llama.{key}", item)
    writer.add_tensor_info("blk.0.ffn_up.weight", (1 << 18, 1024), np.float32, 1 << 30)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file):
        write()
    writer.write_ti_data_to_file()
    writer.close()
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + (1 << 30) + 64)
    said = "; ".join(inspecting.plan(str(path), factor=4.0).warnings)
    assert "the copy has 1.1 GB; `ollama create` makes a second one as large" in said
    small = inspecting.plan(str(making.write(tmp_path / "s.gguf")), factor=4.0)
    assert not any("the copy" in warning for warning in small.warnings)


def test_a_refused_file_does_not_lead_to_a_refused_directory(tmp_path):
    """EXAONE 4 32B and Granite 4 H, as their configs say it, are refused as directories too."""
    windows = {"sliding_window": 4096, "sliding_window_pattern": "LLLG", "num_hidden_layers": 64}
    windows |= {"layer_types": [*["sliding_attention"] * 3, "full_attention"] * 16}
    assert families.read({"model_type": "exaone4", **windows}).obstacles
    nope = {"model_type": "granitemoehybrid", "position_embedding_type": "nope"}
    with pytest.raises(UnsupportedModel, match="nothing to scale"):
        families.read(nope)
    for arch, said in (("exaone4", "helps the 32B"), ("granitehybrid", "nothing to scale")):
        path = made(tmp_path / f"{arch}.gguf", arch, {})
        with pytest.raises(UnsupportedModel, match=said):
            inspecting.plan(str(path), factor=2.0)
