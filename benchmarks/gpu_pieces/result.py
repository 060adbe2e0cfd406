"""A model tuned beyond its context: 400 steps, a fifth of the rows asking for keys, with windows of
the old length; its control; both judged on novels and code, and asked for 80 keys.

SmolLM2 from 8k to 16k and 32k where `--model` and `--data` are given, else the bundled model.
"""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

from gpu_pieces import ROOT, STAND_IN, Case, Day, LeftOut, at_least, at_most, extended, ropext

FACTORS = (2, 4)
NOVELS, CODE = "novels", "code"
MOST_DOCUMENTS = 16


def place_of(day: Day, factor: int) -> Path:
    return day.work / f"tuned-{factor}x"


def texts(day: Day, name: str) -> str:
    """The folder of that name; the bundled documents where the bundled model stands in."""
    if day.model == STAND_IN:
        return "ropext://tuning" if name == "tuning" else "ropext://held-out"
    folder = day.data / name if day.data else None
    if folder and folder.is_dir():
        return str(folder)
    if name == CODE:  # packages of Python's library
        made = day.work / CODE
        words = [sys.executable, str(ROOT / "scripts/real_model.py"), "--code", str(made)]
        subprocess.run(words, check=True)
        for empty in [path for path in made.iterdir() if not path.stat().st_size]:
            empty.unlink()  # a package that this Python has no longer
        return str(made)
    raise LeftOut(f"there is no folder {name} in --data")


def tune(day: Day, factor: int) -> dict[str, Any]:
    place, data = place_of(day, factor), texts(day, "tuning")
    # A dry run takes a real model for one of a short context.
    short = ("--context", "256") if day.dry else ()
    model = extended(day, day.model, factor, f"base-{factor}x", *short)
    batch = 8192 if day.model == STAND_IN else 32768
    steps, batch = (4, 1024) if day.dry else (400, batch)
    if not (place / "ropext.json").is_file():
        ropext(
            day,
            *("finetune", model, "--data", data, "--control", "-o", str(place)),
            *("--steps", str(steps), "--batch-tokens", str(batch), "--save-every", "20"),
            *("--retrieval-share", "0.2", "--keep-short", "1", "--eval-documents", "0"),
        )
    losses = json.loads((place / "training/losses.json").read_text("utf-8"))["tuned"]
    return {
        "steps": len(losses),
        "first loss": losses[0]["loss"],
        "last loss": losses[-1]["loss"],
        "said": (place / "training/used.log").read_text("utf-8").strip(),
    }


def tuned(day: Day, factor: int) -> Path:
    place = place_of(day, factor)
    if not (place / "ropext.json").is_file():
        raise LeftOut("the tuning is not there")
    return place


def keys(day: Day, factor: int) -> dict[str, Any]:
    """Two tasks at five depths each, at the target."""
    place = tuned(day, factor)
    length = json.loads((place / "config.json").read_text("utf-8"))["max_position_embeddings"]
    items = 1 if day.dry else 8
    said = ropext(
        day,
        *("eval", str(place), "--tasks", "passkey,mkey", "--lengths", str(length)),
        *("--items", str(items), "-o", str(day.work / f"keys-{factor}x"), "--json"),
    )
    metrics = json.loads(said)["variants"]["tuned"]["metrics"]
    shares = [metrics[f"{task}@{length}"] for task in ("passkey", "mkey")]
    share = sum(value["value"] * value["n"] for value in shares) / sum(
        value["n"] for value in shares
    )
    return {
        "questions": sum(value["n"] for value in shares),
        "share of keys found": at_least(share, 0.95),
    }


def judge(day: Day, factor: int, name: str) -> dict[str, Any]:
    """Base and control through the short window, the tuned model, on the same tokens."""
    import torch
    from transformers import AutoModelForCausalLM

    from ropext import corpus
    from ropext.evaluation.variants import Variant
    from ropext.models.adapter import add_adapter
    from ropext.models.tokenizer import load_tokenizer
    from ropext.patching import apply_config
    from ropext.results import BASE, CONTROL, EXTENDED, TUNED, rules
    from ropext.results.measurement import Measurement
    from ropext.training.judge import judge_of, read_now
    from ropext.training.origin import open_origin

    place = tuned(day, factor)
    origin = open_origin(str(place / "base"))
    config, target = origin.base_config(), origin.target
    encoder = corpus.DocumentEncoder(load_tokenizer(origin.snapshot, False))
    wanted = corpus.Wanted((target,), given=True, max_documents=2 if day.dry else MOST_DOCUMENTS)
    read = corpus.read_documents(corpus.Source(texts(day, name)))
    documents = corpus.choose_documents(read, encoder, wanted).documents
    judge = judge_of(documents, (origin.context, target), 0)

    def load(directory: Path) -> Any:
        dtype = torch.float32 if day.dry else torch.bfloat16
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
        return model.to(day.device).eval()

    def read_by(model: Any, label: str) -> Any:
        if label == TUNED:
            return read_now(model, Variant(label, EXTENDED, origin.snapshot), judge).models
        apply_config(model, config)
        return read_now(model, Variant(label, label, origin.snapshot, config), judge).models

    base = load(place / "base")
    with torch.no_grad():
        models = read_by(base, BASE)
        control = add_adapter(base, str(place / CONTROL))
        models = models | read_by(control, CONTROL) | read_by(load(place), TUNED)
    measured = Measurement(judge.frame, models, judge.described)
    far, readings = rules.far_change(measured, TUNED, CONTROL), measured.readings
    tax = judge.frame.difference(readings[TUNED], readings[BASE], (0, origin.context))
    return {
        "documents": len(documents),
        "tuned minus control, far half, nats": at_most(far.value, 0 if name == CODE else 0.005),
        "its 95 % interval": far.ci95 and ", ".join(f"{bound:+.4f}" for bound in far.ci95),
        "tuned minus base, far half, nats": rules.far_change(measured, TUNED, BASE).value,
        "control minus base, far half, nats": rules.far_change(measured, CONTROL, BASE).value,
        "short tax, nats": at_most(tax.value, 0.01),
    }


def cases(day: Day) -> dict[str, Case]:
    made: dict[str, Case] = {}
    for factor in FACTORS:
        what = f"{factor} times the context"
        made[f"{what}, the tuning"] = partial(tune, day, factor)
        made[f"{what}, code"] = partial(judge, day, factor, CODE)
        made[f"{what}, novels"] = partial(judge, day, factor, NOVELS)
        made[f"{what}, keys"] = partial(keys, day, factor)
    return made
