"""Estimates of memory beside a count of live tensors; when a run is refused, warned of, let go."""

from dataclasses import replace

import pytest
import torch
from live_tensors import most_bytes
from test_finetune import RUN
from tiny_llama import new_llama
from transformers import GPTNeoXConfig, LlamaConfig, Qwen3Config

from ropext.errors import InputError, Stopped
from ropext.evaluation.costs import shape_of
from ropext.evaluation.loading import memory_errors
from ropext.options.training import Finetune
from ropext.training import defaults, estimates, showing

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
QWEN = (2048, 6144, 16, 8, 151936)
NEOX = (2048, 8192, 16, 16, 50304)


def config_of(widths, layers, kind=LlamaConfig):
    hidden, mlp, heads, kv_heads, vocabulary = widths
    return kind(
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
    import transformers

    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    width = torch.empty((), dtype=dtype).element_size()
    return replace(shape_of(model), dtype_bytes=width, eager=False)


@pytest.mark.parametrize(
    ("widths", "kind", "layers", "choice"),
    [
        *((own, LlamaConfig, 2, {}) for own in WIDTHS.values()),
        (LLAMA_8B, LlamaConfig, 6, {}),
        (LLAMA_8B, LlamaConfig, 2, {"recompute": False}),
        (LLAMA_8B, LlamaConfig, 2, {"lora": False}),
        (LLAMA_8B, LlamaConfig, 2, {"dtype": torch.float32}),
        (QWEN, Qwen3Config, 2, {}),
        (NEOX, GPTNeoXConfig, 2, {}),
    ],
)
def test_activations_are_within_a_fifth_of_a_count_of_live_tensors(
    widths, kind, layers, choice, monkeypatch
):
    config, tokens = config_of(widths, layers, kind), 4096
    shape = sizes_of(config, choice.get("dtype", torch.bfloat16))
    said = {name: own for name, own in choice.items() if name != "dtype"}
    guessed = estimates.activation_bytes(shape, 1, tokens, **said)
    counted = most_bytes(config, tokens, monkeypatch, **choice)
    assert guessed == pytest.approx(counted, rel=0.2)


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
    from ropext.training import run

    monkeypatch.setattr(loading, "free_memory", lambda device: 10**6)
    options = Finetune(**RUN)
    with pytest.raises(InputError, match="--ignore-memory goes on"):
        run.dry_run(str(extended), str(stories), options)
    planned = run.dry_run(str(extended), str(stories), options.changed(ignore_memory=True))
    assert "may not be enough" in planned.tight
    assert planned.tight in showing.plan_text(planned)
    assert planned.to_json()["memory_warning"] == planned.tight


def test_what_cuda_says_of_its_memory_is_exit_4_and_a_sentence():
    for words in (
        "CUDA error: out of memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    ):
        with pytest.raises(Stopped, match="smaller") as stopped, memory_errors("smaller rows"):
            raise RuntimeError(words)
        assert stopped.value.exit_code == 4
