"""Does the jump of `--strategy pose` teach something?

Rows of the trained length with it, to four times the context, are compared with the same rows
unchanged from the text: 100 steps, as many tokens.
"""

import json
from functools import partial
from pathlib import Path
from typing import Any

from gpu_pieces import STAND_IN, Case, Day, LeftOut, at_most, extended
from gpu_pieces.reading import CODE, MANUALS, NOVELS, documents_of, interval, load, read_by, texts

FACTOR = 4
STEPS = 100
BATCH_TOKENS = 32768
MOST_DOCUMENTS = 8
JUMPS, CONTROL = "with its jump", "without a jump"


def place_of(day: Day, arm: str) -> Path:
    return day.work / f"pose {arm}".replace(" ", "-")


def train(day: Day, arm: str) -> dict[str, Any]:
    """Train one arm in this process, because no option leaves the jump out."""
    from contextlib import nullcontext

    from finetune_quality import without_jumps

    import ropext

    short = ("--context", "256") if day.dry else ()
    model = extended(day, day.model, FACTOR, f"base-{FACTOR}x", *short)
    config = json.loads(Path(model, "config.json").read_text("utf-8"))
    place = place_of(day, arm)
    if not (place / "ropext.json").is_file():
        with nullcontext() if arm == JUMPS else without_jumps():
            ropext.finetune(
                model,
                texts(day, "tuning"),
                place,
                strategy="pose",
                window=config["max_position_embeddings"] // FACTOR,
                steps=4 if day.dry else STEPS,
                batch_tokens=1024 if day.dry or day.model == STAND_IN else BATCH_TOKENS,
                eval_documents=0,
                force=True,
            )
    losses = json.loads((place / "training/losses.json").read_text("utf-8"))["tuned"]
    return {"steps": len(losses), "last loss": losses[-1]["loss"]}


def compare(day: Day, name: str) -> dict[str, Any]:
    """Compare both arms over the target, on the same documents."""
    from ropext.results import EXTENDED, rules
    from ropext.results.measurement import Measurement
    from ropext.training.data import judging_workload
    from ropext.training.origin import open_origin

    for arm in (JUMPS, CONTROL):
        if not (place_of(day, arm) / "ropext.json").is_file():
            raise LeftOut(f"the training {arm} is not there")
    origin = open_origin(str(day.work / f"base-{FACTOR}x"))
    documents = documents_of(day, name, origin.snapshot, origin.record.target, MOST_DOCUMENTS)
    judge = judging_workload(documents, (origin.record.context, origin.record.target), 0)
    models = read_by(load(day, place_of(day, JUMPS)), JUMPS, EXTENDED, origin.snapshot, judge)
    control = load(day, place_of(day, CONTROL))
    models = models | read_by(control, CONTROL, EXTENDED, origin.snapshot, judge)
    measured = Measurement(judge.frame, models, judge.described)
    far = rules.far_change(measured, JUMPS, CONTROL)
    return {
        "documents": len(documents),
        "with its jump minus without, far half, nats": at_most(far.value, 0),
        "its 95 % interval": interval(far),
    }


def cases(day: Day) -> dict[str, Case]:
    made: dict[str, Case] = {arm: partial(train, day, arm) for arm in (JUMPS, CONTROL)}
    for name in (NOVELS, MANUALS, CODE):
        made[f"far half, {name}"] = partial(compare, day, name)
    return made
