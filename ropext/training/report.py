"""Describe any training in words: its settings, its rows, and its section of the record."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ropext.base.jsontext import Json, JsonObject, values_json
from ropext.base.table import Table, columns
from ropext.files.checkpoint.provenance import TRAINED_ON
from ropext.results.report.text import bytes_text
from ropext.training.data import Training
from ropext.training.objective import TrainingObjective
from ropext.training.result import Finetuned, Fitted
from ropext.training.rows import TrainingRows

# From here on repeated text teaches less and less (Muennighoff et al. 2023, figure 1).
MANY_PASSES = 8


@dataclass(frozen=True)
class TrainingSummary:
    """The texts and numbers of a training, for the record and the cards."""

    section: JsonObject  # of ropext.json, under "finetune" or "fit"
    summary: tuple[str, ...]
    numbers: tuple[Table, ...]
    trained_on: JsonObject  # of ropext.json, and next to the adapter

    def sections(self, name: str) -> dict[str, Json]:
        """Return the sections of ropext.json on a training."""
        return {name: dict(self.section), TRAINED_ON: dict(self.trained_on)}


def dry_run_text(objective: TrainingObjective[Any]) -> str:
    """Return the report of a planned fine-tuning or fit, for --dry-run: each setting with its
    source, then the needs."""
    settings = objective.settings
    counts = objective.needs
    part = objective.part
    rows = objective.rows
    settings_rows = list[tuple[str, str, str]]()
    for name, setting in settings.named.items():
        settings_rows.append((name.replace("_", " "), _setting_text(setting.value), setting.source))
    most = "at most " if settings.is_open else ""
    lines = [
        f"trained: {part.moving:,} parameters in {', '.join(part.targets)}",
        f"documents: {len(rows.documents)} to train on, {objective.judging_count} to judge by, "
        f"{rows.too_short} too short",
        passes_text(rows, most),
    ]
    lines += short_windows_text(objective)
    lines += [
        f"tokens: {most}{objective.tokens:,} with gradients, {objective.forward_tokens:,} without "
        f"(evaluations, one every {settings.between} steps)",
        f"bytes: {bytes_text(counts.weight_bytes)} of weights, {bytes_text(part.moving_bytes)} "
        "of trained parameters with gradients and AdamW's two moments",
    ]
    if counts.recompute:
        lines.append("layers are run again in the backward pass")
    if counts.sliced:
        lines.append(f"the loss needs whole logits: {counts.sliced}")
    if lineage := objective.lineage(objective.overlap_before):
        lines.append(f"warning: [seen] {lineage}")
    lines += [f"note: {remark}" for remark in objective.remarks]
    title = f"{objective.snapshot.name}: {objective.title}"
    text = "\n".join(lines)
    return f"{title}\n\n{columns((), settings_rows)}\n\n{text}"


def _setting_text(value: object) -> str:
    """Write the value of a training setting."""
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, tuple | list):
        return "/".join(map(str, value))
    return str(value)


def write_files(folder: Path, contents: Mapping[str, bytes]) -> None:
    """Write the files of a training below a folder of OUT, by their relative paths."""
    for name, content in contents.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def json_files(contents: JsonObject) -> dict[str, bytes]:
    """Return the JSON files of a training's result, by their names, as bytes."""
    files = dict[str, bytes]()
    for name, content in contents.items():
        text = json.dumps(content, indent=1)
        files[name] = f"{text}\n".encode()
    return files


def record_section(
    done: Finetuned | Fitted, options: Iterable[str], facts: Iterable[str]
) -> dict[str, Json]:
    """Return the section of ropext.json on a fine-tuning or a fit, with some options, and facts
    of the result."""
    training = done.training
    record = done.to_json()
    section: dict[str, Json] = {
        "settings": record[done.counted_as]["settings"],
        "overlap": values_json(training.overlap),
        "numbers": record["numbers"],
    }
    for name in facts:
        section[name] = values_json(getattr(done, name))
    for name in options:
        section[name] = getattr(training.options, name)
    return section


def trained_to_retrieve_text(share: float) -> str:
    """Return a fine-tuning's sentence that its training rows hold retrieval questions. Readers of
    the retrieval scores must know that."""
    return (
        f"{share:.0%} of the training rows are retrieval questions worded like the task mkey, so "
        "its scores are those of a trained task."
    )


def short_windows_text(training: Training) -> list[str]:
    """Return the sentence on training windows of the original length (--keep-short), if there
    are any."""
    if not training.options.keep_short:
        return []
    return [
        f"Each step also reads {training.options.keep_short} windows of {training.context} tokens."
    ]


def passes_text(rows: TrainingRows, most: str = "") -> str:
    """Return the sentence on how many rows a training reads, and how often the same text."""
    text = f"rows: {most}{len(rows):,}, and the documents hold {rows.per_pass:,}"
    if rows.passes_over_data <= 1:
        return text
    text += f": {most}{rows.passes_over_data:,.1f} passes"
    if most:  # the end says how often it was really read, because held-out documents decide that
        return text
    return text + repeated_text_warning(rows.passes_over_data)


def repeated_text_warning(passes: float) -> str:
    """Return the warning that a training reads the same text often, or "" if it does not."""
    if passes < MANY_PASSES:
        return ""
    return (
        f" (warning: [passes] after {MANY_PASSES} passes the same text teaches less and less; "
        "more documents are better)"
    )
