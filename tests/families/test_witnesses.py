"""Paper witnesses: released models' rotations, computed by hand from their authors' code and
papers.

Stock transformers is the oracle everywhere else; here it is on trial. Each witness names the source
of its numbers; a number without a source is marked. The ends of YaRN's ramps were computed by hand:
dim(r) = d ln(L / (2 pi r)) / (2 ln theta), floor of dim(32), ceiling of dim(1).
"""

import json
import math
from dataclasses import dataclass

import published
import pytest

from ropext import families
from ropext.scaling.rope import Site, Spectrum
from ropext.verifying import proof

SIZES = published.LLAMA
# rope_scaling.long_factor of Phi-3.5-mini, as in MindSpeed-LLM's evaluation script: that script and
# config.json hold the float32 of these two decimals (1.0800000429153442).
PHI35 = (
    "1.08 1.11 1.14 1.34 1.59 1.6 1.62 2.62 3.23 3.23 4.79 7.4 7.7 9.09 12.2 17.67 24.46 28.57 "
    "30.42 30.84 32.59 32.93 42.32 44.96 50.34 50.45 57.55 57.93 58.21 60.14 62.61 62.62 62.71 "
    "63.14 63.14 63.77 63.93 63.96 63.97 64.03 64.07 64.08 64.12 64.41 64.48 64.51 64.53 64.84"
)
# From Phi-4-mini, which shares it with Phi-4-multimodal; TensorRT-LLM has the whole config in
# tests/unittest/_torch/modeling/test_modeling_phi4mm.py.
PHI4 = (
    "1 1.118320672 1.250641126 1.398617824 1.564103225 1.74916897 1.956131817 2.187582649 "
    "2.446418898 2.735880826 3.059592084 3.421605075 3.826451687 4.279200023 4.785517845 "
    "5.351743533 5.984965424 6.693110555 7.485043894 8.370679318 9.36110372 10.4687158 11.70738129 "
    "13.09260651 14.64173252 16.37415215 18.31155283 20.47818807 22.90118105 25.61086418 "
    "28.64115884 32.03 32.1 32.13 32.23 32.6 32.61 32.64 32.66 32.7 32.71 32.93 32.97 33.28 33.49 "
    "33.5 44.16 47.77"
)


@dataclass
class Truth:
    """One rotary embedding as its authors compute it."""

    inv_freq: list[float]
    attention: float = 1.0
    softmax: float = 1.0


