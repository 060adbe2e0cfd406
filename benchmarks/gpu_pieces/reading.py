"""The texts that a piece trains on and judges by, and models read over them."""

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu_pieces import ROOT, STAND_IN, Day, LeftOut

if TYPE_CHECKING:
    from ropext.evaluation.corpus import Document
    from ropext.evaluation.workload import Workload
    from ropext.files.checkpoint import Snapshot
    from ropext.results.measurement import MeasuredModel

NOVELS, CODE, MANUALS = "novels", "code", "manuals"
CHARACTERS = 400_000  # size of a text of code, so that it holds 65,536 tokens


def texts(day: Day, name: str) -> str:
    """Return the folder of that name, or the bundled documents if the bundled model replaces the
    real one."""
    if day.model == STAND_IN:
        return "ropext://tuning" if name == "tuning" else "ropext://held-out"
    folder = day.data / name if day.data else None
    if folder and folder.is_dir():
        return str(folder)
    if name == CODE:  # packages of Python's library; manuals have to be brought
        folder = day.work / CODE
        if not folder.is_dir():
            words = [sys.executable, str(ROOT / "scripts/real_model.py"), "--code", str(folder)]
            subprocess.run([*words, "--characters", str(CHARACTERS)], check=True)
        for empty in [path for path in folder.iterdir() if not path.stat().st_size]:
            empty.unlink()  # a package that this Python has no longer
        return str(folder)
    raise LeftOut(f"there is no folder {name} in --data")


def documents_of(
    day: Day, name: str, snapshot: "Snapshot", length: int, most: int
) -> "tuple[Document, ...]":
    """Return at most so many documents that hold `length` tokens."""
    from ropext.base.errors import InputError
    from ropext.evaluation import corpus
    from ropext.models.tokenizer import load_tokenizer

    encoder = corpus.DocumentEncoder(load_tokenizer(snapshot, False))
    wanted = corpus.Wanted((length,), given=True, max_documents=2 if day.dry else most)
    read = corpus.read_documents(corpus.Source(texts(day, name)))
    try:
        return corpus.choose_documents(read, encoder, wanted).documents
    except InputError as error:
        raise LeftOut(f"{name}: {error}") from None


def load(day: Day, directory: Path | str) -> Any:
    """Load a model on the device, in bfloat16 (on a CPU, which emulates it, in float32)."""
    import torch
    from transformers import AutoModelForCausalLM

    dtype = torch.float32 if day.dry else torch.bfloat16
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    return model.to(day.device).eval()


def read_by(
    model: Any, label: str, kind: str, snapshot: "Snapshot", judge: "Workload"
) -> "dict[str, MeasuredModel]":
    """Read the judge's texts with the model in its present state."""
    import torch

    from ropext.evaluation.variants import Variant
    from ropext.training.judge import read_in_training

    with torch.no_grad():
        return dict(read_in_training(model, Variant(label, kind, snapshot), judge).models)


def interval(value: Any) -> str | None:
    """Return a difference's interval as text; None for a single document."""
    return value.ci95 and ", ".join(f"{bound:+.4f}" for bound in value.ci95)
