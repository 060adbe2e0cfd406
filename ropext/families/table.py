"""Describe how model families spell their rotary embedding: one row each, and no row for the flat
ones.

A family without a row keeps `rope_theta` and `rope_scaling` (transformers 4) or `rope_parameters`
(5) flat in its text config, honours every stock rope type, and sizes its rotation by head_dim.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ropext.families.described import Described, Facts
from ropext.scaling.forms import NAMES

# Types that a stock config can carry; `dynamic` is stateful and is never written.
ALL = tuple(name for name in NAMES if name not in ("dynamic", "proportional"))
PHI3 = ("default", "longrope")
PROPORTIONAL = ("default", "proportional")


@dataclass(frozen=True)
class Label:
    """One key of a nested rope dict."""

    name: str
    windowed: bool = False  # its layers see a window only, so that an extension leaves it alone
    theta: str = ""  # the name under which 4.x (or a class field) keeps its theta
    rotation: str = "head_dim"  # the key that sizes the rotation
    # A key -> the key that replaces it in these layers, and the meaning of that key when absent.
    sizes: Mapping[str, tuple[str, int | None]] = field(default_factory=dict)
    kv_multiple: int = 1  # of num_key_value_heads, in these layers
    layer_types: tuple[str, ...] = ()  # layer types that use it (empty = its own name)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Return the layer types of a config that use this label of a nested rope dict."""
        return self.layer_types or (self.name,)


@dataclass(frozen=True)
class Family:
    """One row: the departures of this family from the flat layout."""

    labels: tuple[Label, ...] = ()  # nested per layer type
    # Nested only: the labels that a flat legacy dict is read into (empty = it must not be there).
    flat_into: tuple[str, ...] = ()
    # The class reads such a dict itself, also if `type` alone names its type. It gives this
    # attention factor to a flat yarn that names none (0 = the class does not read the dict).
    flat_attention: float = 0.0
    theta: tuple[str, ...] = ("rope_theta",)  # legacy names of theta; the first is written
    partial: tuple[str, ...] = ()  # legacy names of the partial factor if the family reads one
    rotary_dim: str = ""  # a key that gives the rotating channels in place of the partial factor
    # The key for the number of non-rotating channels: stock cuts a head of both by a partial factor
    # that it sets itself, unless there is a rope_scaling.
    non_rotating_key: str = ""
    # Nested only: key of a dict -> the top-level key that states it for all layers, or one by one.
    shared: Mapping[str, str] = field(default_factory=dict)
    fixed_partial: float = 0.0  # the class sets the factor itself, whatever the config says
    length: str = ""  # a key of the trained length, if it is above max_position_embeddings
    dim: str = "head_dim"  # the key that sizes the rotation
    kv_heads: str = ""  # the key for the key/value heads, if the family has its own
    # Layer types that keep one vector for key and value, and one for every so many compressed
    # tokens: each with the key for that number, and its default (which compress_ratios lists).
    compression: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    head_multiple: int = 0  # heads are this many times hidden_size / heads, whatever head_dim says
    # The legacy dict that transformers 4.x needs. "type" or "rope_type": the key of the type's
    # name.
    # "three keys": it takes only longrope's type and factors. "theta": it reads the top-level
    # thetas
    # and no dict. "absent": no 4.x reader exists, and legacy keys disturb 5.x.
    legacy: str = "type"
    legacy_dict_always: bool = False  # 4.x indexes the dict, so that null breaks it
    write_head_dim: bool = False  # 4.57 leaves an absent one at None and fails on scaled types
    forms: tuple[str, ...] = ALL
    temperature: str = "whole"
    softmax_mscale: bool = False
    interleaved: bool = False
    masked_lm: bool = False
    original: int = 0  # tokens it was trained on before a linear scaling, which names no length
    # A key, the value at which the family rotates at all, and a sentence for the others.
    gate: tuple[str, object, str] | None = None
    one_theta: bool = False  # the authors have one theta for every layer
    null_theta_stops: bool = False  # rope_theta null means no rotation
    rotates_only_windows: bool = False
    zero_theta_stops: bool = False  # a 0 in layer_rope_theta stops it; no other value is read
    skips_every: int = 0  # every so many-th layer does not rotate, if no key states which
    every_layer_windowed: bool = False  # sliding_window, if set, holds for all layers
    alternates: bool = False  # every second layer below max_window_layers has the window
    counts_back: bool = False  # the class lays its pattern of layer types from the last layer on
    # A key that replaces sliding_window (or follows it, if it means the same), then its divisor,
    # the
    # number added to it, and the window if the config has neither key.
    window: tuple[str, int, int, int | None] | None = None
    layer_thetas: bool = False  # theta is in the list layer_rope_theta
    mscale_keys: bool = False  # the forward pass reads short_mscale and long_mscale
    betas: bool = False  # vLLM fails on a yarn whose betas are not written out
    remark: str = ""  # a fact about this family that is worth a sentence


