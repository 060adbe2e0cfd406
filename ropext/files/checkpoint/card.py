"""The model card: the base's README.md with a section about the extension in front.

`push` adds license, parent and numbers to the card's front matter. Every text that comes from a
model or a user is escaped, so it can add neither HTML nor Markdown.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ropext.base.errors import InputError
from ropext.base.inputs import read_bytes
from ropext.base.jsontext import JsonObject
from ropext.base.table import Table, escape, grid, visible
from ropext.families.loaders import LoaderReading, Serving
from ropext.files.checkpoint.provenance import Record
from ropext.files.checkpoint.snapshot import short_name
from ropext.planning import ExtensionPlan

if TYPE_CHECKING:
    from huggingface_hub import EvalResult

README = "README.md"
README_LIMIT = 4 * 10**6  # bytes; a longer base card is left behind
FRONT_LIMIT = 64 * 10**3  # characters of front matter

BEGIN = "<!-- ropext: begin -->"
END = "<!-- ropext: end -->"
BASE_CARD = "<!-- ropext: base card -->"
CLOSING = (
    "Written by ropext; `ropext.json` has the record, `ropext verify` checks it against the files."
)
_FRONT = re.compile(r"\A---[ \t]*\n(.*?)^---[ \t]*(?:\n|\Z)", re.DOTALL | re.MULTILINE)

# Keys of the base's front matter that stay true of the extended model. All others are dropped:
# results measured on the base, the widgets and gates of its page, and any untrusted text.
KNOWN_KEYS = (
    "language",
    "license",
    "license_name",
    "license_link",
    "datasets",
    "metrics",
    "library_name",
    "pipeline_tag",
)
SERVING = "### Serving"
ENGINES = ("engine", "versions", "computes it", "note")  # columns of the table of verdicts
TAGS = ("ropext", "context-extension")


@dataclass(frozen=True)
class Figure:
    """One measured number, as the hub's model-index lists it."""

    dataset: str  # the name that the hub shows
    metric: str  # "perplexity" or "accuracy"
    name: str  # the exact name of the metric
    value: float
    details: JsonObject = field(default_factory=dict)  # n, ci95
    dataset_id: str | None = None  # on the hub

    def result(self) -> "EvalResult":
        """Return a measured number as `push` uploads it in the front matter of README.md, the model
        card: as huggingface_hub's EvalResult. A dataset that is not on the hub gets an identifier
        made of its name."""
        from huggingface_hub import EvalResult

        slug = re.sub(r"[^a-z0-9]+", "-", self.dataset.lower()).strip("-") or "text"
        return EvalResult(
            task_type="text-generation",
            dataset_type=self.dataset_id or slug,
            dataset_name=self.dataset,
            metric_type=self.metric,
            metric_name=self.name,
            metric_value=self.value,
            metric_args=dict(self.details) or None,
        )


@dataclass(frozen=True)
class Card:
    """The content of the card's section as plain strings; the caller need not escape them."""

    title: str  # the heading, used if the base has no card
    base: str  # a hub id or a folder's name, never a path
    base_is_hub_id: bool
    task: str = field(default="", kw_only=True)  # the hub's name for it, "" if not known
    summary: tuple[str, ...]  # one sentence each
    facts: Sequence[tuple[str, object]] = ()  # method, knobs, context, target ...
    readings: Sequence[LoaderReading] = ()
    serving: Sequence[Serving] = ()
    numbers: tuple[Table, ...] = ()
    warnings: tuple[str, ...] = ()


def code_block(text: str, language: str = "") -> str:
    """Return a code block of the model card. Its fence is longer than any run of backticks
    inside."""
    # A comment mark could end the section early when a later run replaces it.
    text = visible(text).strip("\n").replace("<!--", "<! --")
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text}\n{fence}"


def _numbered(tables: Iterable[Table]) -> list[str]:
    """Return the tables of numbers in README.md, the model card next to a checkpoint's weights, as
    Markdown. Each is under its title and its note."""
    parts = []
    for table in tables:
        caption = f"{table.title}. {table.note}." if table.note else table.title
        parts += [f"**{escape(caption)}**", grid(table)]
    return parts


