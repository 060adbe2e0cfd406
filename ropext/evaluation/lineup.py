"""Choose the models to compare: the base through its short window, and models that read the long
one."""

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ropext import families
from ropext.base.errors import RopextError, UnsupportedModel, UsageError
from ropext.base.jsontext import Json
from ropext.evaluation.corpus import Corpus
from ropext.evaluation.variants import (
    InMemoryModel,
    ModelReach,
    Variant,
    base_variant,
    in_memory_model_of,
    origin_of,
    reach_of,
    record_of_weights,
    trained_on,
)
from ropext.files.checkpoint import Snapshot, open_snapshot, with_weights
from ropext.files.checkpoint.adapter import read_lora
from ropext.files.checkpoint.digests import Digests
from ropext.files.checkpoint.provenance import (
    READ_FROM,
    SAVED,
    Record,
    read_record,
    record_of_config,
    scaling_in_words,
)
from ropext.files.inspecting import plan_config
from ropext.options.evaluate import Evaluate
from ropext.options.extend import Extend
from ropext.options.fields import FINETUNE, FIT
from ropext.planning import ExtensionPlan
from ropext.results import BASE, CONTROL, EXTENDED, FITTED, TUNED, UNTOUCHED
from ropext.results.measurement import check_labels
from ropext.results.overlap import Overlap, overlap_of_documents
from ropext.scaling import self_extend
from ropext.scaling.rope import Spectrum

KEEP_LABEL = (BASE, UNTOUCHED, CONTROL)
LABEL = re.compile(r"(?=\S)[^:/\\<>=\x00-\x1f]{1,60}(?<=\S)")  # gates and RUN:VARIANT name it
LATER = {FIT: FITTED, FINETUNE: TUNED}  # section of ropext.json -> kind of the checkpoint
BESIDE = "base"  # the extended, untuned checkpoint inside of a tuned one


@dataclass(frozen=True)
class Lineup:
    """All variants, with the trained context that they share and the warnings about them."""

    variants: tuple[Variant, ...]
    context: int
    limit: int  # the longest context for which a variant was made
    # most tokens that every variant can read (a position table's rows); 0 = any number
    most: int = 0
    warnings: tuple[str, ...] = ()
    masked: bool = False  # they predict masked tokens, while others predict the next

    @property
    def models(self) -> dict[str, Variant]:
        """Return the variants of a measurement by their labels."""
        return {variant.label: variant for variant in self.variants}

    @property
    def held(self) -> InMemoryModel | None:
        """Return the model in memory that is measured; None if ropext loads the models itself."""
        return in_memory_model_of(self.variants[-1].snapshot)

    def contents(self, digests: Digests, trust_remote_code: bool) -> dict[str, dict[str, Json]]:
        """Return the identity of each variant, by its name; each model is hashed once."""
        models: dict[Path, dict[str, Json]] = {}
        contents = {}
        for variant in self.variants:
            place = variant.snapshot.directory
            held = in_memory_model_of(variant.snapshot)
            if place not in models:
                if held is None:
                    models[place] = digests.of_checkpoint(variant.snapshot, trust_remote_code)
                else:
                    models[place] = held.identity()
            contents[variant.name] = variant.content(models[place])
        return contents

    def labelled(self, labels: Mapping[str, str]) -> "Lineup":
        """Return the lineup under the user's labels. Base, untouched and control keep theirs:
        tables and gates know them."""
        if not labels:
            return self
        check_labels(labels, [variant.label for variant in self.variants])
        for name, label in labels.items():
            if name in KEEP_LABEL:
                raise UsageError(f"labels: {name!r} keeps its name; label the other models")
            if not LABEL.fullmatch(label):
                raise UsageError(
                    f"labels: {label[:60]!r} cannot name a model: give 1 to 60 characters without "
                    ": / \\ < > = and without spaces at the ends"
                )
        variants = list[Variant]()
        for variant in self.variants:
            label = labels.get(variant.label, variant.label)
            unrounded = labels.get(variant.unrounded, variant.unrounded)
            renamed = variant.label if label != variant.label else ""
            variants.append(replace(variant, label=label, unrounded=unrounded, renamed=renamed))
        twice = [one.label for one in variants if [v.label for v in variants].count(one.label) > 1]
        if twice:
            raise UsageError(f"labels: two models are called {twice[0]!r}")
        return replace(self, variants=tuple(variants))


