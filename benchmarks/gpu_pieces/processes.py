"""A fine-tuning of the bundled model under `accelerate launch`, with the configs that ropext ships.

It uses every GPU, and is compared with the same one in one process.
"""

import json
import shutil
from functools import partial
from typing import Any

from gpu_pieces import STAND_IN, Case, Day, LeftOut, at_most, command, extended, ropext


def words(day: Day, name: str) -> tuple[str, ...]:
    """Return the command, and clear its output away."""
    model = extended(day, STAND_IN, 4, "bundled-4x")
    output = day.work / f"processes-{name}"
    for place in (output, output.with_name(f"{output.name}.run")):
        shutil.rmtree(place, ignore_errors=True)
    how = ("--steps", "3", "--batch-tokens", "8192", "--micro-rows", "1", "--dtype", "float32")
    return (
        *("finetune", model, "--data", "ropext://tuning", "-o", str(output)),
        *(*how, "--eval-documents", "0"),
    )


def losses(day: Day, name: str) -> list[float]:
    place = day.work / f"processes-{name}" / "training/losses.json"
    return [step["loss"] for step in json.loads(place.read_text("utf-8"))["tuned"]]


def alone(day: Day) -> dict[str, Any]:
    ropext(day, *words(day, "alone"))
    return {"losses": ", ".join(f"{loss:.5f}" for loss in losses(day, "alone"))}


def launched(day: Day, name: str) -> dict[str, Any]:
    import torch

    from ropext.training.launch import config

    count = 2 if day.dry else torch.cuda.device_count()
    launch = ["-m", "accelerate.commands.launch", "--config_file", str(config(name))]
    launch += ["--num_processes", str(count), "--main_process_port", "0"]
    shared = 2 if name == "fsdp2_cp" and count % 2 == 0 else 1
    if name == "fsdp2_cp":
        launch += ["--parallelism_config_cp_size", str(shared)]
        launch += ["--parallelism_config_dp_shard_size", str(count // shared)]
    if day.dry and name != "ddp":
        _, said = command(day, [*launch, "-m", "ropext", *words(day, name)], ends=1)
        refusal = "launched with FSDP on a CPU"
        if refusal not in said:
            raise RuntimeError(said)
        raise LeftOut("refused, as it should be: accelerate gives FSDP to GPUs alone")
    ropext(day, *words(day, name), launch=launch)
    if not (day.work / "processes-alone").exists():
        alone(day)
    both = zip(losses(day, name), losses(day, "alone"), strict=True)
    apart = max(abs(a - b) for a, b in both)
    return {
        "processes": count,
        "of them share a row": shared,
        "largest difference of a step's loss": at_most(apart, 1e-5),
    }


def cases(day: Day) -> dict[str, Case]:
    names = ("ddp", "fsdp2", "fsdp2_cp")
    return {"one process": partial(alone, day)} | {
        name: partial(launched, day, name) for name in names
    }
