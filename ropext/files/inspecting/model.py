"""Open a model by its small files: find its position scheme, and plan an extension."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ropext import families, scaling
from ropext.base import bundled
from ropext.base.errors import ConfigError, NotExpressible, UsageError
from ropext.base.inputs import model_name, read_text
from ropext.families import Model, stock
from ropext.families.schemes import read_positions
from ropext.files.checkpoint import Snapshot, open_snapshot, provenance
from ropext.files.checkpoint.provenance import Record, record_in
from ropext.files.checkpoint.snapshot import GENERATION_CONFIG, TOKENIZER_CONFIG
from ropext.files.checkpoint.tokenizer import NO_LIMIT
from ropext.options.door import public
from ropext.options.extend import Extend, parse_extend, resolve_target
from ropext.planning import (
    ExtensionPlan,
    Plan,
    far,
    make_folded_plan,
    make_plan,
    reached,
    untrained_results,
)
from ropext.planning.carrier import Carrier
from ropext.planning.methods import LENGTH_ONLY, Recommendation
from ropext.planning.plan import ASKED_UNTRAINED
from ropext.scaling import self_extend
from ropext.scaling.rope import RopeSite, Spectrum
from ropext.scaling.self_extend import FoldOptions

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from ropext.files.schemes.inspection import PositionFacts
    from ropext.options.memory import MemoryOptions
    from ropext.planning.memory import MemoryFit


def open_given(
    model: object, revision: str | None = None, *, before_patch: bool = False
) -> Snapshot:
    """Return the snapshot of a model by its name, or of a model or config in memory."""
    if isinstance(model, str | PathLike):
        return open_model(model, revision=revision)
    if revision is not None:
        raise UsageError(f"revision {revision} is of a hub id, and this model is in memory")
    from ropext.files.inspecting.held import in_memory_snapshot  # late: no command needs it

    return in_memory_snapshot(model, before_patch=before_patch)


def open_model(model: str | PathLike[str], *, revision: str | None = None) -> Snapshot:
    """Return the snapshot of a checkpoint or a GGUF file, as the name requires."""
    model = model_name(model)
    if bundled.find_gguf(model) is not None:
        from ropext.files.gguf import open_gguf  # late: a directory needs none of it

        return open_gguf(model, revision=revision)
    return open_snapshot(model, revision=revision)


@contextmanager
def naming_config(snapshot: Snapshot) -> Iterator[None]:
    """Add the name of an opened checkpoint's config to errors about its positions."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(error.sentence, snapshot.config_name) from None