def line_up(model: str, revision: str | None, options: Evaluate, name: str = "") -> Lineup:
    """Return the lineup of `ropext eval`: the base and the variants that it measures.

    `name` is the user's name for the model; it may be another file, from which ropext built the
    directory `model`.
    """
    snapshot = open_snapshot(model, revision=revision)
    if name not in ("", model):
        snapshot = replace(snapshot, name=name, hub_id=None)
    return line_up_snapshot(snapshot, options)


def line_up_snapshot(snapshot: Snapshot, options: Evaluate) -> Lineup:
    """Return the lineup of one model: its base, and the variants that the options name."""
    reach = reach_of(snapshot, options.context)
    if options.method:
        return _line_up_methods(snapshot, options, reach)
    limit = reach.limit
    context = reach.context
    record = record_of_weights(snapshot)
    if reach.has_table and options.context is not None:
        record = None  # the user says that all its rows were trained
    if record is None and options.context is None:
        record = _record_of_scaled_config(snapshot, options)
    if record is not None and options.context is None:
        context = record.context
    base, context, warning = _base_of_lineup(
        snapshot, record, options, replace(reach, context=context)
    )
    variants = [] if base is None else [base]
    if record is not None or limit > context:
        other = base is not None and (base.config or base.snapshot is not snapshot)
        if base is not None and other and not reach.has_table:
            variants.append(replace(base, label=UNTOUCHED, kind=UNTOUCHED, info={}))
        # The last step names the label, as for the checkpoints of `ropext run`.
        done = [word for key, word in LATER.items() if record and record.more.get(key)]
        label = done[-1] if done else EXTENDED
        variant = Variant(label, EXTENDED, snapshot, target=limit, info=_recorded_extension(record))
    else:
        variant = Variant(UNTOUCHED, UNTOUCHED, snapshot)
    variants += _each_way(variant, options)
    warnings = (warning,) if warning else ()
    most = limit if reach.stops else 0
    return Lineup(tuple(variants), context, limit, most, warnings, reach.masked)


def line_up_patched(
    snapshot: Snapshot, plan: ExtensionPlan, original: dict[str, Json], options: Evaluate
) -> Lineup:
    """Return the lineup of a model that was patched in memory: the model as it computes now, and
    its base.

    The base is the model that the options name; without one it is the model by the config that it
    had before.
    """
    context = options.context or plan.context
    reach = reach_of(snapshot, None)
    base = base_variant(snapshot, original)
    if options.base is not None:
        named = open_snapshot(options.base)
        base = base_variant(named)
        context = reach_of(named, options.context).context
    variants = [base]
    if not reach.has_table:
        variants.append(replace(base, label=UNTOUCHED, kind=UNTOUCHED, info={}))
    spectra = [site.wanted for site in plan.sites]
    scaled = [site.wanted for site in plan.sites if site.scaled]
    info = _extension_facts(plan.method, plan.target / plan.context, plan.target, spectra, scaled)
    if plan.fold is not None:
        info |= plan.knobs
    extended = Variant(EXTENDED, EXTENDED, snapshot, target=plan.target, info=info)
    variants += _each_way(extended, options)
    most = plan.target if reach.stops else 0
    return Lineup(tuple(variants), context, plan.target, most, masked=reach.masked)


