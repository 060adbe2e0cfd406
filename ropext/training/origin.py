"""Where a training begins: the checkpoint of a fine-tuning; of a fit what may move, and the closed
forms that it can start from."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ropext import bundled, families, scaling
from ropext.checkpoint import Snapshot, open_snapshot
from ropext.checkpoint.provenance import (
    READ_FROM,
    Record,
    read_record,
    record_of_config,
    scaled_by_config,
)
from ropext.errors import InputError, NotExpressible, UnsupportedModel, UsageError
from ropext.evaluation.contenders import plans_of
from ropext.families import Model
from ropext.families.config import named
from ropext.inspecting import plan_of
from ropext.models.masked import is_masked
from ropext.options.fields import flag
from ropext.options.training import WITHIN, Finetune, Fit
from ropext.planning import Plan
from ropext.rope import RopeSite
from ropext.scaling.tables import Growth
from ropext.schemes import read_positions
from ropext.schemes.plan import growth_of

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
    def history(self) -> str:
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
        scheme = self.model or (self.table and self.table.positions)
        return scheme.path if scheme else ()

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
        unfit = {"--strategy pose": options.strategy == "pose"}
        unfit["--retrieval-share"] = options.retrieval_share > 0
        for name in [name for name, given in unfit.items() if given and self.is_masked]:
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


def _never_extended(snapshot: Snapshot) -> str:
    """Why a directory without a record is not trained; a scaled one is not to be extended twice."""
    rotates = read_positions(snapshot.config) is None
    if rotates and any(
        site.rope.is_scaled for site in families.as_read(snapshot.config).scaled_sites
    ):
        return (
            f"{snapshot.name} has no ropext.json, and its config is scaled without stating the "
            "original length; fine-tune what `ropext extend` or ropext.save wrote"
        )
    return (
        f"{snapshot.name} was not extended by ropext (no ropext.json, no scaling in its config), "
        f"and training does not extend it; run: ropext extend {snapshot.name} "
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
    scheme = read_positions(snapshot.config)
    rotary = families.read(snapshot.config) if scheme is None or not scheme.tensors else None
    record = read_record(snapshot.directory)
    if record is None and rotary is not None:
        record = record_of_config(snapshot)
    if record is None:
        raise InputError(_never_extended(snapshot))
    read = rotary or scheme
    assert read is not None
    masked = is_masked(snapshot)  # without a head it is refused
    if rotary is not None and rotary.masked_lm:
        raise UnsupportedModel(
            f"{model} is a masked language model with rotary embeddings ({read.model_type}); of "
            "masked ones finetune trains those with a learned table"
        )
    if snapshot.quantisation:
        raise InputError(
            f"{model} is quantised ({named(snapshot.quantisation)}), and a LoRA cannot be merged "
            "into quantised weights; extend the unquantised model (--qlora holds it in 4 bits "
            "during training)"
        )
    if record.more.get("finetune"):
        raise InputError(
            f"{model} is the result of a fine-tuning already; its extended, untuned base lies in "
            f"{snapshot.directory / 'base'}: fine-tune that"
        )
    if read.context != record.target:
        raise InputError(
            f"{model}: ropext.json says that it was extended to {record.target} tokens, but its "
            f"config reads {read.context}; see ropext verify {model}"
        )
    if rotary is not None:
        return Origin(snapshot, record, rotary)
    table = growth_of(snapshot, record)
    if table.undone() is None:
        raise InputError(
            f"{model}: its table keeps {len(table.old_rows)} of {record.context} old rows, so its "
            f"base cannot be rebuilt; extend the base to a multiple of {record.context}"
        )
    return Origin(snapshot, record, None, table, masked)


POSE_START = "yarn"


def plan_with(snapshot: Snapshot, options: Fit, method: str, knobs: Mapping[str, Any]) -> Plan:
    request = options.extend(method, **knobs)
    plan = plan_of(snapshot, request, snapshot.name)
    if plan.carrier.in_transformers or not request.for_loaders:
        return plan
    # They read the GGUF, not this directory.
    return plan_of(snapshot, request.changed(for_loaders=()), snapshot.name)


def choose_starts(snapshot: Snapshot, options: Fit) -> tuple[str, dict[str, Plan]]:
    """What may move, and the closed forms inside of it that can be written here.

    Where nothing is asked, the widest form that this family and the loaders of --for read exactly.
    """
    refusal: NotExpressible | None = None
    for within in WITHIN:
        if options.within and WITHIN.index(within) < WITHIN.index(options.within):
            continue
        try:
            forms = _closed_forms(snapshot, options, within)
            example = next(iter(forms.values()))
            plan_with(snapshot, options, *example_knobs(within, example.main))
        except NotExpressible as error:
            refusal = refusal or error
            continue
        if refusal is None or not options.within:
            return within, forms
        raise NotExpressible(
            f"--within {options.within}: {refusal}; of the narrower forms, --within {within} is"
            " carried exactly"
        )
    assert refusal is not None  # a form was either found or refused
    raise refusal


def _closed_forms(snapshot: Snapshot, options: Fit, within: str) -> dict[str, Plan]:
    allowed = [method.name for method in scaling.METHODS.values() if within in method.fits]
    if options.strategy == "pose" and options.start is None and POSE_START in allowed:
        # Reading every closed form at the target would cost more than the fit.
        options = options.model_copy(update={"start": (POSE_START,)})
    if options.start:
        for start in options.start:
            scaling.find(start, "--start")
            if start not in allowed:
                raise UsageError(
                    f"--within {within} cannot start from --start {start}; it starts from one "
                    f"of {', '.join(allowed)}"
                )
        return {start: plan_with(snapshot, options, start, {}) for start in options.start}
    forms, _ = plans_of(allowed, lambda method: plan_with(snapshot, options, method, {}))
    return forms


def example_knobs(within: str, site: RopeSite) -> tuple[str, dict[str, Any]]:
    """Method and knobs of a spectrum inside of `within` that is no closed form."""
    if within == "yarn":
        knobs = {"beta_fast": 20.5, "beta_slow": 1.25, "truncate": False, "attention_factor": 1.25}
        return "yarn", knobs
    if within == "ntk":
        return "abf", {"theta": site.rope.theta * 1.5}
    factors = tuple(1.5 + 0.25 * (pair % 3) for pair in range(site.rope.dim // 2))
    return "longrope", {"pair_factors": factors, "attention_factor": 1.25}


def check_geometry(plan: Plan) -> None:
    """One set of numbers moves, so that several embeddings must start from the same."""
    scaled = [site for site in plan.sites if site.scaled]
    if len({(site.rope.dim, site.rope.spectrum) for site in scaled}) > 1:
        raise UnsupportedModel(
            f"{plan.name}: its full-attention layers have rotary embeddings that differ "
            f"({', '.join(site.label for site in scaled)}); fit moves one set of numbers"
        )