def section(card: Card) -> str:
    """Return the Markdown of the model card's section about the extension, between its begin and
    end marks."""
    parts = [BEGIN, "## Context extension", " ".join(map(escape, card.summary))]
    if card.facts:
        facts = tuple((name, str(value)) for name, value in card.facts)
        parts.append(grid(Table("", "", ("", ""), facts)))
    parts += [f"> **Note:** {escape(warning)}" for warning in card.warnings]
    parts += _numbered(card.numbers)
    if card.readings:
        rows = tuple((r.loader, r.versions, r.verdict, r.flag or r.why) for r in card.readings)
        parts += ["### Which engines compute it", grid(Table("", "", ENGINES, rows))]
    parts += _serving(card.serving)
    parts += [CLOSING, END]
    return "\n\n".join(parts) + "\n"


def _serving(lines: Iterable[Serving]) -> list[str]:
    """Return the model card's commands that serve the model, one code block for each engine that
    has one."""
    parts = list[str]()
    for line in lines:
        if line.command:
            parts += [f"{escape(line.loader)}:", code_block(line.command, "sh")]
    if parts:
        parts.insert(0, SERVING)
    return parts


def with_serving(text: str, lines: Iterable[Serving]) -> str:
    """Return a model card of ropext's in which these serving commands replace the old ones."""
    pattern = re.compile(f"^{SERVING}$.*?^(?=###? |{re.escape(CLOSING)})", re.DOTALL | re.MULTILINE)
    new = "\n\n".join(_serving(lines))
    return pattern.sub(lambda _: f"{new}\n\n", text, count=1) if new else text


def render(card: Card, base: str | None = None) -> str:
    """Return the whole text of the model card, README.md. If the base was itself extended, the new
    section replaces its old one."""
    front, body = split(base) if base is not None else ("", "")
    body = _without_sections(body).strip("\n")
    if not body:
        body = f"# {escape(card.title)}"
    elif BASE_CARD not in body:
        body = (
            f"{BASE_CARD}\n\n*The card of {escape(card.base)}, the model before its extension, "
            f"follows.*\n\n{body}"
        )
    return f"---\n{_front(card, front)}---\n\n{section(card)}\n{body}\n"


def _without_sections(body: str) -> str:
    """Return the text of a model card without the sections that ropext wrote, nor the empty lines
    after each. Each search begins after the last mark, so repeated marks of an untrusted card cost
    linear time."""
    kept = []
    at = 0
    while (begin := body.find(BEGIN, at)) >= 0:
        end = body.find(END, begin)
        if end < 0:
            break
        kept.append(body[at:begin])
        at = end + len(END)
        while body.startswith("\n", at):
            at += 1
    kept.append(body[at:])
    return "".join(kept)


def with_evidence(text: str, sentences: Iterable[str], numbers: Iterable[Table]) -> str:
    """Return a model card of ropext's with measured results at the end of its section. Raise
    InputError if the card has no such section."""
    parts = ["### What was measured"]
    parts += [escape(sentence) for sentence in sentences]
    parts += _numbered(numbers)
    head, closing, tail = text.partition(f"{CLOSING}\n\n{END}")
    if not closing:
        raise InputError("the card has no section of ropext's to put the evidence into")
    return head + "\n\n".join(parts) + "\n\n" + closing + tail


def split(text: str) -> tuple[str, str]:
    """Return a model card as (front matter without its fences, body). Invalid or too long front
    matter stays in the body."""
    text = text.replace("\r\n", "\n")
    fenced = _FRONT.match(text)
    if not fenced or len(fenced[1]) > FRONT_LIMIT:
        return "", text
    return fenced[1], text[fenced.end() :]


def _front(card: Card, front: str) -> str:
    """Return the model card's new front matter: the base's known keys, and the keys that describe
    this model."""
    import yaml  # late: a command that writes no card needs none

    old = _values(front)
    new = {key: value for key, value in old.items() if key in KNOWN_KEYS}
    for key, value in (("library_name", "transformers"), ("pipeline_tag", card.task)):
        if value:
            new.setdefault(key, value)
    if card.base_is_hub_id:
        new["base_model"] = _line(card.base)
    elif "base_model" in old:
        new["base_model"] = old["base_model"]
    tags = old.get("tags", [])
    if isinstance(tags, str):
        tags = [tags]
    tags_once = dict.fromkeys(tags) | dict.fromkeys(TAGS)
    new["tags"] = list(tags_once)
    return yaml.safe_dump(new, sort_keys=False, allow_unicode=True, width=FRONT_LIMIT)


