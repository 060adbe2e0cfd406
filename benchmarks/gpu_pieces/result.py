"""Does a tuning pay? A model is tuned to twice its context and compared with its control.

The tuning takes 400 steps, a fifth of the rows ask for keys, and it keeps windows of the old
length. The control does the same steps inside the old context, and is read truncated and by
Self-Extend. All are judged on novels, code and manuals, and asked for 80 keys.

SmolLM2 goes from 8k to 16k if `--model` and `--data` are given, else the bundled model takes its
place.
"""

import json
from functools import partial
from pathlib import Path
from typing import Any

from gpu_pieces import STAND_IN, Case, Day, LeftOut, at_least, at_most, extended, ropext
from gpu_pieces.reading import CODE, MANUALS, NOVELS, documents_of, interval, load, read_by, texts

FACTOR = 2
SHARE = 0.2  # the share of the rows that ask for keys
MOST_DOCUMENTS = 16
FOLDED = "self-extend"


def place_of(day: Day, share: float) -> Path:
    return day.work / f"tuned-{share}"


def tune(day: Day, share: float) -> dict[str, Any]:
    """Train the tuning and its control: the same steps on the same tokens in rows of the old
    length."""
    place = place_of(day, share)
    # A dry run takes a real model for one of a short context.
    short = ("--context", "256") if day.dry else ()
    model = extended(day, day.model, FACTOR, f"base-{FACTOR}x", *short)
    steps = 400
    batch = 8192 if day.model == STAND_IN else 32768
    if day.dry:
        steps = 4
        batch = 1024
    if not (place / "ropext.json").is_file():
        ropext(
            day,
            *("finetune", model, "--data", texts(day, "tuning"), "--control", "-o", str(place)),
            *("--steps", str(steps), "--batch-tokens", str(batch), "--save-every", "20"),
            *("--retrieval-share", str(share), "--keep-short", "1", "--eval-documents", "0"),
        )
    losses = json.loads((place / "training/losses.json").read_text("utf-8"))["tuned"]
    return {
        "steps": len(losses),
        "first loss": losses[0]["loss"],
        "last loss": losses[-1]["loss"],
        "said": (place / "training/used.log").read_text("utf-8").strip(),
    }


def tuned(day: Day, share: float) -> Path:
    place = place_of(day, share)
    if not (place / "ropext.json").is_file():
        raise LeftOut("the tuning is not there")
    return place


def keys(day: Day, share: float) -> dict[str, Any]:
    """Two tasks at five depths each, at the target."""
    place = tuned(day, share)
    length = json.loads((place / "config.json").read_text("utf-8"))["max_position_embeddings"]
    items = 1 if day.dry else 8
    said = ropext(
        day,
        *("eval", str(place), "--tasks", "passkey,mkey", "--lengths", str(length)),
        *("--items", str(items), "-o", str(day.work / f"keys-{share}"), "--json"),
    )
    metrics = json.loads(said)["variants"]["tuned"]["metrics"]
    shares = [metrics[f"{task}@{length}"] for task in ("passkey", "mkey")]
    questions = sum(value["n"] for value in shares)
    found = sum(value["value"] * value["n"] for value in shares) / questions
    return {
        "questions": questions,
        "share of keys found": at_least(found, 0.4),
    }


def judge(day: Day, share: float, name: str) -> dict[str, Any]:
    """Base and control through the short window, the control by Self-Extend and the tuned model
    over the whole length, on the same tokens."""
    from ropext.models import patching
    from ropext.models.adapter import add_adapter
    from ropext.results import BASE, CONTROL, EXTENDED, TUNED, rules
    from ropext.results.measurement import Measurement
    from ropext.training.data import judging_workload
    from ropext.training.origin import open_origin

    place = tuned(day, share)
    origin = open_origin(str(place / "base"))
    snapshot = origin.snapshot
    documents = documents_of(day, name, snapshot, origin.record.target, MOST_DOCUMENTS)
    judge = judging_workload(documents, (origin.record.context, origin.record.target), 0)
    base = load(day, place / "base")
    patching.apply_config(base, origin.record.base["config"])
    models = read_by(base, BASE, BASE, snapshot, judge)
    control = add_adapter(base, str(place / CONTROL))
    models = models | read_by(control, CONTROL, CONTROL, snapshot, judge)
    patching.patch(control, method=FOLDED, factor=FACTOR)
    models = models | read_by(control, FOLDED, EXTENDED, snapshot, judge)
    models = models | read_by(load(day, place), TUNED, EXTENDED, snapshot, judge)
    measured = Measurement(judge.frame, models, judge.described)
    readings = measured.readings
    far = rules.far_change(measured, TUNED, CONTROL)
    beyond = rules.far_change(measured, TUNED, FOLDED)
    tax = judge.frame.difference(readings[TUNED], readings[BASE], (0, origin.record.context))
    return {
        "documents": len(documents),
        # On texts that refer far back a tuning has to gain; on novels not to lose.
        "tuned minus control, far half, nats": at_most(far.value, 0 if name == NOVELS else -0.01),
        "its 95 % interval": interval(far),
        "tuned minus self-extend over the control, far half, nats": beyond.value,
        "interval of that": interval(beyond),
        "tuned minus base, far half, nats": rules.far_change(measured, TUNED, BASE).value,
        "control minus base, far half, nats": rules.far_change(measured, CONTROL, BASE).value,
        "short tax, nats": at_most(tax.value, 0.01),
    }


def arm(day: Day, share: float) -> dict[str, Case]:
    """Return the cases of a tuning with such a share of rows that ask for keys, and of its
    judges."""
    what = f"{share:.0%} of the rows ask for keys"
    made: dict[str, Case] = {f"{what}, the tuning": partial(tune, day, share)}
    for name in (MANUALS, CODE, NOVELS):
        made[f"{what}, {name}"] = partial(judge, day, share, name)
    made[f"{what}, keys"] = partial(keys, day, share)
    return made


def cases(day: Day) -> dict[str, Case]:
    return arm(day, SHARE)
