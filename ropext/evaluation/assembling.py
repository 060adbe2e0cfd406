"""Compute the numbers of an evaluation from the losses and answers of its models."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from ropext.base.jsontext import read_values, values_json
from ropext.evaluation.divergence import against_key
from ropext.evaluation.variants import Variant
from ropext.evaluation.workload import Workload
from ropext.results.measurement import MeasuredModel, Measurement
from ropext.results.numbers import EvaluationFacts, ModelNumbers, ModelSource, RulerTasks
from ropext.results.overlap import Overlap, marked_name
from ropext.results.perplexity import OctaveLoss, loss_by_position, truncation_verdicts
from ropext.results.retrieval import ItemScore, heat_map_cells, ruler_tasks, unmeasurable_tasks


def assembled(
    done: Measurement,
    facts: EvaluationFacts,
    reads: Workload,
    variants: Iterable[Variant],
    overlaps: Mapping[str, Overlap],
    stores: Mapping[str, str],
) -> Measurement:
    """Return the whole measurement of an evaluation: each model with its source and its numbers.

    The numbers leave out the answers to tasks that cannot be measured, and depend only on the
    units' files. `overlaps` and `stores` are by label; `stores` has the names of the stores (empty
    if nothing is kept).
    """
    models = dict[str, MeasuredModel]()
    items = dict[str, tuple[ItemScore, ...]]()
    for label, model in done.models.items():
        models[label] = replace(model, overlap=overlaps.get(label))
        items[label] = model.items
    left_out = unmeasurable_tasks(items, reads.frame.context)
    measurable = replace(done, models=models).without(left_out)
    finished = dict(models)
    for variant in variants:
        label = variant.label
        finished[label] = replace(
            models[label],
            source=_model_source(reads, variant, stores[label], done.documents is not None),
            numbers=_model_numbers(measurable, variant),
        )
    facts = replace(
        facts,
        warnings=(*facts.warnings, *left_out.values()),
        not_measurable=left_out,
        ruler=_ruler(measurable.models.values()),
    )
    return replace(done, models=finished, facts=facts)


def _ruler(models: Iterable[MeasuredModel]) -> RulerTasks | None:
    """Gather, after a measurement's forward passes, the RULER tasks whose questions its models
    answered, over which `ruler@C` is the mean; None if there are none."""
    names = dict[str, None]()
    for model in models:
        for item in model.items:
            names[f"{item.task}@{item.length}"] = None
    tasks, partly = ruler_tasks(names)
    if not tasks:
        return None
    return RulerTasks(tuple(tasks), tuple(partly))


def _model_source(
    reads: Workload, variant: Variant, store: str, has_documents: bool
) -> ModelSource:
    """Return the origin of a model's numbers for results.json: its checkpoint, adapter, store and
    passes."""
    info = dict(variant.info)
    info.pop("target", None)  # it has its own field
    passes = dict[str, int]()
    if has_documents:
        passes = variant.regimes(reads.frame)
    against = ""
    if has_documents and reads.against is not None and not variant.reads_short:
        against = against_key(reads.frame, reads.against)
    return ModelSource(
        model=variant.snapshot.name,
        renamed=variant.renamed,
        target=variant.target,
        adapter=variant.adapter,
        info=info,
        store=store,
        passes=passes,
        against=against,
    )


def _model_numbers(measured: Measurement, variant: Variant) -> ModelNumbers:
    """Gather all numbers of one variant of a measurement from its losses and answers, after its
    forward passes over the documents and questions."""
    label = variant.label
    frame = measured.frame
    model = measured.models[label]
    values = measured.values(label)
    positions = list[OctaveLoss]()
    if model.reading is not None:
        positions = loss_by_position(frame, model.reading, measured.base(label))
    lines = list[str]()
    if not variant.reads_short:
        lines = truncation_verdicts(frame, values, marked_name(label, model.mark()))
    cells = heat_map_cells(model.items)
    numbers = ModelNumbers(values, tuple(positions), cells, verdicts=tuple(lines))
    # JSON has no infinity: reports show the same whether a run was read back or has just ended.
    return read_values(ModelNumbers, values_json(numbers), label)
