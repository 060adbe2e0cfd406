"""Define the results of public functions: a table in a terminal and in a notebook, its rows as
dicts, and the losses and answers behind it."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from html import escape
from typing import ClassVar

import numpy as np

from ropext.base.errors import UsageError, listed
from ropext.base.jsontext import Json, values_json
from ropext.base.table import BLANK, Number, Record, Table, as_text, records
from ropext.results.measurement import Measurement
from ropext.results.perplexity import OctaveLoss, loss_by_position
from ropext.results.report.html import table_html
from ropext.results.values import Floats, Value

POSITIONS = ("model", "start", "stop", "loss", "gain")


class Result(ABC):
    """The result of a public function, with its tables. Two results are equal if their JSON is
    equal without the keys that describe one call (`of_the_call`)."""

    of_the_call: ClassVar[tuple[str, ...]] = ()  # keys of the JSON that no folder keeps
    lists: ClassVar[tuple[str, ...]] = ()  # of its kind alone, which a refusal names

    @property
    @abstractmethod
    def title(self) -> str:
        """Return the first line of Python's result, above its tables, in a terminal or notebook."""

    @property
    @abstractmethod
    def tables(self) -> list[Table]:
        """Return the tables that report a result, the main table first. Its command prints them
        too."""

    @property
    def tidy(self) -> list[Table]:
        """Return the tables of a result for programs."""
        return self.tables

    @abstractmethod
    def to_json(self) -> dict[str, Json]:
        """Return the JSON behind the tables of Python's result, without the gates of --fail-if. The
        command prints it with `--json`."""

    @abstractmethod
    def _same_documents(self) -> Measurement | None:
        """Return the measured models behind a result's tables, on the documents that all of them
        read. Return None if they read none."""

    def _asked(self) -> Iterable[Measurement]:
        """Return the measurements behind a result's tables, to list the answers and retrieval
        scores that their models may have."""
        measured = self._same_documents()
        return () if measured is None else (measured,)

    def table(self) -> list[Record]:
        """Return the rows of a result's main table: numbers as such, the ends of their intervals
        under names that end in `low` and `high`."""
        tables = self.tidy
        return records(tables[0]) if tables else []

    def losses(self) -> dict[str, Floats]:
        """Return the token losses behind a result's perplexities by model, in nats. Each document
        is a row, each position a column, NaN if it is not scored."""
        losses = dict[str, Floats]()
        measured = self._read("losses of tokens")
        longest = measured.frame.longest
        for label, reading in measured.readings.items():
            documents = reading.tokens(0, longest)
            matrix = np.full((len(documents), longest), np.nan)
            for row, document in enumerate(documents):
                matrix[row, 1 : len(document) + 1] = document  # nothing precedes the first token
            losses[label] = matrix
        return losses

    def positions(self) -> list[Record]:
        """Return the rows of a table of measured losses: each model's loss at positions [start,
        stop), and its gain over the base, in nats per token."""
        rows = list[tuple[str, ...]]()
        measured = self._read("losses by position")
        for label in measured.readings:
            for octave in _octave_losses(measured, label):
                start = Number(str(octave.start), octave.start)
                stop = Number(str(octave.stop), octave.stop)
                rows.append((label, start, stop, _loss_cell(octave.nll), _loss_cell(octave.gain)))
        return records(Table("", "", POSITIONS, tuple(rows)))

    def answers(self) -> list[dict[str, Json]]:
        """Return each measured answer from which a table's retrieval scores are computed: its
        model, task, length and depth."""
        answers = list[dict[str, Json]]()
        for measured in self._asked():
            for label, model in measured.models.items():
                for item in model.items:
                    answers.append({"model": label} | values_json(item))
        if not answers:
            raise self._lacks("answers")
        return answers

    def _read(self, what: str) -> Measurement:
        """Return the measurement whose losses a result reports, on the documents that all models
        read. Raise UsageError if there are none."""
        measured = self._same_documents()
        if measured is None or not measured.readings:
            raise self._lacks(what)
        return measured

    def _lacks(self, what: str) -> UsageError:
        """Return the error for a result that lacks the wanted numbers. It names the methods that
        the result has instead."""
        measured = self._same_documents()
        has = list[str]()
        if self.tidy:
            has.append(".table()")
        if measured is not None and measured.readings:
            has += [".losses()", ".positions()"]
        if any(model.items for asked in self._asked() for model in asked.models.values()):
            has.append(".answers()")
        has += [*self.lists, ".to_json()"]
        return UsageError(f"{self.title} has no {what}; it has {listed(has)}")

    def __eq__(self, other: object) -> bool:
        """Return whether two of Python's results have one class and the same JSON behind their
        tables. Leave out the keys that describe one call."""
        return type(other) is type(self) and self._lasting() == other._lasting()

    __hash__ = None  # type: ignore[assignment]

    def _lasting(self) -> dict[str, Json]:
        """Return the metrics and other JSON of a result that stay if it is opened again."""
        content = self.to_json()
        return {key: value for key, value in content.items() if key not in self.of_the_call}

    def __repr__(self) -> str:
        """Lay out a result's title and tables as text, as Python shows it."""
        return f"{self.title}\n\n{as_text(self.tables)}".rstrip()

    def _repr_html_(self) -> str:
        """Lay out a result's title and tables as HTML, as a notebook shows it."""
        parts = [f"<p>{escape(self.title)}</p>"]
        for table in self.tables:
            parts.append(table_html(table))
        return "".join(parts)


def _octave_losses(measured: Measurement, label: str) -> Sequence[OctaveLoss]:
    """Return the losses of a model by position, from results.json or else from its token losses."""
    numbers = measured.models[label].numbers
    if numbers is not None:
        return numbers.positions
    return loss_by_position(measured.frame, measured.readings[label], measured.base(label))


def _loss_cell(value: Value | None) -> str:
    """Return a loss as a cell of a result's table."""
    if value is None:
        return BLANK
    return Number(str(value.value), value.value, value.ci95)
