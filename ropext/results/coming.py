"""What an evaluation is going to measure: a gate about anything else is refused at once."""

from collections.abc import Sequence
from dataclasses import dataclass

from ropext.errors import UsageError
from ropext.lengths import length_text
from ropext.options.evaluate import Evaluate
from ropext.results.gates import Gate, split_spec

BASE = "base"  # the label of the short window, which answers no questions


@dataclass(frozen=True)
class Coming:
    """What an evaluation is going to measure, as far as it is known before anything is read."""

    labels: tuple[str, ...]
    lengths: tuple[int, ...]
    has_text: bool
    tasks: tuple[str, ...] = ()
    is_strided: bool = False

    @classmethod
    def of(cls, options: Evaluate, labels: Sequence[str], lengths: Sequence[int]) -> "Coming":
        """Of an evaluation with these options."""
        return cls(
            tuple(labels),
            tuple(lengths),
            has_text=options.data is not None,
            tasks=options.tasks,
            is_strided=options.protocol == "hf-stride",
        )

    def check(self, gates: Sequence[Gate]) -> None:
        """Refuse a gate about what will not be there, before hours of work rather than after."""
        for gate in gates:
            reason = self._missing_model(gate) or self._missing_metric(gate)
            if reason is not None:
                raise UsageError(f"--fail-if {gate.text!r}: {reason}")

    def _missing_model(self, gate: Gate) -> str | None:
        there = ", ".join(self.labels)
        if gate.variant is not None and gate.variant not in self.labels:
            return f"no variant {gate.variant!r}; there are {there}"
        if gate.run is None or gate.run in self.labels or split_spec(gate.run)[0].is_dir():
            return None
        return f"{gate.run} is neither the directory of an evaluation nor a variant ({there})"

    def _missing_metric(self, gate: Gate) -> str | None:
        at, whole = self.metrics(gate.variant, gate.run)
        name, _, length = gate.metric.partition("@")
        if name in at and length:
            if int(length) in self.lengths:
                return None
            there = ", ".join(map(length_text, self.lengths))
            return f"{length_text(int(length))} is none of the lengths that are measured ({there})"
        if gate.metric in whole:
            return None
        there = ", ".join([*(f"{name}@LENGTH" for name in at), *whole])
        return f"no such metric; there are {there or 'none'}"

    def metrics(self, variant: str | None, run: str | None = None) -> tuple[list[str], list[str]]:
        """Names of what is measured at every length, and of what stands for all of them: of a
        variant, or of its differences to another run."""
        at, whole = list[str](), list[str]()
        alone = run is None
        beside_base = BASE in self.labels and variant != BASE
        if self.has_text:
            at += ["tail", "tail_nll", "cumulative"]
            at += ["yarn", "bpb"] if alone else []
            at += ["in_window", "in_window_nll", "gain"] if alone and beside_base else []
            at += ["hf_stride"] if alone and self.is_strided and variant != BASE else []
            whole += ["short_tax"] if beside_base or not alone else []
            whole += ["effective_context"] if alone and beside_base else []
        for task in self.tasks if BASE not in (variant, run) else ():
            at += [task, f"{task}_nll"]
            whole += [f"effective_context.{task}"] if alone else []
        return at, whole