def plain(d: int, theta: float) -> list[float]:
    return [1.0 / theta ** (2 * k / d) for k in range(d // 2)]


def ramped(d: int, theta: float, s: float, low: float, high: float) -> list[float]:
    """Compute jquesnelle/yarn: f/s * mask + f * (1 - mask), mask = clamp((k - low)/(high - low), 0,
    1)."""
    out = []
    for k, f in enumerate(plain(d, theta)):
        mask = min(max((k - low) / (high - low), 0.0), 1.0)
        out.append(f / s * mask + f * (1 - mask))
    return out


def llama31() -> list[float]:
    """Compute meta-llama/llama-models, models/llama3/model.py, apply_scaling."""
    out = []
    for f in plain(128, 500000.0):
        wavelen = 2 * math.pi / f
        if wavelen < 8192 / 4:
            out.append(f)
        elif wavelen > 8192 / 1:
            out.append(f / 8)
        else:
            smooth = (8192 / wavelen - 1) / (4 - 1)
            out.append((1 - smooth) * f / 8 + smooth * f)
    return out


def gpt_oss() -> list[float]:
    """Compute openai/gpt-oss, gpt_oss/torch/model.py, _compute_concentration_and_inv_freq: no
    rounding."""
    d_half = 32
    low = d_half * math.log(4096 / (32 * 2 * math.pi)) / math.log(150000)
    high = d_half * math.log(4096 / (1 * 2 * math.pi)) / math.log(150000)
    assert (round(low, 3), round(high, 3)) == (8.093, 17.398)
    return ramped(64, 150000.0, 32.0, low, high)


def longrope(factors: str, d: int) -> list[float]:
    """Compute microsoft's modeling_phi3.py: 1 / (ext_factors * base^(2k/d)), long beyond 4096
    tokens."""
    pairs = zip(factors.split(), plain(d, 10000.0), strict=True)
    return [f / float(factor) for factor, f in pairs]


def rope(theta: float, context: int, **scaling: object) -> dict:
    return {"rope_theta": theta, "max_position_embeddings": context, "rope_scaling": scaling}


def phi(factors: str, **more: object) -> dict:
    long = [float(f) for f in factors.split()]
    short = [1.0] * len(long)
    out = rope(10000.0, 131072, type="longrope", long_factor=long, short_factor=short)
    return out | {"original_max_position_embeddings": 4096} | more


def yarn(theta: float, context: int, factor: float, original: int, **more: object) -> dict:
    lengths = {"factor": factor, "original_max_position_embeddings": original}
    return rope(theta, context, type="yarn", **lengths, **more)


BETAS = {"beta_fast": 32.0, "beta_slow": 1.0}
MSCALE = {"mscale": 1.0, "mscale_all_dim": 1.0}
MLA = published.CONFIGS["DeepSeek-V3"]
HEAD = {"head_dim": 128}
PHI_ATTENTION = math.sqrt(17 / 12)  # sqrt(1 + ln 32 / ln 4096), and 32 = 2^5, 4096 = 2^12
ALL = ""

# name -> config as released, and the authors' numbers of each embedding
WITNESSES: dict[str, tuple[dict, dict[str, Truth]]] = {
    "Llama 3.1": (
        {"model_type": "llama", **HEAD} | rope(500000.0, 131072, **published.LLAMA3),
        {ALL: Truth(llama31())},
    ),
    # Qwen2.5's card; arXiv 2309.00071 eq. 22: 0.1 ln 4 + 1
    "Qwen 2.5 YaRN": (
        {"model_type": "qwen2", **HEAD, "hidden_size": 512} | yarn(1e6, 32768, 4.0, 32768),
        {ALL: Truth(ramped(128, 1e6, 4.0, 23, 40), 1.1386294361119891)},
    ),
    # deepseek-ai/DeepSeek-V3, inference/model.py: softmax_scale * (0.1 ln 40 + 1)^2
    "DeepSeek-V3": (
        MLA | yarn(10000.0, 163840, 40.0, 4096, **BETAS, **MSCALE) | {"qk_rope_head_dim": 64},
        {ALL: Truth(ramped(64, 10000.0, 40.0, 10, 23), 1.0, 1.3688879454113936**2)},
    ),
    # moonshotai/Kimi-K2-Instruct (model code of DeepSeek-V3): beta_fast is 1 (radixark/miles #335),
    # dim(1) = 19.16; theta, mscale and a factor of 32 as in slime's scripts/models/kimi-k2.sh. The
    # later 0905 has a factor of 64.
    "Kimi K2": (
        MLA
        | yarn(50000.0, 131072, 32.0, 4096, beta_fast=1.0, beta_slow=1.0, **MSCALE)
        | {"qk_rope_head_dim": 64},
        {ALL: Truth(ramped(64, 50000.0, 32.0, 19, 20), 1.0, 1.3465735902799727**2)},
    ),
    "Phi-3.5-mini": (
        {"model_type": "phi3", "hidden_size": 384} | phi(PHI35),
        {ALL: Truth(longrope(PHI35, 96), PHI_ATTENTION)},
    ),
    "Phi-4-mini": (
        {"model_type": "phi3", "hidden_size": 512} | phi(PHI4, partial_rotary_factor=0.75),
        {ALL: Truth(longrope(PHI4, 96), PHI_ATTENTION)},
    ),
    "gpt-oss": (
        {"model_type": "gpt_oss", "head_dim": 64}
        | yarn(150000.0, 131072, 32.0, 4096, **BETAS, truncate=False),
        {ALL: Truth(gpt_oss(), 1.3465735902799727)},
    ),
    # allenai/Olmo-3-1125-32B; vLLM #24534 by its authors: scaling in full-attention layers only
    "OLMo 3": (
        {"model_type": "olmo3", "hidden_size": 512, "sliding_window": 4096}
        | rope(
            500000.0,
            65536,
            rope_type="yarn",
            factor=8.0,
            original_max_position_embeddings=8192,
            attention_factor=1.2079441541679836,
            **BETAS,
        )
        | {"layer_types": ["sliding_attention"] * 3 + ["full_attention"]},
        {
            "sliding_attention": Truth(plain(128, 500000.0)),
            "full_attention": Truth(ramped(128, 500000.0, 8.0, 18, 35), 1.2079441541679836),
        },
    ),
    # google/gemma_pytorch, gemma/config.py, rope_wave_length: local 10_000, global 1_000_000;
    # rope_scaling_factor 8 in all but the 1B
    "Gemma 3": (
        {"model_type": "gemma3_text", "head_dim": 256, "rope_local_base_freq": 10000.0}
        | rope(1e6, 131072, rope_type="linear", factor=8.0)
        | {"num_hidden_layers": 6},
        {
            "sliding_attention": Truth(plain(256, 10000.0)),
            "full_attention": Truth([f / 8 for f in plain(256, 1e6)]),
        },
    ),
    # mistralai/Ministral-3-*: yarn without a temperature. params.json says apply_scale false, which
    # vLLM calls apply_yarn_scaling (transformers_utils/configs/mistral.py); transformers'
    # convert_ministral3_weights_to_hf.py writes mscale = mscale_all_dim = 1, which cancel.
    "Ministral 3": (
        {"model_type": "ministral3", **HEAD}
        | yarn(1e6, 262144, 16.0, 16384, **BETAS, **MSCALE, llama_4_scaling_beta=0.1),
        {ALL: Truth(ramped(128, 1e6, 16.0, 20, 37))},
    ),
    # zai-org/GLM-4.5: half of each head, plain (slime, by the same authors:
    # scripts/models/glm4.5-355B-A32B.sh, rotary-percent 0.5, rotary-base 1000000, kv-channels 128)
    "GLM-4.5": (
        {"model_type": "glm4_moe", **HEAD, "partial_rotary_factor": 0.5, "rope_theta": 1e6}
        | {"max_position_embeddings": 131072, "n_routed_experts": 4, "moe_intermediate_size": 32},
        {ALL: Truth(plain(64, 1e6))},
    ),
    # modeling_phimoe.py, as Microsoft gave it to transformers 4: the long set beyond 4096 tokens,
    # with long_mscale. The released list of 64 factors was found nowhere. Phi-3.5-mini's factors,
    # with heads of 96, replace it, so that this is a witness of the rule and not of the model.
    "Phi-3.5-MoE": (
        {"model_type": "phimoe", "hidden_size": 384, "head_dim": 96, "num_local_experts": 4}
        | phi(PHI35),
        {ALL: Truth(longrope(PHI35, 96), 1.243163121016122)},
    ),
}
MSCALES = {"short_mscale": 1.243163121016122, "long_mscale": 1.243163121016122}
WITNESSES["Phi-3.5-MoE"][0]["rope_scaling"].update(MSCALES)
DIFFERS = ("Phi-3.5-MoE",)  # stock transformers differs from the authors' model
SAYS = "differs from the authors here"


def config(name: str) -> dict:
    return SIZES | WITNESSES[name][0]


@pytest.mark.parametrize("name", WITNESSES)
def test_ropext_reads_the_authors_numbers(name: str) -> None:
    model = families.read(config(name))
    assert {site.label for site in model.sites} == set(WITNESSES[name][1])
    for site in model.sites:
        truth, found = WITNESSES[name][1][site.label], site.rope.spectrum
        assert found.inv_freq == pytest.approx(truth.inv_freq, rel=1e-12)
        assert found.attention_factor == pytest.approx(truth.attention, rel=1e-12)
        assert found.softmax_factor == pytest.approx(truth.softmax, rel=1e-12)
    assert any(SAYS in note for note in model.notes) == (name in DIFFERS)


@pytest.fixture(scope="module")
def stock(tmp_path_factory) -> dict[str, dict]:
    root = tmp_path_factory.mktemp("witnesses")
    directories = []
    for index, name in enumerate(WITNESSES):
        directories.append(root / str(index))
        directories[-1].mkdir()
        (directories[-1] / "config.json").write_text(json.dumps(config(name)))
    requests = [proof.BuildRequest(place) for place in directories]
    return dict(zip(WITNESSES, proof.build(requests, tensors=False), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", WITNESSES)
def test_stock_is_the_authors_model_or_the_plan_says_not(stock, name: str) -> None:
    assert stock[name]["error"] is None
    sites = []
    for label, truth in WITNESSES[name][1].items():
        spectrum = Spectrum(tuple(truth.inv_freq), truth.attention, truth.softmax)
        sites.append(Site(label, spectrum, {}))
    truths = proof.ExpectedRotary(tuple(sites), 80.0)
    # The second set is for inputs of 4096 tokens at most; Phi's authors have plain RoPE there.
    found = stock[name] | {
        "rotary": [one | {"short_inv_freq": None} for one in stock[name]["rotary"]]
    }
    if name in DIFFERS:
        with pytest.raises(proof.ProofFailed, match="frequency"):
            proof.compare(found, truths, tensors=False)
    else:
        proof.compare(found, truths, tensors=False)


def test_one_theta_for_olmo_3() -> None:
    """Its authors have one theta; stock 5 gives a theta at top level to full layers alone."""
    model = families.read(config("OLMo 3") | {"rope_theta": 1e6})
    (note,) = [note for note in model.notes if SAYS in note]
    assert "theta 500000" in note
    assert "1e+06" in note or "1000000" in note