def line_up_checkpoints(
    base: Snapshot,
    checkpoints: Mapping[str, Snapshot],
    *,
    context: int,
    limit: int,
    contents: Mapping[str, str],
    control: Path | None = None,
) -> Lineup:
    """Return the lineup of a base and of checkpoints made from it, by their labels.

    It also has the base beyond its window, and the control if `contents` name one; the control's
    adapter is in `control`. `contents` are digests of all bytes by label (`base` has the base's
    digest), because weights that were trained again have the same headers as before.
    """

    def content(label: str) -> dict[str, Json]:
        """Return the digest of a checkpoint's bytes, as a fact of its variant."""
        return {"content_sha256": contents[label]}

    variants = [
        base_variant(base, info=content(BASE)),
        Variant(UNTOUCHED, UNTOUCHED, base, info=content(BASE)),
    ]
    if CONTROL in contents:
        adapter = None if control is None else str(control)
        variants.append(Variant(CONTROL, CONTROL, base, adapter=adapter, info=content(CONTROL)))
    for label, snapshot in checkpoints.items():
        record = read_record(snapshot.directory)
        info = _recorded_extension(record) | content(label)
        target = record.target if record else limit
        variants.append(Variant(label, EXTENDED, snapshot, target=target, info=info))
    return Lineup(tuple(variants), context, limit)


def overlaps_of(
    lineup: Lineup, corpus: Corpus | None, questions: bool
) -> tuple[dict[str, Overlap], list[str]]:
    """Return the evaluation documents that each variant was trained on, by its label, and the
    warnings about them.

    `questions`: the haystack of the questions is made of these documents, too.
    """
    overlaps = dict[str, Overlap]()
    labels = dict[str, list[str]]()
    for variant in lineup.variants:
        known = trained_on(variant)
        if known is None or corpus is None:
            continue
        found = overlap_of_documents(known, [document.known_by for document in corpus.documents])
        if found is None:
            continue
        overlaps[variant.label] = replace(found, questions=questions)
        if found.sentence:
            labels.setdefault(found.sentence, []).append(variant.label)
    warnings = list[str]()
    for sentence, names in labels.items():
        warnings.append(f"[seen] {', '.join(names)}: {sentence}")
    return overlaps, warnings


def fetched(lineup: Lineup) -> Lineup:
    """Return the lineup with every weight file on the disk; files of hub models are fetched."""
    # By directory: two revisions of one model have the same name.
    whole = {variant.snapshot.directory: variant.snapshot for variant in lineup.variants}
    whole = {directory: with_weights(snapshot) for directory, snapshot in whole.items()}
    variants = (replace(one, snapshot=whole[one.snapshot.directory]) for one in lineup.variants)
    return replace(lineup, variants=tuple(variants))


def _recorded_extension(record: Record | None) -> dict[str, Json]:
    """Return the facts about a recorded extension, as results hold them; none without a record."""
    if record is None:
        return {}
    spectra = [site.wanted for site in record.sites]
    scaled = [site.wanted for site in record.sites if site.scaled]
    return _extension_facts(
        record.method, record.target / record.context, record.target, spectra, scaled
    )


def _extension_facts(
    method: str, factor: float, target: int, spectra: list[Spectrum], scaled: list[Spectrum]
) -> dict[str, Json]:
    """Return the facts about the extension of a variant that a measurement lines up, as results
    hold them."""
    return {
        "method": method,
        "factor": factor,
        "target": target,
        "spectrum_sha256": [spectrum.digest() for spectrum in spectra],
        "inv_freq": list(scaled[0].inv_freq) if scaled else None,
    }


def _each_way(variant: Variant, options: Evaluate) -> list[Variant]:
    """Return a variant in every way that the options name: without and with the adapter, each also
    with every rounded cache."""
    read = list[Variant]()
    plain = [variant]
    if options.adapter is not None:
        read_lora(options.adapter)  # raises an error for damaged files before a model is loaded
        label = f"{variant.label}+adapter"
        plain.append(replace(variant, label=label, kind=EXTENDED, adapter=options.adapter))
    for one in plain:
        read.append(one)
        for cache in options.stored_caches:
            label = f"{one.label}+kv-{cache.name}"
            read.append(replace(one, label=label, cache=cache, unrounded=one.label))
    return read


