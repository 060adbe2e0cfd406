"""Models side by side on the same tokens and questions: `ropext compare`, and the end of a grid."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ropext.report import evaluated, measured
from ropext.results import comparison
from ropext.results.comparison import Comparison, Contender
from ropext.results.rundir import Run
from ropext.results.values import Value


@dataclass(frozen=True)
class Compared:
    """Paired differences; None or empty where fewer than two have a reading or answers."""

    contenders: Mapping[str, Contender]
    text: Comparison | None
    items: Mapping[str, Mapping[str, Value]]  # of answers, against `asked`
    asked: str  # the first that was asked any question; the base is asked none

    @property
    def tables(self) -> list[measured.Table]:
        """What is printed, and stands in the reports."""
        tables = measured.comparison_tables(self.text) if self.text else []
        answered = {label: own for label, own in self.items.items() if own}
        retrieval = measured.item_table(answered, self.asked)
        return tables + ([retrieval] if retrieval else [])

    def to_json(self) -> dict[str, Any]:
        return {
            "text": comparison.to_json(self.text) if self.text else None,
            "retrieval": {
                label: {name: value.to_json() for name, value in own.items()}
                for label, own in self.items.items()
            },
        }

    def write(
        self, folder: Path, runs: Mapping[str, Run], spectra: Mapping[str, Sequence[float]]
    ) -> None:
        """report.md, report.html and the pictures; `runs` are those compared, as they are named."""
        keys = "\n".join(f"{name}: run key {run.key}" for name, run in runs.items())
        evaluated.write_comparison(folder, self.text, self.tables, self.contenders, spectra, keys)


def compare(contenders: Mapping[str, Contender]) -> Compared:
    """The first is the reference; of the questions the first that was asked any."""
    readers = [own for own in contenders.values() if own.reading is not None]
    text = comparison.compare_text(readers) if len(readers) > 1 else None
    asked = [own for own in contenders.values() if own.items]
    items = {
        own.label: comparison.item_differences(own.items, asked[0].items, asked[0].frame.bootstrap)
        for own in asked[1:]
    }
    return Compared(contenders, text, items, asked[0].label if asked else "")
