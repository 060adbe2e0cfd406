"""What a demo found, by model, and whether each target was reached. Nothing here computes a model.

The words are those of the evaluation: `tail_nll@C` is the loss over the last tokens before C, in
nats a token; `in_window_nll@C` is what the base reads on the same tokens through its short window.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ropext.demo import steps
from ropext.demo.running import Done
from ropext.demo.steps import CONTEXT, FACTOR, TASKS, WIDER
from ropext.results import rundir
from ropext.results.comparison import Contender
from ropext.results.retrieval import share_of
from ropext.results.values import Value

BASE, UNTOUCHED, EXTENDED = "base", "untouched", f"yarn-{FACTOR}x"
FITTED, CONTROL, TUNED = f"fitted-{FACTOR}x", "control", f"tuned-{FACTOR}x"
TUNED_WIDER = f"tuned-{WIDER}x"
TARGET, WIDER_TARGET = CONTEXT * FACTOR, CONTEXT * WIDER


@dataclass(frozen=True)
class Model:
    """One model that was read: its numbers by name, and where they came from."""

    metrics: Mapping[str, Value]
    contender: Contender | None = None  # the control was read inside its fine-tuning
    inv_freq: tuple[float, ...] | None = None

    def value(self, name: str) -> float:
        return self.metrics[name].value

    def retrieval(self, length: int) -> Value | None:
        """The questions of all tasks at one length, together; None where none was asked."""
        if self.contender is None:
            return None
        own = [item for item in self.contender.items if item.length == length]
        return share_of(own) if own else None


def models(found: Mapping[str, Done], folder: Path) -> dict[str, Model]:
    """Every model that the finished steps have measured, in the order of the tables."""
    read = dict[str, Model]()
    for name, label in (
        ("measure-methods", None),
        ("measure-fitted", FITTED),
        ("measure-tuned", TUNED),
        (f"measure-{WIDER}x", TUNED_WIDER),
    ):
        if name in found:
            read |= _of_run(rundir.read_run(folder / str(found[name].step.output)), label)
        if name == "measure-fitted" and "tune" in found:
            numbers = found["tune"].result["numbers"][CONTROL]
            read[CONTROL] = Model({key: Value.from_json(v) for key, v in numbers.items()})
    return read


def _of_run(run: rundir.Run, label: str | None) -> dict[str, Model]:
    """All variants under their own labels, or with `label` the one that is not the base."""
    read = {}
    for own, variant in run.results["variants"].items():
        if label is not None and variant["kind"] == "base":
            continue
        metrics = {key: Value.from_json(data) for key, data in variant["metrics"].items()}
        inv_freq = variant.get("inv_freq")
        read[label or own] = Model(
            metrics, run.contenders[own], tuple(inv_freq) if inv_freq else None
        )
    return read


@dataclass(frozen=True)
class Target:
    """Something that was to be reached, with what was found."""

    what: str
    found: float
    bound: float
    reached: bool
    sentence: str

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))


def _at_most(what: str, found: float, bound: float, of: str, digits: int = 4) -> Target:
    reached = found <= bound
    said = f"{found:,.{digits}f} against at most {bound:,.{digits}f} ({of})"
    return Target(what, found, bound, reached, _worded(what, said, reached))


def _at_least(what: str, found: float, bound: float, of: str) -> Target:
    reached = found >= bound
    said = f"{found:.3f} against at least {bound:.3f} ({of})"
    return Target(what, found, bound, reached, _worded(what, said, reached))


def _worded(what: str, said: str, reached: bool) -> str:
    return f"{'Reached' if reached else 'MISSED'}: {what}: {said}."


def targets(read: Mapping[str, Model], spent: int) -> list[Target]:
    """All that the steps done allow to be judged; `spent` counts forward-token equivalents."""
    chosen = []
    if FITTED in read:
        chosen.append(_of_fitted(read[FITTED]))
    if TUNED in read:
        chosen += _of_tuned(read)
    if TUNED_WIDER in read:
        chosen += _of_wider(read)
    budget = steps.MOST if TUNED in read else steps.MOST_UNTUNED
    of = "the budget in forward-token equivalents"
    return [*chosen, _at_most("cost of this demo", spent, budget, of, digits=0)]


def _of_fitted(fitted: Model) -> Target:
    in_window = fitted.value(f"in_window_nll@{TARGET}")
    return _at_most(
        f"loss at {TARGET} with the fitted spectrum alone",
        fitted.value(f"tail_nll@{TARGET}"),
        1.01 * in_window,
        f"1 % above the base's in-window value of {in_window:.4f} nats",
    )


def _of_tuned(read: Mapping[str, Model]) -> list[Target]:
    tuned = read[TUNED]
    tail = tuned.value(f"tail_nll@{TARGET}")
    asked, own = tuned.retrieval(TARGET), read[UNTOUCHED].retrieval(CONTEXT)
    assert asked is not None
    assert own is not None
    return [
        _at_most(
            f"loss at {TARGET} after the fine-tuning",
            tail,
            tuned.value(f"in_window_nll@{TARGET}"),
            "the base's in-window value on the same tokens, in nats",
        ),
        _at_most(
            f"loss at {TARGET} after the fine-tuning",
            tail,
            read[CONTROL].value(f"tail_nll@{TARGET}"),
            "the control's in-window value on the same tokens, in nats",
        ),
        _at_least(
            f"retrieval at {TARGET} after the fine-tuning",
            asked.value,
            0.95 * own.value,
            f"95 % of the base's {own.value:.3f} at {CONTEXT}; {' and '.join(TASKS)} together",
        ),
    ]


def _of_wider(read: Mapping[str, Model]) -> list[Target]:
    wider = read[TUNED_WIDER]
    tail, in_window = (
        math.exp(wider.value(f"{name}@{WIDER_TARGET}")) for name in ("tail_nll", "in_window_nll")
    )
    asked, own = wider.retrieval(WIDER_TARGET), read[UNTOUCHED].retrieval(CONTEXT)
    assert asked is not None
    assert own is not None
    return [
        _at_most(
            f"perplexity at {WIDER_TARGET}, {WIDER} times the context, tuned",
            tail,
            1.05 * in_window,
            f"5 % above the base's in-window {in_window:.3f} on the same tokens",
            digits=3,
        ),
        _at_least(
            f"retrieval at {WIDER_TARGET}, tuned",
            asked.value,
            0.90 * own.value,
            f"90 % of the base's {own.value:.3f} at {CONTEXT}; {' and '.join(TASKS)} together",
        ),
    ]
