"""A fit before its session: what may move and from where, preparation and plan."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ropext import corpus, scaling
from ropext.checkpoint import Snapshot, open_snapshot, with_weights
from ropext.checkpoint.provenance import digest, read_record, weights_digest
from ropext.errors import NotExpressible, UnsupportedModel, UsageError
from ropext.evaluation.loading import skeleton
from ropext.inspecting import open_model, plan_of
from ropext.options.training import WITHIN, Fit
from ropext.planning import Plan, PlannedSite, make_plan
from ropext.results.overlap import kept_out_of
from ropext.rope import compression
from ropext.tasks import check_amount
from ropext.training import attention, data, defaults, models, sharing
from ropext.training.data import TrainingData
from ropext.training.judge import Judge, few, judge_of
from ropext.training.rows import FitQuestions, Full, Pose, Rows, WithShort
from ropext.training.run import COPIES, Planned, PreparedTraining, counted, encoder_of
from ropext.training.spectrum import Space, space_of

# Which methods may be the start of what moves: by default those that factor and target determine.
STARTS = {"yarn": ("yarn",), "ntk": ("ntk", "dynamic")}
POSE_START = "yarn"
FEWEST = 16  # rows of the target's length that are read of a stream, at least
RIVALS = 2  # of those that are not named, how many are tried for a few steps
DETERMINED = tuple(name for name in scaling.METHODS if name not in ("abf", "longrope"))
# Options that do not decide the numbers.
UNDECIDING = (
    "link", "device", "report_to", "micro_rows", "column", "split", "max_document_mib",
)  # fmt: skip


@dataclass(frozen=True)
class PreparedFit(PreparedTraining):
    """A fit before a weight is loaded."""

    command = "fit"
    options: Fit
    judge: Judge
    within: str
    starts: Mapping[str, Plan]  # the closed forms to choose from
    mixed: WithShort  # what is read: these, and --keep-short
    notes: tuple[str, ...]

    @property
    def remarks(self) -> tuple[str, ...]:
        return self.notes

    @property
    def title(self) -> str:
        start, rivals = ", ".join(self.starts), self.settings.rivals
        start = f"the best of {start}" if len(self.starts) > 1 else start
        if rivals > 1:
            start += f", {rivals} of which are tried for {self.settings.between} steps"
        return f"from {self.context} to {self.target} tokens, starting from {start}"

    @property
    def plan(self) -> Plan:
        """Any of the starts: what they share (context, target, geometry)."""
        return next(iter(self.starts.values()))

    def space(self, start: str) -> Space:
        """What moves, beginning at a closed form."""
        ceiling = self.options.ceiling * self.plan.factor
        return space_of(self.within, self.starts[start].main, self.target, ceiling)

    def planned(self, method: str, knobs: Mapping[str, Any]) -> Plan:
        """The plan of a spectrum that was found."""
        return _planned(self.snapshot, self.options, method, knobs)

    @property
    def forward_tokens(self) -> int:
        settings, target, judged = self.settings, self.target, self.judged
        judgements = -(-settings.steps.value // settings.between) + settings.rivals - 1
        base = judged * self.context * (2 * target // self.context)
        questions = 2 * len(self.judge.far) * target + len(self.judge.near) * self.context
        searched = 0
        if self.options.strategy == "pose":
            windows = attention.windows_of(self.data.documents, target)
            searched = judgements * attention.USUAL * len(windows) * target
        passes = len(self.starts) + judgements + 1
        return int(passes * judged * target + base + questions + searched)

    def facts(self) -> dict[str, Any]:
        return {"within": self.within, "starts": list(self.starts)}

    def manifest(self) -> dict[str, Any]:
        return {
            "config": digest(self.snapshot.config),
            "weights": weights_digest(self.snapshot),
            "fitted": digest([[int(t) for t in d.ids] for d in self.data.documents]),
            "judging": [own.key for own in self.judge.documents],
            "within": self.within,
            "starts": list(self.starts),
            "options": {k: v for k, v in dict(self.options).items() if k not in UNDECIDING},
        }


@dataclass(frozen=True)
class Fitted:
    """What a fit did."""

    output: Path
    planned: Planned[PreparedFit] = field(repr=False)
    plan: Plan  # the one that was written
    kept: str  # "fitted" or "start"
    reason: str  # why that one
    start: str  # the closed form that it has to beat
    begun: str  # the one that its steps began at
    steps: int  # the step that was kept; 0 = the start
    tokens: int  # read with gradients until the end
    numbers: dict[str, dict[str, Any]] = field(repr=False)  # base, start, fitted -> as JSON
    change: dict[str, Any] | None = field(repr=False)  # far half, fitted minus start, nats a token
    losses: tuple[dict[str, float], ...] = field(repr=False)
    judgements: dict[int, float] = field(repr=False)  # step -> far half, nats a token
    notes: tuple[str, ...]

    @property
    def pair_factors(self) -> tuple[float, ...]:
        return compression(self.plan.main.rope.spectrum, self.plan.main.wanted)

    @property
    def attention_factor(self) -> float:
        return self.plan.main.wanted.attention_factor

    def to_json(self) -> dict[str, Any]:
        return {
            "output": str(self.output),
            "planned": self.planned.to_json(),
            "kept": self.kept,
            "reason": self.reason,
            "start": self.start,
            "begun": self.begun,
            "step": self.steps,
            "tokens": self.tokens,
            "method": self.plan.method,
            "pair_factors": list(self.pair_factors),
            "attention_factor": self.attention_factor,
            "change": self.change,
            "numbers": self.numbers,
            "losses": list(self.losses),
            "judgements": self.judged,
            "notes": list(self.notes),
        }

    @property
    def judged(self) -> list[dict[str, float]]:
        """The judgements as JSON."""
        return [{"step": step, "far_half_nll": own} for step, own in self.judgements.items()]


def _planned(snapshot: Snapshot, options: Fit, method: str, knobs: Mapping[str, Any]) -> Plan:
    request = options.extend(method, **knobs)
    if snapshot.container:  # where the GGUF would not carry the result, it is refused here
        make_plan(snapshot.config, request, snapshot.name, snapshot.container)
        request = request.changed(for_loaders=())  # they read that, not this directory
    return plan_of(snapshot, request, snapshot.name)


def choose_starts(snapshot: Snapshot, options: Fit) -> tuple[str, dict[str, Plan]]:
    """What may move, and the closed forms inside of it that can be written here.

    Where nothing is asked, the widest form that this family and the loaders of --for read exactly.
    """
    refusal: NotExpressible | None = None
    for within in WITHIN:
        if options.within and WITHIN.index(within) < WITHIN.index(options.within):
            continue
        try:
            found = _closed_forms(snapshot, options, within)
            example = next(iter(found.values()))
            _planned(snapshot, options, *example_knobs(within, example.main))
        except NotExpressible as error:
            refusal = refusal or error
            continue
        if refusal is None or not options.within:
            return within, found
        raise NotExpressible(
            f"--within {options.within}: {refusal}; of the narrower forms, --within {within} is"
            " carried exactly"
        )
    assert refusal is not None  # a form was either found or refused
    raise refusal


def _closed_forms(snapshot: Snapshot, options: Fit, within: str) -> dict[str, Plan]:
    allowed = STARTS.get(within, DETERMINED)
    if options.strategy == "pose" and options.start is None and POSE_START in allowed:
        # Reading every closed form at the target would cost more than the fit.
        options = options.model_copy(update={"start": (POSE_START,)})
    if options.start:
        for start in options.start:
            scaling.find(start, "--start")
            if start not in allowed:
                raise UsageError(
                    f"--start {start} is not inside of --within {within}, which begins at one "
                    f"of {', '.join(allowed)}"
                )
        return {start: _planned(snapshot, options, start, {}) for start in options.start}
    found: dict[str, Plan] = {}
    refusal: NotExpressible | UsageError | None = None
    for method in allowed:
        try:
            found[method] = _planned(snapshot, options, method, {})
        except (NotExpressible, UsageError) as error:
            refusal = refusal or error
    if not found and refusal is not None:
        raise refusal
    return found


def example_knobs(within: str, site: PlannedSite) -> tuple[str, dict[str, Any]]:
    """Method and knobs of a spectrum inside of `within` that is no closed form."""
    if within == "yarn":
        knobs = {"beta_fast": 20.5, "beta_slow": 1.25, "truncate": False, "attention_factor": 1.25}
        return "yarn", knobs
    if within == "ntk":
        return "abf", {"theta": site.rope.theta * 1.5}
    factors = tuple(1.5 + 0.25 * (pair % 3) for pair in range(site.rope.dim // 2))
    return "longrope", {"pair_factors": factors, "attention_factor": 1.25}


def _check_geometry(plan: Plan) -> None:
    """One set of numbers moves, so that several embeddings must start from the same."""
    scaled = [site for site in plan.sites if site.scaled]
    if len({(site.rope.dim, site.rope.spectrum) for site in scaled}) > 1:
        raise UnsupportedModel(
            f"{plan.name}: its full-attention layers have rotary embeddings that differ "
            f"({', '.join(site.label for site in scaled)}); fit moves one set of numbers"
        )


def prepare(
    model: str, source: str, options: Fit, revision: str | None = None, named: str = ""
) -> PreparedFit:
    """Read model, tokenizer and data; settle what moves and from where. `named` is what the user
    calls the model, where that is a GGUF and this a directory made of it."""
    if sharing.is_fsdp():
        raise UsageError(
            "fit moves a few numbers and shards nothing: launch it with DDP, not with FSDP (the "
            "configs are in ropext.training.launch)"
        )
    snapshot = open_snapshot(model, revision=revision)
    if named not in ("", model):
        container = open_model(named).container
        snapshot = replace(snapshot, name=named, hub_id=None, container=container)
    within, starts = choose_starts(snapshot, options)
    plan = next(iter(starts.values()))
    if plan.model.masked_lm:
        raise UnsupportedModel(
            f"{model} is a masked language model ({plan.model.model_type}); fit reads causal ones"
        )
    plan.require_help()
    _check_geometry(plan)
    snapshot = with_weights(snapshot)
    pairs = plan.main.rope.dim // 2
    rivals = len(starts) if options.start else min(len(starts), RIVALS)
    settings = defaults.fit_settings(options, plan.context, plan.target, pairs, rivals)
    length, per_step = settings.row_tokens.value, settings.rows.value
    sharing.check_rows(per_step, length, options.keep_short)
    strategy: Full | Pose = Full(length)
    if options.strategy == "pose":
        strategy = Pose(length, plan.target, plan.main.rope.spectrum.short_context or 0)
    encoder = encoder_of(snapshot, plan.model.vocab_size, options.seed)
    enough = max(options.steps * max(options.batch_tokens, plan.target), FEWEST * plan.target)
    apart = kept_out_of(read_record(snapshot.directory))
    found = data.read_for_fit(source, options, encoder, plan.target, enough, apart)
    questions, notes = _questions(encoder, found, options, plan, strategy)
    count = per_step * options.steps
    rows = Rows(found.documents, strategy, count, options.seed, questions, far_half=True)
    mixed = WithShort(rows, per_step, found.documents, plan.context, options)
    notes += [warning] if (warning := few(found.held_out)) else []
    if options.packing == "glued":
        notes.append(
            f"documents were joined (--packing glued): intervals are over {len(found.held_out)} "
            "windows of joined held-out documents, no two of which share a document"
        )
    return PreparedFit(
        snapshot=snapshot,
        options=options,
        context=plan.context,
        target=plan.target,
        settings=settings,
        data=found,
        encoder=encoder,
        judge=_judge(found, questions, options, plan, encoder.bos),
        within=within,
        starts=starts,
        rows=rows,
        mixed=mixed,
        notes=tuple(notes),
    )


def _questions(
    encoder: corpus.DocumentEncoder,
    found: TrainingData,
    options: Fit,
    plan: Plan,
    strategy: Full | Pose,
) -> tuple[FitQuestions | None, list[str]]:
    if not options.retrieval_share and not options.retrieval_items:
        return None, []
    questions = FitQuestions(
        encoder, found.documents, strategy, options.seed, options.retrieval_share
    )
    reason = questions.why_none(min(plan.context, plan.target))
    return (questions, []) if reason is None else (None, [f"retrieval is left out: {reason}"])


def _judge(
    found: TrainingData,
    questions: FitQuestions | None,
    options: Fit,
    plan: Plan,
    bos: int | None,
) -> Judge:
    lengths = (plan.context, plan.target)
    count = options.retrieval_items if questions is not None else 0
    check_amount(count * sum(lengths), "give fewer --retrieval-items")
    near, far = (
        questions.measured(length, count) if questions is not None and count else []
        for length in lengths
    )
    return judge_of(found.held_out, lengths, options.seed, near, far, bos)


def plan(prepared: PreparedFit) -> Planned[PreparedFit]:
    """What it takes, from a model without weights."""
    options = prepared.options
    models.check_tracker(options.report_to)
    moving = list(prepared.space(next(iter(prepared.starts))).parameters())
    return Planned(
        prepared=prepared,
        targets=(f"the spectrum ({prepared.within})",),
        moving=sum(own.numel() for own in moving),
        moving_bytes=COPIES * sum(own.nbytes for own in moving),
        **counted(prepared, skeleton(prepared.snapshot)),
    )