@dataclass(frozen=True)
class Inspection:
    """The facts about a model in its config files alone."""

    name: str
    carrier: Carrier
    target: int
    limits: dict[str, Any]
    extended: str = ""  # the method, as ropext.json states it

    @property
    def model(self) -> Model:
        """The model that its config describes."""
        return self.carrier.model

    @property
    def main(self) -> RopeSite:
        """The embedding that an extension would scale."""
        return self.model.scaled_sites[0]

    def __repr__(self) -> str:
        """Return the model's name and context, for a prompt of Python."""
        return f"<Inspection of {self.name}: {self.model.context:,} tokens>"

    def spectra(self) -> dict[str, Spectrum]:
        """Return the spectra that three well-known methods would give it, for the picture."""
        rope = self.main.rope
        known = scaling.well_known(self.main.rope, self.target)
        return {name: scaling.compose(rope, each, self.target) for name, each in known.items()}

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object that `ropext inspect --json` prints for a rotary model."""
        sites = []
        for site in self.model.sites:
            spectrum = site.rope.spectrum
            sites.append(
                {
                    "label": site.label,
                    "rope": asdict(site.rope),
                    "params": site.params,
                    "layers": site.layers,
                    "scaled": site.scaled,
                    "inv_freq": spectrum.inv_freq,
                    "wavelengths": spectrum.wavelengths,
                }
            )
        facts = asdict(self.model) | {"sites": sites}
        del facts["stock_sites"]  # the notes list the differences
        del facts["described"]
        del facts["conflicts"]  # `read` has raised them
        facts["container"] = self.carrier.architecture
        kv = {"kv_bytes_per_token": self.model.kv_bytes_per_token}
        head = {"model": self.name, "target": self.target, "extended": self.extended or None}
        return head | facts | kv | {"limits": self.limits}


@public()
def inspect(
    model: "str | Path | PreTrainedModel | PretrainedConfig | Mapping[str, Any]",
    *,
    factor: float | None = None,
    target: int | None = None,
    context: int | None = None,
    original_context: int | None = None,
    revision: str | None = None,
) -> "Inspection | PositionFacts":
    """Return the position scheme of a model, and the facts that follow from it.

    A model in memory, or a config, is read by its config, as it computes now.
    """
    if factor is None and target is None:
        factor = 2.0  # from 4 on an untrained plan gets a warning
    request = Extend(
        factor=factor, target=target, context=context, original_context=original_context
    )
    snapshot = open_given(model, revision)
    if (positions := read_positions(snapshot.config)) is not None:
        from ropext.files.schemes.inspection import inspect_scheme  # late: no rotary model needs it

        return inspect_scheme(snapshot, positions, snapshot.name, _limits(snapshot))
    with naming_config(snapshot):
        read = snapshot.read(context, original_context)
    carrier = snapshot.carries(read)
    record = provenance.record_in(snapshot)
    done = provenance.history(record) if record else ""
    wanted = resolve_target(request, read.context)
    return Inspection(snapshot.name, carrier, wanted, _limits(snapshot), done)


def _limits(snapshot: Snapshot) -> dict[str, Any]:
    """Return further limits of a sequence outside the rotary embedding, and the quantisation, which
    decides how the model is extended."""
    files = snapshot.length_files
    longest = files.get(TOKENIZER_CONFIG, {}).get("model_max_length")
    return {
        "tokenizer": longest if isinstance(longest, int) and longest < NO_LIMIT else None,
        "generation": files.get(GENERATION_CONFIG, {}).get("max_length"),
        "quantised": snapshot.quantisation,
    }


@public(Extend)
def plan(
    model: "str | Path | PreTrainedModel | PretrainedConfig | Mapping[str, Any]",
    *,
    revision: str | None = None,
    **options: Any,
) -> ExtensionPlan:
    """Return the changes that `extend` would make; for a model in memory, those of `patch`.

    A model in memory, or a config, is read by its config, from before `patch`.
    """
    snapshot = open_given(model, revision, before_patch=True)
    return planned(snapshot, snapshot.name, parse_extend(options, read_text))


def planned(snapshot: Snapshot, name: str, request: Extend) -> ExtensionPlan:
    """Return the plan for an opened checkpoint or GGUF file, by its position scheme."""
    if read_positions(snapshot.config) is not None:
        from ropext.files.schemes.plan import make_table_plan  # late: no rotary model needs it

        made = make_table_plan(snapshot.config, request, name)
        record = record_in(snapshot)
        if record is None:
            return made
        again = f"[again] this extends it again, after {provenance.history(record)}"
        return replace(made, warnings=(*made.warnings, again))
    return with_untrained_results(plan_of(snapshot, request, name))


def with_untrained_results(made: Plan) -> Plan:
    """Add to the plan of an inspected checkpoint or GGUF file the measured results of such a
    scaling if no training follows. They are a fact, or from 4 times the context on the warning
    [far]. The plan recommends nothing if `extend` refuses it."""
    warning = far(made)
    if not warning:
        return replace(made, measured=untrained_results(made))
    made = replace(made, warnings=(*made.warnings, warning))
    factor = made.untrained_factor
    if factor < ASKED_UNTRAINED or made.recipe.untrained:
        return made
    why = f"extend refuses {factor:g}× the context without training (--untrained writes it anyway)"
    return replace(made, advised=Recommendation("none", False, why))


def plan_config(
    config: Mapping[str, Any],
    recipe: Extend,
    name: str = "MODEL",
    fold: FoldOptions | None = None,
) -> ExtensionPlan:
    """Inspect the config of a model in memory like a checkpoint's config.json, and return the plan
    by its position scheme."""
    if recipe.method == self_extend.NAME:
        return make_folded_plan(config, recipe, name, fold or FoldOptions())
    if fold is not None:
        raise UsageError(f"window, group and literal are of method {self_extend.NAME}")
    stock.describe_unknown_types(config)
    if read_positions(dict(config)) is None:
        return make_plan(config, recipe, name)
    from ropext.files.schemes.plan import make_table_plan  # late: no rotary model needs it

    return make_table_plan(config, recipe, name, in_memory=True)


def plan_of(snapshot: Snapshot, request: Extend, name: str) -> Plan:
    """Return the plan for the opened checkpoint or GGUF file of a rotary model. Lengths that
    ropext's own config omits come from its record."""
    if request.like is not None:
        from ropext.files.gguf import request_like  # late: a directory needs none of it

        request = request_like(snapshot, request)
    with naming_config(snapshot):
        record = record_in(snapshot)
        if record is not None and request.from_original:
            made = _from_record(snapshot, record, request, name)
        else:
            is_named = request.context is not None
            silent = not is_named and request.original_context is None
            if silent and record and snapshot.as_read().asks_original:
                request = request.changed(context=record.target)
            made = make_plan(snapshot.config, request, name, snapshot.carries, snapshot.read)
            again = _again(record, made.model, request)
            made = replace(made, warnings=(*made.warnings, *again))
            if record is not None and not is_named:
                made = _untrained_since(snapshot, record, request, made)
    if snapshot.quantisation is not None and made.carrier.in_transformers:
        made = replace(made, training="train the checkpoint that it was quantised from")
    return replace(made, warnings=(*made.warnings, *snapshot.remarks()))


