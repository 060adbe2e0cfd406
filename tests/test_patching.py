"""A model patched in memory computes the same as the saved and reloaded checkpoint, bit for bit."""

import copy
import json
import math
from functools import partial
from pathlib import Path

import pytest
import yaml
from command_line import Forked

import ropext
from ropext.base import guard
from ropext.base.bundled import MODELS
from ropext.base.errors import InputError, OutputExists, ProofFailed, UsageError
from ropext.files.checkpoint.card import card_of
from ropext.files.checkpoint.provenance import read_record, record_of
from ropext.files.checkpoint.writing import WriteOptions, write
from ropext.files.inspecting import plan_config
from ropext.models import patching
from ropext.options.extend import Extend
from ropext.pipeline.saving import MemorySource

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.slow

CONTEXT, TARGET, THETA = 64, 256, 5e4
LENGTHS = {"factor": 4.0, "original_max_position_embeddings": CONTEXT}
YARN = {"rope_type": "yarn", "rope_theta": THETA, **LENGTHS}
LINEAR = {"rope_type": "linear", "rope_theta": THETA, "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"rope_theta": THETA, **LENGTHS}
THETA_ONLY = {"rope_type": "default", "rope_theta": 16 * THETA}


def longrope(pairs: int, most: float = 4.0) -> dict:
    """Return a longrope with two sets, so that the state which stock keeps for the switch is seen
    too."""
    long = [1 + (most - 1) * i / pairs for i in range(pairs)]
    short = [1 + i / pairs for i in range(pairs)]
    mscale = {"short_mscale": 1.25, "long_mscale": 1.25}
    sets = {"rope_type": "longrope", "rope_theta": THETA, "attention_factor": 1.25}
    return sets | {"short_factor": short, "long_factor": long} | mscale | LENGTHS


SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 96}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 4, "pad_token_id": 0}
SIZES |= {"max_position_embeddings": CONTEXT, "bos_token_id": 1, "eos_token_id": 2}
LAYER_TYPES = ["sliding_attention", "full_attention"]
WINDOW = {"sliding_window": 32, "layer_types": LAYER_TYPES}
DEEPSEEK = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
DEEPSEEK |= {"v_head_dim": 16, "q_lora_rank": 32, "kv_lora_rank": 16, "num_experts_per_tok": 2}
DEEPSEEK |= {"qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "moe_intermediate_size": 32}
MSCALE = {"mscale": 1.0, "mscale_all_dim": 0.8}
PARTIAL = {"partial_rotary_factor": 0.5}

# family -> config class, its keys, the rope dicts it is patched with
FAMILIES = {
    "llama": ("LlamaConfig", {}, [YARN, longrope(8), longrope(8, most=6.0), LLAMA3, THETA_ONLY]),
    "mistral": ("MistralConfig", {"sliding_window": None}, [YARN]),
    "qwen2": ("Qwen2Config", {}, [YARN, LINEAR]),
    "gemma2": ("Gemma2Config", {"head_dim": 16} | WINDOW, [YARN]),
    "gemma3": ("Gemma3TextConfig", {"head_dim": 16} | WINDOW, [YARN, LINEAR]),
    "phi": ("PhiConfig", {}, [YARN | PARTIAL]),
    "phi3": ("Phi3Config", {"original_max_position_embeddings": CONTEXT}, [longrope(8)]),
    "phimoe": ("PhimoeConfig", {"num_local_experts": 4}, [longrope(8)]),
    "gpt-neox": ("GPTNeoXConfig", {}, [YARN | PARTIAL]),
    "granite": ("GraniteConfig", {"attention_multiplier": 0.2}, [YARN]),
    "cohere": ("CohereConfig", {}, [YARN]),
    "deepseek-v3": ("DeepseekV3Config", DEEPSEEK, [YARN | MSCALE, LINEAR | MSCALE]),
    "granite-swa": ("GraniteSWAConfig", {"layer_rope_theta": [THETA] * 2} | WINDOW, [YARN]),
    "modernbert": (
        "ModernBertConfig",
        {"layer_types": LAYER_TYPES, "local_attention": 32},
        [YARN],
    ),
}


def changed(config: dict, rope: dict) -> dict:
    """Return a config dict with this rope dict, in full-attention layers if it is per layer
    type."""
    config = copy.deepcopy(config) | {"max_position_embeddings": TARGET}
    if "full_attention" in config["rope_parameters"]:
        config["rope_parameters"]["full_attention"] = rope
    else:
        config["rope_parameters"] = rope
    if config.get("layer_rope_theta"):
        config["layer_rope_theta"] = [2 * THETA, 2 * THETA]
    return config


def auto_class(name: str):
    import transformers

    masked = name == "modernbert"
    return transformers.AutoModelForMaskedLM if masked else transformers.AutoModelForCausalLM


def tiny(name: str, directory: Path) -> dict:
    """Write a random checkpoint whose weights are large enough to reveal a wrong rotation."""
    import transformers

    config_class, keys, _ = FAMILIES[name]
    torch.manual_seed(7)
    model = auto_class(name).from_config(getattr(transformers, config_class)(**SIZES | keys))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
    model.save_pretrained(directory)
    return json.loads((directory / "config.json").read_text())


def reloaded(name: str, directory: Path, config: dict, **options):
    (directory / "config.json").write_text(json.dumps(config))
    return auto_class(name).from_pretrained(directory, **options)


@torch.no_grad()
def logits(model, length: int = 200):
    """Compute logits, by default beyond the context, so that the long set counts."""
    ids = torch.arange(length).remainder(89).add(3).unsqueeze(0)
    return model(ids.to(model.device)).logits


@pytest.mark.parametrize("name", FAMILIES)
def test_bit_equal_to_the_reloaded_checkpoint(name: str, tmp_path: Path) -> None:
    config = tiny(name, tmp_path)
    model = auto_class(name).from_pretrained(tmp_path)
    before = logits(model, CONTEXT)
    weights = {n: p.data_ptr() for n, p in model.named_parameters()}
    for rope in FAMILIES[name][2]:
        new = changed(config, rope)
        assert patching.apply_config(model, new) is model
        patched = logits(model)
        assert torch.equal(patched, logits(reloaded(name, tmp_path, new)))
        assert (logits(model, CONTEXT) - before).abs().max() > 1e-3
    assert {n: p.data_ptr() for n, p in model.named_parameters()} == weights
    patching.unpatch(model)
    assert torch.equal(logits(model, CONTEXT), before)


def test_bfloat16_keeps_the_spectrum_in_float32(tmp_path: Path) -> None:
    config = tiny("llama", tmp_path)
    new = changed(config, YARN)
    cast = auto_class("llama").from_pretrained(tmp_path).to(torch.bfloat16)
    loaded = auto_class("llama").from_pretrained(tmp_path, dtype=torch.bfloat16)
    right = logits(reloaded("llama", tmp_path, new, dtype=torch.bfloat16))
    for model in (cast, loaded):
        patching.apply_config(model, new)
        assert model.model.rotary_emb.inv_freq.dtype == torch.float32
        assert torch.equal(logits(model), right)
        assert model.dtype == torch.bfloat16


def test_patch_keeps_the_runtime_state_of_a_model(tmp_path: Path) -> None:
    config = tiny("llama", tmp_path)
    model = auto_class("llama").from_pretrained(tmp_path, attn_implementation="eager")
    own, embedding = model.config, model.model.rotary_emb
    model.train()
    model.config.use_cache = False
    patching.apply_config(model, changed(config, YARN))
    assert model.config is own
    assert model.name_or_path == str(tmp_path)
    assert model.model.rotary_emb is embedding
    assert model.training
    assert model.config._attn_implementation == "eager"
    assert model.config.use_cache is False
    assert model.config.max_position_embeddings == TARGET


def test_patch_keeps_a_peft_adapter(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    config = tiny("llama", tmp_path)
    lora = LoraConfig(target_modules=["q_proj", "v_proj"], r=2)

    def adapted(model):
        torch.manual_seed(11)
        model = get_peft_model(model, lora)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora" in name:
                    parameter.normal_(std=0.3)
        return model.eval()

    new = changed(config, YARN)
    model = adapted(auto_class("llama").from_pretrained(tmp_path))
    assert patching.apply_config(model, new) is model
    assert torch.equal(logits(model), logits(adapted(reloaded("llama", tmp_path, new))))
    with pytest.raises(UsageError, match="merge an adapter first"):
        written_as(model, tmp_path / "out", new)


def written_as(model, out: Path, config) -> Path:
    """Write the model in memory with a config as `save` does."""
    plan = plan_config(model.config.to_dict(), Extend(method="yarn", factor=4.0))
    record = record_of(plan, {"name": "base", "config": {}})
    source = MemorySource(model, config, dict, partial(card_of, plan))
    return write(source, out, record, WriteOptions(no_verify=True)).output


def test_a_config_that_wants_other_weights_is_refused(tmp_path: Path) -> None:
    config = tiny("llama", tmp_path)
    model = auto_class("llama").from_pretrained(tmp_path)
    before = logits(model)
    with pytest.raises(InputError, match="other weights than the model in memory"):
        patching.apply_config(model, changed(config, YARN) | {"intermediate_size": 97})
    with pytest.raises(InputError, match="of type 'mistral', the model in memory of type 'llama'"):
        patching.apply_config(model, config | {"model_type": "mistral"})
    with pytest.raises(UsageError, match="a transformers model, not a Linear"):
        patching.apply_config(torch.nn.Linear(2, 2), config)
    assert torch.equal(logits(model), before)


def test_save_writes_all_spellings_and_reloads_equal(tmp_path: Path) -> None:
    base = tmp_path / "base"
    config = changed(tiny("llama", base), YARN)
    legacy = {key: value for key, value in YARN.items() if key not in ("rope_type", "rope_theta")}
    config |= {"rope_theta": THETA, "rope_scaling": {"type": "yarn"} | legacy}
    config |= {"torch_dtype": "float32", "unknown_key": [1]}
    del config["dtype"]
    model = auto_class("llama").from_pretrained(base).to(torch.bfloat16)
    patching.apply_config(model, config)
    out = written_as(model, tmp_path / "deep" / "out", config)
    written = json.loads((out / "config.json").read_text())
    for key in ("rope_parameters", "rope_scaling", "rope_theta", "unknown_key"):
        assert written[key] == config[key]
    assert written["torch_dtype"] == "bfloat16"
    again = auto_class("llama").from_pretrained(out)
    assert again.dtype == torch.bfloat16
    assert torch.equal(logits(again), logits(model))
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    with pytest.raises(OutputExists, match="is there already"):
        written_as(model, out, config)


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_save_refuses_weights_that_are_not_finite(tmp_path: Path, wrong: float) -> None:
    tiny("llama", tmp_path / "base")
    model = auto_class("llama").from_pretrained(tmp_path / "base").to(torch.bfloat16)
    ropext.patch(model, method="yarn", factor=2.0)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, :2] = wrong
    count = model.model.layers[1].mlp.up_proj.weight.numel()
    told = f"but 2 of {count:,} numbers of model.layers.1.mlp.up_proj.weight are not finite"
    with pytest.raises(InputError, match=told):
        ropext.save(model, tmp_path / "out", no_verify=True)
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


def test_a_pair_may_have_frequency_zero(tmp_path: Path) -> None:
    """transformers spells its factor, infinity, as an object."""
    tiny("llama", tmp_path / "base")
    model = auto_class("llama").from_pretrained(tmp_path / "base")
    factors = [1.0] * 7 + [math.inf]
    ropext.patch(model, method="longrope", factor=4.0, pair_factors=factors)
    assert model.model.rotary_emb.inv_freq.tolist()[6:] == pytest.approx([10_000**-0.75, 0.0])
    out = ropext.save(model, tmp_path / "saved", no_verify=True)
    again = auto_class("llama").from_pretrained(out)
    assert torch.equal(logits(again), logits(model))
    # The next extension's base is compared with its config as it was read.
    done = ropext.extend(str(out), tmp_path / "longer", method="yarn", factor=2.0)
    assert "not checked" not in done.written.proof["base"]
    patching.apply_config(again, json.loads((tmp_path / "base" / "config.json").read_text()))
    patching.apply_config(again, json.loads((out / "config.json").read_text()))
    assert torch.equal(logits(again), logits(model))


def test_a_failed_save_leaves_nothing(tmp_path: Path) -> None:
    config = tiny("llama", tmp_path / "base")
    model = auto_class("llama").from_pretrained(tmp_path / "base")
    with pytest.raises(TypeError):
        written_as(model, tmp_path / "out", config | {"unwritable": object()})
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


@pytest.mark.needs("fork")
@pytest.mark.parametrize(("hidden", "largest"), [(64, 65_536), (16, 16_384)])
def test_save_on_a_full_disk_is_one_sentence(tmp_path: Path, hidden: int, largest: int) -> None:
    """The kernel cuts a write of safetensors or of tokenizers short."""
    import resource

    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    sizes = SIZES | {"hidden_size": hidden, "intermediate_size": hidden, "vocab_size": 16}
    model = LlamaForCausalLM(LlamaConfig(**sizes))
    model = ropext.patch(model, method="yarn", factor=4.0)
    tokenizer = AutoTokenizer.from_pretrained(MODELS["ropext://demo"])

    def call() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest))
        with pytest.raises(InputError) as caught:
            ropext.save(model, tmp_path / "out", tokenizer=tokenizer)
        assert str(caught.value) == (
            f"{tmp_path / 'out'} cannot be written: File too large (os error 27)"
        )

    code, said = Forked(call, tmp_path).wait()
    assert code == 0, said
    assert list(tmp_path.iterdir()) == []


