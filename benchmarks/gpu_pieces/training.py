"""A LoRA of random weights: speed and memory; and a run that resumes after a kill."""

import importlib.util
import shutil
import statistics
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from gpu_pieces import Case, Day, LeftOut, at_least, at_most, command, extended, ropext
from gpu_pieces.shapes import LLAMA, build, checkpoint, cut, texts

STEPS, ROUNDS = 4, 2  # the first step warms up
SHORT = ("--steps", "6", "--batch-tokens", "2048", "--save-every", "1", "--eval-documents", "0")


def bare_seconds(model: Any, tokens: int) -> float:
    """Forward and backward of the trunk alone, its weights frozen, layers run again as in ours."""
    import torch
    from eval_gpu import seconds_of

    model.requires_grad_(False).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    ids = torch.randint(3, 1000, (1, tokens), device=model.device)

    def work() -> None:
        embedded = model.get_input_embeddings()(ids).requires_grad_()
        hidden = model.base_model(inputs_embeds=embedded, use_cache=False).last_hidden_state
        hidden.backward(torch.ones_like(hidden))

    seconds = statistics.median(seconds_of(work, ROUNDS))
    model.gradient_checkpointing_disable()
    return seconds


def lora(day: Day, tokens: int, window: int = 0) -> dict[str, Any]:
    """Steps of one row; `window` > 0 is pose to so many tokens."""
    from eval_gpu import flops, peak_of, peak_rate
    from finetune_engines import ROPEXT, Run, step_seconds

    model, row = build(day, LLAMA), cut(day, window or tokens)
    vocabulary, weights = model.config.vocab_size, model.get_memory_footprint() / 2**30
    bare = bare_seconds(model, row)
    trunk, head = flops(model, row)
    run = Run(cut(day, tokens), steps=STEPS, window=window and row, device=day.device)
    peak, took = peak_of(lambda: step_seconds(ROPEXT, model, vocabulary, run))
    # Weights are frozen: a backward pass takes as many FLOPs as a forward one.
    rate = 2 * (trunk + head) / statistics.median(took)
    top = peak_rate()
    return {
        "tokens a second": row / statistics.median(took),
        "share of bare forward and backward": at_least(rate * bare / (2 * trunk), 0.5),
        "TFLOP/s of the model": rate / 1e12,
        "share of the device's bf16 peak": rate / top if top else None,
        "peak above the weights, GiB": peak / 2**30,
        "weights, GiB": weights,
    }


def beside_plain(day: Day, tokens: int) -> dict[str, Any]:
    """Train a 1B shape, by ropext and by plain Trainer + PEFT."""
    from finetune_engines import Run
    from finetune_gpu import ONE_BILLION, TINY, compare

    run = Run(cut(day, tokens), steps=STEPS, device=day.device)
    figures = compare(TINY if day.dry else ONE_BILLION, run)
    ratio, peak = "tokens a second, ropext over plain", "peak above the weights, ropext, GiB"
    plain = figures["peak above the weights, plain, GiB"]
    return figures | {ratio: at_least(figures[ratio], 1), peak: at_most(figures[peak], plain)}


def qlora(day: Day, tokens: int) -> dict[str, Any]:
    """Run `ropext finetune --qlora`, the whole command."""
    factor = 4
    model = extended(day, checkpoint(day, LLAMA), factor, f"{LLAMA}-{factor}x")
    place = day.work / "qlora"
    words = [
        *("finetune", model, "--data", texts(day, cut(day, tokens), 3)),
        *("--qlora", "--steps", "3", "--eval-documents", "0", "--link", "symlink", "--force"),
        *("--batch-tokens", str(cut(day, tokens))),
    ]
    if day.dry or not importlib.util.find_spec("bitsandbytes"):
        _, said = command(day, ["-m", "ropext", *words, "-o", str(place)], ends=2)
        raise LeftOut(f"refused, as it should be: {said.strip().splitlines()[-1]}")
    ropext(day, *words, "-o", str(place))
    said = (place / "training/used.log").read_text("utf-8").strip()
    shutil.rmtree(place)  # 16 GB
    return {"said": said}


def resumed(day: Day) -> dict[str, Any]:
    """Compare the losses of a run that was killed twice with an undisturbed run's."""
    import json

    from finetune_resume import killed, saved, start

    model = Path(extended(day, "ropext://demo", 4, "bundled-4x"))
    losses = []
    with tempfile.TemporaryDirectory(dir=day.work) as folder:
        for name, moments in (("killed", (2, 4)), ("whole", ())):
            output = Path(folder) / name / "out"
            output.parent.mkdir()
            for moment in moments:
                killed(model, output, saved(moment), SHORT)
            log = output.with_name("log.txt")
            if start(model, output, log, SHORT).wait():
                raise RuntimeError(log.read_text("utf-8"))
            written = json.loads((output / "training/losses.json").read_text("utf-8"))
            losses.append([step["loss"] for step in written["tuned"]])
    apart = max(abs(a - b) for a, b in zip(*losses, strict=True))
    return {"steps": len(losses[0]), "largest difference of a step's loss": at_most(apart, 1e-5)}


def cases(day: Day) -> dict[str, Case]:
    return {
        "resume after two kills, the bundled model": partial(resumed, day),
        "1B beside plain Trainer + PEFT, rows of 32,768": partial(beside_plain, day, 32768),
        f"{LLAMA}, --qlora, full rows of 32,768": partial(qlora, day, 32768),
        f"{LLAMA}, full rows of 32,768": partial(lora, day, 32768),
        f"{LLAMA}, full rows of 65,536": partial(lora, day, 65536),
        f"{LLAMA}, pose, rows of 32,768 to 131,072": partial(lora, day, 131072, 32768),
    }