def _untrained_since(snapshot: Snapshot, record: Record, request: Extend, made: Plan) -> Plan:
    """Inspect the ropext.json of an opened checkpoint, and return its plan with the facts about its
    training. If nothing was trained since the extension, another one begins from the original."""
    trained = _fewer_trained(record, made)
    if trained is None:
        return made
    if made.trained is not None:
        words = f"the {trained:,} tokens that its base was trained on (ropext.json)"
        made = replace(made, trained=trained, trained_on=words)
    if request.again or request.like or request.length_only:
        return made
    if provenance.TRAINED_ON in record.more:  # --from-original would undo the trained length
        return made
    anew = _in_one_step(snapshot, record, request, made)
    why = "the record says that nothing was trained since the extension"
    advice = Recommendation(anew.method, True, why)
    return replace(made, advised=advice, in_one_step=anew.command)


def _in_one_step(snapshot: Snapshot, record: Record, request: Extend, made: Plan) -> Plan:
    """Inspect the ropext.json of an opened checkpoint, and return the plan that reaches as far in
    one step from before its extensions. It has the request's own method and options if these can do
    it."""
    wish = request.changed(from_original=True, factor=None, target=made.target)
    try:
        anew = _from_record(snapshot, record, wish, made.name)
    except NotExpressible:
        wish = Extend(from_original=True, target=made.target)
        anew = _from_record(snapshot, record, wish, made.name)
    return replace(anew, recipe=wish)  # as a user types it, without the context of the record


def _fewer_trained(record: Record, made: Plan) -> int | None:
    """Inspect the ropext.json of an opened checkpoint, and return how many tokens its weights were
    trained on. Return None unless the model reads more."""
    # A model that was saved from memory may have been trained there.
    if any(map(record.more.get, (*provenance.TRAININGS, provenance.SAVED))):
        return None
    links = provenance.lineage(record)
    link = links[-1]
    if provenance.TRAINED_ON in record.more:
        link = links[0]  # something before it was trained
    if link["method"] == LENGTH_ONLY:
        trained = link["target"]  # whoever wrote it says that the model reads so far
    else:
        trained = max(link["context"], families.as_read(link["base"]["config"]).context)
    return trained if trained < made.context else None


def _from_record(snapshot: Snapshot, record: Record, request: Extend, name: str) -> Plan:
    """Inspect the ropext.json of an opened checkpoint, and return the plan from the base before
    every extension in it."""
    links = provenance.lineage(record)
    first = links[-1]
    origin = first["base"]["config"]
    before = snapshot.config
    for link in links:
        before = provenance.undone(before, provenance.edits_of(link))
    if request.context is None and request.original_context is None:
        key = "original_context" if first["recipe"].get("from_original") else "context"
        known = families.as_read(origin)
        if key == "context" or known.asks_original:
            request = request.changed(**{key: first["context"]})
    read = partial(families.read, origin)
    made = make_plan(before, request, name, snapshot.carries, read)
    said = f"ropext.json: the original is {first['base']['name']}, {made.context:,} tokens"
    warnings = [f"[original] {said} with theta {made.main.rope.theta:,g}", *made.warnings]
    if made.target <= record.target:
        warnings.append(reached(made.target, record.target))
    edits = made.carrier.edits(made.main, made.target, snapshot.config, made.config)
    return replace(made, edits=edits, warnings=tuple(warnings))


def _again(record: Record | None, model: Model, request: Extend) -> Iterator[str]:
    """Inspect the ropext.json or config.json of an opened checkpoint, and yield the warning that it
    was scaled before, or may have been."""
    rope = model.scaled_sites[0].rope
    kind = model.scaled_sites[0].params["rope_type"]
    first = f"{kind} (its config)" if rope.is_scaled else ""
    first = provenance.history(record) if record else first
    if first and not request.from_original:
        yield (
            f"[again] this scales the model again, after {first}; --from-original starts before "
            "that"
        )
    elif request.from_original and not first and kind == "default":
        yield (
            f"[original] --from-original: the config declares no scaling and there is no "
            f"ropext.json; theta {rope.theta:,g} may have been raised already, and its original is "
            "not known"
        )


def memory_fit(
    model: str | Path, options: "MemoryOptions", *, length: int | None = None, revision: str | None
) -> "MemoryFit":
    """Return which lengths of a model fit into a memory, counted from its config and weight files.
    Check `length`, or the model's context."""
    from ropext.options.memory import memory_bytes  # late: only `plan --memory` needs these
    from ropext.planning.memory import fit_memory

    if options.memory is None:
        raise UsageError("--memory SIZE is needed, e.g. --memory 12G")
    snapshot = open_model(model, revision=revision)
    if read_positions(snapshot.config) is not None:
        raise UsageError(f"--memory knows models that rotate, and {model} does not")
    with naming_config(snapshot):
        read = snapshot.as_read()
    memory = memory_bytes(options.memory)
    carrier = snapshot.carries(read)
    return fit_memory(carrier, length or read.context, memory, snapshot.weight_bytes, options)
