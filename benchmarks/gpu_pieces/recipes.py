"""The shipped recipes with random weights of the right shape and three steps: nothing refuses."""

import shutil
from functools import partial
from typing import Any

from gpu_pieces import Case, Day, command
from gpu_pieces.shapes import LLAMA, QWEN2, checkpoint, cut, texts

TARGET = 131072
RECIPES = {"llama3-8b-128k": LLAMA, "qwen2.5-7b-128k": QWEN2}


def recipe(day: Day, name: str, shape: str) -> dict[str, Any]:
    data = texts(day, cut(day, TARGET), 4)
    lengths = [cut(day, tokens) for tokens in (8192, TARGET)]
    words = [
        *(f"model={checkpoint(day, shape)}", f"evaluate.data={data}", "evaluate.max_docs=1"),
        *("evaluate.items=1", "evaluate.depths=0.5", f"evaluate.lengths={lengths[0]},{lengths[1]}"),
    ]
    if shape == LLAMA:
        words += [f"finetune.data={data}", "finetune.steps=3", "finetune.eval_documents=0"]
        words += [f"finetune.window={cut(day, 32768)}", f"finetune.batch_tokens={cut(day, 65536)}"]
        # Of random weights these gates say nothing, and one names a length.
        words += [f"evaluate.fail_if=short_tax.value > 1,tail@{lengths[1]}.value > 1 vs untouched"]
    output = day.work / name
    said, _ = command(day, ["-m", "ropext", "run", name, *words, "-o", str(output)])
    for place in (output, output.with_name(f"{name}.run"), day.work / shape):  # 30 GB
        shutil.rmtree(place, ignore_errors=True)
    return {"ended": "nothing refused", "said": said.strip().splitlines()[-1]}


def cases(day: Day) -> dict[str, Case]:
    return {name: partial(recipe, day, name, shape) for name, shape in RECIPES.items()}