@dataclass(frozen=True)
class LogitScale:
    """A key outside the spectrum by which stock scales queries, keys, logits or the softmax."""

    key: str
    does: str
    in_rope: bool = False  # in the rope dict, and every form must keep it there
    beside: tuple[str, ...] = ()  # keys of the same dict that its arithmetic reads


LOGIT_SCALES = (
    LogitScale(
        "llama_4_scaling_beta",
        "queries times 1 + beta ln(1 + floor(position / original_max_position_embeddings))",
        in_rope=True,
        beside=("original_max_position_embeddings",),
    ),
    LogitScale(
        "mscale_all_dim",
        "the softmax times (0.1 mscale_all_dim ln(factor) + 1)^2",
        in_rope=True,
        beside=("mscale",),
    ),
    LogitScale(
        "attn_temperature_tuning",
        "queries of layers without rotation times 1 + attn_scale ln(1 + floor((position + 1) / "
        "floor_scale))",
        beside=("attn_scale", "floor_scale"),
    ),
    LogitScale("query_pre_attn_scalar", "the softmax scale is its inverse root"),
    LogitScale("attention_multiplier", "the softmax scale itself"),
    LogitScale("key_multiplier", "keys are multiplied by it"),
    LogitScale("attn_logit_softcapping", "logits are capped at it"),
)

# Types whose class turns images by three axes (mRoPE), whether or not the config has mrope_section.
_THREE_AXES = (
    "cohere_compass_text cosmos3_edge_text glm4v_moe_text glm4v_text "
    "glm_image_text glm_ocr_text hunyuan_vl_text neomme paddleocr_vl_text qwen2_5_omni_talker "
    "qwen2_5_omni_text qwen2_5_vl_text qwen2_vl_text qwen3_5_moe_text qwen3_5_text "
    "qwen3_omni_moe_talker_text qwen3_omni_moe_text qwen3_vl_moe_text qwen3_vl_text "
    "qwen4_exp_text"
)
MROPE = frozenset(_THREE_AXES.split())

FLAT = Family()
PARTIAL = Family(partial=("partial_rotary_factor",), temperature="rotated channels")
MLA = Family(
    dim="qk_rope_head_dim", softmax_mscale=True, interleaved=True, temperature="rotated channels"
)
WINDOWED = Family(every_layer_windowed=True)
NOPE_FULL = Family(rotates_only_windows=True)
CANCELLED = Family(temperature="cancelled")
ROPE_TYPE = Family(legacy="rope_type")
MASKED = Family(masked_lm=True)