def _line_up_methods(snapshot: Snapshot, options: Evaluate, reach: ModelReach) -> Lineup:
    """Return the lineup of a grid of methods and factors, with base and untouched, as papers print
    it."""
    variants = [base_variant(snapshot)]
    if not reach.has_table:
        variants.append(Variant(UNTOUCHED, UNTOUCHED, snapshot))
    warnings = list[str]()
    plans = list[ExtensionPlan]()
    for method, far in itertools.product(options.method, options.factor or (None,)):
        recipe = Extend(method=method, factor=far, target=options.target, context=options.context)
        fold = options.fold if method == self_extend.NAME else None
        plan = plan_config(snapshot.config, recipe, snapshot.name, fold)
        plans.append(plan)
        named = method.replace(":", ".") if fold is None else fold.name  # the label names a folder
        factor = far or plan.factor
        wanted = [site.wanted for site in plan.sites]
        scaled = [site.wanted for site in plan.sites if site.scaled] or wanted
        info = _extension_facts(method, factor, plan.target, wanted, scaled)
        variant = Variant(
            f"{named}-{factor:g}x",
            EXTENDED,
            snapshot,
            config=plan.config,
            beside=plan.in_memory,
            target=plan.target,
            info=info | (plan.knobs if plan.fold is not None else {}),
        )
        variants += _each_way(variant, options)
        warnings += [f"{variant.label}: {text}" for text in plan.warnings]
    furthest = max(plans, key=lambda plan: plan.target)
    limit = max(reach.context, furthest.target)
    if reach.has_table:  # the longest length that all of them read
        limit = min(plan.target for plan in plans)
    elif reach.stops:  # all but the base have the config of the longest extension
        for number, variant in enumerate(variants[1:], 1):
            variants[number] = replace(variant, config=furthest.config)
    said = tuple(dict.fromkeys(warnings))
    most = limit if reach.stops else 0
    return Lineup(tuple(variants), reach.context, limit, most, said, reach.masked)


def _record_of_scaled_config(snapshot: Snapshot, options: Evaluate) -> Record | None:
    """Return the record of a scaling that only the config of a model names; None if there is none.

    Raise UsageError if the config does not state the original length.
    """
    try:
        model = families.read(snapshot.config)
    except UnsupportedModel:
        return None  # no rotary embeddings
    if model.asks_original and options.base is None:
        raise UsageError(
            f"{snapshot.name} has no ropext.json, and its config is scaled without stating the "
            "original length; name the unextended model with --base MODEL, or the length that it "
            "was trained on with --context N"
        )
    return record_of_config(snapshot)


def _base_of_lineup(
    snapshot: Snapshot, record: Record | None, options: Evaluate, reach: ModelReach
) -> tuple[Variant | None, int, str]:
    """Return the base, its context, and a warning if there is no base."""
    context = reach.context
    if options.base is not None:
        named = open_snapshot(options.base)
        return base_variant(named), reach_of(named, options.context).context, ""
    if record is None:
        return base_variant(snapshot), context, ""
    if record.more.get(READ_FROM):
        warning = (
            f"[no-base] {snapshot.name} is {scaling_in_words(families.read(snapshot.config))}, so "
            "the length that its weights were trained on is unknown; compare with the unextended "
            f"model by --base MODEL, or say by --context {record.target} that it was this one"
        )
        return None, context, warning
    untrained = _untrained_checkpoint(snapshot, record)
    before = None
    if untrained is not None:
        before = reach.base_of(untrained, record)
    if before is not None:
        return before, context, ""
    hub_id = record.base.get("hub_id")
    try:
        revision = str(record.base["commit"]) if hub_id and record.base.get("commit") else None
        named = open_snapshot(str(hub_id or record.base.get("name") or ""), revision=revision)
    except RopextError as error:
        return None, context, f"no base to compare with ({error}); name it with --base MODEL"
    return base_variant(named), context, ""


def _untrained_checkpoint(snapshot: Snapshot, record: Record) -> Snapshot | None:
    """Return the checkpoint that a measurement reads as its base variant, with the weights from
    before the extension; None if there is none.

    It is the snapshot itself if nothing was trained (a fit changes no weight), otherwise the copy
    that a fine-tuning keeps in its result.
    """
    if record.more.get(SAVED):
        return None
    if not record.more.get(FINETUNE):
        return snapshot
    beside = origin_of(snapshot).directory / BESIDE
    return open_snapshot(str(beside)) if (beside / "config.json").is_file() else None
