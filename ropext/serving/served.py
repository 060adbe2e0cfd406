"""Load the one model that the server answers with, extend it in memory, and test it."""

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from ropext.base.errors import InputError, UnsupportedModel
from ropext.base.jsontext import Json, JsonObject, digest
from ropext.base.narration import Say, no_messages
from ropext.evaluation.forward import HALF_TOLERANCE, TOLERANCE
from ropext.evaluation.variants import Variant, follows_length, reach_of
from ropext.files.checkpoint import Snapshot, open_snapshot
from ropext.files.checkpoint.adapter import read_lora
from ropext.files.checkpoint.digests import Digests
from ropext.files.checkpoint.provenance import Record, record_in
from ropext.files.checkpoint.snapshot import with_weights
from ropext.files.inspecting import plan_config
from ropext.models.adapter import add_adapter
from ropext.models.head import PROBE, probe_token_ids
from ropext.models.load import load_model, loading_of, memory_errors, silenced
from ropext.models.tokenizer import load_tokenizer
from ropext.options.evaluate import DocumentOptions
from ropext.options.extend import Extend
from ropext.planning import ExtensionPlan
from ropext.results import EXTENDED
from ropext.scaling.self_extend import FoldOptions

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedTokenizerFast


@dataclass(frozen=True)
class ServedModel:
    """A model in memory that `ropext serve` answers with, and the names that requests give it."""

    names: tuple[str, ...]
    model: Any  # of transformers, with `generate`
    tokenizer: "PreTrainedTokenizerFast"
    limit: int  # tokens of a prompt and its answer together
    continues: bool  # whether a cache can be cut and read on from
    piece: int  # tokens of a prompt that are read at once
    content: str = ""  # digest of the weights and of how they are extended
    method: str | None = None  # by which the model is extended, in memory or in its files
    factor: float | None = None

    @property
    def name(self) -> str:
        """Return the name of the served model in answers: the first one."""
        return self.names[0]

    @property
    def most_bytes(self) -> int:
        """Return the most bytes that a client's request may have; no prompt that fits has more."""
        return 64 * self.limit + (1 << 20)

    @property
    def vocabulary(self) -> int:
        """Return the number of rows of the served model's input embedding."""
        return int(self.model.get_input_embeddings().weight.shape[0])


@dataclass(frozen=True)
class ServeOptions:
    """The options of a served model: where it is and how to load it."""

    directory: str
    name: str
    extend: Extend | None = None  # in memory; None: the directory as it is
    adapter: str | None = None
    revision: str | None = None
    trust_remote_code: bool = False
    fold: FoldOptions | None = None  # of Self-Extend
    served_names: tuple[str, ...] = ()  # none: `name`


SHORTEST_PIECE = 2048  # tokens; between two pieces a client that has gone is noticed