GEMMA3 = Family(
    labels=(
        Label("sliding_attention", windowed=True, theta="rope_local_base_freq"),
        Label("full_attention", theta="rope_theta"),
    ),
    flat_into=("full_attention",),
    legacy="rope_type",
    original=32768,  # for its 131072 its positions are divided by 8, not by 4 (its report, 2.1)
)
MODERNBERT = Family(
    labels=(
        Label("sliding_attention", windowed=True, theta="local_rope_theta"),
        Label("full_attention", theta="global_rope_theta"),
    ),
    legacy="theta",
    window=("local_attention", 2, 0, 64),
)
NESTED = Family(
    labels=(Label("sliding_attention", windowed=True), Label("full_attention")), legacy="absent"
)
NESTED_PARTIAL = replace(NESTED, temperature="rotated channels")
GEMMA4 = Family(
    labels=(
        Label("sliding_attention", windowed=True),
        Label(
            "full_attention",
            sizes={
                "head_dim": ("global_head_dim", 512),
                "num_key_value_heads": ("num_global_key_value_heads", None),
            },
        ),
    ),
    legacy="absent",
    forms=PROPORTIONAL,
)


def _rows(names: str, row: Family) -> dict[str, Family]:
    """Return one family row for several model types, named in one string."""
    return dict.fromkeys(names.split(), row)