def test_save_writes_the_record_that_extend_writes(tmp_path: Path) -> None:
    base, out = tmp_path / "base", tmp_path / "out"
    tiny("llama", base)
    wish = {"method": "yarn", "factor": 4.0}
    ropext.extend(str(base), out, no_verify=True, **wish)
    model = auto_class("llama").from_pretrained(base)
    ropext.save(ropext.patch(model, **wish), tmp_path / "saved")
    saved, written = read_record(tmp_path / "saved"), read_record(out)
    assert saved is not None
    assert written is not None
    assert saved.sites == written.sites
    assert (saved.method, saved.context, saved.target) == ("yarn", CONTEXT, TARGET)
    assert saved.base["name"] == str(base)
    assert list(saved.weights) == ["model.safetensors"]
    assert saved.proof is not None
    assert saved.proof["worst"]["error"] < 1e-6
    assert ropext.verify(tmp_path / "saved").passed


@pytest.mark.parametrize("trained", [False, True])
def test_an_output_of_save_is_pushed_with_a_card(tmp_path: Path, trained: bool) -> None:
    base = tmp_path / "base"
    tiny("llama", base)
    (base / "README.md").write_text("---\nlicense: apache-2.0\n---\n# The base\n\nIts text.\n")
    model = ropext.patch(auto_class("llama").from_pretrained(base), method="yarn", factor=4.0)
    if trained:
        with torch.no_grad():
            model.lm_head.weight[3] *= 2
    out = ropext.save(model, tmp_path / "saved")
    pushed = ropext.push(out, "me/saved", dry_run=True)
    assert "README.md" in pushed.files
    head, _, body = pushed.card.removeprefix("---\n").partition("---\n")
    head = yaml.safe_load(head)
    assert (head["license"], head["library_name"]) == ("apache-2.0", "transformers")
    assert f"from {CONTEXT:,} to {TARGET:,} tokens by yarn" in body
    assert "Its text." in body
    said = "The weights are those of the base", "The weights are not the base's"
    assert [sentence in body for sentence in said] == [not trained, trained]
    assert "built the model from it without its weights" in body
    assert "vllm serve me/saved" in body
    assert str(tmp_path) not in pushed.card
    assert ropext.verify(out, against=None if trained else str(base)).passed


