"""The commands that the campaign runs, on a tiny checkpoint, each with its inputs and outputs."""

import json
from dataclasses import dataclass
from pathlib import Path

SMALL_TRAINING = (
    *("--steps", "4", "--save-every", "2", "--eval-every", "2", "--batch-tokens", "256"),
    *("--rank", "2", "--eval-documents", "2", "--strategy", "full", "--seed", "3"),
)
RECIPE_TRAINING = {"steps": 2, "save_every": 1, "batch_tokens": 256, "rank": 2, "seed": 3}
RECIPE_TRAINING |= {"eval_documents": 0}
SMALL_FIT = (
    *("--factor", "2", "--start", "yarn", "--steps", "2", "--eval-every", "1"),
    *("--batch-tokens", "256", "--held-out", "2", "--retrieval-items", "2", "--seed", "3"),
)


@dataclass(frozen=True)
class Command:
    """One command line.

    It runs in a fresh folder, with `out` as its output: records keep the words of the command, so
    they must not differ between runs.
    """

    name: str
    words: tuple[str, ...]
    proved: bool = False  # the proof in a process of its own, as users have it
    beside: tuple[str, ...] = ()  # its files next to its output
    old: bool = False  # `out` holds another checkpoint before it
    output: str = "out"

    def argv(self) -> list[str]:
        return ["ropext", *self.words]


def prepare(folder: Path) -> Path:
    """Write the inputs once, for the campaign to hash: a base, its extension, and documents."""
    from gguf_files import making
    from tiny_checkpoints import write_checkpoint, write_documents

    import ropext

    inputs = folder / "inputs of the campaign, read only ü"
    inputs.mkdir(parents=True)
    write_checkpoint(inputs / "base")
    making.write(inputs / "m.gguf")
    ropext.extend(str(inputs / "base"), inputs / "ext", method="yarn", factor=2, no_verify=True)
    write_documents(inputs / "train.jsonl", count=12, words=90, seed=1)
    write_documents(inputs / "eval.jsonl", count=3, words=120)
    recipe = {
        "model": str(inputs / "base"),
        "extend": {"method": "yarn", "factor": 2, "no_verify": True},
        "finetune": {"data": str(inputs / "train.jsonl"), **RECIPE_TRAINING},
        "evaluate": {"data": str(inputs / "eval.jsonl"), "lengths": [64, 128]},
    }
    (inputs / "recipe.yaml").write_text(json.dumps(recipe))
    return inputs


def commands(inputs: Path) -> dict[str, Command]:
    """Return the commands by name; the names are the rows of the campaign's table."""
    base, ext = str(inputs / "base"), str(inputs / "ext")
    extend = ("extend", base, "--method", "yarn", "--factor", "2", "-o", "out", "--quiet")
    fine = ("finetune", ext, "--data", str(inputs / "train.jsonl"), "-o", "out", "--quiet")
    learn = ("fit", base, "--data", str(inputs / "train.jsonl"), "-o", "out", "--quiet")
    read = ("eval", ext, "--data", str(inputs / "eval.jsonl"), "--lengths", "64,128", "--quiet")
    found = (
        Command("extend", (*extend, "--no-verify")),
        Command("extend --link hard", (*extend, "--no-verify", "--link", "hard")),
        Command("extend --force", (*extend, "--no-verify", "--force"), old=True),
        Command(
            "extend GGUF",
            ("extend", str(inputs / "m.gguf"), "--factor", "2", "-o", "out.gguf", "--quiet"),
            beside=("out.gguf.Modelfile",),
            output="out.gguf",
        ),
        Command("extend, proved", extend, proved=True),
        Command("fit", (*learn, *SMALL_FIT)),
        Command("finetune", (*fine, *SMALL_TRAINING)),
        Command(
            "run", ("run", str(inputs / "recipe.yaml"), "-o", "out", "--quiet"), beside=("out.run",)
        ),
        Command("eval", (*read, "--tasks", "passkey", "--items", "1", "-o", "out")),
    )
    return {command.name: command for command in found}