# The model types of transformers 5.23 that need a row.
FAMILIES: dict[str, Family] = {
    # Partial rotation, under the names that the family reads.
    **_rows(
        "glm4_moe glm4v_moe_text minimax_m3_vl_text nemotron persimmon phi "
        "qwen3_5_text qwen3_5_moe_text solar_open stablelm qwen4_exp_text",
        PARTIAL,
    ),
    "minimax_m2": replace(PARTIAL, rotary_dim="rotary_dim"),
    "qwen3_next": replace(PARTIAL, legacy="rope_type"),
    **_rows("glm glm4 glm4v_text glm_ocr_text", replace(PARTIAL, interleaved=True)),
    "glm_image_text": PARTIAL,
    "bamba": replace(PARTIAL, fixed_partial=0.5),
    "gpt_neox": Family(
        theta=("rotary_emb_base", "rope_theta"),
        partial=("rotary_pct", "partial_rotary_factor"),
        temperature="rotated channels",
    ),
    "gpt_neox_japanese": Family(
        theta=("rotary_emb_base", "rope_theta"),
        partial=("rotary_pct", "partial_rotary_factor"),
        temperature="rotated channels",
    ),
    "recurrent_gemma": replace(PARTIAL, forms=("default",), rotates_only_windows=True),
    # Phi-3 and kin.
    **_rows(
        "phi3 phi4_multimodal",
        replace(PARTIAL, legacy="three keys", forms=PHI3, every_layer_windowed=True),
    ),
    "phimoe": Family(mscale_keys=True, every_layer_windowed=True),
    "gpt_oss": Family(betas=True),
    # DeepSeek's latent attention: a rotary part of its own size; the softmax reads mscale.
    **_rows(
        "axk1 axk2 bailing_hybrid deepseek_v2 deepseek_v3 deepseek_v32 glm4_moe_lite "
        "glm_moe_dsa youtu",
        MLA,
    ),
    # These turn two halves, unlike the others with such attention.
    **_rows("hy_v4 minicpm3", replace(MLA, interleaved=False)),
    "mistral_large4_text": replace(
        MLA,
        skips_every=4,
        remark="its weights scale queries by a learned multiple of ln(position + 1)",
    ),
    # Plain RoPE would turn its whole head there; every scaled type cuts it by a partial factor.
    "mistral4": replace(
        MLA, non_rotating_key="qk_nope_head_dim", forms=("linear", "yarn", "llama3")
    ),
    "longcat_flash": replace(MLA, dim="head_dim"),
    "deepseek_v4": Family(
        labels=(
            Label("main", windowed=True, theta="rope_theta", layer_types=("sliding_attention",)),
            Label(
                "compress",
                theta="compress_rope_theta",
                layer_types=("heavily_compressed_attention", "compressed_sparse_attention"),
            ),
        ),
        flat_into=("compress",),
        flat_attention=1.0,
        shared={"partial_rotary_factor": "partial_rotary_factor"},
        rotary_dim="qk_rope_head_dim",
        compression={
            "heavily_compressed_attention": ("compress_rate_hca", 128),
            "compressed_sparse_attention": ("compress_rate_csa", 4),
        },
        legacy="absent",
        temperature="rotated channels",
        interleaved=True,
    ),
    "dots3_note_text": Family(
        window=("sliding_window_size", 1, 0, 512),
        labels=(
            Label(
                "sliding_attention",
                windowed=True,
                theta="swa_rope_theta",
                rotation="qk_rope_head_dim",
                sizes={
                    "qk_rope_head_dim": ("swa_qk_rope_head_dim", 64),
                    "kv_lora_rank": ("swa_kv_lora_rank", 1024),
                },
            ),
            Label(
                "indexed_attention",
                theta="rope_theta",
                rotation="qk_rope_head_dim",
                layer_types=("indexed_attention", "full_attention"),
            ),
        ),
        legacy="absent",
        # longrope's validator asks for one number of heads, which differs by layer type here.
        forms=("default", "linear", "yarn", "llama3"),
        temperature="rotated channels",
        interleaved=True,
    ),
    # Nested per layer type.
    "gemma3_text": GEMMA3,
    "gemma3n_text": GEMMA3,
    "t5gemma2_text": GEMMA3,
    "t5gemma2_decoder": GEMMA3,
    "olmo3": replace(
        GEMMA3,
        original=0,
        labels=(
            # transformers 5 gives the one top-level theta to the full layers alone.
            Label("sliding_attention", windowed=True),
            Label("full_attention", theta="rope_theta"),
        ),
        one_theta=True,
        remark="some releases of transformers 5 scale its sliding layers too (their issue 45945), "
        "5.23 does not; the proof shows which yours is",
    ),
    "modernbert": replace(MODERNBERT, masked_lm=True),
    "modernbert-decoder": MODERNBERT,
    "gemma4_text": GEMMA4,
    "gemma4_unified_text": GEMMA4,
    "diffusion_gemma_text": GEMMA4,
    # longrope's validator asks for one head size, which differs by layer type here.
    "embedding_gemma2_text": replace(
        GEMMA4,
        labels=(
            Label("sliding_attention", windowed=True),
            Label(
                "full_attention",
                sizes={
                    "head_dim": ("global_head_dim", 512),
                    "num_key_value_heads": ("num_global_key_value_heads", 1),
                },
            ),
        ),
        forms=("default", "linear", "yarn", "llama3"),
    ),
    "mellum": NESTED,
    "laguna": NESTED_PARTIAL,
    "mimo_v2_flash": replace(
        NESTED_PARTIAL,
        window=("sliding_window_size", 1, 1, None),
        labels=(
            Label("sliding_attention", windowed=True, kv_multiple=2),
            Label("full_attention"),
        ),
    ),
    "neomme": replace(NESTED_PARTIAL, masked_lm=True, shared={"rope_theta": "rope_theta"}),
    "ultrabert": replace(NESTED, masked_lm=True),
    "lfm3": replace(NESTED, forms=("default", "proportional", "longrope")),
    "step3p5": replace(
        NESTED,
        flat_into=("full_attention",),
        shared={"rope_theta": "rope_theta", "partial_rotary_factor": "partial_rotary_factors"},
    ),
    "zaya": Family(
        labels=(Label("hybrid_sliding", windowed=True), Label("hybrid")),
        legacy="absent",
        temperature="rotated channels",
    ),
    "beam": replace(
        NESTED,
        rotates_only_windows=True,
        remark="its code multiplies queries of full layers by exp(0.1 ln(1 + (position + 1) / 2048)"
        "), which no key changes",
    ),
    "cohere_compass_text": replace(NESTED, rotates_only_windows=True),
    # RoPE in windowed layers only.
    **_rows("afmoe exaone4 exaone_moe flint kolibri1", NOPE_FULL),
    **_rows(
        "muse_glimmer_text muse_spark_text",
        replace(NOPE_FULL, zero_theta_stops=True, counts_back=True),
    ),
    **_rows(
        "cohere2 cohere2_moe",
        replace(NOPE_FULL, legacy="rope_type", interleaved=True, length="model_max_length"),
    ),
    "llama4_text": Family(temperature="cancelled", interleaved=True, rotates_only_windows=True),
    # A norm after the rotation cancels any temperature.
    **_rows(
        "hunyuan_v1_dense hunyuan_v1_moe hunyuan_vl_text nanochat",
        CANCELLED,
    ),
    # Its class takes no scaled type.
    "cosmos3_edge_text": Family(forms=("default",)),
    # transformers 4.57 refuses `type` alone here.
    **_rows("granite granitemoe granitemoeshared emu3_text_model", ROPE_TYPE),
    "mllama_text_model": replace(ROPE_TYPE, legacy_dict_always=True),
    # Command R and R+ are released with 8,192 there and 131,072 in model_max_length.
    "cohere": replace(ROPE_TYPE, interleaved=True, length="model_max_length"),
    **_rows("ernie4_5 ernie4_5_moe helium", replace(FLAT, interleaved=True)),
    # Conditions.
    "falcon": Family(
        kv_heads="num_kv_heads",
        gate=("alibi", False, "uses ALiBi (alibi is true); its rotary module is built but idle"),
    ),
    "olmo_hybrid": Family(null_theta_stops=True),
    "dbrx": Family(
        theta=("rope_theta", "attn_config.rope_theta"),
        kv_heads="attn_config.kv_n_heads",
    ),
    "zamba2": Family(
        head_multiple=2,
        gate=("use_mem_rope", True, "rotates only where use_mem_rope is true"),
    ),
    "granitemoehybrid": Family(
        legacy="rope_type",
        gate=(
            "position_embedding_type",
            "rope",
            'rotates only where position_embedding_type is "rope"',
        ),
    ),
    "qwen2_moe": Family(alternates=True),
    "granite_swa": Family(layer_thetas=True),
    "granitemoe_swa": Family(layer_thetas=True),
    # Its local encoder and decoder see windows of bytes; the global part between them is scaled.
    "blt_global_transformer": Family(
        interleaved=True, remark="its lengths count patches of several bytes each"
    ),
    # sliding_window, if set, holds for every layer.
    "mistral": replace(WINDOWED, write_head_dim=True),
    **_rows(
        "mixtral starcoder2 moshi blt_patcher voxtral_realtime_text doge ministral3 olmoe "
        "qwen3_moe",
        WINDOWED,
    ),
    "openai_privacy_filter": replace(WINDOWED, interleaved=True),
    **_rows("esmc eurobert gte jina_embeddings_v3 nomic_bert", MASKED),
}


