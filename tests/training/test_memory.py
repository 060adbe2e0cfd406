"""Estimates of memory beside a count of live tensors; when a run is refused, warned of, let go."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from live_tensors import Counter, most_bytes, most_bytes_of_rows
from test_finetune import RUN
from tiny_llama import new_llama

from ropext.errors import InputError, Stopped
from ropext.evaluation.costs import shape_of
from ropext.evaluation.loading import memory_errors
from ropext.options.training import Finetune
from ropext.training import defaults, estimates, models, plan_finetune, report
from ropext.training.loss import sliced_cross_entropy
from ropext.training.rows import Full, Pose, Rows, TrainingDocument

GB = 10**9
# Hidden size, MLP, heads of queries and of keys, vocabulary.
LLAMA_7B = (4096, 11008, 32, 32, 32000)
LLAMA_8B = (4096, 14336, 32, 8, 128256)
WIDTHS = {
    "7B": LLAMA_7B,
    "8B": LLAMA_8B,
    "1B": (2048, 8192, 32, 8, 128256),
    "360M": (960, 2560, 15, 5, 49152),
}
# Of two billion parameters or so, each with what is its own; windows are shorter than the row.
SMALL = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
EIGHT = {"num_local_experts": 8, "num_experts_per_tok": 2}
MANY = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
TYPES = {
    "mistral": SMALL | {"sliding_window": 1024},
    "qwen2": SMALL,
    "qwen3": SMALL,
    "gemma3_text": SMALL | {"sliding_window": 1024, "intermediate_size": 10240, "head_dim": 256},
    "phi": SMALL,
    "phi3": SMALL,
    "gpt_neox": SMALL,
    "starcoder2": SMALL,
    "olmo3": SMALL | {"sliding_window": 1024},
    "cohere": SMALL,
    "glm4": SMALL,
    "mixtral": SMALL | EIGHT | {"hidden_size": 4096, "intermediate_size": 14336},
    "qwen3_moe": SMALL | MANY,
}


def config_of(widths, layers):
    hidden, mlp, heads, kv_heads, vocabulary = widths
    return transformers.LlamaConfig(
        hidden_size=hidden,
        intermediate_size=mlp,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=hidden // heads,
        vocab_size=vocabulary,
        num_hidden_layers=layers,
        max_position_embeddings=2**20,
        use_cache=False,
    )


def sizes_of(config, dtype=torch.bfloat16):
    """As `finetune` sees the model before a weight is loaded."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    width = torch.empty((), dtype=dtype).element_size()
    return replace(shape_of(model), dtype_bytes=width, eager=False)


@pytest.mark.parametrize(
    ("widths", "layers", "choice"),
    [
        *((own, 2, {}) for own in WIDTHS.values()),
        (LLAMA_8B, 6, {}),
        (LLAMA_8B, 2, {"recompute": False}),
        (LLAMA_8B, 2, {"lora": False}),
        (LLAMA_8B, 2, {"dtype": torch.float32}),
    ],
)
def test_activations_are_within_a_fifth_of_a_count_of_live_tensors(
    widths, layers, choice, monkeypatch
):
    said, counted = said_and_counted(config_of(widths, layers), choice, monkeypatch)
    assert said == pytest.approx(counted, rel=0.2)


@pytest.mark.parametrize(
    "choice", [{}, {"recompute": False}, {"lora": False}], ids=["again", "kept", "fit"]
)
@pytest.mark.parametrize("kind", TYPES)
def test_so_they_are_of_other_types(kind, choice, monkeypatch):
    config = transformers.AutoConfig.for_model(
        kind,
        **TYPES[kind],
        num_hidden_layers=2,
        vocab_size=2**18,
        max_position_embeddings=2**20,
        use_cache=False,
    )
    said, counted = said_and_counted(config, choice, monkeypatch)
    assert said == pytest.approx(counted, rel=0.2)


def test_a_lora_that_stands_in_the_model_changes_no_width():
    model = new_llama()
    before = shape_of(model).parts
    options = Finetune()
    settings = defaults.settings(options, 1e7, 256, 1024)
    joined = models.add_adapter(model, options, settings.lora)
    assert shape_of(joined.get_base_model()).parts == before


