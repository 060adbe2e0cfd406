"""Describe one model that is read: its weights, its config, its windows, and its longest length.

The model is in a directory or in memory.
"""

import copy
import secrets
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ropext import families
from ropext.base.errors import UnsupportedModel, UsageError, first_line
from ropext.base.jsontext import Json, JsonObject, read_object
from ropext.families.model import LENGTH_KEYS
from ropext.families.schemes import read_positions
from ropext.files.checkpoint import Snapshot
from ropext.files.checkpoint.digests import adapter_digest
from ropext.files.checkpoint.provenance import Record, read_record
from ropext.models.load import check_masked_head, predicts_masked_tokens
from ropext.models.patching import apply_plan, base_model, plan_of_patched
from ropext.options.cache import StoredCache
from ropext.options.fields import FIT
from ropext.planning import CONFIG_ALONE, InMemory
from ropext.results import BASE, EXTENDED, SHORT
from ropext.results.overlap import (
    HASHES,
    TrainingDocuments,
    joined_training,
    read_training_documents,
    recorded_training,
    unrecorded_training,
)
from ropext.results.perplexity import LossStatistics
from ropext.scaling.forms import LENGTH_DEPENDENT
from ropext.scaling.rope import Positions, RopeSite

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# Schemes that a config or a weight carries, and whose models predict tokens as `eval` needs.
READ = ("learned", "mixed", "disentangled")


@dataclass(frozen=True)
class InMemoryModel:
    """A model in memory that its user holds."""

    model: "torch.nn.Module"  # from transformers, or from PEFT around one
    live: "PreTrainedModel"  # the transformers model itself
    tokenizer: "PreTrainedTokenizerBase"
    token: str = field(default_factory=lambda: secrets.token_hex(16))

    def copied(self) -> "torch.nn.Module":
        """Return a copy of a model in memory for an evaluation, in which its variants are computed;
        it shares the memory of the weights."""
        try:
            copied = copy.deepcopy(self.model, _shared(self.model)).eval()
        except Exception as error:  # any error of an attribute of the model
            raise UsageError(
                f"{type(self.live).__name__} cannot be copied, and evaluate changes nothing of the "
                f"model itself: {first_line(error)}"
            ) from error
        plan = plan_of_patched(base_model(copied))
        if plan is not None and plan.fold is not None:
            apply_plan(copied, plan)  # the copied hooks still refer to the original model
        return copied

    def identity(self) -> dict[str, Json]:
        """Return the identity of a model in memory for its evaluation's variants, like
        `Digests.of_checkpoint` for a directory.

        No digest covers everything that computes (patched functions, hooks, autocast), so no two
        calls share an identity.
        """
        return {"in_memory": True, "weights_sha256": f"in memory, {self.token}"}


def _shared(model: "torch.nn.Module") -> dict[int, object]:
    """Return a tensor with the same numbers for each weight of an evaluation's model, by the
    weight's id, as copy.deepcopy needs it for a copy that computes variants."""
    import torch

    shared = dict[int, object]()
    for module in model.modules():
        # bitsandbytes keeps 8-bit weights in a state after the model's first forward.
        for value in getattr(getattr(module, "state", None), "__dict__", {}).values():
            if isinstance(value, torch.Tensor):
                shared[id(value)] = value
    for parameter in model.parameters():
        # PEFT switches the gradients of adapters on and off. A packed weight has attributes, and
        # bitsandbytes moves them into the module that first computes with it.
        own = torch.Tensor._make_subclass(type(parameter), parameter.data)
        vars(own).update(vars(parameter))
        shared[id(parameter)] = own
    return shared


@dataclass(frozen=True)
class InMemorySnapshot(Snapshot):
    """The small files of a model in memory, in a folder that exists only during its evaluation."""

    held: InMemoryModel | None = None
    origin: Snapshot | None = None  # the checkpoint that its weights came from

    def require_weights(self) -> None:
        """Do nothing before an evaluation's variant reads documents: its weights are in memory."""