def family(text_type: str, facts: Facts) -> Family:
    """Return the row of a model type: its own here, else the row that transformers shows, else the
    row of flat configs."""
    if text_type in FAMILIES:
        return FAMILIES[text_type]
    about = facts.get(text_type)
    return FLAT if about is None else described_row(about)


def described_row(about: Described) -> Family:
    """Return the row of a model type that transformers described. No transformers before 5 reads
    it, so a nested type is written without legacy keys."""
    row = about.row
    common = Family(
        forms=tuple(row["forms"]),
        temperature=row["temperature"],
        softmax_mscale=row["softmax_mscale"],
        interleaved=row["interleaved"],
        masked_lm=row["masked_lm"],
        rotates_only_windows=row["rotates_only_windows"],
    )
    if "labels" not in row:
        return replace(
            common,
            theta=tuple(row["theta"]),
            partial=tuple(row["partial"]),
            dim=row["dim"],
            every_layer_windowed=row["every_layer_windowed"],
        )
    labels = []
    for entry in row["labels"]:
        key = entry["rotation"]
        label = Label(entry["name"], windowed=entry["windowed"], theta=entry["theta"])
        if key.startswith("qk_rope"):
            label = replace(label, rotation=key)
        elif key != "head_dim":
            label = replace(label, sizes={"head_dim": (key, entry["default"])})
        labels.append(label)
    return replace(common, labels=tuple(labels), legacy="absent")
