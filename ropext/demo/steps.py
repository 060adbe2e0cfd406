"""What `ropext demo` does, in order: each step is one call that has a command of the same words."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MODEL, TUNING, HELD_OUT = "ropext://demo", "ropext://tuning", "ropext://held-out"

CONTEXT = 256  # tokens that the bundled checkpoint was trained on
FACTOR, WIDER, FARTHEST = 4, 8, 32
LENGTHS = tuple(CONTEXT << k for k in range(FACTOR.bit_length()))
DOCUMENTS = 32
STEPS, WIDER_STEPS, FAR_STEPS, FIT_STEPS = 60, 100, 60, 40
# The recorded numbers were made with these; the default is shorter, and ends alike.
WARMUP, WIDER_WARMUP, FAR_WARMUP = 12, 20, 10
STEP_TOKENS = 8192
FAR_LENGTHS = tuple(CONTEXT * factor for factor in (8, 16, FARTHEST))
FAR_WINDOW = 2048  # tokens of a row of pose

MOST = 8_000_000  # forward-token equivalents, in all
MOST_UNTUNED = MOST // 3  # of these, without fine-tuning

METHODS = ("pi", "ntk", "yarn")
TASKS = ("passkey", "mkey")
READ = {"data": HELD_OUT, "tasks": TASKS, "items": 8, "max_docs": DOCUMENTS}
TRAIN = {"data": TUNING, "batch_tokens": STEP_TOKENS, "retrieval_share": 0.2, "patience": 0}

# A field of the options whose flag has another name.
FLAGS = {"evaluate": "eval"}


@dataclass(frozen=True)
class Step:
    """One step; `subject` and `output` are names in the demo's directory, or bundled names."""

    name: str
    sentence: str
    command: str
    subject: str
    options: Mapping[str, Any] = field(default_factory=dict)
    output: str | None = None
    beyond: bool = False  # not part of the budget

    def at(self, folder: Path, name: str) -> str:
        """Where a name is, for somebody in the working directory."""
        return name if "://" in name else str(folder / name)

    def words(self, folder: Path) -> list[str]:
        """The command line that does this step."""
        words = ["ropext", self.command, self.at(folder, self.subject)]
        for name, value in self.options.items():
            flag = "--" + FLAGS.get(name, name).replace("_", "-")
            words += [flag] if value is True else [flag, _text(value)]
        return [*words, "-o", self.at(folder, self.output)] if self.output else words

    @property
    def trains(self) -> int:
        """Tokens that it trains on."""
        if self.command not in ("finetune", "fit"):
            return 0
        runs = 2 if self.options.get("control") else 1
        return int(self.options["steps"]) * STEP_TOKENS * runs


def _text(value: Any) -> str:
    if isinstance(value, tuple | list):
        return ",".join(map(str, value))
    return str(value)


def steps(finetune: bool, far: bool) -> list[Step]:
    """All of them, in order."""
    chosen = [*_looking(), *_extending(), *_measuring()]
    if finetune:
        chosen += [*_tuning(), *_wider()]
    kept = "tuned" if finetune else "fitted"
    chosen.append(
        Step(
            "verify",
            f"Verify the {kept} checkpoint: stock transformers builds it in a fresh process, and "
            "every rotary module is compared with the record.",
            "verify",
            kept,
        )
    )
    return chosen + (_far() if far else [])


def _looking() -> Sequence[Step]:
    return (
        Step("inspect", "Inspect the bundled model: what does its config say of positions?",
             "inspect", MODEL),
        Step("plan", f"Plan {FACTOR} times its context: what would be written, and who reads it?",
             "plan", MODEL, {"factor": FACTOR}),
    )  # fmt: skip


def _extending() -> Sequence[Step]:
    names = {"pi": "Position Interpolation", "ntk": "NTK-aware scaling", "yarn": "YaRN"}
    closed = [
        Step(
            f"extend-{method}",
            f"Extend by {names[method]}: the weights stay, the config changes, and a fresh "
            "process proves it.",
            "extend",
            MODEL,
            {"method": method, "factor": FACTOR},
            f"{method}-{FACTOR}x",
        )
        for method in METHODS
    ]
    fitted = Step(
        "fit",
        "Fit a spectrum: the weights stay, and the rotary frequencies are learned from text of "
        "packages that are not measured on.",
        "fit",
        MODEL,
        {"data": TUNING, "factor": FACTOR, "start": "yarn", "steps": FIT_STEPS},
        "fitted",
    )
    return (*closed, fitted)


