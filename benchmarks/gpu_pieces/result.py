"""Does a tuning pay? A model tuned to twice its context: 400 steps, a fifth of the rows asking for
keys, with windows of the old length; its control, the same steps inside the old context, truncated
and read by Self-Extend; all judged on novels, code and manuals, and asked for 80 keys. Then a
second tuning of which half of the rows ask for keys.

SmolLM2 from 8k to 16k where `--model` and `--data` are given, else the bundled model.
"""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

from gpu_pieces import ROOT, STAND_IN, Case, Day, LeftOut, at_least, at_most, extended, ropext

FACTOR = 2
SHARES = (0.2, 0.5)  # of the rows, that ask for keys
NOVELS, CODE, MANUALS = "novels", "code", "manuals"
MOST_DOCUMENTS = 16
FOLDED = "self-extend"


def place_of(day: Day, share: float) -> Path:
    return day.work / f"tuned-{share}"


def texts(day: Day, name: str) -> str:
    """The folder of that name; the bundled documents where the bundled model stands in."""
    if day.model == STAND_IN:
        return "ropext://tuning" if name == "tuning" else "ropext://held-out"
    folder = day.data / name if day.data else None
    if folder and folder.is_dir():
        return str(folder)
    if name == CODE:  # packages of Python's library; manuals have to be brought
        made = day.work / CODE
        words = [sys.executable, str(ROOT / "scripts/real_model.py"), "--code", str(made)]
        subprocess.run(words, check=True)
        for empty in [path for path in made.iterdir() if not path.stat().st_size]:
            empty.unlink()  # a package that this Python has no longer
        return str(made)
    raise LeftOut(f"there is no folder {name} in --data")


def tune(day: Day, share: float) -> dict[str, Any]:
    """Tune, and train the control: the same steps on the same tokens in rows of the old length."""
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
    import torch
    from transformers import AutoModelForCausalLM

    from ropext import corpus, patching
    from ropext.evaluation.variants import Variant
    from ropext.models.adapter import add_adapter
    from ropext.models.tokenizer import load_tokenizer
    from ropext.results import BASE, CONTROL, EXTENDED, TUNED, rules
    from ropext.results.measurement import Measurement
    from ropext.training.judge import judge_of, read_now
    from ropext.training.origin import open_origin

    place = tuned(day, share)
    origin = open_origin(str(place / "base"))
    config = origin.base_config()
    target = origin.target
    encoder = corpus.DocumentEncoder(load_tokenizer(origin.snapshot, False))
    most = 2 if day.dry else MOST_DOCUMENTS
    wanted = corpus.Wanted((target,), given=True, max_documents=most)
    read = corpus.read_documents(corpus.Source(texts(day, name)))
    documents = corpus.choose_documents(read, encoder, wanted).documents
    judge = judge_of(documents, (origin.context, target), 0)

    def load(directory: Path) -> Any:
        dtype = torch.float32 if day.dry else torch.bfloat16
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
        return model.to(day.device).eval()

    def read_by(model: Any, label: str, kind: str) -> Any:
        return read_now(model, Variant(label, kind, origin.snapshot), judge).models

    base = load(place / "base")
    patching.apply_config(base, config)
    with torch.no_grad():
        models = read_by(base, BASE, BASE)
        control = add_adapter(base, str(place / CONTROL))
        models = models | read_by(control, CONTROL, CONTROL)
        patching.patch(control, method=FOLDED, factor=FACTOR)
        models = models | read_by(control, FOLDED, EXTENDED)
        models = models | read_by(load(place), TUNED, EXTENDED)
    measured = Measurement(judge.frame, models, judge.described)
    readings = measured.readings
    far = rules.far_change(measured, TUNED, CONTROL)
    beyond = rules.far_change(measured, TUNED, FOLDED)
    tax = judge.frame.difference(readings[TUNED], readings[BASE], (0, origin.context))
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


def interval(value: Any) -> str | None:
    """Of a difference, as text; None of a single document."""
    return value.ci95 and ", ".join(f"{bound:+.4f}" for bound in value.ci95)


def cases(day: Day) -> dict[str, Case]:
    made: dict[str, Case] = {}
    for share in SHARES:
        what = f"{share:.0%} of the rows ask for keys"
        made[f"{what}, the tuning"] = partial(tune, day, share)
        for name in (MANUALS, CODE, NOVELS):
            made[f"{what}, {name}"] = partial(judge, day, share, name)
        made[f"{what}, keys"] = partial(keys, day, share)
    return made