def test_a_window_costs_a_mask_of_all_positions_but_with_flash_attention():
    config = transformers.AutoConfig.for_model("mistral", **TYPES["mistral"], num_hidden_layers=2)
    shape = sizes_of(config)
    for tokens, square in ((512, 0), (4096, 4096 * 4096 * (1 + 2))):
        with_mask, without = (
            estimates.activation_bytes(replace(shape, masks=own), 1, tokens)
            for own in (True, False)
        )
        repeated = 2 * 2 * (2048 - 1024) * tokens  # keys and values, for each query
        assert with_mask - without == (square + repeated if square else 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_slice_of_logits_is_within_a_fifth_of_a_count_of_live_tensors(dtype):
    model = new_llama(vocab_size=2**16, hidden_size=32).requires_grad_(False).to(dtype)
    hidden = torch.zeros(2048, 32, dtype=dtype, requires_grad=True)
    counter = Counter([*model.parameters(), hidden])
    with counter:
        labels = torch.zeros(2048, dtype=torch.long)
        sliced_cross_entropy(hidden, model.lm_head.weight, None, labels).backward()
    shape = replace(shape_of(model), layers=0)
    assert estimates.loss_bytes(shape, 1, 2048, True) == pytest.approx(counter.most, rel=0.2)


def test_pose_costs_the_same_memory_at_any_target():
    """Counted of real rows, read by the model whose rotation reaches that target."""
    document = TrainingDocument(np.arange(2**15) % 64)
    model, most = new_llama(), {}
    for strategy in ("pose", "full"):
        for target in (2**11, 2**13):
            options = Finetune(strategy=strategy, **{"window": 512} if strategy == "pose" else {})
            size = defaults.settings(options, 1e7, 256, target).row_tokens.value
            kind = Pose(size, target) if strategy == "pose" else Full(size)
            row = Rows([document], kind, 4, 0)[3]
            assert row.positions.max() > target / 2
            most[strategy, target] = most_bytes_of_rows(model, [row])
            model.zero_grad()
    assert most["pose", 2**11] == most["pose", 2**13]
    assert most["full", 2**13] > 3.5 * most["full", 2**11]


def said_and_counted(config, choice, monkeypatch):
    tokens = 4096
    shape = sizes_of(config, choice.get("dtype", torch.bfloat16))
    options = {name: own for name, own in choice.items() if name != "dtype"}
    said = estimates.activation_bytes(shape, 1, tokens, **options)
    return said, most_bytes(config, tokens, monkeypatch, **choice)


def run_of(widths, layers, target, **asked):
    """The estimate of a LoRA on all linear layers of such a model."""
    config = config_of(widths, layers)
    shape, options = sizes_of(config), Finetune(**asked)
    settings = defaults.settings(options, shape.all_parameters, target // 4, target)
    row = settings.row_tokens.value
    micro = defaults.micro_rows(options, row, settings.rows.value)
    return estimates.estimate(shape, settings, 40_000_000, micro), shape


def test_runs_that_fit_one_gpu_are_not_refused():
    for widths, asked, free in (
        (LLAMA_7B, {"strategy": "pose", "window": 4096}, 24 * GB),
        (LLAMA_8B, {}, 80 * GB),
    ):
        found, shape = run_of(widths, 32, 2**16, **asked)
        assert estimates.check_fits(found, shape, free) is None


def test_an_estimate_somewhat_above_the_free_memory_warns_and_one_far_above_is_refused():
    found, shape = run_of(LLAMA_8B, 32, 2**16)
    need = found.peak_bytes
    assert estimates.check_fits(found, shape, int(need / 0.89)) is None
    for share in (0.91, 1.0, 1.14):
        warned = estimates.check_fits(found, shape, int(need / share))
        assert "may not be enough" in warned
        assert "--strategy pose --window" in warned
    with pytest.raises(InputError, match=r"rows of up to \d+ tokens.*--ignore-memory") as refused:
        estimates.check_fits(found, shape, int(need / 1.16))
    assert "may not be" not in str(refused.value)
    for free in (need // 2, need // 100):
        assert "may not be" in estimates.check_fits(found, shape, free, ignored=True)


def test_eager_attention_holds_the_square_of_positions():
    shape = replace(shape_of(new_llama()), eager=False)
    one, two = (
        estimates.activation_bytes(replace(shape, eager=True), 1, size)
        - estimates.activation_bytes(shape, 1, size)
        for size in (1024, 2048)
    )
    assert two == 4 * one > 0


def test_a_run_that_memory_refuses_goes_on_where_the_user_says_so(
    extended, stories, tmp_path, monkeypatch
):
    from ropext.evaluation import loading

    monkeypatch.setattr(loading, "free_memory", lambda device: 10**6)
    with pytest.raises(InputError, match="--ignore-memory goes on"):
        plan_finetune(extended, str(stories), **RUN)
    planned = plan_finetune(extended, str(stories), **RUN, ignore_memory=True)
    assert "may not be enough" in planned.tight
    assert planned.tight in report.finetune_plan(planned)
    assert planned.to_json()["memory_warning"] == planned.tight


def test_what_cuda_says_of_its_memory_is_exit_4_and_a_sentence():
    for words in (
        "CUDA error: out of memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    ):
        with pytest.raises(Stopped, match="smaller") as stopped, memory_errors("smaller rows"):
            raise RuntimeError(words)
        assert stopped.value.exit_code == 4