def in_memory_model_of(snapshot: Snapshot) -> InMemoryModel | None:
    """Return the model in memory to which the snapshot of an evaluation's variant belongs; None for
    a directory."""
    return snapshot.held if isinstance(snapshot, InMemorySnapshot) else None


def origin_of(snapshot: Snapshot) -> Snapshot:
    """Return the checkpoint from which the weights of an evaluation's variant were loaded; for a
    directory, itself."""
    if isinstance(snapshot, InMemorySnapshot) and snapshot.origin is not None:
        return snapshot.origin
    return snapshot


def record_of_weights(snapshot: Snapshot) -> Record | None:
    """Return the record of the extension of a variant's model, from the place that its weights were
    loaded from."""
    return read_record(origin_of(snapshot).directory)


@dataclass(frozen=True)
class Variant:
    """One model that is read.

    The base and the control, which is the base trained on the same text, read through the short
    window.
    """

    label: str
    kind: str  # "base", "control", "untouched", "extended"
    snapshot: Snapshot
    config: JsonObject | None = None  # applied in memory
    beside: InMemory = CONFIG_ALONE  # changes that no config describes
    adapter: str | None = None
    cache: StoredCache | None = None  # keys and values are rounded as it stores them
    unrounded: str = ""  # the label of the same variant without rounding
    target: int | None = None
    info: JsonObject = field(default_factory=dict)
    renamed: str = ""  # its own name, if `label` is the user's

    @property
    def name(self) -> str:
        """Return the name that names its files and decides which run it is; a user's label does not
        change it."""
        return self.renamed or self.label

    @property
    def reads_short(self) -> bool:
        """Return whether the variant reads documents and questions through the short window."""
        return self.kind in SHORT

    @property
    def adapter_sha256(self) -> str | None:
        """Return the hash of the adapter's files; None if there is no adapter."""
        return None if self.adapter is None else adapter_digest(self.adapter)

    def content(self, model: JsonObject) -> dict[str, Json]:
        """Return the variant's identity: its kind, its model's identity, its spectrum."""
        content = {"kind": self.kind, "model": model, "adapter_sha256": self.adapter_sha256}
        content |= self.info
        if self.cache is not None:
            # Until November 2026 all keys were rounded in the order of transformers.
            content["kv_cache"] = asdict(self.cache) | {"order": "gguf"}
        return content

    def regimes(self, frame: LossStatistics) -> dict[str, int]:
        """Return the pass length of each folder of losses in the variant's store.

        The passes serve all lengths of a frame: one for each run of lengths that share a spectrum,
        by the spectra in the config. A static spectrum needs one pass, at the longest length.
        longrope with two different sets needs two. dynamic needs one for every length beyond the
        context. With 8-bit weights the tokens of a pass affect one another, so the context needs
        one more pass. A masked language model reads every length, but a base only lengths up to its
        own context.
        """
        if self.reads_short and frame.scoring.scores_all:
            return {"short": frame.longest}
        lengths = list(frame.read_lengths)
        config = self.snapshot.config if self.config is None else dict(self.config)
        if not frame.scoring.scores_all:
            reach = frame.context if self.reads_short else frame.longest
            lengths = [length for length in lengths if length <= reach]
        elif (sites := _sites(config)) is not None:
            spectra = [[_regime(site, length) for site in sites] for length in lengths]
            pairs = zip(lengths, spectra, [*spectra[1:], None], strict=True)
            lengths = [length for length, here, next_one in pairs if here != next_one]
            if _mixes_tokens(config) and frame.context < min(lengths):
                lengths.insert(0, frame.context)  # the base's first window
        elif not _names_length(config):
            lengths = [frame.longest]
        return {f"pass-{length}": length for length in lengths}


