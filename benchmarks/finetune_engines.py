"""The two engines that the fine-tuning benchmarks compare, on one random model: ropext's own, and
plain Trainer + PEFT with the same adapter, rows, optimiser and recomputation. No benchmark itself.
"""

import re
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

PLAIN, ROPEXT = "plain", "ropext"


@dataclass(frozen=True)
class Model:
    """A random Llama."""

    vocabulary: int
    hidden: int = 256
    feed_forward: int = 688
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2

    def build(self, dtype: Any = None, device: str = "cpu") -> Any:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.feed_forward,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            max_position_embeddings=8192,
            use_cache=False,
        )
        with torch.device(device):
            return LlamaForCausalLM._from_config(config, dtype=dtype or torch.float32)


@dataclass(frozen=True)
class Run:
    """Rows of `tokens` tokens, `rows` of them a step; `window` > 0 is pose to `tokens`."""

    tokens: int
    rows: int = 1
    steps: int = 1
    window: int = 0
    recompute: bool = True
    device: Literal["cpu", "cuda"] = "cpu"

    @property
    def row_tokens(self) -> int:
        return self.window or self.tokens

    def settings(self) -> Any:
        from ropext.options.training import Finetune
        from ropext.training import defaults

        asked = Finetune(
            steps=self.steps,
            batch_tokens=self.rows * self.row_tokens,
            device=self.device,
            strategy="pose" if self.window else "full",
            window=self.window or None,
        )
        return asked, defaults.finetune_settings(
            asked, defaults.ModelSize(50_000_000, self.tokens // 4, self.tokens)
        )


def trainer(engine: str, model: Any, vocabulary: int, run: Run, folder: Path) -> Any:
    """Return a trainer that trains the model on random tokens."""
    import numpy as np
    import transformers

    from ropext.evaluation.corpus import Document
    from ropext.training import models
    from ropext.training import trainer as ours
    from ropext.training.loss import use_sliced_loss
    from ropext.training.rows import FullRows, PoseRows, RowCollator, TrainingRows

    options, settings = run.settings()
    if engine == ROPEXT:
        assert use_sliced_loss(model) is None
    joined = models.add_adapter(model, options, settings)
    if run.recompute:  # Trainer does it in train(), single steps go without that
        joined.gradient_checkpointing_enable({"use_reentrant": False})
    # The same document for every target of pose: its ids take memory too.
    length = 2**20 if run.window else 4 * run.tokens
    ids = np.random.default_rng(0).integers(0, vocabulary, length)
    strategy = PoseRows(run.window, run.tokens) if run.window else FullRows(run.tokens)
    rows = TrainingRows([Document(ids)], strategy, run.rows * run.steps, 0)
    training: Any = SimpleNamespace(settings=settings, options=options, padding=0)
    job = ours.Optimisation(
        training=training,
        recompute=run.recompute,
        model=joined,
        rows=rows,
        folder=folder,
        rows_per_step=run.rows,
        row_tokens=run.row_tokens,
        stopping=ours.Stopping(),
    )
    kind = ours._Trainer if engine == ROPEXT else transformers.Trainer
    made: Any = kind(
        model=joined,
        args=ours.trainer_arguments(job),
        train_dataset=rows,
        data_collator=RowCollator(0),
    )
    made.job = job
    made.remove_callback(transformers.PrinterCallback)
    made.args.save_strategy = "no"
    return made


def step_seconds(engine: str, model: Any, vocabulary: int, run: Run) -> list[float]:
    """Return the seconds of each step but the first, in Trainer's own loop, as `ropext finetune`
    runs it."""
    import transformers
    from eval_gpu import wait

    took: list[float] = []

    class Clock(transformers.TrainerCallback):
        begun = 0.0

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            wait()
            self.begun = time.perf_counter()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            wait()
            took.append(time.perf_counter() - self.begun)

    with tempfile.TemporaryDirectory() as folder:
        made = trainer(engine, model, vocabulary, run, Path(folder))
        made.add_callback(Clock())
        made.train()
    return took[1:]


def status(key: str) -> float:
    """Return MiB, from the kernel's own accounting of this process."""
    text = Path("/proc/self/status").read_text(encoding="utf-8")
    found = re.search(rf"{key}:\s+(\d+)", text)
    assert found is not None
    return int(found[1]) / 1024
