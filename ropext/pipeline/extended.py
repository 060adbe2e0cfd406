"""Give the caller of `extend` its result, new or read from the output."""

from dataclasses import dataclass
from pathlib import Path

from ropext.base import guard
from ropext.base.errors import InputError
from ropext.base.jsontext import Json
from ropext.base.table import Number, Table, with_rows
from ropext.families.loaders import Serving
from ropext.files.checkpoint.provenance import Record
from ropext.files.checkpoint.writing import Written
from ropext.files.inspecting import open_model, read_unchanged
from ropext.pipeline.extending import extension_json
from ropext.planning import ExtensionPlan
from ropext.results.report import text
from ropext.results.report.result import Result

EDITED = ("file", "key", "before", "after")


@dataclass(frozen=True, repr=False, eq=False)
class Extended(Result):
    """The output of `extend`, and the commands that serve it."""

    of_the_call = ("notes", "left", "proof", "serving")  # a GGUF keeps no proof

    written: Written
    serving: tuple[Serving, ...]
    planned: ExtensionPlan | None  # None if the output was opened

    @property
    def output(self) -> Path:
        """Return the path of the extended output."""
        return self.written.output

    @property
    def plan(self) -> ExtensionPlan:
        """Return the plan of the extension. Raise InputError if the output was opened."""
        if self.planned is None:
            raise InputError(
                f"{self.output} was opened and has no plan; .written.record has the recorded "
                "one, and ropext.plan makes a new one"
            )
        return self.planned

    @property
    def title(self) -> str:
        """Return the output's path, its original and its extended context."""
        record = self.written.record
        far = f"{record.context:,} -> {record.target:,} tokens by {record.method}"
        return f"<Extended in {self.output}: {far}>"

    @property
    def tables(self) -> list[Table]:
        """Return the table of edited keys."""
        rows = list[tuple[str, ...]]()
        for edit in self.written.record.edits:
            rows.append((edit.file, edit.key, _cell(edit.before), _cell(edit.after)))
        return with_rows([Table("What was edited", "", EDITED, tuple(rows))])

    def to_json(self) -> dict[str, Json]:
        """Return what `ropext extend --json` prints."""
        return extension_json(self.written, self.serving)

    def _same_documents(self) -> None:
        """Return nothing: no document was read."""


def _cell(item: Json) -> str:
    """Return a value of a config as a table cell; a number stays a number."""
    if isinstance(item, int | float) and not isinstance(item, bool):
        return Number(text.config_value_text(item), item)
    return text.config_value_text(item)


def opened_extension(output: Path, record: Record) -> Extended:
    """Read the extension from the record of an output."""
    served = read_unchanged(open_model(output))
    files = [output.name]
    beside = output.with_name(f"{output.name}.Modelfile")
    if output.is_dir():
        files = sorted(guard.files_in(output) or ())
    elif beside.is_file():
        files.append(beside.name)
    written = Written(output, record, (), {}, record.proof, tuple(files))
    return Extended(written, served.serving if served else (), None)