def load_served_model(
    asked: ServeOptions, how: DocumentOptions, say: Say = no_messages
) -> ServedModel:
    """Load the causal language model and tokenizer that `ropext serve` answers with, and extend
    it in memory if the options ask for it."""
    snapshot = open_snapshot(asked.directory, revision=asked.revision)
    snapshot = replace(snapshot, name=asked.name)
    stated = None if asked.extend is None else asked.extend.context
    reach = reach_of(snapshot, stated)
    limit = reach.limit
    if reach.masked:
        raise UnsupportedModel(f"{asked.name} fills in masked tokens; serve needs a causal model")
    plan = None
    if asked.extend is not None:
        plan = plan_config(snapshot.config, asked.extend, asked.name, asked.fold)
        plan.raise_if_refused()
        limit = plan.target
        for warning in plan.warnings:
            say(f"warning: {warning}")
    if asked.adapter is not None:
        read_lora(asked.adapter)  # refused before a model is loaded
    tokenizer = load_tokenizer(snapshot, asked.trust_remote_code)
    if not tokenizer.is_fast:
        raise UnsupportedModel(f"serve needs a fast tokenizer, and that of {asked.name} is slow")
    said = f"out of memory while loading {asked.name}; give --dtype bfloat16, or a smaller model"
    weighted = with_weights(snapshot)
    trust = asked.trust_remote_code
    content = served_content_digest(weighted, plan, asked.adapter, how.dtype, trust)
    with memory_errors(said), silenced():
        say(f"loading {asked.name}")
        model = load_model(weighted, loading_of(how, trust))
        if asked.adapter is not None:
            model = add_adapter(model, asked.adapter)
        model = _extended(model, plan)
        config = snapshot.config if plan is None else plan.config
        continues = not follows_length(config, limit) and continues_after_cut(model)
    piece = SHORTEST_PIECE
    if plan is not None and plan.fold is not None:
        piece = max(piece, plan.fold.window)  # the folded attention is fastest in such blocks
    if not continues:
        say("this model's cache cannot be read on from: each question is read from its start")
    by = plan or _extension(snapshot)
    method: str | None = None
    factor: float | None = None
    if by is not None:
        method = by.method
        factor = by.target / by.context
    return ServedModel(
        names=asked.served_names or (asked.name,),
        model=model,
        tokenizer=tokenizer,
        limit=limit,
        continues=continues,
        piece=piece,
        content=content,
        method=method,
        factor=factor,
    )


def served_content_digest(
    snapshot: Snapshot,
    plan: ExtensionPlan | None,
    adapter: str | None,
    dtype: str,
    trust_remote_code: bool,
) -> str:
    """Return a digest of everything that decides the answers of a served model: weights, config,
    adapter, method and dtype."""
    model = Digests().of_checkpoint(snapshot, trust_remote_code)
    info: dict[str, Json] = {"dtype": dtype}
    if plan is not None:
        info |= {"config": plan.config, "fold": plan.fold and asdict(plan.fold)}
    served = Variant("served", EXTENDED, snapshot, adapter=adapter, info=info)
    return digest(served.content(model))


def _extension(snapshot: Snapshot) -> Record | None:
    """Return the record of how the served checkpoint was extended, if this ropext can read it."""
    try:
        return record_in(snapshot)
    except InputError:
        return None


def _extended(model: Any, plan: ExtensionPlan | None) -> Any:
    """Return the model to serve (with its LoRA layers inside), extended by the plan."""
    from ropext.models.patching import apply_plan, base_model

    if plan is not None:
        apply_plan(model, plan)
    return base_model(model).eval()


def continues_after_cut(model: Any) -> bool:
    """Return whether the served model's KV cache, cut in the middle and read on, gives the
    logits of one pass.

    Layers with a running state do not.
    """
    import torch

    ids = probe_token_ids(model)
    half = PROBE // 2
    other = torch.cat([ids[:, :half], ids[:, half:].flip(1)], 1)
    bound = TOLERANCE.get(str(model.dtype), HALF_TOLERANCE)
    with torch.no_grad():
        whole = model(input_ids=ids, use_cache=False).logits[0, -1].float()
        try:
            cache = new_cache(model)
            model.base_model(input_ids=other, past_key_values=cache, use_cache=True)
            cache.crop(half - PROBE)
            output = model(input_ids=ids[:, half:], past_key_values=cache, use_cache=True)
        except (TypeError, AttributeError, ValueError, NotImplementedError, RuntimeError):
            return False  # an architecture whose cache is of another kind
    difference = (output.logits[0, -1].float() - whole).abs().max()
    return bool(difference <= bound * whole.abs().max())


def new_cache(model: Any) -> "Cache":
    """Return an empty KV cache of the kind that the served model's layers need."""
    from transformers import DynamicCache

    return DynamicCache(config=model.config.get_text_config(decoder=True))


def model_card(served: ServedModel, name: str, created: int) -> JsonObject:
    """Return the entry of /v1/models for one of the served model's names."""
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "ropext",
        "max_model_len": served.limit,
        "method": served.method,
        "factor": served.factor,
        "chat": bool(served.tokenizer.chat_template),
        "meta": {"content_sha256": served.content},
    }
