"""What is known of an evaluation beside its readings, as results.json keeps it: how it was made,
where each model came from, and the numbers of each."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ropext.jsontext import Json, JsonObject, values_json
from ropext.results.perplexity import OctaveLoss
from ropext.results.retrieval import RULERS, HeatCell
from ropext.results.values import Value, values_of

# Of a variant in results.json, what does not belong to how it was extended.
_NOT_INFO = {
    "kind",
    "model",
    "target",
    "adapter",
    "store",
    "passes",
    "against",
    "unrounded",
    "metrics",
    "positions",
    "retrieval",
    "overlap",
    "outcomes",
    "reached",
    "verdicts",
}


@dataclass(frozen=True)
class RulerTasks:
    """The tasks of RULER whose mean is `ruler@C`, and those that some lengths alone were asked."""

    tasks: tuple[str, ...]
    left_out: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Json]:
        return {"tasks": list(self.tasks), "left_out": list(self.left_out), "note": RULERS}

    @staticmethod
    def from_json(data: JsonObject) -> "RulerTasks":
        return RulerTasks(tuple(data["tasks"]), tuple(data["left_out"]))


@dataclass(frozen=True)
class EvaluationFacts:
    """How an evaluation was made, and what must be said of all its numbers."""

    protocol: str = "ropext"
    protocol_text: str = ""
    headline: str = "tail"  # the metric that the protocol is about
    short_window: int | None = None  # the version of its definition
    documents: JsonObject | None = None  # how many were used, and how many left out
    warnings: tuple[str, ...] = ()
    not_measurable: Mapping[str, str] = field(default_factory=dict)  # task -> why
    ruler: RulerTasks | None = None
    lm_eval: Mapping[str, JsonObject] | None = None  # scores of lm-evaluation-harness
    endpoint: JsonObject | None = None  # of a running server


@dataclass(frozen=True)
class ModelSource:
    """Where a model came from, how it was extended, and where its readings are kept."""

    name: str = ""
    target: int | None = None
    adapter: str | None = None
    info: JsonObject = field(default_factory=dict)  # method, factor, frequencies, knobs
    store: str = ""  # a folder under variants/; "" if nothing was kept
    passes: Mapping[str, int] = field(default_factory=dict)  # tokens of a pass, by its folder
    against: str = ""  # of a model whose next token was held against the base's: of which one

    @property
    def method(self) -> str | None:
        """The method by which it was extended in this evaluation."""
        return self.info.get("method")

    @property
    def factor(self) -> float | None:
        return self.info.get("factor")

    @property
    def inv_freq(self) -> tuple[float, ...]:
        """The frequencies that it reads by; empty where they are not known."""
        return tuple(self.info.get("inv_freq") or ())

    def to_json(self) -> dict[str, Json]:
        written: dict[str, Json] = {
            "model": self.name,
            "target": self.target,
            "adapter": self.adapter,
        }
        written |= self.info
        written["store"] = self.store
        written["passes"] = dict(self.passes)
        if self.against:
            written["against"] = self.against
        return written

    @staticmethod
    def from_json(data: JsonObject) -> "ModelSource":
        info = {key: value for key, value in data.items() if key not in _NOT_INFO}
        return ModelSource(
            name=data["model"],
            target=data["target"],
            adapter=data["adapter"],
            info=info,
            store=data["store"],
            passes=data["passes"],
            against=data.get("against", ""),
        )


@dataclass(frozen=True)
class ModelNumbers:
    """The numbers of one model, and what they say in words."""

    metrics: Mapping[str, Value] = field(default_factory=dict)
    positions: tuple[OctaveLoss, ...] = ()
    retrieval: Mapping[str, tuple[HeatCell, ...]] = field(default_factory=dict)  # by task
    verdicts: tuple[str, ...] = ()
    served: JsonObject | None = None  # of a running server: outcomes, and how far it reads

    def to_json(self) -> dict[str, Json]:
        """Write all but the verdicts, which come last."""
        return {
            "metrics": values_json(self.metrics),
            "positions": values_json(self.positions),
            "retrieval": values_json(self.retrieval),
        }

    @staticmethod
    def from_json(data: JsonObject) -> "ModelNumbers":
        retrieval = dict[str, tuple[HeatCell, ...]]()
        for task, cells in data["retrieval"].items():
            retrieval[task] = tuple(map(HeatCell.from_json, cells))
        served = None
        if "outcomes" in data:
            served = {"outcomes": data["outcomes"], "reached": data["reached"]}
        return ModelNumbers(
            values_of(data["metrics"]),
            tuple(map(OctaveLoss.from_json, data["positions"])),
            retrieval,
            tuple(data.get("verdicts", ())),
            served,
        )