def _measuring() -> Sequence[Step]:
    read = READ | {"lengths": LENGTHS}
    return (
        Step(
            "measure-methods",
            "Measure the base, the untouched model and the three closed forms: loss on held-out "
            "documents by position, and retrieval by length and depth.",
            "eval",
            MODEL,
            {"method": METHODS, "factor": FACTOR} | read,
            "measured/methods",
        ),
        Step(
            "measure-fitted",
            "Measure the fitted spectrum on the same tokens and questions.",
            "eval",
            "fitted",
            read,
            "measured/fitted",
        ),
    )


def _tuning() -> Sequence[Step]:
    judged = {"evaluate": HELD_OUT, "eval_documents": DOCUMENTS, "eval_every": STEPS}
    return (
        Step(
            "tune",
            f"Fine-tune the YaRN checkpoint for {STEPS} steps with a LoRA, and the unextended base "
            "on the same tokens as the control.",
            "finetune",
            f"yarn-{FACTOR}x",
            TRAIN | {"steps": STEPS, "warmup": WARMUP, "control": True} | judged,
            "tuned",
        ),
        Step(
            "measure-tuned",
            "Measure the tuned model on the same tokens and questions.",
            "eval",
            "tuned",
            READ | {"lengths": LENGTHS},
            "measured/tuned",
        ),
    )


def _wider() -> Sequence[Step]:
    wide = f"yarn-{WIDER}x"
    return (
        Step(f"extend-{wide}", f"Extend by YaRN once more, to {WIDER} times the context.",
             "extend", MODEL, {"method": "yarn", "factor": WIDER}, wide),
        Step(f"tune-{WIDER}x", f"Fine-tune that one too, for {WIDER_STEPS} steps.",
             "finetune", wide,
             TRAIN | {"steps": WIDER_STEPS, "warmup": WIDER_WARMUP, "eval_documents": 0},
             f"tuned-{WIDER}x"),
        Step(f"measure-{WIDER}x", f"Measure it at {WIDER} times the context.",
             "eval", f"tuned-{WIDER}x",
             READ | {"max_docs": DOCUMENTS // 2, "lengths": (WIDER * CONTEXT,)},
             f"measured/tuned-{WIDER}x"),
    )  # fmt: skip


def _far() -> list[Step]:
    """To 32 times the context: no bundled document is that long, so retrieval alone is measured."""
    far = f"yarn-{FARTHEST}x"
    asked = {"tasks": ("passkey",), "items": 8}
    asked |= {"lengths": FAR_LENGTHS}
    return [
        Step(f"measure-{FARTHEST}x", f"Ask for keys at up to {FARTHEST} times the context, "
             "untrained: untouched, frozen dynamic NTK, YaRN.",
             "eval", MODEL, {"method": ("dynamic", "yarn"), "factor": FARTHEST} | asked,
             f"measured/{FARTHEST}x", True),
        Step(f"extend-{far}", f"Extend by YaRN to {FARTHEST} times the context.",
             "extend", MODEL, {"method": "yarn", "factor": FARTHEST}, far, True),
        Step(f"tune-{FARTHEST}x", f"Fine-tune it by pose: positions up to {CONTEXT * FARTHEST}, "
             f"rows of {FAR_WINDOW} tokens.",
             "finetune", far,
             TRAIN | {"retrieval_share": 0.4, "steps": FAR_STEPS, "warmup": FAR_WARMUP,
                      "strategy": "pose", "window": FAR_WINDOW, "eval_documents": 0},
             f"tuned-{FARTHEST}x", True),
        Step(f"measure-tuned-{FARTHEST}x", "Ask the tuned one the same questions.",
             "eval", f"tuned-{FARTHEST}x", asked, f"measured/tuned-{FARTHEST}x", True),
    ]  # fmt: skip