def follows_length(config: dict[str, Json], longest: int) -> bool:
    """Return whether a variant's forward pass over a document of the longest length, by stock, uses
    another spectrum than a pass over a short text."""
    sites = _sites(config)
    if sites is None:
        return _names_length(config)
    return any(_regime(site, 1) != _regime(site, longest) for site in sites)


def _sites(config: dict[str, Json]) -> tuple[RopeSite, ...] | None:
    """Return the rotary embeddings in a variant's config, whose spectra decide its passes; None if
    it has none, or if its family is unknown."""
    try:
        return tuple(families.read(config).sites)
    except UnsupportedModel:
        return None


def _mixes_tokens(config: JsonObject) -> bool:
    """Return whether 8-bit weights make the loss of a token depend on later tokens of the same
    forward pass.

    LLM.int8 (Dettmers et al. 2022) keeps a column of activations in 16 bits if any token of the
    pass has an outlier there.
    """
    quantised = config.get("quantization_config")
    if not isinstance(quantised, dict) or not quantised.get("load_in_8bit"):
        return False
    return bool(quantised.get("llm_int8_threshold", 6.0))


def _names_length(config: dict[str, Json]) -> bool:
    """Return whether a variant's config of an unknown family names a spectrum that depends on the
    length, and so needs a forward pass for each length."""
    named = set(_texts(config.get("rope_scaling")))
    named |= set(_texts(config.get("rope_parameters")))
    return not named.isdisjoint(LENGTH_DEPENDENT)


