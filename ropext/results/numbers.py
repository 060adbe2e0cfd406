"""Hold the facts of an evaluation besides its readings, as results.json keeps them: how it was
made, the source of each model, and the numbers of each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ropext.base.jsontext import HIDDEN, IF_ANY, OR_NULL, Json, JsonObject, fields_of
from ropext.results.perplexity import OctaveLoss
from ropext.results.retrieval import RULERS, HeatCell
from ropext.results.values import Value


@dataclass(frozen=True)
class RulerTasks:
    """The tasks of RULER whose mean is `ruler@C`, and the tasks that were measured only at some
    lengths."""

    tasks: tuple[str, ...]
    left_out: tuple[str, ...] = ()
    note: str = RULERS


@dataclass(frozen=True)
class EvaluationFacts:
    """How an evaluation was made, and the warnings about all its numbers."""

    protocol: str = "ropext"
    protocol_text: str = ""
    headline: str = "tail"  # the metric that the protocol is about
    short_window: int | None = None  # the version of its definition
    # How many were used, and how many left out.
    documents: JsonObject | None = field(default=None, metadata=OR_NULL)
    warnings: tuple[str, ...] = ()
    # Task -> why.
    not_measurable: Mapping[str, str] = field(default_factory=dict, metadata=IF_ANY)
    ruler: RulerTasks | None = None
    lm_eval: Mapping[str, JsonObject] | None = None  # scores of lm-evaluation-harness
    endpoint: JsonObject | None = None  # if a running server answered


@dataclass(frozen=True)
class ModelSource:
    """The source of a model, how it was extended, and the name of its store."""

    model: str = ""
    renamed: str = field(default="", metadata=IF_ANY)  # its own name, if its label is the user's
    target: int | None = field(default=None, metadata=OR_NULL)
    adapter: str | None = field(default=None, metadata=OR_NULL)
    # Method, factor, frequencies, knobs: written next to the other fields.
    info: JsonObject = field(default_factory=dict, metadata=HIDDEN)
    store: str = ""  # a folder under variants/; "" if nothing was kept
    passes: Mapping[str, int] = field(default_factory=dict)  # tokens of a pass, by its folder
    # If the next token was compared with a base's: the label of that base.
    against: str = field(default="", metadata=IF_ANY)

    @property
    def method(self) -> str | None:
        """Return the method that extended a measured model, from results.json."""
        return self.info.get("method")

    @property
    def factor(self) -> float | None:
        """Return the factor by which a measured model was extended, from results.json."""
        return self.info.get("factor")

    @property
    def inv_freq(self) -> tuple[float, ...]:
        """Return a measured model's inverse frequencies from results.json; empty if not known."""
        return tuple(self.info.get("inv_freq") or ())

    def to_json(self) -> dict[str, Json]:
        """Return the JSON that results.json keeps about the source of a measured model."""
        return {**fields_of(self), **self.info}


@dataclass(frozen=True)
class ModelNumbers:
    """The numbers of one model, and their meaning in words."""

    metrics: Mapping[str, Value] = field(default_factory=dict)
    positions: tuple[OctaveLoss, ...] = ()
    retrieval: Mapping[str, tuple[HeatCell, ...]] = field(default_factory=dict)  # by task
    # What became of a server's questions at each length, and how far it reads.
    outcomes: Sequence[JsonObject] | None = None
    reached: JsonObject | None = None
    verdicts: tuple[str, ...] = ()