def test_save_writes_a_tokenizer_that_caps_nothing_below_the_target(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    demo = MODELS["ropext://demo"]
    model = ropext.patch(auto_class("llama").from_pretrained(demo), method="yarn", factor=4.0)
    tokenizer = AutoTokenizer.from_pretrained(demo, model_max_length=256)
    tokenizer("a", truncation=True, max_length=8)  # which a fast tokenizer keeps
    model.generation_config.max_length = 256
    text = "word " * 400
    wanted = AutoTokenizer.from_pretrained(demo)(text)["input_ids"]
    out = ropext.save(model, tmp_path / "saved", tokenizer=tokenizer)
    assert tokenizer.model_max_length == 256
    again = AutoTokenizer.from_pretrained(out)
    assert again.model_max_length == 1024
    assert again(text)["input_ids"] == wanted
    assert ropext.verify(out).passed
    assert guard.recorded(out) == {*guard.listing(out)}
    edits = {edit.file: edit.after for edit in read_record(out).edits if edit.file != "config.json"}
    assert edits == {
        "tokenizer_config.json": 1024,
        "tokenizer.json": None,
        "generation_config.json": 1024,
    }


def test_save_refuses_an_extension_that_was_taken_back(tmp_path: Path) -> None:
    config = tiny("llama", tmp_path / "base")
    model = auto_class("llama").from_pretrained(tmp_path / "base")
    for take_back in (patching.unpatch, lambda model: patching.apply_config(model, config)):
        take_back(ropext.patch(model, method="yarn", factor=4.0))
        with pytest.raises(UsageError, match=r"call ropext\.patch first"):
            ropext.save(model, tmp_path / "saved")
    ropext.patch(patching.unpatch(model), method="yarn", factor=4.0)
    assert ropext.save(model, tmp_path / "saved").is_dir()


def test_save_gives_a_directory_its_name_if_stock_computes_the_plan(
    tmp_path: Path,
) -> None:
    tiny("llama", tmp_path / "base")
    model = auto_class("llama").from_pretrained(tmp_path / "base")
    ropext.patch(model, method="yarn", factor=4.0)
    for key in ("rope_scaling", "rope_parameters"):
        getattr(model, patching.PLANNED).config[key]["factor"] = 2.0
    with pytest.raises(ProofFailed, match="in the plan"):
        ropext.save(model, tmp_path / "saved")
    assert [path.name for path in tmp_path.iterdir()] == ["base"]
    ropext.save(model, tmp_path / "saved", no_verify=True)