def _texts(value: Json) -> Iterator[str]:
    """Yield every text in a piece of a variant's config, except keys, to find spectra that need
    several forward passes."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _texts(part)
    elif isinstance(value, list):
        for part in value:
            yield from _texts(part)


def _regime(site: RopeSite, length: int) -> Any:
    """Return a value that is equal for two lengths if stock uses the same spectrum at both, so that
    one forward pass can serve them."""
    spectrum = site.rope.spectrum
    if site.params["rope_type"] == "dynamic":
        return max(length, site.rope.original_context)
    has_two = spectrum.short_inv_freq not in (None, spectrum.inv_freq)
    return has_two and length > spectrum.short_context


def trained_on(variant: Variant) -> TrainingDocuments | None:
    """Return the record of the documents that a variant was trained or fitted on; None if there is
    none."""
    record = record_of_weights(variant.snapshot)
    before_it = variant.config is not None and variant.kind != EXTENDED
    if before_it and record is not None and record.more.get(FIT):
        record = None  # the spectrum from before the fit
    before = recorded_training(record)
    if before is not None and variant.kind != EXTENDED:  # nobody chose the base
        before = replace(before, chose=None) if before.count or before.not_recorded else None
    if variant.adapter is None:
        return before
    hashes = Path(variant.adapter, HASHES)
    if not hashes.is_file():
        return joined_training(before, unrecorded_training("the adapter"))
    return joined_training(before, read_training_documents(read_object(hashes)))


def base_variant(
    snapshot: Snapshot,
    config: JsonObject | None = None,
    beside: InMemory = CONFIG_ALONE,
    info: JsonObject | None = None,
) -> Variant:
    """Return the base: a model that reads documents through the short window.

    The pictures show the frequencies of its first scaled rotary embedding.
    """
    known = dict(info or {})
    sites = _sites(snapshot.config if config is None else dict(config))
    if sites is not None:
        first = next(site for site in sites if site.scaled)
        known["inv_freq"] = list(first.rope.spectrum.inv_freq)
    return Variant(BASE, BASE, snapshot, config, beside, info=known)


# A context that yields a model; inside it the model computes as the variant says.
Computing = Callable[[Variant], AbstractContextManager[Any]]


@contextmanager
def applied(model: Any, variant: Variant) -> Iterator[Any]:
    """Make a loaded model compute as the variant says, inside the `with` block."""
    from ropext.models.patching import apply_config, unpatch
    from ropext.models.patching.rounding import cache_rounded

    with ExitStack() as stack:
        if variant.adapter is None and hasattr(model, "disable_adapter"):
            stack.enter_context(model.disable_adapter())
        if variant.config is not None:
            apply_config(model, variant.config, variant.beside)
            stack.callback(unpatch, model)
        if variant.cache is not None:
            base = model.get_base_model() if hasattr(model, "get_base_model") else model
            stack.enter_context(cache_rounded(base, variant.cache))
        yield model


@dataclass(frozen=True)
class ModelReach:
    """The lengths that a model reads; unless `stops` is set it reads texts of any length, well or
    badly."""

    context: int  # tokens that it was trained on
    limit: int  # the longest length in its config
    masked: bool = False  # it predicts masked tokens, while others predict the next
    # Stock transformers reads no more than the length in its config (as for an MPT) or the rows
    # of its table.
    stops: bool = False
    has_table: bool = False  # each position is a row of a table

    def base_of(self, extended: Snapshot, record: Record) -> Variant | None:
        """Return the base: the model before its recorded extension, with weights that nothing
        trained since.

        Its table has the old rows; return None if not all of them were kept.
        """
        if not self.has_table:
            return base_variant(extended, record.base["config"])
        from ropext.files.schemes.plan import growth_of  # late: no rotary model needs it

        rows = growth_of(extended, record).undone()
        if rows is None:
            return None
        return base_variant(extended, record.base["config"], InMemory(rows))


def reach_of(snapshot: Snapshot, stated: int | None) -> ModelReach:
    """Return the lengths at which a model reads documents, from its config; `stated` is the user's
    value of the trained context."""
    try:
        model = families.read(snapshot.config, context=stated)
    except UnsupportedModel:
        # A model without rotary embeddings can still be read.
        scheme = read_positions(snapshot.config)
        if scheme is not None and scheme.carried and scheme.kind not in READ:
            raise
        if scheme is not None and scheme.carried:
            return _carried(snapshot, scheme, stated)
        if stated is None and _stored_length(snapshot, scheme) is None:
            if scheme is None or scheme.kind != "alibi":
                raise
            raise UsageError(
                f"the config of {snapshot.name} states no length; give --context N, the tokens it "
                "was trained on"
            ) from None
        return _uncarried(snapshot, scheme, stated)
    longest = max(model.context, model.stated_context)
    return ModelReach(model.context, longest, check_masked_head(snapshot, model.masked_lm))


def _carried(snapshot: Snapshot, scheme: Positions, stated: int | None) -> ModelReach:
    """Return the lengths at which a model reads documents if its config or a table carries the
    position scheme."""
    has_table = bool(scheme.tensors)
    if has_table and stated is not None and stated > scheme.context:
        raise UsageError(
            f"--context {stated}: the table of {snapshot.name} has {scheme.context} rows; "
            "leave the option out"
        )
    return ModelReach(
        stated or scheme.context,
        scheme.context,
        predicts_masked_tokens(snapshot),
        has_table,
        has_table,
    )


def _stored_length(snapshot: Snapshot, scheme: Positions | None) -> int | None:
    """Return the length, in its config, at which a model without rotary embeddings reads documents;
    None if there is none."""
    if scheme is not None and scheme.context:
        return scheme.context
    for key in LENGTH_KEYS:
        length = snapshot.config.get(key)
        if isinstance(length, int):
            return length
    return None


def _uncarried(snapshot: Snapshot, scheme: Positions | None, stated: int | None) -> ModelReach:
    """Return the lengths at which a model reads documents if no config extends its position scheme,
    such as slopes."""
    stored = _stored_length(snapshot, scheme)
    context = stated or int(stored or 0)
    limit = int(stored or context)
    if scheme is not None and scheme.text_type == "mpt":
        return ModelReach(context, limit, stops=True)
    return ModelReach(context, max(context, limit))
