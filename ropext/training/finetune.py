"""A fine-tuning before its session: the checkpoint it starts from, its preparation, its plan."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

from ropext import bundled, corpus, families
from ropext.checkpoint import Snapshot, open_snapshot
from ropext.checkpoint.provenance import (
    READ_FROM,
    Record,
    digest,
    growth_of,
    read_record,
    record_of_config,
    scaled_by_config,
    weights_digest,
)
from ropext.checkpoint.weights import read_header
from ropext.corpus.splitting import NO_LIMIT, REMEDY
from ropext.errors import InputError, UnsupportedModel, UsageError
from ropext.evaluation.loading import is_masked, skeleton
from ropext.evaluation.preparing import masking_of
from ropext.evaluation.reading import Masking
from ropext.families import Model
from ropext.families.config import named, text_part
from ropext.options.fields import flag
from ropext.options.training import Finetune
from ropext.results.overlap import kept_out_of
from ropext.scaling.tables import Growth
from ropext.training import data, defaults, models, sharing
from ropext.training.data import LARGEST_SHARE
from ropext.training.judge import Judge, judge_of
from ropext.training.rows import Full, KeyRows, Pose, Rows, glue, rows_in
from ropext.training.run import COPIES, Planned, PreparedTraining, counted, encoder_of

# Options that decide the numbers, beside the settings.
DECIDING = (
    "train", "strategy", "packing", "dropout", "targets", "train_norms", "train_embeddings",
    "qlora", "retrieval_share", "keep_short", "seed", "dtype", "attn_implementation",
    "eval_every", "eval_documents", "patience",
)  # fmt: skip


STOPS = "stops when held-out documents no longer improve"
NEW_ROWS = " new rows of "  # among what is trained
OF_A_LORA = (
    *("rank", "alpha", "dropout", "targets"),
    *("train_norms", "train_embeddings", "qlora"),
)


@dataclass(frozen=True)
class Origin:
    """The checkpoint that is trained: extended by ropext and saved, with its record."""

    snapshot: Snapshot
    record: Record
    model: Model | None  # its position scheme; None where that is ...
    table: Growth | None = None  # ... a learned table, and what became of that
    is_masked: bool = False  # it fills in masked tokens

    @property
    def context(self) -> int:
        return self.record.context

    @property
    def target(self) -> int:
        return self.record.target

    @property
    def two_sets_up_to(self) -> int:
        """Positions up to which a longrope with two sets of factors reads the short one; 0 = no
        such thing."""
        ropes = [site.rope for site in self.model.scaled_sites] if self.model else []
        return max((r.original_context for r in ropes if r.short_pair_factors), default=0)

    @property
    def told(self) -> str:
        """How it came to its length."""
        if self.record.more.get(READ_FROM) and self.model:
            return scaled_by_config(self.model)
        return f"extended from {self.context} to {self.target} tokens"

    def base_config(self) -> dict[str, Any]:
        """The config before the extension, as recorded."""
        return dict(self.record.base["config"])

    @property
    def path(self) -> tuple[str, ...]:
        """Where the text part stands inside the config."""
        found = self.model or (self.table and self.table.positions)
        return found.path if found else ()

    def trains(self, options: Finetune) -> str:
        """What is trained; refused where this model has no such thing, or an option is for another
        kind."""
        if self.table is None:
            if options.train not in (None, "lora"):
                raise UsageError(
                    f"--train {options.train} is for a learned table of positions, and "
                    f"{self.snapshot.name} rotates; leave it out"
                )
            return "lora"
        asked = {"--strategy pose": options.strategy == "pose"}
        asked["--retrieval-share"] = options.retrieval_share > 0
        for name in [own for own, given in asked.items() if given and self.is_masked]:
            raise UsageError(f"{name} is for models that predict the next token; leave it out")
        kind = options.train or "new-rows"
        if kind != "lora" and options.control:
            raise UsageError("--control trains the base, which has no new rows; add --train lora")
        given = [name for name in OF_A_LORA if getattr(options, name)]
        if kind == "new-rows" and given:
            raise UsageError(
                f"{flag(given[0])} goes with a LoRA; add --train both, or --train lora"
            )
        return kind


def asked_text(share: float) -> list[str]:
    """What must be known to read a retrieval score of a model that was trained to retrieve."""
    if not share:
        return []
    return [
        f"Of the rows {share:.0%} state keys and ask for them, in the wording of the task mkey: "
        "its retrieval scores are those of a trained task."
    ]


def _never_extended(snapshot: Snapshot) -> str:
    """Why a directory without a record is not trained; a scaled one is not to be extended twice."""
    rotates = families.read_positions(snapshot.config) is None
    if rotates and any(
        site.rope.is_scaled for site in families.as_read(snapshot.config).scaled_sites
    ):
        return (
            f"{snapshot.name} is scaled by its config, which leaves open from how many tokens, and "
            "has no record (ropext.json) of it; finetune what `ropext extend` or ropext.save wrote"
        )
    return (
        f"{snapshot.name} was not extended by ropext (it has no ropext.json, and its config names "
        f"no scaling), and training it would not make it so; run: ropext extend {snapshot.name} "
        "--factor 4 -o EXTENDED, then finetune EXTENDED"
    )


def open_origin(model: str) -> Origin:
    """Read the extended checkpoint; one that was never extended is refused."""
    if bundled.find_gguf(model) is not None:
        raise UsageError(
            f"finetune {model}: a GGUF file takes no gradients and holds no adapter; "
            "fine-tune the Hugging Face checkpoint, convert OUT, then run `ropext extend OUT.gguf "
            "--like OUT`"
        )
    snapshot = open_snapshot(model, weights=True)
    scheme = families.read_positions(snapshot.config)
    rotary = families.read(snapshot.config) if scheme is None or not scheme.tensors else None
    record = read_record(snapshot.directory)
    if record is None and rotary is not None:
        record = record_of_config(snapshot)
    if record is None:
        raise InputError(_never_extended(snapshot))
    found = rotary or scheme
    assert found is not None
    masked = is_masked(snapshot)  # without a head it is refused
    if rotary is not None and rotary.masked_lm:
        raise UnsupportedModel(
            f"{model} is a masked language model with rotary embeddings ({found.model_type}); of "
            "masked ones finetune trains those with a learned table"
        )
    if snapshot.quantisation:
        raise InputError(
            f"{model} is quantised ({named(snapshot.quantisation)}), and a LoRA is merged into "
            "weights that are not; extend the unquantised model (--qlora holds it in 4 bits in "
            "training)"
        )
    if record.more.get("finetune"):
        raise InputError(
            f"{model} is the result of a fine-tuning already; its extended, untuned base lies in "
            f"{snapshot.directory / 'base'}: fine-tune that"
        )
    if found.context != record.target:
        raise InputError(
            f"{model}: ropext.json says that it was extended to {record.target} tokens, but its "
            f"config reads {found.context}; see ropext verify {model}"
        )
    if rotary is not None:
        return Origin(snapshot, record, rotary)
    table = growth_of(snapshot, record)
    if table.undone() is None:
        raise InputError(
            f"{model}: of {record.context} old rows {len(table.old_rows)} are in its table, and "
            f"its base cannot be read from it; extend the base to a multiple of {record.context}"
        )
    return Origin(snapshot, record, None, table, masked)


@dataclass(frozen=True)
class PreparedFinetune(PreparedTraining):
    """A fine-tuning before a weight is loaded."""

    command = "finetune"
    options: Finetune
    origin: Origin

    @property
    def title(self) -> str:
        options = self.options
        return f"{self.origin.told}, strategy {options.strategy}, packing {options.packing}"

    @property
    def remarks(self) -> list[str]:
        said = [f"not evaluated: {self.why_no_judge}"] if self.why_no_judge else []
        if self.settings.is_open:
            said.append(f"at most {self.settings.steps.value} steps, {STOPS}")
        return said + asked_text(self.options.retrieval_share)

    @property
    def forward_tokens(self) -> int:
        evaluations = -(-self.settings.steps.value // self.settings.between)
        # Before and after too; the base and the control through the short window, which is twice.
        passes = evaluations + (6 if self.options.control else 4)
        return passes * self.judge.tokens if self.judge else 0

    @property
    def why_no_judge(self) -> str | None:
        """Why no document is read, although that was not asked for."""
        if self.judge is not None or not self.options.eval_documents:
            return None
        if sharing.is_fsdp():
            return (
                "FSDP shares the weights, and reading needs all of them in one process; when it "
                "is done: ropext eval OUT --data DATA --device-map auto"
            )
        return (
            f"fewer than {LARGEST_SHARE} of its {self.data.read} documents reach the target, and "
            f"of fewer none is held out; name others with --eval, or {REMEDY}"
        )

    def manifest(self) -> dict[str, Any]:
        options = dict(self.options)
        return {
            "config": digest(self.snapshot.config),
            "weights": weights_digest(self.snapshot),
            "data": self.data.digest(),
            "evaluation": [own.key for own in self.judge.documents] if self.judge else [],
            "settings": {name: own.value for name, own in self.settings.named.items()},
            "options": {name: options[name] for name in DECIDING},
        }


@dataclass(frozen=True)
class Finetuned:
    """What a fine-tuning did."""

    output: Path
    planned: Planned[PreparedFinetune] = field(repr=False)
    steps: int
    kept_step: int  # whose weights are written
    stopped_early: bool
    losses: tuple[dict[str, float], ...] = field(repr=False)
    evaluations: tuple[dict[str, float], ...] = field(repr=False)
    numbers: dict[str, Any] = field(repr=False)  # label -> values as JSON
    overlap: dict[str, Any] | None = field(repr=False)  # of the documents that these are over
    control: dict[str, Any] | None = field(repr=False)
    notes: tuple[str, ...]

    @property
    def passes(self) -> float:
        """How often the text was read for the weights that are written."""
        prepared = self.planned.prepared
        return prepared.rows.passes * self.kept_step / int(prepared.settings.steps.value)

    def to_json(self) -> dict[str, Any]:
        found = {"output": str(self.output), "plan": self.planned.to_json()}
        named = {k: v for k, v in vars(self).items() if k not in ("output", "planned")}
        return found | {k: list(v) if isinstance(v, tuple) else v for k, v in named.items()}


def prepare(model: str, source: str, options: Finetune) -> PreparedFinetune:
    """Read model, tokenizer and data; settle the settings."""
    origin = open_origin(model)
    kind = origin.trains(options)
    options = options.model_copy(update={"train": kind})
    sizes = _stored_parameters(origin.snapshot), origin.context, origin.target
    settings = defaults.settings(options, *sizes)
    sharing.check_rows(settings.rows.value, settings.row_tokens.value, options.keep_short)
    sharing.check_fsdp(
        qlora=options.qlora,
        **{f"train {kind}": kind != "lora"},
    )
    if options.keep_short and origin.two_sets_up_to:
        raise UsageError(
            f"--keep-short: {model} reads its original length with a set of factors of its own, "
            "which rows that reach further do not change; leave it out"
        )
    vocabulary = text_part(origin.snapshot.config, origin.path).get("vocab_size")
    encoder, masking = encoder_of(origin.snapshot, vocabulary, options.seed), None
    if origin.is_masked:
        masking = masking_of(encoder, model)
    strategy: Full | Pose = Full(settings.row_tokens.value)
    if options.strategy == "pose":
        strategy = Pose(strategy.length, origin.target, origin.two_sets_up_to)
    most = settings.rows.value * settings.steps.value * strategy.length
    found = data.read(
        source,
        options,
        encoder,
        origin.target,
        strategy.length,
        wanted_tokens=most if options.epochs is None else NO_LIMIT,
        judging=options.eval_documents if options.evaluate is None else 0,
        apart=kept_out_of(origin.record),
    )
    documents = list(found.documents)
    if options.packing == "glued":
        documents = glue(documents, encoder.tokenizer.eos_token_id, options.seed)
    judge = _judge(origin, options, found, encoder, masking)
    asked = rows_in(documents, strategy), sharing.readers(), judge.tokens if judge else 0
    settings = defaults.settings(options, *sizes, *asked)
    settings = settings if kind != "new-rows" else replace(settings, lora=None)
    count, share = settings.rows.value * settings.steps.value, options.retrieval_share
    questions = KeyRows(encoder, documents, share, options.seed) if share else None
    rows = Rows(documents, strategy, count, options.seed, questions)
    return PreparedFinetune(
        snapshot=origin.snapshot,
        options=options,
        context=origin.context,
        target=origin.target,
        settings=settings,
        data=found,
        encoder=encoder,
        judge=judge,
        masking=masking,
        origin=origin,
        rows=rows,
    )


def _stored_parameters(snapshot: Snapshot) -> int:
    """As stored, from the headers."""
    headers = [read_header(snapshot.path(name)) for name in snapshot.weight_files]
    return sum(prod(own.shape) for header in headers for own in header.tensors.values())


def _judge(
    origin: Origin,
    options: Finetune,
    found: data.TrainingData,
    encoder: corpus.DocumentEncoder,
    masking: Masking | None,
) -> Judge | None:
    """Over the documents of --eval that reach the target, or those held out of DATA; None where
    there is none, or none is to be read."""
    count, target = options.eval_documents, origin.target
    judging: Sequence[corpus.Document] = found.judging(count, target)
    if count and options.evaluate is not None:
        # A datasets id is evaluated on its test split, as `ropext eval` does.
        largest = options.max_document_mib
        place = corpus.Source(options.evaluate, options.column, largest=largest)
        raw = corpus.read_documents(place)
        parts = list(corpus.split_documents(raw, options.split_documents, encoder, target))
        wanted = corpus.Wanted((target,), given=True, max_documents=count)
        judging = corpus.choose_documents(parts, encoder, wanted).documents
    if not judging or sharing.is_fsdp():
        return None
    return judge_of(judging, (origin.context, target), options.seed, masking=masking)


def plan(prepared: PreparedFinetune) -> Planned[PreparedFinetune]:
    """Which layers are trained and what that takes, from a model without weights."""
    from accelerate import init_empty_weights

    options = prepared.options
    models.check_tracker(options.report_to)
    device = models.device(options)
    if options.qlora:
        models.four_bits(device)
    if sharing.is_fsdp() and device.type == "cpu":
        raise UsageError(
            "launched with FSDP, but on a CPU, where accelerate makes DDP of it without a word: "
            "use GPUs, or the config that `ropext.training.launch` calls ddp"
        )
    model = skeleton(prepared.snapshot)
    lora, table = prepared.settings.lora, prepared.origin.table
    names = [] if lora is None else models.target_names(model, options.targets)
    counts = counted(prepared, model)
    with init_empty_weights(include_buffers=False):
        joined = models.add_adapter(model, options, lora, table)
    moving = sum(p.numel() for p in joined.parameters() if p.requires_grad)
    if table is not None:
        new = table.target - len(table.old_rows)
        for name, rows in models.trained_tables(joined, table):
            moving -= (len(rows) - new) * rows.shape[1]
            names.append(f"{new}{NEW_ROWS}{name}")
    return Planned(
        prepared=prepared,
        moving=moving,
        moving_bytes=COPIES * 4 * moving,  # float32
        targets=tuple(names),
        **counts,
    )