def _values(front: str) -> dict[str, str | list[str]]:
    """Return the texts and lists of texts in a model card's front matter, each text on one line. If
    it is not valid YAML, return nothing."""
    import yaml

    try:
        metadata = yaml.load(front, yaml.BaseLoader)
    except (yaml.YAMLError, RecursionError):
        return {}
    values = dict[str, str | list[str]]()
    for key, value in metadata.items() if isinstance(metadata, dict) else ():
        if isinstance(value, list):
            value = [_line(item) for item in value if isinstance(item, str) and item]
        if isinstance(key, str) and isinstance(value, str | list) and value:
            values[key] = _line(value) if isinstance(value, str) else value
    return values


def _line(text: str) -> str:
    """Return an untrusted text of a model card on one line, without invisible characters."""
    return visible(text).replace("\n", " ")


def write_card(directory: Path, card: Card, base: Path) -> str | None:
    """Write the model card of an output: its section, then the card in the folder of the base, if
    there is one. Return a note if the base's card is left out."""
    readme, note = read_readme(base / README)
    (directory / README).write_bytes(render(card, readme).encode(errors="replace"))
    return note


def read_readme(path: Path) -> tuple[str | None, str | None]:
    """Return (the base's model card or None, a note if ropext has to leave that card out)."""
    if not path.exists():
        return None, None
    try:
        return read_bytes(path, README_LIMIT).decode(), None
    except UnicodeDecodeError:
        return None, f"{path} is not UTF-8 text, so the new card leaves it out"
    except InputError as error:
        return None, f"{error}, so the new card leaves it out"


def card_of(plan: ExtensionPlan, record: Record, title: str) -> Card:
    """Return the model card's section for a plan, and its record with the proof, as plain
    strings."""
    hub_id = record.base.get("hub_id")
    base = short_name(str(record.base.get("name", "")), hub_id)
    entries: list[tuple[str, object]] = [("method", plan.method)]
    for name, value in plan.knobs.items():
        if not isinstance(value, tuple | None):
            entries.append((name, value))
    entries += [("context", plan.context), ("target", plan.target)]
    if plan.sites:
        entries += [
            ("attention factor", f"{plan.main.wanted.attention_factor:.6g}"),
            ("written as", plan.main.params["rope_type"]),
            ("spectrum (SHA-256)", plan.main.wanted.digest()),
        ]
    nearest = tuple(
        f"Not computed as planned by {', '.join(who)}. The nearest exact setting there: {options}."
        for options, who in plan.nearest_by_options().items()
    )
    return Card(
        title=title,
        base=base,
        base_is_hub_id=bool(hub_id),
        task=plan.task,
        summary=(
            f"{plan.grown.format(base)} from {plan.context:,} to {plan.target:,} tokens by "
            f"{plan.method} (factor {plan.factor:g}).",
            plan.weights,
            _proved(record.proof),
        ),
        facts=entries,
        readings=plan.readings,
        serving=plan.serving(title),
        warnings=(*plan.notes, *plan.warnings, *nearest),
    )


def _proved(proof: JsonObject | None) -> str:
    """Return the model card's sentence about the verification with transformers."""
    if not proof:
        return "It was not verified with transformers (--no-verify)."
    if "rotary_modules" in proof:
        return (
            f"transformers {proof['transformers']} built the model from it without its weights: "
            f"{proof['rotary_modules']} rotary and {proof['attention_modules']} attention modules "
            f"and {proof['tensors_compared']} tensors were as planned; {proof['forward']}."
        )
    same = ""
    if proof.get("rows_bit_exact"):  # `save` compares no rows: it writes weights from memory
        same = (
            f"{proof['tensors_unchanged']} of the rewritten file equal the base's byte for byte, "
            f"{proof['rows_bit_exact']} old rows bit for bit; "
        )
    return (
        f"transformers {proof['transformers']} loads it: {proof['tensors_compared']} tensors with "
        f"the shapes of {proof['model_class']}, {same}{proof['forward']}."
    )
